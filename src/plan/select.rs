//! Which experts become resident: value per byte, inside a budget.
//!
//! A layer's state is how many of its experts, best first, have gate and up resident, and how many of these also
//! down. The concave hulls of all layers' states are climbed together, steepest first; what is left of the budget
//! is filled with the best single steps that still fit. What a state is worth counts only as far down as each
//! regime would go, so that more residency is never worth less.

use super::layer::{Curves, LayerModel};

/// How many of a layer's experts are resident: `down <= gate_up`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub gate_up: usize,
    pub down: usize,
}

/// A layer's choices: its costs in both regimes.
pub(super) struct Choices<'a> {
    pub model: &'a LayerModel,
    pub decode: &'a Curves,
    pub prefill: &'a Curves,
    /// Bytes of one expert's gate and up, and of its down.
    pub bytes: (u64, u64),
    decode_best: Best,
    prefill_best: Best,
    base: State,
    most: State,
}

/// What seconds saved are worth: per decoded token, and per prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Weights {
    pub decode: f64,
    pub prefill: f64,
}

/// Running minima of a layer's costs.
struct Best {
    /// Least cost with `i <= j` whole experts hot.
    whole: Vec<f64>,
    /// The `i >= j` at which gate and up cost least; the smallest among equals.
    above: Vec<usize>,
}

impl Best {
    fn new(curves: &Curves, base: usize) -> Best {
        let mut whole: Vec<f64> = (0..curves.gate_up.len()).map(|j| curves.at(j, j)).collect();
        for j in base + 1..whole.len() {
            whole[j] = whole[j].min(whole[j - 1]);
        }
        let mut above: Vec<usize> = (0..curves.gate_up.len()).collect();
        for j in (0..above.len().saturating_sub(1)).rev() {
            if curves.gate_up[above[j + 1]] < curves.gate_up[j] {
                above[j] = above[j + 1];
            }
        }
        Best { whole, above }
    }
}

/// Bytes and worth of a state.
#[derive(Clone, Copy, Debug)]
struct Point {
    bytes: u64,
    value: f64,
    state: State,
}

impl<'a> Choices<'a> {
    pub fn new(model: &'a LayerModel, decode: &'a Curves, prefill: &'a Curves, page: u64) -> Choices<'a> {
        let (gate_up, down) = model.may_be_hot();
        let n = |may: bool| if may { model.n_expert() } else { 0 };
        let most = State { gate_up: n(gate_up), down: n(down) };
        let base = State { gate_up: model.n_forced.min(most.gate_up), down: model.n_forced.min(most.down) };
        let (decode_best, prefill_best) = (Best::new(decode, base.gate_up), Best::new(prefill, base.gate_up));
        Choices { model, decode, prefill, bytes: model.bytes(page), decode_best, prefill_best, base, most }
    }

    /// What must be resident: the experts that the user named.
    pub fn base(&self) -> State {
        self.base
    }

    /// What can be resident at most.
    pub fn most(&self) -> State {
        self.most
    }

    pub fn bytes_of(&self, state: State) -> u64 {
        state.gate_up as u64 * self.bytes.0 + state.down as u64 * self.bytes.1
    }

    /// How many items of the ranking are best hot, given what is resident; the fewest among equals.
    pub fn best_cut(&self, curves: &Curves, state: State) -> usize {
        let cost = |i: usize| curves.at(i, i.min(state.down));
        let better = |best: usize, i: usize| if cost(i) < cost(best) { i } else { best };
        (self.base.gate_up..=state.gate_up).fold(self.base.gate_up, better)
    }

    /// Seconds saved against the state that the user demands, each regime going down as far as is best for it.
    pub fn value(&self, state: State, weights: Weights) -> f64 {
        let State { gate_up, down } = state;
        let first = self.base.gate_up;
        let saved = |curves: &Curves, best: &Best| {
            // Cuts beyond `down` have gate and up only; cuts up to it are whole experts.
            let from = down.max(first);
            let beyond = match best.above[from] {
                at if at <= gate_up => curves.gate_up[at],
                _ => minimum(&curves.gate_up[from..=gate_up]),
            };
            let mut least = beyond + curves.down[down];
            if down >= first {
                least = least.min(best.whole[down]);
            }
            curves.at(first, self.base.down) - least
        };
        weights.decode * saved(self.decode, &self.decode_best)
            + weights.prefill * saved(self.prefill, &self.prefill_best)
    }

    /// States worth considering, by bytes: gate and up of the first experts, the first experts whole, and the first
    /// downs beside the gates and ups that are best with them.
    fn points(&self, weights: Weights) -> Vec<Point> {
        let (base, most) = (self.base, self.most);
        let pairs = (base.gate_up..=most.gate_up).map(|gate_up| State { gate_up, down: base.down });
        let whole = (base.gate_up.max(base.down)..=most.down).map(|j| State { gate_up: j, down: j });
        // As many gates and ups beside the downs as the regimes that count would use.
        let used = |down: usize| {
            let regimes = [(weights.decode, &self.decode_best), (weights.prefill, &self.prefill_best)];
            let counts = regimes.into_iter().filter(|(weight, _)| *weight > 0.0);
            let from = down.max(base.gate_up);
            counts.map(|(_, best)| best.above[from]).max().unwrap_or(from).min(most.gate_up)
        };
        let downs = (base.down..=most.down).map(|down| State { gate_up: used(down), down });
        let point = |state| Point { bytes: self.bytes_of(state), value: self.value(state, weights), state };
        let mut points: Vec<Point> = pairs.chain(whole).chain(downs).map(point).collect();
        points.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(b.value.total_cmp(&a.value)));
        points
    }
}

