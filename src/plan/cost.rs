//! How long the two sides take: the rates, and two streams that share one memory.
//!
//! The runtime uses the same functions to turn what it counted into modelled time. Equations and the source of every
//! constant: docs/planning.md. No figure here comes from the machine that runs this program.

use crate::kernel::Form;
use crate::model::ModelShape;
use crate::profile::{DeviceProfile, Figure};
use crate::tensor::Dtype;

/// Which end of each figure's range to compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Every figure at its slowest.
    Slow,
    /// Every figure at the value to plan with.
    Likely,
    /// Every figure at its fastest.
    Fast,
}

/// The rates of a device, in bytes, multiply-accumulates and seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second that the CPU streams alone (Bc).
    pub cpu_bytes: f64,
    /// Bytes per second that the NPU streams alone (Bn).
    pub npu_bytes: f64,
    /// Bytes per second that the CPU streams while the NPU does too (Bc').
    pub cpu_shared_bytes: f64,
    /// Bytes per second that the NPU streams while the CPU does too (Bn').
    pub npu_shared_bytes: f64,
    /// Multiply-accumulates per second of the CPU.
    pub cpu_macs: f64,
    /// The same of weights without an integer kernel.
    pub cpu_float_macs: f64,
    /// Multiply-accumulates per second of the NPU.
    pub npu_macs: f64,
    /// Seconds of one submission and its completion.
    pub submit: f64,
    /// Seconds of one program of a submission.
    pub program: f64,
    /// Seconds until another domain is the active one.
    pub domain_switch: f64,
    /// Seconds to quantise one activation value, all CPU threads at it.
    pub quantize: f64,
    /// Seconds to read and scale one result, all CPU threads at it.
    pub scale: f64,
    /// Seconds to unpack one weight without an integer kernel, all CPU threads at it.
    pub unpack: f64,
    /// One side waits for the other, as in the prior system.
    pub serial: bool,
}

/// Work of one side: seconds when it runs alone, and the bytes it moves meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Seconds, alone.
    pub seconds: f64,
    /// Bytes read from memory.
    pub bytes: f64,
}

/// Where the time of a phase goes, seconds; together it is the phase's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Parts {
    /// The CPU works, the NPU does not, or is being started.
    pub cpu: f64,
    /// Both work.
    pub both: f64,
    /// The NPU works and the CPU waits for it.
    pub npu: f64,
    /// Nothing works: the NPU is being started.
    pub start: f64,
}

impl Parts {
    /// All of it.
    pub fn seconds(&self) -> f64 {
        self.cpu + self.both + self.npu + self.start
    }
}

/// What both sides do until they join: gate and up of a layer, or down.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phase {
    /// Products on the NPU.
    pub npu: Load,
    /// Submissions that start them.
    pub submits: f64,
    /// Products on the CPU, and its work around those of the NPU.
    pub cpu: Load,
}

impl Load {
    /// Both loads, one after the other.
    pub fn plus(self, other: Load) -> Load {
        Load { seconds: self.seconds + other.seconds, bytes: self.bytes + other.bytes }
    }

    /// The load `n` times.
    pub fn times(self, n: f64) -> Load {
        Load { seconds: self.seconds * n, bytes: self.bytes * n }
    }

    /// What is left without `other`.
    pub(super) fn less(self, other: Load) -> Load {
        Load { seconds: (self.seconds - other.seconds).max(0.0), bytes: (self.bytes - other.bytes).max(0.0) }
    }
}

impl Rates {
    /// The rates of a profile. What both stream together is shared in proportion to what each streams alone.
    pub fn of(profile: &DeviceProfile, bound: Bound) -> Rates {
        let fast = |figure: &Figure<f64>| match bound {
            Bound::Slow => figure.low(),
            Bound::Likely => figure.value,
            Bound::Fast => figure.high(),
        };
        let short = |figure: &Figure<f64>| match bound {
            Bound::Slow => figure.high(),
            Bound::Likely => figure.value,
            Bound::Fast => figure.low(),
        };
        let (rates, latency, costs) = (&profile.rates, &profile.latency_us, &profile.cost_ns);
        let threads = f64::from(profile.conditions.cpu_threads.value);
        // A slower memory streams that much less on either side.
        let stream = |figure: &Figure<f64>| fast(figure) * profile.memory_share();
        let (cpu_bytes, npu_bytes) = (stream(&rates.cpu_bytes_per_s), stream(&rates.npu_bytes_per_s));
        let (cpu_shared_bytes, npu_shared_bytes) = match rates.shared() {
            Some((cpu, npu)) => (stream(cpu), stream(npu)),
            None => shared(cpu_bytes, npu_bytes, stream(&rates.both_bytes_per_s)),
        };
        Rates {
            cpu_bytes,
            npu_bytes,
            cpu_shared_bytes,
            npu_shared_bytes,
            cpu_macs: fast(&rates.cpu_macs_per_s),
            cpu_float_macs: fast(&rates.cpu_float_macs_per_s),
            npu_macs: fast(&rates.npu_macs_per_s),
            submit: short(&latency.submit) * 1e-6,
            program: short(&latency.program) * 1e-6,
            domain_switch: short(&latency.domain_switch) * 1e-6,
            quantize: short(&costs.quantize_value) * 1e-9 / threads,
            scale: short(&costs.scale_value) * 1e-9 / threads,
            unpack: short(&costs.unpack_weight) * 1e-9 / threads,
            serial: false,
        }
    }

