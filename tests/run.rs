//! The partition: the same integers wherever they are computed, and the meaning of the text unchanged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use orkpack::device::{Fault, Npu, Sim};
use orkpack::executor::cpu::KernelMode;
use orkpack::model::evaluate::{Comparison, argmax};
use orkpack::progress::Silent;
use orkpack::runtime::{Check, DeviceChoice, Engine, Options, Regime, Runtime, Session};
use orkpack::tensor::Dtype;
use orkpack::tokenizer::Special;
use serde_json::Value;

use crate::support::fixture;
use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{bundled_in, convert, folder, hits, model_in, request, runtime};

const ALL: u64 = 1 << 30;
const TEXTS: [&str; 4] = ["arithmetic", "code", "prose", "spanish"];

fn pack_of(folder: &Path, model: &Path, budget: u64) -> PathBuf {
    let mut request = request(model, hits(budget));
    request.output = folder.join(format!("{budget}.orkpack"));
    convert(request).unwrap().1.output
}

fn greedy(session: &mut Session<'_>, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut next = argmax(session.prompt(prompt).unwrap());
    let mut tokens = vec![next];
    for _ in 1..n {
        next = argmax(session.step(next).unwrap());
        tokens.push(next);
    }
    tokens
}

fn prompt_of(runtime: &Runtime, text: &str) -> Vec<u32> {
    runtime.tokenizer().unwrap().encode(text, Special::Plain).unwrap()
}

/// All logits of a prompt and some steps, bit for bit.
fn trace(runtime: &Runtime, micro_batch: usize, prompt: &[u32], n: usize) -> Vec<u32> {
    bits_of(&mut Session::new(runtime, runtime.engine().unwrap(), 512, micro_batch), prompt, n)
}

fn bits_of(session: &mut Session<'_>, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut bits: Vec<u32> = session.prompt(prompt).unwrap().iter().map(|logit| logit.to_bits()).collect();
    let mut next = argmax(session.logits());
    for _ in 0..n {
        bits.extend(session.step(next).unwrap().iter().map(|logit| logit.to_bits()));
        next = argmax(session.logits());
    }
    bits
}

#[test]
fn cpu_and_software_npu_give_the_same_bits_at_any_thread_count_and_batch() {
    for (arch, n_ff, dtype) in
        [("qwen3moe", 256, Dtype::Q8_0), ("olmoe", 320, Dtype::F32), ("qwen3moe", 768, Dtype::Q4_K)]
    {
        let folder = folder();
        let spec = MoeSpec { arch, n_ff, dtype, n_expert: 8, n_used: 3, ..MoeSpec::default() };
        let model = model_in(folder.path(), &tiny_moe(&spec));
        for budget in [ALL, 2 << 20] {
            let pack = pack_of(folder.path(), &model, budget);
            let sim = runtime(&pack, DeviceChoice::Sim, 2);
            let prompt = prompt_of(&sim, "The expert in the layer was used 12 times");
            let expected = trace(&sim, 512, &prompt, 12);
            for (device, threads, micro_batch) in [
                (DeviceChoice::Cpu, 1, 512),
                (DeviceChoice::Cpu, 2, 1),
                (DeviceChoice::Sim, 1, 7),
                (DeviceChoice::Sim, 8, 512),
                (DeviceChoice::Cpu, 8, 3),
            ] {
                let other = trace(&runtime(&pack, device, threads), micro_batch, &prompt, 12);
                assert!(
                    other == expected,
                    "{arch} {dtype} {budget}: {device:?}, {threads} threads, batch {micro_batch}"
                );
            }
        }
    }
}

#[test]
fn counters_say_what_ran_where() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q4_k_m.gguf");
    let pack = pack_of(folder.path(), &model, 2_400_000);
    let runtime = runtime(&pack, DeviceChoice::Sim, 2);
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), 512, 64);
    let prompt = prompt_of(&runtime, "Table of 7\n7 x 1 = 7\n7 x 2 =");
    let tokens = greedy(&mut session, &prompt, 9);
    let counters = session.engine().counters().unwrap();
    assert_eq!(counters.prefill.all, prompt.len() as u64 * 3 * 3);
    assert_eq!(counters.decode.all, (tokens.len() as u64 - 1) * 3 * 3);
    for calls in [counters.prefill, counters.decode] {
        assert!(calls.hot_gate_up > 0 && calls.hot_gate_up < calls.all, "a third is hot: {calls:?}");
        assert_eq!(calls.hot_gate_up, calls.hot_down);
    }
    assert!(counters.account.programs > 0 && counters.account.submissions > 0);
    assert_eq!((counters.fallbacks, counters.failure), (0, None));
    let loaded = session.engine().loaded().unwrap();
    assert_eq!(loaded.bytes, counters.account.weight_bytes);
    let packed = runtime.packed().unwrap().pack();
    let plan = orkpack::plan::Plan::from_json(packed.plan()).unwrap();
    assert_eq!(plan.footprint.weight_bytes, counters.account.weight_bytes, "planned and mapped weights");
    assert_eq!(plan.footprint.scratch_bytes, counters.account.scratch_bytes, "planned and mapped scratch");
    assert!(counters.account.weight_bytes <= 2_400_000);
    assert!(session.decode().modelled().unwrap() > 0.0 && session.decode().measured() > 0.0);
}

