//! What a device can do: IOVA window, shapes, latencies, rates, from `formats/devices/<name>.json`.
//!
//! Every figure carries its source and how far it is to be trusted. Which shapes may run is data here, never an
//! `if` elsewhere. Nothing in this module decides anything; it says what its figures assume, and what to be wary of.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Bytes;

/// How far a figure is to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Confidence {
    /// Run on silicon and found bit-exact.
    #[serde(rename = "proven on boards")]
    Proven,
    /// Measured on silicon by others and quoted.
    #[serde(rename = "measured by others")]
    Measured,
    /// Read in the source of a driver.
    #[serde(rename = "read in source")]
    Read,
    /// Computed from such figures.
    #[serde(rename = "derived")]
    Derived,
    /// A sensible guess.
    #[serde(rename = "estimated")]
    Estimated,
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Confidence::Proven => "proven on boards",
            Confidence::Measured => "measured by others",
            Confidence::Read => "read in source",
            Confidence::Derived => "derived",
            Confidence::Estimated => "estimated",
        })
    }
}

/// A value with its source, its confidence and, where it is not exact, its range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure<T> {
    /// The value to plan with.
    pub value: T,
    /// Lowest plausible value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low: Option<T>,
    /// Highest plausible value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<T>,
    /// Where it comes from.
    pub source: String,
    /// How far to trust it.
    pub confidence: Confidence,
}

impl<T: Copy> Figure<T> {
    /// Lowest plausible value: the value itself where no range is given.
    pub fn low(&self) -> T {
        self.low.unwrap_or(self.value)
    }

    /// Highest plausible value: the value itself where no range is given.
    pub fn high(&self) -> T {
        self.high.unwrap_or(self.value)
    }
}

/// One contraction length that a program may have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LegalK {
    /// Inputs per output, after padding.
    pub k: u32,
    /// Most rows (tokens) of one program; one more silently computes wrong sums on silicon.
    pub max_rows: u32,
    /// Where it comes from.
    pub source: String,
    /// How far to trust it.
    pub confidence: Confidence,
}

/// Memory that the device sees.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Whether the device sees memory through its IOMMU; without it there is one domain, of contiguous memory.
    pub iommu: Figure<bool>,
    /// Contiguous memory that may be mapped while the IOMMU is off, bytes.
    pub contiguous_bytes: Figure<u64>,
    /// IOMMU page, bytes.
    pub page_bytes: Figure<u64>,
    /// IOVA of one domain, bytes.
    pub domain_bytes: Figure<u64>,
    /// What of it may be mapped before drivers misbehave, bytes.
    pub domain_ceiling_bytes: Figure<u64>,
    /// Domains that may be used.
    pub domains: Figure<u32>,
    /// Default budget for weights in one domain, bytes.
    pub budget_bytes: Figure<u64>,
    /// What a domain keeps for programs, tasks, activations and results, bytes.
    pub scratch_reserve_bytes: Figure<u64>,
    /// Largest single buffer that a driver is known to give, bytes.
    pub buffer_bytes: Figure<u64>,
    /// Longest chunk of weights, bytes; never longer than a buffer.
    pub chunk_bytes: Figure<u64>,
    /// Alignment of a matrix inside its chunk, bytes.
    pub matrix_align_bytes: Figure<u64>,
    /// Mappings that a domain bears.
    pub mappings_per_domain: Figure<u32>,
    /// Memory of the board, bytes.
    pub ram_bytes: Figure<u64>,
}

/// The programs that may run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shapes {
    /// Output columns come in blocks of this.
    pub n_multiple: Figure<u32>,
    /// Most output columns of one program.
    pub n_max: Figure<u32>,
    /// Contraction lengths, ascending.
    pub legal_k: Vec<LegalK>,
}

/// The device's cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cores {
    /// How many.
    pub count: Figure<u32>,
    /// Most programs of one submission.
    pub tasks_per_submit: Figure<u32>,
}

