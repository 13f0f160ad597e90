//! The forward pass: interprets a model's description, and sends every matrix product to an executor.
//!
//! A row's result depends on that row and on the positions before it, never on how many rows come at once or
//! on the number of threads: every sum has one fixed order. What a family's `arch/` file cannot say, this
//! pass cannot do; it knows families by no name.

mod attention;
mod by_layer;
mod checkpoint;
mod delta_net;
mod dense;
mod latent;
mod memory;
mod rope;
mod routing;
mod rows;
mod shortconv;

use std::ops::Range;

use thiserror::Error;

use super::Model;
use super::parts::{Ffn, Layer, Mixer, Rope, Routed};
use crate::executor::{Executor, ExecutorError, Product, Routing};
use crate::units::LayerId;
pub use by_layer::Group;
use checkpoint::Checkpoints;
pub use memory::CacheType;
use memory::Memory;
use rope::Angles;
use rows::{add_scaled, add_to_each, rms_norm, view};

/// What a sequence has left behind, for every layer: keys and values of every position so far, or what a
/// convolution saw last.
#[derive(Clone, Debug)]
pub struct State {
    n_ctx: usize,
    position: usize,
    memories: Vec<Memory>,
    checkpoints: Checkpoints,
    /// Rows of the last call, if some of them can still be taken back.
    tentative: usize,
}

impl State {
    /// An empty sequence that may grow to `n_ctx` positions, its keys and values in f32. Memory is taken as positions
    /// come.
    pub fn new(model: &Model, n_ctx: usize) -> State {
        State::with_cache(model, n_ctx, CacheType::F32)
    }

    /// The same with a cache of another type.
    pub fn with_cache(model: &Model, n_ctx: usize, cache: CacheType) -> State {
        let memories = model.layers.iter().map(|layer| Memory::new(&layer.mixer, cache)).collect();
        State { n_ctx, position: 0, memories, checkpoints: Checkpoints::default(), tentative: 0 }
    }

    /// Number of positions so far: the position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Number of positions that fit.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Makes the present position one to go back to. Only the last few are kept.
    ///
    /// Without it a model whose layers all keep every position goes back to any, another one to none but the start.
    pub fn checkpoint(&mut self) {
        self.note(false);
        self.checkpoints.keep(self.position, &self.memories);
    }

    /// Forgets what came after `position`, and what was before it as far as it cannot be had without: gives the
    /// position to go on from, at or before `position`. What is run from there gives the bits of a sequence that
    /// never went further.
    pub fn back_to(&mut self, position: usize) -> usize {
        if position < self.position {
            self.note(false);
            self.position = self.checkpoints.go_back(position, &mut self.memories);
        }
        self.position
    }

    /// Forgets everything, keeping the memory that was taken.
    pub fn clear(&mut self) {
        self.note(false);
        self.position = 0;
        self.checkpoints.clear();
        self.memories.iter_mut().for_each(Memory::clear);
    }

    /// Whether the next call notes what it takes to go back into it. The last call stays as it is.
    fn note(&mut self, on: bool) {
        self.tentative = 0;
        self.memories.iter_mut().for_each(|memory| memory.note(on));
    }
}

/// The rows whose logits are wanted: the others never see the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// No logits: to fill the caches, or to see the routing.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
    /// These rows of the call.
    Rows(Range<usize>),
}

impl Wanted {
    /// The rows of a call of `m` tokens; `None` for rows that it does not have.
    fn rows(&self, m: usize) -> Option<Range<usize>> {
        let rows = match self {
            Wanted::None => m..m,
            Wanted::Last => m.checked_sub(1)?..m,
            Wanted::All => 0..m,
            Wanted::Rows(rows) => rows.clone(),
        };
        (rows.start <= rows.end && rows.end <= m).then_some(rows)
    }
}

