//! Row shares: the first rows of every expert of a layer on the device, planned, packed, checked and run.

use std::fs;
use std::path::{Path, PathBuf};

use orkpack::blocks;
use orkpack::bytes::{Io, Limits};
use orkpack::check;
use orkpack::convert::Choice;
use orkpack::executor::cpu::KernelMode;
use orkpack::model::evaluate::argmax;
use orkpack::pack::verify::{Mode, verify};
use orkpack::pack::{Existing, MatrixName, Pack};
use orkpack::plan::{Holds, LayerPlan, Plan, Shares};
use orkpack::progress::Silent;
use orkpack::report;
use orkpack::runtime::{DeviceChoice, Options, Runtime, Session};
use orkpack::tensor::{Dtype, MatrixId, Projection};
use orkpack::tile::TILE;
use orkpack::units::{ExpertId, LayerId};

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{
    TOKENS, calibrate_beside, convert, folder, hits, model_in, profile, request, runtime,
};
use crate::support::naive_executor::{NaiveExecutor, hot_matrices, stepwise};
use crate::support::packs::edit_index;
use crate::support::program::{ORK_RUN, ORKPACK, done, run};

/// Experts whose rows are no whole blocks, of every kind of source type.
fn specs() -> [MoeSpec; 4] {
    let spec =
        |n_embd, n_ff, dtype| MoeSpec { n_embd, n_ff, dtype, n_layer: 2, n_head: 4, ..MoeSpec::default() };
    [
        spec(256, 320, Dtype::F32),
        spec(256, 768, Dtype::Q4_K),
        spec(64, 416, Dtype::Q8_0),
        spec(48, 330, Dtype::F16),
    ]
}

/// A pack of the model with rows of every expert resident, within a budget.
fn packed(folder: &Path, spec: &MoeSpec, budget: u64) -> (PathBuf, PathBuf) {
    let model = model_in(folder, &tiny_moe(spec));
    calibrate_beside(&model, &TOKENS);
    let mut request = request(&model, Choice { shares: Shares::Rows, ..hits(budget) });
    // Small chunks: a matrix lies in several.
    request.choice.profile.memory.chunk_bytes.value = 256 << 10;
    request.output = folder.join(format!("{budget}.orkpack"));
    (model, convert(request).unwrap().1.output)
}

fn plan_of(pack: &Path) -> Plan {
    Plan::from_json(Pack::open(pack, Io::Map).unwrap().plan()).unwrap()
}

/// Rows of gate (and of up), and of down; none where nothing is resident.
fn rows_of(layer: &LayerPlan) -> [u64; 2] {
    assert!(layer.is_by_rows() || layer.resident == 0);
    [0, 2].map(|p: usize| layer.matrices[p].rows.unwrap_or(0))
}

/// Bytes of all experts' copies.
fn all_bytes(folder: &Path, spec: &MoeSpec) -> u64 {
    plan_of(&packed(folder, spec, 1 << 30).1).footprint.weight_bytes
}

/// All logits of a prompt and of steps after it, bit for bit.
fn trace(runtime: &Runtime, micro_batch: usize) -> Vec<u32> {
    let mut session = Session::new(runtime, runtime.engine().unwrap(), 64, micro_batch);
    let mut bits: Vec<u32> = session.prompt(&TOKENS[..20]).unwrap().iter().map(|x| x.to_bits()).collect();
    for _ in 0..5 {
        let next = argmax(session.logits());
        bits.extend(session.step(next).unwrap().iter().map(|x| x.to_bits()));
    }
    bits
}

