//! What shows a plan from another side: single experts explained, other budgets, the page.

use orkpack::model::ModelShape;
use orkpack::plan::{
    Explanation, Objective, PlanError, PlanRequest, Planner, Reason, Routing, Shares, Skew, choose,
};
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
        assert!(point.prefill.planned.value >= last.0, "{} after {}", point.prefill.planned.value, last.0);
        assert!(point.decode.planned.value >= last.1);
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

#[test]
fn the_parts_of_a_phase_are_its_time() {
    use orkpack::plan::cost::{Bound, Load, Phase, Rates};
    let mut rng = crate::support::routed::Rng::new(8);
    let likely = Rates::of(&rk3588(), Bound::Likely);
    for round in 0..4000 {
        let rates = Rates { serial: round % 7 == 0, ..likely };
        let load = |seconds: f64, share: f64| Load { seconds, bytes: seconds * share * 24e9 };
        let mut side = || load([0.0, 1e-5, 1e-4, 1e-3][rng.below(4) as usize] * rng.unit(), rng.unit());
        let (npu, cpu) = (side(), side());
        let phase = Phase { npu, cpu, submits: f64::from(npu.seconds > 0.0) };
        let (parts, seconds) = (rates.phase_parts(&phase), rates.phase_seconds(&phase));
        assert!([parts.cpu, parts.both, parts.npu, parts.start].iter().all(|part| *part >= 0.0), "{parts:?}");
        // Rounding only: the terms are the same in another order.
        assert!((parts.seconds() - seconds).abs() <= 1e-12 * seconds.max(1e-9), "{parts:?} of {seconds}");
    }
}

/// Everything of a page that `name` and the request give.
fn page_of(request: &PlanRequest<'_>, name: &str) -> (String, orkpack::plan::Plan) {
    let planner = Planner::new(request).unwrap();
    let plan = planner.plan().unwrap();
    let document = PlanDocument {
        sweep: planner.sweep(planner.least_budget(), request.profile.window()).unwrap(),
        times: planner.layer_times(&plan),
        ..PlanDocument::of(&plan)
    };
    let json = serde_json::from_str(&report::json(&document).unwrap()).unwrap();
    schema::check(&schema::load("plan.schema.json"), &json).unwrap();
    (report::page(&document, name, "counted & kept"), plan)
}

/// Checks that a page is well-formed XML of the plain kind: elements closed in order, attributes quoted and each
/// once, known entities only. Gives the elements' names.
fn well_formed(page: &str) -> Vec<String> {
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a document type");
    let (mut open, mut names): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let text = |text: &str| {
        assert!(!text.contains('>') && !text.contains('\0'), "{text}");
        for entity in text.split('&').skip(1) {
            let name = entity.split_once(';').unwrap_or_else(|| panic!("& in {text}")).0;
            assert!(["amp", "lt", "gt", "quot", "#39"].contains(&name), "&{name};");
        }
    };
    while let Some((before, tag)) = rest.split_once('<') {
        text(before);
        let (tag, after) = tag.split_once('>').expect("an end of the tag");
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let (tag, is_empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag, ""));
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric()) && !name.is_empty(), "<{tag}>");
        let mut known = Vec::new();
        while !attributes.trim().is_empty() {
            let (key, value) = attributes.trim_start().split_once("=\"").expect("a quoted attribute");
            let (value, more) = value.split_once('"').expect("an end of the attribute");
            text(value);
            assert!(!known.contains(&key) && !key.contains(' '), "{key} in <{tag}>");
            known.push(key);
            attributes = more;
        }
        names.push(name.to_owned());
        if !is_empty {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} are open");
    names
}

