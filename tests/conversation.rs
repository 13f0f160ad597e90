//! Conversations: what the turns have in common is computed once, and nobody can tell from the logits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use orkpack::chat::ChatTemplate;
use orkpack::executor::cpu::KernelMode;
use orkpack::model::{State, Wanted, forward};
use orkpack::runtime::{Dialogue, Options, Reading, Runtime, Session};
use orkpack::tensor::{Metadata, Value};
use orkpack::tokenizer::{Special, Tokenizer};

use crate::support::fixture;
use crate::support::reference::{Reference, executor};

/// A family, and whether its layers all keep every position.
const FAMILIES: [(&str, bool); 5] =
    [("qwen3moe", true), ("deepseek2", true), ("lfm2moe", false), ("qwen35moe", false), ("qwen3next", false)];

fn open(family: &str) -> Runtime {
    let path = fixture(&format!("models/reference/tiny-{family}-q8_0.gguf"));
    Runtime::open(&path, Options { threads: Some(1), ..Options::default() }).unwrap()
}

fn session(runtime: &Runtime) -> Session<'_> {
    Session::new(runtime, runtime.reference().unwrap(), 64, 5)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// The logits after `tokens` in a sequence that saw nothing else.
fn fresh(runtime: &Runtime, tokens: &[u32]) -> Vec<u32> {
    bits(session(runtime).prompt(tokens).unwrap())
}

/// `n` tokens that depend on `salt`.
fn tokens(salt: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (salt + 1) * (7 * i + 11) % 250).collect()
}

#[test]
fn a_state_goes_back_to_the_bit() {
    for (family, cuts) in FAMILIES {
        let reference = Reference::open(&fixture(&format!("models/reference/tiny-{family}-q8_0.gguf")));
        let model = &reference.model;
        let mut executor = executor(&reference.file, model, KernelMode::Fast);
        let mut run = |state: &mut State, tokens: &[u32]| {
            let mut out = Vec::new();
            forward(model, &mut executor, state, tokens, Wanted::All, &mut out).unwrap();
            bits(&out)
        };
        let (old, new) = (tokens(0, 30), tokens(1, 9));
        // Where it stood, where it is asked to go, where it can go on: of a model that cuts, and of another one.
        for (asked, cut, copied) in [
            (30, 30, 30),
            (40, 30, 30),
            (29, 29, 22),
            (22, 22, 22),
            (21, 21, 9),
            (9, 9, 9),
            (8, 8, 0),
            (0, 0, 0),
        ] {
            let mut state = State::new(model, 64);
            for part in [&old[..9], &old[9..22], &old[22..]] {
                state.checkpoint();
                run(&mut state, part);
            }
            let there = if cuts { cut } else { copied };
            assert_eq!(state.back_to(asked), there, "{family}: back to {asked}");
            assert_eq!(state.position(), there);
            let again = run(&mut state, &new);
            let mut straight = State::new(model, 64);
            if there > 0 {
                run(&mut straight, &old[..there]);
            }
            assert!(again == run(&mut straight, &new), "{family}: back to {asked}");
        }
    }
}

#[test]
fn the_last_checkpoints_are_kept() {
    for (family, cuts) in FAMILIES {
        let runtime = open(family);
        let mut state = State::new(runtime.model(), 64);
        let mut engine = runtime.reference().unwrap();
        for token in tokens(0, 12) {
            let mut out = Vec::new();
            forward(runtime.model(), engine.executor(), &mut state, &[token], Wanted::None, &mut out)
                .unwrap();
            state.checkpoint();
            state.checkpoint();
        }
        // Of twelve the last four, at 9 to 12.
        assert_eq!(state.clone().back_to(9), 9, "{family}");
        assert_eq!(state.clone().back_to(8), if cuts { 8 } else { 0 }, "{family}");
        state.clear();
        assert_eq!(state.back_to(9), 0, "{family}");
    }
}

