//! What must hold of any plan for any model and any budget, on ten thousand of them; and boards with little memory.

use orkpack::model::{ModelShape, MoeLayerShape};
use orkpack::plan::{
    ANSWER_TOKENS, Advice, Note, Objective, PROMPT_TOKENS, Plan, PlanRequest, Planner, Routing, Shares, Skew,
    choose,
};
use orkpack::profile::DeviceProfile;
use orkpack::report::{self, PlanDocument};
use orkpack::tensor::Dtype;
use orkpack::units::{Bytes, LayerId};

use crate::support::routed::{Rng, lfm, shape, statistics};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// A device on which this or that pays: other rates, latencies and a small window now and then.
fn some_device(rng: &mut Rng) -> DeviceProfile {
    let mut profile = rk3588();
    let rates = &mut profile.rates;
    rates.cpu_bytes_per_s.value = [24e9, 18e9, 6e9, 1e9][rng.below(4) as usize];
    rates.cpu_macs_per_s.value = [51.5e9, 10e9][rng.below(2) as usize];
    rates.npu_macs_per_s.value = [600e9, 60e9][rng.below(2) as usize];
    profile.latency_us.submit.value = [60.0, 1.0, 600.0][rng.below(3) as usize];
    profile
}

fn some_model(rng: &mut Rng, round: usize) -> ModelShape {
    let n_expert = 1 + rng.below(16) as usize;
    let n_used = 1 + rng.below(n_expert.min(6) as u64) as usize;
    let sizes = [64, 256, 512, 768, 896, 1408, 2048];
    let size = |rng: &mut Rng| sizes[rng.below(sizes.len() as u64) as usize];
    let (n_embd, n_ff) = (size(rng), size(rng));
    let dtype = [Dtype::Q4_0, Dtype::Q8_0, Dtype::F16][round % 3];
    let mut model = shape(1 + rng.below(3) as usize, n_expert, n_used, n_embd, n_ff, dtype);
    if rng.below(4) == 0 {
        // Layers need not be alike.
        let (other, n_layer) = (1 + rng.below(12) as usize, model.n_layer as u32);
        let odd = shape(1, other, 1, n_embd, 512, Dtype::Q4_0).moe_layers.remove(0);
        model.moe_layers.push(MoeLayerShape { layer: LayerId(n_layer), ..odd });
    }
    model
}

/// Seconds of what a plan was made for.
fn seconds(plan: &Plan) -> f64 {
    let [decode, prefill] = [0, 1].map(|regime| plan.forecasts[regime].planned.value);
    let (answer, prompt) = (f64::from(ANSWER_TOKENS) / decode, f64::from(PROMPT_TOKENS) / prefill);
    match plan.objective {
        Objective::Decode => answer,
        Objective::Prefill => prompt,
        Objective::Auto | Objective::Hits => answer + prompt,
    }
}

#[test]
fn ten_thousand_plans_keep_to_their_budgets_and_gain_with_them() {
    let mut rng = Rng::new(77);
    let (mut used, mut gained, mut both, mut best, mut chosen) = (0, 0, 0, 0, 0);
    let (mut by_rows, mut beside) = (0, 0);
    for round in 0..10_000 {
        let (profile, shape) = (some_device(&mut rng), some_model(&mut rng, round));
        let counted;
        let routing = if round % 3 == 0 {
            Routing::Assumed(Skew { low: 0.0, value: 3.0 * rng.unit(), high: 4.0 })
        } else {
            counted = statistics(&shape, 40, 4.0 * rng.unit(), round as u64);
            Routing::Measured(&counted)
        };
        let mut request = PlanRequest::new(&shape, routing, &profile);
        let objectives = [Objective::Auto, Objective::Decode, Objective::Prefill, Objective::Hits];
        request.objective = objectives[rng.below(4) as usize];
        request.shares = [Shares::Auto, Shares::Auto, Shares::Rows][rng.below(3) as usize];
        // Domains are chosen for one by one, and each costs a switch: the sum of two regimes is not what is chosen by.
        let one_regime = [Objective::Decode, Objective::Prefill].contains(&request.objective);
        request.domains = if one_regime { 1 + rng.below(3) as u32 } else { 1 };
        let planner = Planner::new(&request).unwrap();
        let bits = 14 + rng.below(14);
        let mut budgets = [0, rng.below(1 << bits), rng.below(1 << bits), 1 << bits];
        budgets.sort_unstable();
        let mut last: Option<Plan> = None;
        for budget in budgets {
            let plan = planner.plan_at(Bytes(budget)).unwrap();
            let what = format!("round {round}, {:?}, {budget} bytes", request.objective);
            let fullest = plan.footprint.domains.iter().map(|domain| domain.weight_bytes).max().unwrap();
            assert!(fullest <= budget, "{what}: {fullest} bytes used");
            if request.objective == Objective::Hits {
                // Whatever it costs: then more is not always faster, but never serves less.
                let hits = |plan: &Plan| plan.hit_rates.overall.calibration.value;
                assert!(last.as_ref().is_none_or(|last| hits(&plan) >= hits(last) - 1e-8), "{what}");
            } else {
                for forecast in &plan.forecasts {
                    assert!(forecast.planned.value >= forecast.cpu_only.value, "{what}: {forecast:?}");
                }
                if let Some(last) = &last {
                    let (now, before) = (seconds(&plan), seconds(last));
                    assert!(now <= before * (1.0 + 1e-7), "{what}: {now} s after {before} s with less");
                    gained += usize::from(now < before * 0.999);
                }
                best += usize::from(plan.gap == 0.0);
                chosen += 1;
                both += usize::from([plan.verdict.decode, plan.verdict.prefill] == [Advice::Npu; 2]);
            }
            used += usize::from(fullest > 0);
            // Layers shared by rows, in such plans beside layers shared by experts.
            let rows = plan.layers.iter().filter(|layer| layer.is_by_rows()).count();
            let experts = plan.layers.iter().filter(|l| !l.is_by_rows() && l.resident > 0).count();
            by_rows += usize::from(rows > 0 && request.shares == Shares::Auto);
            beside += usize::from(rows > 0 && experts > 0);
            if rows > 0 {
                plan.check(&shape, &profile).unwrap();
            }
            if round % 20 == 0 {
                let again = choose(&PlanRequest { budget: Some(Bytes(budget)), ..request.clone() }).unwrap();
                assert_eq!(again, plan, "{what}");
            }
            last = Some(plan);
        }
    }
    // Only where sizes have no large common divisor a choice may not be the best.
    assert!(best >= chosen / 100 * 98, "{best} of {chosen} choices are certain");
    // The property is not held for want of cases.
    assert!(used > 10_000 && gained > 3_000 && both > 1_000, "{used} used, {gained} gained, {both} for both");
    assert!(by_rows > 1_000 && beside > 300, "{by_rows} chose rows themselves, {beside} beside experts");
}

