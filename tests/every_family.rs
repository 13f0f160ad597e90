//! Every family in a pack: some experts hot, all experts hot, some rows of all experts hot, the software NPU and the CPU to the bit, and a naive
//! float model of the int8 contract within what its rounding allows.

#![allow(clippy::print_stdout)]

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use orkpack::convert::Choice;
use orkpack::executor::cpu::KernelMode;
use orkpack::pack::Pack;
use orkpack::plan::{Plan, Shares};
use orkpack::runtime::{Calls, DeviceChoice, Options, Runtime, Session};

use crate::support::models::{calibrate_beside, convert, folder, hits, request};
use crate::support::naive_executor::{NaiveExecutor, hot_matrices, stepwise};
use crate::support::reference::{Reference, bundled};

/// A copy of the model with its routing statistics beside it, counted over its own prompt: not every family's text
/// can be split into tokens yet.
fn calibrated(reference: &Reference, folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    fs::copy(&reference.path, &path).unwrap();
    calibrate_beside(&path, &reference.prompt());
    path
}

fn packed(model: &Path, budget: u64, shares: Shares) -> PathBuf {
    let mut request = request(model, Choice { shares, ..hits(budget) });
    request.output = model.with_extension(format!("{budget}.{shares:?}.orkpack"));
    convert(request).unwrap().1.output
}

/// Logits after every token, fed one at a time, and what was counted.
fn logits(pack: &Path, device: DeviceChoice, tokens: &[u32]) -> (Vec<f32>, Calls) {
    let options =
        Options { device, kernel: KernelMode::Exact, threads: Some(1), strict: true, ..Options::default() };
    let runtime = Runtime::open(pack, options).unwrap();
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), tokens.len(), 1);
    let logits = tokens.iter().flat_map(|token| session.step(*token).unwrap().to_vec()).collect();
    let counters = session.engine().counters().unwrap();
    assert_eq!(counters.fallbacks, 0);
    let account = counters.account;
    assert!(account.programs > 0, "{device:?}: {account:?}");
    assert_eq!(account.submissions > 0, device == DeviceChoice::Sim, "{device:?}: {account:?}");
    (logits, counters.decode)
}

fn rms(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (squares / a.len() as f64).sqrt()
}

/// What a pack of some budget is held to; whether every call is hot, and how many of a call's matrices.
fn check(reference: &Reference, pack: &Path, is_all: bool, share: Range<f64>) {
    let (name, model, prompt) = (reference.name(), &reference.model, reference.prompt());
    let (sim, calls) = logits(pack, DeviceChoice::Sim, &prompt);
    let (cpu, _) = logits(pack, DeviceChoice::Cpu, &prompt);
    let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
    assert!(bits(&sim) == bits(&cpu), "{name}: the software NPU and the CPU disagree");
    assert!(calls.hot_down > 0 && calls.hot_gate_up > 0, "{name}: {calls:?}");
    assert_eq!(calls.hot_gate_up == calls.all, is_all, "{name}: {calls:?}");
    assert!(share.contains(&calls.hit_rate()), "{name}: {calls:?}");

    let mut naive = NaiveExecutor::new(&*reference.file, model.weights());
    let exact = stepwise(model, &mut naive, &prompt);
    naive.hot.extend(hot_matrices(&Pack::open(pack, Default::default()).unwrap()));
    let contract = stepwise(model, &mut naive, &prompt);
    let (ours, theirs, apart) = (rms(&sim, &exact), rms(&contract, &exact), rms(&sim, &contract));
    println!("{name}: rms {ours:.4} from f32, the naive contract {theirs:.4}, {apart:.6} apart");
    assert!(apart < ours / 20.0, "{name}");
    assert!(ours < 1.1 * theirs, "{name}: int8 costs {ours}, the contract {theirs}");
}

#[test]
fn some_hot_all_hot_and_rows_of_all_hot_run_on_the_software_npu() {
    for reference in bundled().iter().filter(|reference| reference.dtype() == "Q8_0") {
        let folder = folder();
        let model = calibrated(reference, folder.path());
        let all = packed(&model, 1 << 30, Shares::Auto);
        check(reference, &all, true, 1.0..1.001);
        let plan = Plan::from_json(Pack::open(&all, Default::default()).unwrap().plan()).unwrap();
        let half = plan.footprint.weight_bytes / 2;
        check(reference, &packed(&model, half, Shares::Auto), false, 0.01..0.99);
        // Gate and up serve more for their bytes, so they are filled first.
        check(reference, &packed(&model, 9 * half / 5, Shares::Rows), true, 0.7..0.99);
    }
}
