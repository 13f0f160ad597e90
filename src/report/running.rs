//! The result of a run of `ork-run`: speeds, hits, what the device did.

use std::fmt::Write;

use serde::Serialize;

use crate::model::evaluate::{Comparison, Perplexity};
use crate::runtime::{Counters, Loaded, Lookup, Reading, Runtime, Session, Speed};
use crate::units::Bytes;

/// A run as JSON (schema: `formats/run.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct RunDocument {
    /// `orkpack-run-1`.
    pub schema: &'static str,
    /// The model's file.
    pub file: String,
    /// Which numbers were computed: `source rows`, or `int8 inside the cut, source rows outside`.
    pub arithmetic: &'static str,
    /// Threads of the CPU.
    pub threads: u64,
    /// The room for a conversation.
    pub context: ContextPart,
    /// What was read and answered, turn by turn; a prompt is one turn.
    pub turns: Vec<TurnPart>,
    /// Turns that did not fit or could not be rendered, and so were not said.
    pub refused: u64,
    /// Text of the last turn; `null` where token ids were asked for or nothing was generated.
    pub text: Option<String>,
    /// Token ids generated in the last turn.
    pub tokens: Vec<u32>,
    /// Reading the prompt.
    pub prefill: SpeedPart,
    /// Generating.
    pub decode: SpeedPart,
    /// Of `--lookup`.
    pub lookup: Option<LookupPart>,
    /// The device; `null` where everything came from source rows.
    pub device: Option<DevicePart>,
    /// Of `--perplexity`.
    pub perplexity: Option<PerplexityPart>,
    /// Of `--compare`.
    pub comparison: Option<ComparisonPart>,
}

/// What the context takes when it is full. Estimated from the model's sizes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ContextPart {
    /// Tokens that fit.
    pub tokens: u64,
    /// Bytes of keys and values.
    pub kv_bytes: u64,
    /// Bytes that layers without these remember.
    pub state_bytes: u64,
}

/// One turn. Counted.
#[derive(Clone, Debug, Serialize)]
pub struct TurnPart {
    /// Tokens of the whole conversation up to the answer.
    pub prompt_tokens: u64,
    /// Of these, the tokens that were there from the turns before.
    pub reused_tokens: u64,
    /// Of these, the tokens that went through the model.
    pub computed_tokens: u64,
    /// The answer; `null` where token ids were asked for.
    pub text: Option<String>,
    /// The answer's token ids.
    pub tokens: Vec<u32>,
}

impl TurnPart {
    /// A turn that took this reading and gave this answer.
    pub fn of(reading: Reading, text: Option<&str>, tokens: &[u32]) -> TurnPart {
        TurnPart {
            prompt_tokens: (reading.reused + reading.computed) as u64,
            reused_tokens: reading.reused as u64,
            computed_tokens: reading.computed as u64,
            text: text.map(str::to_owned),
            tokens: tokens.to_vec(),
        }
    }
}

/// How fast tokens went by.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct SpeedPart {
    /// Tokens.
    pub tokens: u64,
    /// Tokens per second on this host, measured.
    pub measured_per_second: f64,
    /// Tokens per second on the profile's device, simulated; `null` without a device.
    pub simulated_per_second: Option<f64>,
}

impl From<Speed> for SpeedPart {
    fn from(speed: Speed) -> SpeedPart {
        SpeedPart {
            tokens: speed.tokens,
            measured_per_second: speed.measured(),
            simulated_per_second: speed.modelled(),
        }
    }
}

/// What guessing from text that repeats itself did. Counted.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LookupPart {
    /// Times that guessed tokens went through the model with the one before them.
    pub batches: u64,
    /// Tokens guessed.
    pub drafted: u64,
    /// Of these, the tokens that were chosen.
    pub accepted: u64,
}

impl From<Lookup> for LookupPart {
    fn from(Lookup { batches, drafted, accepted }: Lookup) -> LookupPart {
        LookupPart { batches, drafted, accepted }
    }
}