/// Three turns: each prompt is what was there, the answer, and something new.
#[test]
fn turns_compute_what_is_new() {
    for (family, cuts) in FAMILIES {
        let runtime = open(family);
        let mut session = session(&runtime);
        let first = tokens(0, 14);
        let read = session.turn(&first, 12).unwrap();
        assert_eq!(read, Reading { reused: 0, computed: 14 }, "{family}");
        assert!(bits(session.logits()) == fresh(&runtime, &first), "{family}");
        let answer = [3, 1, 4];
        for token in answer {
            session.step(token).unwrap();
        }

        // The answer stays as it was: only what follows is new.
        let second = [&first[..], &answer, &tokens(2, 8)].concat();
        let read = session.turn(&second, 23).unwrap();
        assert_eq!(read, Reading { reused: 17, computed: 8 }, "{family}");
        assert!(bits(session.logits()) == fresh(&runtime, &second), "{family}");
        session.step(9).unwrap();

        // The second turn is told another way from within the border on: that is gone back to, or the one before.
        let third = [&second[..24], &tokens(3, 6)].concat();
        let read = session.turn(&third, 30).unwrap();
        assert_eq!(read.reused, if cuts { 24 } else { 23 }, "{family}");
        assert!(bits(session.logits()) == fresh(&runtime, &third), "{family}");
        let fourth = [&second[..16], &tokens(4, 6)].concat();
        let read = session.turn(&fourth, 22).unwrap();
        assert_eq!(read.reused, if cuts { 16 } else { 12 }, "{family}");
        assert!(bits(session.logits()) == fresh(&runtime, &fourth), "{family}");

        // Nothing is new: the last token gives the logits, from wherever it can be had.
        let read = session.turn(&fourth, 22).unwrap();
        assert_eq!(read.reused, if cuts { 21 } else { 12 }, "{family}");
        assert!(bits(session.logits()) == fresh(&runtime, &fourth), "{family}");
        assert_eq!(session.seen(), fourth, "{family}");
        let computed = 14 + 8 + (30 - if cuts { 24 } else { 23 }) + (22 - if cuts { 16 } else { 12 });
        assert_eq!(session.prefill().tokens, computed + if cuts { 1 } else { 10 }, "{family}");
    }
}

#[test]
fn a_turn_that_does_not_fit_or_is_interrupted_harms_nothing() {
    let runtime = open("qwen35moe");
    let mut session = session(&runtime);
    let first = tokens(0, 20);
    session.turn(&first, 18).unwrap();
    let error = session.turn(&tokens(5, 65), 65).unwrap_err();
    assert!(error.to_string().ends_with("65 tokens after position 0 do not fit a context of 64"), "{error}");
    let error = session.prompt(&tokens(5, 45)).unwrap_err();
    assert!(error.to_string().ends_with("45 tokens after position 20 do not fit a context of 64"), "{error}");
    assert_eq!((session.position(), session.seen()), (20, &first[..]), "nothing was computed");

    session.watch(Arc::new(AtomicBool::new(true)));
    let error = session.turn(&tokens(6, 30), 28).unwrap_err();
    assert_eq!(error.exit_code(), 130);
    session.watch(Arc::default());
    assert_eq!(session.seen().len(), session.position());
    session.turn(&first, 18).unwrap();
    assert!(bits(session.logits()) == fresh(&runtime, &first));
}

#[test]
fn what_layers_remember_is_counted() {
    // Three convolutions of three taps over 64; three delta nets with a tail of three times 4 · 16 values and
    // 2 · 2 · 16 queries and keys, and 4 states of 16 · 16. In f32, before a call and after it.
    let (lfm2moe, qwen35moe) = (3 * 2 * 64 * 4 * 2, 3 * (3 * 128 + 4 * 16 * 16) * 4 * 2);
    for (family, bytes) in [("qwen3moe", 0), ("deepseek2", 0), ("lfm2moe", lfm2moe), ("qwen35moe", qwen35moe)]
    {
        assert_eq!(open(family).model().shape().state_bytes, bytes, "{family}");
    }
}

