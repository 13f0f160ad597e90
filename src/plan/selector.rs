//! Decides for one budget after the other: which regimes count, what is selected for them, how far down each goes.

use rayon::prelude::*;

use super::document::{MemoryAccount, Objective, Regime};
use super::forecast::{self, Case, Hot};
use super::paging::{self, Paging};
use super::select::{self, Choices, Fronts, Weights};
use super::state::State;
use super::{ANSWER_TOKENS, MIN_GAIN, PROMPT_TOKENS, PlanError, PlanRequest, Planner, memory};
use crate::units::Bytes;

/// Steps of the window at which the memory that copies take is weighed against the model's.
const MEMORY_STEPS: u64 = 16;

/// What was selected for one budget.
pub(super) struct Selected<'p> {
    /// What counted.
    pub weights: Weights,
    pub states: Vec<State>,
    /// Bytes of the budget that were used at most: fewer where the model's own weights need the memory.
    pub usable: u64,
    /// The domain of each layer.
    pub domains: &'p [u32],
    exact: bool,
}

/// Selects for one budget after the other, in as many domains as serve best.
pub(super) struct Selectors<'p> {
    /// With one domain, with two, and so on.
    selectors: Vec<Selector<'p>>,
}

impl<'p> Selectors<'p> {
    pub fn new(planner: &'p Planner<'p>) -> Selectors<'p> {
        let selectors = planner.layouts.iter().map(|domains| Selector::new(planner, domains));
        Selectors { selectors: selectors.collect() }
    }

    /// What each layer can have.
    pub fn choices(&self) -> &[Choices<'p>] {
        self.selectors.first().map_or(&[], |selector| &selector.choices)
    }

    /// The states for a budget. Every domain that is used costs a switch per pass, so fewer may do better; among equals
    /// the fewest. Made for hits, a plan uses all.
    ///
    /// # Errors
    ///
    /// [`PlanError::ForceHotOverBudget`] where what the user demands is more, in any number of domains.
    pub fn select(&mut self, budget: u64) -> Result<Selected<'p>, PlanError> {
        let mut best: Option<(f64, Selected<'p>)> = None;
        let alone = self.selectors.len() == 1;
        for selector in self.selectors.iter_mut().filter(|s| s.fullest(Choices::base) <= budget) {
            let selected = selector.select(budget);
            let counts = selected.weights.hits <= 0.0 && !alone;
            let seconds = if counts { selector.seconds_with_disk(&selected).iter().sum() } else { 0.0 };
            if best.as_ref().is_none_or(|(least, _)| seconds < *least || !counts) {
                best = Some((seconds, selected));
            }
        }
        let needed = || PlanError::ForceHotOverBudget {
            needed: Bytes(self.fullest(Choices::base).0),
            budget: Bytes(budget),
        };
        best.map(|(_, selected)| selected).ok_or_else(needed)
    }

    /// The share of what is saved that any other choice in these domains could save more, at most; 0 for the best.
    pub fn gap(&mut self, selected: &Selected<'p>) -> f64 {
        let chosen = |selector: &&mut Selector<'p>| selector.domains == selected.domains;
        self.selectors.iter_mut().find(chosen).map_or(0.0, |selector| selector.gap(selected))
    }

    /// Least bytes of the fullest domain with these states, over all numbers of domains, and most.
    pub fn fullest(&self, state: fn(&Choices<'p>) -> State) -> (u64, u64) {
        let bytes = self.selectors.iter().map(|selector| selector.fullest(state));
        (bytes.clone().min().unwrap_or(0), bytes.max().unwrap_or(0))
    }
}

/// Selects the states of all layers for one budget after the other; what no budget changes is kept.
struct Selector<'p> {
    planner: &'p Planner<'p>,
    choices: Vec<Choices<'p>>,
    /// The domain of each layer.
    domains: &'p [u32],
    /// For each domain its layers.
    layers: Vec<Vec<usize>>,
    /// For weights met before, each domain's fronts.
    fronts: Vec<(Weights, Vec<Fronts>)>,
    /// Bytes of the window, and seconds of both regimes as far as the plan is made for them, as far as they were needed.
    with_disk: Vec<(u64, [f64; 2])>,
}

