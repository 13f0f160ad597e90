//! Models that come in several files: opened by any of them, by their folder or through links, or refused by name.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use orkpack::bytes::{Io, Limits};
use orkpack::convert::StatisticsFrom;
use orkpack::gguf::ShardName;
use orkpack::pack::Pack;
use orkpack::source;
use orkpack::tensor::Value;

use crate::support::gguf_builder::{GgufBuilder, MoeSpec, shards, tiny_moe, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, request};

fn shard(number: usize) -> String {
    format!("model-{number:05}-of-00003.gguf")
}

/// Writes the files of a set as they are, under the names of a set.
fn put(folder: &Path, files: &[GgufBuilder]) {
    for (i, file) in files.iter().enumerate() {
        fs::write(folder.join(shard(i + 1)), file.build()).unwrap();
    }
}

fn small() -> GgufBuilder {
    tiny_moe_builder(&MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() })
}

/// A folder with a set of three, its routing counted.
fn set_in(folder: &Path) -> Vec<Vec<u8>> {
    let files = shards(&small(), 3);
    put(folder, &files);
    calibrate_beside(&folder.join(shard(1)), &[1, 2, 3, 4, 5, 6, 7, 8]);
    fs::rename(folder.join("model-00001-of-00003.routing.json"), folder.join("model.routing.json")).unwrap();
    files.iter().map(GgufBuilder::build).collect()
}

fn refused(path: &Path) -> String {
    let error = source::open(path, Io::Map, &Limits::default()).expect_err("to be refused");
    assert!(error.hint().is_some(), "{error}");
    let line = error.to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

fn orkpack(folder: &Path, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orkpack"));
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn names_of_shards_are_taken_apart_and_put_together() {
    let name = ShardName::of("a/b-00002-of-00003.gguf".as_ref()).unwrap();
    assert_eq!((name.stem.to_str(), name.number, name.count), (Some("a/b"), 2, 3));
    assert_eq!(name.path(1), PathBuf::from("a/b-00001-of-00003.gguf"));
    for other in [
        "b.gguf",
        "b-00002-of-00003",
        "b-2-of-3.gguf",
        "b-00000-of-00003.gguf",
        "b-00004-of-00003.gguf",
        "b-00001-of-00001.gguf",
        "-00001-of-00002.gguf",
        "a/-00001-of-00002.gguf",
        "b-0000１-of-00002.gguf",
        "gguf",
        "",
    ] {
        assert_eq!(ShardName::of(other.as_ref()), None, "{other}");
    }
    assert_eq!(source::beside("a/v1.5-00002-of-00003.gguf".as_ref(), "orkpack"), Path::new("a/v1.5.orkpack"));
}

/// Numbers count from 1 in names and from 0 in `split.no`; only the first file knows the architecture.
#[test]
fn case_b9_any_shard_and_the_folder_make_identical_packs() {
    let folder = folder();
    let path = folder.path();
    let files = set_in(path);
    let mut packs = Vec::new();
    for model in [path.join(shard(1)), path.join(shard(2)), path.join(shard(3)), path.to_owned()] {
        let mut request = request(&model, hits(1 << 30));
        request.output = path.join(format!("{}.orkpack", packs.len()));
        let outcome = convert(request).unwrap().1;
        packs.push(fs::read(outcome.output).unwrap());
    }
    assert!(packs.windows(2).all(|pair| pair[0] == pair[1]));
    let pack = Pack::open(&path.join("0.orkpack"), Io::Map).unwrap();
    assert_eq!(pack.files().iter().map(|file| file.name.clone()).collect::<Vec<_>>(), [1, 2, 3].map(shard));
    for (number, file) in (0..).zip(&files) {
        let mut back = Vec::new();
        pack.write_gguf(number, &mut back).unwrap();
        assert!(back == *file, "shard {number}");
    }
    // The model is the one that was cut: the same tensors, the same statistics, the same NPU area.
    let whole = path.join("whole");
    fs::create_dir(&whole).unwrap();
    fs::write(whole.join("model.gguf"), small().build()).unwrap();
    fs::copy(path.join("model.routing.json"), whole.join("model.routing.json")).unwrap();
    let outcome = convert(request(&whole.join("model.gguf"), hits(1 << 30))).unwrap().1;
    let single = Pack::open(&outcome.output, Io::Map).unwrap();
    let area = |pack: &Pack| -> Vec<Vec<u8>> {
        pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).to_vec()).collect()
    };
    assert!(!area(&single).is_empty() && area(&single) == area(&pack));
    // A pack of a set is a source as well.
    let mut again = request(&path.join("0.orkpack"), hits(1 << 30));
    again.output = path.join("again.orkpack");
    again.choice.statistics = StatisticsFrom::File(path.join("model.routing.json"));
    convert(again).unwrap();
    assert!(fs::read(path.join("again.orkpack")).unwrap() == packs[0]);
}

#[test]
fn case_b9_the_command_names_its_output_after_the_set() {
    let folder = folder();
    let path = folder.path();
    set_in(path);
    for model in [".", "model-00002-of-00003.gguf"] {
        let (code, said) = orkpack(path, &["convert", model, "--quiet", "--force"]);
        assert_eq!(code, 0, "{said}");
        assert!(path.join("model.orkpack").exists(), "{model}");
        fs::remove_file(path.join("model.orkpack")).unwrap();
    }
    let (code, said) = orkpack(path, &["plan"]);
    assert_eq!(code, 0, "a set is one model of the folder: {said}");
}

