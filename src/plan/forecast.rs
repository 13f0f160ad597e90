//! What a plan is expected to give: speeds as ranges, hit rates with intervals, and the verdict.

use std::borrow::Cow;
use std::sync::Arc;

use rayon::prelude::*;

use super::cost::{Bound, Rates};
use super::document::{
    Advice, Basis, Forecast, HitRate, HitRates, MemoryAccount, Objective, Range, Regime, Verdict, tidy,
};
use super::layer::{Curves, LayerModel};
use super::paging::Paging;
use super::routing::{Routing, SkewEnd};
use super::state::{Split, State};
use super::{PROMPT_TOKENS, PlanRequest};
use crate::calibrate::{Block, Statistics};
use crate::model::ModelShape;
use crate::profile::DeviceProfile;
use crate::tensor::Projection;

/// One of the three cases that a range is made of.
pub(super) struct Case {
    pub rates: Rates,
    /// The layers, best experts first; the same for all cases where routing was counted.
    pub models: Arc<Vec<LayerModel>>,
    /// Their costs for one token.
    pub decode: Vec<Curves>,
    /// Their costs for a prompt of [`PROMPT_TOKENS`].
    pub prefill: Vec<Curves>,
    /// Bytes per second from the model's disk.
    pub disk_bytes: f64,
}

/// What of each layer is hot, and in which domain it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hot {
    pub state: State,
    pub domain: u32,
}

impl Hot {
    /// Nothing, in the same domain.
    pub fn cold(self) -> Hot {
        Hot { state: State::default(), ..self }
    }
}

impl Case {
    /// The bound of the rates and the end of the skew that belong together.
    pub const ENDS: [(Bound, SkewEnd); 3] =
        [(Bound::Slow, SkewEnd::Low), (Bound::Likely, SkewEnd::Value), (Bound::Fast, SkewEnd::High)];

    pub fn new(profile: &DeviceProfile, bound: Bound, models: Arc<Vec<LayerModel>>) -> Case {
        let rates = Rates::of(profile, bound);
        let disk = &profile.rates.disk_bytes_per_s;
        let disk_bytes = match bound {
            Bound::Slow => disk.low(),
            Bound::Likely => disk.value,
            Bound::Fast => disk.high(),
        };
        let decode = models.par_iter().map(|model| model.decode(&rates)).collect();
        let prefill = models.par_iter().map(|model| model.batch(&rates, PROMPT_TOKENS)).collect();
        Case { rates, models, decode, prefill, disk_bytes }
    }

    /// The costs of a regime.
    pub fn curves(&self, regime: Regime) -> &[Curves] {
        match regime {
            Regime::Decode => &self.decode,
            Regime::Prefill => &self.prefill,
        }
    }

    /// The costs of a batch.
    fn curves_of(&self, tokens: u32) -> Cow<'_, [Curves]> {
        match tokens {
            1 => Cow::Borrowed(&self.decode),
            PROMPT_TOKENS => Cow::Borrowed(&self.prefill),
            _ => Cow::Owned(self.models.par_iter().map(|model| model.batch(&self.rates, tokens)).collect()),
        }
    }
}

/// Seconds of a batch. Where several domains are used, each is switched to once.
pub(super) fn seconds(shape: &ModelShape, rates: &Rates, tokens: u32, curves: &[Curves], hot: &[Hot]) -> f64 {
    let layers: f64 = curves.iter().zip(hot).map(|(curves, hot)| curves.of(hot.state)).sum();
    let mut used: Vec<u32> = hot.iter().filter(|hot| !hot.state.is_cold()).map(|hot| hot.domain).collect();
    used.dedup();
    let switches = if used.len() > 1 { used.len() as f64 } else { 0.0 };
    rates.dense_seconds(shape, tokens) + layers + switches * rates.domain_switch
}