#[test]
fn a_share_of_rows_gives_the_same_bits_on_any_device_at_any_thread_count_and_batch() {
    for spec in specs() {
        let (folder, name) = (folder(), format!("{} × {} {}", spec.n_embd, spec.n_ff, spec.dtype));
        let all = all_bytes(folder.path(), &spec);
        let mut traces = Vec::new();
        for budget in [all / 5, all / 2] {
            let (_, pack) = packed(folder.path(), &spec, budget);
            let expected = trace(&runtime(&pack, DeviceChoice::Sim, 2), 64);
            for (device, threads, micro_batch) in [
                (DeviceChoice::Cpu, 1, 64),
                (DeviceChoice::Cpu, 8, 3),
                (DeviceChoice::Sim, 1, 7),
                (DeviceChoice::Sim, 8, 1),
            ] {
                let found = trace(&runtime(&pack, device, threads), micro_batch);
                assert!(
                    found == expected,
                    "{name}, {budget}: {device:?}, {threads} threads, batch {micro_batch}"
                );
            }
            traces.push(expected);
        }
        let (_, pack) = packed(folder.path(), &spec, 0);
        traces.push(trace(&runtime(&pack, DeviceChoice::Sim, 2), 64));
        traces.sort();
        traces.dedup();
        assert_eq!(traces.len(), 3, "{name}: another share is another arithmetic");
    }
}

#[test]
fn a_share_of_rows_is_the_contract_in_its_rows_and_the_source_in_the_others() {
    for spec in specs() {
        let (folder, name) = (folder(), format!("{} × {} {}", spec.n_embd, spec.n_ff, spec.dtype));
        let all = all_bytes(folder.path(), &spec);
        for budget in [all / 10, all / 3, 4 * all / 5, all] {
            let (_, pack) = packed(folder.path(), &spec, budget);
            let plan = plan_of(&pack);
            assert!(plan.layers.iter().any(|layer| layer.is_by_rows()), "{name}: {budget} bytes");
            let options = Options {
                device: DeviceChoice::Sim,
                kernel: KernelMode::Exact,
                threads: Some(1),
                strict: true,
                ..Options::default()
            };
            let runtime = Runtime::open(&pack, options).unwrap();
            let mut session = Session::new(&runtime, runtime.engine().unwrap(), 16, 1);
            let tokens = &TOKENS[..4];
            let found: Vec<f32> = tokens.iter().flat_map(|t| session.step(*t).unwrap().to_vec()).collect();
            let counters = session.engine().counters().unwrap();
            let calls = counters.decode;
            // Every call is split, and as counted so it was planned.
            let n_hot = |p: usize| plan.layers.iter().filter(|layer| rows_of(layer)[p] > 0).count() as u64;
            assert_eq!(
                calls.hot_gate_up,
                n_hot(0) * calls.all / plan.layers.len() as u64,
                "{name}: {calls:?}"
            );
            assert_eq!(calls.hot_down, n_hot(1) * calls.all / plan.layers.len() as u64, "{name}: {calls:?}");
            let planned = plan.hit_rates.overall.calibration;
            assert!((calls.hit_rate() - planned.value).abs() < 1e-7, "{name}: {calls:?}, {planned:?}");
            assert_eq!((planned.low, planned.high), (planned.value, planned.value), "no text changes it");
            assert_eq!(counters.fallbacks, 0);
            assert_eq!(counters.account.weight_bytes, plan.footprint.weight_bytes);
            assert_eq!(counters.account.scratch_bytes, plan.footprint.scratch_bytes);
            assert!(session.decode().modelled().unwrap() > 0.0);

            let hot = hot_matrices(&Pack::open(&pack, Io::Map).unwrap());
            let whole = hot.iter().filter(|(id, n)| {
                *n == if id.projection == Projection::Down { spec.n_embd } else { spec.n_ff } as usize
            });
            assert_eq!(whole.count() == hot.len(), budget == all, "{name}: {budget} bytes");
            let mut naive = NaiveExecutor::new(runtime.source(), runtime.model().weights());
            let exact = stepwise(runtime.model(), &mut naive, tokens);
            naive.hot.extend(hot);
            let contract = stepwise(runtime.model(), &mut naive, tokens);
            let apart =
                |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Sums in f32 and in f64 may round an activation to the next integer.
            assert!(
                apart(&found, &contract) < 0.01,
                "{name}: {} from the contract",
                apart(&found, &contract)
            );
            assert!(
                apart(&found, &exact) > apart(&found, &contract),
                "{name}: the contract is another arithmetic"
            );
        }
    }
}

