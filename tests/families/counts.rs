//! Numbers of experts around every width that a number might be stored in, and every share of them used.

use std::process::Output;

use orkpack::calibrate::Statistics;
use orkpack::convert::choose;
use orkpack::model::Model;
use orkpack::pack::Pack;
use orkpack::pack::verify::{Mode, verify};
use orkpack::plan::{Note, Plan, Routing, Skew};
use orkpack::tensor::Value;
use serde_json::Value as Json;

use super::{bits, ork_run, orkpack, pack, small};
use crate::support::gguf_builder::MoeSpec;
use crate::support::models::{folder, hits, model_in};
use orkpack::runtime::DeviceChoice;

fn no_skew(plan: &Plan) -> bool {
    plan.notes.iter().any(|note| matches!(note, Note::NoSkew { .. }))
}

/// Everything that is done with a model, with `n_used` of `n_expert` experts.
fn goes_all_the_way(n_expert: u32, n_used: u32) {
    let case = format!("{n_used} of {n_expert}");
    let model = small(MoeSpec { n_expert, n_used, n_layer: 1, n_ff: 32, ..MoeSpec::default() });
    let described = Model::describe(&model).unwrap().shape();
    let layer = &described.moe_layers[0];
    assert_eq!((layer.n_expert(), layer.n_used), (n_expert as usize, n_used as usize));

    let folder = folder();
    let made = pack(folder.path(), &model, None);
    let statistics = Statistics::from_json(&made.statistics).unwrap();
    let blocks = [Some(&statistics.calibration), statistics.held_out.as_ref()];
    for block in blocks.into_iter().flatten() {
        let calls = &block.layers[0].calls;
        assert_eq!(calls.len(), n_expert as usize, "{case}");
        assert_eq!(calls.iter().sum::<u64>(), block.tokens * u64::from(n_used), "{case}");
    }
    let plan = Plan::from_json(&made.plan).unwrap();
    assert_eq!((plan.layers[0].n_expert, plan.layers[0].n_used), (n_expert, n_used));
    let mut ranked: Vec<u32> = plan.layers[0].ranking.iter().map(|item| item.expert).collect();
    ranked.sort();
    assert!(ranked.iter().copied().eq(0..n_expert), "{case}: every expert is ranked once");
    assert!(n_used < n_expert || no_skew(&plan), "{case}: all are used, none more than another");

    let pack = Pack::open(&made.path, Default::default()).unwrap();
    assert!(verify(&pack, Mode::Full, &|_| ()).is_ok(), "{case}");
    assert_eq!(pack.manifest().dims.n_expert, n_expert);
    assert_eq!(pack.placements().len(), 3 * n_expert as usize, "{case}: everything is placed");
    let last = pack.placements().iter().filter_map(|placed| placed.matrix.expert());
    assert_eq!(last.map(|id| id.expert.0).max(), Some(n_expert - 1));
    assert!(bits(&made.path, DeviceChoice::Sim) == bits(&made.path, DeviceChoice::Cpu), "{case}");
}

#[test]
fn c8_any_number_of_experts_goes_all_the_way() {
    for n_expert in [1, 2, 255, 256, 257, 512, 896, 1024] {
        goes_all_the_way(n_expert, n_expert.min(8));
    }
}

#[test]
fn c11_any_share_of_the_experts_may_be_used() {
    for (n_expert, n_used) in
        [(2, 1), (5, 1), (5, 2), (5, 3), (5, 4), (5, 5), (257, 1), (257, 256), (257, 257)]
    {
        goes_all_the_way(n_expert, n_used);
    }
}

#[test]
fn c11_no_skew_is_assumed_where_all_are_used() {
    for (n_used, expected) in [(4, false), (7, false), (8, true)] {
        let shape = Model::describe(&small(MoeSpec { n_used, ..MoeSpec::default() })).unwrap().shape();
        let plan = choose(&shape, Routing::Assumed(Skew::RANGE), &hits(100 << 10)).unwrap();
        let rate = plan.hit_rates.overall;
        assert!(rate.uniform > 0.0 && rate.uniform < 1.0, "some are resident: {rate:?}");
        // Rates in a plan have nine digits.
        let is_even = (rate.calibration.value - rate.uniform).abs() < 1e-8;
        assert_eq!(is_even, expected, "{n_used} of 8: {rate:?}");
    }
}

fn says(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8(output.stderr.clone()).unwrap())
}

#[test]
fn c11_a_plan_says_when_there_is_no_skew_to_exploit() {
    for (n_used, expected) in [(7, false), (8, true)] {
        let folder = folder();
        let path = folder.path();
        model_in(path, &small(MoeSpec { n_used, ..MoeSpec::default() }).to_gguf());
        let text = String::from_utf8(orkpack(path, &["plan", "model.gguf"]).stdout).unwrap();
        assert_eq!(text.contains("note: no skew to exploit: "), expected, "{text}");
        let json: Json =
            serde_json::from_slice(&orkpack(path, &["plan", "model.gguf", "--json"]).stdout).unwrap();
        let notes = json["notes"].as_array().unwrap();
        assert_eq!(notes.iter().any(|note| note.get("NoSkew").is_some()), expected, "{json}");
    }
}

#[test]
fn c11_more_used_than_there_are_is_refused_by_every_command() {
    let folder = folder();
    let path = folder.path();
    let mut model = small(MoeSpec::default());
    model.set("qwen3moe.expert_used_count", Value::U32(9));
    model_in(path, &model.to_gguf());
    for output in [
        orkpack(path, &["plan", "model.gguf"]),
        orkpack(path, &["convert", "model.gguf"]),
        orkpack(path, &["calibrate", "model.gguf"]),
        ork_run(path, &["model.gguf", "-p", "Hello"]),
    ] {
        let says = says(&output);
        assert_eq!(says.0, Some(2), "{}", says.1);
        assert!(says.1.contains("`qwen3moe.expert_used_count` holds 9, expected 1 to 8"), "{}", says.1);
    }
}
