//! What files of any family may differ in: how experts are stored, what routers are stored as, how many experts
//! there are and in which layers, and families that can be planned but not run.

mod counts;
mod dense;
mod layouts;
mod outlines;
mod routers;

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use assert_cmd::Command;

use orkpack::convert::StatisticsFrom;
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::gguf::GgufFile;
use orkpack::model::{Model, State, Wanted, forward};
use orkpack::pack::{Digest, Existing, Pack};
use orkpack::runtime::{DeviceChoice, Session};
use orkpack::tensor::{Dtype, TensorInfo, TensorSource};
use orkpack::threads::Pool;

use crate::support::fixture;
use crate::support::gguf_builder::{MoeSpec, text, tiny_moe};
use crate::support::memory_source::MemorySource;
use crate::support::models::{convert, hits, model_in, request, runtime};

/// A model with a tokenizer, small enough to be converted in no time.
pub fn small(spec: MoeSpec) -> MemorySource {
    let n_ff = spec.n_ff.min(96);
    let spec = MoeSpec { n_embd: 64, n_ff, n_head: 2, n_head_kv: 1, ..spec };
    MemorySource::copy(&GgufFile::from_bytes("small", tiny_moe(&spec)).unwrap())
}

/// The same model under another architecture's name.
pub fn rename(mut model: MemorySource, from: &str, to: &str) -> MemorySource {
    let keys = std::mem::take(&mut model.metadata.0).into_iter();
    model.metadata.0 =
        keys.map(|(key, value)| (key.replacen(&format!("{from}."), &format!("{to}."), 1), value)).collect();
    model.set("general.architecture", text(to));
    model
}

/// Runs `orkpack` in a folder.
pub fn orkpack(folder: &Path, words: &[&str]) -> Output {
    command(env!("CARGO_BIN_EXE_orkpack"), folder, words)
}

/// Runs `ork-run` in a folder.
pub fn ork_run(folder: &Path, words: &[&str]) -> Output {
    command(env!("CARGO_BIN_EXE_ork-run"), folder, words)
}

fn command(binary: &str, folder: &Path, words: &[&str]) -> Output {
    Command::new(binary).current_dir(folder).args(words).write_stdin("").output().unwrap()
}

/// The logits after a prompt, with the pack's hot experts on this device, as bits.
pub fn bits(pack: &Path, device: DeviceChoice) -> Vec<u32> {
    let tokens: Vec<u32> = (40..48).collect();
    let runtime = runtime(pack, device, 2);
    let mut session = Session::new(&runtime, runtime.engine().unwrap(), 64, 8);
    let logits = session.prompt(&tokens).unwrap();
    assert!(logits.iter().all(|logit| logit.is_finite()));
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// A tensor and its bytes, out of a model.
pub fn take(model: &mut MemorySource, name: &str) -> (TensorInfo, Vec<u8>) {
    let (info, data) = (model.tensor(name).clone(), model.bytes_of(name).clone());
    model.remove(name);
    (info, data)
}

pub fn add(model: &mut MemorySource, name: &str, dtype: Dtype, dims: &[u64], data: Vec<u8>) {
    let (name, dims, place) = (name.to_owned(), dims.to_vec(), model.tensors[0].place);
    model.add(TensorInfo { name, dtype, dims, place }, data);
}

/// The logits of a few tokens, as bits.
pub fn logits(model: &MemorySource, mode: KernelMode) -> Vec<u32> {
    let source: Arc<dyn TensorSource> = Arc::new(model.clone());
    let model = Model::describe(source.as_ref()).unwrap();
    let weights = Arc::clone(model.weights());
    let mut cpu = CpuExecutor::new(source, weights, Arc::new(Pool::new(2)), mode).unwrap();
    let (mut state, mut out) = (State::new(&model, 16), Vec::new());
    let tokens: Vec<u32> = (0..9).map(|i| i * 7 % model.n_vocab() as u32).collect();
    forward(&model, &mut cpu, &mut state, &tokens, Wanted::All, &mut out).unwrap();
    assert!(out.iter().all(|logit| logit.is_finite()));
    out.into_iter().map(f32::to_bits).collect()
}

pub fn reference(file: &str) -> MemorySource {
    let path = fixture(&format!("models/reference/{file}.gguf"));
    MemorySource::copy(&GgufFile::open(&path, Default::default(), &Default::default()).unwrap())
}

/// What a pack holds for the NPU, and the plan that it was made by.
pub struct Made {
    pub path: PathBuf,
    pub plan: Vec<u8>,
    pub statistics: Vec<u8>,
    pub area: Vec<(Digest, Vec<u8>)>,
    pub scales: Vec<Vec<u32>>,
}

/// Converts with these statistics, or such as a short text gives.
pub fn pack(folder: &Path, model: &MemorySource, statistics: Option<&[u8]>) -> Made {
    let path = model_in(folder, &model.to_gguf());
    let mut choice = hits(1 << 30);
    choice.statistics = match statistics {
        Some(statistics) => {
            std::fs::write(folder.join("routing.json"), statistics).unwrap();
            StatisticsFrom::File(folder.join("routing.json"))
        }
        None => {
            std::fs::write(folder.join("prompt.txt"), "The expert in the layer was used 12 times.").unwrap();
            StatisticsFrom::Prompts(vec![folder.join("prompt.txt")])
        }
    };
    let mut request = request(&path, choice);
    request.existing = Existing::Replace;
    let (_, outcome) = convert(request).unwrap();
    let pack = Pack::open(&outcome.output, Default::default()).unwrap();
    let area = pack.chunks().iter().map(|chunk| {
        let digest = pack.section(chunk.section).unwrap().digests[0];
        (digest, pack.chunk_bytes(chunk).to_vec())
    });
    let scales = pack.placements().iter().map(|placed| pack.scales(placed).map(f32::to_bits).collect());
    Made {
        path: outcome.output.clone(),
        plan: pack.plan().to_vec(),
        statistics: pack.statistics().unwrap().to_vec(),
        area: area.collect(),
        scales: scales.collect(),
    }
}