#[test]
fn cold_parts_and_the_reference_come_from_source_rows() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    let pack = pack_of(folder.path(), &model, 0);
    let gguf = Runtime::open(&model, Options { threads: Some(2), ..Options::default() }).unwrap();
    let prompt = prompt_of(&gguf, "Anne could not");
    let expected = trace(&gguf, 512, &prompt, 8);
    for device in [DeviceChoice::Sim, DeviceChoice::Cpu, DeviceChoice::Auto] {
        assert!(trace(&runtime(&pack, device, 2), 512, &prompt, 8) == expected, "{device:?}: nothing is hot");
    }
    let all = pack_of(folder.path(), &model, ALL);
    let auto = runtime(&all, DeviceChoice::Auto, 2);
    assert!(auto.engine().unwrap().device().is_none(), "the software NPU runs only when asked for");
    assert!(trace(&auto, 512, &prompt, 8) == expected);
    assert!(
        trace(&runtime(&all, DeviceChoice::Sim, 2), 512, &prompt, 8) != expected,
        "int8 is another arithmetic"
    );
}

#[test]
fn a_flipped_chunk_is_found_when_it_is_loaded() {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    let pack = pack_of(folder.path(), &model, ALL);
    let opened = orkpack::pack::Pack::open(&pack, Default::default()).unwrap();
    let section = opened.section(opened.chunks()[0].section).unwrap();
    let (at, label) = (section.offset as usize + 77, section.label());
    drop(opened);
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let error = runtime(&pack, DeviceChoice::Sim, 1).engine().err().unwrap().to_string();
    assert!(error.contains(&label), "{error}");
    let full = Options { check: Check::Full, ..Options::default() };
    assert!(Runtime::open(&pack, full).err().unwrap().to_string().contains(&label));
    // Trusting runs it; without a device the chunk is never read.
    let trusting = Options { device: DeviceChoice::Sim, check: Check::Index, ..Options::default() };
    assert!(Runtime::open(&pack, trusting).unwrap().engine().is_ok());
    assert!(runtime(&pack, DeviceChoice::Auto, 1).engine().is_ok());
}

/// Perplexity of each text, and their mean, by the engine that `device` gives.
fn perplexities(
    path: &Path,
    device: Option<DeviceChoice>,
    micro_batch: usize,
) -> BTreeMap<&'static str, f64> {
    let options = Options { device: device.unwrap_or_default(), threads: Some(2), ..Options::default() };
    let runtime = Runtime::open(path, options).unwrap();
    let engine = if device.is_some() { runtime.engine() } else { runtime.reference() };
    let mut session = Session::new(&runtime, engine.unwrap(), 512, micro_batch);
    let score = |name: &&'static str| {
        let text = std::fs::read_to_string(fixture(&format!("corpora/heldout-{name}.txt"))).unwrap();
        (*name, session.perplexity(&prompt_of(&runtime, &text), &mut Silent).unwrap().value())
    };
    let perplexities = TEXTS.iter().map(score).collect();
    if device.is_some() {
        let counters = session.engine().counters().unwrap();
        assert!(counters.account.programs > 0 && counters.fallbacks == 0);
    }
    perplexities
}

/// Perplexity as llama.cpp gives it for each text.
fn published(quantisation: &str) -> BTreeMap<&'static str, f64> {
    let figures: Value =
        serde_json::from_slice(&std::fs::read(fixture("vectors/tiny-moe.json")).unwrap()).unwrap();
    let figure = |name: &&'static str| {
        let text = &figures["perplexity"][format!("heldout-{name}.txt")];
        (*name, text[quantisation]["llama.cpp"]["ppl"].as_f64().unwrap())
    };
    TEXTS.iter().map(figure).collect()
}

