//! The planner: its cost model against closed formulas, simulation and enumeration; what it chooses, places and
//! refuses.

use orkpack::calibrate::{Block, Statistics};
use orkpack::device::{Device, DeviceMatrix, Job, Npu, PlacedPart, Sim};
use orkpack::model::{ModelShape, MoeLayerShape};
use orkpack::plan::cost::{Bound, Load, Phase, Rates};
use orkpack::plan::{
    Advice, Basis, Footprint, Holds, Note, Objective, Plan, PlanError, PlanRequest, Regime, Routing, Shares,
    Skew, choose, prefix_hits,
};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::{Dtype, MatrixView, Projection};
use orkpack::tile::{self, Scratch};
use orkpack::units::{Bytes, ExpertId, LayerId};

use crate::support::routed::{Rng, block, document, layers, lfm, shape, shares, statistics};
use crate::support::schema;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Rates in GB/s without any other cost; what both stream is shared as given.
fn rates(cpu: f64, npu: f64, cpu_shared: f64, npu_shared: f64) -> Rates {
    Rates {
        cpu_bytes: cpu * 1e9,
        npu_bytes: npu * 1e9,
        cpu_shared_bytes: cpu_shared * 1e9,
        npu_shared_bytes: npu_shared * 1e9,
        cpu_macs: 1e18,
        cpu_float_macs: 1e18,
        npu_macs: 1e18,
        submit: 0.0,
        program: 0.0,
        domain_switch: 0.0,
        quantize: 0.0,
        scale: 0.0,
        unpack: 0.0,
        serial: false,
    }
}

fn close(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found}, expected {expected}");
}

// ---------------------------------------------------------------------------------------------- the cost model

#[test]
fn two_streams_share_memory_until_the_first_ends() {
    struct Case {
        hot: f64,
        cold: f64,
        expected: f64,
    }
    // Bc = 24, Bn = 20, Bc' = 18, Bn' = 10 GB/s; hot and cold in GB.
    let rates = rates(24.0, 20.0, 18.0, 10.0);
    for case in [
        Case { hot: 0.0, cold: 0.24, expected: 0.01 },
        Case { hot: 0.2, cold: 0.0, expected: 0.01 },
        // The NPU ends after 0.1 / 10 = 10 ms; the CPU has 0.36 - 0.18 left, at 24.
        Case { hot: 0.1, cold: 0.36, expected: 0.01 + 0.18 / 24.0 },
        // The CPU ends after 0.18 / 18 = 10 ms; the NPU has 0.3 - 0.1 left, at 20.
        Case { hot: 0.3, cold: 0.18, expected: 0.01 + 0.2 / 20.0 },
        // Both end together.
        Case { hot: 0.1, cold: 0.18, expected: 0.01 },
    ] {
        let phase = Phase {
            npu: rates.npu(case.hot * 1e9, 0.0, 0.0),
            submits: 0.0,
            cpu: rates.cpu(case.cold * 1e9, 0.0),
        };
        close(rates.phase_seconds(&phase), case.expected, 1e-12, "seconds");
        let serial = Rates { serial: true, ..rates };
        let sum = case.hot / 20.0 + case.cold / 24.0;
        close(serial.phase_seconds(&phase), sum, 1e-12, "serial seconds");
    }
}

#[test]
fn a_submission_is_hidden_only_behind_cpu_work() {
    let rates = Rates { submit: 100e-6, ..rates(24.0, 20.0, 18.0, 10.0) };
    let phase = |npu: f64, cpu: f64| {
        let load = |seconds: f64, rate: f64| Load { seconds, bytes: seconds * rate };
        rates.phase_seconds(&Phase { npu: load(npu, 20e9), submits: 1.0, cpu: load(cpu, 24e9) })
    };
    close(phase(300e-6, 0.0), 400e-6, 1e-12, "nothing to hide behind");
    close(phase(300e-6, 60e-6), 400e-6, 1e-12, "the CPU ends before the NPU begins");
    // 100 µs alone, then both: the CPU's 60 µs take 80, in which the NPU does 40 of its 300.
    close(phase(300e-6, 160e-6), 100e-6 + 80e-6 + 260e-6, 1e-12, "the CPU ends first");
    // 100 µs alone, then the NPU's 30 take 60, in which the CPU does 45.
    close(phase(30e-6, 500e-6), 100e-6 + 60e-6 + 355e-6, 1e-12, "all hidden");
}

/// Step by step in time: each side streams at its alone or shared rate.
fn simulated(rates: &Rates, hot: f64, cold: f64) -> f64 {
    let (mut hot, mut cold, mut time) = (hot, cold, 0.0);
    let step = 1e-7;
    while hot > 0.0 || cold > 0.0 {
        let both = hot > 0.0 && cold > 0.0;
        hot -= step * if both { rates.npu_shared_bytes } else { rates.npu_bytes };
        cold -= step * if both { rates.cpu_shared_bytes } else { rates.cpu_bytes };
        time += step;
    }
    time
}

#[test]
fn the_closed_form_is_what_a_simulation_gives() {
    let mut rng = Rng::new(5);
    for _ in 0..60 {
        let (cpu, npu) = (10.0 + 20.0 * rng.unit(), 10.0 + 20.0 * rng.unit());
        let (cpu_shared, npu_shared) = (cpu * (0.4 + 0.6 * rng.unit()), npu * (0.4 + 0.6 * rng.unit()));
        let rates = rates(cpu, npu, cpu_shared, npu_shared);
        let (hot, cold) = (rng.unit() * 40e6, rng.unit() * 40e6);
        let phase = Phase { npu: rates.npu(hot, 0.0, 0.0), submits: 0.0, cpu: rates.cpu(cold, 0.0) };
        close(rates.phase_seconds(&phase), simulated(&rates, hot, cold), 3e-7, "seconds");
    }
}

#[test]
fn the_npu_is_flat_in_rows_until_it_computes_and_the_cpu_is_not() {
    let rates = Rates::of(&rk3588(), Bound::Likely);
    let weights = 2048.0 * 1792.0;
    let npu = |rows: f64| rates.npu(weights, weights * rows, 0.0).seconds;
    let cpu = |rows: f64| rates.cpu(weights * 0.5625, weights * rows).seconds;
    assert_eq!(npu(1.0), npu(20.0));
    close(npu(64.0), weights * 64.0 / 600e9, 1e-9, "computing");
    close(cpu(1.0), weights * 0.5625 / 24e9, 1e-9, "streaming");
    close(cpu(8.0), weights * 8.0 / 51.5e9, 1e-9, "computing");
    // Compute-bound sides leave memory to each other: nothing is slowed down.
    let phase = Phase {
        npu: rates.npu(weights, weights * 64.0, 0.0),
        submits: 0.0,
        cpu: rates.cpu(weights * 0.5625, weights * 8.0),
    };
    close(rates.phase_seconds(&phase), phase.cpu.seconds.max(phase.npu.seconds), 1e-12, "no contention");
}

// ---------------------------------------------------------------------------------------------- hits

