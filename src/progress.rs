//! How long work tells how far it is: a trait that the command line draws and the library never prints.

/// Hears how far a long piece of work is. All calls come from the thread that does the work.
pub trait Progress {
    /// A stage begins: `what` in words (`calibrating`), and how many `unit`s it has.
    fn begin(&mut self, what: &str, total: u64, unit: Unit);

    /// That many more units are done.
    fn advance(&mut self, done: u64);

    /// The stage is over.
    fn end(&mut self);

    /// One line about a finished step, for those who follow along.
    fn note(&mut self, line: &str);

    /// Whether the work should stop and clean up: somebody pressed Ctrl-C.
    fn is_interrupted(&self) -> bool {
        false
    }
}

/// What a stage counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of a file.
    Bytes,
    /// Tokens of text.
    Tokens,
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: &str, _: u64, _: Unit) {}
    fn advance(&mut self, _: u64) {}
    fn end(&mut self) {}
    fn note(&mut self, _: &str) {}
}