fn assert_same_meaning(quantisation: &str, budget: u64) {
    let folder = folder();
    let model = bundled_in(folder.path(), &format!("tiny-moe-{quantisation}.gguf"));
    let reference = perplexities(&model, None, 512);
    for (name, theirs) in published(quantisation) {
        let change = reference[name] / theirs - 1.0;
        assert!(change.abs() < 0.003, "{name}, all on the CPU: {:+.3} % from the published", 100.0 * change);
    }
    let pack = pack_of(folder.path(), &model, budget);
    for micro_batch in [512, 1] {
        let split = perplexities(&pack, Some(DeviceChoice::Sim), micro_batch);
        let change = |name| split[name] / reference[name] - 1.0;
        for name in TEXTS {
            let change = change(name);
            assert!(change.abs() < 0.003, "{name}, batch {micro_batch}: {:+.3} %", 100.0 * change);
        }
        let mean = TEXTS.iter().map(|name| change(name)).sum::<f64>() / TEXTS.len() as f64;
        assert!(mean.abs() < 0.001, "mean, batch {micro_batch}: {:+.4} %", 100.0 * mean);
    }
}

#[test]
fn q8_0_all_hot_means_the_same() {
    assert_same_meaning("q8_0", ALL);
}

#[test]
fn q4_k_m_all_hot_means_the_same() {
    assert_same_meaning("q4_k_m", ALL);
}

#[test]
fn q8_0_a_third_hot_means_the_same() {
    assert_same_meaning("q8_0", 2_400_000);
}

#[test]
fn q4_k_m_a_third_hot_means_the_same() {
    assert_same_meaning("q4_k_m", 2_400_000);
}

#[test]
fn comparing_tells_positions_and_divergence() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    let pack = pack_of(folder.path(), &model, ALL);
    let runtime = runtime(&pack, DeviceChoice::Sim, 2);
    let prompt = prompt_of(&runtime, "Los hijos de Benjamín");
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), 512, 512);
    let mut reference = Session::new(&runtime, runtime.reference().unwrap(), 512, 512);
    let mut comparison = Comparison::default();
    let last = session.compare_prompt(&mut reference, &prompt, &mut comparison).unwrap().to_vec();
    assert_eq!(comparison.n_positions(), prompt.len() as u64);
    assert!(comparison.mean_kl() > 0.0 && comparison.mean_kl() < 1e-2, "{}", comparison.mean_kl());
    assert!(comparison.top1_agreement() > 0.8);
    let mut plain = Session::new(&runtime, runtime.engine().unwrap(), 512, 512);
    assert_eq!(plain.prompt(&prompt).unwrap(), last, "comparing changes no logit");
}

#[test]
fn the_exact_kernel_runs_through_the_same_engine() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    let options = Options { kernel: KernelMode::Exact, threads: Some(2), ..Options::default() };
    let exact = Runtime::open(&model, options).unwrap();
    let fast = Runtime::open(&model, Options { threads: Some(2), ..Options::default() }).unwrap();
    let prompt = prompt_of(&exact, "Anne could not");
    let logits = |runtime: &Runtime| {
        let mut session = Session::new(runtime, runtime.engine().unwrap(), 64, 64);
        session.prompt(&prompt).unwrap().to_vec()
    };
    let (exact, fast) = (logits(&exact), logits(&fast));
    let most = exact.iter().zip(&fast).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most > 0.0 && most < 1.0, "{most}");
}

#[test]
fn the_regime_decides_how_far_down_the_ranking_experts_are_hot() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    // Planned for what pays: on this profile that is nothing at one token.
    let mut request = request(&model, hits(ALL));
    request.choice.objective = orkpack::plan::Objective::Prefill;
    let (prepared, outcome) = convert(request).unwrap();
    let runtime = runtime(&outcome.output, DeviceChoice::Sim, 2);
    let mut engine = runtime.engine().unwrap();
    for (regime, tokens) in [(Regime::Decode, 1), (Regime::Prompt(512), 512)] {
        engine.begin(regime);
        let planned: u64 =
            prepared.plan.cut(tokens).map_or(0, |cut| cut.layers.iter().map(|&n| u64::from(n)).sum());
        let mut session = Session::new(&runtime, runtime.engine().unwrap(), 1024, 512);
        let prompt: Vec<u32> = (0..512).map(|i| i % 2048).collect();
        session.prompt(&prompt).unwrap();
        session.step(3).unwrap();
        let counters = session.engine().counters().unwrap();
        let calls = if regime == Regime::Decode { counters.decode } else { counters.prefill };
        assert_eq!(calls.hot_gate_up > 0, planned > 0, "{regime:?}: {calls:?}, {planned} planned");
    }
}