/// Speeds of a batch on the CPU, as planned, and with everything resident; what must be read from disk is part of them.
pub(super) fn forecast(
    request: &PlanRequest<'_>,
    cases: &[Case],
    regime: Regime,
    tokens: u32,
    hot: &[Hot],
    memory: &MemoryAccount,
) -> Forecast {
    let all = |model: &LayerModel| {
        let n = |may: bool| if may { model.n_expert() } else { 0 };
        let (gate_up, down) = model.may_be_hot();
        Hot { state: State::experts(n(gate_up), n(down)), domain: 0 }
    };
    let page = request.profile.memory.page_bytes.value;
    let bytes_of_all = |case: &Case| case.models.iter().map(|model| model.all_bytes(page)).sum();
    let speeds = |case: &Case| -> [f64; 3] {
        let curves = case.curves_of(tokens);
        let cold: Vec<Hot> = hot.iter().map(|hot| hot.cold()).collect();
        let all: Vec<Hot> = case.models.iter().map(all).collect();
        let speed = |hot: &[Hot], npu_bytes: u64| {
            let read = Paging::beside(memory, npu_bytes).bytes(request, case, hot, tokens);
            let seconds = seconds(request.shape, &case.rates, tokens, &curves, hot);
            f64::from(tokens) / (seconds + read / case.disk_bytes)
        };
        let planned = memory.npu_bytes + memory.scratch_bytes;
        [speed(&cold, 0), speed(hot, planned), speed(&all, bytes_of_all(case))]
    };
    let speeds: Vec<[f64; 3]> = cases.par_iter().map(speeds).collect();
    let range = |i: usize| range_of(&speeds.iter().map(|speeds| speeds[i]).collect::<Vec<_>>());
    let gains: Vec<f64> = speeds.iter().map(|speeds| speeds[1] / speeds[0]).collect();
    Forecast {
        regime,
        tokens,
        basis: Basis::Estimated,
        cpu_only: range(0),
        planned: range(1),
        all_resident: range(2),
        gain: range_of(&gains),
    }
}

/// Least, middle case and greatest of three.
fn range_of(values: &[f64]) -> Range {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let value = values.get(1).copied().unwrap_or(low);
    Range { low: tidy(low), value: tidy(value), high: tidy(high) }
}

/// Share of calls that what is resident of each layer serves. Of a layer whose rows are shared it is that share of every
/// call: of its multiplications, whatever the routing.
pub(super) fn hit_rates(
    shape: &ModelShape,
    routing: &Routing<'_>,
    cases: &[Case],
    states: &[State],
) -> HitRates {
    // Each projection of a list is one part of the mean; gate's depth is that of up too.
    let rate = |projections: &[Projection]| {
        let all: f64 = shape.moe_layers.iter().map(|layer| layer.n_used as f64).sum::<f64>().max(1.0);
        // Calls per token, mean of the projections, in the layers that are shared by experts, or by rows.
        let served = |split: Split, values: &dyn Fn(usize, Projection, usize) -> f64| -> f64 {
            let of_layer = |(layer, state): (usize, &State)| {
                let depth = |p: Projection| if p == Projection::Down { state.down } else { state.gate_up };
                projections.iter().map(|&p| values(layer, p, depth(p))).sum::<f64>()
            };
            let layers = states.iter().enumerate().filter(|(_, state)| state.split == split);
            layers.map(of_layer).sum::<f64>() / projections.len() as f64 / all
        };
        let by_rows = served(Split::Rows, &|layer, p, n| {
            let steps = cases[1].models[layer].rows.of_projection(p);
            steps[n].share * shape.moe_layers[layer].n_used as f64
        });
        let even = served(Split::Experts, &|layer, _, n| {
            let layer = &shape.moe_layers[layer];
            n as f64 / layer.n_expert().max(1) as f64 * layer.n_used as f64
        });
        let uniform = by_rows + even;
        // Rows alone serve the same share of any text.
        let counts = by_rows == 0.0 || even > 0.0;
        let (calibration, held_out) = match *routing {
            Routing::Measured(statistics) => {
                let of = |block: &Block, held_out: bool| {
                    let share = served(Split::Experts, &|layer, _, n| {
                        share_of(block, &cases[1].models[layer], layer, n)
                    });
                    match counts {
                        true => interval(by_rows + share, statistics.effective_tokens(held_out)),
                        false => Range { low: tidy(by_rows), value: tidy(by_rows), high: tidy(by_rows) },
                    }
                };
                let held_out = statistics.held_out.as_ref().map(|block| of(block, true));
                (of(&statistics.calibration, false), held_out)
            }
            Routing::Assumed(_) => {
                let at = |case: &Case| {
                    let used = |layer: usize, n: usize| case.models[layer].inclusion[..n].iter().sum();
                    by_rows + served(Split::Experts, &|layer, _, n| used(layer, n))
                };
                (range_of(&cases.iter().map(at).collect::<Vec<_>>()), None)
            }
        };
        let found = held_out.unwrap_or(calibration).value;
        let lift = if uniform > 0.0 { tidy(found / uniform) } else { 1.0 };
        HitRate { calibration, held_out, uniform: tidy(uniform), lift }
    };
    HitRates {
        basis: match routing {
            Routing::Measured(_) => Basis::Measured,
            Routing::Assumed(_) => Basis::Estimated,
        },
        overall: rate(&Projection::ALL),
        gate: rate(&[Projection::Gate]),
        up: rate(&[Projection::Up]),
        down: rate(&[Projection::Down]),
    }
}