/// Fixed costs, microseconds. A driver starts products in one of three modes: a stream of them over all cores, which
/// is what the planner counts with; a chain of linked programs on one core; and a single product by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latency {
    /// Stream: one submission and its completion, its first program included.
    pub submit: Figure<f64>,
    /// Stream: one further program of the same submission.
    pub program: Figure<f64>,
    /// Single: one product on one core from its submission to its completion, without its bytes.
    pub single_submit: Figure<f64>,
    /// Chain: one submission on one core and its completion, without its programs.
    pub chain_submit: Figure<f64>,
    /// Chain: one program on its core, without its bytes.
    pub chain_program: Figure<f64>,
    /// Making another domain the active one.
    pub domain_switch: Figure<f64>,
    /// Creating and mapping one buffer.
    pub buffer_create: Figure<f64>,
}

/// Rates of streaming and of arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Weight bytes that the CPU streams alone, per second.
    pub cpu_bytes_per_s: Figure<f64>,
    /// Weight bytes that the NPU streams alone, per second.
    pub npu_bytes_per_s: Figure<f64>,
    /// Weight bytes that one core of the NPU streams alone, per second.
    pub npu_core_bytes_per_s: Figure<f64>,
    /// Both together, per second.
    pub both_bytes_per_s: Figure<f64>,
    /// Weight bytes that the CPU streams while the NPU does too; where not known, `both_bytes_per_s` is shared in
    /// proportion to what each streams alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_shared_bytes_per_s: Option<Figure<f64>>,
    /// Weight bytes that the NPU streams while the CPU does too; given together with the CPU's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub npu_shared_bytes_per_s: Option<Figure<f64>>,
    /// Multiply-accumulates of the CPU in prefill, per second.
    pub cpu_macs_per_s: Figure<f64>,
    /// The same of weights whose type has no integer kernel, per second: they are multiplied as floats.
    pub cpu_float_macs_per_s: Figure<f64>,
    /// Multiply-accumulates of the NPU, per second.
    pub npu_macs_per_s: Figure<f64>,
    /// Filling device buffers from memory, bytes per second.
    pub copy_bytes_per_s: Figure<f64>,
    /// Reading the model's disk, bytes per second.
    pub disk_bytes_per_s: Figure<f64>,
}

impl Rates {
    /// What the CPU, and what the NPU, streams while both do; `None` where only their sum is known.
    pub fn shared(&self) -> Option<(&Figure<f64>, &Figure<f64>)> {
        self.cpu_shared_bytes_per_s.as_ref().zip(self.npu_shared_bytes_per_s.as_ref())
    }
}

/// CPU work around each device product, nanoseconds per value on one core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueCosts {
    /// Quantising one activation value.
    pub quantize_value: Figure<f64>,
    /// Reading and scaling one result.
    pub scale_value: Figure<f64>,
    /// Unpacking one weight whose type has no integer kernel, once for all rows of a product.
    pub unpack_weight: Figure<f64>,
}

/// Under which conditions the figures hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conditions {
    /// CPU threads that the rates assume.
    pub cpu_threads: Figure<u32>,
    /// Clock of the board's memory, MHz.
    pub ddr_mhz: Figure<u32>,
    /// Clock of memory at which the streaming rates were found, MHz.
    pub ddr_rated_mhz: Figure<u32>,
    /// Clocks that the rates assume, in words.
    pub clocks: String,
}

/// A device, as `formats/devices/<name>.json` describes it (schema: `formats/profile.schema.json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// `orkpack-profile-1`.
    pub schema: String,
    /// Short name, as in `--profile rk3588`.
    pub name: String,
    /// The device in words.
    pub title: String,
    /// Memory that the device sees.
    pub memory: Memory,
    /// The programs that may run.
    pub shapes: Shapes,
    /// The device's cores.
    pub cores: Cores,
    /// Fixed costs, microseconds.
    pub latency_us: Latency,
    /// Rates of streaming and of arithmetic.
    pub rates: Rates,
    /// CPU work around each product, nanoseconds per value.
    pub cost_ns: ValueCosts,
    /// Under which conditions the figures hold.
    pub conditions: Conditions,
}