/// Why a forward pass stopped. The state is then as it was before the call.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// A product could not be computed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A call without tokens.
    #[error("there are no tokens to run")]
    NoTokens,
    /// A token that the vocabulary does not have.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },
    /// More positions than the state may hold.
    #[error("{n_tokens} tokens after position {position} do not fit a context of {n_ctx}")]
    ContextFull {
        /// Positions so far.
        position: usize,
        /// Tokens of the call.
        n_tokens: usize,
        /// Positions that fit.
        n_ctx: usize,
    },
    /// Rows are wanted that the call does not have.
    #[error("rows {start}..{end} are wanted of a call of {n_tokens} tokens")]
    Wanted {
        /// First row wanted.
        start: usize,
        /// One after the last.
        end: usize,
        /// Tokens of the call.
        n_tokens: usize,
    },
    /// A state that was made for a model of other sizes.
    #[error("the state belongs to another model")]
    OtherModel,
    /// A router logit that cannot be ranked: the weights, or what went in, are broken.
    #[error("router produced {value} at layer {layer} (position {position})")]
    Router {
        /// NaN or an infinity.
        value: f32,
        /// The layer.
        layer: LayerId,
        /// The position in the sequence.
        position: usize,
    },
}

/// Runs `tokens` after what `state` holds, and puts the wanted rows' logits, `[n_wanted, n_vocab]`, in `out`.
///
/// How a sequence is cut into calls changes no bit of any logit, if the executor keeps its promise.
///
/// # Errors
///
/// [`ForwardError`]; `state` then still holds what it did, and `out` holds nothing of use.
pub fn forward(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    tokens: &[u32],
    wanted: Wanted,
    out: &mut Vec<f32>,
) -> Result<(), ForwardError> {
    forward_traced(model, executor, state, tokens, wanted, out, &mut |_, _| {})
}

/// As [`forward`] with the logits of every row, and [`keep_first`] can take the last rows back: for tokens that are only
/// guessed. Costs some memory for every row until then.
///
/// # Errors
///
/// As [`forward`].
pub fn forward_tentative(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    tokens: &[u32],
    out: &mut Vec<f32>,
) -> Result<(), ForwardError> {
    state.note(true);
    run(model, executor, state, tokens, Wanted::All, out, &mut |_, _| {})?;
    state.tentative = tokens.len();
    Ok(())
}

/// Makes `state` that of a sequence to which the last call, of [`forward_tentative`], added its first `n` rows only, to
/// the bit. Nothing is computed again but the walk of delta nets through these rows. After any other call nothing
/// can be taken back and nothing changes.
pub fn keep_first(model: &Model, executor: &mut dyn Executor, state: &mut State, n: usize) {
    if n < state.tentative {
        for (layer, memory) in model.layers.iter().zip(&mut state.memories) {
            match (&layer.mixer, memory) {
                (Mixer::ShortConv(conv), Memory::Tail(tail)) => tail.keep_first(conv, n),
                (Mixer::DeltaNet(net), Memory::Net(memory)) => {
                    delta_net::keep_first(executor, net, memory, n)
                }
                // A cache is cut by the position.
                _ => {}
            }
        }
        state.position -= state.tentative - n;
    }
    state.note(false);
}

/// As [`forward`], and shows `trace` the residual stream: after layer `i` as `(i, [m, n_embd])`, and at the
/// end the final norm of the wanted rows as `(n_layer, [n_wanted, n_embd])`.
///
/// # Errors
///
/// As [`forward`].
pub fn forward_traced(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    tokens: &[u32],
    wanted: Wanted,
    out: &mut Vec<f32>,
    trace: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), ForwardError> {
    state.note(false);
    run(model, executor, state, tokens, wanted, out, trace)
}