/// Calls per token that the first `n` experts of a layer get in a block.
fn share_of(block: &Block, model: &LayerModel, layer: usize, n: usize) -> f64 {
    let Some(counts) = block.layers.get(layer) else { return 0.0 };
    let calls: u64 = model.order[..n].iter().filter_map(|&expert| counts.calls.get(expert as usize)).sum();
    calls as f64 / block.tokens.max(1) as f64
}

/// 95 % interval of a rate seen in `n` tokens, after Wilson. All calls of a token count as one observation: they are
/// not independent of each other.
fn interval(rate: f64, n: f64) -> Range {
    const Z: f64 = 1.96;
    let rate = rate.clamp(0.0, 1.0);
    if n <= 0.0 {
        return Range { low: 0.0, value: tidy(rate), high: 1.0 };
    }
    let middle = (rate + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (rate * (1.0 - rate) / n + Z * Z / (4.0 * n * n)).sqrt();
    let (low, high) = ((middle - half).min(rate), (middle + half).max(rate));
    Range { low: tidy(low.max(0.0)), value: tidy(rate), high: tidy(high.min(1.0)) }
}

/// Share of the calls that the more used half of each layer's experts serves, in text set aside if there is any.
pub(super) fn hotter_half(statistics: &Statistics, models: &[LayerModel]) -> f64 {
    let block = statistics.held_out.as_ref().unwrap_or(&statistics.calibration);
    let mut served = 0.0;
    for (layer, model) in models.iter().enumerate() {
        // Of an odd number the middle expert counts half.
        let half = model.n_expert() / 2;
        let upper = share_of(block, model, layer, model.n_expert() - half);
        served += 0.5 * (share_of(block, model, layer, half) + upper);
    }
    let used: u32 = statistics.layers.iter().map(|layer| layer.n_used).sum();
    served / f64::from(used.max(1))
}

/// The answer in one sentence.
pub(super) fn verdict(decode: &Forecast, prefill: &Forecast, asked: bool, objective: Objective) -> Verdict {
    let advice = |forecast: &Forecast| match () {
        () if asked || objective == Objective::Hits => Advice::AsAsked,
        () if forecast.gain.value > 1.0 => Advice::Npu,
        () => Advice::CpuOnly,
    };
    let (d, p) = (advice(decode), advice(prefill));
    let one = |f: &Forecast, advice: Advice| match advice {
        Advice::Npu => format!(
            "NPU, {:.1} tokens/s instead of {:.1} ({:.2} times; {:.2} to {:.2})",
            f.planned.value, f.cpu_only.value, f.gain.value, f.gain.low, f.gain.high
        ),
        Advice::CpuOnly => format!(
            "CPU only, {:.1} tokens/s (everything resident: {:.1})",
            f.cpu_only.value, f.all_resident.value
        ),
        Advice::AsAsked => {
            format!("as asked, {:.1} tokens/s; on the CPU alone {:.1}", f.planned.value, f.cpu_only.value)
        }
    };
    let sentence = format!("decode: {}; prefill: {}; all estimated", one(decode, d), one(prefill, p));
    Verdict { decode: d, prefill: p, sentence }
}
