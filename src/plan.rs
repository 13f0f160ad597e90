//! The plan: which expert matrices become resident, and what that gives. A balance, not a fill.
//!
//! Pure: no files, no clock, no randomness; equal requests give equal plans. The answer is often that nothing is
//! worth keeping on the NPU, at least for decoding, and then the plan says so with both predicted times. Equations,
//! constants and the decision rule: docs/planning.md.

mod capacity;
mod check;
pub mod cost;
mod document;
mod explain;
mod forecast;
mod hits;
mod layer;
mod notes;
mod paging;
mod place;
mod routing;
mod rows;
mod select;
mod selector;
mod state;
mod sweep;
mod times;

use std::sync::Arc;

use rayon::prelude::*;
use thiserror::Error;

pub use capacity::{Capacity, Fit, capacity};
pub use cost::Parts;
pub use document::{
    Advice, Basis, Chunk, Cut, DomainFootprint, Footprint, Forecast, HitRate, HitRates, Holds, Item,
    LayerPlan, MatrixPlan, MemoryAccount, Note, Objective, Placed, Plan, ProfileId, Range, Regime, Shares,
    Verdict,
};
pub use explain::{Calls, Explanation, Reason};
pub use hits::prefix_hits;
pub use routing::{Routing, Skew};
pub use sweep::{SweepPoint, SweepSpeed, budgets};
pub use times::LayerTime;

use crate::calibrate::{BATCHES, RoutedLayer, StatisticsError};
use crate::model::{MatrixShape, ModelShape, MoeLayerShape};
use crate::profile::{DeviceProfile, ProfileError};
use crate::tensor::Projection;
use crate::tile::{SubMatrix, TileError};
use crate::units::{Bytes, ExpertId, LayerId};
use document::tidy;
use forecast::{Case, Hot};
use layer::{Curves, LayerModel};
use notes::{memory, notes};
use place::Resident;
use routing::{LayerRouting, SkewEnd};
use rows::RowStep;
use select::{Choices, Weights};
use selector::{Selected, Selectors, best_hot};
use state::{Split, State};

/// Tokens of the prompt that prefill is planned for.
pub const PROMPT_TOKENS: u32 = 512;

/// Tokens of the answer to it, where both regimes count.
pub const ANSWER_TOKENS: u32 = 256;

/// A regime uses the NPU from this gain on; less is within the error of the model.
pub const MIN_GAIN: f64 = 1.02;

/// Length of the context in the memory account.
const CONTEXT_TOKENS: u32 = 4096;

/// Held-out calls of the hotter half, over one half, below which routing counts as even.
const EVEN: f64 = 1.05;

/// What a plan is made from.
#[derive(Clone, Debug)]
pub struct PlanRequest<'a> {
    /// The model's sizes.
    pub shape: &'a ModelShape,
    /// How its experts are used.
    pub routing: Routing<'a>,
    /// The device.
    pub profile: &'a DeviceProfile,
    /// Bytes of weights in one domain; the profile's default where not given.
    pub budget: Option<Bytes>,
    /// Domains to use.
    pub domains: u32,
    /// What to make it for.
    pub objective: Objective,
    /// Experts that are hot whatever they cost, best first.
    pub force_hot: Vec<(LayerId, ExpertId)>,
    /// The board's memory; the profile's where not given.
    pub ram: Option<Bytes>,
    /// What may be shared between the two sides.
    pub shares: Shares,
}

