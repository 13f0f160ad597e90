//! The planner's cost functions against what the prior system published.
//!
//! Five published figures fix the constants of the CPU and of loading; figures of single cores, published apart from
//! them, those of the NPU. Everything else that was published is predicted and held to it, within 20 % (25 % for one
//! matrix). Nothing that is predicted was fitted. docs/planning.md has the tables and the steps.

use orkpack::model::{MatrixShape, ModelShape};
use orkpack::plan::cost::{Bound, Load, Phase, Rates};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::Dtype;

use crate::support::docs;
use crate::support::published::{LFM, Mix, QWEN36};

/// What the constants are derived from.
mod calibration {
    /// Tokens per second that the reference build decodes of LFM2.5 in Q4_K_M.
    pub const DECODE: f64 = 19.09;
    /// Tokens per second of its prefill, at 64 tokens.
    pub const PREFILL: f64 = 36.2;
    /// Seconds of one cold product of LFM2.5's experts in the prior system.
    pub const COLD_LFM: f64 = 0.688e-3;
    /// Seconds of one of Qwen3.6's.
    pub const COLD_QWEN: f64 = 0.204e-3;
    /// Seconds to load one matrix of LFM2.5's experts from a pack.
    pub const LOAD: f64 = 5.9e-3;
}

/// Most bytes per second that all cores together were seen to stream: 23.1 MB in 0.91 ms, by another driver.
const NPU_CEILING: f64 = 23.068e6 / 0.91e-3;

/// Most that a prediction may be off: of a whole run, and of one matrix.
const RUN: f64 = 0.20;
const MATRIX: f64 = 0.25;

/// A published figure beside what is predicted.
struct Row {
    what: &'static str,
    unit: &'static str,
    published: f64,
    predicted: f64,
    limit: f64,
}

impl Row {
    fn off(&self) -> f64 {
        self.predicted / self.published - 1.0
    }

    fn line(&self) -> String {
        let digits = if self.published < 30.0 { 2 } else { 0 };
        let verdict = if self.off().abs() <= self.limit { "within" } else { "**missed**" };
        format!(
            "| {} | {:.digits$} {} | {:.digits$} | {:+.0} % | {:.0} % | {verdict} |\n",
            self.what,
            self.published,
            self.unit,
            self.predicted,
            100.0 * self.off(),
            100.0 * self.limit
        )
    }
}

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Weights that the experts of one token have, and their bytes in the source.
fn routed(shape: &ModelShape) -> Load {
    let layer = |layer: &orkpack::model::MoeLayerShape| {
        let [weights, bytes] = [MatrixShape::n_weights, |m: &MatrixShape| m.bytes]
            .map(|of| layer.experts[0].iter().map(of).sum::<u64>() as f64 * layer.n_used as f64);
        Load { seconds: weights, bytes }
    };
    shape.moe_layers.iter().map(layer).fold(Load::default(), Load::plus)
}

/// The CPU of the reference build: the two rates that make the cost model give its two speeds. The sides work one
/// after the other and share nothing; work around products is not counted.
fn reference() -> Rates {
    let shape = LFM.shape(Mix::Q4KM);
    let experts = routed(&shape);
    let head = (shape.n_vocab * shape.n_embd) as f64;
    let bytes = shape.dense_bytes as f64 + experts.bytes;
    let body = shape.dense_weights as f64 - head + experts.seconds;
    let (cpu_bytes, tokens) = (bytes * calibration::DECODE, 64.0);
    let cpu_macs = (tokens * body + head) / (tokens / calibration::PREFILL);
    Rates {
        cpu_bytes,
        cpu_shared_bytes: cpu_bytes,
        cpu_macs,
        quantize: 0.0,
        scale: 0.0,
        serial: true,
        ..stream()
    }
}

/// One product alone on one core.
fn single() -> Rates {
    let profile = rk3588();
    let rates = Rates::of(&profile, Bound::Likely);
    let core = profile.rates.npu_core_bytes_per_s.value;
    Rates { npu_bytes: core, submit: profile.latency_us.single_submit.value * 1e-6, program: 0.0, ..rates }
}

/// Linked programs on one core. A submission of the cost model has its first program in it.
fn chain() -> Rates {
    let latency = rk3588().latency_us;
    let program = latency.chain_program.value * 1e-6;
    Rates { submit: latency.chain_submit.value * 1e-6 + program, program, ..single() }
}