fn choose_n(n: usize, k: usize) -> f64 {
    (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product()
}

#[test]
fn even_routing_gives_the_hypergeometric_distribution() {
    for (n, k) in [(8, 2), (32, 4), (256, 8), (5, 5), (3, 1)] {
        let hits = prefix_hits(&vec![k as f64 / n as f64; n], k);
        for (j, hits) in hits.iter().enumerate() {
            for (h, &p) in hits.iter().enumerate() {
                let possible = h <= j && k - h <= n - j;
                let expected =
                    if possible { choose_n(j, h) * choose_n(n - j, k - h) / choose_n(n, k) } else { 0.0 };
                close(p, expected, 1e-9, &format!("{n} experts, {k} used, {j} hot, {h} hits"));
            }
        }
    }
}

/// Every set of `k` experts, weighted by the product of its odds; odds of the hot ones scaled to the mean.
fn enumerated(inclusion: &[f64], k: usize, hot: usize) -> Vec<f64> {
    let odds: Vec<f64> = inclusion.iter().map(|p| p / (1.0 - p)).collect();
    let mean: f64 = inclusion[..hot].iter().sum();
    let distribution = |theta: f64| {
        let mut dist = vec![0.0; k + 1];
        for set in 0u32..1 << inclusion.len() {
            if set.count_ones() as usize == k {
                let members = (0..inclusion.len()).filter(|e| set >> e & 1 == 1);
                let weight: f64 = members.map(|e| odds[e] * if e < hot { theta } else { 1.0 }).product();
                dist[(set & ((1 << hot) - 1)).count_ones() as usize] += weight;
            }
        }
        let sum: f64 = dist.iter().sum();
        dist.iter().map(|d| d / sum).collect::<Vec<f64>>()
    };
    let mean_of = |dist: &[f64]| dist.iter().enumerate().map(|(h, p)| h as f64 * p).sum::<f64>();
    let (mut low, mut high) = (1e-6f64, 1e6f64);
    for _ in 0..200 {
        let middle = (low * high).sqrt();
        if mean_of(&distribution(middle)) < mean { low = middle } else { high = middle }
    }
    distribution(low)
}

#[test]
fn skewed_hits_are_those_of_enumerating_every_choice() {
    let mut rng = Rng::new(11);
    for k in 1..=4 {
        let raw: Vec<f64> = (0..9).map(|_| 0.1 + rng.unit()).collect();
        let sum: f64 = raw.iter().sum();
        let inclusion: Vec<f64> = raw.iter().map(|r| (r / sum * k as f64).min(0.95)).collect();
        let sum: f64 = inclusion.iter().sum();
        let inclusion: Vec<f64> = inclusion.iter().map(|p| p * k as f64 / sum).collect();
        let hits = prefix_hits(&inclusion, k);
        for (hot, hits) in hits.iter().enumerate().skip(1).take(8) {
            for (h, expected) in enumerated(&inclusion, k, hot).into_iter().enumerate() {
                close(hits[h], expected, 1e-7, &format!("{k} used, {hot} hot, {h} hits"));
            }
        }
    }
}

#[test]
fn hits_always_add_up_and_have_the_counted_mean() {
    let mut rng = Rng::new(3);
    for (n, k) in [(4, 4), (16, 1), (64, 8), (1024, 32), (300, 299)] {
        let raw: Vec<f64> = (0..n).map(|_| rng.unit().powi(6) + 1e-9).collect();
        // As the planner does: certain experts first, the rest in proportion.
        let mut inclusion = raw.clone();
        for _ in 0..n {
            let full = inclusion.iter().filter(|&&p| p >= 1.0).count();
            let rest: f64 = inclusion.iter().filter(|&&p| p < 1.0).sum();
            let scale = if rest > 0.0 { (k - full) as f64 / rest } else { 1.0 };
            inclusion.iter_mut().filter(|p| **p < 1.0).for_each(|p| *p = (*p * scale).min(1.0));
        }
        let mut mean = 0.0;
        for (j, hits) in prefix_hits(&inclusion, k).iter().enumerate() {
            let found: f64 = hits.iter().enumerate().map(|(h, p)| h as f64 * p).sum();
            close(hits.iter().sum(), 1.0, 1e-9, "sum");
            close(found, mean, 1e-6, &format!("{n} experts, {k} used: mean with {j} hot"));
            mean += inclusion.get(j).copied().unwrap_or(0.0);
        }
    }
}

// ---------------------------------------------------------------------------------------------- known arithmetic

/// Best gain of pinning whole experts of LFM2.5-8B-A1B at one token, even routing: `seconds(hot, cold)` of a layer's
/// phase, bytes on both sides.
fn best_gain(cpu: f64, seconds: &dyn Fn(f64, f64) -> f64) -> f64 {
    const REST: f64 = 0.371e9;
    // Bytes of one expert in Q4_K and in int8: 0.587 and 0.969 GB for 22 layers of 4.
    const E4: f64 = 0.587e9 / 88.0;
    const E8: f64 = 0.969e9 / 88.0;
    let cold = REST / (cpu * 1e9) + 88.0 * E4 / (cpu * 1e9);
    let time = |hits: &Vec<f64>| {
        let layer = |(h, p): (usize, &f64)| {
            let phase = |part: f64| seconds(h as f64 * E8 * part, (4 - h) as f64 * E4 * part);
            p * (phase(2.0 / 3.0) + phase(1.0 / 3.0))
        };
        REST / (cpu * 1e9) + 22.0 * hits.iter().enumerate().map(layer).sum::<f64>()
    };
    prefix_hits(&[4.0 / 32.0; 32], 4).iter().map(|hits| cold / time(hits)).fold(0.0, f64::max)
}

#[test]
fn decode_gains_are_those_of_the_known_arithmetic() {
    struct Case {
        cpu: f64,
        npu: f64,
        both: f64,
        /// Both sides always end together: the best that any sharing could give.
        bound: f64,
        /// The best fixed sharing of the bandwidth.
        best: f64,
        /// Shared in proportion, as planned with.
        planned: f64,
    }
    for case in [
        Case { cpu: 24.0, npu: 24.0, both: 28.0, bound: 1.00, best: 1.00, planned: 1.00 },
        Case { cpu: 24.0, npu: 24.0, both: 30.0, bound: 1.013, best: 1.009, planned: 1.00 },
        Case { cpu: 24.0, npu: 28.0, both: 33.0, bound: 1.047, best: 1.037, planned: 1.011 },
        Case { cpu: 18.0, npu: 24.0, both: 28.0, bound: 1.102, best: 1.085, planned: 1.047 },
    ] {
        let Case { cpu, npu, both, .. } = case;
        let name = format!("{cpu} / {npu} / {both} GB/s");
        let bound = best_gain(cpu, &|hot, cold| {
            let (hot, cold) = (hot / 1e9, cold / 1e9);
            (cold / cpu).max(hot / npu).max((hot + cold) / both)
        });
        close(bound, case.bound, 2e-3, &name);
        let shared = |npu_shared: f64| {
            let rates = rates(cpu, npu, both - npu_shared, npu_shared);
            best_gain(cpu, &|hot, cold| {
                let phase = Phase { npu: rates.npu(hot, 0.0, 0.0), submits: 0.0, cpu: rates.cpu(cold, 0.0) };
                rates.phase_seconds(&phase)
            })
        };
        let splits = (1..200).map(|i| both * f64::from(i) / 200.0);
        let best = splits.filter(|&x| x <= npu && both - x <= cpu).map(shared).fold(0.0, f64::max);
        close(best, case.best, 2e-3, &name);
        close(shared(both * npu / (cpu + npu)), case.planned, 2e-3, &name);
        // One side waiting for the other never wins: int8 is 1.65 times the bytes.
        let serial = Rates { serial: true, ..rates(cpu, npu, cpu, npu) };
        let serial = best_gain(cpu, &|hot, cold| {
            serial.phase_seconds(&Phase {
                npu: serial.npu(hot, 0.0, 0.0),
                submits: 0.0,
                cpu: serial.cpu(cold, 0.0),
            })
        });
        close(serial, 1.0, 1e-9, &name);
    }
}

#[test]
fn lfm_decodes_on_the_cpu_and_reads_prompts_on_the_npu() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 2048, 2.2, 1);
    let plan = choose(&PlanRequest::new(&shape, Routing::Measured(&statistics), &profile)).unwrap();
    assert_eq!((plan.verdict.decode, plan.verdict.prefill), (Advice::CpuOnly, Advice::Npu));
    assert!(plan.verdict.sentence.starts_with("decode: CPU only, "), "{}", plan.verdict.sentence);
    let [decode, prefill] = &plan.forecasts[..] else { panic!("two regimes") };
    // docs/planning.md: 25.1 tokens/s at 24 GB/s (with half of down in Q6_K a little less), 36 in prefill.
    close(decode.cpu_only.value, 24.5, 1.0, "decode on the CPU");
    assert_eq!(decode.planned, decode.cpu_only);
    assert!(decode.all_resident.value < decode.cpu_only.value);
    close(prefill.cpu_only.value, 36.2, 1.0, "prefill on the CPU");
    assert!(prefill.gain.value > 1.5 && prefill.gain.value < 2.4, "{:?}", prefill.gain);
    assert!(prefill.all_resident.value > 2.2 * prefill.cpu_only.value);
    assert!(plan.forecasts.iter().all(|forecast| forecast.basis == Basis::Estimated));
    // Nothing is hot at one token, all that is resident at a prompt.
    assert!(plan.cuts[0].layers.iter().all(|&n| n == 0));
    assert!(plan.cuts[1].layers.iter().sum::<u32>() > 300);
    assert!(plan.cuts[1].from_tokens > 1 && plan.cuts[1].from_tokens <= 64);
    assert!(plan.hot(LayerId(2), 1).is_empty() && plan.hot(LayerId(2), 512).len() > 10);
    assert!(plan.hot(LayerId(0), 512).is_empty(), "a dense layer");
    assert!(plan.notes.iter().any(|note| matches!(note, Note::Padded { projection, factor, .. }
        if projection == "down" && (*factor - 2048.0 / 1792.0).abs() < 1e-6)));
}