fn minimum(costs: &[f64]) -> f64 {
    costs.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The upper concave hull of points sorted by bytes, from the base on, while value rises.
fn hull(points: &[Point]) -> Vec<Point> {
    let mut hull: Vec<Point> = Vec::new();
    for &point in points {
        if hull.last().is_some_and(|last| point.value <= last.value + 1e-15) {
            continue;
        }
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

/// Value per byte between two points.
fn slope(a: Point, b: Point) -> f64 {
    (b.value - a.value) / (b.bytes.saturating_sub(a.bytes)).max(1) as f64
}

/// The layers of one domain as they are climbed, whatever the budget.
pub(super) struct Climb {
    /// Each layer's states, by bytes.
    points: Vec<Vec<Point>>,
    /// The steps of all hulls, steepest first: slope, layer, end.
    steps: Vec<(f64, usize, Point)>,
}

impl Climb {
    pub fn new(choices: &[&Choices<'_>], weights: Weights) -> Climb {
        let points: Vec<Vec<Point>> = choices.iter().map(|choice| choice.points(weights)).collect();
        let mut steps: Vec<(f64, usize, Point)> = Vec::new();
        for (layer, points) in points.iter().enumerate() {
            let hull = hull(points);
            steps.extend(hull.windows(2).map(|pair| (slope(pair[0], pair[1]), layer, pair[1])));
        }
        steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.bytes.cmp(&b.2.bytes)));
        Climb { points, steps }
    }

    /// The states by value per byte, for the choices and weights that the climb was made of.
    pub fn states(&self, choices: &[&Choices<'_>], weights: Weights, budget: u64) -> Vec<State> {
        let mut states: Vec<State> = choices.iter().map(|choice| choice.base()).collect();
        let base = choices.iter().map(|choice| choice.bytes_of(choice.base())).sum::<u64>();
        let mut left = budget.saturating_sub(base);
        let mut closed = vec![false; choices.len()];
        for &(_, layer, point) in &self.steps {
            if closed[layer] {
                continue;
            }
            let now = choices[layer].bytes_of(states[layer]);
            if point.bytes - now <= left {
                left -= point.bytes - now;
                states[layer] = point.state;
                continue;
            }
            // The step is too long: the best of this layer's states that still fits.
            closed[layer] = true;
            let value = choices[layer].value(states[layer], weights);
            let fits = self.points[layer]
                .iter()
                .filter(|p| p.bytes > now && p.bytes - now <= left && p.value > value);
            if let Some(best) = fits.max_by(|a, b| a.value.total_cmp(&b.value).then(b.bytes.cmp(&a.bytes))) {
                left -= best.bytes - now;
                states[layer] = best.state;
            }
        }
        fill(choices, weights, left, &mut states);
        states
    }
}

/// Takes single steps, the best per byte first, while any fits and gains.
fn fill(choices: &[&Choices<'_>], weights: Weights, mut left: u64, states: &mut [State]) {
    let best_step = |layer: usize, state: State, left: u64| -> Option<(f64, State, u64)> {
        let choice = choices[layer];
        let State { gate_up, down } = state;
        let moves = [
            State { gate_up: gate_up + 1, down },
            State { gate_up, down: down + 1 },
            State { gate_up: gate_up + 1, down: down + 1 },
        ];
        let legal =
            |s: &State| s.gate_up <= choice.most.gate_up && s.down <= choice.most.down && s.down <= s.gate_up;
        let (now, bytes) = (choice.value(state, weights), choice.bytes_of(state));
        let priced = |to: State| {
            let more = choice.bytes_of(to) - bytes;
            let gain = choice.value(to, weights) - now;
            (more <= left && gain > 1e-15).then(|| (gain / more.max(1) as f64, to, more))
        };
        moves.into_iter().filter(legal).filter_map(priced).max_by(|a, b| a.0.total_cmp(&b.0))
    };
    let mut steps: Vec<_> = states.iter().enumerate().map(|(l, &s)| best_step(l, s, left)).collect();
    loop {
        let ranked = steps.iter().enumerate().filter_map(|(layer, step)| Some((layer, (*step)?)));
        let Some((layer, (_, to, more))) = ranked.max_by(|a, b| a.1.0.total_cmp(&b.1.0).then(b.0.cmp(&a.0)))
        else {
            return;
        };
        left -= more;
        states[layer] = to;
        steps[layer] = best_step(layer, to, left);
        for (l, step) in steps.iter_mut().enumerate() {
            if step.is_some_and(|(_, _, more)| more > left) {
                *step = best_step(l, states[l], left);
            }
        }
    }
}

/// The states of the layers of one domain, the most called experts first, whatever they cost. Where a whole expert
/// no longer fits, its gate and up may.
pub(super) fn by_hits(choices: &[&Choices<'_>], budget: u64) -> Vec<State> {
    let mut states: Vec<State> = choices.iter().map(|choice| choice.base()).collect();
    let mut left =
        budget.saturating_sub(choices.iter().map(|choice| choice.bytes_of(choice.base())).sum::<u64>());
    let mut experts: Vec<(f64, usize, usize)> = Vec::new();
    for (layer, choice) in choices.iter().enumerate() {
        let rest = choice.model.inclusion.iter().enumerate().skip(choice.base.gate_up);
        experts.extend(rest.map(|(at, &used)| (used, layer, at)));
    }
    experts.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    for (_, layer, at) in experts {
        let (choice, state) = (choices[layer], states[layer]);
        if state.gate_up != at || at >= choice.most.gate_up {
            continue;
        }
        let whole = choice.bytes.0 + choice.bytes.1;
        if state.down == state.gate_up && at < choice.most.down && whole <= left {
            left -= whole;
            states[layer] = State { gate_up: at + 1, down: at + 1 };
        } else if choice.bytes.0 <= left {
            left -= choice.bytes.0;
            states[layer].gate_up += 1;
        }
    }
    states
}