/// Products over all cores, each core as in a chain, until memory is the limit. Submissions of one core hide behind
/// the work of the others.
fn stream() -> Rates {
    let profile = rk3588();
    let cores = f64::from(profile.cores.count.value);
    let npu_bytes = (cores * profile.rates.npu_core_bytes_per_s.value).min(NPU_CEILING);
    let program = profile.latency_us.chain_program.value * 1e-6 / cores;
    Rates { npu_bytes, npu_shared_bytes: npu_bytes, submit: program, program, ..single() }
}

/// Microseconds of one of `n` products of int8 weights that the NPU computes by itself.
fn product(rates: &Rates, n_in: u64, n_out: u64, n: f64) -> f64 {
    let npu = rates.npu(n * (n_in * n_out) as f64, 0.0, n);
    1e6 * rates.phase_seconds(&Phase { npu, submits: 1.0, cpu: Load::default() }) / n
}

fn matrices() -> Vec<Row> {
    let row = |what, published, predicted| Row { what, unit: "µs", published, predicted, limit: MATRIX };
    let int8 = |n_in: u64, n_out: u64| 1e6 * reference().cpu((n_in * n_out) as f64, 0.0).seconds;
    vec![
        row("2048 × 512, alone", 281.0, product(&single(), 2048, 512, 1.0)),
        row("512 × 2048, alone", 212.0, product(&single(), 512, 2048, 1.0)),
        row("2048 × 1792, alone", 554.0, product(&single(), 2048, 1792, 1.0)),
        row("1792 × 2048, alone", 555.0, product(&single(), 1792, 2048, 1.0)),
        row("2048 × 512, chain of 8", 165.0, product(&chain(), 2048, 512, 8.0)),
        row("512 × 2048, chain of 8", 172.0, product(&chain(), 512, 2048, 8.0)),
        row("2048 × 1792, chain of 8", 404.0, product(&chain(), 2048, 1792, 8.0)),
        row("2048 × 512, stream", 67.0, product(&stream(), 2048, 512, 1.0)),
        row("512 × 2048, stream", 54.0, product(&stream(), 512, 2048, 1.0)),
        row("2048 × 1792, stream", 152.0, product(&stream(), 2048, 1792, 1.0)),
        row("2048 × 512, int8 on the CPU", 73.0, int8(2048, 512)),
        row("512 × 2048, int8 on the CPU", 76.0, int8(512, 2048)),
        row("2048 × 1792, int8 on the CPU", 263.0, int8(2048, 1792)),
        row("1792 × 2048, int8 on the CPU", 263.0, int8(1792, 2048)),
    ]
}

/// Tokens per second of the prior system's decoding: per token `hit` of the expert products in a stream, the others
/// one by one on the CPU at `cold` seconds each, one side after the other, and the rest as the reference does it.
fn decode(shape: &ModelShape, hit: f64, cold: f64) -> f64 {
    let rates = reference();
    let phases = shape.moe_layers.iter().map(|layer| {
        let products = 3.0 * layer.n_used as f64;
        let hot = products * hit;
        let tile_bytes = layer.experts[0][0].n_weights() as f64;
        let cpu = Load { seconds: (products - hot) * cold, bytes: 0.0 };
        Phase { npu: rates.npu(hot * tile_bytes, 0.0, hot), submits: 0.0, cpu }
    });
    1.0 / (rates.dense_seconds(shape, 1) + rates.layer_seconds(&phases.collect::<Vec<_>>()))
}

/// Tokens per second of a prompt with `hit` of the expert products on the NPU beside the CPU, routing even.
fn prefill(shape: &ModelShape, tokens: u32, hit: f64) -> f64 {
    let rates = Rates { serial: false, ..reference() };
    let phases = shape.moe_layers.iter().flat_map(|layer| {
        let n_expert = layer.n_expert() as f64;
        let calls = f64::from(tokens) * layer.n_used as f64;
        let active = n_expert * (1.0 - (1.0 - layer.n_used as f64 / n_expert).powf(f64::from(tokens)));
        layer.experts[0].map(|matrix| {
            let (weights, hot) = (matrix.n_weights() as f64, hit * active);
            // Flat in rows: an expert gets two of them.
            let npu = rates.npu(hot * weights, 0.0, hot);
            let cpu = rates.cpu(matrix.bytes as f64, weights * calls / active).times(active - hot);
            Phase { npu, submits: 0.0, cpu }
        })
    });
    let seconds = rates.dense_seconds(shape, tokens) + rates.layer_seconds(&phases.collect::<Vec<_>>());
    f64::from(tokens) / seconds
}