#[test]
fn a_model_too_large_to_try_every_choice_says_how_far_it_may_be_from_the_best() {
    let (shape, profile) = (shape(3, 600, 8, 512, 256, Dtype::Q8_0), rk3588());
    let statistics = statistics(&shape, 512, 2.2, 3);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.budget = Some(Bytes(200 * MIB));
    let plan = choose(&request).unwrap();
    assert!(plan.footprint.weight_bytes > 150 * MIB);
    assert!(plan.gap < 0.01, "{}", plan.gap);
    let text = orkpack::report::plan(&plan, "counted");
    let line = text.lines().find(|line| line.starts_with("choice: ")).unwrap();
    let expected = match plan.gap {
        0.0 => "choice: none within the budget saves more".to_owned(),
        gap => format!("choice: none within the budget saves more, but for {:.2} % at most", 100.0 * gap),
    };
    assert_eq!(line, expected);
}

#[test]
fn copies_do_not_push_the_model_out_of_memory() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 2048, 2.2, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    let roomy = choose(&request).unwrap();
    assert!(roomy.footprint.weight_bytes > 3 * GIB);
    // The model takes 4.6 GB: on a board of 7 GiB a window full of copies leaves too little.
    request.ram = Some(Bytes(7 * GIB));
    let plan = choose(&request).unwrap();
    assert!(plan.footprint.weight_bytes < roomy.footprint.weight_bytes);
    let used = plan.footprint.weight_bytes;
    assert!(plan.notes.iter().any(|note| matches!(note, Note::KeptForModel { used: u } if *u == used)));
    assert!(seconds(&plan) > seconds(&roomy), "less memory is not faster");
    // Filling the window instead, as is done when told to, reads weights from disk for each token.
    (request.objective, request.ram) = (Objective::Hits, Some(Bytes(11 * GIB / 2)));
    let filled = choose(&request).unwrap();
    assert_eq!(filled.forecasts[0].cpu_only, roomy.forecasts[0].cpu_only);
    let roomy_filled = choose(&PlanRequest { ram: None, ..request.clone() }).unwrap();
    assert!(filled.forecasts[0].planned.value < 0.9 * roomy_filled.forecasts[0].planned.value);
    // A board that does not even hold the model reads it again and again, at the speed of its disk.
    request.objective = Objective::Auto;
    request.ram = Some(Bytes(3 * GIB));
    let plan = choose(&request).unwrap();
    let cpu = plan.forecasts[0].cpu_only;
    assert!(cpu.value < 0.5 * roomy.forecasts[0].cpu_only.value, "{cpu:?}");
    let memory = &plan.memory;
    assert!(plan.notes.contains(&Note::OverRam { needed: memory.total_bytes, ram: 3 * GIB }));
    // By hand: more than none and less than all of the experts' bytes of a token come from the disk.
    let slower = 1.0 / cpu.value - 1.0 / roomy.forecasts[0].cpu_only.value;
    let bytes = slower * profile.rates.disk_bytes_per_s.value;
    let experts = 4.0 / 32.0 * (memory.source_bytes - shape.dense_bytes) as f64;
    assert!(bytes > 0.2 * experts && bytes < 0.9 * experts, "{bytes} of {experts}");
}

