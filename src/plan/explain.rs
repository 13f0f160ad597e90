//! Why one expert is resident or not, and at which budget that would turn.
//!
//! Residency is not monotone in the budget: with a little more, another expert may fit that is worth more, and take
//! the place of this one. So nothing is bisected. The choice compares sums of a few sizes with what is left, all of
//! them multiples of one number of bytes; between two multiples of it nothing changes, and each multiple is planned.

use std::fmt;

use serde::Serialize;

use super::document::{Basis, Holds, Item, LayerPlan, Objective, Plan, tidy};
use super::routing::Routing;
use super::select::{Choices, grain};
use super::selector::Selectors;
use super::{PlanError, Planner};
use crate::calibrate::Block;
use crate::units::{ExpertId, LayerId};

/// Budgets that are planned in each direction at most. With more, some are skipped, and the answer says so.
const MOST_BUDGETS: u64 = 1 << 14;

/// Why an expert is in or out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The layer.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// What of it is resident; `None` where nothing is.
    pub resident: Option<Holds>,
    /// Why.
    pub reason: Reason,
    /// Whether it is used at one token.
    pub hot_in_decode: bool,
    /// Whether it is used in prompts.
    pub hot_in_prefill: bool,
    /// Its place in its layer's ranking, from 1.
    pub rank: u32,
    /// Experts of its layer.
    pub n_expert: u32,
    /// Share of its layer's calls, as planned with.
    pub share: f64,
    /// How that came about.
    pub share_basis: Basis,
    /// Its calls in the text that the plan was made from; `None` where nothing was counted.
    pub calibration: Option<Calls>,
    /// Its calls in the text set aside, where there is any.
    pub held_out: Option<Calls>,
    /// Bytes that it takes, or would take, of the budget.
    pub bytes: u64,
    /// Seconds that it saves per decoded token when all before it are hot too; negative where it costs.
    pub decode_seconds: f64,
    /// The same for a prompt of 512 tokens.
    pub prefill_seconds: f64,
    /// How the seconds came about.
    pub seconds_basis: Basis,
    /// From where it is resident. For a resident expert it is resident from these bytes up to the plan's budget and
    /// not with a byte less; for another the smallest larger budget with which it is. `None` where there is none in
    /// the window, or where the user named the expert.
    pub flip_bytes: Option<u64>,
    /// Whether every budget on the way there was planned. Otherwise it may turn and turn back before.
    pub flip_is_exact: bool,
}

/// Counted calls of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calls {
    /// Its calls.
    pub calls: u64,
    /// Calls of its layer.
    pub of: u64,
    /// The first over the second.
    pub share: f64,
}

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The user named it.
    Named,
    /// It is worth its bytes within this budget.
    WorthIt,
    /// Others are worth more per byte and fill this budget; a larger one would hold it.
    Outbid,
    /// No program of the device can hold its gate and up.
    NoProgram,
    /// The NPU gains too little in every regime that counts.
    NoRegimeGains,
    /// It would cost time rather than save it.
    CostsTime,
    /// The others of a full window are worth more.
    WindowFull,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Named => "it was named by --force-hot",
            Reason::WorthIt => "it is worth its bytes within this budget",
            Reason::Outbid => "others are worth more per byte and fill this budget",
            Reason::NoProgram => "no program of the device can hold its gate and up",
            Reason::NoRegimeGains => "the NPU gains too little in every regime that counts",
            Reason::CostsTime => "it would cost time, not save it",
            Reason::WindowFull => "others are worth more per byte, up to a full window",
        })
    }
}

/// An expert whose residency is looked for.
struct Wanted {
    /// Index of its layer.
    layer: usize,
    /// Its place in the ranking, from 0.
    at: usize,
}

