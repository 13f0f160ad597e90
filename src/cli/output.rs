//! stdout and stderr: data on one, words on the other, and no panic when nobody reads.

use std::io::{self, ErrorKind, Write, stderr, stdout};

use serde::Serialize;

use super::Stop;
use crate::error::Error;
use crate::report;

/// stdout. A closed pipe ends the command quietly.
pub struct Output;

impl Output {
    /// The process's stdout.
    pub fn new() -> Output {
        Output
    }

    /// Writes text as it is.
    pub fn text(&self, text: &str) -> Result<(), Stop> {
        self.bytes(text.as_bytes())
    }

    /// Writes bytes as they are, at once.
    pub fn bytes(&self, bytes: &[u8]) -> Result<(), Stop> {
        let mut out = stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(stop)
    }

    /// Writes a document as one line of JSON.
    pub fn json(&self, document: &impl Serialize) -> Result<(), Stop> {
        let mut line = report::json(document).map_err(io::Error::other)?;
        line.push('\n');
        self.text(&line)
    }
}

fn stop(error: io::Error) -> Stop {
    match error.kind() {
        ErrorKind::BrokenPipe => Stop::ClosedPipe,
        _ => error.into(),
    }
}

/// Lines of words, unless `quiet`. What a terminal would obey in them is made visible.
pub fn say(quiet: bool, lines: &str) {
    if !quiet {
        let mut err = stderr().lock();
        // A closed stderr is no reason to stop.
        let _ = lines.split('\n').try_for_each(|line| writeln!(err, "{}", report::escape(line)));
    }
}

/// The line, or two, that says why a command failed.
pub fn error(error: &Error) {
    let mut err = stderr().lock();
    // A closed stderr leaves the exit code to speak.
    let _ = writeln!(err, "error: {}", report::escape(&error.to_string()));
    if let Some(hint) = error.hint() {
        let _ = writeln!(err, "hint: {hint}");
    }
}