/// What the device held and did. Counts are measured.
#[derive(Clone, Debug, Serialize)]
pub struct DevicePart {
    /// `cpu`, `sim`, …
    pub name: String,
    /// Chunks on it.
    pub chunks: u64,
    /// Bytes of weights mapped.
    pub weight_bytes: u64,
    /// Bytes of programs, tasks, activations and results mapped.
    pub scratch_bytes: u64,
    /// Milliseconds to load, measured on this host.
    pub load_ms: f64,
    /// Matrices loaded.
    pub matrices: u64,
    /// Expert calls while prompts were read.
    pub prefill_calls: u64,
    /// Share of expert matrices that were hot then, 0 to 1.
    pub prefill_hit_rate: f64,
    /// Expert calls while tokens were generated.
    pub decode_calls: u64,
    /// Share of expert matrices that were hot then, 0 to 1.
    pub decode_hit_rate: f64,
    /// Expert calls with at least gate and up on the device.
    pub device_calls: u64,
    /// Register programs executed.
    pub programs: u64,
    /// Submissions.
    pub submissions: u64,
    /// Milliseconds that the CPU waited for the device, measured on this host.
    pub waited_ms: f64,
    /// Products that the CPU did in its place.
    pub fallbacks: u64,
    /// Why the first of them, or why not everything was loaded.
    pub failure: Option<String>,
}

impl RunDocument {
    /// The document of a session, without what it generated or scored.
    pub fn of(runtime: &Runtime, session: &Session<'_>) -> RunDocument {
        let engine = session.engine();
        let device = match (engine.device(), engine.loaded(), engine.counters()) {
            (Some(name), Some(loaded), Some(counters)) => Some(DevicePart::of(name, loaded, &counters)),
            _ => None,
        };
        let [kv_bytes, state_bytes] = runtime.context_bytes(session.n_ctx());
        RunDocument {
            schema: "orkpack-run-1",
            file: runtime.path().display().to_string(),
            arithmetic: match device {
                Some(_) => "int8 inside the cut, source rows outside",
                None => "source rows",
            },
            threads: runtime.n_threads() as u64,
            context: ContextPart { tokens: session.n_ctx() as u64, kv_bytes, state_bytes },
            turns: Vec::new(),
            refused: 0,
            text: None,
            tokens: Vec::new(),
            prefill: session.prefill().into(),
            decode: session.decode().into(),
            lookup: session.lookup().map(LookupPart::from),
            device,
            perplexity: None,
            comparison: None,
        }
    }
}

impl RunDocument {
    /// Takes in what was said; the last answer is the run's.
    pub fn take_turns(&mut self, turns: Vec<TurnPart>) {
        if let Some(last) = turns.last() {
            (self.text, self.tokens) = (last.text.clone(), last.tokens.clone());
        }
        self.turns = turns;
    }
}

impl PerplexityPart {
    /// What a text scored, and what the reference scored for it.
    pub fn of(scored: Perplexity, reference: Option<Perplexity>) -> PerplexityPart {
        PerplexityPart {
            nll: scored.nll,
            perplexity: scored.value(),
            scored: scored.n_scored as u64,
            reference_perplexity: reference.map(|reference| reference.value()),
        }
    }
}

impl From<&Comparison> for ComparisonPart {
    fn from(comparison: &Comparison) -> ComparisonPart {
        ComparisonPart {
            positions: comparison.n_positions(),
            top1_agreement: comparison.top1_agreement(),
            mean_kl: comparison.mean_kl(),
            max_kl: comparison.max_kl(),
            max_logit_error: comparison.max_logit_error(),
            first_difference: comparison.first_difference().map(|difference| difference.position),
        }
    }
}

impl DevicePart {
    /// What an engine counted.
    pub fn of(name: &str, loaded: &Loaded, counters: &Counters) -> DevicePart {
        let account = &counters.account;
        DevicePart {
            name: name.to_owned(),
            chunks: loaded.chunks.into(),
            weight_bytes: account.weight_bytes,
            scratch_bytes: account.scratch_bytes,
            load_ms: loaded.time.as_secs_f64() * 1e3,
            matrices: loaded.matrices.into(),
            prefill_calls: counters.prefill.all,
            prefill_hit_rate: counters.prefill.hit_rate(),
            decode_calls: counters.decode.all,
            decode_hit_rate: counters.decode.hit_rate(),
            device_calls: counters.prefill.hot_gate_up + counters.decode.hot_gate_up,
            programs: account.programs,
            submissions: account.submissions,
            waited_ms: counters.waited.as_secs_f64() * 1e3,
            fallbacks: counters.fallbacks,
            failure: counters.failure.clone().or_else(|| loaded.refused.clone()),
        }
    }
}

/// What a text costs the model. Measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PerplexityPart {
    /// Mean negative log likelihood of a scored token, nats.
    pub nll: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Tokens scored.
    pub scored: u64,
    /// Perplexity of the all-CPU reference, under `--compare`.
    pub reference_perplexity: Option<f64>,
}

