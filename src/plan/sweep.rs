//! The same plan for a dozen budgets: what more memory would give.

use serde::Serialize;

use super::document::{Advice, Basis, HitRate, Plan, Range};
use super::{PlanError, Planner};
use crate::units::Bytes;

/// A page: no smaller step makes a difference.
const PAGE: u64 = 4096;

/// Most whole steps between the ends.
const STEPS: u64 = 14;

/// What one budget gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Bytes allowed in one domain.
    pub budget_bytes: u64,
    /// Bytes used, in all domains.
    pub weight_bytes: u64,
    /// Expert matrices resident.
    pub n_matrices: u64,
    /// Calls that they serve, mean of the three projections.
    pub hit_rate: HitRate,
    /// How the hit rate came about.
    pub hit_rate_basis: Basis,
    /// Tokens one at a time.
    pub decode: SweepSpeed,
    /// Prompts of 512 tokens.
    pub prefill: SweepSpeed,
}

/// What one budget gives in one regime.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SweepSpeed {
    /// Tokens per second, as planned.
    pub planned: Range,
    /// Over the CPU alone.
    pub gain: Range,
    /// What to do.
    pub verdict: Advice,
    /// How the speed came about.
    pub basis: Basis,
}

impl Planner<'_> {
    /// Plans for some budgets from `from` to `to`, both among them; see [`budgets`].
    ///
    /// # Errors
    ///
    /// As [`super::choose`], for any of them.
    pub fn sweep(&self, from: Bytes, to: Bytes) -> Result<Vec<SweepPoint>, PlanError> {
        let point = |budget| {
            let plan = self.plan_at(budget)?;
            Ok(SweepPoint {
                budget_bytes: budget.0,
                weight_bytes: plan.footprint.weight_bytes,
                n_matrices: plan.matrices().count() as u64,
                decode: speed(&plan, 0, plan.verdict.decode),
                prefill: speed(&plan, 1, plan.verdict.prefill),
                hit_rate_basis: plan.hit_rates.basis,
                hit_rate: plan.hit_rates.overall,
            })
        };
        budgets(from, to).into_iter().map(point).collect()
    }
}

fn speed(plan: &Plan, regime: usize, verdict: Advice) -> SweepSpeed {
    let forecast = &plan.forecasts[regime];
    SweepSpeed { planned: forecast.planned, gain: forecast.gain, verdict, basis: forecast.basis }
}

/// The ends and the multiples of a round step between them: 12 to 16 budgets, fewer where the range is a few pages.
///
/// A step is 4, 5, 6 or 7 times a power of two.
pub fn budgets(from: Bytes, to: Bytes) -> Vec<Bytes> {
    let range = to.0.saturating_sub(from.0);
    let mut steps = (0..u64::BITS - 3).flat_map(|power| (4..8u64).map(move |n| n << power));
    let step = steps.find(|step| *step >= PAGE && range / step <= STEPS).unwrap_or(1 << 60);
    let mut budgets = vec![from];
    let mut next = (from.0 / step + 1).saturating_mul(step);
    while next < to.0 {
        budgets.push(Bytes(next));
        next = next.saturating_add(step);
    }
    if to > from {
        budgets.push(to);
    }
    budgets
}
