//! Families that cannot be run: planned and packed all the same, from what every family has.

use std::path::Path;
use std::process::Output;

use orkpack::convert::{StatisticsFrom, prepare};
use orkpack::model::{Model, Outline};
use orkpack::pack::Pack;
use orkpack::pack::verify::{Mode, verify};
use orkpack::plan::Plan;
use orkpack::progress::Silent;
use orkpack::tensor::{Dtype, Value};

use super::layouts::{fused, one_each};
use super::{add, ork_run, orkpack, pack, reference, rename, small};
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, text};
use crate::support::memory_source::MemorySource;
use crate::support::models::{convert, folder, hits, model_in, request};

const LISTED: &str = "architecture `weird` is not supported; supported are: ";
const LIMITS: &str =
    "architecture weird is not one that ork-run can run: no calibration, no run; planned from ";

fn weird(model: MemorySource, from: &str) -> MemorySource {
    rename(model, from, "weird")
}

/// A plan without the family's name, which statistics from an imatrix hold as well.
fn nameless(plan: &[u8]) -> Plan {
    Plan { architecture: String::new(), statistics: None, ..Plan::from_json(plan).unwrap() }
}

fn words(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The shape of every reference model but for its name, found without knowing the family.
#[test]
fn an_unknown_family_has_the_shape_of_its_known_twin() {
    for family in [
        "deepseek2",
        "gpt-oss",
        "qwen35moe",
        "qwen3next",
        "granitemoe",
        "lfm2moe",
        "llama",
        "olmoe",
        "qwen2moe",
        "qwen3moe",
    ] {
        let known = reference(&format!("tiny-{family}-q8_0"));
        let expected = Model::describe(&known).unwrap().shape();
        let mut found = Outline::of(&weird(known, family)).unwrap().shape().clone();
        assert_eq!(std::mem::replace(&mut found.architecture, family.to_owned()), "weird");
        // What layers remember without a cache, tensors alone do not say.
        assert_eq!(std::mem::replace(&mut found.state_bytes, expected.state_bytes), 0);
        assert_eq!(found, expected, "{family}");
    }
    let mut tied = small(MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() });
    tied.remove("output.weight");
    let expected = Model::describe(&tied).unwrap().shape();
    let found = Outline::of(&weird(tied, "qwen3moe")).unwrap();
    assert_eq!(
        (found.shape().dense_bytes, found.shape().dense_weights),
        (expected.dense_bytes, expected.dense_weights)
    );
}

/// A family has the same fingerprint before and after it can be run, but for the family's name.
#[test]
fn an_outline_of_a_known_family_is_its_description() {
    let known = reference("tiny-qwen3moe-q8_0");
    let (outline, model) = (Outline::of(&known).unwrap(), Model::describe(&known).unwrap());
    assert_eq!(outline.shape(), &model.shape());
    assert_eq!(outline.fingerprint(), model.fingerprint(&known).unwrap());
    assert!(outline.runnable().is_ok());
    assert_ne!(Outline::of(&weird(known, "qwen3moe")).unwrap().fingerprint(), outline.fingerprint());
}

#[test]
fn an_unknown_family_is_planned_and_packed_as_its_known_twin() {
    let known = small(MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() });
    let here = folder();
    let expected = pack(here.path(), &known, None);
    let statistics = here.path().join("routing.json");
    std::fs::write(&statistics, &expected.statistics).unwrap();
    let layouts = [known.clone(), fused(known.clone(), "gate", "up"), one_each(known)];
    for (i, twin) in layouts.into_iter().enumerate() {
        let folder = folder();
        let path = model_in(folder.path(), &weird(twin, "qwen3moe").to_gguf());
        let mut choice = hits(1 << 30);
        choice.statistics = StatisticsFrom::File(statistics.clone());
        let foreign = prepare(request(&path, choice.clone()), &mut Silent).err().unwrap().to_string();
        assert!(foreign.contains("another model"), "{foreign}");
        choice.accept_foreign = true;
        let (_, outcome) = convert(request(&path, choice)).unwrap();
        let pack = Pack::open(&outcome.output, Default::default()).unwrap();
        assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
        assert_eq!(pack.manifest().architecture, "weird");
        assert!(nameless(pack.plan()) == nameless(&expected.plan), "{i}: plan");
        let area: Vec<&[u8]> = pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk)).collect();
        assert!(
            area.iter().copied().eq(expected.area.iter().map(|(_, bytes)| bytes.as_slice())),
            "{i}: area"
        );
        let mut back = Vec::new();
        pack.write_gguf(0, &mut back).unwrap();
        assert!(back == std::fs::read(&path).unwrap(), "{i}: the GGUF made again");
        let run = words(&ork_run(folder.path(), &["model.orkpack", "-p", "Hello"]));
        assert!(run.0 == Some(2) && run.2.contains(LISTED), "{}", run.2);
    }
}

