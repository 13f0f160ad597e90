//! Guessing ahead from text that repeats itself: nobody can tell from what comes out.

use std::fs;

use assert_cmd::Command;
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{State, Wanted, forward, forward_tentative, keep_first};
use orkpack::plan::Objective;
use orkpack::runtime::{DeviceChoice, Lookup, Options, Runtime, Session};
use orkpack::sample::{SampleOptions, Sampler};
use orkpack::tokenizer::Special;
use serde_json::Value;

use crate::support::fixture;
use crate::support::models::{bundled_in, convert, folder, hits, request, runtime};
use crate::support::reference::{Reference, bundled, executor};
use crate::support::schema;

const TABLE: &str = "Table of 7\n7 x 1 = 7\n7 x 2 =";

fn open(reference: &Reference) -> Runtime {
    Runtime::open(&reference.path, Options { threads: Some(1), ..Options::default() }).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn eight_bit() -> impl Iterator<Item = Reference> {
    bundled().into_iter().filter(|reference| reference.dtype() == "Q8_0")
}

/// A text that repeats itself, with a slip in every second round.
fn text() -> Vec<u32> {
    let slip = |i: u32| if i % 18 == 13 { 200 + i / 18 } else { 11 + 5 * (i % 9) };
    (0..72).map(slip).collect()
}

#[test]
fn a_call_is_taken_back_in_part_to_the_bit() {
    let (old, new) = (&text()[..17], [9, 4, 7]);
    for reference in eight_bit() {
        let (model, name) = (&reference.model, reference.name());
        let mut executor = executor(&reference.file, model, KernelMode::Fast);
        let mut straight = Vec::new();
        for n in 0..=9 {
            let mut out = Vec::new();
            let mut state = State::new(model, 64);
            forward(model, &mut executor, &mut state, &old[..8 + n], Wanted::None, &mut out).unwrap();
            forward(model, &mut executor, &mut state, &new, Wanted::All, &mut out).unwrap();
            straight.push(bits(&out));
        }
        let start = |executor: &mut CpuExecutor| {
            let (mut state, mut out) = (State::new(model, 64), Vec::new());
            forward(model, executor, &mut state, &old[..8], Wanted::None, &mut out).unwrap();
            // Nothing is tentative yet.
            keep_first(model, executor, &mut state, 3);
            assert_eq!(state.position(), 8, "{name}");
            forward_tentative(model, executor, &mut state, &old[8..], &mut out).unwrap();
            assert_eq!(out.len(), 9 * model.n_vocab(), "{name}");
            state
        };
        for (n, straight) in straight.iter().enumerate() {
            let (mut state, mut out) = (start(&mut executor), Vec::new());
            keep_first(model, &mut executor, &mut state, n);
            // What is decided is decided.
            keep_first(model, &mut executor, &mut state, 0);
            assert_eq!(state.position(), 8 + n, "{name}");
            forward(model, &mut executor, &mut state, &new, Wanted::All, &mut out).unwrap();
            assert!(bits(&out) == *straight, "{name}: {n} rows");
        }
        let decisions: [fn(&mut State); 2] = [State::checkpoint, |state| {
            state.checkpoint();
            assert_eq!(state.back_to(17), 17);
        }];
        for decide in decisions {
            let mut state = start(&mut executor);
            decide(&mut state);
            keep_first(model, &mut executor, &mut state, 2);
            assert_eq!(state.position(), 17, "{name}");
        }
        // A call that fails leaves nothing to take back.
        let (mut state, mut out) = (start(&mut executor), Vec::new());
        let too_many = [1; 64];
        assert!(forward_tentative(model, &mut executor, &mut state, &too_many, &mut out).is_err());
        keep_first(model, &mut executor, &mut state, 1);
        assert_eq!(state.position(), 17, "{name}");
    }
}

/// The logits after every token of the text, behind a prompt of its first ones, and after a turn that departs from it.
fn told(runtime: &Runtime, most: usize) -> (Vec<Vec<u32>>, Option<Lookup>) {
    let text = text();
    // The last guesses have no room.
    let mut session = Session::new(runtime, runtime.reference().unwrap(), text.len(), 5);
    session.look_ahead(most);
    let mut all = Vec::new();
    session.turn(&text[..20], 15).unwrap();
    all.push(bits(session.logits()));
    for (i, token) in text.iter().enumerate().skip(20) {
        all.push(bits(session.step(*token).unwrap()));
        assert_eq!((session.position(), session.seen()), (i + 1, &text[..=i]));
        assert!(bits(session.logits()) == all[all.len() - 1]);
    }
    assert_eq!(session.decode().tokens, 52);
    assert!(session.step(1).is_err(), "the context is full");

    let other = [&text[..60], &[3, 1, 2]].concat();
    let reading = session.turn(&other, 50).unwrap();
    all.push(vec![reading.reused as u32, reading.computed as u32]);
    all.push(bits(session.logits()));
    // In the middle of a guess the sequence is told on, read on, and forgotten.
    let repeated = [21, 22, 23, 24, 21, 22, 23];
    session.clear();
    session.prompt(&repeated[..6]).unwrap();
    all.push(bits(session.step(repeated[6]).unwrap()));
    all.push(bits(session.prompt(&[5, 6]).unwrap()));
    for token in &repeated[..3] {
        all.push(bits(session.step(*token).unwrap()));
    }
    session.turn(&[&repeated[..], &[5, 8]].concat(), 8).unwrap();
    all.push(bits(session.logits()));
    session.clear();
    assert_eq!(session.position(), 0);
    all.push(bits(session.prompt(&repeated).unwrap()));
    (all, session.lookup())
}

#[test]
fn every_family_gives_the_same_logits_with_and_without_guesses() {
    for reference in eight_bit() {
        let (runtime, name) = (open(&reference), reference.name());
        let (plain, nothing) = told(&runtime, 0);
        assert_eq!(nothing, None);
        for most in [1, 3, 8] {
            let (guessing, lookup) = told(&runtime, most);
            let lookup = lookup.unwrap();
            assert!(guessing == plain, "{name}: {most} ahead");
            assert!(lookup.accepted > 10 && lookup.accepted < lookup.drafted, "{name}: {lookup:?}");
            assert!(
                lookup.batches > 0 && lookup.drafted <= lookup.batches * most as u64,
                "{name}: {lookup:?}"
            );
        }
    }
}

/// Tokens that a sampler chooses behind a prompt, the logits that it chose from, and where it stands then.
fn chosen(session: &mut Session<'_>, prompt: &[u32], temp: f32, n: usize) -> (Vec<u32>, Vec<Vec<u32>>, u64) {
    let options = SampleOptions { temp, seed: 11, ..SampleOptions::default() };
    let mut sampler = Sampler::new(options).unwrap();
    session.prompt(prompt).unwrap();
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let next = sampler.next(session.logits()).unwrap();
        tokens.push(next);
        logits.push(bits(session.step(next).unwrap()));
    }
    (tokens, logits, sampler.state())
}