/// Reads the copies by the prose of the format alone, and holds each code and scale to the row that it comes from.
#[test]
fn a_pack_holds_the_first_rows_of_every_expert_and_nothing_else() {
    let (folder, spec) = (folder(), specs()[1].clone());
    let budget = 4 * all_bytes(folder.path(), &spec) / 5;
    let (model, path) = packed(folder.path(), &spec, budget);
    let (pack, plan) = (Pack::open(&path, Io::Map).unwrap(), plan_of(&path));
    let source = Runtime::open(&model, Options::default()).unwrap();
    let weights = source.model().weights();
    let mut n_short = 0;
    for placement in pack.placements() {
        let id = placement.matrix.expert().unwrap();
        let weight = weights.bank(id.layer).unwrap().weight(id.expert, id.projection).unwrap();
        let layer = plan.layers.iter().find(|layer| layer.layer == id.layer.0).unwrap();
        let [gate_up, down] = rows_of(layer);
        let n_rows = if id.projection == Projection::Down { down } else { gate_up } as usize;
        assert_eq!((placement.n_in as usize, placement.n_out as usize), (weight.n_in, n_rows), "{id}");
        n_short += usize::from(n_rows < weight.n_out);
        let mut rows = vec![0.0; weight.n_in * weight.n_out];
        blocks::dequantize(weight.dtype, source.source().bytes(weight.place).unwrap(), &mut rows).unwrap();
        let scales: Vec<f32> = pack.scales(placement).collect();
        assert_eq!(scales.len(), n_rows);
        for part in &placement.parts {
            let (sub, tiles) = (part.sub, pack.part_bytes(part));
            for n in 0..sub.n_len as usize {
                let row = sub.n0 as usize + n;
                let weights = &rows[row * weight.n_in..][..weight.n_in];
                let max = weights.iter().fold(0.0f32, |max, w| max.max(w.abs()));
                assert_eq!(scales[row], max / 127.0, "{id}, row {row}");
                for k in 0..sub.k_len as usize {
                    let at = n / TILE * TILE * sub.k_padded as usize
                        + k / TILE * TILE * TILE
                        + n % TILE * TILE
                        + k % TILE;
                    let expected = (weights[sub.k0 as usize + k] * (127.0 / max)).round_ties_even();
                    assert_eq!(f32::from(tiles[at] as i8), expected, "{id}, row {row}, input {k}");
                }
            }
        }
    }
    let experts = plan.layers.iter().map(|layer| u64::from(layer.n_expert)).sum::<u64>() as usize;
    assert!(n_short >= experts, "{n_short} matrices are short");
    assert!(pack.chunks().len() > 2);
}

#[test]
fn a_pack_of_rows_is_verified_held_to_its_model_and_repaired() {
    let (folder, spec) = (folder(), specs()[2].clone());
    let budget = 4 * all_bytes(folder.path(), &spec) / 5;
    let (model, path) = packed(folder.path(), &spec, budget);
    let pack = Pack::open(&path, Io::Map).unwrap();
    assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
    let opened = orkpack::source::open(&model, Io::Map, &Limits::default()).unwrap();
    let against = check::against(&pack, opened.source().as_ref(), &|_| ()).unwrap();
    assert_eq!((against.findings.len(), against.n_matrices), (0, pack.placements().len() as u64));
    // The last row that is there: its code, its scale, and the padding behind it.
    let whole = fs::read(&path).unwrap();
    let last = pack.placements().last().unwrap();
    let (part, chunk) = (last.parts[0], pack.chunks()[last.parts[0].chunk as usize]);
    let [tiles, scales] = [chunk.section, chunk.scales].map(|s| pack.section(s).unwrap().offset as usize);
    let code = tiles
        + part.offset as usize
        + orkpack::tile::SubMatrix::from(part.sub).byte_of(3, part.sub.n_len as usize - 1);
    let scale = scales + last.scales as usize + 4 * (last.n_out as usize - 1) + 2;
    drop(pack);
    for at in [code, scale] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, &damaged).unwrap();
        let pack = Pack::open(&path, Io::Map).unwrap();
        assert!(!verify(&pack, Mode::Full, &|_| ()).is_ok(), "byte {at}");
        let against = check::against(&pack, opened.source().as_ref(), &|_| ()).unwrap();
        assert_eq!(against.findings.len(), 1, "{:?}", against.findings);
        let row = format!("row {}", last_row(&whole, &path));
        assert!(against.findings[0].contains(&row), "{:?}, expected {row}", against.findings);
        drop(pack);
        let mended = folder.path().join("mended.orkpack");
        let repaired = check::repair(&path, None, &mended, Existing::Replace, &mut Silent).unwrap();
        assert_eq!((repaired.rebuilt.len(), repaired.refused.len()), (1, 0), "{repaired:?}");
        assert!(fs::read(&mended).unwrap() == whole, "byte {at}");
    }
}

