//! Measurements, as ratios or beside a limit of the same run: `cargo bench`. Nothing here asserts.
//!
//! ```text
//! cargo bench                                     load, plan, kernels, avx2 (the same without AVX-512), hits and hot
//! cargo bench -- kernels                          one part of these
//! cargo bench -- --model X.gguf [PART…]           the model: decode, prefill, context, calibrate, files, memory
//! cargo bench -- --model X.orkpack                its hot experts on the software NPU, beside the CPU alone
//! cargo bench -- --model X.gguf --busy            one thread, by processor time: for a machine that is not idle
//! ORKPACK_PEER_PYTHON=…/python cargo bench -- …   beside llama.cpp, as that Python's llama-cpp-python has it
//! ```
//! Machines are noisy: everything is run several times, the sides by turns, and medians are printed.

#![allow(clippy::print_stdout)]

mod files;
mod hits;
mod hot;
mod kernels;
mod load;
mod memory;
mod peer;
mod plan;
mod speed;
#[path = "../support"]
#[allow(dead_code)]
mod support {
    pub mod gguf_builder;
    pub mod hits;
    pub mod recorder;
    pub mod routed;
}

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

fn main() {
    let mut parts: Vec<String> = std::env::args().skip(1).filter(|part| part != "--bench").collect();
    let model = parts.iter().position(|part| part == "--model").map(|at| {
        let model = parts.get(at + 1).expect("a path after --model").clone();
        parts.drain(at..at + 2);
        std::path::PathBuf::from(model)
    });
    let before = parts.len();
    parts.retain(|part| part != "--busy");
    BUSY.store(parts.len() < before, Ordering::Relaxed);
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    if let Some(model) = model {
        if model.extension().is_some_and(|extension| extension == "orkpack") {
            if wanted("memory") {
                memory::bench(&model);
            }
            return hot::of_pack(&model);
        }
        speed::bench(&model, wanted);
        if wanted("files") {
            files::bench(&model);
        }
        if wanted("memory") {
            memory::bench(&model);
        }
        return;
    }
    let benches: [(&str, fn()); 6] = [
        ("load", load::bench),
        ("plan", plan::bench),
        ("kernels", kernels::bench),
        ("avx2", kernels::bench_avx2),
        ("hits", hits::bench),
        ("hot", hot::bench),
    ];
    for (part, bench) in benches {
        if wanted(part) {
            bench();
        }
    }
}

/// The middle of several values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median, least and most.
fn spread(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({least:.1}–{most:.1})", median(values.to_vec()))
}

/// Whether a busy machine is measured: by the time that this thread, and the peer, had a processor.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Seconds that something takes; on a busy machine, of this thread's processor.
fn seconds<T>(of: impl FnOnce() -> T) -> f64 {
    let now = || match BUSY.load(Ordering::Relaxed) {
        true => {
            let text =
                std::fs::read_to_string("/proc/thread-self/schedstat").expect("a Linux kernel's statistics");
            text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") * 1e-9
        }
        false => START.get_or_init(Instant::now).elapsed().as_secs_f64(),
    };
    let began = now();
    std::hint::black_box(of());
    now() - began
}

static START: OnceLock<Instant> = OnceLock::new();