#[test]
fn decode_uses_the_npu_where_bandwidth_is_left() {
    let (shape, mut profile) = (lfm(), rk3588());
    for (figure, value) in [
        (&mut profile.rates.cpu_bytes_per_s, 12e9),
        (&mut profile.rates.npu_bytes_per_s, 24e9),
        (&mut profile.rates.both_bytes_per_s, 33e9),
    ] {
        (figure.value, figure.low, figure.high) = (value, None, None);
    }
    let statistics = statistics(&shape, 2048, 2.2, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    (request.objective, request.shares) = (Objective::Decode, Shares::Experts);
    let plan = choose(&request).unwrap();
    assert_eq!(plan.verdict.decode, Advice::Npu);
    assert!(plan.forecasts[0].gain.value > 1.1, "{:?}", plan.forecasts[0].gain);
    // Rows of every expert balance the two sides in each call, not in most.
    let either = choose(&PlanRequest { shares: Shares::Auto, ..request.clone() }).unwrap();
    assert!(either.layers.iter().any(|layer| layer.is_by_rows()));
    assert!(either.forecasts[0].gain.value > plan.forecasts[0].gain.value);
    // A balance, not a fill: more would make each token slower.
    assert!(plan.footprint.weight_bytes < plan.budget_bytes);
    assert!(plan.forecasts[0].planned.value > plan.forecasts[0].all_resident.value);
    let hot: u32 = plan.cuts[0].layers.iter().sum();
    assert_eq!(hot, plan.layers.iter().map(|layer| layer.resident).sum::<u32>());
}

// ---------------------------------------------------------------------------------------------- placement

/// Everything that must hold of any plan, whatever it was made from.
fn assert_sound(plan: &Plan, shape: &ModelShape, profile: &DeviceProfile) {
    let page = 4096;
    let mut sums = vec![0u64; plan.n_domains as usize];
    let mut placed = Vec::new();
    for chunk in &plan.chunks {
        assert!(chunk.bytes <= profile.memory.chunk_bytes.value && chunk.bytes > 0);
        let mut end = 0;
        for part in &chunk.parts {
            assert_eq!(part.offset % page, 0);
            assert!(part.offset >= end, "parts overlap");
            end = part.offset + part.tiles.bytes();
            placed.push((part.matrix, part.part));
            let moe = shape.moe_layers.iter().find(|moe| moe.layer == part.matrix.layer).unwrap();
            let matrix = moe.experts[part.matrix.expert.index()][part.matrix.projection as usize];
            let layer = plan.layers.iter().find(|l| l.layer == part.matrix.layer.0).unwrap();
            let n_rows = layer.matrices[part.matrix.projection as usize].n_rows();
            assert!(n_rows == matrix.n_out as u64 || layer.is_by_rows());
            let parts = tile::cut(matrix.n_in as u64, n_rows, profile).unwrap();
            assert_eq!(parts[part.part as usize], part.tiles);
            assert_eq!(layer.domain, chunk.domain);
        }
        assert_eq!(chunk.bytes, end.next_multiple_of(page));
        sums[chunk.domain as usize] += chunk.bytes;
    }
    let n_placed = placed.len();
    placed.sort();
    placed.dedup();
    assert_eq!(placed.len(), n_placed, "a part is placed twice");
    assert!(sums.iter().all(|&sum| sum <= plan.budget_bytes), "{sums:?} over {}", plan.budget_bytes);
    assert_eq!(plan.footprint.weight_bytes, sums.iter().sum::<u64>());
    let items = plan.layers.iter().flat_map(|layer| layer.ranking.iter().take(layer.resident as usize));
    assert_eq!(plan.footprint.weight_bytes, items.map(|item| item.bytes).sum::<u64>());
    for (domain, footprint) in plan.footprint.domains.iter().enumerate() {
        let mine = plan.chunks.iter().filter(|chunk| chunk.domain as usize == domain);
        let parts: Vec<_> = mine.flat_map(|chunk| chunk.parts.iter().map(|part| part.tiles)).collect();
        assert_eq!(footprint.scratch_bytes, Scratch::for_parts(&parts, profile).total());
        assert_eq!(footprint.weight_bytes, sums[domain]);
    }
    let domains: Vec<u32> = plan.layers.iter().map(|layer| layer.domain).collect();
    assert!(domains.is_sorted(), "a domain holds consecutive layers: {domains:?}");
    for layer in &plan.layers {
        assert_eq!(layer.ranking.len(), layer.n_expert as usize);
    }
    plan.check(shape, profile).unwrap();
}

#[test]
fn case_h8_a_thousand_budgets_are_never_exceeded() {
    let profile = rk3588();
    let mut rng = Rng::new(2024);
    for round in 0..1000 {
        let n_expert = 1 + rng.below(20) as usize;
        let n_used = 1 + rng.below(n_expert.min(6) as u64) as usize;
        let sizes = [64, 96, 256, 512, 768, 896, 1408, 2048, 5000];
        let size = |rng: &mut Rng| sizes[rng.below(sizes.len() as u64) as usize];
        let (n_embd, n_ff) = (size(&mut rng), size(&mut rng));
        let types = [Dtype::Q4_0, Dtype::Q8_0, Dtype::F32];
        let mut shape = shape(1 + rng.below(4) as usize, n_expert, n_used, n_embd, n_ff, types[round % 3]);
        // Block numbers need not begin with 0 nor follow each other.
        let step = 1 + rng.below(3) as u32;
        for (i, moe) in shape.moe_layers.iter_mut().enumerate() {
            moe.layer = LayerId(step * i as u32 + step - 1);
        }
        let statistics = statistics(&shape, 64, 3.0 * rng.unit(), round as u64);
        let skew = Skew { low: 0.0, value: 1.0, high: 2.0 };
        let routing = if round % 4 == 0 { Routing::Assumed(skew) } else { Routing::Measured(&statistics) };
        let mut request = PlanRequest::new(&shape, routing, &profile);
        let bits = 10 + rng.below(18);
        request.budget = Some(Bytes(rng.below(1 << bits)));
        request.domains = 1 + rng.below(3) as u32;
        let objectives = [Objective::Auto, Objective::Decode, Objective::Prefill, Objective::Hits];
        request.objective = objectives[rng.below(4) as usize];
        let plan = choose(&request).unwrap();
        assert_sound(&plan, &shape, &profile);
        assert_mapped(&plan, &profile);
        if request.objective == Objective::Hits {
            // Nothing that fits is left out.
            let left = plan.budget_bytes - plan.footprint.domains[0].weight_bytes;
            let first = plan.layers.iter().filter(|layer| layer.domain == 0);
            let pair = |layer: &&orkpack::plan::LayerPlan| {
                layer.matrices[..2].iter().map(|m| m.tile_bytes.next_multiple_of(4096)).sum::<u64>()
            };
            assert!(first.filter(|l| l.resident < l.n_expert).all(|layer| pair(&layer) > left));
        }
    }
}

/// Maps what a plan says on the software NPU, and holds the device's account to the plan's: weights and scratch.
#[track_caller]
fn assert_mapped(plan: &Plan, profile: &DeviceProfile) {
    let mut npu = Npu::new(Sim::new(profile), profile);
    let mut parts = Vec::new();
    for chunk in &plan.chunks {
        npu.create_chunk(chunk.bytes, chunk.domain).unwrap();
        parts.extend(chunk.parts.iter().map(|placed| (chunk.domain, placed.tiles)));
    }
    npu.prepare(&parts).unwrap();
    let account = npu.account();
    let mapped = (account.weight_bytes, account.scratch_bytes, account.chunks);
    let Footprint { weight_bytes, scratch_bytes, n_chunks, .. } = plan.footprint;
    assert_eq!(mapped, (weight_bytes, scratch_bytes, n_chunks));
    for (number, planned) in (0..).zip(&plan.footprint.domains) {
        let held = account.domains.iter().find(|held| held.domain == number);
        let held = held.map_or((0, 0), |held| (held.weight_bytes, held.scratch_bytes));
        assert_eq!(held, (planned.weight_bytes, planned.scratch_bytes), "domain {number}");
        assert!(held.0 <= plan.budget_bytes);
    }
}

/// Without work on the CPU a phase is one submission: the planner's price is the software NPU's clock.
#[test]
fn the_software_npus_clock_is_the_planners() {
    let profile = rk3588();
    let rates = Rates::of(&profile, Bound::Likely);
    for (n_matrices, n_in, n_out, m) in
        [(4, 512, 512, 1), (6, 256, 256, 3), (16, 1024, 96, 1), (3, 512, 64, 40)]
    {
        let parts = tile::cut(n_in, n_out, &profile).unwrap();
        let [part] = parts[..] else { panic!("one program each") };
        let mut npu = Npu::new(Sim::new(&profile), &profile);
        let chunk = npu.create_chunk(part.bytes() * n_matrices, 0).unwrap();
        npu.fill_chunk(chunk, &mut |_| Ok(())).unwrap();
        npu.prepare(&[(0, part)]).unwrap();
        let matrix = |i| DeviceMatrix {
            n_in: n_in as u32,
            n_out: n_out as u32,
            parts: vec![PlacedPart { part, chunk, offset: i * part.bytes() }],
        };
        let matrices: Vec<DeviceMatrix> = (0..n_matrices).map(matrix).collect();
        let codes = vec![1i8; m * n_in as usize];
        let rows = MatrixView::new(&codes, m, n_in as usize).unwrap();
        let mut sums = vec![0; m * n_out as usize * n_matrices as usize];
        let outs = sums.chunks_exact_mut(m * n_out as usize);
        let mut jobs: Vec<Job<'_>> =
            matrices.iter().zip(outs).map(|(matrix, out)| Job { matrix, rows, out }).collect();
        npu.run(&mut jobs).unwrap();
        let account = npu.account();
        assert_eq!((account.submissions, account.programs), (1, n_matrices));
        let bytes = part.bytes() as f64;
        let load = rates.npu(bytes, bytes * m as f64, 1.0).times(n_matrices as f64);
        let seconds = rates.phase_seconds(&Phase { npu: load, submits: 1.0, cpu: Load::default() });
        let clock = account.modelled_us * 1e-6;
        assert!((seconds / clock - 1.0).abs() < 1e-9, "{n_in} {n_out} {m}: {seconds} {clock}");
    }
}

#[test]
fn equal_requests_give_equal_bytes() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 1024, 2.2, 9);
    let json = || {
        let request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        choose(&request).unwrap().to_json().unwrap()
    };
    assert_eq!(json(), json());
}

