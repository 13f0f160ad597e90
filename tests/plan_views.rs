//! What shows a plan from another side: single experts explained, other budgets.

use orkpack::model::ModelShape;
use orkpack::plan::{Explanation, Objective, PlanError, PlanRequest, Planner, Reason, Routing, Skew, choose};
use orkpack::profile::DeviceProfile;
use orkpack::report::{self, PlanDocument};
use orkpack::tensor::Dtype;
use orkpack::units::{Bytes, ExpertId, LayerId};

use crate::support::routed::{lfm, shape, statistics};
use crate::support::schema;

const MIB: u64 = 1 << 20;

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Explains every expert of a request.
fn explain_all(request: &PlanRequest<'_>) -> Vec<Explanation> {
    let planner = Planner::new(request).unwrap();
    let experts = |layer: &orkpack::model::MoeLayerShape| {
        let layer_id = layer.layer;
        (0..layer.n_expert() as u32).map(move |expert| (layer_id, ExpertId(expert)))
    };
    let all: Vec<_> = request.shape.moe_layers.iter().flat_map(experts).collect();
    planner.explain(&planner.plan().unwrap(), &all).unwrap()
}

/// The experts that are resident at a budget, planned from the beginning.
fn resident(request: &PlanRequest<'_>, budget: u64) -> Vec<(u32, u32)> {
    let request = PlanRequest { budget: Some(Bytes(budget)), ..request.clone() };
    let plan = choose(&request).unwrap();
    let layer = |layer: &orkpack::plan::LayerPlan| {
        let number = layer.layer;
        let first = layer.ranking.iter().take(layer.resident as usize);
        first.map(|item| (number, item.expert)).collect::<Vec<_>>()
    };
    plan.layers.iter().flat_map(layer).collect()
}

#[test]
fn the_budget_at_which_an_expert_turns_is_that_of_planning_every_budget() {
    let profile = rk3588();
    let mut not_monotone = 0;
    // Gate and up are 24 or 44 pages, down a few more than half of that: what is left is taken differently each time.
    let step = 4 * 4096;
    for (n_ff, objective, domains) in [
        (96, Objective::Hits, 1),
        (176, Objective::Auto, 1),
        (176, Objective::Prefill, 2),
        (176, Objective::Decode, 1),
    ] {
        let shape = shape(3, 6, 2, 512, n_ff, Dtype::Q8_0);
        let statistics = statistics(&shape, 600, 3.0, 5);
        let mut fast = profile.clone();
        // A slow CPU, so that all regimes gain.
        (fast.rates.cpu_bytes_per_s.value, fast.latency_us.submit.value) = (1e9, 1.0);
        fast.rates.cpu_macs_per_s.value = 5e9;
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &fast);
        (request.objective, request.domains) = (objective, domains);
        let end = 6 * MIB;
        let budgets: Vec<u64> = (0..=end / step).map(|i| i * step).collect();
        let sets: Vec<_> = budgets.iter().map(|&budget| resident(&request, budget)).collect();
        for budget in [0, MIB + 4096, 2 * MIB - 1, 4 * MIB] {
            request.budget = Some(Bytes(budget));
            let now = budgets.iter().rposition(|&b| b <= budget).unwrap();
            for why in explain_all(&request) {
                let is_in = |i: usize| sets[i].contains(&(why.layer, why.expert));
                let what = format!("{objective:?} {budget} {}:{}", why.layer, why.expert);
                assert_eq!(why.resident.is_some(), is_in(now), "{what}");
                assert!(why.flip_is_exact, "{what}");
                let expected = match is_in(now) {
                    true => (0..now).rev().find(|&i| !is_in(i)).map(|i| budgets[i + 1]),
                    false => (now + 1..budgets.len()).find(|&i| is_in(i)).map(|i| budgets[i]),
                };
                assert_eq!(why.flip_bytes, expected, "{what}");
                if let Some(bytes) = expected {
                    // To the byte.
                    assert!(resident(&request, bytes).contains(&(why.layer, why.expert)), "{what}");
                    assert!(!resident(&request, bytes - 1).contains(&(why.layer, why.expert)), "{what}");
                }
                let turns = (1..budgets.len()).filter(|&i| is_in(i) != is_in(i - 1)).count();
                not_monotone += usize::from(turns > 1);
            }
        }
    }
    // The reason why nothing is bisected.
    assert!(not_monotone > 0, "residency is monotone in these cases: they test too little");
}