#[test]
fn greedy_or_drawn_the_tokens_are_the_same() {
    for reference in eight_bit() {
        let (runtime, name) = (open(&reference), reference.name());
        let prompt = text();
        for temp in [0.0, 0.02, 0.8] {
            let run = |most| {
                let mut session = Session::new(&runtime, runtime.reference().unwrap(), 160, 64);
                session.look_ahead(most);
                (chosen(&mut session, &prompt, temp, 80), session.lookup())
            };
            let (plain, (guessing, lookup)) = (run(0).0, run(5));
            assert!(guessing == plain, "{name} at {temp}: {lookup:?}");
        }
    }
}

#[test]
fn on_a_device_guesses_are_computed_as_single_tokens_are() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q8_0.gguf");
    // Everything is hot at any number of rows; then nothing at one token, and some at a long prompt.
    for (name, objective, n_rounds) in [("hits", Objective::Hits, 1), ("prefill", Objective::Prefill, 27)] {
        let mut request = request(&model, hits(1 << 30));
        request.choice.objective = objective;
        request.output = folder.path().join(format!("{name}.orkpack"));
        let pack = convert(request).unwrap().1.output;
        for device in [DeviceChoice::Sim, DeviceChoice::Cpu] {
            let runtime = runtime(&pack, device, 2);
            let prompt = runtime.tokenizer().unwrap().encode(TABLE, Special::Plain).unwrap().repeat(n_rounds);
            let run = |most| {
                let mut session = Session::new(&runtime, runtime.engine().unwrap(), 640, 64);
                session.look_ahead(most);
                let chosen = chosen(&mut session, &prompt, 0.0, 60);
                (chosen, session.engine().counters().unwrap(), session.lookup())
            };
            let ((plain, alone, _), (guessing, together, lookup)) = (run(0), run(6));
            let lookup = lookup.unwrap();
            assert!(guessing == plain, "{name} {device:?}");
            assert!(lookup.accepted > 0, "{name} {device:?}: {lookup:?}");
            for counters in [&alone, &together] {
                let calls = counters.decode;
                let expected = if objective == Objective::Hits { calls.all } else { 0 };
                assert_eq!(calls.hot_gate_up, expected, "{name} {device:?}");
                assert!(counters.prefill.hot_gate_up > 0, "{name} {device:?}: the cuts are apart");
            }
            // Three experts in three layers for every token, and for every guess that went wrong.
            let wrong = lookup.drafted - lookup.accepted;
            assert_eq!((alone.decode.all, together.decode.all), (60 * 9, (60 + wrong) * 9));
        }
    }
}