impl<'a> PlanRequest<'a> {
    /// A request with every default.
    pub fn new(shape: &'a ModelShape, routing: Routing<'a>, profile: &'a DeviceProfile) -> PlanRequest<'a> {
        let (budget, ram, domains) = (None, None, 1);
        let (objective, force_hot, shares) = (Objective::Auto, Vec::new(), Shares::Auto);
        PlanRequest { shape, routing, profile, budget, domains, objective, force_hot, ram, shares }
    }
}

/// Why there is no plan.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// More than a domain can map: the check says no.
    #[error(
        "a budget of {budget} ({} bytes) is over the usable window of one domain, {window} ({} bytes); lower --budget \
         or use --domains",
        .budget.0, .window.0
    )]
    OverWindow {
        /// What was asked for.
        budget: Bytes,
        /// What there is.
        window: Bytes,
    },
    /// More domains than the device has, or none.
    #[error("{asked} domains asked for, the device has {available}")]
    Domains {
        /// What was asked for.
        asked: u32,
        /// What there is.
        available: u32,
    },
    /// A model without experts.
    #[error("the model has no experts: there is nothing to plan (architecture {0})")]
    NoExperts(String),
    /// Experts that do not look alike.
    #[error("layer {layer}: {what}")]
    Shape {
        /// The layer.
        layer: LayerId,
        /// What is wrong.
        what: String,
    },
    /// Statistics that do not belong to the model.
    #[error(transparent)]
    Statistics(#[from] StatisticsError),
    /// The profile cannot be written down.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// An expert to be hot that is not there, or that no program can hold.
    #[error("--force-hot {layer}:{expert}: {what}")]
    ForceHot {
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
        /// What is wrong.
        what: &'static str,
    },
    /// An expert to be explained that is not there.
    #[error("--explain {layer}:{expert}: {what}")]
    Explain {
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
        /// What is wrong.
        what: String,
    },
    /// Experts to be hot that are more than the budget.
    #[error("the experts of --force-hot need {needed} in one domain, the budget is {budget}")]
    ForceHotOverBudget {
        /// Bytes of them in the fullest domain, in as many domains as need least.
        needed: Bytes,
        /// Bytes allowed.
        budget: Bytes,
    },
    /// More scratch than the profile reserves.
    #[error(
        "programs, activations and results need {needed} bytes in a domain, the profile reserves {reserve}"
    )]
    Scratch {
        /// Bytes needed.
        needed: u64,
        /// Bytes reserved.
        reserve: u64,
    },
    /// More buffers than a domain bears.
    #[error(
        "{needed} buffers in one domain, the device bears {most}; use a larger chunk_bytes or a smaller budget"
    )]
    Mappings {
        /// Buffers needed.
        needed: u32,
        /// Buffers that the profile allows.
        most: u32,
    },
    /// A matrix without weights.
    #[error("layer {layer}: {error}")]
    Tile {
        /// The layer.
        layer: LayerId,
        /// What is wrong.
        error: TileError,
    },
    /// Not JSON, or not a plan.
    #[error("plan: {0}")]
    Json(#[from] serde_json::Error),
    /// A plan that contradicts itself, the model or the device.
    #[error("plan: {0}")]
    Document(String),
}

/// Chooses what becomes resident.
///
/// # Errors
///
/// [`PlanError`] when the request cannot be met. That nothing is worth keeping is no error.
pub fn choose(request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    Planner::new(request)?.plan()
}

/// A request with all that no budget changes computed once: plans for other budgets then cost little.
pub struct Planner<'a> {
    request: &'a PlanRequest<'a>,
    budget: u64,
    /// Slowest, likely and fastest.
    cases: Vec<Case>,
    /// The domain of each layer, with one domain, with two, and so on up to all that may be used.
    layouts: Vec<Vec<u32>>,
}