/// How far the partition is from the all-CPU reference. Measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ComparisonPart {
    /// Positions compared.
    pub positions: u64,
    /// Share of positions with the same likeliest token, 0 to 1.
    pub top1_agreement: f64,
    /// Mean Kullback-Leibler divergence from the reference, nats.
    pub mean_kl: f64,
    /// Largest of these.
    pub max_kl: f64,
    /// Largest distance between two logits of one token.
    pub max_logit_error: f32,
    /// The first position with another likeliest token.
    pub first_difference: Option<u64>,
}

/// The document as text: what a person wants to know at the end of a run.
pub fn run(document: &RunDocument) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "arithmetic: {}, {} threads", document.arithmetic, document.threads);
    for (what, speed) in [("prefill", &document.prefill), ("decode", &document.decode)] {
        if speed.tokens == 0 {
            continue;
        }
        let _ = write!(
            text,
            "{what}: {} tokens, {:.1} tokens/s measured here",
            speed.tokens, speed.measured_per_second
        );
        let _ = match speed.simulated_per_second {
            Some(simulated) => writeln!(text, ", {simulated:.1} tokens/s simulated for the profile"),
            None => writeln!(text),
        };
    }
    if let Some(LookupPart { batches, drafted, accepted }) = document.lookup {
        let batches = super::counted(batches, "batch", "batches");
        let _ = writeln!(text, "lookup: {accepted} of {drafted} guessed tokens came to be, in {batches}");
    }
    if document.turns.len() > 1 {
        let sum = |of: fn(&TurnPart) -> u64| document.turns.iter().map(of).sum::<u64>();
        let (reused, computed) = (sum(|turn| turn.reused_tokens), sum(|turn| turn.computed_tokens));
        let n_turns = document.turns.len();
        let _ =
            writeln!(text, "{n_turns} turns: {computed} prompt tokens computed, {reused} were there already");
    }
    if let Some(device) = &document.device {
        text += &device_lines(device);
    }
    if let Some(perplexity) = &document.perplexity {
        let PerplexityPart { perplexity, nll, scored, reference_perplexity } = perplexity;
        let _ = write!(text, "perplexity: {perplexity:.4} ({nll:.5} nats) over {scored} tokens");
        let _ = match reference_perplexity {
            Some(reference) => {
                let change = 100.0 * (perplexity / reference - 1.0);
                writeln!(text, "; reference {reference:.4}, {change:+.3} %")
            }
            None => writeln!(text),
        };
    }
    if let Some(comparison) = &document.comparison {
        text += &comparison_lines(comparison);
    }
    text
}

fn device_lines(device: &DevicePart) -> String {
    let mut text = String::new();
    let DevicePart { name, matrices, programs, submissions, device_calls, .. } = device;
    let chunks = super::counted(device.chunks, "chunk", "chunks");
    let (weights, scratch) = (Bytes(device.weight_bytes), Bytes(device.scratch_bytes));
    let _ = writeln!(
        text,
        "device {name}: {matrices} matrices in {chunks}, {weights} mapped + {scratch} scratch, loaded in {:.1} ms",
        device.load_ms
    );
    let _ = writeln!(
        text,
        "  {device_calls} expert calls on it in {programs} register programs and {submissions} submissions"
    );
    for (what, calls, rate) in [
        ("prefill", device.prefill_calls, device.prefill_hit_rate),
        ("decode", device.decode_calls, device.decode_hit_rate),
    ] {
        if calls > 0 {
            let _ =
                writeln!(text, "  {what} hit rate {:.1} % of {calls} expert calls (measured)", 100.0 * rate);
        }
    }
    let _ =
        writeln!(text, "  the CPU waited {:.1} ms for it; fallbacks: {}", device.waited_ms, device.fallbacks);
    if let Some(failure) = &device.failure {
        let _ = writeln!(
            text,
            "  computed on the CPU instead, from the same int8 tiles: {}",
            super::escape(failure)
        );
    }
    text
}

fn comparison_lines(comparison: &ComparisonPart) -> String {
    let ComparisonPart { positions, top1_agreement, mean_kl, max_kl, max_logit_error, first_difference } =
        comparison;
    let first = match first_difference {
        Some(position) => format!("first other token at position {position}"),
        None => "no other token".to_owned(),
    };
    format!(
        "compared with the all-CPU reference at {positions} positions: top-1 agreement {:.2} %, KL divergence {mean_kl:.2e} \
         mean, {max_kl:.2e} at most, logits off by {max_logit_error:.4} at most, {first}\n",
        100.0 * top1_agreement
    )
}