/// Tokens per second of a prompt that loads every expert's gate and up before it is used, all of them being called,
/// and leaves the rest to the CPU, one side after the other.
fn batched(shape: &ModelShape, tokens: u32) -> f64 {
    let rates = reference();
    let phases = shape.moe_layers.iter().flat_map(|layer| {
        let n_expert = layer.n_expert() as f64;
        let rows = f64::from(tokens) * layer.n_used as f64 / n_expert;
        let [gate, _, down] = layer.experts[0];
        let n = 2.0 * n_expert;
        let loads = Load { seconds: n * calibration::LOAD, bytes: 0.0 };
        let npu = rates.npu(n * gate.n_weights() as f64, 0.0, n);
        let cold = rates.cpu(down.bytes as f64, rows * down.n_weights() as f64).times(n_expert);
        [Phase { npu, submits: 0.0, cpu: loads }, Phase { cpu: cold, ..Phase::default() }]
    });
    let seconds = rates.dense_seconds(shape, tokens) + rates.layer_seconds(&phases.collect::<Vec<_>>());
    f64::from(tokens) / seconds
}

/// Slowest and fastest tokens per second of a prompt with the partition: each cold product computed row by row, or at
/// the reference's rate. 176 matrices are loaded; what the hot ones take is little beside either.
fn partition_prefill(shape: &ModelShape, tokens: u32, hit: f64) -> [f64; 2] {
    let rates = reference();
    let (experts, cold, rows) = (routed(shape), 1.0 - hit, f64::from(tokens));
    let products = 3.0 * shape.moe_layers.iter().map(|layer| layer.n_used as f64).sum::<f64>();
    let by_row = cold * products * rows * calibration::COLD_LFM;
    let at_once = rates.cpu(0.0, cold * rows * experts.seconds).seconds;
    let rest = rates.dense_seconds(shape, tokens) + 176.0 * calibration::LOAD;
    [by_row, at_once].map(|experts| rows / (rest + experts))
}

fn runs() -> Vec<Row> {
    let (lfm, qwen) = (LFM.shape(Mix::Q4KM), QWEN36.shape(Mix::Q4KM));
    let row = |what, published, predicted| Row { what, unit: "tokens/s", published, predicted, limit: RUN };
    vec![
        row("LFM2.5 decode, partition", 6.56, decode(&lfm, 0.168, calibration::COLD_LFM)),
        row("LFM2.5 prefill 128, every expert loaded", 12.8, batched(&lfm, 128)),
        row("Qwen3.6 prefill 64, CPU", 22.8, prefill(&qwen, 64, 0.0)),
        row("Qwen3.6 prefill 64, both sides at once", 20.5, prefill(&qwen, 64, 0.159)),
        row("Qwen3.6 decode, partition", 3.71, decode(&qwen, 0.159, calibration::COLD_QWEN)),
    ]
}

/// The constants give back the figures that they were derived from.
#[test]
fn the_calibration_is_met_exactly() {
    let (shape, rates) = (LFM.shape(Mix::Q4KM), reference());
    let experts = routed(&shape);
    let decode = rates.dense_seconds(&shape, 1) + rates.cpu(experts.bytes, 0.0).seconds;
    assert!((1.0 / decode - calibration::DECODE).abs() < 1e-9);
    let prompt = rates.dense_seconds(&shape, 64) + rates.cpu(0.0, 64.0 * experts.seconds).seconds;
    assert!((64.0 / prompt - calibration::PREFILL).abs() < 1e-9);
    // No expert of a prompt of 64 is bound by memory, so that the second rate is one of computing.
    let [gate, _, down] = shape.moe_layers[0].experts[0];
    assert!(gate.dtype == Dtype::Q4_K && down.dtype == Dtype::Q6_K);
    for matrix in [gate, down] {
        let macs = 8.0 * matrix.n_weights() as f64;
        assert!(rates.cpu(matrix.bytes as f64, macs).seconds > matrix.bytes as f64 / rates.cpu_bytes);
    }
}

