//! Our numbers against llama.cpp's: small models of each family with its logits, and the bundled model.
//!
//! `fixtures/models/reference/` has the families and types that are enough to find a mistake; the variable
//! `ORKPACK_REFERENCE` may name a folder with more of the same kind.

#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{self, Cut};
use orkpack::executor::Executor;
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::gguf::GgufFile;
use orkpack::model::evaluate::{argmax, perplexity};
use orkpack::model::{CacheType, Model, State, Wanted, forward, forward_traced};
use orkpack::tensor::TensorSource;
use orkpack::threads::Pool;
use orkpack::tokenizer::{Special, Tokenizer};
use serde_json::Value;

use crate::support::fixture;
use crate::support::naive_executor::NaiveExecutor;
use crate::support::recorder::Recorder;
use crate::support::reference::{Reference, executor, floats, ids, references};

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What a run of the prompt gives.
struct Run {
    /// Of every position.
    logits: Vec<f32>,
    /// Of the last position: after each layer, then after the final norm.
    hidden: Vec<f32>,
    /// `[layer][position][slot]`.
    choices: Vec<Vec<Vec<u32>>>,
    /// Thirty-two tokens after the prompt.
    greedy: Vec<u32>,
}

impl Run {
    fn new(reference: &Reference, executor: &mut dyn Executor) -> Run {
        let (model, prompt) = (&reference.model, reference.prompt());
        let mut recorder = Recorder::new(executor);
        let mut state = State::new(model, prompt.len() + 32);
        let (mut logits, mut hidden) = (Vec::new(), Vec::new());
        let mut last_row = |_, rows: &[f32]| hidden.extend_from_slice(&rows[rows.len() - model.n_embd()..]);
        forward_traced(model, &mut recorder, &mut state, &prompt, Wanted::All, &mut logits, &mut last_row)
            .unwrap();
        let choices = (0..model.n_layer()).map(|layer| recorder.choices(layer)).collect();
        let mut next = argmax(&logits[logits.len() - model.n_vocab()..]);
        let mut out = Vec::new();
        let greedy = (0..32).map(|_| {
            let token = next;
            forward(model, &mut recorder, &mut state, &[token], Wanted::Last, &mut out).unwrap();
            next = argmax(&out);
            token
        });
        let greedy = greedy.collect();
        Run { logits, hidden, choices, greedy }
    }

    fn last_logits(&self, model: &Model) -> &[f32] {
        &self.logits[self.logits.len() - model.n_vocab()..]
    }

    fn rows<'a>(&'a self, model: &Model) -> impl Iterator<Item = &'a [f32]> {
        self.logits.chunks_exact(model.n_vocab())
    }

    /// Margins of the positions that chose another set of experts than in `expected`, in the first layer where they
    /// did: later layers see another input.
    fn flips(&self, expected: &Value) -> BTreeMap<usize, f64> {
        flips(&self.choices, expected)
    }

    /// Compares the greedy text up to the first step whose lead is within `tolerance`.
    fn check_greedy(&self, name: &str, expected: &Value, tolerance: f64) -> usize {
        let margins = floats(&expected["greedy_margins"]);
        let sure = margins.iter().take_while(|margin| **margin > tolerance).count();
        assert_eq!(self.greedy[..sure], ids(&expected["greedy_tokens"])[..sure], "{name}");
        sure
    }
}

/// As [`Run::flips`], of these choices, `[layer][position][slot]`.
fn flips(choices: &[Vec<Vec<u32>>], expected: &Value) -> BTreeMap<usize, f64> {
    let mut flips = BTreeMap::new();
    for (layer, ours) in choices.iter().enumerate() {
        let layer = &expected["routing"][layer.to_string()];
        if layer.is_null() && ours.is_empty() {
            continue; // no experts here
        }
        let margins = floats(&layer["margin"]);
        let theirs = layer["topk"].as_array().unwrap();
        assert_eq!((ours.len(), margins.len()), (theirs.len(), theirs.len()));
        for (position, ((ours, theirs), margin)) in ours.iter().zip(theirs).zip(margins).enumerate() {
            let sorted = |mut ids: Vec<u32>| {
                ids.sort_unstable();
                ids
            };
            if sorted(ours.clone()) != sorted(ids(theirs)) {
                flips.entry(position).or_insert(margin);
            }
        }
    }
    flips
}

