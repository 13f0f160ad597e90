//! Which experts become resident: the best states of all layers inside a budget.
//!
//! A layer's state is how many of its experts, best first, have gate and up resident, and how many have down; or how
//! many rows of every expert's gate and up, and of its down. One state is taken of each layer, the sum of their bytes is
//! bounded, the sum of what they are worth as large as can be: a multiple-choice knapsack. It is solved exactly, in
//! three steps. Climbing the concave hulls of all layers together, steepest first, gives a price per byte, a good choice
//! and a bound that no choice exceeds. At that price most states lose more than the bound is above the choice: they are
//! left out. The few that remain are combined layer by layer, budget by budget.
//!
//! What a state is worth counts only as far down as each regime would go, so that more residency is never worth
//! less, nor is a larger budget.

use rayon::prelude::*;

use super::document::Shares;
use super::layer::{Curves, LayerModel, Phases};
use super::rows::RowStep;
use super::state::{Split, State};

/// Budgets that are told apart at most: above, bytes are counted in larger units, rounded up.
pub(super) const MOST_UNITS: u64 = 1 << 16;

/// Experts of a layer whose numbers of gates and downs are combined one by one; above, in steps.
const FINE: usize = 256;

/// Combinations that are looked at for one layer; if there are more, the least promising are left out.
const MOST_COMBINATIONS: usize = 1 << 21;

/// A layer's choices: its costs in both regimes.
pub(super) struct Choices<'a> {
    pub model: &'a LayerModel,
    pub decode: &'a Curves,
    pub prefill: &'a Curves,
    /// Bytes of one expert's gate and up, and of its down.
    pub bytes: (u64, u64),
    /// The same by steps of rows, of all experts; only the first where rows are not to be shared.
    row_bytes: (Vec<u64>, Vec<u64>),
    /// Whether experts may be resident as a whole.
    by_experts: bool,
    base: State,
    most: State,
    /// `[n_expert + 1]`: calls per token that the first experts get.
    served: Vec<f64>,
}

/// What counts: seconds saved per decoded token, seconds saved per prompt, or calls served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Weights {
    pub decode: f64,
    pub prefill: f64,
    pub hits: f64,
}

impl Weights {
    pub const NONE: Weights = Weights { decode: 0.0, prefill: 0.0, hits: 0.0 };
}

/// What was selected in one domain.
pub(super) struct Selection {
    pub states: Vec<State>,
    /// Whether every combination was weighed.
    pub exact: bool,
}

