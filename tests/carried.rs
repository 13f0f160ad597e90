//! Metadata that this version cannot use, or not yet: carried byte for byte, refused only where it is needed.

use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use orkpack::bytes::{Io, Limits};
use orkpack::gguf::GgufFile;
use orkpack::pack::Pack;
use orkpack::source;
use orkpack::tensor::{TensorSource, Value};
use orkpack::tokenizer::Tokenizer;

use crate::support::fixture;
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, text, tiny_moe_builder};
use crate::support::models::{folder, model_in};

const TEMPLATE: &str = "tokenizer.chat_template";

fn run(binary: &str, folder: &Path, words: &[&str]) -> Output {
    let mut command = match binary {
        "orkpack" => Command::new(env!("CARGO_BIN_EXE_orkpack")),
        _ => Command::new(env!("CARGO_BIN_EXE_ork-run")),
    };
    command.current_dir(folder).args(words).write_stdin("").output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn done(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The one line of an exit 2.
#[track_caller]
fn refused(output: &Output) -> String {
    let line = stderr(output);
    assert_eq!(
        (output.status.code(), line.lines().filter(|l| l.starts_with("error")).count()),
        (Some(2), 1),
        "{line}"
    );
    line
}

fn small() -> GgufBuilder {
    tiny_moe_builder(&MoeSpec { n_layer: 1, n_expert: 4, ..MoeSpec::default() })
}

/// The model with `key` holding `value`, or without the key.
fn set(mut model: GgufBuilder, key: &str, value: Option<Value>) -> GgufBuilder {
    let len = key.len() as u64;
    let is_other = |entry: &Vec<u8>| !entry.starts_with(&[&len.to_le_bytes()[..], key.as_bytes()].concat());
    model.entries.retain(is_other);
    match value {
        Some(value) => model.kv(key, value),
        None => model,
    }
}

/// Converts, and holds the pack's metadata and the GGUF made from it to the source. Gives what was said.
#[track_caller]
fn carried(folder: &Path, bytes: &[u8]) -> String {
    model_in(folder, bytes);
    let prose = fixture("corpora/prose.txt");
    // Over a short text, where the model can be given one.
    let with_text = ["convert", "model.gguf", "--force", "--prompts", prose.to_str().unwrap()];
    let is_known = Tokenizer::near(GgufFile::from_bytes("m", bytes.to_vec()).unwrap().metadata()).is_ok();
    let words = if is_known { &with_text[..] } else { &with_text[..3] };
    let output = run("orkpack", folder, words);
    done(&output);
    let pack = Pack::open(&folder.join("model.orkpack"), Default::default()).unwrap();
    let mut back = Vec::new();
    pack.write_gguf(0, &mut back).unwrap();
    assert!(back == bytes, "the GGUF made again from the pack");
    stderr(&output)
}

#[test]
fn case_j1_the_vocabulary_is_as_long_as_the_embedding() {
    let folder = folder();
    let vocab_size = "qwen3moe.vocab_size";
    carried(folder.path(), &set(small(), vocab_size, None).build());
    let ids = done(&run("ork-run", folder.path(), &["model.orkpack", "--tokens", "1,2", "-n", "3"]));
    assert_eq!(ids.trim().split(',').count(), 3, "{ids}");
    let inspected = done(&run("orkpack", folder.path(), &["inspect", "model.gguf"]));
    assert!(inspected.contains(", 320 tokens"), "{inspected}");
    let tokens: Vec<Value> = (0..300).map(|i| text(&format!("token {i}"))).collect();
    for (key, value, expected) in [
        (vocab_size, Value::U32(32_000), "`qwen3moe.vocab_size` says 32000"),
        ("tokenizer.ggml.tokens", Value::Array(tokens), "`tokenizer.ggml.tokens` says 300"),
    ] {
        model_in(folder.path(), &set(small(), key, Some(value)).build());
        let line = refused(&run("orkpack", folder.path(), &["convert", "model.gguf", "--force"]));
        assert!(line.contains(key) && line.contains("320"), "{expected}: {line}");
    }
}

#[test]
fn case_j2_an_unknown_tokenizer_is_carried_and_runs_on_ids() {
    for (key, value, problem, counted) in [
        ("pre", None, "pre-tokenizer `none`", "with the words of gpt-2"),
        ("pre", Some("default"), "pre-tokenizer `default`", "with the words of gpt-2"),
        ("pre", Some("no-such-rule"), "pre-tokenizer `no-such-rule`", "with the words of gpt-2"),
        ("model", Some("bert"), "tokenizer model `bert`", "over ids from all of the vocabulary"),
    ] {
        let folder = folder();
        let bytes = set(small(), &format!("tokenizer.ggml.{key}"), value.map(text)).build();
        let said = carried(folder.path(), &bytes);
        let warnings: Vec<&str> = said.lines().filter(|line| line.starts_with("note: ")).collect();
        assert_eq!(warnings.len(), 1, "{said}");
        assert!(warnings[0].contains(problem) && warnings[0].contains(counted), "{said}");
        // What was counted is there now: nothing is counted, and the line says so.
        let again = stderr(&run("orkpack", folder.path(), &["convert", "model.gguf", "--force"]));
        assert_eq!(again.matches(problem).count(), 1, "{again}");
        assert!(again.contains("the pack carries it as it is"), "{again}");

        let ids = ["model.orkpack", "--tokens", "1,2", "-n", "3"];
        assert_eq!(done(&run("ork-run", folder.path(), &ids)).trim().split(',').count(), 3);
        for words in [&["-p", "Hello"][..], &["-p", "Hello", "--raw"]] {
            let line = refused(&run("ork-run", folder.path(), &[&["model.orkpack"], words].concat()));
            assert!(line.contains(problem) && line.contains("--tokens"), "{line}");
        }
    }
}

#[test]
fn case_j4_a_template_that_fails_is_kept_and_fails_only_a_chat() {
    let big = format!("{{# {} #}}{{{{ messages[0].content }}}}", "x".repeat(1 << 20));
    let named = "tokenizer.chat_template.tool_use";
    let names = Value::Array(vec![text("tool_use")]);
    for (template, problem) in [
        (Some(Value::String(b"{% generation %}".to_vec())), Some("the chat template is not valid, line 1")),
        (Some(text("{{ raise_exception('Not you') }}")), Some("refuses these messages: Not you")),
        (Some(Value::String(b"\xff{{ messages }}".to_vec())), Some(TEMPLATE)),
        (Some(text(&big)), None),
        // Only a named one: no template is made up, and this one is not taken for it.
        (None, None),
    ] {
        let folder = folder();
        let model = set(small(), TEMPLATE, template).kv(named, text("{% no such tag %}"));
        carried(folder.path(), &model.kv("tokenizer.chat_templates", names.clone()).build());
        let ask = |words: &[&str]| {
            run("ork-run", folder.path(), &[&["model.orkpack", "-p", "Hi", "-n", "2"], words].concat())
        };
        match problem {
            Some(problem) => {
                let line = refused(&ask(&[]));
                assert!(line.contains(problem), "{line}");
            }
            None => drop(done(&ask(&[]))),
        }
        done(&ask(&["--raw"]));
    }
}

#[test]
fn case_j6_a_template_is_the_same_bytes_after_converting() {
    for template in
        ["a\r\n{{ messages[0].content }}\r\n", "{{ 'x' }}\0", "🚀 {{ messages[0].role }} 東京\u{301}"]
    {
        let folder = folder();
        carried(folder.path(), &set(small(), TEMPLATE, Some(text(template))).build());
        let pack = folder.path().join("model.orkpack");
        let opened = source::open(&pack, Io::Map, &Limits::default()).unwrap();
        assert_eq!(opened.source().metadata().get(TEMPLATE), Some(&text(template)));
        done(&run("ork-run", folder.path(), &["model.orkpack", "-p", "Hi", "-n", "1"]));
    }
}

#[test]
fn case_j7_odd_metadata_is_carried_or_refused_and_never_acts_on_a_terminal() {
    let folder = folder();
    let name = "evil\x1b]0;title\x07\x1b[2J\r\u{9b}31m\n\u{202e}";
    let long = "k".repeat(65_535);
    let odd = set(small(), "general.name", Some(text(name)))
        .kv("General.UPPER", Value::String(b"\xff\0\x1b".to_vec()))
        .kv(&long, Value::U8(1));
    carried(folder.path(), &odd.build());
    for file in ["model.gguf", "model.orkpack"] {
        let shown = done(&run("orkpack", folder.path(), &["inspect", file]));
        assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        assert!(shown.contains(r"\u{1b}]0;title\u{7}") && !shown.contains('\u{202e}'), "{shown:?}");
        let json = done(&run("orkpack", folder.path(), &["inspect", file, "--json"]));
        let document: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(document["name"], name);
        assert!(
            !json.contains(|c: char| c.is_control() && c != '\n') && !json.contains('\u{202e}'),
            "{json:?}"
        );
    }
    let key = |key: &[u8], kind, value: &[u8]| small().raw_kv(key, kind, value).build();
    for (bytes, expected) in [
        (key(&[b'k'; 65_536], 0, &[1]), "65536"),
        (key(b"a\0b", 0, &[1]), "control character"),
        (key(b"x.y", 7, &[2]), "bool of 2, expected 0 or 1"),
    ] {
        model_in(folder.path(), &bytes);
        for words in [&["inspect", "model.gguf"][..], &["convert", "model.gguf", "--force"]] {
            let line = refused(&run("orkpack", folder.path(), words));
            assert!(line.contains(expected) && line.len() < 400, "{line}");
        }
    }
}