#[test]
fn a_larger_budget_never_predicts_slower() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 2048, 3.0, 4);
    let (mut last, mut hits) = (0.0, 0.0);
    for mib in [0, 7, 11, 18, 64, 100, 300, 301, 750, 1200, 2000, 3000, 3584, 3700] {
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        request.budget = Some(Bytes(mib * MIB));
        let planned = choose(&request).unwrap().forecasts[1].planned.value;
        assert!(planned >= last, "{mib} MiB: {planned} after {last}");
        last = planned;
        request.objective = Objective::Hits;
        let plan = choose(&request).unwrap();
        let served = plan.hit_rates.overall.calibration.value;
        assert!(served >= hits, "{mib} MiB: {served} after {hits}");
        hits = served;
    }
    assert!(last > 50.0, "{last}");
}

#[test]
fn case_h8_a_small_budget_holds_something_and_none_holds_nothing() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 512, 2.2, 9);
    for (budget, objective, resident) in [
        (0, Objective::Auto, 0),
        (0, Objective::Hits, 0),
        (4096, Objective::Hits, 0),
        (4 * MIB - 1, Objective::Hits, 0),
        // One down, of 2048 times 2048 with its padding.
        (7 * MIB - 1, Objective::Hits, 1),
        (7 * MIB, Objective::Hits, 1),
        (11 * MIB, Objective::Hits, 1),
        (18 * MIB, Objective::Hits, 2),
    ] {
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        (request.budget, request.objective) = (Some(Bytes(budget)), objective);
        let plan = choose(&request).unwrap();
        let found: u32 = plan.layers.iter().map(|layer| layer.resident).sum();
        assert_eq!(found, resident, "{budget} bytes");
        assert_eq!(plan.is_cold(), resident == 0);
        assert_sound(&plan, &shape, &profile);
    }
}

