//! What a model much larger than the memory takes.

use std::fs;

use orkpack::bytes::{Io, Limits};
use orkpack::model::Outline;
use orkpack::tensor::Dtype;

use crate::support::gguf_builder::{MoeSpec, hollow_moe};
use crate::support::models::folder;
use crate::support::program::{ORK_RUN, ORKPACK, behind, done, refused};
use crate::support::routed;

/// All bytes of the model are hashed, none of them is held: RLIMIT_DATA counts what is private and can be written to.
#[test]
fn case_g9_twenty_gigabytes_are_converted_in_half_a_gigabyte() {
    let folder = folder();
    let path = folder.path();
    let model = path.join("model.gguf");
    let spec = MoeSpec {
        n_layer: 19,
        n_embd: 2048,
        n_ff: 1408,
        n_expert: 64,
        n_used: 6,
        n_head: 16,
        n_head_kv: 4,
        dtype: Dtype::F16,
        ..MoeSpec::default()
    };
    assert!(hollow_moe(&spec, &model) > 20_000_000_000);
    let source = orkpack::source::open(&model, Io::Map, &Limits::default()).unwrap().source();
    let shape = Outline::of(source.as_ref()).unwrap().shape().clone();
    let statistics = routed::statistics(&shape, 1024, 3.0, 1).to_json().unwrap();
    fs::write(path.join("given.routing.json"), statistics).unwrap();
    let limited = |words: &[&str]| behind("ulimit -d 524288", ORKPACK, path, words).output().unwrap();
    let convert = [
        "convert",
        "model.gguf",
        "--thin",
        "--objective",
        "hits",
        "--budget",
        "1GiB",
        "--routing",
        "given.routing.json",
        "--accept-foreign-statistics",
    ];
    done(&limited(&convert));
    let text = done(&limited(&["verify", "model.orkpack"]));
    assert!(text.contains("model.orkpack: whole") && text.contains("were held to its digests"), "{text}");
    // The limit is one: what holds the model in memory does not get far.
    let words = ["model.gguf", "--io", "pread", "--tokens", "1"];
    let held = behind("ulimit -d 524288", ORK_RUN, path, &words).output().unwrap();
    assert!(refused(&held).contains("model.gguf"), "{held:?}");
}
