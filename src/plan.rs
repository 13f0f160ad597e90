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
mod place;
mod routing;
mod select;
mod sweep;
mod times;

use std::rc::Rc;

use thiserror::Error;

pub use capacity::{Capacity, Fit, capacity};
pub use cost::Parts;
pub use document::{
    Advice, Basis, Chunk, Cut, DomainFootprint, Footprint, Forecast, HitRate, HitRates, Holds, Item,
    LayerPlan, MatrixPlan, MemoryAccount, Note, Objective, Placed, Plan, ProfileId, Range, Regime, Verdict,
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
use crate::tile::TileError;
use crate::units::{Bytes, ExpertId, LayerId};
use cost::Rates;
use document::tidy;
use forecast::{Case, Hot};
use layer::{Curves, LayerModel};
use place::Resident;
use routing::{LayerRouting, SkewEnd};
use select::{Choices, Fronts, State, Weights};

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
}

impl<'a> PlanRequest<'a> {
    /// A request with every default.
    pub fn new(shape: &'a ModelShape, routing: Routing<'a>, profile: &'a DeviceProfile) -> PlanRequest<'a> {
        let (budget, ram, domains) = (None, None, 1);
        let (objective, force_hot) = (Objective::Auto, Vec::new());
        PlanRequest { shape, routing, profile, budget, domains, objective, force_hot, ram }
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
    #[error("the experts of --force-hot need {needed} in domain {domain}, the budget is {budget}")]
    ForceHotOverBudget {
        /// Bytes of them.
        needed: Bytes,
        /// In this domain.
        domain: u32,
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
    /// The domain of each layer.
    domains: Vec<u32>,
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
        let bytes = |model: &LayerModel| {
            let (gate_up, down) = model.bytes(page);
            (gate_up + down) * model.n_expert() as u64
        };
        let layer_bytes: Vec<u64> = cases[1].models.iter().map(bytes).collect();
        let domains = place::domains(&layer_bytes, request.domains);
        let planner = Planner { request, budget, cases, domains };
        check_forced_bytes(&planner.choices(), &planner.domains, budget)?;
        Ok(planner)
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
        let Planner { request, cases, domains, .. } = self;
        let &PlanRequest { shape, profile, objective, .. } = *request;
        check_window(budget, profile)?;
        let mut selector = Selector::new(self);
        check_forced_bytes(&selector.choices, domains, budget.0)?;
        let selected = selector.select(budget.0);
        let gap = selector.gap(&selected, budget.0);
        let Selected { weights, states, .. } = selected;
        let (likely, choices) = (&cases[1], &selector.choices);
        let hot = [Regime::Decode, Regime::Prefill]
            .map(|regime| best_hot(request, likely, choices, domains, &states, regime, weights));
        let cuts = cuts(request, likely, &states, &hot);
        let layers = layer_plans(shape, choices, domains, &states);
        let chunks = place::place(&resident(choices, &layers, weights), request.domains, profile);
        let footprint = place::footprint(&chunks, request.domains, profile)?;
        let decode = forecast::forecast(shape, cases, Regime::Decode, &hot[0]);
        let prefill = forecast::forecast(shape, cases, Regime::Prefill, &hot[1]);
        let memory = memory(request, &footprint);
        let hit_rates = forecast::hit_rates(shape, &request.routing, cases, &states);
        let profile_digest = blake3::hash(&profile.to_json()?).to_hex().to_string();
        Ok(Plan {
            schema: document::SCHEMA.to_owned(),
            verdict: forecast::verdict(&decode, &prefill, !request.force_hot.is_empty(), objective),
            forecasts: vec![decode, prefill],
            notes: notes(request, &layers, &likely.models, &hit_rates, &memory),
            profile: ProfileId { name: profile.name.clone(), digest: profile_digest },
            statistics: match request.routing {
                Routing::Measured(statistics) => Some(statistics.digest()?),
                Routing::Assumed(_) => None,
            },
            architecture: shape.architecture.clone(),
            objective,
            budget_bytes: budget.0,
            window_bytes: profile.window().0,
            n_domains: request.domains,
            footprint,
            hit_rates,
            memory,
            gap: tidy(gap),
            cuts,
            layers,
            chunks,
        })
    }

    /// The smallest budget that can be planned with: what the experts named by the user need in the fullest domain.
    pub fn least_budget(&self) -> Bytes {
        let mut needed = vec![0u64; self.request.domains as usize];
        for (choice, &domain) in self.choices().iter().zip(&self.domains) {
            needed[domain as usize] += choice.bytes_of(choice.base());
        }
        Bytes(needed.into_iter().max().unwrap_or(0))
    }

    fn choices(&self) -> Vec<Choices<'_>> {
        let likely = &self.cases[1];
        let page = self.request.profile.memory.page_bytes.value;
        let curves = likely.decode.iter().zip(&likely.prefill);
        let choices = likely.models.iter().zip(curves);
        choices.map(|(model, (decode, prefill))| Choices::new(model, decode, prefill, page)).collect()
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
    let available = profile.memory.domains.value;
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

fn check_forced_bytes(choices: &[Choices<'_>], domains: &[u32], budget: u64) -> Result<(), PlanError> {
    let mut needed = [0u64; 16];
    for (choice, &domain) in choices.iter().zip(domains) {
        let sum = &mut needed[domain as usize % 16];
        *sum += choice.bytes_of(choice.base());
        if *sum > budget {
            return Err(PlanError::ForceHotOverBudget { needed: Bytes(*sum), domain, budget: Bytes(budget) });
        }
    }
    Ok(())
}

/// Slowest, likely and fastest case.
fn cases(request: &PlanRequest<'_>, forced: &[Vec<u32>]) -> Result<Vec<Case>, PlanError> {
    let mut cases: Vec<Case> = Vec::new();
    for (bound, end) in Case::ENDS {
        let counted = cases.first().filter(|_| matches!(request.routing, Routing::Measured(_)));
        let models = match counted {
            Some(case) => Rc::clone(&case.models),
            None => Rc::new(models(request, forced, end)?),
        };
        cases.push(Case::new(Rates::of(request.profile, bound), models));
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

/// What was selected for one budget.
struct Selected {
    /// What seconds saved were worth; `None` where experts were chosen by hits.
    weights: Option<Weights>,
    states: Vec<State>,
    exact: bool,
}

/// Selects the states of all layers for one budget after the other; what no budget changes is kept.
struct Selector<'p> {
    planner: &'p Planner<'p>,
    choices: Vec<Choices<'p>>,
    /// For each domain its layers.
    layers: Vec<Vec<usize>>,
    /// For weights met before, each domain's fronts.
    fronts: Vec<(Weights, Vec<Fronts>)>,
}

impl<'p> Selector<'p> {
    fn new(planner: &'p Planner<'p>) -> Selector<'p> {
        let choices = planner.choices();
        let of = |domain| (0..choices.len()).filter(|&layer| planner.domains[layer] == domain).collect();
        let layers = (0..planner.request.domains).map(of).collect();
        Selector { planner, choices, layers, fronts: Vec::new() }
    }

    /// The states for a budget.
    ///
    /// A regime counts if the whole budget, given to it alone, makes it enough faster. With more budget a regime may
    /// begin to count; none ever ceases to.
    fn select(&mut self, budget: u64) -> Selected {
        let asked = match self.planner.request.objective {
            Objective::Decode => Weights { decode: 1.0, prefill: 0.0 },
            Objective::Prefill => Weights { decode: 0.0, prefill: 1.0 },
            Objective::Auto => Weights { decode: f64::from(ANSWER_TOKENS), prefill: 1.0 },
            Objective::Hits => {
                let by_hits = |mine: &[&Choices<'_>]| select::by_hits(mine, budget);
                let states = self.by_domain(|_, mine| by_hits(mine));
                return Selected { weights: None, states, exact: true };
            }
        };
        let decode = Weights { prefill: 0.0, ..asked };
        let prefill = Weights { decode: 0.0, ..asked };
        let weights = Weights {
            decode: if self.counts(Regime::Decode, decode, budget) { asked.decode } else { 0.0 },
            prefill: if self.counts(Regime::Prefill, prefill, budget) { asked.prefill } else { 0.0 },
        };
        let (states, exact) = self.best(weights, budget);
        Selected { weights: Some(weights), states, exact }
    }

    /// Whether a regime that has the budget to itself gains enough.
    fn counts(&mut self, regime: Regime, alone: Weights, budget: u64) -> bool {
        if !(alone.decode > 0.0 || alone.prefill > 0.0) {
            return false;
        }
        // With everything resident it gains as much as it ever can: most often that settles it.
        let most: Vec<State> = self.choices.iter().map(Choices::most).collect();
        self.gains(regime, alone, &most) && {
            let (states, _) = self.best(alone, budget);
            self.gains(regime, alone, &states)
        }
    }

    /// Whether a regime gains enough with these states.
    fn gains(&self, regime: Regime, weights: Weights, states: &[State]) -> bool {
        let Planner { request, cases, domains, .. } = self.planner;
        let hot = best_hot(request, &cases[1], &self.choices, domains, states, regime, Some(weights));
        let base = hots(&self.choices, domains, |choice| choice.base().gate_up, states);
        let seconds = |hot: &[Hot]| regime_seconds(request, &cases[1], regime, hot);
        seconds(&base) >= MIN_GAIN * seconds(&hot)
    }

    /// The states of all layers that save most, and whether that is certain.
    fn best(&mut self, weights: Weights, budget: u64) -> (Vec<State>, bool) {
        let (at, mut exact) = (self.fronts(weights), true);
        let states = self.by_domain(|domain, _| {
            let selection = self.fronts[at].1[domain].select(budget);
            exact &= selection.exact;
            selection.states
        });
        (states, exact)
    }

    /// The share of what is saved that any other choice could save more, at most; 0 for the best.
    fn gap(&mut self, selected: &Selected, budget: u64) -> f64 {
        let Some(weights) = selected.weights.filter(|_| !selected.exact) else { return 0.0 };
        let (at, mut bound, mut value) = (self.fronts(weights), 0.0, 0.0);
        self.by_domain(|domain, mine| {
            let states: Vec<State> =
                self.layers[domain].iter().map(|&layer| selected.states[layer]).collect();
            let (most, worth) = self.fronts[at].1[domain].bound(mine, weights, budget, &states);
            (bound, value) = (bound + most, value + worth);
            states
        });
        if value > 0.0 { (bound - value) / value } else { 0.0 }
    }

    /// What `select` gives for the layers of each domain, in the order of the layers.
    fn by_domain(&self, mut select: impl FnMut(usize, &[&Choices<'_>]) -> Vec<State>) -> Vec<State> {
        let mut states = vec![State::default(); self.choices.len()];
        for (domain, layers) in self.layers.iter().enumerate() {
            let mine: Vec<&Choices<'_>> = layers.iter().map(|&layer| &self.choices[layer]).collect();
            for (&layer, state) in layers.iter().zip(select(domain, &mine)) {
                states[layer] = state;
            }
        }
        states
    }

    /// Where the fronts for these weights are kept.
    fn fronts(&mut self, weights: Weights) -> usize {
        if let Some(at) = self.fronts.iter().position(|(known, _)| *known == weights) {
            return at;
        }
        let (grain, window) = (select::grain(&self.choices), self.planner.request.profile.window().0);
        let front = |layers: &Vec<usize>| {
            let mine: Vec<&Choices<'_>> = layers.iter().map(|&layer| &self.choices[layer]).collect();
            Fronts::new(&mine, weights, grain, window)
        };
        let fronts = self.layers.iter().map(front).collect();
        self.fronts.push((weights, fronts));
        self.fronts.len() - 1
    }
}

/// What of each layer is hot when the first `n` items are.
fn hots(
    choices: &[Choices<'_>],
    domains: &[u32],
    n: impl Fn(&Choices<'_>) -> usize,
    states: &[State],
) -> Vec<Hot> {
    let hot = |((choice, state), &domain): ((&Choices<'_>, &State), &u32)| {
        let n = n(choice);
        Hot { gate_up: n, down: n.min(state.down), domain }
    };
    choices.iter().zip(states).zip(domains).map(hot).collect()
}

/// How far one regime goes down: as far as is best in each layer, if the regime counts. Everything, where the plan was
/// made for hits.
///
/// Each domain that is used costs a switch per pass, so the best single domain competes with all of them.
fn best_hot(
    request: &PlanRequest<'_>,
    likely: &Case,
    choices: &[Choices<'_>],
    domains: &[u32],
    states: &[State],
    regime: Regime,
    weights: Option<Weights>,
) -> Vec<Hot> {
    let Some(weights) = weights else {
        let all = |(state, &domain): (&State, &u32)| Hot { gate_up: state.gate_up, down: state.down, domain };
        return states.iter().zip(domains).map(all).collect();
    };
    let base = hots(choices, domains, |choice| choice.base().gate_up, states);
    let weight = if regime == Regime::Decode { weights.decode } else { weights.prefill };
    if weight <= 0.0 {
        return base;
    }
    let curves = likely.curves(regime);
    let best: Vec<Hot> = (0..choices.len())
        .map(|i| {
            let n = choices[i].best_cut(&curves[i], states[i]);
            Hot { gate_up: n, down: n.min(states[i].down), domain: domains[i] }
        })
        .collect();
    let single = |domain: u32| -> Vec<Hot> {
        best.iter().zip(&base).map(|(best, base)| if best.domain == domain { *best } else { *base }).collect()
    };
    // The first of equals: nothing, rather than what gains nothing.
    let mut candidates = vec![base.clone(), best.clone()];
    if request.domains > 1 {
        candidates.extend((0..request.domains).map(single));
    }
    let seconds = |hot: &[Hot]| regime_seconds(request, likely, regime, hot);
    candidates.into_iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(base)
}

/// Seconds of one pass of a regime.
fn regime_seconds(request: &PlanRequest<'_>, likely: &Case, regime: Regime, hot: &[Hot]) -> f64 {
    let tokens = if regime == Regime::Decode { 1 } else { PROMPT_TOKENS };
    forecast::seconds(request.shape, &likely.rates, tokens, likely.curves(regime), hot)
}

/// Both cuts; prefill from the shortest batch on at which it gains, and at every longer one.
fn cuts(request: &PlanRequest<'_>, likely: &Case, states: &[State], hot: &[Vec<Hot>; 2]) -> Vec<Cut> {
    let [decode, prefill] = hot;
    let cold: Vec<Hot> = prefill.iter().map(|hot| Hot { gate_up: 0, down: 0, ..*hot }).collect();
    let gains = |tokens: u32| {
        let curves: Vec<Curves> =
            likely.models.iter().map(|model| model.batch(&likely.rates, tokens)).collect();
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
        let served = |(hot, model): (&Hot, &LayerModel)| -> f64 {
            let sum = |n: usize| model.inclusion[..n].iter().sum::<f64>();
            (2.0 * sum(hot.gate_up) + sum(hot.down)) / 3.0
        };
        let all: f64 = request.shape.moe_layers.iter().map(|moe| moe.n_used as f64).sum();
        let hit_rate = tidy(hot.iter().zip(likely.models.iter()).map(served).sum::<f64>() / all);
        let layers = hot.iter().zip(states).map(|(hot, state)| hot.gate_up.min(state.gate_up) as u32);
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
        let may_whole = choice.model.may_be_hot().1;
        let item = |at: usize| {
            let whole = match at < state.gate_up {
                true => at < state.down,
                false => may_whole && state.down == state.gate_up,
            };
            let saved = |curves: &Curves| {
                let down = |n: usize| if whole { n } else { n.min(state.down) };
                curves.at(at, down(at)) - curves.at(at + 1, down(at + 1))
            };
            Item {
                expert: choice.model.order[at],
                holds: if whole { Holds::Whole } else { Holds::GateUp },
                bytes: choice.bytes.0 + if whole { choice.bytes.1 } else { 0 },
                share: tidy(choice.model.inclusion[at] / moe.n_used as f64),
                decode_seconds: tidy(saved(choice.decode)),
                prefill_seconds: tidy(saved(choice.prefill)),
                forced: at < choice.model.n_forced,
            }
        };
        LayerPlan {
            layer: moe.layer.0,
            domain: domains[i],
            n_expert: moe.n_expert() as u32,
            n_used: moe.n_used as u32,
            matrices: Projection::ALL.map(|p| matrix_plan(moe, choice.model, p)).to_vec(),
            resident: state.gate_up as u32,
            ranking: (0..moe.n_expert()).map(item).collect(),
        }
    };
    shape.moe_layers.iter().enumerate().map(plan).collect()
}

fn matrix_plan(moe: &MoeLayerShape, model: &LayerModel, p: Projection) -> MatrixPlan {
    let (n_in, n_out) = moe.experts.first().map_or((0, 0), |e| (e[p as usize].n_in, e[p as usize].n_out));
    let parts = model.parts[p as usize].as_deref().unwrap_or_default();
    MatrixPlan {
        projection: p.name().to_owned(),
        n_in: n_in as u64,
        n_out: n_out as u64,
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
    weights: Option<Weights>,
) -> Vec<Resident<'a>> {
    let mut items: Vec<(f64, f64, Resident<'a>)> = Vec::new();
    for (choice, plan) in choices.iter().zip(layers) {
        let (mut key, mut share, mut n_whole) = (f64::INFINITY, f64::INFINITY, 0);
        for (at, item) in plan.ranking.iter().take(plan.resident as usize).enumerate() {
            let whole = usize::from(item.holds == Holds::Whole);
            n_whole += whole;
            let worth = match weights {
                _ if item.forced => f64::INFINITY,
                None => item.share * f64::from(plan.n_used),
                Some(weights) => {
                    let value = |gate_up, down| choice.value(State { gate_up, down }, weights);
                    (value(at + 1, n_whole) - value(at, n_whole - whole)) / item.bytes.max(1) as f64
                }
            };
            key = key.min(worth);
            share = share.min(item.share * f64::from(plan.n_used));
            let (layer, expert) = (LayerId(plan.layer), ExpertId(item.expert));
            let (domain, parts) = (plan.domain, &choice.model.parts);
            items.push((key, share, Resident { layer, expert, holds: item.holds, domain, parts }));
        }
    }
    items.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1)));
    items.into_iter().map(|(_, _, item)| item).collect()
}

fn memory(request: &PlanRequest<'_>, footprint: &Footprint) -> MemoryAccount {
    let shape = request.shape;
    let experts: u64 =
        shape.moe_layers.iter().flat_map(|moe| &moe.experts).flatten().map(|matrix| matrix.bytes).sum();
    let source_bytes = experts + shape.dense_bytes;
    let kv_bytes = shape.kv_bytes_per_token.saturating_mul(u64::from(CONTEXT_TOKENS));
    let state_bytes = shape.state_bytes;
    let total = [source_bytes, footprint.weight_bytes, footprint.scratch_bytes, kv_bytes, state_bytes];
    MemoryAccount {
        source_bytes,
        npu_bytes: footprint.weight_bytes,
        scratch_bytes: footprint.scratch_bytes,
        kv_bytes,
        state_bytes,
        context_tokens: CONTEXT_TOKENS,
        total_bytes: total.into_iter().fold(0, u64::saturating_add),
        ram_bytes: request.ram.map_or(request.profile.memory.ram_bytes.value, |ram| ram.0),
    }
}

fn notes(
    request: &PlanRequest<'_>,
    layers: &[LayerPlan],
    models: &[LayerModel],
    hit_rates: &HitRates,
    memory: &MemoryAccount,
) -> Vec<Note> {
    let mut notes = Vec::new();
    match request.routing {
        Routing::Assumed(_) => {
            notes.push(Note::AssumedRouting);
            if request.shape.moe_layers.iter().all(MoeLayerShape::uses_all) {
                notes.push(Note::NoSkew { hotter_half: 0.5 });
            }
        }
        Routing::Measured(statistics) => {
            let coverage = statistics.coverage();
            if coverage.is_thin() {
                notes.push(Note::TooFewTokens { tokens: coverage.tokens, wanted: coverage.tokens_wanted });
            }
            if !coverage.never_seen.is_empty() {
                let experts = coverage.never_seen.iter().map(|(layer, expert)| (layer.0, expert.0));
                notes.push(Note::NeverSeen { experts: experts.collect(), of: coverage.n_experts });
            }
            if statistics.held_out.is_none() {
                notes.push(Note::NoHeldOut);
            }
            let hotter_half = forecast::hotter_half(statistics, models);
            if hotter_half <= 0.5 * EVEN {
                notes.push(Note::NoSkew { hotter_half: tidy(hotter_half) });
            }
            let calibration = hit_rates.overall.calibration.value;
            if let Some(held_out) = hit_rates.overall.held_out.filter(|held_out| held_out.high < calibration)
            {
                notes.push(Note::Drift { calibration, held_out: held_out.value });
            }
        }
    }
    if memory.total_bytes > memory.ram_bytes {
        notes.push(Note::OverRam { needed: memory.total_bytes, ram: memory.ram_bytes });
    }
    for projection in Projection::ALL {
        let of = |layer: &LayerPlan| layer.matrices.get(projection as usize).cloned();
        let found = |test: fn(&MatrixPlan) -> bool| {
            layers.iter().find_map(|layer| Some((layer.layer, of(layer).filter(test)?)))
        };
        let name = projection.name().to_owned();
        if let Some((layer, _)) = found(|matrix| matrix.programs == 0) {
            notes.push(Note::StaysOnCpu { layer, projection: name.clone() });
        }
        let factor =
            |matrix: &MatrixPlan| matrix.tile_bytes as f64 / (matrix.n_in * matrix.n_out).max(1) as f64;
        let padded =
            |matrix: &MatrixPlan| matrix.tile_bytes as f64 > 1.1 * (matrix.n_in * matrix.n_out) as f64;
        if let Some((layer, matrix)) = found(padded) {
            notes.push(Note::Padded { layer, projection: name, factor: tidy(factor(&matrix)) });
        }
    }
    notes
}
