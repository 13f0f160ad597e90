//! How good a model's predictions are, and how far two streams of logits are apart.

use thiserror::Error;

use super::{CacheType, ForwardError, Model, State, Wanted, forward};
use crate::executor::Executor;

/// Tokens in a window of [`perplexity`], each run from an empty cache.
pub const WINDOW: usize = 512;

/// The first place of a window whose token is scored: those before it have too little context.
pub const FIRST_SCORED: usize = WINDOW / 2 + 1;

/// What a text costs the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Mean negative log likelihood of a scored token, in nats.
    pub nll: f64,
    /// Tokens scored.
    pub n_scored: usize,
    /// Windows run.
    pub n_windows: usize,
}

impl Perplexity {
    /// `exp(nll)`: the perplexity itself.
    pub fn value(&self) -> f64 {
        self.nll.exp()
    }
}

/// Why a text could not be scored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvaluateError {
    /// The forward pass stopped.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// Not even one window.
    #[error("the text has {found} tokens; perplexity needs at least {WINDOW}")]
    TooShort {
        /// Tokens given.
        found: usize,
    },
}

/// Scores `tokens` as llama.cpp's perplexity tool does: windows of 512 from an empty cache, the rest of the
/// text dropped, the tokens at places 257 to 511 of each scored. Keys and values are kept as `cache` says.
///
/// `micro_batch` tokens go through the model at once (at least 1); it changes no result. `progress` is told
/// the windows done and all there are.
///
/// # Errors
///
/// [`EvaluateError`] for a text shorter than a window, or when the forward pass stops.
pub fn perplexity(
    model: &Model,
    executor: &mut dyn Executor,
    cache: CacheType,
    tokens: &[u32],
    micro_batch: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Perplexity, EvaluateError> {
    let n_windows = tokens.len() / WINDOW;
    if n_windows == 0 {
        return Err(EvaluateError::TooShort { found: tokens.len() });
    }
    let mut state = State::with_cache(model, WINDOW, cache);
    let mut nll = 0.0;
    for (done, window) in tokens.chunks_exact(WINDOW).enumerate() {
        state.clear();
        nll += score_window(model, executor, &mut state, window, micro_batch.max(1))?;
        progress(done + 1, n_windows);
    }
    let n_scored = n_windows * (WINDOW - FIRST_SCORED);
    Ok(Perplexity { nll: nll / n_scored as f64, n_scored, n_windows })
}

/// The summed negative log likelihood of a window's scored tokens.
fn score_window(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    window: &[u32],
    micro_batch: usize,
) -> Result<f64, EvaluateError> {
    let mut logits = Vec::new();
    let mut nll = 0.0;
    for (batch, tokens) in window.chunks(micro_batch).enumerate() {
        let first = batch * micro_batch;
        // The row at place p predicts the token at place p + 1.
        let within = |place: usize| place.saturating_sub(first).min(tokens.len());
        let rows = within(FIRST_SCORED - 1)..within(WINDOW - 1);
        let targets = &window[first + rows.start + 1..];
        forward(model, executor, state, tokens, Wanted::Rows(rows), &mut logits)?;
        for (row, target) in logits.chunks_exact(model.n_vocab()).zip(targets) {
            nll += negative_log_likelihood(row, *target);
        }
    }
    Ok(nll)
}

/// `-ln softmax(logits)[token]`, in nats; NaN for a token that has no logit.
fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let logit = logits.get(token as usize).map_or(f64::NAN, |logit| f64::from(*logit));
    log_sum_exp(logits) - logit
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
    sum.ln() + f64::from(max)
}

/// The token of the largest logit; of equal ones the lowest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, logit) in (0..).zip(logits) {
        if *logit > best.0 {
            best = (*logit, token);
        }
    }
    best.1
}

/// Two streams of logits over the same positions, compared as they come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    n_positions: u64,
    n_agreeing: u64,
    sum_kl: f64,
    max_kl: f64,
    max_logit_error: f32,
    first_difference: Option<Difference>,
}

/// A position where the two streams prefer different tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The position, counted from the first that was fed.
    pub position: u64,
    /// The reference's token.
    pub reference: u32,
    /// The other's.
    pub other: u32,
}

impl Comparison {
    /// Adds a position: a row of logits from each stream, equally long.
    pub fn push(&mut self, reference: &[f32], other: &[f32]) {
        let (expected, found) = (argmax(reference), argmax(other));
        if expected == found {
            self.n_agreeing += 1;
        } else if self.first_difference.is_none() {
            let position = self.n_positions;
            self.first_difference = Some(Difference { position, reference: expected, other: found });
        }
        let kl = divergence(reference, other);
        self.sum_kl += kl;
        self.max_kl = self.max_kl.max(kl);
        let errors = reference.iter().zip(other).map(|(reference, other)| (reference - other).abs());
        self.max_logit_error = errors.fold(self.max_logit_error, f32::max);
        self.n_positions += 1;
    }

    /// Positions fed.
    pub fn n_positions(&self) -> u64 {
        self.n_positions
    }

    /// Share of positions whose largest logit is the same token's; 1 where nothing was fed.
    pub fn top1_agreement(&self) -> f64 {
        if self.n_positions == 0 { 1.0 } else { self.n_agreeing as f64 / self.n_positions as f64 }
    }

    /// Mean Kullback-Leibler divergence of the other from the reference, in nats; 0 where nothing was fed.
    pub fn mean_kl(&self) -> f64 {
        if self.n_positions == 0 { 0.0 } else { self.sum_kl / self.n_positions as f64 }
    }

    /// The largest divergence of any position, in nats.
    pub fn max_kl(&self) -> f64 {
        self.max_kl
    }

    /// The largest distance between two logits of one token; 0 where nothing was fed.
    pub fn max_logit_error(&self) -> f32 {
        self.max_logit_error
    }

    /// The first position at which the two prefer different tokens.
    pub fn first_difference(&self) -> Option<Difference> {
        self.first_difference
    }
}

/// `Σ p · ln(p / q)` of the two softmaxes.
fn divergence(reference: &[f32], other: &[f32]) -> f64 {
    let (p_sum, q_sum) = (log_sum_exp(reference), log_sum_exp(other));
    let term = |(p, q): (&f32, &f32)| {
        let (p, q) = (f64::from(*p) - p_sum, f64::from(*q) - q_sum);
        p.exp() * (p - q)
    };
    // Rounding can leave a divergence of 0 a little below it.
    reference.iter().zip(other).map(term).sum::<f64>().max(0.0)
}