impl<'a> Choices<'a> {
    pub fn new(
        model: &'a LayerModel,
        decode: &'a Curves,
        prefill: &'a Curves,
        shares: Shares,
        page: u64,
    ) -> Choices<'a> {
        let (gate_up, down) = model.may_be_hot();
        let n = |may: bool| if may { model.n_expert() } else { 0 };
        let all = State::experts(n(gate_up), n(down));
        let base = State::experts(model.n_forced.min(all.gate_up), model.n_forced.min(all.down));
        // Experts that the user named are resident whole, and a layer is shared in one way only.
        let by_rows = shares != Shares::Experts && model.n_forced == 0;
        let by_experts = shares != Shares::Rows || model.n_forced > 0;
        let row_bytes = |steps: &[RowStep], matrices: u64| -> Vec<u64> {
            let bytes = |step: &RowStep| step.bytes(page) * matrices * model.n_expert() as u64;
            steps.iter().take(if by_rows { steps.len() } else { 1 }).map(bytes).collect()
        };
        let row_bytes = (row_bytes(&model.rows.gate_up, 2), row_bytes(&model.rows.down, 1));
        let most = match by_experts {
            true => all,
            false => State::rows(row_bytes.0.len() - 1, row_bytes.1.len() - 1),
        };
        let mut served = vec![0.0];
        for (at, used) in model.inclusion.iter().enumerate() {
            served.push(served[at] + used);
        }
        let bytes = model.bytes(page);
        Choices { model, decode, prefill, bytes, row_bytes, by_experts, base, most, served }
    }

    /// Calls per token that a state serves, mean of the three projections, beyond what the user demands. Among equals
    /// whole experts: fewer calls are then split between the two sides.
    fn hits(&self, state: State) -> f64 {
        let of = |gate_up: usize, down: usize| {
            (2.0 * self.served[gate_up] + self.served[down]) / 3.0 + 1e-9 * self.served[gate_up.min(down)]
        };
        match state.split {
            Split::Experts => of(state.gate_up, state.down) - of(self.base.gate_up, self.base.down),
            Split::Rows => self.model.served(state),
        }
    }

    /// What must be resident: the experts that the user named.
    pub fn base(&self) -> State {
        self.base
    }

    /// So many items of the ranking are hot in any case.
    pub fn base_items(&self) -> usize {
        self.base.n_items(self.model.n_expert())
    }

    /// What can be resident at most.
    pub fn most(&self) -> State {
        self.most
    }

    pub fn bytes_of(&self, state: State) -> u64 {
        match state.split {
            Split::Experts => state.gate_up as u64 * self.bytes.0 + state.down as u64 * self.bytes.1,
            Split::Rows => self.row_bytes.0[state.gate_up] + self.row_bytes.1[state.down],
        }
    }

    /// Every size that a budget is compared with is a sum of multiples of these.
    fn sizes(&self) -> impl Iterator<Item = u64> {
        let experts = if self.by_experts { [self.bytes.0, self.bytes.1] } else { [0, 0] };
        experts.into_iter().chain(self.row_bytes.0.iter().copied()).chain(self.row_bytes.1.iter().copied())
    }

    /// How many items of the ranking are best hot, given what is resident; the fewest among equals. Rows are hot in all
    /// experts or in none.
    pub fn best_cut(&self, curves: &Curves, state: State) -> usize {
        let n_expert = self.model.n_expert();
        let cost = |n: usize| curves.of(state.first(n));
        let better = |best: usize, n: usize| if cost(n) < cost(best) { n } else { best };
        match state.split {
            Split::Rows => better(0, state.n_items(n_expert)),
            Split::Experts => {
                let base = self.base_items();
                (base..=state.n_items(n_expert)).fold(base, better)
            }
        }
    }

    /// What a state is worth against the one that the user demands, each regime going down as far as is best for it.
    pub fn value(&self, state: State, weights: Weights) -> f64 {
        let saved =
            |curves: &Curves| curves.of(self.base) - curves.of(state.first(self.best_cut(curves, state)));
        let of = |weight: f64, curves: &Curves| if weight > 0.0 { weight * saved(curves) } else { 0.0 };
        of(weights.decode, self.decode) + of(weights.prefill, self.prefill) + weights.hits * self.hits(state)
    }

    /// Calls `visit` with states and what each is worth; see [`Choices::expert_states`] for `step`.
    fn states(&self, weights: Weights, step: usize, visit: &mut impl FnMut(State, f64)) {
        if self.by_experts {
            self.expert_states(weights, step, visit);
        }
        // A call is served by a whole expert: shares of rows count as hits only where nothing else may be resident.
        if !self.by_experts || weights.hits <= 0.0 {
            self.row_states(weights, visit);
        }
    }

    /// Every pair of steps of rows. What is all of a phase is the same as all experts, and left to these.
    fn row_states(&self, weights: Weights, visit: &mut impl FnMut(State, f64)) {
        let regimes = [(weights.decode, self.decode), (weights.prefill, self.prefill)];
        let (gate_up, down) = (self.row_bytes.0.len() - 1, self.row_bytes.1.len() - 1);
        for g in 0..=gate_up {
            for d in 0..=down {
                if self.by_experts && (g == 0 || g == gate_up) && (d == 0 || d == down) {
                    continue;
                }
                let state = State::rows(g, d);
                let mut worth = if weights.hits > 0.0 { weights.hits * self.hits(state) } else { 0.0 };
                for (weight, curves) in regimes {
                    if weight > 0.0 {
                        worth += weight * (curves.rows.at(0, 0) - curves.of(state)).max(0.0);
                    }
                }
                visit(state, worth);
            }
        }
    }

    /// Calls `visit` with states of experts: every one, or where `step` is above 1 those with equal numbers, those with
    /// no more of one of the two than the user demands, and every so many beside.
    fn expert_states(&self, weights: Weights, step: usize, visit: &mut impl FnMut(State, f64)) {
        let base = self.base_items();
        // Of both regimes the least cost of a cut of whole experts, up to so many.
        let whole = [self.decode, self.prefill].map(|curves| -> Vec<f64> {
            let mut least = f64::INFINITY;
            let cost = |n: usize| {
                least = if n < base { least } else { curves.experts.at(n, n).min(least) };
                least
            };
            (0..=self.most.gate_up.min(self.most.down)).map(cost).collect()
        });
        let sides = [(weights.decode, self.decode, &whole[0]), (weights.prefill, self.prefill, &whole[1])];
        // As many gates as downs or more, then fewer.
        for more_gates in [true, false] {
            let split = |State { gate_up, down, .. }: State| {
                if more_gates { (down, gate_up) } else { (gate_up, down) }
            };
            let ((short_base, long_base), (most_short, most_long)) = (split(self.base), split(self.most));
            for short in short_base..=most_short {
                let first = short.max(long_base) + usize::from(!more_gates && short >= long_base);
                // Of either regime the costs further on, and the least so far: at first that of a cut of whole experts.
                let [decode, prefill] = sides.map(|(weight, curves, whole)| {
                    let Phases { gate_up, down } = &curves.experts;
                    let (short_curve, long) = if more_gates { (down, gate_up) } else { (gate_up, down) };
                    let least = whole.get(short).copied().unwrap_or(f64::INFINITY);
                    let costs = long.get(first..=most_long).unwrap_or_default();
                    (Line { weight, base: curves.of(self.base), short: short_curve[short], least }, costs)
                });
                let ((mut decode, decode_costs), (mut prefill, prefill_costs)) = (decode, prefill);
                let mut last = f64::NEG_INFINITY;
                for (long, (of_decode, of_prefill)) in (first..).zip(decode_costs.iter().zip(prefill_costs)) {
                    let mut worth = decode.saved(*of_decode) + prefill.saved(*of_prefill);
                    let (gate_up, down) = if more_gates { (long, short) } else { (short, long) };
                    let state = State::experts(gate_up, down);
                    if weights.hits > 0.0 {
                        worth += weights.hits * self.hits(state);
                    }
                    let every = step == 1 || (short.is_multiple_of(step) && long.is_multiple_of(step));
                    // More that saves nothing is of no use.
                    if worth > last && (every || long == first || short == short_base) {
                        last = worth;
                        visit(state, worth);
                    }
                }
            }
        }
    }

    /// Most that a state can be worth when a byte costs so much.
    fn most_worth(&self, weights: Weights, price: f64) -> f64 {
        let (base, mut most) = (self.bytes_of(self.base), f64::NEG_INFINITY);
        self.states(weights, 1, &mut |state, value| {
            most = most.max(value - price * (self.bytes_of(state) - base) as f64);
        });
        most
    }
}

