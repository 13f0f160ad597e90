//! The corpus of the fuzz targets, replayed; and its small inputs cut at each byte and flipped bit by bit.
//!
//! Whatever a reader is given, the outcome is a value or an error: the readers are those of tests/fuzz/readers.rs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use orkpack::calibrate::{Block, Statistics};
use orkpack::gguf::GgufFile;
use orkpack::model::Outline;
use orkpack::pack::{Contents, Existing};
use orkpack::plan::{Objective, PlanRequest, Routing, Shares, choose};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::{Dtype, Value};
use orkpack::units::Bytes;
use rayon::prelude::*;

use super::support::gguf_builder::{GgufBuilder, MoeSpec, text, tiny_moe};
use super::support::models::{convert, folder, hits, model_in, request};
use super::support::packs::{Sample, numbers};
use super::support::{fixture, routed};

#[path = "fuzz/readers.rs"]
mod readers;

type Reader = fn(&[u8]) -> bool;

/// The targets, as in tests/fuzz/Cargo.toml.
const TARGETS: [(&str, Reader); 10] = [
    ("chat", readers::chat),
    ("foreign", readers::foreign),
    ("gguf", readers::gguf),
    ("imatrix", readers::imatrix),
    ("pack", readers::pack),
    ("plan", readers::plan),
    ("profile", readers::profile),
    ("prompts", readers::prompts),
    ("session", readers::session),
    ("statistics", readers::statistics),
];

/// Inputs up to this length are also cut at each byte and flipped: every bit up to half of it, else a bit of each byte.
const SMALL: usize = 8192;

/// The bits of an input of this length that are flipped.
fn bits(len: usize) -> Vec<usize> {
    if len <= SMALL / 2 { (0..len * 8).collect() } else { (0..len).map(|byte| byte * 8 + byte % 8).collect() }
}

fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target)
}

/// The inputs of a target by name.
fn inputs(target: &str) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(corpus(target)).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
        .collect()
}

#[test]
fn every_input_of_the_corpus_is_a_value_or_an_error() {
    let text: (&str, Reader) = ("text", readers::text);
    for (target, reader) in TARGETS.into_iter().chain([text]) {
        let inputs = inputs(target);
        let good = inputs.keys().filter(|name| name.starts_with("good-")).count();
        assert!(good > 0, "{target} has no sound input");
        for (name, bytes) in inputs {
            let is_read = reader(&bytes);
            assert!(is_read || !name.starts_with("good-"), "{target}/{name} is sound");
        }
    }
}

#[test]
fn the_targets_are_those_of_the_workspace_of_their_own() {
    let manifest = fs::read_to_string(corpus("").join("../Cargo.toml")).unwrap();
    let listed: Vec<&str> =
        manifest.split("[[bin]]\nname = \"").skip(1).map(|bin| bin.split('"').next().unwrap()).collect();
    let mut listed: Vec<&str> = listed.into_iter().filter(|name| *name != "text").collect();
    listed.sort();
    assert_eq!(listed, TARGETS.map(|(name, _)| name));
}

#[test]
fn small_inputs_cut_at_each_byte_and_flipped_bit_by_bit_are_values_or_errors() {
    for (target, reader) in TARGETS {
        let small: Vec<Vec<u8>> = inputs(target).into_values().filter(|bytes| bytes.len() <= SMALL).collect();
        assert!(!small.is_empty(), "{target} has no small input");
        for bytes in small {
            (0..bytes.len()).into_par_iter().for_each(|len| {
                reader(&bytes[..len]);
            });
            bits(bytes.len()).into_par_iter().for_each_init(
                || bytes.clone(),
                |copy, bit| {
                    copy[bit / 8] ^= 1 << (bit % 8);
                    reader(copy);
                    copy[bit / 8] ^= 1 << (bit % 8);
                },
            );
        }
    }
}

/// What is run again as a process of its own under a limit, by the test below.
#[test]
#[ignore = "runs in a process of its own"]
fn read_all_under_a_limit() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(64 << 20), maximum: Some(64 << 20) };
    // The first reading sets up what is kept for good.
    readers::plan(&[]);
    setrlimit(Resource::Data, limit).unwrap();
    for (target, reader) in TARGETS {
        for bytes in inputs(target).into_values() {
            reader(&bytes);
            for bit in (0..bytes.len().min(SMALL) * 8).step_by(97) {
                let mut copy = bytes.clone();
                copy[bit / 8] ^= 1 << (bit % 8);
                reader(&copy);
            }
        }
    }
}

