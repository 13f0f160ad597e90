//! Decode, prefill, long contexts and calibration of a model, on the CPU from its source rows; by turns with the peer.

use std::path::Path;
use std::time::Duration;

use orkpack::calibrate;
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{MatrixShape, Model};
use orkpack::runtime::{Options, Runtime, Session};
use orkpack::threads::Pool;

use crate::kernels::plain_read;
use crate::peer::Peer;
use crate::{median, seconds, spread};

const RUNS: usize = 5;
const DECODED: usize = 64;
/// Positions of the long contexts, and tokens decoded there.
const LONG: [usize; 2] = [4096, 16384];
const DECODED_LONG: usize = 16;
/// Tokens of the calibration text.
const CALIBRATED: usize = 4096;

pub fn bench(path: &Path, wanted: impl Fn(&str) -> bool) {
    let mut peer = Peer::start();
    let n_ctx = if wanted("context") { LONG[1] + 512 } else { 1024 };
    if let Some(peer) = &mut peer {
        let took = peer.ask(&["load", &path.to_string_lossy(), &n_ctx.to_string()]);
        println!("peer: loaded in {took:.2} s (measured here)");
    }
    println!("{}: tokens/s, median (least–most) of {RUNS}, measured here", path.display());
    let busy = crate::BUSY.load(std::sync::atomic::Ordering::Relaxed);
    for n_threads in if busy { 1..=1 } else { 1..=2 } {
        let options = Options { threads: Some(n_threads), ..Options::default() };
        let runtime = Runtime::open(path, options).expect("a model");
        runtime.prefault();
        let mut side = Side { runtime: &runtime, n_ctx, peer: peer.as_mut() };
        if wanted("decode") {
            side.compare(
                "decode",
                DECODED,
                RUNS,
                |session, tokens| decode(session, 1, tokens),
                &["decode", "64"],
            );
            side.bandwidth();
        }
        for (name, n) in [("pp64", 64), ("pp512", 512)] {
            if wanted("prefill") {
                let task = ["prefill", &n.to_string()];
                side.compare(name, n, RUNS, |session, tokens| prefill(session, &tokens[..n]), &task);
            }
        }
        for position in LONG {
            // Reading so much takes minutes: with all threads only, and without a run that does not count.
            if wanted("context") && (busy || n_threads == 2) {
                let task = ["at", &position.to_string(), &DECODED_LONG.to_string()];
                let ours = |session: &mut Session<'_>, tokens: &[u32]| decode(session, position, tokens);
                side.compare(&format!("decode at {position}"), DECODED_LONG, 0, ours, &task);
            }
        }
        if wanted("calibrate") {
            calibration(&runtime, path, n_threads);
        }
    }
}

struct Side<'a> {
    runtime: &'a Runtime,
    n_ctx: usize,
    peer: Option<&'a mut Peer>,
}