/// States of one regime with one number in common: what they save is `base` less the cost of the best cut.
struct Line {
    weight: f64,
    /// Cost of what the user demands.
    base: f64,
    /// Cost of the phase with the number in common.
    short: f64,
    /// Cost of the best cut so far.
    least: f64,
}

impl Line {
    /// What is saved when the other phase may cost so much too, times the regime's weight.
    #[inline]
    fn saved(&mut self, long: f64) -> f64 {
        self.least = self.least.min(self.short + long);
        self.weight * (self.base - self.least)
    }
}

/// A state with what it takes of the budget and what it is worth; short, as there are thousands for each layer.
#[derive(Clone, Copy, Debug)]
struct Point {
    value: f64,
    units: u32,
    gate_up: u32,
    down: u32,
    split: Split,
}

impl Point {
    fn new(state: State, units: u32, value: f64) -> Point {
        let State { split, gate_up, down } = state;
        Point { value, units, gate_up: gate_up as u32, down: down as u32, split }
    }

    fn state(self) -> State {
        State { split: self.split, gate_up: self.gate_up as usize, down: self.down as usize }
    }
}

/// A state as one number.
fn packed(State { split, gate_up, down }: State) -> u64 {
    u64::from(split == Split::Rows) << 63 | (gate_up as u64) << 32 | down as u64
}

