//! What people do: press Ctrl-C, pipe into `head`, close what is written to, look at a terminal.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal};

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{TOKENS, calibrate_beside, folder, model_in};
use crate::support::program::{ORK_RUN, ORKPACK, behind, command, names, run, stderr, wait_until};
use crate::support::typist::Typist;

/// A model, its routing, and its pack.
fn packed(folder: &Path) {
    let spec = MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() };
    calibrate_beside(&model_in(folder, &tiny_moe(&spec)), &TOKENS);
    assert!(run(ORKPACK, folder, &["convert", "model.gguf", "--objective", "hits"]).status.success());
}

/// Every command that writes to stdout.
const COMMANDS: &[(&str, &[&str])] = &[
    (ORKPACK, &["inspect", "model.gguf"]),
    (ORKPACK, &["inspect", "model.gguf", "--tensors", "--json"]),
    (ORKPACK, &["inspect", "."]),
    (ORKPACK, &["plan", "model.gguf"]),
    (ORKPACK, &["plan", "model.gguf", "--json"]),
    (ORKPACK, &["verify", "model.orkpack"]),
    (ORKPACK, &["verify", "model.orkpack", "--json"]),
    (ORKPACK, &["convert", "model.gguf", "--dry-run", "--json"]),
    (ORKPACK, &["merge", "model.routing.json", "model.routing.json", "-o", "merged", "--force", "--json"]),
    (ORKPACK, &["completions", "bash"]),
    (ORKPACK, &["--help"]),
    (ORKPACK, &["convert", "--help"]),
    (ORK_RUN, &["--version"]),
    (ORK_RUN, &["model.orkpack", "--tokens", "1,2", "-n", "4"]),
    (ORK_RUN, &["model.orkpack", "-p", "Hello", "-n", "4", "--json", "--device", "sim"]),
];

#[test]
fn case_g12_nobody_who_reads_is_no_failure() {
    let folder = folder();
    let path = folder.path();
    packed(path);
    for (binary, words) in COMMANDS {
        // A pipe whose reader is gone before anything is written.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(binary, path, words).stdout(Stdio::from(writer)).output().unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output).contains("panicked")),
            (Some(0), false),
            "{words:?}"
        );
        // Both closed from the start.
        for shell in ["exec >&-", "exec 2>&-", "exec >&- 2>&-"] {
            let output = behind(shell, binary, path, words).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{words:?} {shell}");
        }
        // One that stops reading.
        let mut child =
            command(binary, path, words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0]).unwrap();
        drop(out);
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output).contains("panicked")),
            (Some(0), false),
            "{words:?}"
        );
    }
}

#[test]
fn case_g12_words_that_nobody_reads_leave_the_exit_code() {
    let folder = folder();
    let path = folder.path();
    packed(path);
    for (words, code) in [
        (&["inspect", "gone.gguf"][..], 2),
        (&["plan", "--nonsense"], 2),
        (&["plan", "model.gguf", "--budget", "8GiB"], 1),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = command(ORKPACK, path, words).stderr(Stdio::from(writer)).status().unwrap();
        assert_eq!(status.code(), Some(code), "{words:?}");
    }
}

/// What looks for an interrupt is held to it elsewhere; this is what does not.
#[test]
fn case_g12_ctrl_c_ends_what_waits() {
    let folder = folder();
    let path = folder.path();
    packed(path);
    // A prompt that never ends, and a prompt that never begins.
    let fifo = path.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let cases: [(&str, &[&str]); 2] = [
        (ORK_RUN, &["model.orkpack", "-p", "-"]),
        (ORKPACK, &["merge", "fifo", "fifo", "-o", "merged.routing.json"]),
    ];
    let before = names(path);
    for (binary, words) in cases {
        for signal in [Signal::INT, Signal::TERM] {
            let mut child = command(binary, path, words)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            // From then on it catches signals.
            let caught = format!("/proc/{}/status", child.id());
            wait_until(|| catches_interrupts(&fs::read_to_string(&caught).unwrap_or_default()));
            rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
            wait_until(|| child.try_wait().unwrap().is_some());
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(130), "{words:?}");
            assert!(!stderr(&output).contains("panicked"));
            assert_eq!(names(path), before);
        }
    }
}

/// Whether a process has handlers of both signals, as its status says.
fn catches_interrupts(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    [Signal::INT, Signal::TERM].iter().all(|signal| mask >> (signal.as_raw() - 1) & 1 == 1)
}

#[test]
fn progress_is_drawn_on_a_terminal_alone() {
    let folder = folder();
    let path = folder.path();
    packed(path);
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    let words = ["convert", "model.gguf", "--prompts", "prompt.txt", "--force", "--objective", "hits"];
    let said = stderr(&run(ORKPACK, path, &words));
    assert!(said.contains("calibrating on") && !said.contains(['\r', '\u{1b}', '█']), "{said:?}");
    assert!(stderr(&run(ORKPACK, path, &[&words[..], &["--quiet"]].concat())).is_empty());
    let (code, screen) = Typist::start(ORKPACK, path, &words).end_raw();
    assert!(code == Some(0) && screen.contains('\u{1b}') && screen.contains("packing"), "{screen:?}");
}

#[test]
fn no_color_is_no_color() {
    let folder = folder();
    let path = folder.path();
    packed(path);
    for words in
        [&["inspect", "model.gguf"][..], &["plan", "model.gguf"], &["convert", "--help"], &["nonsense"]]
    {
        let words = [&["NO_COLOR=1", ORKPACK][..], words].concat();
        let (_, screen) = Typist::start("/usr/bin/env", path, &words).end_raw();
        let colored = screen.split("\u{1b}[").skip(1).any(|rest| {
            let end = rest.find(|c: char| c.is_ascii_alphabetic());
            end.is_some_and(|end| {
                rest[end..].starts_with('m') && rest[..end].split(';').any(|n| n.len() == 2)
            })
        });
        assert!(!colored, "{words:?}: {screen:?}");
    }
}