impl<'p> Selector<'p> {
    fn new(planner: &'p Planner<'p>, domains: &'p [u32]) -> Selector<'p> {
        let choices = planner.choices();
        let of = |domain| (0..choices.len()).filter(|&layer| domains[layer] == domain).collect();
        let layers = (0..n_domains(domains)).map(of).collect();
        Selector { planner, choices, domains, layers, fronts: Vec::new(), with_disk: Vec::new() }
    }

    /// Bytes of the fullest domain with these states.
    fn fullest(&self, state: fn(&Choices<'p>) -> State) -> u64 {
        let bytes = |layer: &usize| self.choices[*layer].bytes_of(state(&self.choices[*layer]));
        self.layers.iter().map(|layers| layers.iter().map(bytes).sum()).max().unwrap_or(0)
    }

    /// The states for a budget: within all of it, or what of it leaves the model's own weights in memory.
    fn select(&mut self, budget: u64) -> Selected<'p> {
        let usable = self.usable(budget);
        self.select_within(usable)
    }

    /// A regime counts if the whole budget, given to it alone, makes it enough faster. With more budget a regime may
    /// begin to count; none ever ceases to.
    fn select_within(&mut self, budget: u64) -> Selected<'p> {
        let asked = weights_of(self.planner.request.objective);
        let decode = Weights { decode: asked.decode, ..Weights::NONE };
        let prefill = Weights { prefill: asked.prefill, ..Weights::NONE };
        let weights = Weights {
            decode: if self.counts(Regime::Decode, decode, budget) { asked.decode } else { 0.0 },
            prefill: if self.counts(Regime::Prefill, prefill, budget) { asked.prefill } else { 0.0 },
            hits: asked.hits,
        };
        let (states, exact) = self.best(weights, budget);
        Selected { weights, states, usable: budget, domains: self.domains, exact }
    }

    /// Whether a regime that has the budget to itself gains enough.
    fn counts(&mut self, regime: Regime, alone: Weights, budget: u64) -> bool {
        if !(alone.decode > 0.0 || alone.prefill > 0.0) {
            return false;
        }
        // Where even the best of every phase of every layer is not enough, that settles it.
        self.may_gain(regime) && {
            let (states, _) = self.best(alone, budget);
            self.gains(regime, alone, &states)
        }
    }

    /// Whether a regime could gain enough if every layer were as fast as it ever is.
    fn may_gain(&self, regime: Regime) -> bool {
        let Planner { request, cases, .. } = self.planner;
        let base = bases(&self.choices, self.domains);
        let seconds = regime_seconds(request, &cases[1], regime, &base);
        let curves = cases[1].curves(regime);
        let saved: f64 =
            curves.iter().zip(&base).map(|(curves, hot)| curves.of(hot.state) - curves.least()).sum();
        seconds >= MIN_GAIN * (seconds - saved)
    }

    /// Whether a regime gains enough with these states.
    fn gains(&self, regime: Regime, weights: Weights, states: &[State]) -> bool {
        let Planner { request, cases, .. } = self.planner;
        let hot = best_hot(request, &cases[1], &self.choices, self.domains, states, regime, weights);
        let base = bases(&self.choices, self.domains);
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
    fn gap(&mut self, selected: &Selected<'p>) -> f64 {
        let weights = selected.weights;
        if selected.exact {
            return 0.0;
        }
        let (at, mut bound, mut value) = (self.fronts(weights), 0.0, 0.0);
        self.by_domain(|domain, mine| {
            let states: Vec<State> =
                self.layers[domain].iter().map(|&layer| selected.states[layer]).collect();
            let (most, worth) = self.fronts[at].1[domain].bound(mine, weights, selected.usable, &states);
            (bound, value) = (bound + most, value + worth);
            states
        });
        if value > 0.0 { (bound - value) / value } else { 0.0 }
    }

    /// Bytes of these states.
    fn bytes(&self, states: &[State]) -> u64 {
        self.choices.iter().zip(states).map(|(choice, &state)| choice.bytes_of(state)).sum()
    }

    /// Bytes of everything that can be resident.
    fn all_bytes(&self) -> u64 {
        self.choices.iter().map(|choice| choice.bytes_of(choice.most())).sum()
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
            Fronts::new(&mine, weights, grain, window, select::MOST_UNITS)
        };
        let fronts = self.layers.iter().map(front).collect();
        self.fronts.push((weights, fronts));
        self.fronts.len() - 1
    }

