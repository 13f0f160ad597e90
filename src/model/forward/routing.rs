//! From router logits to experts and weights.

use super::dense::sigmoid;
use crate::executor::Routing;
use crate::model::parts::{Gating, Groups, RoutingRule};
use crate::units::ExpertId;

/// The least sum that weights are divided by. Source: the reference implementation (2⁻¹⁴).
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// What an expert is ranked by, its weight, its number.
type Ranked = (f32, f32, u32);

/// Chooses experts for every row of `logits`, `[m, n_expert]`: best first, ties to the lower id. Logits that differ by
/// less than their scores can tell are no tie.
pub(super) fn choose(rule: &RoutingRule, n_expert: usize, logits: &[f32], routing: &mut Routing) {
    routing.n_used = rule.n_used;
    routing.experts.clear();
    routing.weights.clear();
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
        if let Some(groups) = rule.groups {
            keep_best_groups(groups, &mut ranked);
        }
        let logit = |ranked: &Ranked| row[ranked.2 as usize];
        let best_first = |a: &Ranked, b: &Ranked| {
            b.0.total_cmp(&a.0).then(logit(b).total_cmp(&logit(a))).then(a.2.cmp(&b.2))
        };
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

/// Ranks the experts of all but the best groups below every other; ties to the lower group. `ranked` is in order of
/// the experts.
fn keep_best_groups(groups: Groups, ranked: &mut [Ranked]) {
    let len = ranked.len() / groups.n;
    let scores = ranked.chunks_exact(len).map(|group| {
        let mut scores: Vec<f32> = group.iter().map(|(score, ..)| *score).collect();
        scores.sort_unstable_by(|a, b| b.total_cmp(a));
        scores.iter().take(2).sum::<f32>()
    });
    let mut scores: Vec<(f32, usize)> = scores.zip(0..).collect();
    scores.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    for (_, group) in &scores[groups.n_used..] {
        ranked[group * len..][..len].iter_mut().for_each(|(score, ..)| *score = f32::NEG_INFINITY);
    }
}

fn softmax(logits: &[f32]) -> impl Iterator<Item = f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
    let scale = (1.0 / sum) as f32;
    logits.iter().map(move |logit| (logit - max).exp() * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a rule makes of the logits of one row.
    struct Case {
        rule: RoutingRule,
        logits: &'static [f32],
        experts: &'static [u32],
        weights: &'static [f32],
    }

    fn check(cases: &[Case]) {
        for (i, Case { rule, logits, experts, weights }) in cases.iter().enumerate() {
            let mut routing = Routing::default();
            choose(rule, logits.len(), logits, &mut routing);
            let ids: Vec<u32> = routing.experts.iter().map(|expert| expert.0).collect();
            assert_eq!(ids, *experts, "case {i}");
            for (ours, expected) in routing.weights.iter().zip(*weights) {
                assert!((ours - expected).abs() < 1e-6, "case {i}: {:?}", routing.weights);
            }
        }
    }

    /// Sigmoids of 3/4, 1/2 and 1/4.
    const LN_3: f32 = 1.098_612_3;
    const QUARTERS: &[f32] = &[0.0, LN_3, -LN_3];

    fn sigmoids() -> RoutingRule {
        RoutingRule { gating: Gating::Sigmoid, n_used: 2, ..RoutingRule::default() }
    }

    #[test]
    fn weights_are_scores_over_their_sum_times_the_scale_without_the_selection_bias() {
        let logits = QUARTERS;
        let (normalise, scale) = (true, Some(2.5));
        let selection_bias = Some(vec![0.0, 0.0, 0.6]);
        check(&[
            Case { rule: sigmoids(), logits, experts: &[1, 0], weights: &[0.75, 0.5] },
            Case {
                rule: RoutingRule { normalise, ..sigmoids() },
                logits,
                experts: &[1, 0],
                weights: &[0.6, 0.4],
            },
            Case {
                rule: RoutingRule { normalise, scale, ..sigmoids() },
                logits,
                experts: &[1, 0],
                weights: &[1.5, 1.0],
            },
            Case {
                rule: RoutingRule { scale, ..sigmoids() },
                logits,
                experts: &[1, 0],
                weights: &[1.875, 1.25],
            },
            // 1/4 + 0.6 ranks first, and weighs 1/4.
            Case {
                rule: RoutingRule { selection_bias: selection_bias.clone(), ..sigmoids() },
                logits,
                experts: &[2, 1],
                weights: &[0.25, 0.75],
            },
            Case {
                rule: RoutingRule { selection_bias, normalise, scale, ..sigmoids() },
                logits,
                experts: &[2, 1],
                weights: &[0.625, 1.875],
            },
            // A softmax of logs is their share of all, not of the chosen: 1, 3 and 1/3 of 13/3.
            Case {
                rule: RoutingRule { n_used: 2, ..RoutingRule::default() },
                logits,
                experts: &[1, 0],
                weights: &[9.0 / 13.0, 3.0 / 13.0],
            },
        ]);
    }

    /// A ten-millionth between logits is lost in their softmax and sigmoids, whose scores are then equal.
    #[test]
    fn case_e1_neighbouring_logits_are_told_apart_and_equal_ones_go_to_the_lower_expert() {
        const NEAR: &[f32] = &[1.0, 0.5, 1.000_000_1, 1.0];
        for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen] {
            let rule = |n_used| RoutingRule { gating, n_used, ..RoutingRule::default() };
            check(&[
                case(rule(1), NEAR, &[2]),
                case(rule(2), NEAR, &[2, 0]),
                case(rule(3), NEAR, &[2, 0, 3]),
                case(rule(3), &[2.0, 2.0, 2.0, 2.0], &[0, 1, 2]),
            ]);
        }
    }

    /// Ranked by the logits themselves; weights do not matter here.
    fn grouped(n: usize, n_groups_used: usize, n_used: usize) -> RoutingRule {
        RoutingRule {
            gating: Gating::SoftmaxOfChosen,
            n_used,
            groups: Some(Groups { n, n_used: n_groups_used }),
            ..RoutingRule::default()
        }
    }

    fn case(rule: RoutingRule, logits: &'static [f32], experts: &'static [u32]) -> Case {
        Case { rule, logits, experts, weights: &[] }
    }

    #[test]
    fn experts_come_from_the_groups_whose_two_best_are_best() {
        // Sums of 0, 9, 7 and 1: the group of the very best expert is none of the two best.
        const FOURS: &[f32] = &[9.0, -9.0, 4.0, 5.0, 3.0, 4.0, 1.0, 0.0];
        let for_the_last = Some(vec![0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 5.0]);
        check(&[
            case(RoutingRule { groups: None, ..grouped(4, 2, 3) }, FOURS, &[0, 3, 2]),
            case(grouped(4, 2, 3), FOURS, &[3, 2, 5]),
            case(grouped(4, 1, 2), FOURS, &[3, 2]),
            case(grouped(4, 4, 3), FOURS, &[0, 3, 2]),
            // With the bias, sums of 0, 9, 7 and 11.
            case(RoutingRule { selection_bias: for_the_last, ..grouped(4, 2, 3) }, FOURS, &[6, 3, 7]),
            // Two of three count: 5 and 4; of all three it would be 5 and 6.
            case(grouped(2, 1, 1), &[5.0, 0.0, 0.0, 2.0, 2.0, 2.0], &[0]),
            // Ties go to the lower group, as they go to the lower expert.
            case(grouped(3, 1, 2), &[0.0, 0.0, 2.0, 1.0, 1.0, 2.0], &[2, 3]),
            // A group of one has no second best; scores may be negative.
            case(grouped(3, 2, 2), &[-3.0, -1.0, -2.0], &[1, 2]),
        ]);
    }

    #[test]
    fn the_experts_of_other_groups_are_not_chosen_even_if_all_that_is_left_is_worse() {
        // All of the best group, though its second expert is the worst of all.
        check(&[case(grouped(2, 1, 2), &[9.0, -5.0, 1.0, 1.0], &[0, 1])]);
    }
}