/// Everything about a model that arithmetic in f32 determines. Gives how far logits and hidden states are apart.
fn check_exact(reference: &Reference, executor: &mut dyn Executor) -> (f32, Option<f32>) {
    let (name, model, expected) = (reference.name(), &reference.model, reference.exact());
    let run = Run::new(reference, executor);
    let logits = furthest(run.last_logits(model), &reference.exact_logits());
    assert!(logits < 1e-3, "{name}: logits are {logits} apart");
    let hidden = reference.is_f32().then(|| furthest(&run.hidden, &reference.floats("hidden.f32")));
    assert!(hidden.is_none_or(|hidden| hidden < 1e-3), "{name}: hidden states are {hidden:?} apart");
    assert_eq!(
        run.rows(model).map(argmax).collect::<Vec<_>>(),
        ids(&expected["argmax_per_position"]),
        "{name}"
    );
    let flips = run.flips(expected);
    assert!(flips.values().all(|margin| *margin < 1e-5), "{name}: {flips:?}");
    assert!(run.check_greedy(name, expected, 2e-3) > 4, "{name}");
    (logits, hidden)
}

fn rms(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (squares / a.len() as f64).sqrt()
}

/// How far a run's logits are from our exact ones at the median position: for where the last position's own say
/// nothing, because it went to another expert and experts of random weights have nothing in common.
fn median_rms(reference: &Reference, run: &Run) -> f64 {
    let exact = Run::new(reference, &mut executor(&reference.file, &reference.model, KernelMode::Exact));
    let rows = run.rows(&reference.model).zip(exact.rows(&reference.model));
    let mut distances: Vec<f64> = rows.map(|(a, b)| rms(a, b)).collect();
    distances.sort_by(f64::total_cmp);
    distances[distances.len() / 2]
}

/// Rounding activations to 8 bits moves logits; nobody's rounding is the right one, so ours is held to what
/// llama.cpp's own costs it. Gives both, as root mean squares.
fn check_fast(reference: &Reference) -> (f64, f64) {
    let (name, expected) = (reference.name(), reference.exact());
    let run = Run::new(reference, &mut executor(&reference.file, &reference.model, KernelMode::Fast));
    let (ours, exact) = (run.last_logits(&reference.model), reference.exact_logits());
    let flips = run.flips(expected);
    let last = reference.prompt().len() - 1;
    let rms = if flips.contains_key(&last) { median_rms(reference, &run) } else { rms(ours, &exact) };
    let theirs = expected["rms_diff_logits"].as_f64().unwrap();
    assert!(rms <= 2.0 * theirs, "{name}: rms {rms}, theirs {theirs}");
    // A choice may go another way where two experts are nearly tied, or as far as the reference's own go.
    let n_theirs = expected["topk_sets_differing"].as_u64().unwrap() as usize;
    let furthest = self::flips(&reference.choices(), expected).into_values().fold(0.05, f64::max);
    assert!(flips.len() <= 2 * n_theirs + 2, "{name}: {flips:?}, theirs {n_theirs}");
    // With groups, margins are those among the experts of the groups that were left, and say nothing of the groups'.
    let grouped = reference.file.metadata().0.keys().any(|key| key.ends_with(".expert_group_count"));
    assert!(grouped || flips.values().all(|margin| *margin <= furthest), "{name}: {flips:?}");
    (rms, theirs)
}