#[test]
fn case_h1_a_budget_over_the_window_is_refused_and_the_window_itself_is_not() {
    let (shape, profile) = (lfm(), rk3588());
    let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    request.objective = Objective::Hits;
    request.budget = Some(profile.window());
    let plan = choose(&request).unwrap();
    assert!(plan.footprint.headroom_bytes < 11 * MIB);
    request.budget = Some(Bytes(profile.window().0 + 1));
    let error = choose(&request).unwrap_err();
    assert!(matches!(error, PlanError::OverWindow { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "a budget of 3.68 GiB (3955228673 bytes) is over the usable window of one domain, 3.68 GiB (3955228672 \
         bytes); lower --budget or use --domains"
    );
    request.budget = None;
    assert_eq!(choose(&request).unwrap().budget_bytes, 7 * GIB / 2);
}

#[test]
fn case_h2_no_chunk_is_longer_than_the_profile_allows() {
    // Mixtral: a gate of 58 MB is four programs in four chunks.
    let shape = shape(2, 8, 2, 4096, 14_336, Dtype::Q4_K);
    let mut profile = rk3588();
    let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    (request.objective, request.budget) = (Objective::Hits, Some(Bytes(GIB)));
    let plan = choose(&request).unwrap();
    assert_sound(&plan, &shape, &profile);
    assert!(plan.chunks.iter().all(|chunk| chunk.bytes <= 16 * MIB));
    assert!(plan.layers[0].matrices.iter().all(|matrix| matrix.programs == 4));
    // Too many buffers for a domain are an error before the driver is asked.
    profile.memory.chunk_bytes.value = MIB;
    profile.memory.mappings_per_domain.value = 100;
    let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    (request.objective, request.budget) = (Objective::Hits, Some(Bytes(GIB)));
    assert!(matches!(choose(&request), Err(PlanError::Mappings { most: 100, .. })));
}

#[test]
fn case_h4_domains_hold_whole_consecutive_layers() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 1024, 2.2, 9);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    (request.domains, request.objective) = (3, Objective::Hits);
    let plan = choose(&request).unwrap();
    assert_sound(&plan, &shape, &profile);
    // All of LFM, 7.6 GiB in int8, in three domains.
    assert!(plan.layers.iter().all(|layer| layer.resident == 32));
    assert_eq!(plan.footprint.domains.len(), 3);
    assert!(plan.footprint.domains.iter().all(|domain| domain.weight_bytes > 2 * GIB));
    for domains in [0, 9] {
        request.domains = domains;
        assert!(matches!(choose(&request), Err(PlanError::Domains { available: 8, .. })));
    }
}

#[test]
fn hits_fills_the_window_with_the_most_called_experts() {
    let (shape, profile) = (shape(3, 16, 2, 512, 512, Dtype::Q8_0), rk3588());
    let statistics = statistics(&shape, 2048, 3.0, 5);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    (request.objective, request.budget) = (Objective::Hits, Some(Bytes(20 * 3 * 512 * 512)));
    let plan = choose(&request).unwrap();
    assert_sound(&plan, &shape, &profile);
    let mut calls: Vec<u64> =
        statistics.calibration.layers.iter().flat_map(|layer| layer.calls.clone()).collect();
    calls.sort_by(|a, b| b.cmp(a));
    let best: u64 = calls[..20].iter().sum();
    let all: u64 = calls.iter().sum();
    close(plan.hit_rates.overall.calibration.value, best as f64 / all as f64, 1e-6, "hit rate");
    assert_eq!(plan.footprint.weight_bytes, plan.budget_bytes);
    assert_eq!(plan.verdict.decode, Advice::AsAsked);
    assert_eq!(plan.cuts[0].layers, plan.cuts[1].layers);
    close(plan.hit_rates.overall.uniform, 20.0 / 48.0, 1e-6, "uniform");
    // Chunks are in rank order: the first parts are the most called expert's.
    let first = plan.chunks[0].parts[0].matrix;
    let top = statistics.calibration.layer(first.layer).unwrap().calls[first.expert.index()];
    assert_eq!(top, calls[0]);
}

#[test]
fn forced_experts_are_hot_in_both_regimes_whatever_they_cost() {
    let (shape, profile) = (lfm(), rk3588());
    let statistics = statistics(&shape, 1024, 2.2, 9);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.force_hot =
        vec![(LayerId(5), ExpertId(31)), (LayerId(5), ExpertId(0)), (LayerId(23), ExpertId(7))];
    for objective in [Objective::Auto, Objective::Decode, Objective::Prefill, Objective::Hits] {
        request.objective = objective;
        let plan = choose(&request).unwrap();
        assert_sound(&plan, &shape, &profile);
        for tokens in [1, 512] {
            let hot = |layer| -> Vec<(u32, Holds)> {
                plan.hot(LayerId(layer), tokens).iter().map(|i| (i.expert, i.holds)).collect()
            };
            assert!(hot(5).starts_with(&[(31, Holds::Whole), (0, Holds::Whole)]), "{objective:?}");
            assert!(hot(23).starts_with(&[(7, Holds::Whole)]), "{objective:?}");
        }
        assert_eq!(plan.chunks[0].parts[0].matrix.layer, LayerId(5));
    }
    for (forced, text) in [
        ((0, 0), "--force-hot 0:0: this layer has no experts"),
        ((5, 32), "--force-hot 5:32: the layer has no such expert"),
    ] {
        request.force_hot = vec![(LayerId(forced.0), ExpertId(forced.1))];
        assert_eq!(choose(&request).unwrap_err().to_string(), text);
    }
    request.force_hot = (0..3).map(|e| (LayerId(5), ExpertId(e))).collect();
    request.budget = Some(Bytes(30 * MIB));
    let error = choose(&request).unwrap_err();
    assert!(matches!(error, PlanError::ForceHotOverBudget { .. }), "{error}");
}

#[test]
fn a_model_that_fits_becomes_resident_as_far_as_it_pays() {
    // Granite 3.0 1B: 1.13 GiB of int8 experts.
    let (shape, profile) = (shape(24, 32, 8, 1024, 512, Dtype::Q4_0), rk3588());
    let statistics = statistics(&shape, 1024, 1.0, 9);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.objective = Objective::Hits;
    let plan = choose(&request).unwrap();
    assert!(plan.layers.iter().all(|layer| layer.resident == 32));
    let whole = |plan: &Plan| plan.layers.iter().all(|l| l.ranking.iter().all(|i| i.holds == Holds::Whole));
    assert!(whole(&plan));
    close(plan.hit_rates.down.calibration.value, 1.0, 1e-9, "everything is served");
    close(plan.hit_rates.down.lift, 1.0, 1e-6, "no better than chance");
    assert_eq!(plan.forecasts[1].planned, plan.forecasts[1].all_resident);
    request.objective = Objective::Prefill;
    let prefill = choose(&request).unwrap();
    assert!(prefill.forecasts[1].planned.value >= plan.forecasts[1].planned.value);
    assert!(prefill.forecasts[1].gain.value > 1.5);
}