#[test]
fn the_page_is_whole_well_formed_and_asks_for_nothing() {
    let profile = rk3588();
    let (large, small) = (lfm(), shape(2, 8, 2, 512, 512, Dtype::Q8_0));
    let hostile = "</title><script>alert(1)</script> & \"o'k\" \u{202e}\u{7}\u{ffff}";
    let auto = (Objective::Auto, Shares::Auto);
    for (shape, measured, budget, (objective, shares)) in [
        (&large, true, 1200, auto),
        (&large, false, 300, auto),
        (&small, true, 0, auto),
        (&small, true, 2, auto),
        (&small, true, 2, (Objective::Hits, Shares::Rows)),
    ] {
        let statistics = statistics(shape, 700, 3.0, 2);
        let routing = if measured { Routing::Measured(&statistics) } else { Routing::Assumed(Skew::RANGE) };
        let mut odd = shape.clone();
        odd.architecture = "<b onclick=\"x\">".to_owned();
        let mut request = PlanRequest::new(&odd, routing, &profile);
        request.budget = Some(Bytes(budget * MIB));
        (request.objective, request.shares) = (objective, shares);
        let (page, plan) = page_of(&request, hostile);
        let names = well_formed(&page);
        let n = |name: &str| names.iter().filter(|found| *found == name).count();
        assert_eq!((n("script"), n("link"), n("img"), n("b"), n("html"), n("body")), (0, 0, 0, 0, 1, 1));
        for outside in ["src=", "href=", "url(", "@import", "\u{202e}", "\u{7}", "\u{ffff}"] {
            assert!(!page.contains(outside), "{outside:?}");
        }
        // Whole experts are outlined, rows of all experts dashed.
        let dashed = plan.layers.iter().any(|layer| layer.is_by_rows());
        assert_eq!(dashed, shares == Shares::Rows);
        assert_eq!(page.contains("class=\"part\""), dashed);
        assert_eq!(page.contains("dashed: the first rows of every expert"), dashed);
        // The only addresses name the languages of the document.
        assert_eq!(page.matches("://").count(), page.matches("xmlns=\"http://www.w3.org/").count());
        assert!(
            page.contains("&lt;script&gt;alert(1)&lt;/script&gt; &amp;")
                && page.contains("counted &amp; kept")
        );
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("name=\"viewport\""));
        assert!(page.contains(&plan.verdict.sentence));
        // A cell for each expert, an outline for each resident one.
        let cells: u32 = plan.layers.iter().map(|layer| layer.n_expert).sum();
        let resident: u32 = plan.layers.iter().map(|layer| layer.resident).sum();
        assert_eq!(page.matches("<rect class=\"call\"").count(), cells as usize);
        let outline = if dashed { "<rect class=\"part\"" } else { "<rect class=\"hot\"" };
        assert_eq!(page.matches(outline).count(), resident as usize);
        assert_eq!(page.matches("text set aside").count() > 0 && !page.contains("no text was"), measured);
    }
}

#[test]
fn the_times_of_the_layers_are_the_predicted_speed() {
    use orkpack::plan::cost::{Bound, Rates};
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 700, 3.0, 2);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    for (objective, shares) in
        [(Objective::Auto, Shares::Auto), (Objective::Hits, Shares::Auto), (Objective::Hits, Shares::Rows)]
    {
        (request.objective, request.shares) = (objective, shares);
        let planner = Planner::new(&request).unwrap();
        let plan = planner.plan().unwrap();
        assert_eq!(plan.layers.iter().any(|layer| layer.is_by_rows()), shares == Shares::Rows);
        for forecast in &plan.forecasts {
            let again = planner.forecast_at(&plan, forecast.tokens);
            assert_eq!(again.planned, forecast.planned);
        }
        let times = planner.layer_times(&plan);
        let rates = Rates::of(&profile, Bound::Likely);
        for (regime, forecast) in plan.forecasts.iter().enumerate() {
            let layers = times.iter().map(|time| [time.decode, time.prefill][regime].seconds()).sum::<f64>();
            let seconds = rates.dense_seconds(&shape, forecast.tokens) + layers;
            let speed = f64::from(forecast.tokens) / seconds;
            // Both are kept to nine digits.
            assert!((speed / forecast.planned.value - 1.0).abs() < 1e-6, "{speed} {:?}", forecast.planned);
        }
        // Of layers with all rows, or none, one side alone has the time.
        let shared = times.iter().filter(|time| time.prefill.both > 0.0).count();
        assert!(shared == times.len() || (shares == Shares::Rows && shared > 0), "{shared} layers");
        assert_eq!(times[0].decode.npu > 0.0, objective == Objective::Hits);
    }
}