    /// How much of a budget to use: all of it where the model then still fits into memory. Else copies take away what
    /// the model's own weights would fill, and whole steps of the window are compared, and what just fits beside the model.
    fn usable(&mut self, budget: u64) -> u64 {
        let Planner { request, .. } = self.planner;
        let asked = request.objective == Objective::Hits || !request.force_hot.is_empty();
        let all = budget.saturating_mul(self.layers.len() as u64).min(self.all_bytes());
        let needed = self.account(all).total_bytes.saturating_add(paging::KEPT_FREE);
        if asked || needed <= self.account(all).ram_bytes {
            return budget;
        }
        let step = (request.profile.window().0 / MEMORY_STEPS).max(1);
        let beside = self.account(1).total_bytes.saturating_add(paging::KEPT_FREE);
        let fitting = self.account(1).ram_bytes.saturating_sub(beside) / self.layers.len().max(1) as u64;
        let tried =
            (0..=budget / step).map(|i| i * step).chain(Some(fitting).filter(|bytes| *bytes <= budget));
        let tried: Vec<u64> = tried.collect();
        self.weigh(&tried);
        let tried: Vec<(u64, [f64; 2])> = tried.iter().map(|&bytes| (bytes, self.within(bytes))).collect();
        // One regime must not pay for the other: none may be slower than with nothing resident.
        let cold = self.within(0);
        let tried = tried.iter().filter(|(_, now)| now.iter().zip(&cold).all(|(now, cold)| now <= cold));
        let best =
            tried.min_by(|a, b| a.1.iter().sum::<f64>().total_cmp(&b.1.iter().sum()).then(a.0.cmp(&b.0)));
        best.map_or(budget, |(bytes, _)| *bytes)
    }

    /// Computes the seconds of both regimes with so many bytes of the window, for each of these that is not known.
    fn weigh(&mut self, tried: &[u64]) {
        let known = |bytes: &u64| self.with_disk.iter().any(|(known, _)| known == bytes);
        let new: Vec<u64> = tried.iter().copied().filter(|bytes| !known(bytes)).collect();
        let selected: Vec<Selected<'p>> = new.iter().map(|&bytes| self.select_within(bytes)).collect();
        let seconds: Vec<[f64; 2]> =
            selected.par_iter().map(|selected| self.seconds_with_disk(selected)).collect();
        self.with_disk.extend(new.into_iter().zip(seconds));
    }

    /// Seconds of both regimes with so many bytes of the window, computed once.
    fn within(&mut self, bytes: u64) -> [f64; 2] {
        self.weigh(&[bytes]);
        self.with_disk.iter().find(|(known, _)| *known == bytes).map_or([0.0; 2], |(_, seconds)| *seconds)
    }

    /// The memory account with copies of so many bytes, all of the scratch counted.
    fn account(&self, bytes: u64) -> MemoryAccount {
        let request = self.planner.request;
        let scratch = request.profile.memory.scratch_reserve_bytes.value;
        memory(request, bytes, if bytes > 0 { scratch } else { 0 })
    }