/// What to be wary of in a profile.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Warning {
    /// The device sees no more than a little contiguous memory.
    IommuOff {
        /// What may be mapped.
        mappable: Bytes,
        /// What of it is kept for programs, activations and results.
        scratch: Bytes,
    },
    /// Memory runs slower than where the streaming rates were found.
    SlowMemory {
        /// The board's clock, MHz.
        mhz: u32,
        /// The clock of the rates, MHz.
        rated_mhz: u32,
    },
    /// No rate or latency of the NPU was measured by anybody.
    NothingMeasured {
        /// The profile.
        name: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::IommuOff { mappable, scratch } => write!(
                f,
                "the profile says that the IOMMU is off: {mappable} of contiguous memory can be mapped, {scratch} of it \
                 are reserved for programs and results; enable the IOMMU in the board's device tree"
            ),
            Warning::SlowMemory { mhz, rated_mhz } => write!(
                f,
                "memory runs at {mhz} MHz, the rates were found at {rated_mhz}: streaming is {:.1} times slower; a parked \
                 clock is the governor's doing",
                f64::from(*rated_mhz) / f64::from((*mhz).max(1))
            ),
            Warning::NothingMeasured { name } => write!(
                f,
                "nothing was measured on {name} by anybody: its speeds are guesses within wide ranges"
            ),
        }
    }
}