/// The number of the last row of the last matrix of a pack of these bytes.
fn last_row(whole: &[u8], path: &Path) -> u32 {
    let pack = Pack::from_bytes(path.to_str().unwrap(), whole.to_vec()).unwrap();
    pack.placements().last().unwrap().n_out - 1
}

#[test]
fn the_plan_says_which_rows_and_is_read_back_as_it_was() {
    let (folder, spec) = (folder(), specs()[0].clone());
    let budget = 4 * all_bytes(folder.path(), &spec) / 5;
    let (_, path) = packed(folder.path(), &spec, budget);
    let plan = plan_of(&path);
    assert_eq!(Plan::from_json(&plan.to_json().unwrap()).unwrap(), plan);
    for layer in &plan.layers {
        assert!(layer.ranking.iter().all(|item| item.holds == Holds::Rows && !item.forced));
        assert_eq!(layer.resident, layer.n_expert);
        let bytes: u64 = layer.ranking.iter().map(|item| item.bytes).sum();
        let chunks = plan.chunks.iter().flat_map(|chunk| &chunk.parts);
        let mine = chunks.filter(|placed| placed.matrix.layer.0 == layer.layer);
        assert_eq!(bytes, mine.map(|placed| placed.tiles.bytes().next_multiple_of(4096)).sum::<u64>());
    }
    let text = report::plan(&plan, "counted");
    let [gate_up, _] = rows_of(&plan.layers[0]);
    assert!(text.contains(&format!("N = 320 rows: the first {gate_up} in one program")), "{text}");
    assert!(text.contains("rows of every expert in 2 layers hot, as asked, "), "{text}");
    assert!(text.contains(" % of rows"), "{text}");
}

#[test]
fn plans_of_rows_that_contradict_themselves_are_refused() {
    type Change = fn(&mut Plan);
    let (folder, spec) = (folder(), specs()[0].clone());
    let budget = 4 * all_bytes(folder.path(), &spec) / 5;
    let (_, path) = packed(folder.path(), &spec, budget);
    let plan = plan_of(&path);
    let cases: &[(&str, Change)] = &[
        ("rows of some projections are given, of others not", |p| p.layers[0].matrices[2].rows = None),
        ("rows of some projections are given, of others not", |p| {
            p.layers[0].matrices.iter_mut().for_each(|matrix| matrix.rows = None)
        }),
        ("rows of 7 experts, 8 of 8 resident, expected all", |p| p.layers[0].ranking[3].holds = Holds::Whole),
        ("rows of 0 experts, 8 of 8 resident, expected all", |p| {
            p.layers[0].ranking.iter_mut().for_each(|item| item.holds = Holds::Whole)
        }),
        ("rows of 8 experts, 7 of 8 resident, expected all", |p| p.layers[0].resident = 7),
        (" rows of gate, 96 of up", |p| p.layers[0].matrices[1].rows = Some(96)),
        ("0 rows of gate, 0 of up, 0 of down", |p| {
            p.layers[0].matrices.iter_mut().for_each(|matrix| matrix.rows = Some(0))
        }),
        ("321 of 320 rows of gate", |p| (0..2).for_each(|i: usize| p.layers[0].matrices[i].rows = Some(321))),
        ("rows of down in 0 programs", |p| p.layers[0].matrices[2].programs = 0),
        ("is forced, and rows are shared", |p| p.layers[0].ranking[0].forced = true),
        ("rows are hot in 3 of 8 experts, expected all or none", |p| p.cuts[1].layers[0] = 3),
        ("rows are hot in 7 of 8 experts, expected all or none", |p| p.cuts[0].layers[1] = 7),
    ];
    for (text, change) in cases {
        let mut tampered = plan.clone();
        change(&mut tampered);
        assert_ne!(tampered, plan, "{text}");
        let error = Plan::from_json(&tampered.to_json().unwrap()).unwrap_err().to_string();
        assert!(error.contains(text), "{text}: {error}");
    }
    // Other rows than those that lie in the chunks: what the device would be given is another cut.
    let mut device = profile();
    device.memory.chunk_bytes.value = 256 << 10;
    let shape = runtime(&path, DeviceChoice::Auto, 1).model().shape();
    plan.check(&shape, &device).unwrap();
    let mut tampered = plan.clone();
    for matrix in &mut tampered.layers[0].matrices[..2] {
        matrix.rows = matrix.rows.map(|rows| rows - 32);
    }
    let read = Plan::from_json(&tampered.to_json().unwrap()).unwrap();
    let error = read.check(&shape, &device).unwrap_err().to_string();
    assert!(error.contains("is not cut as the device needs it"), "{error}");
}