#[test]
fn layers_may_differ_and_projections_may_stay_on_the_cpu() {
    let mut mixed = shape(1, 8, 2, 512, 512, Dtype::Q8_0);
    mixed.moe_layers.push(MoeLayerShape {
        layer: LayerId(4),
        ..shape(1, 1024, 5, 256, 768, Dtype::Q4_0).moe_layers.remove(0)
    });
    let profile = rk3588();
    let plan_of = |shape: &ModelShape| {
        let mut request = PlanRequest::new(shape, Routing::Assumed(Skew::RANGE), &profile);
        request.objective = Objective::Hits;
        choose(&request)
    };
    let plan = plan_of(&mixed).unwrap();
    assert_sound(&plan, &mixed, &profile);
    assert_eq!(plan.layers[1].layer, 4);
    // 768 inputs are padded to 1024.
    assert_eq!(plan.layers[1].matrices[2].tile_bytes, 1024 * 256);
    // Wider than any program: 2^24 + 32 outputs.
    for expert in &mut mixed.moe_layers[0].experts {
        expert[2].n_out = (1 << 24) + 32;
    }
    let plan = plan_of(&mixed).unwrap();
    assert_sound(&plan, &mixed, &profile);
    assert!(plan.layers[0].resident > 0);
    assert!(plan.layers[0].ranking.iter().all(|item| item.holds == Holds::GateUp));
    assert!(
        plan.notes
            .iter()
            .any(|n| matches!(n, Note::StaysOnCpu { layer: 0, projection } if projection == "down"))
    );
    for expert in &mut mixed.moe_layers[0].experts {
        expert[0].n_out = (1 << 24) + 32;
    }
    let plan = plan_of(&mixed).unwrap();
    assert_eq!(plan.layers[0].resident, 0);
    // Experts of one layer must be alike, and have weights.
    mixed.moe_layers[1].experts[3][1].n_in += 1;
    let error = plan_of(&mixed).unwrap_err();
    assert_eq!(error.to_string(), "layer 4: expert 3 has other shapes than expert 0");
    mixed.moe_layers.truncate(1);
    mixed.moe_layers[0].experts.iter_mut().for_each(|expert| expert[1].n_out = 0);
    let error = plan_of(&mixed).unwrap_err();
    assert_eq!(error.to_string(), "layer 0: a matrix of 512 inputs and 0 outputs has no weights");
    mixed.moe_layers.clear();
    let error = plan_of(&mixed).unwrap_err();
    assert!(matches!(error, PlanError::NoExperts(_)), "{error}");
}

#[test]
fn a_plan_of_thirty_thousand_matrices_is_sound() {
    let (shape, profile) = (shape(40, 256, 8, 2048, 512, Dtype::Q4_K), rk3588());
    let statistics = statistics(&shape, 1024, 2.2, 7);
    let request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    assert_sound(&choose(&request).unwrap(), &shape, &profile);
}

// ---------------------------------------------------------------------------------------------- what is known of the routing

#[test]
fn an_assumed_routing_is_marked_and_has_a_range() {
    let (shape, profile) = (lfm(), rk3588());
    let plan = choose(&PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile)).unwrap();
    assert_eq!(plan.statistics, None);
    assert!(plan.notes.contains(&Note::AssumedRouting));
    assert!(Note::AssumedRouting.to_string().contains("orkpack calibrate"));
    assert_eq!(plan.hit_rates.basis, Basis::Estimated);
    let overall = &plan.hit_rates.overall;
    assert!(overall.held_out.is_none());
    close(overall.calibration.low, overall.uniform, 1e-6, "the least skew is none");
    assert!(overall.calibration.high > overall.calibration.value);
    assert!(overall.calibration.value > overall.calibration.low);
    assert_eq!(plan.verdict.decode, Advice::CpuOnly);
}

#[test]
fn case_d1_experts_never_hit_rank_last_and_are_listed() {
    let (shape, profile) = (shape(2, 8, 2, 512, 512, Dtype::Q8_0), rk3588());
    let silent = |_: usize, _: &MoeLayerShape| vec![0.0, 3.0, 0.0, 2.0, 1.0, 1.0, 0.0, 1.0];
    let calibration = block(&shape, 400, &mut Rng::new(1), &silent);
    let statistics = document(&shape, calibration, None);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.objective = Objective::Hits;
    let plan = choose(&request).unwrap();
    for layer in &plan.layers {
        let last: Vec<u32> = layer.ranking[5..].iter().map(|item| item.expert).collect();
        assert_eq!(last, [0, 2, 6]);
        assert!(layer.ranking.iter().all(|item| item.share > 0.0 && item.share.is_finite()));
    }
    let note = plan.notes.iter().find(|note| matches!(note, Note::NeverSeen { .. })).unwrap();
    assert_eq!(
        note,
        &Note::NeverSeen { experts: vec![(0, 0), (0, 2), (0, 6), (1, 0), (1, 2), (1, 6)], of: 16 }
    );
    assert_eq!(
        note.to_string(),
        "6 of 16 experts (37.5 %) were never seen and rank last; calibrate with more text"
    );
    assert!(plan.notes.contains(&Note::NoHeldOut));
}

#[test]
fn case_d4_a_single_hit_changes_no_plan() {
    let (shape, profile) = (shape(1, 8, 2, 512, 512, Dtype::Q8_0), rk3588());
    let plan = |rare: bool| {
        // One expert with a single hit in 20,000 tokens, or with none.
        let of = |_: usize, _: &MoeLayerShape| vec![5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 0.5, 0.0];
        let mut calibration = block(&shape, 20_000, &mut Rng::new(8), &of);
        if rare {
            calibration.layers[0].calls[7] += 1;
            calibration.layers[0].calls[6] -= 1;
        }
        // Rows per expert are left out: the calls alone are changed.
        calibration.layers[0].rows.clear();
        let statistics = document(&shape, calibration, None);
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        request.budget = Some(Bytes(5 * MIB));
        choose(&request).unwrap()
    };
    let (with, without) = (plan(true), plan(false));
    let ranks = |plan: &Plan| plan.layers[0].ranking.iter().map(|item| item.expert).collect::<Vec<_>>();
    assert_eq!(ranks(&with), ranks(&without));
    assert_eq!(
        with.cuts.iter().map(|c| &c.layers).collect::<Vec<_>>(),
        without.cuts.iter().map(|c| &c.layers).collect::<Vec<_>>()
    );
    assert_eq!(with.chunks, without.chunks);
}

#[test]
fn case_d7_too_little_text_is_said_in_numbers() {
    let (shape, profile) = (shape(2, 64, 2, 512, 512, Dtype::Q8_0), rk3588());
    let plan = |tokens: usize| {
        let statistics = statistics(&shape, tokens, 4.0, 3);
        let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
        (request.objective, request.budget) = (Objective::Hits, Some(Bytes(16 * MIB)));
        choose(&request).unwrap()
    };
    let (short, long) = (plan(60), plan(6000));
    assert_eq!(short.notes[0].to_string(), "too few tokens: 60 read, 640 wanted for 20 calls of each expert");
    assert!(!long.notes.iter().any(|note| matches!(note, Note::TooFewTokens { .. })));
    let unseen = |plan: &Plan| {
        plan.notes
            .iter()
            .map(|n| if let Note::NeverSeen { experts, .. } = n { experts.len() } else { 0 })
            .sum::<usize>()
    };
    assert!(unseen(&short) > 10 && unseen(&long) < 5, "{} {}", unseen(&short), unseen(&long));
    // The interval of the hit rate narrows with the root of the text.
    let width = |plan: &Plan| {
        let held_out = plan.hit_rates.overall.held_out.unwrap();
        assert!(held_out.low <= held_out.value && held_out.value <= held_out.high);
        held_out.high - held_out.low
    };
    assert!(width(&short) > 5.0 * width(&long), "{} {}", width(&short), width(&long));
}