fn run(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    tokens: &[u32],
    wanted: Wanted,
    out: &mut Vec<f32>,
    trace: &mut dyn FnMut(usize, &[f32]),
) -> Result<(), ForwardError> {
    let rows = check(model, state, tokens, &wanted)?;
    executor.ahead(LayerId(0));
    let x = embed(model, executor, tokens)?;
    let mut pass = Pass::new(model, executor, state.position, x);
    for (index, (layer, memory)) in model.layers.iter().zip(&mut state.memories).enumerate() {
        if index + 1 < model.layers.len() {
            pass.executor.ahead(LayerId(index as u32 + 1));
        }
        pass.layer(LayerId(index as u32), layer, memory)?;
        trace(index, &pass.x);
    }
    pass.logits(rows, out, trace)?;
    state.position += tokens.len();
    state.memories.iter_mut().for_each(Memory::commit);
    Ok(())
}

/// The rows whose logits are wanted, if the call is possible.
fn check(
    model: &Model,
    state: &State,
    tokens: &[u32],
    wanted: &Wanted,
) -> Result<Range<usize>, ForwardError> {
    let (n_tokens, position, n_ctx) = (tokens.len(), state.position, state.n_ctx);
    check_tokens(model, tokens)?;
    if n_tokens > n_ctx.saturating_sub(position) {
        return Err(ForwardError::ContextFull { position, n_tokens, n_ctx });
    }
    let fits = |(layer, memory): (&Layer, &Memory)| memory.fits(&layer.mixer);
    if state.memories.len() != model.layers.len() || !model.layers.iter().zip(&state.memories).all(fits) {
        return Err(ForwardError::OtherModel);
    }
    wanted.rows(n_tokens).ok_or_else(|| {
        let Range { start, end } = if let Wanted::Rows(rows) = wanted { rows.clone() } else { 0..0 };
        ForwardError::Wanted { start, end, n_tokens }
    })
}

fn check_tokens(model: &Model, tokens: &[u32]) -> Result<(), ForwardError> {
    let n_vocab = model.n_vocab;
    match tokens.iter().find(|token| **token as usize >= n_vocab) {
        Some(&token) => Err(ForwardError::Token { token, n_vocab }),
        None if tokens.is_empty() => Err(ForwardError::NoTokens),
        None => Ok(()),
    }
}

/// What goes into the first layer, `[m, n_embd]`.
fn embed(model: &Model, executor: &mut dyn Executor, tokens: &[u32]) -> Result<Vec<f32>, ForwardError> {
    let mut x = vec![0.0; tokens.len() * model.n_embd];
    executor.gather(model.embedding, tokens, &mut x)?;
    x.iter_mut().for_each(|x| *x *= model.scales.embedding);
    Ok(x)
}

/// One call on its way through the layers.
struct Pass<'a> {
    model: &'a Model,
    executor: &'a mut dyn Executor,
    /// Of the first row.
    position: usize,
    /// The residual stream, `[m, n_embd]`.
    x: Vec<f32>,
    /// What a branch reads, `[m, n_embd]`.
    normed: Vec<f32>,
    /// What a branch adds, `[m, n_embd]`.
    branch: Vec<f32>,
    /// Of this call's positions; kept while layers rotate alike.
    angles: Option<Angles>,
    routing: Routing,
}

impl<'a> Pass<'a> {
    fn new(model: &'a Model, executor: &'a mut dyn Executor, position: usize, x: Vec<f32>) -> Self {
        let (normed, branch) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        Pass { model, executor, position, x, normed, branch, angles: None, routing: Routing::default() }
    }