/// Why a profile could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// No built-in profile has this name.
    #[error("no device profile is named `{0}`; built in: {names}", names = BUILT_IN.map(|p| p.0).join(", "))]
    Unknown(String),
    /// The JSON is not a profile.
    #[error("device profile: {0}")]
    Json(#[from] serde_json::Error),
    /// A value that no device has.
    #[error("device profile: `{field}` is {found}, expected {expected}")]
    Value {
        /// Which.
        field: &'static str,
        /// What it holds.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
}

/// The profiles that travel with the binaries.
const BUILT_IN: [(&str, &str); 2] = [
    ("rk3588", include_str!("../formats/devices/rk3588.json")),
    ("rk3576", include_str!("../formats/devices/rk3576.json")),
];

impl DeviceProfile {
    /// The profile used where none is named.
    pub const DEFAULT: &'static str = "rk3588";

    /// The names of the profiles that travel with the binaries.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A profile that travels with the binaries.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Unknown`], which lists the names there are.
    pub fn built_in(name: &str) -> Result<DeviceProfile, ProfileError> {
        let (_, json) = BUILT_IN
            .iter()
            .find(|(n, _)| *n == name)
            .ok_or_else(|| ProfileError::Unknown(name.to_owned()))?;
        DeviceProfile::from_json(json.as_bytes())
    }

    /// A profile from a file's bytes, its values checked.
    ///
    /// # Errors
    ///
    /// [`ProfileError`] naming the field.
    pub fn from_json(json: &[u8]) -> Result<DeviceProfile, ProfileError> {
        let profile: DeviceProfile = serde_json::from_slice(json)?;
        profile.check()?;
        Ok(profile)
    }

    /// The profile as JSON: equal profiles give equal bytes.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Json`] when a float is not finite.
    pub fn to_json(&self) -> Result<Vec<u8>, ProfileError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// What one domain holds of weights at most: its ceiling less the scratch reserve.
    pub fn window(&self) -> Bytes {
        Bytes(self.mappable().saturating_sub(self.memory.scratch_reserve_bytes.value))
    }

    /// Bytes that one domain maps at most: its ceiling, or the contiguous memory while the IOMMU is off.
    fn mappable(&self) -> u64 {
        let memory = &self.memory;
        let ceiling = memory.domain_ceiling_bytes.value;
        if memory.iommu.value { ceiling } else { ceiling.min(memory.contiguous_bytes.value) }
    }

    /// Domains that may be used: one while the IOMMU is off.
    pub fn domains(&self) -> u32 {
        if self.memory.iommu.value { self.memory.domains.value } else { 1 }
    }

    /// What streaming rates are to be multiplied with: the board's memory clock over that of the rates.
    pub fn memory_share(&self) -> f64 {
        let conditions = &self.conditions;
        f64::from(conditions.ddr_mhz.value) / f64::from(conditions.ddr_rated_mhz.value.max(1))
    }

    /// What the speeds of a plan rest on, a line each.
    pub fn assumptions(&self) -> Vec<String> {
        let (rates, conditions) = (&self.rates, &self.conditions);
        let rate = |what: &str, figure: &Figure<f64>| {
            let [low, value, high] = [figure.low(), figure.value, figure.high()].map(|rate| rate / 1e9);
            format!("{what} {value:.1} GB/s ({low:.1} to {high:.1}), {}", figure.confidence)
        };
        vec![
            format!(
                "{} CPU threads; {}; memory at {} MHz",
                conditions.cpu_threads.value, conditions.clocks, conditions.ddr_mhz.value
            ),
            rate("the CPU alone streams", &rates.cpu_bytes_per_s),
            rate("the NPU alone streams", &rates.npu_bytes_per_s),
            rate("both together stream", &rates.both_bytes_per_s),
        ]
    }

    /// What to be wary of; nothing for a board as the figures describe it.
    pub fn warnings(&self) -> Vec<Warning> {
        let (memory, conditions, latency) = (&self.memory, &self.conditions, &self.latency_us);
        let mut warnings = Vec::new();
        if !memory.iommu.value {
            let (mappable, scratch) = (Bytes(self.mappable()), Bytes(memory.scratch_reserve_bytes.value));
            warnings.push(Warning::IommuOff { mappable, scratch });
        }
        let (mhz, rated_mhz) = (conditions.ddr_mhz.value, conditions.ddr_rated_mhz.value);
        if mhz < rated_mhz {
            warnings.push(Warning::SlowMemory { mhz, rated_mhz });
        }
        let speeds = [&self.rates.npu_bytes_per_s, &self.rates.npu_macs_per_s, &latency.submit];
        let measured =
            |figure: &&Figure<f64>| matches!(figure.confidence, Confidence::Proven | Confidence::Measured);
        if !speeds.iter().any(measured) {
            warnings.push(Warning::NothingMeasured { name: self.name.clone() });
        }
        warnings
    }

    /// The shortest legal contraction length that holds `k`; `None` when it is longer than one program.
    pub fn padded_k(&self, k: u64) -> Option<&LegalK> {
        self.shapes.legal_k.iter().find(|legal| u64::from(legal.k) >= k)
    }

    /// The most rows of a program with this contraction length; `None` when it is not legal.
    pub fn max_rows(&self, k: u32) -> Option<u32> {
        self.shapes.legal_k.iter().find(|legal| legal.k == k).map(|legal| legal.max_rows)
    }

    fn check(&self) -> Result<(), ProfileError> {
        let refuse = |field, found: String, expected| Err(ProfileError::Value { field, found, expected });
        if self.schema != "orkpack-profile-1" {
            return refuse("schema", self.schema.clone(), "orkpack-profile-1");
        }
        let memory = &self.memory;
        for (field, value) in [
            ("memory.page_bytes", memory.page_bytes.value),
            ("memory.matrix_align_bytes", memory.matrix_align_bytes.value),
        ] {
            if value != 4096 {
                return refuse(field, value.to_string(), "4096, the page of the pack format");
            }
        }
        let buffer = memory.buffer_bytes.value;
        if !(4096..=1 << 32).contains(&buffer) {
            return refuse("memory.buffer_bytes", buffer.to_string(), "4 KiB to 4 GiB");
        }
        let chunk = memory.chunk_bytes.value;
        if !(4096..=1 << 30).contains(&chunk) || !chunk.is_multiple_of(4096) {
            return refuse("memory.chunk_bytes", chunk.to_string(), "whole pages, at most 1 GiB");
        }
        if chunk > buffer {
            return refuse("memory.chunk_bytes", chunk.to_string(), "no more than memory.buffer_bytes");
        }
        for (field, value) in [
            ("memory.contiguous_bytes", memory.contiguous_bytes.value),
            ("memory.domain_ceiling_bytes", memory.domain_ceiling_bytes.value),
            ("memory.domain_bytes", memory.domain_bytes.value),
        ] {
            if value == 0 || value > 1 << 40 {
                return refuse(field, value.to_string(), "1 byte to 1 TiB");
            }
        }
        for (field, value, most) in [
            ("memory.domains", memory.domains.value, 16),
            ("cores.count", self.cores.count.value, 32),
            ("cores.tasks_per_submit", self.cores.tasks_per_submit.value, 65_535),
            ("conditions.cpu_threads", self.conditions.cpu_threads.value, 1024),
            ("conditions.ddr_mhz", self.conditions.ddr_mhz.value, 65_535),
            ("conditions.ddr_rated_mhz", self.conditions.ddr_rated_mhz.value, 65_535),
        ] {
            if value == 0 || value > most {
                return refuse(field, value.to_string(), "a small positive number");
            }
        }
        self.check_shapes()?;
        self.check_rates()
    }

    fn check_shapes(&self) -> Result<(), ProfileError> {
        let refuse = |field, found: String, expected| Err(ProfileError::Value { field, found, expected });
        let shapes = &self.shapes;
        if shapes.n_multiple.value != 32 {
            return refuse("shapes.n_multiple", shapes.n_multiple.value.to_string(), "32, the weight tile");
        }
        let n_max = shapes.n_max.value;
        if n_max == 0 || n_max > 8192 || !n_max.is_multiple_of(32) {
            return refuse("shapes.n_max", n_max.to_string(), "a multiple of 32 up to 8192");
        }
        if shapes.legal_k.is_empty() {
            return refuse("shapes.legal_k", "nothing".to_owned(), "at least one length");
        }
        let mut last = 0;
        for legal in &shapes.legal_k {
            let k = legal.k;
            if k <= last || k > 4096 || !k.is_multiple_of(32) {
                return refuse("shapes.legal_k", k.to_string(), "ascending multiples of 32 up to 4096");
            }
            if u64::from(k) * 32 > self.memory.chunk_bytes.value {
                return refuse("shapes.legal_k", k.to_string(), "one block of 32 outputs inside a chunk");
            }
            if legal.max_rows == 0 || legal.max_rows > 4096 {
                return refuse("shapes.legal_k.max_rows", legal.max_rows.to_string(), "1 to 4096");
            }
            last = k;
        }
        Ok(())
    }

    fn check_rates(&self) -> Result<(), ProfileError> {
        let (rates, latency, costs) = (&self.rates, &self.latency_us, &self.cost_ns);
        let names = ["rates.cpu_shared_bytes_per_s", "rates.npu_shared_bytes_per_s"];
        let alone = [&rates.cpu_bytes_per_s, &rates.npu_bytes_per_s];
        let shared = [&rates.cpu_shared_bytes_per_s, &rates.npu_shared_bytes_per_s];
        let given = shared.iter().zip(names).filter_map(|(figure, name)| Some((name, figure.as_ref()?)));
        let given: Vec<(&'static str, &Figure<f64>)> = given.collect();
        if let [(field, _)] = given[..] {
            let expected = "both sides' shared rates, or neither";
            return Err(ProfileError::Value { field, found: "given alone".to_owned(), expected });
        }
        for ((field, shared), alone) in given.iter().zip(alone) {
            if shared.value > alone.value {
                let expected = "no more than the side streams alone";
                return Err(ProfileError::Value { field, found: shared.value.to_string(), expected });
            }
        }
        let figures = [
            ("rates.cpu_bytes_per_s", &rates.cpu_bytes_per_s),
            ("rates.npu_bytes_per_s", &rates.npu_bytes_per_s),
            ("rates.npu_core_bytes_per_s", &rates.npu_core_bytes_per_s),
            ("rates.both_bytes_per_s", &rates.both_bytes_per_s),
            ("rates.cpu_macs_per_s", &rates.cpu_macs_per_s),
            ("rates.cpu_float_macs_per_s", &rates.cpu_float_macs_per_s),
            ("rates.npu_macs_per_s", &rates.npu_macs_per_s),
            ("rates.copy_bytes_per_s", &rates.copy_bytes_per_s),
            ("rates.disk_bytes_per_s", &rates.disk_bytes_per_s),
            ("latency_us.submit", &latency.submit),
            ("latency_us.program", &latency.program),
            ("latency_us.single_submit", &latency.single_submit),
            ("latency_us.chain_submit", &latency.chain_submit),
            ("latency_us.chain_program", &latency.chain_program),
            ("latency_us.domain_switch", &latency.domain_switch),
            ("latency_us.buffer_create", &latency.buffer_create),
            ("cost_ns.quantize_value", &costs.quantize_value),
            ("cost_ns.scale_value", &costs.scale_value),
            ("cost_ns.unpack_weight", &costs.unpack_weight),
        ];
        for (field, figure) in figures.into_iter().chain(given) {
            let (low, value, high) = (figure.low(), figure.value, figure.high());
            let ordered = low > 0.0 && low <= value && value <= high && high < 1e18;
            if !ordered {
                return Err(ProfileError::Value {
                    field,
                    found: format!("{low} to {value} to {high}"),
                    expected: "positive, with low <= value <= high",
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profiles_are_whole_and_round_trip() {
        for (name, _) in BUILT_IN {
            let profile = DeviceProfile::built_in(name).unwrap();
            assert_eq!(profile.name, name);
            assert_eq!(DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap(), profile);
        }
        assert!(DeviceProfile::built_in("rk9999").unwrap_err().to_string().contains("rk3588"));
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        let good = DeviceProfile::built_in("rk3588").unwrap();
        type Edit = fn(&mut DeviceProfile);
        let cases: [(&str, Edit); 10] = [
            ("schema", |p| p.schema = "orkpack-profile-9".to_owned()),
            ("memory.chunk_bytes", |p| p.memory.chunk_bytes.value = 5000),
            ("memory.chunk_bytes", |p| p.memory.buffer_bytes.value = 8 << 20),
            ("memory.buffer_bytes", |p| p.memory.buffer_bytes.value = 0),
            ("conditions.ddr_mhz", |p| p.conditions.ddr_mhz.value = 0),
            ("rates.cpu_shared_bytes_per_s", |p| {
                p.rates.cpu_shared_bytes_per_s = Some(p.rates.cpu_bytes_per_s.clone());
            }),
            ("shapes.legal_k", |p| p.shapes.legal_k.clear()),
            ("shapes.legal_k", |p| p.shapes.legal_k.swap(0, 1)),
            ("cores.count", |p| p.cores.count.value = 0),
            ("rates.npu_bytes_per_s", |p| p.rates.npu_bytes_per_s.value = -1.0),
        ];
        for (field, edit) in cases {
            let mut profile = good.clone();
            edit(&mut profile);
            let error = DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
    }

    #[test]
    fn contraction_lengths_pad_up_to_the_next_legal_one() {
        let profile = DeviceProfile::built_in("rk3588").unwrap();
        for (k, padded) in [(1, 256), (256, 256), (257, 512), (768, 1024), (1792, 2048), (4096, 4096)] {
            assert_eq!(profile.padded_k(k).map(|legal| legal.k), Some(padded), "{k}");
        }
        assert_eq!(profile.padded_k(4097), None);
        assert_eq!((profile.max_rows(2048), profile.max_rows(2047)), (Some(128), None));
    }
}