#[test]
fn an_expert_is_in_or_out_for_a_reason() {
    struct Case {
        change: fn(&mut PlanRequest<'_>),
        shape: ModelShape,
        /// The first of a layer's ranking, and the last.
        reasons: [Reason; 2],
    }
    let small = || shape(2, 8, 2, 512, 512, Dtype::Q8_0);
    let cases = [
        Case {
            change: |r| (r.objective, r.budget) = (Objective::Hits, Some(Bytes(2 * MIB))),
            shape: small(),
            reasons: [Reason::WorthIt, Reason::Outbid],
        },
        Case {
            change: |r| r.objective = Objective::Decode,
            shape: small(),
            reasons: [Reason::NoRegimeGains; 2],
        },
        Case {
            change: |r| (r.objective, r.force_hot) = (Objective::Decode, vec![(LayerId(0), ExpertId(7))]),
            shape: small(),
            reasons: [Reason::Named, Reason::NoRegimeGains],
        },
        Case {
            change: |r| r.budget = Some(Bytes(600 * MIB)),
            shape: lfm(),
            reasons: [Reason::WorthIt, Reason::CostsTime],
        },
    ];
    for Case { change, shape, reasons } in cases {
        let (statistics, profile) = (statistics(&shape, 512, 3.0, 1), rk3588());
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        change(&mut request);
        let planner = Planner::new(&request).unwrap();
        let plan = planner.plan().unwrap();
        let layer = &plan.layers[0];
        let ends = [&layer.ranking[0], &layer.ranking[shape.moe_layers[0].n_expert() - 1]];
        let experts = ends.map(|item| (LayerId(layer.layer), ExpertId(item.expert)));
        let whys = planner.explain(&plan, &experts).unwrap();
        assert_eq!([whys[0].reason, whys[1].reason], reasons);
        assert_eq!([whys[0].rank, whys[1].rank], [1, layer.n_expert]);
        for (why, item) in whys.iter().zip(ends) {
            // What the plan says of it, and what was counted.
            assert_eq!(
                (why.bytes, why.share, why.decode_seconds, why.prefill_seconds),
                (item.bytes, item.share, item.decode_seconds, item.prefill_seconds)
            );
            let counts = statistics.calibration.layer(LayerId(why.layer)).unwrap();
            let calls = why.calibration.unwrap();
            assert_eq!(calls.calls, counts.calls[why.expert as usize]);
            assert_eq!(calls.of, counts.calls.iter().sum::<u64>());
            assert!(why.held_out.unwrap().share < 1.0);
        }
        let document = PlanDocument { explanations: whys, ..PlanDocument::of(&plan) };
        let json = serde_json::from_str(&report::json(&document).unwrap()).unwrap();
        schema::check(&schema::load("plan.schema.json"), &json).unwrap();
        let text = report::planned(&document, "counted");
        let reason = format!("expert {}: ", experts[1].1);
        assert!(text.contains(&reason) && text.contains(&reasons[1].to_string()), "{text}");
        assert!(text.contains("per prompt of 512 (estimated)") && text.contains(", measured;"), "{text}");
    }
}

#[test]
fn experts_that_are_not_there_are_not_explained() {
    let (shape, profile) = (lfm(), rk3588());
    let request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    let planner = Planner::new(&request).unwrap();
    let plan = planner.plan().unwrap();
    for (layer, expert, says) in [
        (0, 0, "--explain 0:0: this layer has no experts; those that have are 2 to 23"),
        (2, 32, "--explain 2:32: the layer has no such expert; its experts are 0 to 31"),
        (u32::MAX, u32::MAX, "this layer has no experts"),
    ] {
        let error = planner.explain(&plan, &[(LayerId(layer), ExpertId(expert))]).unwrap_err();
        assert!(matches!(error, PlanError::Explain { .. }) && error.to_string().contains(says), "{error}");
    }
    // Assumed routing knows no experts: nothing is counted, and the text says so.
    let why = planner.explain(&plan, &[(LayerId(2), ExpertId(3))]).unwrap().remove(0);
    assert_eq!((why.calibration, why.held_out), (None, None));
    let text =
        report::planned(&PlanDocument { explanations: vec![why], ..PlanDocument::of(&plan) }, "assumed");
    assert!(text.contains("which expert it is, is not known, estimated"), "{text}");
}

#[test]
fn a_sweep_takes_a_dozen_round_budgets_and_both_ends() {
    const GIB: u64 = 1 << 30;
    for (from, to) in [
        (0, 7 * GIB / 2),
        (1, 3 * GIB - 1),
        (GIB, 3_955_228_672),
        (0, 4096 * 15),
        (123_456_789, 234_567_891),
        (0, u64::MAX),
        (u64::MAX - GIB, u64::MAX),
    ] {
        let budgets = orkpack::plan::budgets(Bytes(from), Bytes(to));
        assert!((12..=16).contains(&budgets.len()), "{from}..{to}: {budgets:?}");
        assert_eq!((budgets[0], budgets[budgets.len() - 1]), (Bytes(from), Bytes(to)));
        assert!(budgets.is_sorted_by(|a, b| a < b), "{budgets:?}");
        let step = budgets[2].0 - budgets[1].0;
        assert!(budgets[1..budgets.len() - 1].iter().all(|budget| budget.0 % step == 0), "{budgets:?}");
    }
    assert_eq!(orkpack::plan::budgets(Bytes(5), Bytes(5)), [Bytes(5)]);
    assert_eq!(orkpack::plan::budgets(Bytes(5), Bytes(9)), [Bytes(5), Bytes(9)]);
}

#[test]
fn a_sweep_is_what_planning_each_budget_gives_and_never_slower_with_more() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 2048, 3.0, 4);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.objective = Objective::Prefill;
    let planner = Planner::new(&request).unwrap();
    let sweep = planner.sweep(Bytes(0), profile.window()).unwrap();
    let mut last = (0.0, 0.0, 0);
    for point in &sweep {
        let plan =
            choose(&PlanRequest { budget: Some(Bytes(point.budget_bytes)), ..request.clone() }).unwrap();
        assert_eq!(planner.plan_at(Bytes(point.budget_bytes)).unwrap(), plan);
        assert_eq!(point.n_matrices, plan.matrices().count() as u64);
        assert_eq!(
            (point.decode.planned, point.prefill.planned),
            (plan.forecasts[0].planned, plan.forecasts[1].planned)
        );
        assert_eq!(
            (point.decode.verdict, point.prefill.verdict),
            (plan.verdict.decode, plan.verdict.prefill)
        );
        assert_eq!(point.hit_rate, plan.hit_rates.overall);
        // As in the property test: what is left at the end of a budget may be worth a thousandth.
        assert!(
            point.prefill.planned.value >= 0.999 * last.0,
            "{} after {}",
            point.prefill.planned.value,
            last.0
        );
        assert!(point.decode.planned.value >= 0.999 * last.1);
        assert!(point.weight_bytes >= last.2);
        last = (point.prefill.planned.value, point.decode.planned.value, point.weight_bytes);
    }
    assert!(sweep[0].n_matrices == 0 && sweep[0].prefill.gain.value == 1.0);
    assert!(sweep[sweep.len() - 1].prefill.gain.value > 1.5);
    let error = planner.sweep(Bytes(0), Bytes(profile.window().0 + 1)).unwrap_err();
    assert!(matches!(error, PlanError::OverWindow { .. }), "{error}");
    // The document and the table.
    let plan = planner.plan().unwrap();
    let document = PlanDocument { sweep, ..PlanDocument::of(&plan) };
    let json = serde_json::from_str(&report::json(&document).unwrap()).unwrap();
    schema::check(&schema::load("plan.schema.json"), &json).unwrap();
    let text = report::planned(&document, "counted");
    assert!(text.contains("hit rates: held-out text, measured; speeds and gains: estimated"), "{text}");
    let rows =
        text.lines().filter(|line| [" prefill", " nothing"].iter().any(|end| line.trim_end().ends_with(end)));
    assert_eq!(rows.count(), document.sweep.len(), "{text}");
}