    /// Seconds of both regimes as far as the plan is made for them, what is read from disk included.
    fn seconds_with_disk(&self, selected: &Selected<'p>) -> [f64; 2] {
        let Planner { request, cases, .. } = self.planner;
        let Selected { states, weights, domains, .. } = selected;
        let (likely, asked) = (&cases[1], weights_of(request.objective));
        let account = self.account(self.bytes(states));
        let paging = Paging::beside(&account, account.npu_bytes + account.scratch_bytes);
        let seconds = |(regime, weight): (Regime, f64)| {
            if weight <= 0.0 {
                return 0.0;
            }
            let hot = best_hot(request, likely, &self.choices, domains, states, regime, *weights);
            let tokens = if regime == Regime::Decode { 1 } else { PROMPT_TOKENS };
            let read = paging.bytes(request, likely, &hot, tokens);
            weight * (regime_seconds(request, likely, regime, &hot) + read / likely.disk_bytes)
        };
        [(Regime::Decode, asked.decode), (Regime::Prefill, asked.prefill)].map(seconds)
    }
}

/// How many domains there are.
pub(super) fn n_domains(domains: &[u32]) -> u32 {
    domains.iter().max().map_or(1, |last| last + 1)
}

/// What counts for an objective.
fn weights_of(objective: Objective) -> Weights {
    match objective {
        Objective::Decode => Weights { decode: 1.0, ..Weights::NONE },
        Objective::Prefill => Weights { prefill: 1.0, ..Weights::NONE },
        Objective::Auto => Weights { decode: f64::from(ANSWER_TOKENS), prefill: 1.0, hits: 0.0 },
        Objective::Hits => Weights { hits: 1.0, ..Weights::NONE },
    }
}

/// What the user demands of each layer.
fn bases(choices: &[Choices<'_>], domains: &[u32]) -> Vec<Hot> {
    let hot = |(choice, &domain): (&Choices<'_>, &u32)| Hot { state: choice.base(), domain };
    choices.iter().zip(domains).map(hot).collect()
}

/// How far one regime goes down: as far as is best in each layer, if the regime counts. Everything, where the plan was
/// made for hits.
///
/// Each domain that is used costs a switch per pass, so the best single domain competes with all of them.
pub(super) fn best_hot(
    request: &PlanRequest<'_>,
    likely: &Case,
    choices: &[Choices<'_>],
    domains: &[u32],
    states: &[State],
    regime: Regime,
    weights: Weights,
) -> Vec<Hot> {
    if weights.hits > 0.0 {
        let all = |(&state, &domain): (&State, &u32)| Hot { state, domain };
        return states.iter().zip(domains).map(all).collect();
    }
    let base = bases(choices, domains);
    let weight = if regime == Regime::Decode { weights.decode } else { weights.prefill };
    if weight <= 0.0 {
        return base;
    }
    let curves = likely.curves(regime);
    let best: Vec<Hot> = (0..choices.len())
        .map(|i| {
            let n = choices[i].best_cut(&curves[i], states[i]);
            Hot { state: states[i].first(n), domain: domains[i] }
        })
        .collect();
    let single = |domain: u32| -> Vec<Hot> {
        best.iter().zip(&base).map(|(best, base)| if best.domain == domain { *best } else { *base }).collect()
    };
    // The first of equals: nothing, rather than what gains nothing.
    let mut candidates = vec![base.clone(), best.clone()];
    let n_domains = n_domains(domains);
    if n_domains > 1 {
        candidates.extend((0..n_domains).map(single));
    }
    let seconds = |hot: &[Hot]| regime_seconds(request, likely, regime, hot);
    candidates.into_iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or(base)
}

/// Seconds of one pass of a regime.
fn regime_seconds(request: &PlanRequest<'_>, likely: &Case, regime: Regime, hot: &[Hot]) -> f64 {
    let tokens = if regime == Regime::Decode { 1 } else { PROMPT_TOKENS };
    forecast::seconds(request.shape, &likely.rates, tokens, likely.curves(regime), hot)
}
