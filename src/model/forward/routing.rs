//! From router logits to experts and weights.

use super::dense::sigmoid;
use crate::executor::Routing;
use crate::model::parts::{Gating, RoutingRule};
use crate::units::ExpertId;

/// The least sum that weights are divided by. Source: the reference implementation (2⁻¹⁴).
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// Chooses experts for every row of `logits`, `[m, n_expert]`: best first, ties to the lower id.
pub(super) fn choose(rule: &RoutingRule, n_expert: usize, logits: &[f32], routing: &mut Routing) {
    routing.n_used = rule.n_used;
    routing.experts.clear();
    routing.weights.clear();
    // What the expert is ranked by, its weight, its number.
    type Ranked = (f32, f32, u32);
    let mut ranked: Vec<Ranked> = Vec::with_capacity(n_expert);
    for row in logits.chunks_exact(n_expert) {
        ranked.clear();
        match rule.gating {
            Gating::Softmax => ranked.extend(softmax(row).zip(0..).map(|(p, expert)| (p, p, expert))),
            Gating::Sigmoid => ranked.extend(row.iter().zip(0..).map(|(logit, expert)| {
                let p = sigmoid(*logit);
                (p, p, expert)
            })),
            Gating::SoftmaxOfChosen => {
                ranked.extend(row.iter().zip(0..).map(|(logit, expert)| (*logit, *logit, expert)));
            }
        }
        if let Some(bias) = &rule.selection_bias {
            ranked.iter_mut().zip(bias).for_each(|((score, ..), bias)| *score += bias);
        }
        let best_first = |a: &Ranked, b: &Ranked| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2));
        if rule.n_used < n_expert {
            ranked.select_nth_unstable_by(rule.n_used, best_first);
        }
        let chosen = &mut ranked[..rule.n_used];
        chosen.sort_unstable_by(best_first);
        if rule.gating == Gating::SoftmaxOfChosen {
            let logits: Vec<f32> = chosen.iter().map(|(_, logit, _)| *logit).collect();
            chosen.iter_mut().zip(softmax(&logits)).for_each(|((_, weight, _), p)| *weight = p);
        }
        let sum: f32 = chosen.iter().map(|(_, weight, _)| weight).sum();
        let divisor = if rule.normalise { sum.max(LEAST_SUM) } else { 1.0 };
        routing.experts.extend(chosen.iter().map(|(.., expert)| ExpertId(*expert)));
        let scale = rule.scale.unwrap_or(1.0);
        routing.weights.extend(chosen.iter().map(|(_, weight, _)| weight / divisor * scale));
    }
}

fn softmax(logits: &[f32]) -> impl Iterator<Item = f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
    let scale = (1.0 / sum) as f32;
    logits.iter().map(move |logit| (logit - max).exp() * scale)
}