impl<'a> Planner<'a> {
    /// Checks a request and computes what its layers cost.
    ///
    /// # Errors
    ///
    /// As [`choose`].
    pub fn new(request: &'a PlanRequest<'a>) -> Result<Planner<'a>, PlanError> {
        let budget = check_request(request)?;
        let forced = check_forced(request)?;
        let cases = cases(request, &forced)?;
        let page = request.profile.memory.page_bytes.value;
        let layer_bytes: Vec<u64> = cases[1].models.iter().map(|model| model.all_bytes(page)).collect();
        let layouts = (1..=request.domains).map(|n| place::domains(&layer_bytes, n)).collect();
        Ok(Planner { request, budget, cases, layouts })
    }

    /// The plan for the budget that was asked for.
    ///
    /// # Errors
    ///
    /// As [`choose`].
    pub fn plan(&self) -> Result<Plan, PlanError> {
        self.plan_at(Bytes(self.budget))
    }

    /// The plan for another budget: what [`choose`] gives when asked for it.
    ///
    /// # Errors
    ///
    /// As [`choose`].
    pub fn plan_at(&self, budget: Bytes) -> Result<Plan, PlanError> {
        let Planner { request, cases, .. } = self;
        let &PlanRequest { shape, profile, objective, .. } = *request;
        check_window(budget, profile)?;
        let mut selectors = Selectors::new(self);
        let selected = selectors.select(budget.0)?;
        let gap = selectors.gap(&selected);
        let Selected { weights, states, usable, domains, .. } = selected;
        let (likely, choices, n_domains) = (&cases[1], selectors.choices(), selector::n_domains(domains));
        let hot = [Regime::Decode, Regime::Prefill]
            .map(|regime| best_hot(request, likely, choices, domains, &states, regime, weights));
        let cuts = cuts(request, likely, &hot);
        let layers = layer_plans(shape, choices, domains, &states);
        let chunks = place::place(&resident(choices, &layers, &states, weights), n_domains, profile);
        let footprint = place::footprint(&chunks, n_domains, profile)?;
        let memory = memory(request, footprint.weight_bytes, footprint.scratch_bytes);
        let [decode, prefill] =
            [(Regime::Decode, 1), (Regime::Prefill, PROMPT_TOKENS)].map(|(regime, tokens)| {
                forecast::forecast(request, cases, regime, tokens, &hot[regime as usize], &memory)
            });
        let hit_rates = forecast::hit_rates(shape, &request.routing, cases, &states);
        let profile_digest = blake3::hash(&profile.to_json()?).to_hex().to_string();
        let mut notes = notes(request, &layers, &likely.models, &hit_rates, &memory);
        if usable < budget.0 {
            notes.push(Note::KeptForModel { used: footprint.weight_bytes });
        }
        Ok(Plan {
            schema: document::SCHEMA.to_owned(),
            verdict: forecast::verdict(&decode, &prefill, !request.force_hot.is_empty(), objective),
            forecasts: vec![decode, prefill],
            notes,
            profile: ProfileId { name: profile.name.clone(), digest: profile_digest },
            statistics: match request.routing {
                Routing::Measured(statistics) => Some(statistics.digest()?),
                Routing::Assumed(_) => None,
            },
            architecture: shape.architecture.clone(),
            objective,
            budget_bytes: budget.0,
            window_bytes: profile.window().0,
            n_domains,
            footprint,
            hit_rates,
            memory,
            gap: tidy(gap),
            cuts,
            layers,
            chunks,
        })
    }

    /// What a plan that this planner made gives for a prompt or step of another length. Prompts longer than 512 tokens
    /// are read 512 at a time, as `ork-run` does.
    pub fn forecast_at(&self, plan: &Plan, tokens: u32) -> Forecast {
        let batch = tokens.clamp(1, PROMPT_TOKENS);
        let hot = |(layer, model): (&LayerPlan, &LayerModel)| {
            let n_items = plan.hot(LayerId(layer.layer), batch).len();
            Hot { state: State::of_plan(layer, model, n_items), domain: layer.domain }
        };
        let hot: Vec<Hot> = plan.layers.iter().zip(self.cases[1].models.iter()).map(hot).collect();
        let regime = if batch == 1 { Regime::Decode } else { Regime::Prefill };
        let forecast = forecast::forecast(self.request, &self.cases, regime, batch, &hot, &plan.memory);
        Forecast { tokens: tokens.max(1), ..forecast }
    }

    /// The smallest budget that can be planned with: what the experts named by the user need in the fullest domain.
    pub fn least_budget(&self) -> Bytes {
        Bytes(Selectors::new(self).fullest(Choices::base).0)
    }

    /// The largest budget that makes a difference: the window, or what everything needs in the fullest domain.
    pub fn most_budget(&self) -> Bytes {
        self.request.profile.window().min(Bytes(Selectors::new(self).fullest(Choices::most).1))
    }

    fn choices(&self) -> Vec<Choices<'_>> {
        let likely = &self.cases[1];
        let page = self.request.profile.memory.page_bytes.value;
        let curves = likely.decode.iter().zip(&likely.prefill);
        let choices = likely.models.iter().zip(curves);
        let shares = self.request.shares;
        choices.map(|(model, (decode, prefill))| Choices::new(model, decode, prefill, shares, page)).collect()
    }
}

