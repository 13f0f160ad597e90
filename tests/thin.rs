//! Thin packs: bound to tensors by digest, wherever these lie and whatever else their file says.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use orkpack::bytes::{Io, Limits};
use orkpack::convert::prepare;
use orkpack::pack::{Digest, Pack};
use orkpack::progress::Silent;
use orkpack::source::{self, OpenError};
use orkpack::tensor::SourceError;
use serde_json::Value;

use crate::support::gguf_builder::{GgufBuilder, MoeSpec, shards, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::schema;

fn small() -> GgufBuilder {
    tiny_moe_builder(&MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() })
}

/// A folder with `model.gguf`, its statistics, and of one plan `fat.orkpack` and `thin.orkpack`.
fn both(folder: &Path) -> [PathBuf; 2] {
    let model = model_in(folder, &small().build());
    calibrate_beside(&model, &[1, 2, 3, 4, 5, 6, 7, 8]);
    [false, true].map(|thin| {
        let mut request = request(&model, hits(1 << 18));
        request.thin = thin;
        request.output = folder.join(if thin { "thin.orkpack" } else { "fat.orkpack" });
        convert(request).unwrap().1.output
    })
}

fn run(binary: &str, folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = match binary {
        "orkpack" => Command::new(env!("CARGO_BIN_EXE_orkpack")),
        _ => Command::new(env!("CARGO_BIN_EXE_ork-run")),
    };
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// What greedy decoding on the software NPU says, and the words beside it.
fn tokens(folder: &Path, pack: &str, more: &[&str]) -> (String, String) {
    let words =
        [&[pack, "--tokens", "72,105,33", "-n", "8", "--temp", "0", "--device", "sim"], more].concat();
    let (code, text, said) = run("ork-run", folder, &words);
    assert_eq!(code, 0, "{said}");
    (text, said)
}

fn area(path: &Path) -> Vec<Digest> {
    let pack = Pack::open(path, Io::Map).unwrap();
    let sections = pack.chunks().iter().flat_map(|chunk| [chunk.section, chunk.scales]);
    sections.flat_map(|number| pack.section(number).unwrap().digests.clone()).collect()
}

/// The same tensors as someone else publishes them: another template, other keys and another order of everything.
fn published_again() -> GgufBuilder {
    let mut again = small().text("tokenizer.chat_template", "{{ messages[0].content }}");
    again.entries.reverse();
    again.tensors.reverse();
    again
}

#[test]
fn thin_and_fat_packs_of_one_plan_are_the_same_on_the_npu() {
    let folder = folder();
    let [fat, thin] = both(folder.path());
    assert!(!area(&fat).is_empty());
    assert_eq!(area(&fat), area(&thin));
    let pack = Pack::open(&thin, Io::Map).unwrap();
    assert!(!pack.is_fat());
    let (from_fat, _) = tokens(folder.path(), "fat.orkpack", &[]);
    let (beside, said) = tokens(folder.path(), "thin.orkpack", &[]);
    assert_eq!(from_fat, beside);
    assert!(!said.contains("other metadata"), "{said}");
    let again = folder.path().join("again");
    fs::create_dir(&again).unwrap();
    fs::rename(folder.path().join("model.gguf"), again.join("elsewhere.gguf")).unwrap();
    let (named, _) = tokens(folder.path(), "thin.orkpack", &["--model", "again/elsewhere.gguf"]);
    assert_eq!(named, from_fat);
    // A fat pack stands in for the GGUF here as well.
    let (named, _) = tokens(folder.path(), "thin.orkpack", &["--model", "fat.orkpack"]);
    assert_eq!(named, from_fat);
}

#[test]
fn a_thin_pack_without_its_gguf_says_which() {
    let folder = folder();
    let [_, thin] = both(folder.path());
    fs::remove_file(folder.path().join("model.gguf")).unwrap();
    for words in [&["thin.orkpack", "-p", "x"][..], &["thin.orkpack", "-p", "x", "--model", "gone.gguf"]] {
        let (code, _, said) = run("ork-run", folder.path(), words);
        let says = if words.len() > 3 {
            "gone.gguf: cannot be read"
        } else {
            "the model's tensors are in `model.gguf`"
        };
        assert!(code == 2 && said.contains(says), "{said}");
    }
    let error = source::open(&thin, Io::Map, &Limits::default()).unwrap_err();
    assert!(matches!(error, OpenError::Thin { .. }) && error.hint().unwrap().contains("--model"));
    // The pack itself is whole; what was not looked at is said.
    let (code, text, _) = run("orkpack", folder.path(), &["verify", "thin.orkpack"]);
    assert!(
        code == 0 && text.contains("the tensors were not checked, model.gguf is not beside it"),
        "{text}"
    );
    let (code, _, said) = run("orkpack", folder.path(), &["export", "thin.orkpack", "--to", "gguf"]);
    assert!(code == 2 && said.contains("does not hold the model's tensors"), "{said}");
    let (code, _, said) =
        run("ork-run", folder.path(), &["thin.orkpack", "--model", "thin.orkpack", "-p", "x"]);
    assert!(code == 2 && said.contains("a thin pack"), "{said}");
    let (code, _, said) = run("ork-run", folder.path(), &["fat.orkpack", "--model", "model.gguf", "-p", "x"]);
    assert!(code == 2 && said.contains("holds its tensors itself"), "{said}");
}

/// The tensors count, not the header, the order or the number of files; the pack's own template wins.
#[test]
fn a_model_that_was_published_again_still_fits() {
    let folder = folder();
    let [fat, _] = both(folder.path());
    let path = folder.path();
    let (expected, _) = tokens(path, "fat.orkpack", &[]);
    fs::write(path.join("again.gguf"), published_again().build()).unwrap();
    for (i, file) in shards(&published_again(), 2).iter().enumerate() {
        fs::write(path.join(format!("set-{:05}-of-00002.gguf", i + 1)), file.build()).unwrap();
    }
    for model in ["again.gguf", "set-00002-of-00002.gguf"] {
        let (found, said) = tokens(path, "thin.orkpack", &["--model", model]);
        assert_eq!(found, expected, "{model}");
        assert_eq!(said.matches("has other metadata than the pack was made from").count(), 1, "{said}");
        let (code, text, said) = run("orkpack", path, &["verify", "thin.orkpack", "--model", model]);
        assert!(code == 0 && text.contains("were held to its digests"), "{text}{said}");
    }
    // The metadata is the pack's.
    let again = path.join("again.gguf");
    let opened =
        source::open_with(&path.join("thin.orkpack"), Some(&again), Io::Map, &Limits::default()).unwrap();
    let original = source::open(&fat, Io::Map, &Limits::default()).unwrap();
    assert_eq!(opened.source().metadata(), original.source().metadata());
    assert!(opened.source().metadata().get("tokenizer.chat_template").is_none());
    // Under the recorded name it is found by itself, but no fat pack comes of it.
    fs::rename(&again, path.join("model.gguf")).unwrap();
    let mut anew = request(&path.join("thin.orkpack"), hits(1 << 18));
    anew.choice.statistics = orkpack::convert::StatisticsFrom::File(path.join("model.routing.json"));
    anew.output = path.join("anew.orkpack");
    let refused = convert(anew.clone()).err().unwrap().to_string();
    assert!(refused.contains("could not give back") && refused.contains("--thin"), "{refused}");
    anew.thin = true;
    convert(anew).unwrap();
    assert!(fs::read(path.join("anew.orkpack")).unwrap() == fs::read(path.join("thin.orkpack")).unwrap());
}

#[test]
fn a_fat_pack_comes_of_a_thin_one_and_its_gguf() {
    let folder = folder();
    let [fat, thin] = both(folder.path());
    let mut anew = request(&thin, hits(1 << 18));
    anew.choice.statistics = orkpack::convert::StatisticsFrom::File(folder.path().join("model.routing.json"));
    anew.output = folder.path().join("anew.orkpack");
    convert(anew).unwrap();
    assert!(fs::read(folder.path().join("anew.orkpack")).unwrap() == fs::read(fat).unwrap());
    let mut over = request(&thin, hits(1 << 18));
    over.output = folder.path().join("model.gguf");
    over.existing = orkpack::pack::Existing::Replace;
    let error = prepare(over, &mut Silent).err().unwrap().to_string();
    assert!(error.contains("is the input itself"), "the GGUF of a thin pack is an input: {error}");
}

#[test]
fn other_weights_are_refused_by_the_tensors_name() {
    let folder = folder();
    let path = folder.path();
    both(path);
    // A norm is read at the start, an expert when it is called, or by a full check before anything runs.
    struct Case {
        tensor: &'static str,
        at: usize,
        says: &'static str,
    }
    let cases = [
        Case {
            tensor: "blk.1.ffn_norm.weight",
            at: 3,
            says: "tensor `blk.1.ffn_norm.weight` is not the one",
        },
        Case {
            tensor: "token_embd.weight",
            at: 72 * 64 * 4,
            says: "tensor `token_embd.weight` is not the one",
        },
        Case {
            tensor: "blk.0.ffn_up_exps.weight",
            at: 5 * 64 * 64 * 4,
            says: "tensor `blk.0.ffn_up_exps.weight`, expert 5, is not the one",
        },
    ];
    for case in cases {
        let mut other = small();
        let tensor = other.tensors.iter_mut().find(|tensor| tensor.name == case.tensor.as_bytes()).unwrap();
        tensor.data[case.at] ^= 1;
        fs::write(path.join("other.gguf"), other.build()).unwrap();
        let words = ["thin.orkpack", "--model", "other.gguf", "--tokens", "72", "-n", "1"];
        let (code, text, said) = run("ork-run", path, &[&words[..], &["--verify", "full"]].concat());
        assert!(code == 2 && text.is_empty() && said.contains(case.says), "{said}");
        let (code, _, said) = run("ork-run", path, &words);
        // Whether this expert is called is the router's affair; what is used must be right.
        assert!(code == 0 || said.contains(case.says), "{said}");
        assert!(code == 2 || case.tensor.contains("exps"), "{}", case.tensor);
        let words = ["verify", "thin.orkpack", "--model", "other.gguf", "--json"];
        let (code, text, _) = run("orkpack", path, &words);
        let document: Value = serde_json::from_str(&text).unwrap();
        schema::check(&schema::load("verify.schema.json"), &document).unwrap();
        assert_eq!((code, &document["ok"]), (1, &Value::Bool(false)));
        assert_eq!(document["findings"].as_array().unwrap().len(), 1, "{text}");
        assert!(document["findings"][0].as_str().unwrap().contains(case.says), "{text}");
    }
    let shapes = tiny_moe_builder(&MoeSpec { n_embd: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() });
    fs::write(path.join("other.gguf"), shapes.build()).unwrap();
    let (code, _, said) = run("ork-run", path, &["thin.orkpack", "--model", "other.gguf", "-p", "x"]);
    assert!(
        code == 2 && said.contains("made from another model: tensor `blk.0.ffn_gate_exps.weight`"),
        "{said}"
    );
    let mut fewer = small();
    fewer.tensors.pop();
    fs::write(path.join("other.gguf"), fewer.build()).unwrap();
    let (code, _, said) = run("ork-run", path, &["thin.orkpack", "--model", "other.gguf", "-p", "x"]);
    assert!(code == 2 && said.contains("is missing, expected F32"), "{said}");
}

#[test]
fn a_thin_pack_of_a_set_finds_it_beside() {
    let folder = folder();
    let path = folder.path();
    let shard = |i: usize| path.join(format!("set-{:05}-of-00002.gguf", i + 1));
    for (i, file) in shards(&small(), 2).iter().enumerate() {
        fs::write(shard(i), file.build()).unwrap();
    }
    calibrate_beside(&shard(0), &[1, 2, 3, 4]);
    fs::rename(path.join("set-00001-of-00002.routing.json"), path.join("set.routing.json")).unwrap();
    let mut request = request(&shard(1), hits(1 << 18));
    (request.thin, request.output) = (true, path.join("thin.orkpack"));
    convert(request).unwrap();
    let (text, _) = tokens(path, "thin.orkpack", &[]);
    assert_eq!(text.split(',').count(), 8, "{text}");
    fs::remove_file(shard(0)).unwrap();
    let (code, _, said) = run("ork-run", path, &["thin.orkpack", "-p", "x"]);
    assert!(code == 2 && said.contains("missing shard 00001"), "{said}");
}

/// Each part is read for its digest once, and only when it is asked for.
#[test]
fn an_expert_is_checked_when_it_is_first_read() {
    let folder = folder();
    let [_, thin] = both(folder.path());
    let mut other = small();
    let tensor = other.tensors.iter_mut().find(|t| t.name == b"blk.0.ffn_up_exps.weight").unwrap();
    let len = tensor.data.len() / 8;
    tensor.data[3 * len] ^= 1;
    let model = folder.path().join("other.gguf");
    fs::write(&model, other.build()).unwrap();
    let opened = source::open_with(&thin, Some(&model), Io::Map, &Limits::default()).unwrap();
    let source = opened.source();
    let place = source.find("blk.0.ffn_up_exps.weight").unwrap().place;
    let expert = |n: u64| source.bytes(place.part(n * len as u64, len as u64).unwrap());
    for n in [0, 1, 2, 4, 5, 6, 7] {
        assert!(expert(n).is_ok(), "expert {n}");
    }
    assert!(matches!(expert(3), Err(SourceError::Differs { part: Some(3), .. })));
    assert!(source.bytes(place.part(3 * len as u64 - 1, 2).unwrap()).is_err(), "across the border of two");
    assert!(source.bytes(place).is_err());
    assert!(matches!(
        source.bytes(orkpack::tensor::Place { offset: 0, len: 1, ..place }),
        Err(SourceError::OutOfFile { .. })
    ));
}

/// People check that a dry run writes nothing and that its figures are those of the real thing.
#[test]
fn case_h7_a_dry_run_knows_fat_and_thin_to_the_byte() {
    let folder = folder();
    let path = folder.path();
    let packs = both(path).map(|pack| fs::metadata(pack).unwrap().len());
    let before = fs::read_dir(path).unwrap().count();
    for thin in [&[][..], &["--thin"]] {
        let words = [
            &["convert", "model.gguf", "--objective", "hits", "--budget", "256KiB", "-o", "x.orkpack"],
            thin,
        ];
        let words = [&words.concat()[..], &["--dry-run", "--json"]].concat();
        let (code, text, said) = run("orkpack", path, &words);
        assert_eq!(code, 0, "{said}");
        let document: Value = serde_json::from_str(&text).unwrap();
        schema::check(&schema::load("convert.schema.json"), &document).unwrap();
        let sizes = ["fat_bytes", "thin_bytes"].map(|key| document[key].as_u64().unwrap());
        assert_eq!(sizes, packs);
        assert_eq!(document["file_bytes"].as_u64(), Some(packs[usize::from(!thin.is_empty())]));
    }
    let words = ["convert", "model.gguf", "--objective", "hits", "--budget", "256KiB", "--dry-run"];
    let (_, text, _) = run("orkpack", path, &words);
    assert!(
        text.contains(&format!("{} bytes", packs[0])) && text.contains(&format!("{} bytes", packs[1])),
        "{text}"
    );
    assert_eq!(fs::read_dir(path).unwrap().count(), before, "nothing was written");
}

#[test]
fn a_full_disk_says_whether_a_thin_pack_would_fit() {
    let folder = folder();
    let path = folder.path();
    model_in(path, &tiny_moe_builder(&MoeSpec::default()).build());
    calibrate_beside(&path.join("model.gguf"), &[1, 2, 3]);
    // A limit on the length of files, in blocks of 512 or 1024 bytes, stands for the disk.
    let convert = |words: &str, blocks: u32| {
        let binary = env!("CARGO_BIN_EXE_orkpack");
        let script =
            format!("ulimit -f {blocks}; exec '{binary}' convert model.gguf --quiet --budget 0 {words}");
        let mut shell = Command::new("sh");
        let output = shell.current_dir(path).args(["-c", &script]).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = convert("", 2048);
    assert!(code == 2 && said.contains("no space: needs") && said.contains("a thin pack needs"), "{said}");
    assert!(said.contains("hint: leave the source tensors out with --thin"), "{said}");
    assert!(!path.join("model.orkpack").exists() && !path.join("model.orkpack.partial").exists());
    let (code, said) = convert("", 16);
    assert!(code == 2 && said.contains("no space: needs") && !said.contains("thin"), "{said}");
    let (code, said) = convert("--thin", 2048);
    assert_eq!(code, 0, "{said}");
}