#[test]
fn with_little_memory_a_larger_budget_still_never_predicts_slower() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 1024, 2.2, 1);
    for (ram, objective) in [(6, Objective::Auto), (7, Objective::Prefill), (3, Objective::Prefill)] {
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        (request.ram, request.objective) = (Some(Bytes(ram * GIB)), objective);
        let planner = Planner::new(&request).unwrap();
        let mut last = f64::INFINITY;
        for budget in (0..12).map(|i| i * 300 * MIB) {
            let now = seconds(&planner.plan_at(Bytes(budget)).unwrap());
            assert!(now <= last * (1.0 + 1e-7), "{ram} GiB, {budget} bytes: {now} s after {last} s");
            last = now;
        }
    }
}

#[test]
fn case_h6_without_an_iommu_little_can_be_mapped_and_the_plan_says_so() {
    let (shape, mut profile) = (shape(2, 16, 2, 512, 512, Dtype::Q8_0), rk3588());
    profile.memory.iommu.value = false;
    let statistics = statistics(&shape, 512, 2.2, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.objective = Objective::Hits;
    let plan = choose(&request).unwrap();
    assert!(plan.window_bytes < 13_000_000 && plan.budget_bytes <= plan.window_bytes);
    assert!(plan.footprint.weight_bytes <= plan.window_bytes);
    let said = |note: &&Note| matches!(note, Note::Device { what } if what.contains("IOMMU is off"));
    assert!(plan.notes.iter().find(said).is_some(), "{:?}", plan.notes);
    // One domain, and no more than it can map.
    request.domains = 2;
    assert!(choose(&request).unwrap_err().to_string().starts_with("2 domains asked for, the device has 1"));
    (request.domains, request.budget) = (1, Some(Bytes(64 * MIB)));
    assert!(choose(&request).unwrap_err().to_string().contains("is over the usable window"));
}

#[test]
fn case_h10_a_parked_memory_clock_slows_the_estimate_and_is_said() {
    let (shape, profile) = (lfm(), rk3588());
    let mut parked = profile.clone();
    parked.conditions.ddr_mhz.value = 528;
    let plan = |profile: &DeviceProfile| {
        choose(&PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), profile)).unwrap()
    };
    let (usual, slow) = (plan(&profile), plan(&parked));
    let decode = |plan: &Plan| plan.forecasts[0].cpu_only;
    // A token is nothing but streaming.
    let times = decode(&usual).value / decode(&slow).value;
    assert!((times - 4.0).abs() < 1e-6, "{times} times slower");
    assert!(decode(&slow).low < decode(&slow).value && decode(&slow).value < decode(&slow).high);
    let said = |note: &&Note| matches!(note, Note::Device { what } if what.contains("528 MHz"));
    assert!(slow.notes.iter().find(said).is_some() && !usual.notes.iter().any(|note| said(&note)));
    let document = PlanDocument { assumptions: parked.assumptions(), ..PlanDocument::of(&slow) };
    let text = report::planned(&document, "assumed");
    let line = text.lines().find(|line| line.starts_with("speeds rest on: ")).unwrap();
    assert!(line.contains("memory at 528 MHz") && line.contains("both together stream 28.0 GB/s"), "{line}");
}

#[test]
fn weights_without_an_integer_kernel_are_slower_on_the_cpu() {
    let profile = rk3588();
    let forecast = |dtype| {
        let shape = shape(8, 32, 4, 2048, 1792, dtype);
        choose(&PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile)).unwrap()
    };
    let (with, without) = (forecast(Dtype::Q4_0), forecast(Dtype::Q4_1));
    // Q4_1 has a ninth more bytes; unpacking each weight takes longer than reading it.
    let decode = |plan: &Plan| plan.forecasts[0].cpu_only.value;
    assert!(decode(&without) < 0.6 * decode(&with), "{} {}", decode(&without), decode(&with));
    let prefill = |plan: &Plan| plan.forecasts[1].cpu_only.value;
    assert!(prefill(&without) < 0.8 * prefill(&with), "{} {}", prefill(&without), prefill(&with));
}

#[test]
fn as_many_domains_are_used_as_serve_best() {
    // A token that passes through eight domains waits for eight switches; half as much would fit into one.
    let (shape, profile) = (shape(12, 16, 2, 2048, 512, Dtype::Q8_0), rk3588());
    let statistics = statistics(&shape, 512, 2.2, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.domains = 8;
    let plan = choose(&request).unwrap();
    assert!(plan.n_domains < 8 && plan.footprint.domains.len() == plan.n_domains as usize);
    let seconds_with = |domains| seconds(&choose(&PlanRequest { domains, ..request.clone() }).unwrap());
    let fewer: Vec<f64> = (1..=8).map(seconds_with).collect();
    assert!(fewer.is_sorted_by(|a, b| a >= b), "more that may be used is never slower: {fewer:?}");
    // Where each holds little, more of them hold more, and a prompt is worth the switches.
    (request.objective, request.budget) = (Objective::Prefill, Some(Bytes(30 * MIB)));
    let plan = choose(&request).unwrap();
    assert!(plan.n_domains > 1, "{} domains", plan.n_domains);
    assert!(plan.layers.iter().all(|layer| layer.domain < plan.n_domains));
}
