//! The calibration pass: the order in which it reads the weights, and the text that it reads.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use assert_cmd::Command;
use orkpack::calibrate::{self, CountingExecutor, Counts, Cut, Statistics, n_groups};
use orkpack::chat::{ChatTemplate, Message};
use orkpack::executor::Executor;
use orkpack::executor::cpu::KernelMode;
use orkpack::gguf::GgufFile;
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::tensor::{Dtype, TensorSource};
use orkpack::tokenizer::{Special, Tokenizer};

use crate::support::fixture;
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, text, tiny_moe};
use crate::support::memory_source::MemorySource;
use crate::support::models::{folder, model_in};
use crate::support::recorder::Recorder;
use crate::support::reference::{bundled, executor};

const CUT: Cut = Cut { window: 24, held_out_every: 3, group: 60 };

/// Texts of odd lengths, so that windows and groups end early.
fn texts(model: &Model) -> Vec<Vec<u32>> {
    let text = |n: u32| (0..n).map(|i| (i * i * 7 + n) % model.n_vocab() as u32).collect();
    [70, 5, 24, 48, 1].map(text).to_vec()
}

/// The obvious order: one window after the other, each through the whole model.
fn window_by_window(model: &Model, executor: &mut dyn Executor, texts: &[Vec<u32>]) -> Counts {
    let mut counting = CountingExecutor::new(executor, &model.shape());
    let windows: Vec<&[u32]> = texts.iter().flat_map(|text| text.chunks(CUT.window)).collect();
    for (i, window) in windows.iter().enumerate() {
        counting.hold_out_from(if i % 3 == 2 { 0 } else { window.len() });
        let mut state = State::new(model, CUT.window);
        forward(model, &mut counting, &mut state, window, Wanted::None, &mut Vec::new()).unwrap();
        counting.end_window(window.len()).unwrap();
    }
    counting.into_counts()
}

#[test]
fn layer_by_layer_counts_to_the_bit_what_window_by_window_counts() {
    let mut families = Vec::new();
    for reference in bundled() {
        let (model, texts) = (&reference.model, texts(&reference.model));
        let mut cpu = executor(&reference.file, model, KernelMode::Fast);
        let expected = window_by_window(model, &mut cpu, &texts);
        for group in [1, 60, 1000] {
            let cut = Cut { group, ..CUT };
            let counts =
                calibrate::run(model, &mut cpu, &texts, cut, &mut |_, _| ControlFlow::Continue(())).unwrap();
            // Router weights are in it, in millionths, and rows per expert at every batch.
            assert_eq!(counts, expected, "{}, groups of {group}", reference.name());
        }
        families.push(model.architecture().to_owned());
    }
    families.sort();
    families.dedup();
    assert_eq!(families.join(", "), Model::supported(), "every family that runs");
}

#[test]
fn all_windows_of_a_group_pass_a_layer_before_any_goes_on() {
    let all = bundled();
    let reference = all.iter().find(|reference| reference.model.n_layer() > 1).unwrap();
    let (model, texts) = (&reference.model, texts(&reference.model));
    let mut cpu = executor(&reference.file, model, KernelMode::Fast);
    let mut recorder = Recorder::new(&mut cpu);
    calibrate::run(model, &mut recorder, &texts, CUT, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mut reads: Vec<u32> = recorder.seen.iter().map(|(layer, _)| layer.0).collect();
    reads.dedup();
    // 24, 24, 22 | 5, 24, 24, 24 | 1: each group reads each layer once.
    assert_eq!(n_groups(&texts, CUT), 3);
    let layers: Vec<u32> = model.shape().moe_layers.iter().map(|moe| moe.layer.0).collect();
    assert_eq!(reads, layers.repeat(3));
    assert_eq!(n_groups(&texts, Cut::default()), 1);
}

// ---------------------------------------------------------------------------------------------- as typed

/// Exit code, stdout and stderr of `orkpack`.
fn orkpack(folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orkpack"));
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    let words = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), words(output.stdout), words(output.stderr))
}

fn statistics(path: &Path) -> Statistics {
    Statistics::from_json(&fs::read(path).unwrap()).unwrap()
}

