//! What a person sees while waiting: bars on a terminal, what was done elsewhere too, nothing under --quiet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::say;
use crate::progress::{Progress, Unit};

/// Draws progress on stderr, and knows whether somebody pressed Ctrl-C.
pub struct Terminal {
    quiet: bool,
    interrupted: Arc<AtomicBool>,
    bar: Option<ProgressBar>,
}

impl Terminal {
    /// Progress on stderr; with `quiet` none.
    pub fn new(quiet: bool, interrupted: Arc<AtomicBool>) -> Terminal {
        Terminal { quiet, interrupted, bar: None }
    }
}

/// Drawn only where stderr is a terminal.
fn bar(what: &str, total: u64, unit: Unit) -> ProgressBar {
    let template = match unit {
        Unit::Bytes => "{msg:14} {bar:30} {bytes:>11} of {total_bytes:11} {bytes_per_sec:>13}  {eta:>4} left",
        Unit::Tokens => "{msg:14} {bar:30} {pos:>7} of {len:7} tokens {per_sec:>13}  {eta:>4} left",
    };
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

impl Progress for Terminal {
    fn begin(&mut self, what: &str, total: u64, unit: Unit) {
        self.bar = (!self.quiet).then(|| bar(what, total, unit));
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(done);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(self.quiet, line)),
            None => say(self.quiet, line),
        }
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