/// What a run prints, and its document.
fn run(words: &[&str], stdin: &str) -> (String, Value) {
    let model = fixture("models/tiny-moe-q4_k_m.gguf");
    let output = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_ork-run"))
            .arg(&model)
            .args(words)
            .args(more)
            .write_stdin(stdin)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let document: Value = serde_json::from_slice(&output(&["--json"]).stdout).unwrap();
    schema::check(&schema::load("run.schema.json"), &document).unwrap();
    let output = output(&[]);
    if let Some(lookup) = document["lookup"].as_object() {
        let [accepted, drafted] = ["accepted", "drafted"].map(|count| lookup[count].as_u64().unwrap());
        let line = format!("lookup: {accepted} of {drafted} guessed tokens came to be, in ");
        assert!(String::from_utf8_lossy(&output.stderr).contains(&line));
    }
    (String::from_utf8(output.stdout).unwrap(), document)
}

#[test]
fn ork_run_says_the_same_and_counts_the_guesses() {
    for words in [
        &["--temp", "0"][..],
        &["--temp", "0.7", "--seed", "3"],
        &["--temp", "0", "--compare"],
        // As many as fit.
        &["--temp", "0", "-c", "40"],
    ] {
        let words = [&["-p", TABLE, "-n", "50", "--raw"], words].concat();
        let (plain, without) = run(&words, "");
        assert_eq!(without["lookup"], Value::Null);
        for most in ["1", "7"] {
            let (guessing, with) = run(&[&words[..], &["--lookup", most]].concat(), "");
            assert_eq!(guessing, plain, "{words:?}");
            for same in ["tokens", "turns", "comparison"] {
                assert_eq!(with[same], without[same], "{words:?}");
            }
            assert_eq!(with["decode"]["tokens"], without["decode"]["tokens"], "{words:?}");
            let [batches, drafted, accepted] =
                ["batches", "drafted", "accepted"].map(|count| with["lookup"][count].as_u64().unwrap());
            assert!(
                0 < accepted && accepted <= drafted && batches <= drafted,
                "{words:?}: {}",
                with["lookup"]
            );
        }
    }
}

#[test]
fn a_conversation_and_its_file_are_the_same() {
    let folder = folder();
    let kept = |name: &str, more: &[&str]| {
        let path = folder.path().join(name);
        let file = path.to_str().unwrap();
        let run = |turns: &str| {
            let output = Command::new(env!("CARGO_BIN_EXE_ork-run"))
                .arg(fixture("models/tiny-moe-q4_k_m.gguf"))
                .args(["--turns", "--raw", "-n", "24", "--temp", "0.6", "--seed", "5"])
                .args(more)
                .args(["--session", file])
                .write_stdin(turns)
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        (run("7 x 1 = 7\n7 x 2 =\n"), run("7 x 1 = 7\n"), fs::read(&path).unwrap())
    };
    assert!(kept("plain.json", &[]) == kept("guessing.json", &["--lookup", "6"]));
}
