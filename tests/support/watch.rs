//! Runs a command and watches its memory.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The most anonymous memory that `command` held, in bytes, and its exit code. Sampled every few milliseconds.
pub fn peak_anonymous(command: &mut Command) -> (u64, Option<i32>) {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let status = Path::new("/proc").join(child.id().to_string()).join("status");
    let mut peak = 0;
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib =
            line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|kib| kib.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) << 10);
        if let Some(exit) = child.try_wait().unwrap() {
            return (peak, exit.code());
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}
