//! What a person sees while waiting: bars on a terminal, a line now and then elsewhere, nothing under --quiet.

use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::progress::{Progress, Unit};

/// Off a terminal, how often a long stage says how far it is.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Draws progress on stderr, and knows whether somebody pressed Ctrl-C.
pub struct Terminal {
    quiet: bool,
    interrupted: Arc<AtomicBool>,
    stage: Option<Stage>,
}

struct Stage {
    what: String,
    total: u64,
    done: u64,
    bar: ProgressBar,
    last_line: Instant,
}

impl Terminal {
    /// Progress on stderr; with `quiet` none.
    pub fn new(quiet: bool, interrupted: Arc<AtomicBool>) -> Terminal {
        Terminal { quiet, interrupted, stage: None }
    }

    fn line(&self, line: &str) {
        // A closed stderr is no reason to stop working.
        let _ = writeln!(stderr().lock(), "{line}");
    }
}

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
        let bar = if self.quiet { ProgressBar::hidden() } else { bar(what, total, unit) };
        self.stage = Some(Stage { what: what.to_owned(), total, done: 0, bar, last_line: Instant::now() });
    }

    fn advance(&mut self, done: u64) {
        let Some(stage) = &mut self.stage else { return };
        stage.done = stage.done.saturating_add(done);
        stage.bar.inc(done);
        let due = !self.quiet && !stderr().is_terminal() && stage.last_line.elapsed() >= LINE_EVERY;
        if due {
            stage.last_line = Instant::now();
            let percent = stage.done.saturating_mul(100) / stage.total.max(1);
            let line = format!("{}: {percent} %", stage.what);
            self.line(&line);
        }
    }

    fn end(&mut self) {
        if let Some(stage) = self.stage.take() {
            stage.bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        if self.quiet {
            return;
        }
        match &self.stage {
            Some(stage) => stage.bar.suspend(|| self.line(line)),
            None => self.line(line),
        }
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}
