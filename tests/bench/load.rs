//! Loading hot experts: one buffer and one read per chunk, beside the 5.9 ms per matrix of the prior system.

use std::path::{Path, PathBuf};
use std::time::Instant;

use orkpack::convert::{Choice, Request, StatisticsFrom, prepare};
use orkpack::pack::Existing;
use orkpack::plan::Objective;
use orkpack::profile::DeviceProfile;
use orkpack::progress::Silent;
use orkpack::runtime::{Check, DeviceChoice, Options, Runtime};
use orkpack::tensor::Dtype;

use crate::median;
use crate::support::gguf_builder::{MoeSpec, tiny_moe};

/// Milliseconds per matrix of the system that this one replaces: measured by others on a board.
const PRIOR_MS: f64 = 5.9;
const RUNS: usize = 9;

pub fn bench() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = pack(folder.path());
    println!("load: expert matrices of 2048 x 1792, from the page cache into the software NPU's memory");
    for (what, check) in [("checked", Check::Loaded), ("trusted", Check::Index)] {
        let options = Options { device: DeviceChoice::Sim, check, threads: Some(1), ..Options::default() };
        let mut per_matrix = Vec::new();
        let mut of_copy = Vec::new();
        for _ in 0..RUNS {
            let runtime = Runtime::open(&path, options.clone()).expect("a pack");
            let engine = runtime.engine().expect("an engine");
            let loaded = engine.loaded().expect("a device");
            let ms = loaded.time.as_secs_f64() * 1e3;
            per_matrix.push(ms / f64::from(loaded.matrices));
            of_copy.push(ms / copy_ms(&path, loaded.bytes as usize));
        }
        let (ms, ratio) = (median(per_matrix), median(of_copy));
        println!(
            "  {what}: {ms:.3} ms per matrix (measured here), {:.1} times as fast as the prior system's {PRIOR_MS} ms \
             (measured by others, on a board); {ratio:.2} times a plain read of the same bytes",
            PRIOR_MS / ms
        );
    }
}

/// A plain read of as many bytes of the same file into fresh memory.
fn copy_ms(path: &Path, bytes: usize) -> f64 {
    use std::io::Read;
    let began = Instant::now();
    let mut file = std::fs::File::open(path).expect("the pack").take(bytes as u64);
    let mut buffer = Vec::with_capacity(bytes);
    file.read_to_end(&mut buffer).expect("the pack's bytes");
    std::hint::black_box(&buffer);
    began.elapsed().as_secs_f64() * 1e3
}

fn pack(folder: &Path) -> PathBuf {
    let spec = MoeSpec {
        n_layer: 1,
        n_embd: 2048,
        n_ff: 1792,
        n_expert: 8,
        n_used: 2,
        n_head: 16,
        n_head_kv: 4,
        dtype: Dtype::Q8_0,
        ..MoeSpec::default()
    };
    let model = folder.join("model.gguf");
    std::fs::write(&model, tiny_moe(&spec)).expect("room for a model");
    convert(model, folder.join("model.orkpack"))
}

/// A pack of the model with as many hot experts as there is room for.
pub fn convert(model: PathBuf, output: PathBuf) -> PathBuf {
    let request = Request {
        output,
        model,
        existing: Existing::Keep,
        choice: Choice {
            profile: DeviceProfile::built_in(DeviceProfile::DEFAULT).expect("a profile"),
            budget: None,
            domains: 1,
            objective: Objective::Hits,
            shares: orkpack::plan::Shares::Auto,
            force_hot: Vec::new(),
            statistics: StatisticsFrom::Found,
            ram: None,
            accept_foreign: false,
        },
        plan: None,
        thin: false,
        allow_nonfinite: false,
        n_threads: 2,
        keep_statistics: false,
    };
    let prepared = prepare(request, &mut Silent).expect("a plan");
    prepared.write(&mut Silent).expect("a pack").output
}