/// An imatrix for two layers of eight experts, two used in each.
fn imatrix_in(folder: &Path) {
    let mut file =
        GgufBuilder::new().kv("general.type", text("imatrix")).kv("imatrix.chunk_count", Value::U32(1));
    for layer in 0..2 {
        let counts: [f32; 8] = [90.0, 10.0, 30.0, 5.0, 25.0, 0.0, 20.0, 20.0];
        let bytes = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        let name = format!("blk.{layer}.ffn_gate_exps.weight.counts");
        file = file.tensor(&name, Dtype::F32, &[1, 8], bytes);
    }
    std::fs::write(folder.join("imatrix.gguf"), file.build()).unwrap();
}

#[test]
fn the_commands_do_what_can_be_done_with_an_unknown_family_and_say_what_cannot() {
    let folder = folder();
    let path = folder.path();
    let known = small(MoeSpec::default());
    std::fs::write(path.join("known.gguf"), known.to_gguf()).unwrap();
    std::fs::write(path.join("weird.gguf"), weird(known, "qwen3moe").to_gguf()).unwrap();
    imatrix_in(path);
    let run = |command: &[&str]| words(&orkpack(path, command));

    let plan = |model: &str| run(&["plan", model, "--imatrix", "imatrix.gguf", "--json"]);
    let (known, weird) = (plan("known.gguf"), plan("weird.gguf"));
    assert_eq!((known.0, weird.0), (Some(0), Some(0)), "{}{}", known.2, weird.2);
    assert!(nameless(weird.1.as_bytes()) == nameless(known.1.as_bytes()), "the same plan");
    assert_eq!(weird.2.trim_end(), format!("{LIMITS}imatrix.gguf"));
    assert!(!known.2.contains("ork-run"), "{}", known.2);

    let assumed = run(&["plan", "weird.gguf"]);
    assert_eq!((assumed.0, assumed.2.trim_end()), (Some(0), format!("{LIMITS}its shapes").as_str()));

    let convert = |model: &str| {
        let said = run(&["convert", model, "--imatrix", "imatrix.gguf", "--objective", "hits"]);
        assert_eq!(said.0, Some(0), "{}", said.2);
        let pack = Pack::open(&path.join(model).with_extension("orkpack"), Default::default()).unwrap();
        let area: Vec<Vec<u8>> = pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).to_vec()).collect();
        assert!(!area.is_empty());
        (said.2, area)
    };
    let (known, weird) = (convert("known.gguf"), convert("weird.gguf"));
    assert!(known.1 == weird.1, "the same NPU area");
    assert!(weird.0.contains(&format!("{LIMITS}imatrix.gguf")) && !known.0.contains("ork-run"));
    assert_eq!(run(&["verify", "weird.orkpack"]).0, Some(0));
    let inspect = run(&["inspect", "weird.gguf"]);
    assert!(inspect.0 == Some(0) && inspect.1.contains(LISTED), "{}", inspect.1);
    assert!(inspect.1.contains("experts: 2 layers of 8, 2 used per token"), "{}", inspect.1);

    for refused in [
        run(&["calibrate", "weird.gguf"]),
        run(&["convert", "weird.gguf", "--force"]),
        run(&["plan", "weird.gguf", "--prompts", "weird.gguf"]),
        words(&ork_run(path, &["weird.gguf", "-p", "Hello"])),
        words(&ork_run(path, &["weird.orkpack", "-p", "Hello"])),
    ] {
        assert!(refused.0 == Some(2) && refused.2.contains(LISTED), "{}", refused.2);
        assert!(refused.2.contains("qwen3moe"), "the list of those that are: {}", refused.2);
    }
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let mut model = weird(small(MoeSpec { n_layer: 3, ..MoeSpec::default() }), "qwen3moe");
    let all = Outline::of(&model).unwrap().shape().clone();
    model.set("weird.nextn_predict_layers", Value::U32(1));
    let two = Outline::of(&model).unwrap().shape().clone();
    assert_eq!((two.n_layer, &two.moe_layers[..]), (2, &all.moe_layers[..2]));
    let of_last = |name: &str| name.starts_with("blk.2.") && !name.contains("_exps");
    let last: u64 = model.tensors.iter().filter(|t| of_last(&t.name)).map(|t| t.place.len).sum();
    assert_eq!(two.dense_bytes, all.dense_bytes - last);
    assert_eq!(two.kv_bytes_per_token * 3, all.kv_bytes_per_token * 2);
}