/// All tokens that were counted, and those of a text.
fn n_tokens(statistics: &Statistics) -> u64 {
    statistics.calibration.tokens + statistics.held_out.as_ref().map_or(0, |block| block.tokens)
}

#[test]
fn conversations_are_read_through_the_models_own_template() {
    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}";
    let folder = folder();
    let mut source = MemorySource::copy(&GgufFile::from_bytes("m", tiny_moe(&MoeSpec::default())).unwrap());
    model_in(folder.path(), &source.to_gguf());
    source.set("tokenizer.chat_template", text(TEMPLATE));
    fs::write(folder.path().join("talks.gguf"), source.to_gguf()).unwrap();
    fs::write(
        folder.path().join("chat.txt"),
        "\u{feff}{\"messages\": [{\"role\": \"user\", \"content\": \"the table of seven\"}, {\"role\": \"assistant\", \
         \"content\": \"7 and 14\"}]}\r\n\r\n{\"conversations\": [{\"from\": \"human\", \"value\": \"more\"}]}\r\n\"and a text\"\r\n",
    )
    .unwrap();
    let tokenizer = Tokenizer::from_metadata(source.metadata()).unwrap();
    let plain = |text: &str| tokenizer.encode(text, Special::Plain).unwrap().len() as u64;
    let template = ChatTemplate::from_metadata(source.metadata()).unwrap().unwrap();
    let told = |turns: &[(&str, &str)]| {
        let message = |&(role, said): &(&str, &str)| Message { role: role.into(), content: said.into() };
        let messages: Vec<Message> = turns.iter().map(message).collect();
        plain(&template.render(&messages, false).unwrap().text)
    };
    for (model, expected, note) in [
        (
            "talks.gguf",
            told(&[("user", "the table of seven"), ("assistant", "7 and 14")]) + told(&[("user", "more")]),
            None,
        ),
        (
            "model.gguf",
            plain("the table of seven\n7 and 14") + plain("more"),
            Some(
                "note: 2 conversations are read as plain text, their messages one after the other: the model has no",
            ),
        ),
    ] {
        let words = ["calibrate", model, "--prompts", "chat.txt", "-o", "routing.json", "--force"];
        let (code, _, said) = orkpack(folder.path(), &words);
        assert_eq!(code, 0, "{said}");
        assert_eq!(
            n_tokens(&statistics(&folder.path().join("routing.json"))),
            expected + plain("and a text")
        );
        assert_eq!(note.is_some(), said.contains("note:"), "{said}");
        assert!(note.is_none_or(|note| said.contains(note)), "{said}");
        assert!(said.contains("tokens; the model's ") && said.contains(" are read once"), "{said}");
    }
    // A template that refuses what it is given.
    source.set("tokenizer.chat_template", text("{{ raise_exception('no system') }}"));
    fs::write(folder.path().join("talks.gguf"), source.to_gguf()).unwrap();
    let words = ["calibrate", "talks.gguf", "--prompts", "chat.txt", "-o", "routing.json", "--force"];
    let (code, _, said) = orkpack(folder.path(), &words);
    assert!(
        code == 0 && said.contains("chat.txt:1: the chat template refuses these messages: no system"),
        "{said}"
    );
}

#[test]
fn a_bad_line_of_prompts_is_named_and_nothing_is_written() {
    let folder = folder();
    model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    fs::write(folder.path().join("p.jsonl"), "\"fine\"\n{\"text\": \"half").unwrap();
    let (code, _, said) = orkpack(folder.path(), &["calibrate", "model.gguf", "--prompts", "p.jsonl"]);
    assert_eq!(code, 2);
    assert!(said.starts_with("error: p.jsonl:2: it ends too early, column 14"), "{said}");
    assert!(!folder.path().join("model.routing.json").exists());
}

