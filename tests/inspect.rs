//! What is in a file or a folder, said so that a stranger knows what to do next.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use orkpack::gguf::GgufFile;
use orkpack::model::Outline;
use orkpack::plan::capacity;
use orkpack::units::Bytes;
use serde_json::Value;

use crate::support::gguf_builder::{GgufBuilder, MoeSpec, shards, tiny_moe, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, profile, request};
use crate::support::{fixture, schema};

fn run(folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orkpack"));
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn json(folder: &Path, words: &[&str], name: &str) -> Value {
    let (code, text, said) = run(folder, &[words, &["--json"]].concat());
    assert_eq!(code, 0, "{said}");
    let document = serde_json::from_str(&text).unwrap();
    schema::check(&schema::load(name), &document).unwrap_or_else(|problem| panic!("{problem}: {text}"));
    document
}

fn small() -> GgufBuilder {
    tiny_moe_builder(&MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() })
}

#[test]
fn a_model_says_what_it_is_and_what_fits() {
    let folder = folder();
    let bytes = tiny_moe(&MoeSpec::default());
    model_in(folder.path(), &bytes);
    let (code, text, said) = run(folder.path(), &["inspect", "model.gguf"]);
    assert_eq!(code, 0, "{said}");
    for line in [
        "model.gguf: gguf, architecture qwen3moe\n",
        "  name: tiny\n",
        "  runs: yes\n",
        "  tokenizer: gpt2 / qwen2, 320 tokens, known\n",
        "  chat template: none\n",
        "  experts: 2 layers of 8, 2 used per token\n",
        "    layers 0 to 1: 2 of 8, each 768.00 KiB: gate 256 × 256 F32, up 256 × 256 F32, down 256 × 256 F32\n",
        "    all: 12.00 MiB as stored, 3.00 MiB as int8 copies for rk3588\n",
        "    of these fit: 100 % in 256.00 MiB, 100 % in 1.20 GiB, 100 % in 3.50 GiB",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    let document = json(folder.path(), &["inspect", "model.gguf", "--tensors"], "inspect.schema.json");
    assert_eq!(document["files"][0]["bytes"].as_u64(), Some(bytes.len() as u64));
    assert_eq!(document["tensors"].as_array().unwrap().len(), 27);
    assert_eq!(document["expert_table"].as_array().unwrap().len(), 1);
    assert_eq!((&document["role"], &document["problem"]), (&Value::Null, &Value::Null));
}

/// Each expert has three matrices of 64 KiB as int8.
#[test]
fn a_budget_holds_whole_experts() {
    let file = GgufFile::from_bytes("x", tiny_moe(&MoeSpec::default())).unwrap();
    let outline = Outline::of(&file).unwrap();
    let budgets = [0, (192 << 10) - 1, 192 << 10, 1 << 20, 3 << 20, u64::MAX].map(Bytes);
    let found = capacity(outline.shape(), &profile(), &budgets);
    assert_eq!((found.source_bytes, found.copy_bytes), (12 << 20, 3 << 20));
    let shares: Vec<f64> = found.fits.iter().map(|fit| fit.share * 16.0).collect();
    assert_eq!(shares, [0.0, 0.0, 1.0, 5.0, 16.0, 16.0]);
}

#[test]
fn what_cannot_be_run_says_why() {
    let folder = folder();
    let path = folder.path();
    let rename = |mut bytes: Vec<u8>, from: &[u8], to: &[u8]| {
        while let Some(at) = bytes.windows(from.len()).position(|window| window == from) {
            bytes[at..at + from.len()].copy_from_slice(to);
        }
        bytes
    };
    fs::write(path.join("other.gguf"), rename(small().build(), b"qwen3moe", b"qwen9moe")).unwrap();
    fs::write(
        path.join("words.gguf"),
        rename(small().build(), b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0qwen?"),
    )
    .unwrap();
    fs::write(path.join("chat.gguf"), small().text("tokenizer.chat_template", "{% if").build()).unwrap();
    let (_, text, _) = run(path, &["inspect", "other.gguf"]);
    assert!(text.contains("runs: no, architecture `qwen9moe` is not supported"), "{text}");
    assert!(text.contains("can be planned and packed: yes") && text.contains("layers 0 to 1"), "{text}");
    let (_, text, _) = run(path, &["inspect", "words.gguf"]);
    assert!(text.contains("tokenizer: gpt2 / qwen?, 320 tokens, not known: pre-tokenizer `qwen?`"), "{text}");
    let (_, text, _) = run(path, &["inspect", "chat.gguf"]);
    assert!(
        text.contains("chat template: there, but cannot be used: the chat template is not valid"),
        "{text}"
    );
    let dense = json(path, &["inspect", "chat.gguf"], "inspect.schema.json");
    assert_eq!(dense["chat_template"]["present"], Value::Bool(true));
}

#[test]
fn a_folder_has_one_line_for_each_model() {
    let folder = folder();
    let path = folder.path();
    let model = model_in(path, &small().build());
    calibrate_beside(&model, &[1, 2, 3, 4]);
    convert(request(&model, hits(1 << 18))).unwrap();
    let mut thin = request(&model, hits(0));
    (thin.thin, thin.output) = (true, path.join("thin.orkpack"));
    convert(thin).unwrap();
    let lone = path.join("sub");
    fs::create_dir(&lone).unwrap();
    fs::rename(path.join("thin.orkpack"), lone.join("thin.orkpack")).unwrap();
    let files = shards(&small(), 3);
    for (i, file) in files.iter().enumerate() {
        fs::write(path.join(format!("set-{:05}-of-00003.gguf", i + 1)), file.build()).unwrap();
    }
    let mut dense = small();
    dense.tensors.retain(|tensor| !String::from_utf8_lossy(&tensor.name).contains("_exps"));
    fs::write(path.join("dense.gguf"), dense.build()).unwrap();
    let vision = GgufBuilder::new().text("general.type", "mmproj").text("general.architecture", "clip");
    fs::write(path.join("mmproj-x.gguf"), vision.build()).unwrap();
    let imatrix = fixture("models/reference/tiny-qwen3moe.imatrix.gguf");
    fs::copy(imatrix, path.join("x.imatrix.gguf")).unwrap();
    fs::write(path.join("zz.gguf"), b"GGUF").unwrap();
    fs::write(path.join("notes.txt"), b"not looked at").unwrap();
    let document = json(path, &["inspect", "."], "inspect-folder.schema.json");
    let entries = document["entries"].as_array().unwrap();
    let found: Vec<(&str, &str)> =
        entries.iter().map(|e| (e["file"].as_str().unwrap(), e["kind"].as_str().unwrap())).collect();
    assert_eq!(
        found,
        [
            ("dense.gguf", "dense"),
            ("mmproj-x.gguf", "projector"),
            ("model.gguf", "model"),
            ("model.orkpack", "pack"),
            ("set-00001-of-00003.gguf", "model"),
            ("set-00002-of-00003.gguf", "shard"),
            ("set-00003-of-00003.gguf", "shard"),
            ("x.imatrix.gguf", "imatrix"),
            ("zz.gguf", "unreadable"),
        ]
    );
    let together: usize = files.iter().map(|file| file.build().len()).sum();
    assert_eq!(entries[4]["bytes"].as_u64(), Some(together as u64), "a set counts as a whole");
    let (code, text, _) = run(path, &["inspect", "."]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(code == 0 && lines.len() == 9, "{text}");
    for (line, says) in [
        (0, "dense model, qwen3moe: no experts to place"),
        (2, "qwen3moe, 2 layers of 8 experts, 2 used: runs"),
        (3, "fat pack for rk3588, qwen3moe: runs"),
        (5, "shard 2 of 3, see set-00001-of-00003.gguf"),
        (8, "cannot be opened: "),
    ] {
        assert!(lines[line].contains(says), "{says:?} is not in {}", lines[line]);
    }
    // The one model of the folder is none of these parts.
    let (code, _, said) = run(path, &["plan"]);
    assert!(
        code == 2 && said.contains("name one of: dense.gguf, model.gguf, set-00001-of-00003.gguf, zz.gguf"),
        "{said}"
    );
    let (_, text, _) = run(&lone, &["inspect", "thin.orkpack"]);
    assert!(text.contains("thin pack for rk3588") && text.contains("runs: no"), "{text}");
    let (_, text, _) = run(&lone, &["inspect", "."]);
    assert!(text.contains("thin pack for rk3588, qwen3moe: its GGUF is not here"), "{text}");
    fs::remove_file(lone.join("thin.orkpack")).unwrap();
    assert!(run(&lone, &["inspect", "."]).1.contains("no *.gguf and no *.orkpack"));
}

#[test]
fn names_in_metadata_do_not_reach_the_terminal_raw() {
    let folder = folder();
    let model =
        GgufBuilder::new().text("general.architecture", "a\u{1b}[31mb").text("general.name", "x\u{7}\n");
    fs::write(folder.path().join("model.gguf"), model.build()).unwrap();
    for words in [&["inspect", "model.gguf"][..], &["inspect", "."]] {
        let (_, text, _) = run(folder.path(), words);
        assert!(!text.contains('\u{1b}') && !text.contains('\u{7}') && text.contains("\\u{1b}"), "{text:?}");
    }
}