/// The layers of a model as routing statistics name them.
pub fn routed_layers(shape: &ModelShape) -> Vec<RoutedLayer> {
    let layer = |moe: &MoeLayerShape| RoutedLayer {
        layer: moe.layer.0,
        n_expert: moe.n_expert() as u32,
        n_used: moe.n_used as u32,
    };
    shape.moe_layers.iter().map(layer).collect()
}

/// Checks what was asked for and gives the budget in bytes.
fn check_request(request: &PlanRequest<'_>) -> Result<u64, PlanError> {
    let &PlanRequest { shape, profile, .. } = request;
    if shape.moe_layers.is_empty() {
        return Err(PlanError::NoExperts(shape.architecture.clone()));
    }
    for moe in &shape.moe_layers {
        let refuse = |what: String| Err(PlanError::Shape { layer: moe.layer, what });
        let sizes = |e: &[MatrixShape; 3]| e.map(|matrix| (matrix.n_in, matrix.n_out));
        let Some(first) = moe.experts.first() else { return refuse("it has no experts".to_owned()) };
        if !(1..=moe.n_expert()).contains(&moe.n_used) {
            return refuse(format!("{} of {} experts used", moe.n_used, moe.n_expert()));
        }
        if let Some(odd) = moe.experts.iter().position(|expert| sizes(expert) != sizes(first)) {
            return refuse(format!("expert {odd} has other shapes than expert 0"));
        }
    }
    if let Routing::Measured(statistics) = request.routing {
        statistics.check_model(&routed_layers(shape), None)?;
    }
    let available = profile.domains();
    if !(1..=available).contains(&request.domains) {
        return Err(PlanError::Domains { asked: request.domains, available });
    }
    let window = profile.window();
    let default = Bytes(profile.memory.budget_bytes.value).min(window);
    let budget = request.budget.unwrap_or(default);
    check_window(budget, profile)?;
    Ok(budget.0)
}

fn check_window(budget: Bytes, profile: &DeviceProfile) -> Result<(), PlanError> {
    let window = profile.window();
    if budget > window { Err(PlanError::OverWindow { budget, window }) } else { Ok(()) }
}

/// The experts to be hot, by layer; each once.
fn check_forced(request: &PlanRequest<'_>) -> Result<Vec<Vec<u32>>, PlanError> {
    let mut forced: Vec<Vec<u32>> = vec![Vec::new(); request.shape.moe_layers.len()];
    for &(layer, expert) in &request.force_hot {
        let refuse = |what| Err(PlanError::ForceHot { layer, expert, what });
        let Some(at) = request.shape.moe_layers.iter().position(|moe| moe.layer == layer) else {
            return refuse("this layer has no experts");
        };
        if expert.index() >= request.shape.moe_layers[at].n_expert() {
            return refuse("the layer has no such expert");
        }
        if !forced[at].contains(&expert.0) {
            forced[at].push(expert.0);
        }
    }
    Ok(forced)
}

/// Slowest, likely and fastest case.
fn cases(request: &PlanRequest<'_>, forced: &[Vec<u32>]) -> Result<Vec<Case>, PlanError> {
    let mut cases: Vec<Case> = Vec::new();
    for (bound, end) in Case::ENDS {
        let counted = cases.first().filter(|_| matches!(request.routing, Routing::Measured(_)));
        let models = match counted {
            Some(case) => Arc::clone(&case.models),
            None => Arc::new(models(request, forced, end)?),
        };
        cases.push(Case::new(request.profile, bound, models));
    }
    Ok(cases)
}