    fn layer(&mut self, at: LayerId, layer: &Layer, memory: &mut Memory) -> Result<(), ForwardError> {
        rms_norm(self.executor, &layer.mixer_norm, &self.x, &mut self.normed);
        match (&layer.mixer, memory) {
            (Mixer::Attention(attention), Memory::Keys(cache)) => {
                let angles = self.angles(&attention.rope);
                let rows = view(&self.normed, self.model.n_embd)?;
                attention::run(
                    self.executor,
                    attention,
                    cache,
                    &angles,
                    self.position,
                    rows,
                    &mut self.branch,
                )?;
                self.angles = Some(angles);
            }
            (Mixer::Latent(attention), Memory::Keys(cache)) => {
                let angles = self.angles(&attention.rope);
                let rows = view(&self.normed, self.model.n_embd)?;
                latent::run(self.executor, attention, cache, &angles, self.position, rows, &mut self.branch)?;
                self.angles = Some(angles);
            }
            (Mixer::ShortConv(conv), Memory::Tail(tail)) => {
                let rows = view(&self.normed, self.model.n_embd)?;
                shortconv::run(self.executor, conv, tail, rows, &mut self.branch)?;
            }
            (Mixer::DeltaNet(net), Memory::Net(memory)) => {
                let rows = view(&self.normed, self.model.n_embd)?;
                delta_net::run(self.executor, net, memory, rows, &mut self.branch)?;
            }
            _ => return Err(ForwardError::OtherModel),
        }
        self.add_branch();
        rms_norm(self.executor, &layer.ffn_norm, &self.x, &mut self.normed);
        match &layer.ffn {
            Ffn::Routed(routed) => self.routed(at, routed)?,
            Ffn::Dense(dense) => {
                let rows = view(&self.normed, self.model.n_embd)?;
                dense::run(self.executor, dense, rows, None, &mut self.branch)?;
            }
        }
        self.add_branch();
        Ok(())
    }

    /// Those of the layer before where it rotates alike.
    fn angles(&mut self, rope: &Rope) -> Angles {
        let m = self.x.len() / self.model.n_embd;
        let kept = self.angles.take().filter(|angles| angles.belong_to(rope));
        kept.unwrap_or_else(|| Angles::new(rope, self.position, m))
    }

    fn add_branch(&mut self) {
        let &Model { n_embd, ref scales, .. } = self.model;
        add_scaled(self.executor, n_embd, &mut self.x, scales.residual, &self.branch);
    }

    /// Sends `normed` to its experts.
    fn routed(&mut self, at: LayerId, routed: &Routed) -> Result<(), ForwardError> {
        let rows = view(&self.normed, self.model.n_embd)?;
        let mut logits = vec![0.0; rows.n_rows() * routed.n_expert];
        self.executor.linear(rows, &mut [Product { weight: routed.router, out: &mut logits }])?;
        if let Some(bias) = &routed.rule.bias {
            add_to_each(&mut logits, bias);
        }
        if let Some(bad) = logits.iter().position(|logit| !logit.is_finite()) {
            let position = self.position + bad / routed.n_expert;
            return Err(ForwardError::Router { value: logits[bad], layer: at, position });
        }
        routing::choose(&routed.rule, routed.n_expert, &logits, &mut self.routing);
        self.executor.experts(at, rows, &self.routing, &mut self.branch)?;
        if let Some(shared) = &routed.shared {
            let mut out = vec![0.0; self.branch.len()];
            dense::run_shared(self.executor, shared, rows, &mut out)?;
            add_scaled(self.executor, self.model.n_embd, &mut self.branch, 1.0, &out);
        }
        Ok(())
    }

    /// The final norm and the head, of some rows.
    fn logits(
        &mut self,
        rows: Range<usize>,
        out: &mut Vec<f32>,
        trace: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        out.clear();
        if rows.is_empty() {
            return Ok(());
        }
        let (n_embd, n) = (self.model.n_embd, rows.len());
        let normed = &mut self.normed[..n * n_embd];
        let x = &self.x[rows.start * n_embd..rows.end * n_embd];
        rms_norm(self.executor, &self.model.final_norm, x, normed);
        trace(self.model.layers.len(), normed);
        out.resize(n * self.model.n_vocab, 0.0);
        self.executor.linear(view(normed, n_embd)?, &mut [Product { weight: self.model.head, out }])?;
        out.iter_mut().for_each(|logit| *logit /= self.model.scales.logits);
        Ok(())
    }
}