impl Side<'_> {
    /// Prints how fast decoding reads weights, beside a plain read of memory in the same run.
    fn bandwidth(&self) {
        let shape = self.runtime.model().shape();
        let of_expert = |matrices: &[MatrixShape; 3]| matrices.iter().map(|matrix| matrix.bytes).sum::<u64>();
        let routed: f64 = shape
            .moe_layers
            .iter()
            .map(|layer| {
                let bytes: u64 = layer.experts.iter().map(of_expert).sum();
                bytes as f64 * layer.n_used as f64 / layer.n_expert() as f64
            })
            .sum();
        let bytes = shape.dense_bytes as f64 + routed;
        let n_threads = self.runtime.n_threads();
        let tokens = tokens(self.runtime.model());
        let engine = self.runtime.reference().expect("an engine");
        let mut session = Session::new(self.runtime, engine, self.n_ctx, 512);
        let (mut ours, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..RUNS {
            ours.push(bytes * DECODED as f64 / decode(&mut session, 1, &tokens) / 1e9);
            plain.push(plain_read(n_threads));
        }
        let share = 100.0 * median(ours.clone()) / median(plain.clone());
        println!(
            "  weights          {n_threads} threads  {:>24} GB/s at {:.0} MB a token; plain read {:>24} GB/s; {share:.0} %",
            spread(&ours),
            bytes / 1e6,
            spread(&plain)
        );
    }

    /// Prints tokens per second of `n` tokens, ours and the peer's, after a run of each that does not count, unless it
    /// is the only one.
    fn compare(
        &mut self,
        name: &str,
        n: usize,
        runs: usize,
        ours: impl Fn(&mut Session<'_>, &[u32]) -> f64,
        task: &[&str],
    ) {
        let n_threads = self.runtime.n_threads();
        let tokens = tokens(self.runtime.model());
        let threads = n_threads.to_string();
        let task: Vec<&str> = task.iter().copied().chain([threads.as_str()]).collect();
        let engine = self.runtime.reference().expect("an engine");
        let mut session = Session::new(self.runtime, engine, self.n_ctx, 512);
        let (mut mine, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for run in 0..=runs {
            let rate = n as f64 / ours(&mut session, &tokens);
            let peers = self.peer.as_mut().map(|peer| {
                rest();
                n as f64 / peer.ask(&task)
            });
            rest();
            if run > 0 || runs == 0 {
                mine.push(rate);
                ratios.extend(peers.map(|peers| rate / peers));
                theirs.extend(peers);
            }
        }
        print!("  {name:<16} {n_threads} threads  {:>24}", spread(&mine));
        match ratios.is_empty() {
            true => println!(),
            false => println!("   llama.cpp {:>24}   ratio {:.2}", spread(&theirs), median(ratios)),
        }
    }
}

/// Lets the other side's threads fall asleep.
fn rest() {
    std::thread::sleep(Duration::from_millis(300));
}

/// Enough tokens for everything, spread over the vocabulary: they route like nothing in particular.
fn tokens(model: &Model) -> Vec<u32> {
    (0..LONG[1] as u32 + 512).map(|i| (7 + 31 * i) % model.n_vocab() as u32).collect()
}

fn prefill(session: &mut Session<'_>, tokens: &[u32]) -> f64 {
    session.clear();
    seconds(|| session.prompt(tokens).map(<[f32]>::len).expect("room"))
}

/// Seconds of decoding after `position` tokens.
fn decode(session: &mut Session<'_>, position: usize, tokens: &[u32]) -> f64 {
    let n = if position == 1 { DECODED } else { DECODED_LONG };
    prefill(session, &tokens[..position]);
    session.step(tokens[position]).expect("room");
    seconds(|| tokens[position..][..n].iter().for_each(|&token| drop(session.step(token).map(<[f32]>::len))))
}

/// Calibration of 4k tokens beside our own prefill of the same windows.
fn calibration(runtime: &Runtime, path: &Path, n_threads: usize) {
    let opened = orkpack::source::open(path, Default::default(), &Default::default()).expect("a model");
    let (source, pool) = (opened.source(), std::sync::Arc::new(Pool::new(n_threads)));
    let model = runtime.model();
    let weights = std::sync::Arc::clone(model.weights());
    let mut executor = CpuExecutor::new(source, weights, pool, KernelMode::Fast).expect("an executor");
    let text = tokens(model)[..CALIBRATED].to_vec();
    let (mut counted, mut plain) = (Vec::new(), Vec::new());
    let mut session = Session::new(runtime, runtime.reference().expect("an engine"), 512, 512);
    for _ in 0..3 {
        let texts = [text.clone()];
        let took = seconds(|| {
            let cut = calibrate::Cut { held_out_every: 4, ..calibrate::Cut::default() };
            calibrate::run(model, &mut executor, &texts, cut, &mut |_, _| std::ops::ControlFlow::Continue(()))
                .map(drop)
                .expect("counts")
        });
        counted.push(CALIBRATED as f64 / took);
        let took: f64 = text.chunks(512).map(|window| prefill(&mut session, window)).sum();
        plain.push(CALIBRATED as f64 / took);
    }
    let ratio = median(counted.clone()) / median(plain.clone());
    println!(
        "  calibrate        {n_threads} threads  {:>24}   own prefill {:>24}   ratio {ratio:.2}",
        spread(&counted),
        spread(&plain)
    );
}