/// Every input, whole and flipped in places, is read with at most 64 MiB of memory: an allocation beyond is refused by the
/// system, and the process ends by a signal.
#[test]
fn reading_the_corpus_needs_little_memory() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "corpus::read_all_under_a_limit", "--ignored", "--test-threads=1"])
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&child.stderr)
    );
}

// ---- the sound inputs: `cargo test --release --test tests -- --ignored write_the_sound_inputs`

#[test]
#[ignore = "writes tests/fuzz/corpus"]
fn write_the_sound_inputs() {
    for (target, inputs) in [
        ("chat", vec![("good-turns", CHAT.as_bytes().to_vec())]),
        ("foreign", (1..=6).map(|version| (PRIOR[version as usize - 1], prior(version))).collect()),
        ("gguf", vec![("good-outline", outline()), ("good-model", small_model())]),
        ("imatrix", vec![("good-counts", imatrix())]),
        (
            "pack",
            vec![
                ("good-least", least()),
                ("good-small", short(&Sample::small(), true)),
                ("good-sample", short(&Sample::default(), false)),
                ("good-model", packed()),
            ],
        ),
        (
            "plan",
            vec![
                ("good-cold", plan(Objective::Auto, Shares::Auto)),
                ("good-hot", plan(Objective::Hits, Shares::Auto)),
                ("good-rows", plan(Objective::Hits, Shares::Rows)),
            ],
        ),
        ("profile", vec![("good-rk3588", profile())]),
        ("prompts", vec![("good-lines", PROMPTS.as_bytes().to_vec())]),
        ("session", vec![("good-turn", SESSION.as_bytes().to_vec())]),
        ("statistics", vec![("good-counts", statistics().to_json().unwrap())]),
        (
            "text",
            vec![(
                "good-words",
                "Hello, <|im_end|> wörld \u{1f600} 1234\n\n  fn main() {}\t\u{200b}".as_bytes().to_vec(),
            )],
        ),
    ] {
        fs::create_dir_all(corpus(target)).unwrap();
        for (name, bytes) in inputs {
            fs::write(corpus(target).join(name), bytes).unwrap();
        }
    }
}

const CHAT: &str = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m['content'] | trim }}<|im_end|>\n\
                    {%- if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}\
                    {% set ns = namespace(x=0) %}{% macro f(a) %}{{ a[0:2] }}{% endmacro %}{{ f(bos_token) }}";

const PROMPTS: &str = "\"one\"\n{\"text\": \"two\"}\n{\"messages\": [{\"role\": \"user\", \"content\": [{\"text\": \"x\"}]}]}\n\
                       {\"conversations\": [{\"from\": \"human\", \"value\": \"Hi\"}]}\n";

const SESSION: &str = concat!(
    r#"{"schema":"orkpack-session-1","model":"00","tokenizer":"11","#,
    r#""messages":[{"role":"user","content":"Hi"}],"ids":[1,2,3],"random":"00000000deadbeef"}"#
);

/// The shape that the readers hold statistics and plans to.
fn outline_of_reference() -> Outline {
    let bytes = fs::read(fixture("models/reference/tiny-qwen3moe-q4_0.gguf")).unwrap();
    Outline::of(&GgufFile::from_bytes("", bytes).unwrap()).unwrap()
}

fn statistics() -> Statistics {
    let outline = outline_of_reference();
    let shape = outline.shape();
    let mut rng = routed::Rng::new(1);
    let of = |i: usize, layer: &orkpack::model::MoeLayerShape| routed::shares(layer.n_expert(), 3.0, i);
    let block = |tokens, rng: &mut routed::Rng| -> Block { routed::block(shape, tokens, rng, &of) };
    let (calibration, held_out) = (block(600, &mut rng), block(100, &mut rng));
    let (fingerprint, layers) = (outline.fingerprint().to_owned(), routed::layers(shape));
    Statistics::new(fingerprint, "qwen3moe".into(), "fast".into(), layers, calibration, Some(held_out))
        .unwrap()
}

fn plan(objective: Objective, shares: Shares) -> Vec<u8> {
    let (outline, statistics, profile) =
        (outline_of_reference(), statistics(), DeviceProfile::built_in("rk3588").unwrap());
    let mut request = PlanRequest::new(outline.shape(), Routing::Measured(&statistics), &profile);
    (request.objective, request.shares) = (objective, shares);
    request.budget = Some(Bytes(if shares == Shares::Rows { 256 << 10 } else { 64 << 10 }));
    let plan = choose(&request).unwrap();
    assert_eq!(plan.layers.iter().any(|layer| layer.is_by_rows()), shares == Shares::Rows);
    plan.to_json().unwrap()
}