fn unpacked(state: u64) -> State {
    let split = if state >> 63 == 1 { Split::Rows } else { Split::Experts };
    State { split, gate_up: (state >> 32 & 0x7fff_ffff) as usize, down: (state & 0xffff_ffff) as usize }
}

/// The states that none beats with as few units, by units; at the front the one that the user demands.
fn front(choice: &Choices<'_>, weights: Weights, unit: u64, most_units: u64) -> Vec<Point> {
    let base = choice.bytes_of(choice.base);
    // Most often units divide all sizes; then there is nothing to round, state by state.
    let whole = choice.sizes().all(|size| size.is_multiple_of(unit));
    let (gate_up, down, first) = (choice.bytes.0 / unit, choice.bytes.1 / unit, base / unit);
    let units = |state: State| match (whole, state.split) {
        (true, Split::Experts) => state.gate_up as u64 * gate_up + state.down as u64 * down - first,
        _ => (choice.bytes_of(state) - base).div_ceil(unit),
    };
    let length = units(choice.most).min(most_units) as usize + 1;
    // Most states are worth less than one that was seen: values alone are short enough for the second cache.
    let (mut values, mut best) = (vec![f64::NEG_INFINITY; length], vec![0u64; length]);
    let step = choice.model.n_expert().div_ceil(FINE).max(1);
    choice.states(weights, step, &mut |state, value| {
        let at = units(state);
        let Some(known) = values.get_mut(at as usize) else { return };
        if value > *known {
            *known = value;
            best[at as usize] = packed(state);
        }
    });
    let mut front = vec![Point::new(choice.base, 0, 0.0)];
    for ((units, value), state) in (0..).zip(values).zip(best) {
        // What differs by less is rounding.
        if front.last().is_some_and(|last| value > last.value + 1e-13) {
            front.push(Point::new(unpacked(state), units, value));
        }
    }
    front
}