#[test]
fn case_d8_flat_skewed_and_drifting_text_are_told_apart() {
    let (shape, profile) = (shape(4, 32, 4, 512, 512, Dtype::Q4_0), rk3588());
    let plan = |statistics: &Statistics| {
        let mut request = PlanRequest::new(&shape, Routing::Measured(statistics), &profile);
        (request.objective, request.budget) = (Objective::Hits, Some(Bytes(24 * MIB)));
        choose(&request).unwrap()
    };
    let no_skew = |plan: &Plan| plan.notes.iter().any(|note| matches!(note, Note::NoSkew { .. }));
    let drift = |plan: &Plan| plan.notes.iter().any(|note| matches!(note, Note::Drift { .. }));
    let flat = plan(&statistics(&shape, 5000, 0.0, 1));
    assert!(no_skew(&flat) && !drift(&flat));
    close(flat.hit_rates.overall.lift, 1.0, 0.06, "lift of flat routing");
    let skewed = plan(&statistics(&shape, 5000, 4.0, 1));
    assert!(!no_skew(&skewed) && !drift(&skewed));
    assert!(skewed.hit_rates.overall.lift > 2.0, "{:?}", skewed.hit_rates.overall);
    let turned = |turn: usize| move |_: usize, layer: &MoeLayerShape| shares(layer.n_expert(), 4.0, turn);
    let mut rng = Rng::new(4);
    let calibration = block(&shape, 5000, &mut rng, &turned(0));
    let held_out = block(&shape, 1000, &mut rng, &turned(16));
    let drifting = plan(&document(&shape, calibration, Some(held_out)));
    assert!(drift(&drifting), "{:?}", drifting.hit_rates.overall);
}