/// What a row of docs/models.md says of the models of one family and type.
#[derive(Clone, Copy, Default)]
struct Found {
    n_models: usize,
    logits: f32,
    hidden: f32,
    rms: f64,
    rms_theirs: f64,
}

/// Runs every model that is there. With `ORKPACK_WRITE_DOCS` the findings become docs/models.md; else they may be no
/// worse than what it says.
#[test]
fn every_reference_model_agrees() {
    let references = references();
    let mut found: BTreeMap<(String, String), Found> = BTreeMap::new();
    for reference in &references {
        let naive = &mut NaiveExecutor::new(&*reference.file, reference.model.weights());
        let exact = &mut executor(&reference.file, &reference.model, KernelMode::Exact);
        let runs = [check_exact(reference, naive), check_exact(reference, exact)];
        let fast = if reference.is_f32() { (0.0, 0.0) } else { check_fast(reference) };
        let key = (reference.model.architecture().to_owned(), reference.dtype().to_owned());
        let row = found.entry(key).or_default();
        row.n_models += 1;
        for (logits, hidden) in runs {
            row.logits = row.logits.max(logits);
            row.hidden = row.hidden.max(hidden.unwrap_or(0.0));
        }
        (row.rms, row.rms_theirs) = (row.rms.max(fast.0), row.rms_theirs.max(fast.1));
    }
    println!("{} reference models ran", references.len());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    if std::env::var_os("ORKPACK_WRITE_DOCS").is_some() {
        let said = fs::read_to_string(&path).unwrap();
        fs::write(&path, document(&said, &found)).unwrap();
    }
    let said = fs::read_to_string(&path).unwrap();
    for ((family, dtype), row) in &found {
        let Found { logits, hidden, .. } = row;
        let row = said.lines().find_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            (cells[0] == format!("`{family}`") && cells.get(1) == Some(&dtype.as_str())).then_some(cells)
        });
        let row = row.unwrap_or_else(|| panic!("docs/models.md has no row for {family} {dtype}"));
        let most = |column: usize| row[column].trim_start_matches("≤ ").parse::<f32>().unwrap_or(0.0);
        assert!(*logits <= most(3) && *hidden <= most(4), "{family} {dtype}: {logits}, {hidden}: {row:?}");
    }
}

/// docs/models.md: its head as it is, and the table anew.
fn document(said: &str, found: &BTreeMap<(String, String), Found>) -> String {
    let head = said.split_once("\n| family").map_or(said, |(head, _)| head).trim_end();
    let mut text = format!(
        "{head}\n\n| family | type | models | logits | hidden states | 8-bit activations | llama.cpp's |\n\
         |---|---|--:|--:|--:|--:|--:|\n"
    );
    let bound = |far: f32| format!("≤ {:.0e}", round_up(far));
    let rms = |rms: f64| if rms > 0.0 { format!("{rms:.3}") } else { "–".to_owned() };
    for ((family, dtype), row) in found {
        let hidden = if row.hidden > 0.0 { bound(row.hidden) } else { "–".to_owned() };
        text += &format!(
            "| `{family}` | {dtype} | {} | {} | {hidden} | {} | {} |\n",
            row.n_models,
            bound(row.logits),
            rms(row.rms),
            rms(row.rms_theirs)
        );
    }
    text
}

/// The next 1, 2 or 5 times a power of ten, with room for another machine's last bits.
fn round_up(far: f32) -> f32 {
    let far = 1.5 * far.max(1e-7);
    let unit = 10f32.powf(far.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|digit| digit * unit).into_iter().find(|step| *step >= far).unwrap_or(far)
}

/// The bundled model in one quantisation, and what two implementations say of it.
struct Bundled {
    quantisation: &'static str,
    json: Value,
    file: Arc<GgufFile>,
    model: Model,
}

