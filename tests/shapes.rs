//! Expert matrices that fit no program as they are: padded, cut, or left to the CPU, and their sums exact.

use std::path::Path;

use orkpack::executor::cpu::KernelMode;
use orkpack::pack::Pack;
use orkpack::plan::{Holds, MatrixPlan, Plan};
use orkpack::report;
use orkpack::runtime::{DeviceChoice, Options, Runtime, Session};
use orkpack::tensor::{Dtype, Int8Matrix};

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::naive_executor::{NaiveExecutor, hot_matrices, stepwise};

/// A model of such experts, and what the plan is to say of them: programs and bytes of gate (or up), and of down.
struct Case {
    n_embd: u32,
    n_ff: u32,
    dtype: Dtype,
    gate: (u32, u64),
    down: (u32, u64),
}

const CASES: [Case; 11] = [
    // Row lengths of public models, and one of no use to anybody. 256 inputs are the shortest program.
    Case { n_embd: 48, n_ff: 33, dtype: Dtype::F32, gate: (1, 256 * 64), down: (1, 256 * 64) },
    Case { n_embd: 896, n_ff: 32, dtype: Dtype::Q8_0, gate: (1, 1024 * 32), down: (1, 256 * 896) },
    Case { n_embd: 64, n_ff: 768, dtype: Dtype::Q8_0, gate: (1, 256 * 768), down: (1, 1024 * 64) },
    Case { n_embd: 64, n_ff: 1408, dtype: Dtype::Q4_0, gate: (1, 256 * 1408), down: (1, 1536 * 64) },
    Case { n_embd: 64, n_ff: 1792, dtype: Dtype::F16, gate: (1, 256 * 1792), down: (1, 2048 * 64) },
    Case { n_embd: 64, n_ff: 2880, dtype: Dtype::Q8_0, gate: (1, 256 * 2880), down: (1, 3072 * 64) },
    // Mixtral's width: two ranges of outputs, four slices of inputs.
    Case { n_embd: 64, n_ff: 14336, dtype: Dtype::Q8_0, gate: (2, 256 * 14336), down: (4, 14336 * 64) },
    // Outputs about one block of the device.
    Case { n_embd: 48, n_ff: 16, dtype: Dtype::F32, gate: (1, 256 * 32), down: (1, 256 * 64) },
    Case { n_embd: 48, n_ff: 17, dtype: Dtype::F32, gate: (1, 256 * 32), down: (1, 256 * 64) },
    Case { n_embd: 48, n_ff: 48, dtype: Dtype::F32, gate: (1, 256 * 64), down: (1, 256 * 64) },
    Case { n_embd: 512, n_ff: 512, dtype: Dtype::Q8_0, gate: (1, 512 * 512), down: (1, 512 * 512) },
];

impl Case {
    fn name(&self) -> String {
        format!("{} × {} {}", self.n_embd, self.n_ff, self.dtype)
    }

    fn model(&self) -> Vec<u8> {
        let &Case { n_embd, n_ff, dtype, .. } = self;
        let n_head = 4;
        tiny_moe(&MoeSpec {
            n_layer: 1,
            n_embd,
            n_ff,
            n_expert: 3,
            n_used: 2,
            n_head,
            dtype,
            ..MoeSpec::default()
        })
    }
}

/// Logits after each of some tokens, and how many programs all but the first ran. Nothing may fall back.
fn run(pack: &Path, device: DeviceChoice) -> (Vec<f32>, u64) {
    let options =
        Options { device, kernel: KernelMode::Exact, threads: Some(1), strict: true, ..Options::default() };
    let runtime = Runtime::open(pack, options).unwrap();
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), 16, 1);
    let mut programs = Vec::new();
    let mut logits = Vec::new();
    for token in TOKENS {
        logits.extend_from_slice(session.step(token).unwrap());
        let counters = session.engine().counters().unwrap();
        assert_eq!((counters.fallbacks, counters.decode.hot_down), (0, counters.decode.all));
        programs.push(counters.account.programs);
    }
    (logits, programs[TOKENS.len() - 1] - programs[0])
}

const TOKENS: [u32; 4] = [72, 101, 32, 97];

/// Every byte of the tiles that is no weight.
fn padding_of(pack: &Pack) -> (u64, u64) {
    let (mut padding, mut not_zero) = (0, 0);
    for placement in pack.placements() {
        let (n_in, n_out) = (placement.n_in as usize, placement.n_out as usize);
        for part in &placement.parts {
            let sub = part.sub.into();
            let tiles = pack.part_bytes(part);
            let ones = Int8Matrix { codes: vec![1; n_in * n_out], scales: vec![1.0; n_out], n_in, n_out };
            let mut weights = vec![0u8; tiles.len()];
            orkpack::tile::tile(&ones, &sub, &mut weights).unwrap();
            let rest = tiles.iter().zip(weights).filter(|(_, is_weight)| *is_weight == 0);
            rest.for_each(|(byte, _)| {
                padding += 1;
                not_zero += u64::from(*byte != 0);
            });
        }
    }
    (padding, not_zero)
}