#[test]
fn case_c11_all_experts_used_leaves_no_skew() {
    let (shape, profile) = (shape(2, 4, 4, 512, 512, Dtype::Q8_0), rk3588());
    let statistics = statistics(&shape, 600, 3.0, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    request.objective = Objective::Hits;
    let plan = choose(&request).unwrap();
    let note = plan.notes.iter().find(|note| matches!(note, Note::NoSkew { .. })).unwrap();
    assert!(note.to_string().starts_with("no skew to exploit"));
    assert!(plan.forecasts.iter().all(|f| f.planned.value.is_finite() && f.planned.value > 0.0));
    let mut impossible = shape.clone();
    impossible.moe_layers[1].n_used = 5;
    let error = choose(&PlanRequest::new(&impossible, Routing::Assumed(Skew::RANGE), &profile)).unwrap_err();
    assert_eq!(error.to_string(), "layer 1: 5 of 4 experts used");
}

#[test]
fn case_d10_statistics_of_another_shape_are_refused() {
    let profile = rk3588();
    let statistics = statistics(&shape(2, 64, 4, 512, 512, Dtype::Q8_0), 100, 1.0, 1);
    let other = shape(2, 128, 4, 512, 512, Dtype::Q8_0);
    let error = choose(&PlanRequest::new(&other, Routing::Measured(&statistics), &profile)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "routing statistics are of another model: layer 0 has 64 experts and uses 4, not 128 and 4; \
         calibrate this model, or name its own statistics"
    );
}

#[test]
fn rows_per_batch_are_used_where_they_were_counted() {
    // All rows of a text go to expert 0 and 1 for long runs: batches are lumpy, though calls are even.
    let (shape, profile) = (shape(1, 8, 1, 2048, 2048, Dtype::Q4_K), rk3588());
    let lumpy = {
        let mut block = Block::empty(&layers(&shape));
        for window in 0..16u32 {
            let routing = orkpack::executor::Routing {
                n_used: 1,
                experts: vec![ExpertId(window % 8); 512],
                weights: vec![1.0; 512],
            };
            block.record(LayerId(0), &routing).unwrap();
            block.end_window(512);
        }
        document(&shape, block, None)
    };
    let even = statistics(&shape, 8192, 0.0, 3);
    let cpu = |statistics: &Statistics| {
        choose(&PlanRequest::new(&shape, Routing::Measured(statistics), &profile)).unwrap()
    };
    let (lumpy, even) = (cpu(&lumpy), cpu(&even));
    // Computing is the same, so the CPU's time is; the NPU reads one expert per batch instead of eight.
    close(lumpy.forecasts[1].cpu_only.value, even.forecasts[1].cpu_only.value, 3.0, "on the CPU");
    assert!(lumpy.forecasts[1].all_resident.value > even.forecasts[1].all_resident.value);
}

#[test]
fn the_memory_account_adds_up_and_warns() {
    let (shape, profile) = (ModelShape { state_bytes: 12_288, ..lfm() }, rk3588());
    let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    let plan = choose(&request).unwrap();
    let account = &plan.memory;
    let cached = account.kv_bytes + account.state_bytes;
    let sum = account.source_bytes + account.npu_bytes + account.scratch_bytes + cached;
    assert_eq!(account.state_bytes, 12_288);
    // Plans that were written before it was counted can still be read.
    let json = String::from_utf8(plan.to_json().unwrap()).unwrap();
    let old = json.replacen("\"state_bytes\":12288,", "", 1);
    assert_ne!(old, json);
    assert_eq!(Plan::from_json(old.as_bytes()).unwrap().to_json().unwrap(), old.as_bytes());
    assert_eq!(account.total_bytes, sum);
    assert_eq!(account.npu_bytes, plan.footprint.weight_bytes);
    assert!(!plan.notes.iter().any(|note| matches!(note, Note::OverRam { .. })));
    request.ram = Some(Bytes(4 * GIB));
    let plan = choose(&request).unwrap();
    let needed = plan.memory.total_bytes;
    assert!(needed > 4 * GIB && plan.notes.contains(&Note::OverRam { needed, ram: 4 * GIB }));
}

// ---------------------------------------------------------------------------------------------- documents

fn small_plan() -> (ModelShape, Plan) {
    let shape = shape(3, 8, 2, 512, 1536, Dtype::Q8_0);
    let statistics = statistics(&shape, 600, 3.0, 5);
    let profile = rk3588();
    let mut request = PlanRequest::new(&shape, Routing::Measured(&statistics), &profile);
    (request.objective, request.budget, request.domains) = (Objective::Hits, Some(Bytes(13 * MIB)), 2);
    let plan = choose(&request).unwrap();
    assert!(plan.chunks.len() > 1);
    (shape, plan)
}

#[test]
fn a_plan_is_read_back_as_it_was() {
    let (small, plan) = small_plan();
    let json = plan.to_json().unwrap();
    let read = Plan::from_json(&json).unwrap();
    assert_eq!(read, plan);
    assert_eq!(read.to_json().unwrap(), json);
    assert_eq!(read.digest().unwrap(), blake3::hash(&json).to_hex().to_string());
    read.check(&small, &rk3588()).unwrap();
    // Large plans hold every kind of float.
    let shape = lfm();
    let statistics = statistics(&shape, 700, 2.2, 5);
    let plan = choose(&PlanRequest::new(&shape, Routing::Measured(&statistics), &rk3588())).unwrap();
    assert_eq!(Plan::from_json(&plan.to_json().unwrap()).unwrap(), plan);
}

#[test]
fn tampered_plans_are_refused() {
    type Change = fn(&mut Plan);
    let cases: &[(&str, Change)] = &[
        ("schema is `orkpack-plan-9`", |p| p.schema = "orkpack-plan-9".into()),
        ("a digest is not 64 hex digits", |p| p.profile.digest = "XY".into()),
        ("begins at byte 0, expected", |p| p.chunks[0].parts[1].offset = 0),
        ("begins at byte 786433, expected 786432", |p| p.chunks[0].parts[1].offset += 1),
        ("past the end of the chunk", |p| p.chunks[0].bytes -= 4096),
        ("bytes long, its content", |p| p.chunks[0].bytes += 4096),
        ("is placed twice or is not resident", |p| p.chunks[0].parts[1].matrix = p.chunks[0].parts[0].matrix),
        ("is placed twice or is not resident", |p| {
            let expert = p.layers[0].ranking[7].expert;
            p.chunks[0].parts[0].matrix.expert = ExpertId(expert);
        }),
        ("is placed twice or is not resident", |p| p.chunks[0].parts[0].matrix.layer = LayerId(9)),
        ("parts are resident", |p| {
            let chunk = p.chunks.pop().unwrap();
            p.footprint.weight_bytes -= chunk.bytes;
        }),
        ("is no program", |p| p.chunks[0].parts[0].tiles.k_padded = 500),
        ("is no program", |p| p.chunks[0].parts[0].tiles.n_len = 0),
        ("domain 2 of 2", |p| p.chunks[0].domain = 2),
        ("is in domain 1", |p| {
            let at = p.chunks.iter().position(|chunk| chunk.domain == 0).unwrap();
            p.chunks[at].domain = 1;
        }),
        ("the footprint is not that of the chunks", |p| p.footprint.domains[0].weight_bytes += 4096),
        ("the budget is 4096", |p| p.budget_bytes = 4096),
        ("experts hot", |p| p.cuts[1].layers[0] = 8),
        ("a cut of 2 layers, not 3", |p| {
            p.cuts[0].layers.pop();
        }),
        ("decode begins with 1 token", |p| p.cuts[0].from_tokens = 4),
        ("cuts are not decode and prefill", |p| p.cuts.reverse()),
        ("is ranked twice", |p| p.layers[0].ranking[0].expert = p.layers[0].ranking[1].expert),
        ("expert 8 of 8 is ranked", |p| p.layers[0].ranking[0].expert = 8),
        ("9 of 8 experts resident", |p| p.layers[0].resident = 9),
        ("0 of 8 experts used", |p| p.layers[0].n_used = 0),
        ("an expert after one that holds less or something else", |p| {
            let layer = p.layers.iter_mut().find(|layer| layer.resident >= 2).unwrap();
            layer.ranking[0].holds = Holds::GateUp;
            layer.ranking[1].holds = Holds::Whole;
        }),
        ("layer 0 is out of order", |p| p.layers[1].layer = 0),
        ("matrices are not gate, up and down", |p| p.layers[0].matrices.swap(0, 1)),
        ("4294967295 parts are resident", |p| p.layers[0].matrices[0].programs = u32::MAX),
        ("99 domains", |p| p.n_domains = 99),
    ];
    let (shape, plan) = small_plan();
    for (text, change) in cases {
        let mut tampered = plan.clone();
        change(&mut tampered);
        let error = Plan::from_json(&tampered.to_json().unwrap()).unwrap_err().to_string();
        assert!(error.contains(text), "{text}: {error}");
        assert!(tampered.check(&shape, &rk3588()).is_err());
    }
    // What only the model or the device can tell.
    let profile = rk3588();
    let cases: &[(&str, Change)] = &[
        ("is not cut as the device needs it", |p| {
            p.chunks[0].parts[0].tiles.k_len -= 1;
        }),
        ("the footprint is not that of the chunks", |p| p.footprint.scratch_bytes += 1),
        ("the window is", |p| p.window_bytes += 1),
        ("made for device profile `other`", |p| {
            (p.profile.name, p.profile.digest) = ("other".into(), "0".repeat(64))
        }),
    ];
    for (text, change) in cases {
        let mut tampered = plan.clone();
        change(&mut tampered);
        let read = Plan::from_json(&tampered.to_json().unwrap()).unwrap();
        let error = read.check(&shape, &profile).unwrap_err().to_string();
        assert!(error.contains(text), "{text}: {error}");
    }
    let other = crate::support::routed::shape(3, 9, 2, 512, 1536, Dtype::Q8_0);
    assert!(plan.check(&other, &profile).unwrap_err().to_string().contains("other layers or experts"));
    let other = crate::support::routed::shape(3, 8, 2, 512, 1024, Dtype::Q8_0);
    assert!(plan.check(&other, &profile).unwrap_err().to_string().contains("has another gate projection"));
    // Half a file, and fields that no plan has.
    let json = plan.to_json().unwrap();
    assert!(matches!(Plan::from_json(&json[..json.len() / 2]), Err(PlanError::Json(_))));
    let text = String::from_utf8(json).unwrap();
    let odd = text.replacen("\"projection\":\"gate\",\"part\"", "\"projection\":\"gat\",\"part\"", 1);
    assert!(Plan::from_json(odd.as_bytes()).is_err());
    assert!(Plan::from_json(text.replacen('{', "{\"more\":1,", 1).as_bytes()).is_err());
}

#[test]
fn plans_and_profiles_conform_to_their_schemas() {
    let plan_schema = schema::load("plan.schema.json");
    let shape = shape(2, 64, 2, 512, 1408, Dtype::Q8_0);
    let profile = rk3588();
    let thin = statistics(&shape, 60, 4.0, 3);
    for (routing, objective, shares) in [
        (Routing::Measured(&thin), Objective::Hits, Shares::Auto),
        (Routing::Measured(&thin), Objective::Hits, Shares::Rows),
        (Routing::Measured(&thin), Objective::Auto, Shares::Auto),
        (Routing::Assumed(Skew::RANGE), Objective::Decode, Shares::Auto),
    ] {
        let mut request = PlanRequest::new(&shape, routing, &profile);
        (request.objective, request.shares, request.ram) = (objective, shares, Some(Bytes(1)));
        let plan = choose(&request).unwrap();
        let json = serde_json::from_slice(&plan.to_json().unwrap()).unwrap();
        schema::check(&plan_schema, &json).unwrap();
    }
    let profile_schema = schema::load("profile.schema.json");
    let mut json: serde_json::Value = serde_json::from_slice(&profile.to_json().unwrap()).unwrap();
    schema::check(&profile_schema, &json).unwrap();
    json["rates"]["cpu_bytes_per_s"]["value"] = serde_json::json!("fast");
    assert!(schema::check(&profile_schema, &json).is_err());
    json["rates"] = serde_json::json!({});
    assert!(schema::check(&profile_schema, &json).is_err());
}

#[test]
fn regimes_cover_every_length_of_prompt() {
    let (_, plan) = small_plan();
    let regime = |tokens| plan.cut(tokens).map(|cut| cut.regime);
    assert_eq!(regime(0), Some(Regime::Decode));
    assert_eq!(regime(1), Some(Regime::Decode));
    assert_eq!(regime(2), Some(Regime::Prefill));
    assert_eq!(regime(u32::MAX), Some(Regime::Prefill));
    let matrices: Vec<_> = plan.matrices().collect();
    let mut unique = matrices.clone();
    unique.sort();
    unique.dedup();
    assert_eq!(unique.len(), matrices.len());
    assert!(matrices.iter().any(|matrix| matrix.projection == Projection::Down));
}