impl Planner<'_> {
    /// Explains experts of a plan that this planner made.
    ///
    /// # Errors
    ///
    /// [`PlanError::Explain`] for an expert that the model does not have.
    pub fn explain(
        &self,
        plan: &Plan,
        experts: &[(LayerId, ExpertId)],
    ) -> Result<Vec<Explanation>, PlanError> {
        let wanted = experts
            .iter()
            .map(|&(layer, expert)| find(plan, layer, expert))
            .collect::<Result<Vec<_>, _>>()?;
        let mut selectors = Selectors::new(self);
        let flips = self.flips(&mut selectors, plan, &wanted);
        let explain = |(wanted, flip)| self.explanation(plan, selectors.choices(), wanted, flip);
        Ok(wanted.iter().zip(flips).map(explain).collect())
    }

    fn explanation(
        &self,
        plan: &Plan,
        choices: &[Choices<'_>],
        wanted: &Wanted,
        (flip_bytes, flip_is_exact): (Option<u64>, bool),
    ) -> Explanation {
        let &Wanted { layer, at } = wanted;
        let (ranked, model) = (&plan.layers[layer], choices[layer].model);
        let item = &ranked.ranking[at];
        let is_in = at < ranked.resident as usize;
        let hot_in = |cut: usize| at < plan.cuts[cut].layers[layer] as usize;
        let (calibration, held_out, share_basis) = match self.request.routing {
            Routing::Measured(statistics) => {
                let calls = |block: &Block| calls(block, LayerId(ranked.layer), item.expert);
                let held_out = statistics.held_out.as_ref().and_then(calls);
                (calls(&statistics.calibration), held_out, Basis::Measured)
            }
            Routing::Assumed(_) => (None, None, Basis::Estimated),
        };
        Explanation {
            layer: ranked.layer,
            expert: item.expert,
            resident: is_in.then_some(item.holds),
            reason: reason(plan, item, is_in, model.may_be_hot().0, flip_bytes.is_some()),
            hot_in_decode: hot_in(0),
            hot_in_prefill: hot_in(1),
            rank: at as u32 + 1,
            n_expert: ranked.n_expert,
            share: item.share,
            share_basis,
            calibration,
            held_out,
            bytes: item.bytes,
            decode_seconds: item.decode_seconds,
            prefill_seconds: item.prefill_seconds,
            seconds_basis: Basis::Estimated,
            flip_bytes,
            flip_is_exact,
        }
    }

    /// For each expert the budget from which on it is resident, and whether every budget on the way was planned.
    fn flips(
        &self,
        selectors: &mut Selectors<'_>,
        plan: &Plan,
        wanted: &[Wanted],
    ) -> Vec<(Option<u64>, bool)> {
        let grain = grain(selectors.choices());
        let mut flips = vec![(None, true); wanted.len()];
        if grain == 0 {
            return flips;
        }
        // With everything resident nothing changes any more.
        let (_, all) = selectors.fullest(Choices::most);
        let least = selectors.fullest(Choices::base).0.div_ceil(grain);
        let [now, most] = [plan.budget_bytes, plan.window_bytes].map(|budget| budget.min(all) / grain);
        let mut is_in = |wanted: &Wanted, budget: u64| {
            let selected = selectors.select(budget * grain);
            let n_expert = plan.layers[wanted.layer].ranking.len();
            selected.is_ok_and(|selected| wanted.at < selected.states[wanted.layer].n_items(n_expert))
        };
        for (wanted, flip) in wanted.iter().zip(&mut flips) {
            let ranked = &plan.layers[wanted.layer];
            if ranked.ranking[wanted.at].forced {
                continue;
            }
            *flip = match wanted.at < ranked.resident as usize {
                false => first(now + 1, most, |budget| is_in(wanted, budget)),
                true => {
                    // Counted downwards; the last budget with it is one above the first without.
                    let (found, exact) = first(0, now - least.min(now), |down| !is_in(wanted, now - down));
                    (found.map(|down| now - down + 1), exact)
                }
            };
            flip.0 = flip.0.map(|budget| budget * grain);
        }
        flips
    }
}

/// The first of `from..=to` that is `found`. If these are too many some are left out at first: it is then not
/// certain that none before is, and the second value says so.
fn first(from: u64, to: u64, mut found: impl FnMut(u64) -> bool) -> (Option<u64>, bool) {
    let Some(count) = to.checked_sub(from) else { return (None, true) };
    let stride = (count + 1).div_ceil(MOST_BUDGETS);
    let (mut before, mut at) = (from, from);
    loop {
        if found(at) {
            return ((before..=at).find(|&between| found(between)), stride == 1);
        }
        if at == to {
            return (None, stride == 1);
        }
        (before, at) = (at + 1, at.saturating_add(stride).min(to));
    }
}

fn find(plan: &Plan, layer: LayerId, expert: ExpertId) -> Result<Wanted, PlanError> {
    let refuse = |what: String| Err(PlanError::Explain { layer, expert, what });
    let Some(index) = plan.layers.iter().position(|plan| plan.layer == layer.0) else {
        let layers = match (plan.layers.first(), plan.layers.last()) {
            (Some(LayerPlan { layer: first, .. }), Some(LayerPlan { layer: last, .. })) => {
                format!("; those that have are {first} to {last}")
            }
            _ => String::new(),
        };
        return refuse(format!("this layer has no experts{layers}"));
    };
    let ranked = &plan.layers[index];
    match ranked.ranking.iter().position(|item| item.expert == expert.0) {
        Some(at) => Ok(Wanted { layer: index, at }),
        None => refuse(format!(
            "the layer has no such expert; its experts are 0 to {}",
            ranked.n_expert.saturating_sub(1)
        )),
    }
}

fn calls(block: &Block, layer: LayerId, expert: u32) -> Option<Calls> {
    let counts = block.layer(layer)?;
    let calls = *counts.calls.get(expert as usize)?;
    let of = counts.calls.iter().fold(0u64, |sum, &calls| sum.saturating_add(calls));
    Some(Calls { calls, of, share: tidy(calls as f64 / of.max(1) as f64) })
}

/// What decided; `flips` where some larger budget holds it.
fn reason(plan: &Plan, item: &Item, is_in: bool, may_be_hot: bool, flips: bool) -> Reason {
    let counts = [plan.objective != Objective::Prefill, plan.objective != Objective::Decode];
    let chosen =
        |(cut, layer): (&u32, &LayerPlan)| layer.ranking.iter().take(*cut as usize).any(|item| !item.forced);
    let gains =
        |regime: usize| counts[regime] && plan.cuts[regime].layers.iter().zip(&plan.layers).any(chosen);
    let saves = (gains(0) && item.decode_seconds > 0.0) || (gains(1) && item.prefill_seconds > 0.0);
    match () {
        () if item.forced => Reason::Named,
        () if is_in => Reason::WorthIt,
        () if !may_be_hot => Reason::NoProgram,
        () if flips => Reason::Outbid,
        () if !gains(0) && !gains(1) => Reason::NoRegimeGains,
        () if !saves => Reason::CostsTime,
        () => Reason::WindowFull,
    }
}