#[test]
fn case_b11_a_missing_shard_is_named() {
    for (gone, asked) in [(1, 2), (2, 1), (3, 3)] {
        let folder = folder();
        let path = folder.path();
        put(path, &shards(&small(), 3));
        fs::remove_file(path.join(shard(gone))).unwrap();
        for model in [path.join(shard(asked)), path.to_owned()] {
            let line = refused(&model);
            let says = format!("missing shard {gone:05}: `{}` is not there", shard(gone));
            assert!(line.contains(&says), "{line}");
        }
        let (code, said) = orkpack(path, &["convert", &shard(asked)]);
        assert!(code == 2 && said.contains("missing shard"), "{said}");
    }
    let folder = folder();
    fs::write(folder.path().join(shard(2)), shards(&small(), 3)[1].build()).unwrap();
    assert!(
        refused(folder.path()).contains("missing shard 00001") && refused(folder.path()).contains("1 others")
    );
}

/// A cache keeps the files under their digests, in another folder, and links with the published names lead there.
#[test]
fn case_b12_the_names_are_those_of_the_links() {
    let folder = folder();
    let (blobs, links) = (folder.path().join("blobs"), folder.path().join("snapshot"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&links).unwrap();
    let files = shards(&small(), 3);
    for (i, file) in files.iter().enumerate() {
        let blob = blobs.join(format!("{i}c0ffee"));
        fs::write(&blob, file.build()).unwrap();
        std::os::unix::fs::symlink(format!("../blobs/{i}c0ffee"), links.join(shard(i + 1))).unwrap();
    }
    for model in [links.join(shard(2)), links.clone()] {
        let opened = source::open(&model, Io::Map, &Limits::default()).unwrap();
        assert_eq!(opened.source().tensors().len(), small().tensors.len());
    }
    let line = refused(&blobs.join("1c0ffee"));
    assert!(line.contains("is one of 3 shards by its metadata, but its name does not end in"), "{line}");
    // A link that leads nowhere is a file that is not there.
    fs::remove_file(blobs.join("0c0ffee")).unwrap();
    assert!(refused(&links).contains("missing shard 00001"));
}

/// What a shell makes of `model-0000*-of-00003.gguf`, and what people type who expect `convert IN OUT`.
#[test]
fn case_b8_several_words_never_overwrite_a_file() {
    let folder = folder();
    let path = folder.path();
    let files = set_in(path);
    fs::write(path.join("a.gguf"), tiny_moe(&MoeSpec::default())).unwrap();
    fs::write(path.join("b.gguf"), b"precious").unwrap();
    let before = |name: &str| fs::read(path.join(name)).unwrap();
    let a = before("a.gguf");
    for words in [
        &["convert", "a.gguf", "b.gguf"][..],
        &["convert", "model-00001-of-00003.gguf", "model-00002-of-00003.gguf"],
        &["convert", "model-00001-of-00003.gguf", "a.gguf", "model-00003-of-00003.gguf"],
    ] {
        let (code, said) = orkpack(path, words);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(&format!("`orkpack convert {} -o OUT.orkpack`", words[1])), "{said}");
    }
    let names = [1, 2, 3].map(shard);
    let output = ["convert", &names[2], &names[0], &names[1], "--quiet"];
    let (code, said) = orkpack(path, &output);
    assert_eq!(code, 0, "{said}");
    assert!(path.join("model.orkpack").exists());
    // No file of a set may be the output.
    for name in &names {
        let (code, said) = orkpack(path, &["convert", &names[0], "-o", name, "--force"]);
        assert!(code == 2 && said.contains("is the input itself"), "{said}");
    }
    assert!(before("a.gguf") == a && before("b.gguf") == b"precious");
    for (name, file) in names.iter().zip(&files) {
        assert!(before(name) == *file, "{name}");
    }
}

#[test]
fn shards_that_disagree_are_refused_by_name() {
    let set = |edit: fn(&mut Vec<GgufBuilder>)| {
        let mut files = shards(&small(), 3);
        edit(&mut files);
        let folder = folder();
        put(folder.path(), &files);
        let line = refused(&folder.path().join(shard(1)));
        // Whichever file is asked for, and before anything is written.
        assert_eq!(refused(&folder.path().join(shard(3))), line);
        line
    };
    let second = shard(2);
    let swapped = set(|files| files.swap(0, 1));
    assert!(swapped.contains("`split.no` is 1, expected 0 by its name"), "{swapped}");
    let count = set(|files| files[1] = shards(&small(), 4).swap_remove(1));
    assert!(count.contains(&format!("shard `{second}`: `split.count` is 4, expected 3")), "{count}");
    let unsplit = set(|files| files[1] = small());
    assert!(unsplit.contains("`split.count` is missing, expected 3"), "{unsplit}");
    let text = set(|files| {
        files[1] = GgufBuilder::new().kv("split.count", Value::U16(3)).text("split.no", "1");
    });
    assert!(text.contains("`split.no` is a string of 1 bytes, expected 1"), "{text}");
    let repeated = set(|files| {
        let tensor = files[0].tensors[0].clone();
        files[1].tensors.push(tensor);
    });
    let says = format!("tensor `token_embd.weight` is in shard `{}` and again in `{second}`", shard(1));
    assert!(repeated.contains(&says), "{repeated}");
    let few = set(|files| drop(files[2].tensors.pop()));
    assert!(few.contains("tensors, expected 27 by `split.tensors.count`"), "{few}");
    let cut = {
        let folder = folder();
        let files = shards(&small(), 3);
        put(folder.path(), &files);
        let whole = files[2].build();
        fs::write(folder.path().join(shard(3)), &whole[..whole.len() - 1]).unwrap();
        refused(&folder.path().join(shard(1)))
    };
    assert!(cut.contains(&format!("shard `{}`: tensor", shard(3))) && cut.contains("past the end"), "{cut}");
}