#[test]
fn case_d7_too_short_a_text_is_a_warning_with_numbers() {
    let folder = folder();
    fs::copy(fixture("models/tiny-moe-q4_k_m.gguf"), folder.path().join("model.gguf")).unwrap();
    fs::copy(fixture("corpora/mixed.txt"), folder.path().join("long.txt")).unwrap();
    fs::write(folder.path().join("short.txt"), "one").unwrap();
    let calibrate = |prompts: &str| {
        let words = ["calibrate", "model.gguf", "--prompts", prompts, "-o", "routing.json", "--force"];
        let (code, out, said) = orkpack(folder.path(), &words);
        assert_eq!(code, 0, "{said}");
        (statistics(&folder.path().join("routing.json")).coverage(), out)
    };
    let (coverage, said) = calibrate("short.txt");
    let share = format!("warning: {:.1} % of the experts were never seen", 100.0 * coverage.unseen_share());
    let wanted = format!("note: too few tokens to rank every expert; {} give each", coverage.tokens_wanted);
    assert!(coverage.is_thin() && said.contains(&share) && said.contains(&wanted), "{said}");
    let (coverage, said) = calibrate("long.txt");
    assert!(!coverage.is_thin() && coverage.unseen_share() < 0.1, "{coverage:?}");
    assert!(!said.contains("warning") && !said.contains("too few"), "{said}");
}

#[test]
fn case_d10_an_imatrix_of_another_model_is_refused_by_its_shape() {
    let folder = folder();
    model_in(folder.path(), &tiny_moe(&MoeSpec { n_expert: 16, ..MoeSpec::default() }));
    let counts: Vec<u8> = [3.0f32; 64].iter().flat_map(|count| count.to_le_bytes()).collect();
    let other = GgufBuilder::new().kv("general.type", text("imatrix"));
    let other = other.tensor("blk.0.ffn_gate_exps.weight.counts", Dtype::F32, &[1, 64], counts);
    fs::write(folder.path().join("other.gguf"), other.build()).unwrap();
    fs::write(folder.path().join("old.dat"), b"\x01\0\0\0\x05\0\0\0blk.0").unwrap();
    for (file, expected) in [
        (
            "other.gguf",
            "other.gguf: imatrix: tensor `blk.0.ffn_gate_exps.weight.counts` has 64 counts, expected one",
        ),
        ("old.dat", "old.dat: an imatrix of the old `.dat` form, which has one number of calls"),
        ("model.gguf", "model.gguf: not an imatrix: metadata key `general.type`"),
    ] {
        let (code, _, said) = orkpack(folder.path(), &["plan", "model.gguf", "--imatrix", file]);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn case_d11_documents_from_other_systems_are_merged_and_half_a_line_is_named() {
    let folder = folder();
    let path = folder.path();
    model_in(path, &tiny_moe(&MoeSpec::default()));
    fs::write(path.join("p.txt"), "A text of a few words, counted twice over to have numbers.".repeat(9))
        .unwrap();
    let words = ["calibrate", "model.gguf", "--prompts", "p.txt", "-o", "a.json"];
    assert_eq!(orkpack(path, &words).0, 0);
    let a = fs::read_to_string(path.join("a.json")).unwrap();
    let crlf = a.replace(",\"calibration\"", ",\r\n\"calibration\"").replace('\n', "\r\n");
    fs::write(path.join("marked.json"), format!("\u{feff}{a}")).unwrap();
    fs::write(path.join("crlf.json"), crlf.replace("\r\r", "\r")).unwrap();
    let merged = orkpack(path, &["merge", "a.json", "marked.json", "crlf.json", "-o", "c.json"]);
    assert_eq!(merged.0, 0, "{}", merged.2);
    let (one, three) = (statistics(&path.join("a.json")), statistics(&path.join("c.json")));
    assert_eq!(three.calibration.tokens, 3 * one.calibration.tokens);
    let half = &crlf[..crlf.len() - 40];
    fs::write(path.join("half.json"), half).unwrap();
    let (code, _, said) = orkpack(path, &["merge", "a.json", "half.json", "-o", "d.json"]);
    assert_eq!(code, 2);
    assert!(
        said.contains("half.json: routing statistics: EOF while parsing") && said.contains("line 2"),
        "{said}"
    );
    assert!(!path.join("d.json").exists());
}