/// The bundled model's metadata, with a control token that no table of ends knows, and whether BOS comes first.
fn metadata(adds_bos: bool) -> Metadata {
    let path = fixture("models/tiny-moe-q8_0.gguf");
    let mut metadata = Runtime::open(&path, Options::default()).unwrap().source().metadata().clone();
    for (key, value) in [("tokens", Value::String("<|over|>".into())), ("token_type", Value::I32(3))] {
        let Some(Value::Array(values)) = metadata.0.get_mut(&format!("tokenizer.ggml.{key}")) else {
            panic!("{key}")
        };
        values[2047] = value;
    }
    metadata.0.insert("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(adds_bos));
    metadata
}

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' + m.content + '<|over|>' }}\
    {% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}";

#[test]
fn a_dialogue_is_rendered_anew_up_to_its_border() {
    let metadata = metadata(false);
    let tokenizer = || Tokenizer::from_metadata(&metadata).unwrap();
    let ids = |text: &str| tokenizer().encode(text, Special::Parse).unwrap();
    let template = |source| Some(ChatTemplate::new(source, &metadata).unwrap());
    let mut dialogue = Dialogue::new(tokenizer(), template(TEMPLATE), Special::Plain);
    assert!(
        dialogue.is_end(2047) && dialogue.is_end(0) && !dialogue.is_end(5),
        "what the template ends with ends"
    );
    dialogue.set_system("Be kind.".to_owned());
    let turn = dialogue.say("one".to_owned()).unwrap();
    assert_eq!(turn.ids, ids("Be kind.\none\nA:"));
    assert_eq!(turn.border, ids("Be kind.\none\n").len());
    dialogue.answer(" two".to_owned(), &[7, 8]);
    assert_eq!(dialogue.ids(), [turn.ids.as_slice(), &[7, 8]].concat());
    let before = dialogue.ids().to_vec();

    // What is taken back was not said.
    dialogue.say("three".to_owned()).unwrap();
    dialogue.take_back();
    dialogue.take_back();
    assert_eq!((dialogue.messages().len(), dialogue.ids()), (3, &before[..]));
    let turn = dialogue.say("four".to_owned()).unwrap();
    assert_eq!(turn.ids, ids("Be kind.\none\nA: two<|over|>four\nA:"));
    dialogue.clear();
    assert_eq!(dialogue.say("five".to_owned()).unwrap().ids, ids("Be kind.\nfive\nA:"));

    let refusing =
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}";
    let mut dialogue = Dialogue::new(tokenizer(), template(refusing), Special::Plain);
    dialogue.say("one".to_owned()).unwrap();
    dialogue.answer("two".to_owned(), &[7]);
    assert!(dialogue.say("three".to_owned()).is_err());
    assert_eq!((dialogue.messages().len(), dialogue.is_end(2047)), (2, false), "a refused turn was not said");
}

#[test]
fn without_a_template_a_text_goes_on_and_begins_once() {
    let metadata = metadata(true);
    let tokenizer = || Tokenizer::from_metadata(&metadata).unwrap();
    let ids = |text: &str| tokenizer().encode(text, Special::Plain).unwrap();
    assert_eq!(ids("one")[0], 0, "BOS comes first");
    let mut dialogue = Dialogue::new(tokenizer(), None, Special::Plain);
    let turn = dialogue.say("one<|over|>".to_owned()).unwrap();
    assert_eq!((turn.border, &turn.ids), (turn.ids.len(), &ids("one<|over|>")));
    dialogue.answer(" two".to_owned(), &[7, 8]);
    let next = dialogue.say("three".to_owned()).unwrap();
    assert_eq!(next.ids, [&turn.ids[..], &[7, 8], &ids("\nthree")[1..]].concat());
    let mut raw = Dialogue::new(tokenizer(), None, Special::Parse);
    assert!(raw.say("one<|over|>".to_owned()).unwrap().ids.contains(&2047));
}
