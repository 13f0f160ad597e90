//! One sequence of tokens: a prompt, then a token at a time, timed and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Engine, Regime, Runtime};
use crate::error::{AtFile, Error, Failure};
use crate::model::evaluate::{self, Comparison, Perplexity};
use crate::model::{ForwardError, State, Wanted, forward};
use crate::progress::{Progress, Unit};

/// Rows of a compared prompt whose logits are held at one time.
const COMPARED_ROWS: usize = 32;

/// How fast tokens went by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Tokens.
    pub tokens: u64,
    /// Time that they took, measured on this host.
    pub time: Duration,
    /// Seconds that they would have taken on the profile's device, simulated; 0 without a device.
    pub modelled_seconds: f64,
}

impl Speed {
    /// Tokens per second on this host; 0 before any token.
    pub fn measured(&self) -> f64 {
        per_second(self.tokens, self.time.as_secs_f64())
    }

    /// Tokens per second on the profile's device, simulated; `None` without one.
    pub fn modelled(&self) -> Option<f64> {
        (self.modelled_seconds > 0.0).then(|| per_second(self.tokens, self.modelled_seconds))
    }
}

fn per_second(tokens: u64, seconds: f64) -> f64 {
    if tokens == 0 || seconds <= 0.0 { 0.0 } else { tokens as f64 / seconds }
}

/// What reading a conversation took. Counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Tokens that the sequence began with already.
    pub reused: usize,
    /// Tokens that went through the model.
    pub computed: usize,
}

/// A sequence on an engine.
pub struct Session<'r> {
    runtime: &'r Runtime,
    engine: Engine,
    state: State,
    /// The tokens that the state has seen.
    seen: Vec<u32>,
    interrupted: Arc<AtomicBool>,
    micro_batch: usize,
    logits: Vec<f32>,
    prefill: Speed,
    decode: Speed,
}

impl<'r> Session<'r> {
    /// An empty sequence of at most `n_ctx` tokens whose prompts go through the model `micro_batch` rows at a time.
    pub fn new(runtime: &'r Runtime, engine: Engine, n_ctx: usize, micro_batch: usize) -> Session<'r> {
        let state = State::new(runtime.model(), n_ctx);
        Session {
            runtime,
            engine,
            state,
            seen: Vec::new(),
            interrupted: Arc::default(),
            micro_batch: micro_batch.max(1),
            logits: Vec::new(),
            prefill: Speed::default(),
            decode: Speed::default(),
        }
    }

    /// Stops reading a prompt when somebody sets `interrupted`.
    pub fn watch(&mut self, interrupted: Arc<AtomicBool>) {
        self.interrupted = interrupted;
    }

    /// Reads a prompt after what is there, and gives the logits `[n_vocab]` after its last token.
    ///
    /// # Errors
    ///
    /// [`Error`] when the prompt is empty or does not fit, or a product fails.
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<&[f32], Error> {
        self.fits(self.position(), tokens.len())?;
        self.engine.begin(Regime::Prompt(tokens.len()));
        self.read(tokens, Wanted::Last)?;
        Ok(&self.logits)
    }

    /// Reads a whole conversation in place of what is there; what the two begin with in common is not computed again.
    ///
    /// Of `tokens` a later conversation will have the first `border` again, but the next perhaps not: thoughts are
    /// left out. So the border is made a position to go back to. [`Session::logits`] are then those after the last
    /// token.
    ///
    /// # Errors
    ///
    /// As [`Session::prompt`]; an interruption leaves what was read so far.
    pub fn turn(&mut self, tokens: &[u32], border: usize) -> Result<Reading, Error> {
        self.fits(0, tokens.len())?;
        let common = self.seen.iter().zip(tokens).take_while(|(seen, token)| seen == token).count();
        // The last token is run in any case: its logits are wanted.
        let reused = self.state.back_to(common.min(tokens.len().saturating_sub(1)));
        self.seen.truncate(reused);
        let (before, after) = tokens[reused..].split_at(border.clamp(reused, tokens.len()) - reused);
        self.engine.begin(Regime::Prompt(before.len() + after.len()));
        if !before.is_empty() {
            self.read(before, if after.is_empty() { Wanted::Last } else { Wanted::None })?;
            self.state.checkpoint();
        }
        if !after.is_empty() || before.is_empty() {
            self.read(after, Wanted::Last)?;
        }
        Ok(Reading { reused, computed: before.len() + after.len() })
    }

    fn fits(&self, position: usize, n_tokens: usize) -> Result<(), Error> {
        let n_ctx = self.n_ctx();
        if n_tokens <= n_ctx.saturating_sub(position) {
            return Ok(());
        }
        Err(ForwardError::ContextFull { position, n_tokens, n_ctx }).at(self.runtime.path())
    }

    fn read(&mut self, tokens: &[u32], wanted: Wanted) -> Result<(), Error> {
        let n_batches = tokens.len().div_ceil(self.micro_batch).max(1);
        for batch in 0..n_batches {
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(Failure::Interrupted.into());
            }
            let began = Instant::now();
            let first = batch * self.micro_batch;
            let rows = &tokens[first..tokens.len().min(first + self.micro_batch)];
            let wanted = if batch + 1 == n_batches { wanted.clone() } else { Wanted::None };
            self.forward(rows, wanted)?;
            self.prefill.modelled_seconds += self.engine.take_modelled_seconds(rows.len()).unwrap_or(0.0);
            self.prefill.tokens += rows.len() as u64;
            self.prefill.time += began.elapsed();
        }
        Ok(())
    }