/// What the cache takes where q, k and v come from one matrix, or keys are compressed.
#[test]
fn other_attention_counts_what_its_projections_put_out() {
    let mut model = weird(small(MoeSpec { n_layer: 2, ..MoeSpec::default() }), "qwen3moe");
    let expected = Outline::of(&model).unwrap().shape().kv_bytes_per_token;
    for part in ["q", "k", "v"] {
        model.remove(&format!("blk.0.attn_{part}.weight"));
    }
    add(&mut model, "blk.0.attn_qkv.weight", Dtype::F32, &[64, 64 + 32 + 32], vec![0; 4 * 64 * 128]);
    assert_eq!(Outline::of(&model).unwrap().shape().kv_bytes_per_token, expected);
    model.tensor("blk.0.attn_qkv.weight").name = "blk.0.attn_kv_a_mqa.weight".to_owned();
    let latent = Outline::of(&model).unwrap().shape().kv_bytes_per_token;
    assert_eq!(latent, expected / 2 + 2 * 128);
}

#[test]
fn what_an_unknown_family_lacks_is_named() {
    let refused = |spoil: fn(&mut MemorySource)| {
        let mut model = weird(small(MoeSpec::default()), "qwen3moe");
        spoil(&mut model);
        let refused = Outline::of(&model).unwrap_err().to_string();
        match refused.split_once("cannot be planned either: ") {
            Some((_, problem)) => problem.split("; supported are: ").next().unwrap().to_owned(),
            None => refused,
        }
    };
    for (spoil, says) in [
        (
            (|model| drop(model.metadata.0.remove("weird.expert_count"))) as fn(&mut MemorySource),
            "metadata key `weird.expert_count` is missing",
        ),
        (
            |model| drop(model.metadata.0.remove("weird.expert_used_count")),
            "metadata key `weird.expert_used_count` is missing",
        ),
        (
            |model| model.set("weird.expert_used_count", Value::U32(9)),
            "metadata key `weird.expert_used_count` holds 9, expected 1 to 8",
        ),
        (
            |model| model.set("weird.block_count", Value::U32(1 << 24)),
            "metadata key `weird.block_count` holds 16777216, expected 2, the layers that have tensors",
        ),
        (
            |model| model.set("weird.block_count", Value::U32(1)),
            "metadata key `weird.block_count` holds 1, expected 2, the layers that have tensors",
        ),
        (
            |model| model.set("weird.nextn_predict_layers", Value::U32(2)),
            "metadata key `weird.nextn_predict_layers` holds 2, expected fewer than the 2 layers",
        ),
        (|model| model.remove("blk.1.ffn_gate_inp.weight"), "tensor `blk.1.ffn_gate_inp.weight` is missing"),
        (|model| model.remove("blk.1.ffn_up_exps.weight"), "tensor `blk.1.ffn_up_exps.weight` is missing"),
        (
            |model| model.remove("blk.1.ffn_down_exps.weight"),
            "tensor `blk.1.ffn_down_exps.weight` is missing",
        ),
        (|model| model.remove("token_embd.weight"), "tensor `token_embd.weight` is missing"),
        (
            |model| model.set("weird.embedding_length", Value::U32(32)),
            "tensor `blk.0.ffn_gate_exps.weight` has shape [64, 96, 8], expected [32, 96, 8]",
        ),
        (
            |model| model.tensors.retain(|tensor| !tensor.name.contains("_exps")),
            "no expert tensors found; this is a dense model of architecture weird",
        ),
    ] {
        assert_eq!(refused(spoil), says);
    }
}

#[test]
fn the_plan_of_an_unknown_family_rests_on_its_statistics_file() {
    let folder = folder();
    let path = model_in(folder.path(), &weird(small(MoeSpec::default()), "qwen3moe").to_gguf());
    imatrix_in(folder.path());
    let mut choice = hits(1 << 30);
    choice.statistics = StatisticsFrom::Imatrix(folder.path().join("imatrix.gguf"));
    let prepared = prepare(request(&path, choice), &mut Silent).unwrap();
    let plan = Plan::from_json(&prepared.plan.to_json().unwrap()).unwrap();
    assert_eq!(plan.layers.len(), 2);
    let hottest = plan.layers.iter().map(|layer| layer.ranking[0].expert);
    assert!(hottest.eq([0, 0]), "expert 0 has most of the imatrix's counts");
}
