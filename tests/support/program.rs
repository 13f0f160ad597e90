//! The binaries as a user runs them, and what they leave behind.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub const ORKPACK: &str = env!("CARGO_BIN_EXE_orkpack");
pub const ORK_RUN: &str = env!("CARGO_BIN_EXE_ork-run");

/// A program in a folder, with nothing to read.
pub fn command<W: AsRef<OsStr>>(binary: &str, folder: &Path, words: &[W]) -> Command {
    let mut command = Command::new(binary);
    command.current_dir(folder).args(words).stdin(Stdio::null());
    command
}

/// The same behind a line of shell, such as a limit: `ulimit -f 100`.
pub fn behind(shell: &str, binary: &str, folder: &Path, words: &[&str]) -> Command {
    let line = format!("{shell}; exec \"$0\" \"$@\"");
    command("sh", folder, &[&["-c", &line, binary], words].concat())
}

pub fn run<W: AsRef<OsStr>>(binary: &str, folder: &Path, words: &[W]) -> Output {
    command(binary, folder, words).output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// What a command that did it wrote to stdout.
#[track_caller]
pub fn done(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(output), stderr(output));
    stdout(output)
}

/// The error of a command that could not do it: one line, and perhaps a hint.
#[track_caller]
pub fn refused(output: &Output) -> String {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && !said.contains("panicked"), "{said}");
    errors[0].to_owned()
}

/// The names in a folder, sorted; what is no UTF-8 in them replaced.
pub fn names(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

/// Looks again and again until something is so. Only a test that fails waits for the end of it.
#[track_caller]
pub fn wait_until(mut is_so: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it did not come to be");
}