    /// Reads a prompt here and on `reference`, and compares the logits after every token. A few rows at a time, so that
    /// a large vocabulary does not fill the memory.
    ///
    /// # Errors
    ///
    /// As [`Session::prompt`].
    pub fn compare_prompt(
        &mut self,
        reference: &mut Session<'_>,
        tokens: &[u32],
        comparison: &mut Comparison,
    ) -> Result<&[f32], Error> {
        let n_vocab = self.runtime.model().n_vocab();
        self.engine.begin(Regime::Prompt(tokens.len()));
        reference.engine.begin(Regime::Prompt(tokens.len()));
        for rows in tokens.chunks(self.micro_batch.min(COMPARED_ROWS)) {
            let began = Instant::now();
            self.forward(rows, Wanted::All)?;
            self.prefill.modelled_seconds += self.engine.take_modelled_seconds(rows.len()).unwrap_or(0.0);
            self.prefill.tokens += rows.len() as u64;
            self.prefill.time += began.elapsed();
            reference.forward(rows, Wanted::All)?;
            for (row, other) in reference.logits.chunks_exact(n_vocab).zip(self.logits.chunks_exact(n_vocab))
            {
                comparison.push(row, other);
            }
        }
        self.logits.drain(..self.logits.len().saturating_sub(n_vocab));
        Ok(&self.logits)
    }

    /// The perplexity of a text; the sequence is not touched.
    ///
    /// # Errors
    ///
    /// [`Error`] for a text shorter than a window, or as [`Session::prompt`].
    pub fn perplexity(&mut self, tokens: &[u32], progress: &mut dyn Progress) -> Result<Perplexity, Error> {
        let began = Instant::now();
        self.engine.begin(Regime::Prompt(evaluate::WINDOW));
        let total = tokens.len() / evaluate::WINDOW * evaluate::WINDOW;
        progress.begin("perplexity", total as u64, Unit::Tokens);
        let (model, executor) = (self.runtime.model(), self.engine.executor());
        let result = evaluate::perplexity(model, executor, tokens, self.micro_batch, &mut |_, _| {
            progress.advance(evaluate::WINDOW as u64);
        });
        progress.end();
        self.prefill.modelled_seconds += self.engine.take_modelled_seconds(total).unwrap_or(0.0);
        self.prefill.tokens += total as u64;
        self.prefill.time += began.elapsed();
        result.at(self.runtime.path())
    }

    /// Adds one generated token, and gives the logits `[n_vocab]` after it.
    ///
    /// # Errors
    ///
    /// As [`Session::prompt`].
    pub fn step(&mut self, token: u32) -> Result<&[f32], Error> {
        let began = Instant::now();
        self.engine.begin(Regime::Decode);
        self.forward(&[token], Wanted::Last)?;
        self.decode.modelled_seconds += self.engine.take_modelled_seconds(1).unwrap_or(0.0);
        self.decode.tokens += 1;
        self.decode.time += began.elapsed();
        Ok(&self.logits)
    }

    fn forward(&mut self, tokens: &[u32], wanted: Wanted) -> Result<(), Error> {
        let model = self.runtime.model();
        forward(model, self.engine.executor(), &mut self.state, tokens, wanted, &mut self.logits)
            .at(self.runtime.path())?;
        self.seen.extend_from_slice(tokens);
        Ok(())
    }

    /// The logits after the last token.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Starts the clocks anew: after a round that only warms up.
    pub fn forget_speeds(&mut self) {
        (self.prefill, self.decode) = (Speed::default(), Speed::default());
    }

    /// Forgets the sequence; counters stay.
    pub fn clear(&mut self) {
        self.state.clear();
        self.seen.clear();
    }

    /// The tokens that it has seen.
    pub fn seen(&self) -> &[u32] {
        &self.seen
    }

    /// Tokens so far.
    pub fn position(&self) -> usize {
        self.state.position()
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> usize {
        self.state.n_ctx()
    }

    /// Who computes.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// How fast prompts were read.
    pub fn prefill(&self) -> Speed {
        self.prefill
    }

    /// How fast tokens were generated.
    pub fn decode(&self) -> Speed {
        self.decode
    }
}