#[test]
fn a_pack_whose_gate_and_up_have_other_rows_is_refused() {
    // As wide inside as outside, so that up and down of an expert can change names.
    let (folder, spec) = (folder(), MoeSpec::default());
    let budget = 4 * all_bytes(folder.path(), &spec) / 5;
    let (_, path) = packed(folder.path(), &spec, budget);
    let [gate_up, down] = rows_of(&plan_of(&path).layers[0]);
    assert!(gate_up != down && down > 0, "{gate_up} {down}");
    let odd = edit_index(&fs::read(&path).unwrap(), |index| {
        let of = |projection| {
            let name = MatrixName::from(MatrixId { layer: LayerId(0), expert: ExpertId(5), projection });
            index.placements.iter().position(|placement| placement.matrix == name).unwrap()
        };
        let (up, down) = (of(Projection::Up), of(Projection::Down));
        let name = index.placements[up].matrix;
        index.placements[up].matrix = index.placements[down].matrix;
        index.placements[down].matrix = name;
    });
    let error = Pack::from_bytes("odd.orkpack", odd).unwrap_err().to_string();
    assert!(error.contains("blk.0.ffn_") && error.contains("_exps expert 5: outputs with a copy"), "{error}");
    assert!(error.contains(&gate_up.to_string()) && error.contains(&down.to_string()), "{error}");
}

#[test]
fn the_programs_plan_convert_explain_and_run_shares_of_rows() {
    let folder = folder();
    let path = folder.path();
    let model = model_in(path, &tiny_moe(&specs()[2]));
    calibrate_beside(&model, &TOKENS);
    let words = ["--shares", "rows", "--objective", "hits", "--budget", "1100KiB"];
    let text = done(&run(ORKPACK, path, &[&["plan", "model.gguf", "--explain", "1:3"], &words[..]].concat()));
    assert!(text.contains("rows of every expert in 2 layers hot, as asked"), "{text}");
    assert!(text.contains("layer 1, expert 3: in, its first rows: it is worth its bytes"), "{text}");
    done(&run(ORKPACK, path, &[&["convert", "model.gguf", "-o", "rows.orkpack"], &words[..]].concat()));
    done(&run(ORKPACK, path, &["verify", "rows.orkpack", "--against", "model.gguf"]));
    let run_on = |device: &str| {
        let words = [
            "rows.orkpack",
            "--tokens",
            "72,101,108",
            "-n",
            "6",
            "--temp",
            "0",
            "--json",
            "--device",
            device,
        ];
        let document: serde_json::Value = serde_json::from_str(&done(&run(ORK_RUN, path, &words))).unwrap();
        document["tokens"].clone()
    };
    let tokens = run_on("sim");
    assert_eq!(tokens.as_array().unwrap().len(), 6);
    assert_eq!(tokens, run_on("cpu"));
    let output = run(ORKPACK, path, &["plan", "model.gguf", "--shares", "columns"]);
    assert_eq!(output.status.code(), Some(2));
}