impl Bundled {
    fn both() -> [Bundled; 2] {
        let open = |quantisation| {
            let path = fixture(&format!("models/tiny-moe-{quantisation}.gguf"));
            let file = GgufFile::open(&path, Io::Map, &Limits::default()).unwrap();
            let json = fs::read(fixture("vectors/tiny-moe.json")).unwrap();
            let json = serde_json::from_slice(&json).unwrap();
            Bundled { quantisation, json, model: Model::describe(&file).unwrap(), file: Arc::new(file) }
        };
        ["q8_0", "q4_k_m"].map(open)
    }

    fn tokens(&self, text: &str) -> Vec<u32> {
        let text = fs::read_to_string(fixture("corpora").join(text)).unwrap();
        let tokenizer = Tokenizer::from_metadata(self.file.metadata()).unwrap();
        tokenizer.encode(&text, Special::Parse).unwrap()
    }
}

/// How each mode is judged: by which column, and how far it may be away.
struct Judge {
    mode: KernelMode,
    column: &'static str,
    /// Of one of the twenty largest logits after a prompt.
    logits: f64,
    /// Greedy text is compared up to the first lead below this.
    lead: f64,
    /// Share of routing choices.
    choices: f64,
    /// Of the perplexity.
    perplexity: f64,
}

const EXACT: Judge = Judge {
    mode: KernelMode::Exact,
    column: "f32",
    logits: 2e-4,
    lead: 0.01,
    choices: 0.0002,
    perplexity: 0.0001,
};

const FAST: Judge = Judge {
    mode: KernelMode::Fast,
    column: "llama.cpp",
    logits: 0.1,
    lead: 0.2,
    choices: 0.002,
    perplexity: 0.001,
};

#[test]
fn both_files_are_one_model_by_fingerprint() {
    let [a, b] = Bundled::both().map(|bundled| bundled.model.fingerprint(&*bundled.file).unwrap());
    assert_eq!(a, b);
}

#[test]
fn the_bundled_model_continues_its_prompts() {
    for bundled in Bundled::both() {
        let (model, source) = (&bundled.model, &bundled.file);
        for judge in [&EXACT, &FAST] {
            let mut executor = executor(source, model, judge.mode);
            for generation in bundled.json["generation"].as_array().unwrap() {
                let expected = &generation[bundled.quantisation][judge.column];
                let prompt = ids(&generation["prompt_ids"]);
                let name = format!("{} {} {}", bundled.quantisation, judge.column, generation["prompt"]);
                let mut state = State::new(model, prompt.len() + 64);
                let mut out = Vec::new();
                forward(model, &mut executor, &mut state, &prompt, Wanted::Last, &mut out).unwrap();
                for pair in expected["top20"].as_array().unwrap() {
                    let (id, logit) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
                    let far = (f64::from(out[id]) - logit).abs();
                    assert!(far < judge.logits, "{name}: token {id} is {far} away");
                }
                let leads = floats(&expected["lead"]);
                let sure = leads.iter().take_while(|lead| **lead > judge.lead).count();
                for (step, token) in ids(&expected["greedy_ids"]).into_iter().take(sure).enumerate() {
                    assert_eq!(argmax(&out), token, "{name}: step {step}");
                    forward(model, &mut executor, &mut state, &[token], Wanted::Last, &mut out).unwrap();
                }
            }
        }
    }
}

/// Past position 100 a rotation of the wrong pairs would show; and no cut and no number of threads may.
#[test]
fn neither_the_cut_into_calls_nor_the_threads_change_a_bit() {
    for bundled in Bundled::both() {
        let tokens = &bundled.tokens("mixed.txt")[..200];
        for mode in [KernelMode::Exact, KernelMode::Fast] {
            let logits = |n_threads, micro_batch| {
                let pool = Arc::new(Pool::new(n_threads));
                let weights = bundled.model.weights().clone();
                let mut executor = CpuExecutor::new(bundled.file.clone(), weights, pool, mode).unwrap();
                let mut state = State::new(&bundled.model, tokens.len());
                let (mut all, mut out) = (Vec::new(), Vec::new());
                for batch in tokens.chunks(micro_batch) {
                    forward(&bundled.model, &mut executor, &mut state, batch, Wanted::All, &mut out).unwrap();
                    all.extend(out.iter().map(|logit| logit.to_bits()));
                }
                all
            };
            let whole = logits(1, 512);
            for (n_threads, micro_batch) in [(1, 1), (1, 7), (2, 512), (2, 33)] {
                assert!(logits(n_threads, micro_batch) == whole, "{n_threads} threads, {micro_batch} rows");
            }
        }
    }
}