/// The upper concave hull of a front.
fn hull(front: &[Point]) -> Vec<Point> {
    let mut hull: Vec<Point> = Vec::new();
    for &point in front {
        while let [.., a, b] = hull[..] {
            if slope(a, b) > slope(b, point) {
                break;
            }
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

/// Value per unit between two points.
fn slope(a: Point, b: Point) -> f64 {
    (b.value - a.value) / f64::from(b.units.saturating_sub(a.units).max(1))
}

/// The choices of one domain, whatever the budget.
pub(super) struct Fronts {
    /// Bytes of a unit.
    unit: u64,
    /// Each layer's states worth considering.
    fronts: Vec<Vec<Point>>,
    /// The steps of all hulls, steepest first: slope, layer, end.
    steps: Vec<(f64, usize, Point)>,
    /// Units of the window, or of everything: more are of no use.
    most_units: u64,
    /// Bytes of what the user demands.
    base: u64,
    /// Whether nothing was left out or rounded.
    exact: bool,
}

/// One way to fill some units with the layers so far.
#[derive(Clone, Copy)]
struct Filled {
    units: u32,
    value: f64,
    /// Which of the ways before it goes on from.
    from: u32,
    /// The point of its layer's front.
    point: u32,
}

impl Fronts {
    /// The fronts of some layers, for budgets up to a window; `grain` divides all their sizes.
    pub fn new(
        choices: &[&Choices<'_>],
        weights: Weights,
        grain: u64,
        window: u64,
        most_units: u64,
    ) -> Fronts {
        let most = |choice: &&Choices<'_>| choice.bytes_of(choice.most);
        let (grain, window) = (grain.max(1), window.min(choices.iter().map(most).sum()));
        let unit = (window / most_units).div_ceil(grain).max(1) * grain;
        let fine = choices.iter().all(|choice| choice.model.n_expert() <= FINE);
        let fronts: Vec<Vec<Point>> =
            choices.par_iter().map(|choice| front(choice, weights, unit, window / unit)).collect();
        let mut steps: Vec<(f64, usize, Point)> = Vec::new();
        for (layer, front) in fronts.iter().enumerate() {
            steps.extend(hull(front).windows(2).map(|pair| (slope(pair[0], pair[1]), layer, pair[1])));
        }
        steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.units.cmp(&b.2.units)));
        let base = choices.iter().map(|choice| choice.bytes_of(choice.base)).sum();
        Fronts { unit, fronts, steps, most_units: window / unit + 1, base, exact: fine && unit == grain }
    }

    /// The best states within a budget.
    pub fn select(&self, budget: u64) -> Selection {
        let units = (budget.saturating_sub(self.base) / self.unit).min(self.most_units);
        let (price, climbed) = self.climb(units);
        let chosen =
            |at: &[usize]| at.iter().zip(&self.fronts).map(|(&at, front)| front[at].state()).collect();
        let at_price = |point: &Point| point.value - price * f64::from(point.units);
        // Most that each layer can add at this price, and all layers from each one on.
        let most = |front: &Vec<Point>| front.iter().map(at_price).fold(f64::NEG_INFINITY, f64::max);
        let most: Vec<f64> = self.fronts.iter().map(most).collect();
        let bound = price * units as f64 + most.iter().sum::<f64>();
        let value: f64 = climbed.iter().zip(&self.fronts).map(|(&at, front)| front[at].value).sum();
        let slack = bound - value;
        if slack <= 1e-12 * bound.abs() {
            return Selection { states: chosen(&climbed), exact: self.exact };
        }
        let (mut exact, mut ways) =
            (self.exact, vec![vec![Filled { units: 0, value: 0.0, from: 0, point: 0 }]]);
        // What the layers so far have lost against the bound is all that counts of them.
        let mut reached = 0.0;
        for (front, most) in self.fronts.iter().zip(&most) {
            let before = ways.last().map(Vec::as_slice).unwrap_or_default();
            reached += most;
            let (next, all) = combine(before, front, most - slack, reached - slack, price, units);
            exact &= all;
            ways.push(next);
        }
        // Only what is better than the choice at hand is sure to have been kept.
        let ends = ways.last().map(Vec::as_slice).unwrap_or_default().iter().enumerate();
        let better = ends.filter(|(_, way)| way.value > value);
        let Some((mut at, _)) = better.max_by(|a, b| a.1.value.total_cmp(&b.1.value)) else {
            return Selection { states: chosen(&climbed), exact };
        };
        let mut found = vec![0; self.fronts.len()];
        for (layer, ways) in ways.iter().skip(1).enumerate().rev() {
            (found[layer], at) = (ways[at].point as usize, ways[at].from as usize);
        }
        Selection { states: chosen(&found), exact }
    }

    /// The price of a unit at which the hulls fill the budget, and a choice by it: the hulls climbed as far as their
    /// steps fit, what no longer fits passed over.
    fn climb(&self, units: u64) -> (f64, Vec<usize>) {
        let (mut left, mut price) = (units, None);
        let mut at = vec![0usize; self.fronts.len()];
        let mut closed = vec![false; self.fronts.len()];
        for &(slope, layer, to) in &self.steps {
            if closed[layer] {
                continue;
            }
            let front = &self.fronts[layer];
            let more = u64::from(to.units - front[at[layer]].units);
            if more <= left {
                left -= more;
                at[layer] = front.partition_point(|point| point.units < to.units);
            } else {
                price.get_or_insert(slope);
                closed[layer] = true;
                // The step is too long: as far up this layer's front as fits.
                let most = u64::from(front[at[layer]].units) + left;
                let further = front.partition_point(|point| u64::from(point.units) <= most) - 1;
                left -= u64::from(front[further].units - front[at[layer]].units);
                at[layer] = further;
            }
        }
        (price.unwrap_or(0.0), at)
    }

    /// What no choice of states can be worth more than, within a budget, and what these states are worth.
    pub fn bound(
        &self,
        choices: &[&Choices<'_>],
        weights: Weights,
        budget: u64,
        states: &[State],
    ) -> (f64, f64) {
        let left = budget.saturating_sub(self.base);
        let price = self.climb(left / self.unit).0 / self.unit as f64;
        let most: f64 = choices.iter().map(|choice| choice.most_worth(weights, price)).sum();
        let value: f64 =
            choices.iter().zip(states).map(|(choice, &state)| choice.value(state, weights)).sum();
        ((price * left as f64 + most).max(value), value)
    }
}

/// Every way so far with every point of one more layer, where both are near enough to the bound; of those with as
/// many units the best. The second value is false if there were too many to look at them all.
fn combine(
    ways: &[Filled],
    front: &[Point],
    least_point: f64,
    least_way: f64,
    price: f64,
    most_units: u64,
) -> (Vec<Filled>, bool) {
    let near = |point: &&(u32, &Point)| point.1.value - price * f64::from(point.1.units) >= least_point;
    let numbered: Vec<(u32, &Point)> = (0u32..).zip(front).collect();
    let points: Vec<&(u32, &Point)> = numbered.iter().filter(near).collect();
    let most_ways = MOST_COMBINATIONS / points.len().max(1);
    let mut kept: Vec<u32> = (0..ways.len() as u32).collect();
    if kept.len() > most_ways {
        let worth = |i: &u32| ways[*i as usize].value - price * f64::from(ways[*i as usize].units);
        kept.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(a.cmp(b)));
        kept.truncate(most_ways);
        kept.sort_unstable();
    }
    let all = kept.len() == ways.len();
    // No way is longer than the longest so far and the longest point.
    let longest = ways.last().map_or(0, |way| way.units) + front.last().map_or(0, |point| point.units);
    let none = Filled { units: 0, value: f64::NEG_INFINITY, from: 0, point: 0 };
    let mut best = vec![none; most_units.min(u64::from(longest)) as usize + 1];
    for from in kept {
        let way = ways[from as usize];
        for &&(point, Point { units, value, .. }) in &points {
            let (units, value) = (way.units + units, way.value + value);
            let Some(slot) = best.get_mut(units as usize) else { break };
            if value - price * f64::from(units) >= least_way && value > slot.value {
                *slot = Filled { units, value, from, point };
            }
        }
    }
    let mut least = f64::NEG_INFINITY;
    let gains = |way: &Filled| {
        let gains = way.value > least;
        least = least.max(way.value);
        gains
    };
    (best.into_iter().filter(gains).collect(), all)
}

/// The greatest number of bytes that divides every size compared with a budget; 0 where nothing can be resident.
pub(super) fn grain(choices: &[Choices<'_>]) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    choices.iter().flat_map(Choices::sizes).fold(0, gcd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{MatrixShape, MoeLayerShape};
    use crate::plan::layer::Phases;
    use crate::plan::routing::LayerRouting;
    use crate::profile::DeviceProfile;
    use crate::tensor::Dtype;
    use crate::units::LayerId;

    /// A layer whose curves are of no importance: the tests bring their own.
    fn model(n_expert: usize, n_ff: usize) -> LayerModel {
        let matrix = |n_in, n_out| MatrixShape { n_in, n_out, dtype: Dtype::Q8_0, bytes: 1 };
        let experts = vec![[matrix(64, n_ff), matrix(64, n_ff), matrix(n_ff, 64)]; n_expert];
        let shape = MoeLayerShape { layer: LayerId(0), n_used: 1, experts };
        let routing = LayerRouting { shares: vec![1.0 / n_expert as f64; n_expert], counts: None };
        let profile = DeviceProfile::built_in(DeviceProfile::DEFAULT).expect("a profile");
        LayerModel::new(&shape, &routing, &[], &profile).expect("a layer")
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }

        /// Curves of a layer: nothing hot costs the same, whatever is shared.
        fn curves(&mut self, model: &LayerModel) -> Curves {
            let n = model.n_expert();
            let experts = Phases { gate_up: self.curve(n), down: self.curve(n) };
            let (gate_up, down) = (model.rows.gate_up.len() - 1, model.rows.down.len() - 1);
            Curves { experts, rows: Phases { gate_up: self.curve(gate_up), down: self.curve(down) } }
        }

        /// A curve of costs from 0 to `n` hot experts or steps of rows: mostly falling, with steps up, and sometimes level.
        fn curve(&mut self, n: usize) -> Vec<f64> {
            let mut cost = 1000.0;
            let mut curve = vec![cost];
            for _ in 0..n {
                cost -= self.below(40) as f64 - 12.0;
                curve.push(cost);
            }
            curve
        }
    }

    /// Every state of a layer: its bytes and what it is worth.
    fn all_states(choice: &Choices<'_>, shares: Shares, weights: Weights) -> Vec<(u64, f64)> {
        let n = choice.model.n_expert();
        let (gates, downs) = (choice.model.rows.gate_up.len() - 1, choice.model.rows.down.len() - 1);
        let pairs =
            |gate_up: usize, down: usize| (0..=gate_up).flat_map(move |g| (0..=down).map(move |d| (g, d)));
        let mut states: Vec<State> = vec![State::default()];
        if shares != Shares::Rows {
            states.extend(pairs(n, n).map(|(g, d)| State::experts(g, d)));
        }
        if shares == Shares::Rows || (shares == Shares::Auto && weights.hits == 0.0) {
            states.extend(pairs(gates, downs).map(|(g, d)| State::rows(g, d)));
        }
        // All rows of a phase are all experts: the curves are at random, so they would be worth something else.
        if shares == Shares::Auto {
            let ends = |s: &State| (s.gate_up == 0 || s.gate_up == gates) && (s.down == 0 || s.down == downs);
            states.retain(|state| state.split == Split::Experts || !ends(state));
        }
        states.iter().map(|&state| (choice.bytes_of(state), choice.value(state, weights))).collect()
    }

    /// The best value of any combination of states within a budget.
    fn enumerated(layers: &[Vec<(u64, f64)>], left: u64) -> f64 {
        let Some((first, rest)) = layers.split_first() else { return 0.0 };
        let fits = first.iter().filter_map(|(bytes, value)| Some((left.checked_sub(*bytes)?, value)));
        fits.map(|(left, value)| value + enumerated(rest, left)).fold(f64::NEG_INFINITY, f64::max)
    }

    #[test]
    fn the_selection_is_the_best_of_all_combinations() {
        let mut random = Random(1);
        let (mut by_rows, mut by_experts) = (0, 0);
        for round in 0..120 {
            let sizes: Vec<(usize, usize)> = (0..1 + round % 3)
                .map(|_| (1 + random.below(5) as usize, [64, 160, 192][random.below(3) as usize]))
                .collect();
            let models: Vec<LayerModel> = sizes.iter().map(|&(n, n_ff)| model(n, n_ff)).collect();
            let curves: Vec<[Curves; 2]> =
                models.iter().map(|model| [random.curves(model), random.curves(model)]).collect();
            let shares =
                [Shares::Auto, Shares::Auto, Shares::Experts, Shares::Rows][random.below(4) as usize];
            let choices: Vec<Choices<'_>> = models
                .iter()
                .zip(&curves)
                .map(|(model, [decode, prefill])| Choices::new(model, decode, prefill, shares, 4096))
                .collect();
            let choices: Vec<&Choices<'_>> = choices.iter().collect();
            let kind = round % 3 + random.below(2) as usize;
            let (decode, prefill, hits) =
                [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (2.0, 1.0, 0.0), (0.0, 0.0, 1.0)][kind];
            let weights = Weights { decode, prefill, hits };
            let fronts = Fronts::new(&choices, weights, 4096, 64 << 20, MOST_UNITS);
            let states: Vec<_> = choices.iter().map(|choice| all_states(choice, shares, weights)).collect();
            let mut last = 0.0;
            for budget in (0..24).map(|i| i * 70_000) {
                let selection = fronts.select(budget);
                let bytes: u64 = choices.iter().zip(&selection.states).map(|(c, &s)| c.bytes_of(s)).sum();
                assert!(bytes <= budget, "{bytes} of {budget} bytes");
                let (bound, value) = fronts.bound(&choices, weights, budget, &selection.states);
                let best = enumerated(&states, budget);
                assert!(selection.exact);
                assert!((value - best).abs() < 1e-9, "{value} selected, {best} possible");
                assert!(bound >= best - 1e-9, "a bound of {bound} below {best}");
                assert!(value >= last, "{value} after {last} with less");
                last = value;
                let of = |split| selection.states.iter().filter(|s| s.split == split && !s.is_cold()).count();
                by_rows += of(Split::Rows);
                by_experts += of(Split::Experts);
            }
        }
        assert!(by_rows > 500 && by_experts > 500, "{by_rows} layers by rows, {by_experts} by experts");
    }

    #[test]
    fn a_state_that_is_looked_at_takes_over_from_those_that_are_not() {
        let model = model(8, 64);
        let rows =
            Phases { gate_up: vec![9.0; model.rows.gate_up.len()], down: vec![9.0; model.rows.down.len()] };
        // The third gate saves, and no other; each down does.
        let gate_up = vec![9.0, 9.0, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0];
        let down = (0..9).map(|n| 9.0 - f64::from(n)).collect();
        let curves = Curves { experts: Phases { gate_up, down }, rows };
        let choice = Choices::new(&model, &curves, &curves, Shares::Experts, 4096);
        let weights = Weights { decode: 1.0, ..Weights::NONE };
        let mut looked_at = Vec::new();
        choice.expert_states(weights, 2, &mut |state, worth| looked_at.push((state, worth)));
        assert!(looked_at.contains(&(State::experts(4, 2), choice.value(State::experts(4, 2), weights))));
        assert!(!looked_at.iter().any(|(state, _)| *state == State::experts(3, 2)));
    }

    #[test]
    fn where_bytes_are_rounded_the_bound_still_holds() {
        let mut random = Random(9);
        for _ in 0..40 {
            let models: Vec<LayerModel> = (0..3).map(|_| model(4, 64)).collect();
            let curves: Vec<[Curves; 2]> =
                (0..3).map(|i| [random.curves(&models[i]), random.curves(&models[i])]).collect();
            let choices: Vec<Choices<'_>> = models
                .iter()
                .zip(&curves)
                .map(|(m, [d, p])| Choices::new(m, d, p, Shares::Auto, 4096))
                .collect();
            let choices: Vec<&Choices<'_>> = choices.iter().collect();
            let weights = Weights { decode: 1.0, prefill: 1.0, hits: 0.0 };
            // Few units: an expert takes one and a half.
            let fronts = Fronts::new(&choices, weights, 4096, 16 << 30, 18);
            let states: Vec<_> =
                choices.iter().map(|choice| all_states(choice, Shares::Auto, weights)).collect();
            for budget in [0, 100 << 10, 300 << 10, 600 << 10, 900 << 10] {
                let selection = fronts.select(budget);
                let bytes: u64 = choices.iter().zip(&selection.states).map(|(c, &s)| c.bytes_of(s)).sum();
                let (bound, value) = fronts.bound(&choices, weights, budget, &selection.states);
                let best = enumerated(&states, budget);
                assert!(!selection.exact && bytes <= budget);
                assert!(value <= best + 1e-9 && best <= bound + 1e-9, "{value} <= {best} <= {bound}");
            }
        }
    }
}