/// A pack with everything hot, and a prompt's logits and steps on the reference device.
fn all_hot(folder: &Path) -> (PathBuf, Vec<u32>, Vec<u32>) {
    let model = bundled_in(folder, "tiny-moe-q8_0.gguf");
    let pack = pack_of(folder, &model, ALL);
    let cpu = runtime(&pack, DeviceChoice::Cpu, 2);
    let prompt = prompt_of(&cpu, "Table of 7\n7 x 1 = 7\n7 x 2 =");
    let bits = trace(&cpu, 64, &prompt, 6);
    (pack, prompt, bits)
}

/// An engine on a software NPU with a fault to come.
fn faulty(runtime: &Runtime, fault: Fault) -> Result<Engine, orkpack::error::Error> {
    let profile = runtime.profile().unwrap();
    let mut npu = Npu::new(Sim::new(profile), profile);
    npu.port_mut().inject(fault);
    runtime.engine_on(Box::new(npu))
}

#[test]
fn case_h1_a_device_without_room_changes_no_bit_and_one_that_fails_its_probe_is_not_used() {
    let folder = folder();
    let (pack, prompt, expected) = all_hot(folder.path());
    let runtime = runtime(&pack, DeviceChoice::Sim, 2);
    let source = bits_of(&mut Session::new(&runtime, runtime.reference().unwrap(), 512, 64), &prompt, 6);
    let (mut refused, mut distrusted, mut unharmed) = (0, 0, 0);
    for n in 1..24 {
        let engine = faulty(&runtime, Fault::NoIovaAtCreate(n)).unwrap();
        let is_trusted = engine.distrust().is_none();
        let loaded = engine.loaded().cloned();
        let mut session = Session::new(&runtime, engine, 512, 64);
        let bits = bits_of(&mut session, &prompt, 6);
        assert!(bits == if is_trusted { expected.clone() } else { source.clone() }, "create {n}");
        match loaded {
            None => distrusted += 1,
            Some(loaded) if loaded.refused.is_some() => {
                assert!(session.engine().counters().unwrap().fallbacks > 0);
                refused += 1;
            }
            Some(_) => unharmed += 1,
        }
    }
    assert!(refused >= 2 && distrusted >= 2 && unharmed >= 1, "{refused} {distrusted} {unharmed}");
}

#[test]
fn a_failing_device_changes_no_bit_and_is_counted() {
    let folder = folder();
    let (pack, prompt, expected) = all_hot(folder.path());
    for fault in [Fault::NeverRuns(20), Fault::StaleOutput(30), Fault::TimeOut(25)] {
        let lenient = runtime(&pack, DeviceChoice::Sim, 2);
        let mut session = Session::new(&lenient, faulty(&lenient, fault).unwrap(), 512, 64);
        assert!(bits_of(&mut session, &prompt, 6) == expected, "{fault:?}");
        let counters = session.engine().counters().unwrap();
        assert!(counters.fallbacks > 0 && counters.failure.is_some(), "{fault:?}");
        let options = Options { device: DeviceChoice::Sim, strict: true, ..Options::default() };
        let strict = Runtime::open(&pack, options).unwrap();
        let stopped = faulty(&strict, fault).and_then(|engine| {
            let mut session = Session::new(&strict, engine, 512, 64);
            session.prompt(&prompt)?;
            (0..6).try_for_each(|_| session.step(argmax(session.logits())).map(|_| ()))
        });
        assert_eq!(stopped.unwrap_err().exit_code(), 2, "{fault:?}");
    }
}

#[test]
fn experts_that_are_hot_in_part_mean_the_same() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    // Room for 35 whole experts and the gate and up of the last: its down comes from source rows.
    let pack = pack_of(folder.path(), &model, 35 * 3 * 65_536 + 2 * 65_536);
    let sim = runtime(&pack, DeviceChoice::Sim, 2);
    let prompt: Vec<u32> = prompt_of(&sim, &std::fs::read_to_string(fixture("corpora/mixed.txt")).unwrap());
    let prompt = &prompt[..400];
    let mut session = Session::new(&sim, sim.engine().unwrap(), 512, 64);
    let mut reference = Session::new(&sim, sim.reference().unwrap(), 512, 64);
    let mut comparison = Comparison::default();
    session.compare_prompt(&mut reference, prompt, &mut comparison).unwrap();
    let calls = session.engine().counters().unwrap().prefill;
    assert_eq!(calls.hot_gate_up, calls.all);
    assert!(calls.hot_down < calls.all && calls.hot_down > calls.all / 2, "{calls:?}");
    assert!(comparison.mean_kl() < 2e-3 && comparison.top1_agreement() > 0.95, "{comparison:?}");
    let cpu = runtime(&pack, DeviceChoice::Cpu, 1);
    assert!(trace(&sim, 64, prompt, 4) == trace(&cpu, 7, prompt, 4));
}
