//! One sequence of tokens: a prompt, then a token at a time, timed and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::lookup::{Lookup, guess};
use super::{Engine, Regime, Runtime};
use crate::error::{AtFile, Error, Failure};
use crate::model::evaluate::{self, Comparison, Perplexity};
use crate::model::{ForwardError, State, Wanted, forward, forward_tentative, keep_first};
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
    /// The tokens of the sequence. The state has seen them, and behind them what is left of `guess`.
    seen: Vec<u32>,
    /// Most tokens that are guessed at one time.
    most_guessed: usize,
    /// The tokens that went through the model with the last one, because they may be the next.
    guess: Vec<u32>,
    /// How many of these came to be.
    n_right: usize,
    lookup: Lookup,
    interrupted: Arc<AtomicBool>,
    micro_batch: usize,
    /// `[1 + guess.len(), n_vocab]`.
    logits: Vec<f32>,
    prefill: Speed,
    decode: Speed,
}

impl<'r> Session<'r> {
    /// An empty sequence of at most `n_ctx` tokens whose prompts go through the model `micro_batch` rows at a time.
    pub fn new(runtime: &'r Runtime, engine: Engine, n_ctx: usize, micro_batch: usize) -> Session<'r> {
        let state = State::with_cache(runtime.model(), n_ctx, runtime.cache());
        Session {
            runtime,
            engine,
            state,
            seen: Vec::new(),
            most_guessed: 0,
            guess: Vec::new(),
            n_right: 0,
            lookup: Lookup::default(),
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

    /// Lets [`Session::step`] guess up to `n` tokens ahead from text that repeats itself. That changes no bit of what it
    /// gives, only how fast.
    pub fn look_ahead(&mut self, n: usize) {
        self.most_guessed = n;
    }

    /// Reads a prompt after what is there, and gives the logits `[n_vocab]` after its last token.
    ///
    /// # Errors
    ///
    /// [`Error`] when the prompt is empty or does not fit, or a product fails.
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<&[f32], Error> {
        self.fits(self.position(), tokens.len())?;
        self.settle();
        self.engine.begin(Regime::Prompt(tokens.len()));
        self.read(tokens, Wanted::Last)?;
        Ok(self.logits())
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
        self.settle();
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
        self.settle();
        reference.settle();
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
        Ok(self.logits())
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
        let (model, executor, cache) = (self.runtime.model(), self.engine.executor(), self.runtime.cache());
        let result = evaluate::perplexity(model, executor, cache, tokens, self.micro_batch, &mut |_, _| {
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
        if self.guess.get(self.n_right) == Some(&token) {
            self.n_right += 1;
            self.lookup.accepted += 1;
            self.seen.push(token);
        } else {
            self.settle();
            self.generate(token)?;
        }
        self.decode.tokens += 1;
        self.decode.time += began.elapsed();
        Ok(self.logits())
    }

    /// Runs a token, and behind it those that are guessed to follow. Their experts are hot as far down the ranking as a
    /// single token's: how many rows come at once decides nothing.
    fn generate(&mut self, token: u32) -> Result<(), Error> {
        self.engine.begin(Regime::Decode);
        let mut tokens = vec![token];
        tokens.extend(self.guess_after(token));
        match tokens.len() {
            1 => self.forward(&tokens, Wanted::Last)?,
            _ => self.forward_guessed(&tokens)?,
        }
        self.decode.modelled_seconds += self.engine.take_modelled_seconds(tokens.len()).unwrap_or(0.0);
        Ok(())
    }

    fn guess_after(&self, token: u32) -> Vec<u32> {
        let room = self.n_ctx().saturating_sub(self.position() + 1);
        match self.most_guessed.min(room) {
            0 => Vec::new(),
            n => guess(&[&self.seen[..], &[token]].concat(), n),
        }
    }

    /// Runs a token and guessed ones. What only a guess breaks is not the sequence's fault: then the token runs alone.
    fn forward_guessed(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let (model, executor) = (self.runtime.model(), self.engine.executor());
        match forward_tentative(model, executor, &mut self.state, tokens, &mut self.logits) {
            Err(ForwardError::Router { .. }) => return self.forward(&tokens[..1], Wanted::Last),
            result => result.at(self.runtime.path())?,
        }
        self.seen.push(tokens[0]);
        self.guess.extend_from_slice(&tokens[1..]);
        self.lookup.batches += 1;
        self.lookup.drafted += self.guess.len() as u64;
        Ok(())
    }

    /// Takes back what was guessed and did not come to be.
    fn settle(&mut self) {
        if self.guess.is_empty() {
            return;
        }
        let (model, executor) = (self.runtime.model(), self.engine.executor());
        keep_first(model, executor, &mut self.state, 1 + self.n_right);
        self.logits = self.logits().to_vec();
        self.guess.clear();
        self.n_right = 0;
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
        let n_vocab = self.runtime.model().n_vocab();
        self.logits.get(self.n_right * n_vocab..).and_then(|rows| rows.get(..n_vocab)).unwrap_or_default()
    }

    /// What guessing did; `None` where nothing is guessed.
    pub fn lookup(&self) -> Option<Lookup> {
        (self.most_guessed > 0).then_some(self.lookup)
    }

    /// Starts the clocks anew: after a round that only warms up.
    pub fn forget_speeds(&mut self) {
        (self.prefill, self.decode) = (Speed::default(), Speed::default());
    }

    /// Forgets the sequence; counters stay.
    pub fn clear(&mut self) {
        self.state.clear();
        self.seen.clear();
        self.guess.clear();
        self.n_right = 0;
    }

    /// The tokens that it has seen.
    pub fn seen(&self) -> &[u32] {
        &self.seen
    }

    /// Tokens so far.
    pub fn position(&self) -> usize {
        self.seen.len()
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