#[test]
fn case_c14_and_c15_odd_shapes_are_padded_or_cut_and_their_sums_are_exact() {
    for case in &CASES {
        let (folder, name) = (folder(), case.name());
        let model = model_in(folder.path(), &case.model());
        calibrate_beside(&model, &TOKENS);
        let outcome = convert(request(&model, hits(1 << 30))).unwrap().1;
        let pack = Pack::open(&outcome.output, Default::default()).unwrap();
        let plan = Plan::from_json(pack.plan()).unwrap();
        for (matrix, (programs, tile_bytes)) in
            plan.layers[0].matrices.iter().zip([case.gate, case.gate, case.down])
        {
            assert_eq!((matrix.programs, matrix.tile_bytes), (programs, tile_bytes), "{name}: {matrix:?}");
        }
        let text = report::plan(&plan, "counted");
        let (n_ff, n_embd) = (case.n_ff, case.n_embd);
        assert!(text.contains(&format!("row length K = {n_ff}, N = {n_embd} rows: ")), "{name}:\n{text}");
        let weights = |matrix: &MatrixPlan| matrix.n_in * matrix.n_out;
        let padded: u64 = plan.layers[0].matrices.iter().map(|m| m.tile_bytes - weights(m)).sum();
        assert_eq!(text.contains("of it padding"), padded > 0, "{name}:\n{text}");
        assert_eq!(padding_of(&pack), (3 * padded, 0), "{name}");

        let (sim, programs) = run(&outcome.output, DeviceChoice::Sim);
        let (cpu, _) = run(&outcome.output, DeviceChoice::Cpu);
        let per_call = u64::from(2 * case.gate.0 + case.down.0);
        assert_eq!(programs, per_call * 2 * (TOKENS.len() as u64 - 1), "{name}");
        assert!(sim == cpu, "{name}: the software NPU and the CPU disagree");
        let runtime = Runtime::open(&outcome.output, Options::default()).unwrap();
        let mut naive = NaiveExecutor::new(runtime.source(), runtime.model().weights());
        naive.hot.extend(hot_matrices(&pack));
        let contract = stepwise(runtime.model(), &mut naive, &TOKENS);
        let far = sim.iter().zip(&contract).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Sums in f32 and in f64 may round an activation to the next integer: a hundredth of a logit at most here.
        assert!(far < 0.01, "{name}: {far} from the naive contract");
    }
}

#[test]
fn parts_of_an_expert_may_be_hot_alone_and_their_sums_are_exact() {
    let case = &CASES[10];
    let (gate, down) = (case.gate.1, case.down.1);
    for (budget, expected) in [
        (down, &[Holds::Down][..]),
        (2 * gate, &[Holds::GateUp]),
        (2 * gate + down, &[Holds::Whole]),
        (2 * gate + 2 * down, &[Holds::Whole, Holds::Down]),
        (4 * gate + down, &[Holds::Whole, Holds::GateUp]),
    ] {
        let folder = folder();
        let model = model_in(folder.path(), &case.model());
        calibrate_beside(&model, &TOKENS);
        let outcome = convert(request(&model, hits(budget))).unwrap().1;
        let pack = Pack::open(&outcome.output, Default::default()).unwrap();
        let plan = Plan::from_json(pack.plan()).unwrap();
        let resident = &plan.layers[0].ranking[..plan.layers[0].resident as usize];
        assert_eq!(resident.iter().map(|item| item.holds).collect::<Vec<_>>(), expected, "{budget} bytes");
        let logits = |device| {
            let options = Options { device, kernel: KernelMode::Exact, strict: true, ..Options::default() };
            let runtime = Runtime::open(&outcome.output, options).unwrap();
            let mut session = Session::new(&runtime, runtime.engine().unwrap(), 16, 1);
            let logits: Vec<f32> = TOKENS.iter().flat_map(|t| session.step(*t).unwrap().to_vec()).collect();
            let calls = session.engine().counters().unwrap().decode;
            (logits, calls.hot_gate_up, calls.hot_down)
        };
        let (sim, hot_gate_up, hot_down) = logits(DeviceChoice::Sim);
        assert_eq!(logits(DeviceChoice::Cpu), (sim.clone(), hot_gate_up, hot_down), "{budget} bytes");
        // Every part that is resident is used by some of these tokens.
        assert_eq!(hot_gate_up > 0, expected.iter().any(|holds| *holds != Holds::Down), "{budget} bytes");
        assert_eq!(hot_down > 0, expected.iter().any(|holds| *holds != Holds::GateUp), "{budget} bytes");
        let runtime = Runtime::open(&outcome.output, Options::default()).unwrap();
        let mut naive = NaiveExecutor::new(runtime.source(), runtime.model().weights());
        naive.hot.extend(hot_matrices(&pack));
        let contract = stepwise(runtime.model(), &mut naive, &TOKENS);
        let far = sim.iter().zip(&contract).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 0.01, "{budget} bytes: {far} from the naive contract");
    }
}