/// The layers, the experts of each sorted best first.
fn models(
    request: &PlanRequest<'_>,
    forced: &[Vec<u32>],
    end: SkewEnd,
) -> Result<Vec<LayerModel>, PlanError> {
    let routing = request.routing.layers(request.shape, end);
    let model = |((moe, routing), forced): ((&MoeLayerShape, &LayerRouting<'_>), &Vec<u32>)| {
        let model = LayerModel::new(moe, routing, forced, request.profile)
            .map_err(|error| PlanError::Tile { layer: moe.layer, error })?;
        match forced.first() {
            Some(&expert) if !model.may_be_hot().0 => Err(PlanError::ForceHot {
                layer: moe.layer,
                expert: ExpertId(expert),
                what: "no program can hold its gate and up",
            }),
            _ => Ok(model),
        }
    };
    request.shape.moe_layers.iter().zip(&routing).zip(forced).map(model).collect()
}

/// Both cuts; prefill from the shortest batch on at which it gains, and at every longer one.
fn cuts(request: &PlanRequest<'_>, likely: &Case, hot: &[Vec<Hot>; 2]) -> Vec<Cut> {
    let [decode, prefill] = hot;
    let cold: Vec<Hot> = prefill.iter().map(|hot| hot.cold()).collect();
    let gains = |tokens: u32| {
        let curves: Vec<Curves> =
            likely.models.par_iter().map(|model| model.batch(&likely.rates, tokens)).collect();
        let seconds = |hot: &[Hot]| forecast::seconds(request.shape, &likely.rates, tokens, &curves, hot);
        seconds(prefill) < seconds(&cold)
    };
    let asked = request.objective == Objective::Hits || !request.force_hot.is_empty();
    let from_tokens = match asked {
        true => 2,
        false => BATCHES
            .iter()
            .rev()
            .skip(1)
            .take_while(|&&tokens| tokens > 1 && gains(tokens))
            .last()
            .copied()
            .unwrap_or(PROMPT_TOKENS),
    };
    let cut = |regime, from_tokens, hot: &[Hot]| {
        let served = |(hot, model): (&Hot, &LayerModel)| model.served(hot.state);
        let all: f64 = request.shape.moe_layers.iter().map(|moe| moe.n_used as f64).sum();
        let hit_rate = tidy(hot.iter().zip(likely.models.iter()).map(served).sum::<f64>() / all);
        let items = |(hot, model): (&Hot, &LayerModel)| hot.state.n_items(model.n_expert()) as u32;
        let layers = hot.iter().zip(likely.models.iter()).map(items);
        Cut { regime, from_tokens, layers: layers.collect(), hit_rate }
    };
    vec![cut(Regime::Decode, 1, decode), cut(Regime::Prefill, from_tokens, prefill)]
}

/// The rankings.
fn layer_plans(
    shape: &ModelShape,
    choices: &[Choices<'_>],
    domains: &[u32],
    states: &[State],
) -> Vec<LayerPlan> {
    let plan = |(i, moe): (usize, &MoeLayerShape)| {
        let (choice, state) = (&choices[i], states[i]);
        let item = match state.split {
            Split::Experts => expert_item,
            Split::Rows => rows_item,
        };
        LayerPlan {
            layer: moe.layer.0,
            domain: domains[i],
            n_expert: moe.n_expert() as u32,
            n_used: moe.n_used as u32,
            matrices: Projection::ALL.map(|p| matrix_plan(moe, choice.model, state, p)).to_vec(),
            resident: state.n_items(moe.n_expert()) as u32,
            ranking: (0..moe.n_expert()).map(|at| item(choice, state, moe, at)).collect(),
        }
    };
    shape.moe_layers.iter().enumerate().map(plan).collect()
}

/// An expert in a layer that is shared by experts.
fn expert_item(choice: &Choices<'_>, state: State, moe: &MoeLayerShape, at: usize) -> Item {
    // What is not resident would be as a whole, unless its layer does without downs.
    let is_whole = state.down >= state.gate_up && choice.model.may_be_hot().1;
    let holds = match (at < state.gate_up, at < state.down) {
        (true, true) => Holds::Whole,
        (true, false) => Holds::GateUp,
        (false, true) => Holds::Down,
        (false, false) if is_whole => Holds::Whole,
        (false, false) => Holds::GateUp,
    };
    let (gate_up, down) = (holds != Holds::Down, holds != Holds::GateUp);
    let saved = |curves: &Curves| {
        let of = |curve: &[f64], held: bool| if held { curve[at] - curve[at + 1] } else { 0.0 };
        of(&curves.experts.gate_up, gate_up) + of(&curves.experts.down, down)
    };
    let bytes = |bytes: u64, held: bool| if held { bytes } else { 0 };
    Item {
        expert: choice.model.order[at],
        holds,
        bytes: bytes(choice.bytes.0, gate_up) + bytes(choice.bytes.1, down),
        share: tidy(choice.model.inclusion[at] / moe.n_used as f64),
        decode_seconds: tidy(saved(choice.decode)),
        prefill_seconds: tidy(saved(choice.prefill)),
        forced: at < choice.model.n_forced,
    }
}

/// An expert in a layer that is shared by rows: what the layer saves is told in proportion to the calls of each.
fn rows_item(choice: &Choices<'_>, state: State, moe: &MoeLayerShape, at: usize) -> Item {
    let share = choice.model.inclusion[at] / moe.n_used as f64;
    let saved = |curves: &Curves| share * (curves.of(State::default()) - curves.of(state));
    Item {
        expert: choice.model.order[at],
        holds: Holds::Rows,
        bytes: choice.bytes_of(state) / moe.n_expert() as u64,
        share: tidy(share),
        decode_seconds: tidy(saved(choice.decode)),
        prefill_seconds: tidy(saved(choice.prefill)),
        forced: false,
    }
}

/// The programs of one projection of an expert of which anything is resident.
fn parts_of(model: &LayerModel, state: State, p: Projection) -> &[SubMatrix] {
    match state.split {
        Split::Experts => model.parts[p as usize].as_deref().unwrap_or_default(),
        Split::Rows => &row_step(model, state, p).parts,
    }
}

fn row_step(model: &LayerModel, state: State, p: Projection) -> &RowStep {
    &model.rows.of_projection(p)[if p == Projection::Down { state.down } else { state.gate_up }]
}

fn matrix_plan(moe: &MoeLayerShape, model: &LayerModel, state: State, p: Projection) -> MatrixPlan {
    let (n_in, n_out) = moe.experts.first().map_or((0, 0), |e| (e[p as usize].n_in, e[p as usize].n_out));
    let parts = parts_of(model, state, p);
    MatrixPlan {
        projection: p.name().to_owned(),
        n_in: n_in as u64,
        n_out: n_out as u64,
        rows: (state.split == Split::Rows).then(|| row_step(model, state, p).rows),
        programs: parts.len() as u32,
        tile_bytes: parts.iter().map(|part| part.bytes()).sum(),
    }
}

/// The resident items of all layers, best first: those the user named, then by what each adds per byte.
///
/// Inside a layer the order is that of its ranking: no item counts for more than the one before it.
fn resident<'a>(
    choices: &'a [Choices<'_>],
    layers: &[LayerPlan],
    states: &[State],
    weights: Weights,
) -> Vec<Resident<'a>> {
    let mut items: Vec<(f64, f64, Resident<'a>)> = Vec::new();
    for ((choice, plan), &state) in choices.iter().zip(layers).zip(states) {
        let (mut key, mut share) = (f64::INFINITY, f64::INFINITY);
        for (at, item) in plan.ranking.iter().take(plan.resident as usize).enumerate() {
            let calls = item.share * f64::from(plan.n_used);
            let value = |n: usize| choice.value(state.first(n), weights);
            let worth = match state.split {
                Split::Experts if item.forced => f64::INFINITY,
                Split::Experts if weights.hits > 0.0 => calls,
                Split::Experts => (value(at + 1) - value(at)) / item.bytes.max(1) as f64,
                // Rows of all experts save together what they save.
                Split::Rows => item.share * choice.value(state, weights) / item.bytes.max(1) as f64,
            };
            key = key.min(worth);
            share = share.min(calls);
            let (layer, expert) = (LayerId(plan.layer), ExpertId(item.expert));
            let parts = plan.projections(item.holds).iter().map(|&p| (p, parts_of(choice.model, state, p)));
            items.push((key, share, Resident { layer, expert, domain: plan.domain, parts: parts.collect() }));
        }
    }
    items.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
    items.into_iter().map(|(_, _, item)| item).collect()
}