#[test]
fn the_bundled_model_routes_its_prompts() {
    for bundled in Bundled::both() {
        for judge in [&EXACT, &FAST] {
            let mut executor = executor(&bundled.file, &bundled.model, judge.mode);
            for text in ["spanish.txt", "mixed.txt"] {
                let tokens = bundled.tokens(text);
                let expected = &bundled.json["routing"][text];
                assert_eq!(tokens.len() as u64, expected["tokens"].as_u64().unwrap(), "{text}");
                let texts = [tokens];
                let counts =
                    calibrate::run(&bundled.model, &mut executor, &texts, Cut::default(), &mut |_, _| {
                        ControlFlow::Continue(())
                    });
                let counts = counts.unwrap();
                let (mut moved, mut all) = (0, 0);
                for (layer, expected) in
                    expected[bundled.quantisation][judge.column].as_array().unwrap().iter().enumerate()
                {
                    let [chosen, judged] =
                        [&counts.calibration, &counts.held_out].map(|block| &block.layers[layer].calls);
                    for ((a, b), expected) in chosen.iter().zip(judged).zip(ids(expected)) {
                        moved += (a + b).abs_diff(u64::from(expected));
                        all += a + b;
                    }
                }
                // A choice that goes to another expert is missing in one count and too much in another.
                let share = moved as f64 / 2.0 / all as f64;
                assert!(share < judge.choices, "{} {} {text}: {share}", bundled.quantisation, judge.column);
            }
        }
    }
}

/// The held-out texts.
const TEXTS: [&str; 4] = ["prose", "spanish", "arithmetic", "code"];

/// Perplexity of one held-out text by each judge's arithmetic.
fn check_perplexity(bundled: &Bundled, judge: &Judge, domain: &str) {
    let text = format!("heldout-{domain}.txt");
    let name = format!("{} {} {text}", bundled.quantisation, judge.column);
    let expected = &bundled.json["perplexity"][&text];
    let tokens = bundled.tokens(&text);
    assert_eq!(tokens.len() as u64, expected["tokens"].as_u64().unwrap(), "{name}");
    let mut executor = executor(&bundled.file, &bundled.model, judge.mode);
    let ours =
        perplexity(&bundled.model, &mut executor, CacheType::F32, &tokens, 512, &mut |_, _| {}).unwrap();
    assert_eq!(ours.n_windows as u64, expected["chunks"].as_u64().unwrap(), "{name}");
    let theirs = expected[bundled.quantisation][judge.column]["ppl"].as_f64().unwrap();
    let far = (ours.value() / theirs - 1.0).abs();
    println!("{name}: {:.5}, theirs {theirs}, {:.4} % apart", ours.value(), 100.0 * far);
    assert!(far < judge.perplexity, "{name}: {far}");
}

// The fast arithmetic's perplexities are held to the same figures where the partition is: tests/run.rs.
#[test]
fn q8_0_predicts_unseen_text_as_well_as_the_reference() {
    let [q8_0, _] = Bundled::both();
    TEXTS.iter().for_each(|text| check_perplexity(&q8_0, &EXACT, text));
}

#[test]
fn q4_k_m_predicts_unseen_text_as_well_as_the_reference() {
    let [_, q4_k_m] = Bundled::both();
    TEXTS.iter().for_each(|text| check_perplexity(&q4_k_m, &EXACT, text));
}