    /// A matrix on the CPU: its source bytes are streamed once, `macs` (weights × rows) computed.
    pub fn cpu(&self, source_bytes: f64, macs: f64) -> Load {
        Load { seconds: (source_bytes / self.cpu_bytes).max(macs / self.cpu_macs), bytes: source_bytes }
    }

    /// An expert's matrix of `n_weights` on the CPU for some rows. Without an integer kernel its weights are unpacked once
    /// and multiplied as floats.
    pub fn cpu_matrix(&self, dtype: Dtype, source_bytes: f64, n_weights: f64, rows: f64) -> Load {
        if Form::for_weight(dtype) != Form::F32 {
            return self.cpu(source_bytes, n_weights * rows);
        }
        let unpacked = if dtype.is_float() { 0.0 } else { n_weights * self.unpack };
        let computing = unpacked + n_weights * rows / self.cpu_float_macs;
        Load { seconds: (source_bytes / self.cpu_bytes).max(computing), bytes: source_bytes }
    }

    /// A matrix on the NPU: its tiles are streamed once per pass, `macs` (with padding) computed, in so many
    /// programs. Flat in the number of rows until computing takes longer than streaming.
    pub fn npu(&self, tile_bytes: f64, macs: f64, programs: f64) -> Load {
        let seconds = (tile_bytes / self.npu_bytes).max(macs / self.npu_macs) + programs * self.program;
        Load { seconds, bytes: tile_bytes }
    }

    /// The CPU's work around products on the NPU: values quantised before, results scaled after.
    pub fn around(&self, quantized: f64, scaled: f64) -> Load {
        Load { seconds: quantized * self.quantize + scaled * self.scale, bytes: 0.0 }
    }

    /// Seconds until both sides have ended: both stream at their shared rates until the first ends, then the other
    /// alone. The NPU streams nothing while it is being started.
    pub fn phase_seconds(&self, phase: &Phase) -> f64 {
        // The first program of a submission is part of it; the load counts them all.
        let start = phase.submits * (self.submit - self.program).max(0.0);
        let (npu, cpu) = (phase.npu.seconds, phase.cpu.seconds);
        if self.serial {
            return start + npu + cpu;
        }
        if npu <= 0.0 || cpu <= start {
            return (start + npu).max(cpu);
        }
        let (npu_slower, cpu_slower) = self.slowdown(phase);
        let cpu_left = cpu - start;
        let (npu_end, cpu_end) = (npu * npu_slower, cpu_left * cpu_slower);
        let both = if npu_end <= cpu_end {
            npu_end + cpu_left - npu_end / cpu_slower
        } else {
            cpu_end + npu - cpu_end / npu_slower
        };
        start + both
    }

    /// What the seconds of [`Rates::phase_seconds`] are made of.
    pub fn phase_parts(&self, phase: &Phase) -> Parts {
        let start = phase.submits * (self.submit - self.program).max(0.0);
        let (npu, cpu) = (phase.npu.seconds, phase.cpu.seconds);
        if self.serial {
            return Parts { cpu, both: 0.0, npu, start };
        }
        if npu <= 0.0 || cpu <= start {
            return Parts { cpu, both: 0.0, npu, start: (start - cpu).max(0.0) };
        }
        let (npu_slower, cpu_slower) = self.slowdown(phase);
        let (npu_end, cpu_end) = (npu * npu_slower, (cpu - start) * cpu_slower);
        let both = npu_end.min(cpu_end);
        let (npu, cpu) = (npu - both / npu_slower, cpu - start - both / cpu_slower);
        Parts { cpu: start + cpu.max(0.0), both, npu: npu.max(0.0), start: 0.0 }
    }

    /// Seconds of one layer's experts: its phases one after the other.
    pub fn layer_seconds(&self, phases: &[Phase]) -> f64 {
        phases.iter().map(|phase| self.phase_seconds(phase)).sum()
    }

    /// Seconds of a batch outside the experts, on the CPU. The head is computed for the last token only.
    pub fn dense_seconds(&self, shape: &ModelShape, tokens: u32) -> f64 {
        let head = shape.n_vocab as f64 * shape.n_embd as f64;
        let body = (shape.dense_weights as f64 - head).max(0.0);
        self.cpu(shape.dense_bytes as f64, body * f64::from(tokens) + head).seconds
    }

    /// How much longer each side takes while the other works too. A side that mostly computes leaves memory to the
    /// other: the full slowdown holds where both demand all they can stream, none where both demands fit.
    fn slowdown(&self, phase: &Phase) -> (f64, f64) {
        let demand = |load: Load, most: f64| (load.bytes / load.seconds).min(most);
        let together = self.cpu_shared_bytes + self.npu_shared_bytes;
        let excess = demand(phase.npu, self.npu_bytes) + demand(phase.cpu, self.cpu_bytes) - together;
        let most = self.npu_bytes + self.cpu_bytes - together;
        let part = if most > 0.0 { (excess / most).clamp(0.0, 1.0) } else { 0.0 };
        let slower = |alone: f64, shared: f64| 1.0 + (alone / shared - 1.0).max(0.0) * part;
        (slower(self.npu_bytes, self.npu_shared_bytes), slower(self.cpu_bytes, self.cpu_shared_bytes))
    }
}

/// What each side streams while both do, in proportion to what it streams alone.
fn shared(cpu: f64, npu: f64, both: f64) -> (f64, f64) {
    let both = both.clamp(cpu.max(npu), cpu + npu);
    (both * cpu / (cpu + npu), both * npu / (cpu + npu))
}