fn profile() -> Vec<u8> {
    let json = DeviceProfile::built_in("rk3588").unwrap().to_json().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
    serde_json::to_vec(&value).unwrap()
}

/// A family that can be planned for, not run, whose every tensor is a few bytes.
fn outline() -> Vec<u8> {
    let stack = |name: &str, dims: [u64; 3]| (format!("blk.0.{name}.weight"), dims);
    let mut builder = GgufBuilder::new().text("general.architecture", "some").text("general.name", "small");
    for (key, value) in
        [("block_count", 1), ("embedding_length", 4), ("expert_count", 2), ("expert_used_count", 1)]
    {
        builder = builder.kv(&format!("some.{key}"), Value::U32(value));
    }
    builder = builder
        .kv("tokenizer.ggml.tokens", Value::Array(["a", "", "é"].map(text).to_vec()))
        .kv("some.rope.scale", Value::F32(0.5))
        .text("tokenizer.chat_template", "{{ messages[0].content }}")
        .tensor("token_embd.weight", Dtype::F16, &[4, 3], vec![0x3c; 24])
        .tensor("blk.0.ffn_gate_inp.weight", Dtype::F32, &[4, 2], numbers(32, 1));
    for (name, dims) in [
        stack("ffn_gate_exps", [4, 2, 2]),
        stack("ffn_up_exps", [4, 2, 2]),
        stack("ffn_down_exps", [2, 4, 2]),
    ] {
        builder = builder.tensor(&name, Dtype::F16, &dims, numbers(32, 2));
    }
    builder.build()
}

fn spec() -> MoeSpec {
    MoeSpec {
        n_layer: 1,
        n_embd: 32,
        n_ff: 32,
        n_expert: 2,
        n_used: 1,
        n_head: 2,
        n_head_kv: 1,
        n_vocab: 260,
        dtype: Dtype::Q8_0,
        ..MoeSpec::default()
    }
}

fn small_model() -> Vec<u8> {
    tiny_moe(&spec())
}

/// A model as a pack, in short.
fn packed() -> Vec<u8> {
    let folder = folder();
    let model = model_in(folder.path(), &small_model());
    let mut request = request(&model, hits(1 << 20));
    request.existing = Existing::Replace;
    let (_, outcome) = convert(request).unwrap();
    readers::shorten(&fs::read(outcome.output).unwrap()).unwrap()
}

/// A pack without copies for a device.
fn least() -> Vec<u8> {
    let sample = Sample::small();
    let contents = sample.small_contents();
    let (chunks, matrices, statistics) = Default::default();
    let contents = Contents { chunks, matrices, statistics, ..contents };
    readers::shorten(&sample.write(&contents).done).unwrap()
}

fn short(sample: &Sample, small: bool) -> Vec<u8> {
    let pack = if small { sample.write(&sample.small_contents()).done } else { sample.pack() };
    readers::shorten(&pack).unwrap()
}

fn imatrix() -> Vec<u8> {
    let mut builder =
        GgufBuilder::new().text("general.type", "imatrix").kv("imatrix.chunk_count", Value::U32(2));
    for layer in 0..2 {
        for part in ["gate", "up", "down"] {
            let counts: Vec<u8> = (0..12).flat_map(|expert| (expert as f32 * 2.0).to_le_bytes()).collect();
            let name = format!("blk.{layer}.ffn_{part}_exps.weight.counts");
            builder = builder.tensor(&name, Dtype::F32, &[1, 12], counts);
        }
    }
    builder.build()
}

const PRIOR: [&str; 6] = ["good-1", "good-2", "good-3", "good-4", "good-5", "good-6"];

fn prior(version: u32) -> Vec<u8> {
    super::verify::prior_container(version)
}

#[test]
fn what_the_sound_inputs_are_made_of_does_not_drift() {
    for (path, bytes) in
        [("gguf/good-outline", outline()), ("foreign/good-4", prior(4)), ("imatrix/good-counts", imatrix())]
    {
        assert!(fs::read(Path::new(&corpus(path))).unwrap() == bytes, "{path} is not what this test makes");
    }
}
