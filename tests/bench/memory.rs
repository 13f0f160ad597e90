//! Anonymous memory at its peak while `ork-run` reads a prompt and generates: beside what it must have.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use orkpack::units::Bytes;

/// Tokens of the prompt.
const PROMPTS: [&str; 2] = ["1", "512"];

/// Generated tokens, and the context.
const SIZES: [&str; 2] = ["64", "640"];

/// What is wanted beyond keys and values and the hot area.
const WANTED: u64 = 150_000_000;

pub fn bench(model: &Path) {
    PROMPTS.iter().for_each(|pp| after(model, pp));
}

/// Generates after a prompt of `pp` tokens.
fn after(model: &Path, pp: &str) {
    let [tg, n_ctx] = SIZES;
    let mut run = Command::new(env!("CARGO_BIN_EXE_ork-run"))
        .arg(model)
        .args(["--bench", "--reps", "1", "--json", "--pp", pp, "--tg", tg, "-c", n_ctx])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("ork-run");
    let status = format!("/proc/{}/status", run.id());
    let mut peak = 0;
    while run.try_wait().expect("a child").is_none() {
        peak = peak.max(anonymous(&status));
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = run.wait_with_output().expect("an output");
    let run: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a document");
    let bytes = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    let context = bytes(&run["context"]["kv_bytes"]) + bytes(&run["context"]["state_bytes"]);
    let hot = bytes(&run["device"]["weight_bytes"]) + bytes(&run["device"]["scratch_bytes"]);
    println!(
        "  memory: {} anonymous at the peak, prompt of {pp} (measured here); context of {n_ctx} {}, hot area {}; {} beyond \
         these, wanted: {}",
        Bytes(peak),
        Bytes(context),
        Bytes(hot),
        Bytes(peak.saturating_sub(context + hot)),
        Bytes(WANTED)
    );
}

/// Bytes of anonymous memory that a process has now; 0 once it has ended.
fn anonymous(status: &str) -> u64 {
    let text = std::fs::read_to_string(status).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
