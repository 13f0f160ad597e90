//! A model whose experts are all hot, on the software NPU and beside it on the CPU alone: the same pack, the same
//! number of threads, by turns.

use std::fs;
use std::path::Path;
use std::time::Instant;

use orkpack::runtime::{Check, DeviceChoice, Options, Runtime, Session};

use crate::{median, spread};

const RUNS: usize = 5;
const PROMPT: usize = 64;
const DECODED: usize = 48;

/// The bundled model, packed here.
pub fn bench() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny-moe-q4_k_m.gguf");
    // A run is a few milliseconds, too short for the clock of the processors.
    compare(&crate::load::convert(model, folder.path().join("model.orkpack")), &["wall"]);
}

/// A pack that `orkpack convert --objective hits` made.
pub fn of_pack(path: &Path) {
    compare(path, &["wall", "processor"]);
}

/// Prints both sides by each clock: the one on the wall, and the time that all threads together had a processor.
fn compare(path: &Path, clocks: &[&str]) {
    println!("all hot: {}, tokens/s, median (least–most) of {RUNS}, measured here", path.display());
    for n_threads in [1, 2] {
        let check = Check::Index;
        let options =
            Options { device: DeviceChoice::Sim, check, threads: Some(n_threads), ..Options::default() };
        let runtime = Runtime::open(path, options).expect("a pack");
        runtime.prefault();
        let on_sim = runtime.engine().expect("an engine");
        assert_eq!(on_sim.device(), Some("sim"), "the software NPU takes the pack");
        let alone = runtime.reference().expect("an engine");
        let mut sim = Session::new(&runtime, on_sim, 256, PROMPT);
        let mut cpu = Session::new(&runtime, alone, 256, PROMPT);
        let tokens: Vec<u32> =
            (0..(PROMPT + DECODED) as u32).map(|i| (7 + 31 * i) % runtime.model().n_vocab() as u32).collect();
        let mut measured = [[(); 2]; 2].map(|regime| regime.map(|()| Sides::default()));
        for run in 0..=RUNS {
            let (of_sim, of_cpu) = (once(&mut sim, &tokens), once(&mut cpu, &tokens));
            // The first run does not count.
            for (regime, sides) in measured.iter_mut().enumerate().filter(|_| run > 0) {
                for (clock, sides) in sides.iter_mut().enumerate() {
                    sides.sim.push(of_sim[regime][clock]);
                    sides.cpu.push(of_cpu[regime][clock]);
                }
            }
        }
        let counters = sim.engine().counters().expect("a device's");
        let hot = 100.0 * counters.decode.hit_rate();
        println!("  {n_threads} threads: {hot:.0} % of the matrices hot, {} fallbacks", counters.fallbacks);
        for (regime, name) in measured.iter().zip(["prompt", "decode"]) {
            for (sides, clock) in regime.iter().zip(clocks) {
                let ratio = median(sides.sim.iter().zip(&sides.cpu).map(|(sim, cpu)| sim / cpu).collect());
                let (sim, cpu) = (spread(&sides.sim), spread(&sides.cpu));
                println!("    {name:<7} {clock:<9} sim {sim:>26}   CPU alone {cpu:>26}   ratio {ratio:.2}");
            }
        }
    }
}

/// Tokens per second of both sides, run by run.
#[derive(Default)]
struct Sides {
    sim: Vec<f64>,
    cpu: Vec<f64>,
}

/// Tokens per second of a prompt and of decoding after it, each by both clocks.
fn once(session: &mut Session<'_>, tokens: &[u32]) -> [[f64; 2]; 2] {
    session.clear();
    let (prompt, decoded) = tokens.split_at(PROMPT);
    let mut n_logits = 0;
    let read = rates(prompt.len(), || n_logits += session.prompt(prompt).expect("room").len());
    let decode = || decoded.iter().for_each(|&token| n_logits += session.step(token).expect("room").len());
    let written = rates(decoded.len(), decode);
    std::hint::black_box(n_logits);
    [read, written]
}

fn rates(n: usize, of: impl FnOnce()) -> [f64; 2] {
    let (wall, processor) = (Instant::now(), processor_seconds());
    of();
    [wall.elapsed().as_secs_f64(), processor_seconds() - processor].map(|seconds| n as f64 / seconds)
}

/// Time that the threads of this process had a processor; spinning counts.
fn processor_seconds() -> f64 {
    let tasks = fs::read_dir("/proc/self/task").expect("a Linux kernel's statistics");
    let of_task = |task: fs::DirEntry| {
        // A thread that has just ended has none.
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0)
    };
    tasks.flatten().map(of_task).sum::<f64>() * 1e-9
}