/// The NPU's constants are those of single cores, not of what they predict.
#[test]
fn constants_of_one_core_come_from_programs_of_one_core() {
    let profile = rk3588();
    // K × 128 in one program on one core: 80 µs at K = 2048, 98 µs at 3584.
    let (short, long) = (2048.0 * 128.0, 3584.0 * 128.0);
    let rate = (long - short) / (98e-6 - 80e-6);
    let core = &profile.rates.npu_core_bytes_per_s;
    assert!(core.low() <= rate && rate <= core.high() && (rate / core.value - 1.0).abs() < 0.02, "{rate}");
    for (bytes, micros) in [(short, 80.0), (long, 98.0)] {
        let fixed = micros - 1e6 * bytes / core.value;
        assert!((fixed - profile.latency_us.chain_program.value).abs() < 0.5, "{fixed}");
    }
    assert_eq!(profile.latency_us.chain_submit.value, 96.0);
    assert_eq!(profile.latency_us.single_submit.value, 167.0);
}

#[test]
fn the_past_is_reproduced() {
    let (matrices, runs) = (matrices(), runs());
    let head = "| what | published | predicted | off | limit | |\n|---|--:|--:|--:|--:|---|\n";
    let table = |rows: &[Row]| rows.iter().map(Row::line).fold(head.to_owned(), |text, line| text + &line);
    let refused = if rk3588().max_rows(1792).is_none() { "refused" } else { "allowed" };
    let qwen = QWEN36.shape(Mix::Q4KM);
    let rates = reference();
    let [slow, fast] = partition_prefill(&LFM.shape(Mix::Q4KM), 64, 0.168);
    let cpu = 1.0 / (rates.dense_seconds(&qwen, 1) + rates.cpu(routed(&qwen).bytes, 0.0).seconds);
    let text = format!(
        "\nOne product, one row:\n\n{}| 1792 × 2048, chain and stream | refused | {refused} | | | |\n\n\
         Whole runs:\n\n{}| Qwen3.6 decode, CPU | 6.14 tokens/s | {cpu:.2} | {:+.0} % | | not derivable |\n\
         | LFM2.5 prefill 64, partition | 10.6 tokens/s | {slow:.0} to {fast:.0} | | | not derivable |\n\n",
        table(&matrices),
        table(&runs),
        100.0 * (cpu / 6.14 - 1.0),
    );
    docs::hold("planning.md", "past", &text);
    let constants = format!(
        "\n| constant | value | fixed by |\n|---|--:|---|\n\
         | CPU, bytes | {:.2} GB/s | 19.09 tokens/s |\n\
         | CPU, computing | {:.1} GMAC/s | 36.2 tokens/s |\n\
         | cold product, LFM2.5 | {:.3} ms | 0.688 ms |\n\
         | cold product, Qwen3.6 | {:.3} ms | 0.204 ms |\n\
         | loading a matrix | {:.1} ms | 5.9 ms |\n\
         | one core, bytes | {:.1} GB/s | elsewhere: weights of one core |\n\
         | one core, program | {:.0} µs | elsewhere: 80 and 98 µs for 0.26 and 0.46 MB |\n\
         | chain, submission | {:.0} µs | elsewhere: an individual submission |\n\
         | one product alone | {:.0} µs | elsewhere: the scheduler's floor |\n\
         | all cores, bytes | {:.1} GB/s | elsewhere: 23.1 MB in 0.91 ms, another driver |\n\n",
        rates.cpu_bytes / 1e9,
        rates.cpu_macs / 1e9,
        calibration::COLD_LFM * 1e3,
        calibration::COLD_QWEN * 1e3,
        calibration::LOAD * 1e3,
        single().npu_bytes / 1e9,
        chain().program * 1e6,
        (chain().submit - chain().program) * 1e6,
        single().submit * 1e6,
        stream().npu_bytes / 1e9,
    );
    docs::hold("planning.md", "past constants", &constants);
    for row in matrices.iter().chain(&runs) {
        assert!(row.off().abs() <= row.limit, "{}: {} published, {}", row.what, row.published, row.predicted);
    }
    assert_eq!(refused, "refused");
    assert!(slow < 10.6 && 10.6 < fast, "{slow} to {fast}");
}
