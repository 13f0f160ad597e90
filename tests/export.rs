//! From a GGUF to a pack and back: the same bytes under the same names, and nothing overwritten on the way.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use orkpack::bytes::Io;
use orkpack::convert::{export, export_paths};
use orkpack::pack::{Existing, Kind, Pack};
use orkpack::progress::{Progress, Silent, Unit};
use serde_json::Value;

use crate::support::gguf_builder::{MoeSpec, shards, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::schema;

const SMALL: MoeSpec = MoeSpec {
    arch: "qwen3moe",
    n_layer: 2,
    n_embd: 64,
    n_ff: 64,
    n_expert: 8,
    n_used: 2,
    n_head: 2,
    n_head_kv: 1,
    n_vocab: 320,
    dtype: orkpack::tensor::Dtype::F32,
    seed: 1,
};

fn run(folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orkpack"));
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// A model and its pack, `in/model.gguf` and `in/model.orkpack`, with bytes between tensors that are not zero.
fn packed(folder: &Path) -> (PathBuf, Vec<u8>) {
    let inside = folder.join("in");
    fs::create_dir(&inside).unwrap();
    let mut bytes = tiny_moe_builder(&SMALL).build();
    bytes.extend(b"what follows the last tensor");
    let model = model_in(&inside, &bytes);
    calibrate_beside(&model, &[1, 2, 3, 4]);
    (convert(request(&model, hits(1 << 20))).unwrap().1.output, bytes)
}

#[test]
fn a_single_file_comes_back_byte_for_byte() {
    let folder = folder();
    let (_, bytes) = packed(folder.path());
    let words = ["export", "in/model.orkpack", "--to", "gguf", "-o", "back.gguf"];
    let (code, said, error) = run(folder.path(), &words);
    assert_eq!(code, 0, "{error}");
    assert!(said.starts_with(&format!("back.gguf: {} bytes", bytes.len())), "{said}");
    assert!(fs::read(folder.path().join("back.gguf")).unwrap() == bytes);
    // Into a folder it goes under its own name.
    fs::create_dir(folder.path().join("out")).unwrap();
    let words = ["export", "in/model.orkpack", "--to", "gguf", "-o", "out", "--json"];
    let (code, said, _) = run(folder.path(), &words);
    let document: Value = serde_json::from_str(&said).unwrap();
    schema::check(&schema::load("export.schema.json"), &document).unwrap();
    assert_eq!((code, document["files"][0]["bytes"].as_u64()), (0, Some(bytes.len() as u64)));
    assert!(fs::read(folder.path().join("out/model.gguf")).unwrap() == bytes);
}

#[test]
fn every_shard_comes_back_under_its_name() {
    let folder = folder();
    let path = folder.path();
    let files = shards(&tiny_moe_builder(&SMALL), 3);
    let name = |i: usize| format!("m-{:05}-of-00003.gguf", i + 1);
    for (i, file) in files.iter().enumerate() {
        fs::write(path.join(name(i)), file.build()).unwrap();
    }
    calibrate_beside(&path.join(name(0)), &[1, 2, 3, 4]);
    fs::rename(path.join("m-00001-of-00003.routing.json"), path.join("m.routing.json")).unwrap();
    let mut request = request(&path.join(name(1)), hits(1 << 20));
    request.output = path.join("m.orkpack");
    convert(request).unwrap();
    fs::create_dir(path.join("out")).unwrap();
    let (code, _, error) = run(path, &["export", "m.orkpack", "--to", "gguf", "-o", "out"]);
    assert_eq!(code, 0, "{error}");
    for (i, file) in files.iter().enumerate() {
        assert!(fs::read(path.join("out").join(name(i))).unwrap() == file.build(), "{}", name(i));
    }
    // Beside the pack the originals are in the way: not one file is touched, and none is left half-written.
    let (code, _, error) = run(path, &["export", "m.orkpack", "--to", "gguf"]);
    assert!(code == 2 && error.contains("exists already") && error.contains("--force"), "{error}");
    let (code, _, error) = run(path, &["export", "m.orkpack", "--to", "gguf", "-o", "all.gguf"]);
    assert!(code == 2 && error.contains("is no folder, and the model is 3 files"), "{error}");
    fs::remove_file(path.join(name(1))).unwrap();
    let (code, _, _) = run(path, &["export", "m.orkpack", "--to", "gguf"]);
    assert!(code == 2 && !path.join(name(1)).exists(), "all outputs are free, or none is written");
    let left = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_string_lossy().contains("partial")));
    let (code, _, error) = run(path, &["export", "m.orkpack", "--to", "gguf", "--force"]);
    assert_eq!(code, 0, "{error}");
    assert!(fs::read(path.join(name(1))).unwrap() == files[1].build());
}

#[test]
fn an_export_never_writes_over_its_pack() {
    let folder = folder();
    let (pack, _) = packed(folder.path());
    let before = fs::read(&pack).unwrap();
    let link = folder.path().join("link.gguf");
    fs::hard_link(&pack, &link).unwrap();
    let soft = folder.path().join("soft.gguf");
    std::os::unix::fs::symlink(&pack, &soft).unwrap();
    for output in ["in/model.orkpack", "./in/../in/model.orkpack", "link.gguf", "soft.gguf"] {
        let (code, _, error) =
            run(folder.path(), &["export", "in/model.orkpack", "--to", "gguf", "-o", output, "--force"]);
        assert!(code == 2 && error.contains("is the input itself"), "{output}: {error}");
    }
    assert!(fs::read(&pack).unwrap() == before);
}

#[test]
fn damage_is_named_and_leaves_nothing() {
    let folder = folder();
    let (pack, _) = packed(folder.path());
    let index = Pack::open(&pack, Io::Map).unwrap().index().clone();
    for kind in [Kind::Header, Kind::Residue, Kind::Tensor] {
        let section = index.sections.iter().rev().find(|section| section.kind == kind).unwrap();
        let mut bytes = fs::read(&pack).unwrap();
        bytes[(section.offset + section.len - 1) as usize] ^= 1;
        let broken = folder.path().join("broken.orkpack");
        fs::write(&broken, bytes).unwrap();
        let (code, _, error) =
            run(folder.path(), &["export", "broken.orkpack", "--to", "gguf", "-o", "back.gguf"]);
        assert!(code == 2 && error.contains(&section.label()) && error.contains("digest"), "{error}");
        assert!(
            !folder.path().join("back.gguf").exists() && !folder.path().join("back.gguf.partial").exists()
        );
    }
}

/// Asks to stop after a few bytes.
struct Stop(u64);

impl Progress for Stop {
    fn begin(&mut self, _: &str, _: u64, _: Unit) {}
    fn advance(&mut self, done: u64) {
        self.0 += done;
    }
    fn end(&mut self) {}
    fn note(&mut self, _: &str) {}
    fn is_interrupted(&self) -> bool {
        self.0 > 10_000
    }
}

#[test]
fn an_interrupted_export_leaves_nothing() {
    let folder = folder();
    let (path, _) = packed(folder.path());
    let pack = Pack::open(&path, Io::Map).unwrap();
    let output = folder.path().join("back.gguf");
    let paths = export_paths(&pack, Some(&output)).unwrap();
    let error = export(&pack, &paths, Existing::Keep, &mut Stop(0)).unwrap_err();
    assert_eq!(error.exit_code(), 130, "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    export(&pack, &paths, Existing::Keep, &mut Silent).unwrap();
}
