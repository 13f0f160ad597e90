//! The plan as a document (`*.plan.json`, schema: `formats/plan.schema.json`): what is said, and how it is read back.
//!
//! Floats are estimates and are kept to nine digits, which JSON carries exactly.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::PlanError;
use crate::tensor::{MatrixId, Projection};
use crate::tile::SubMatrix;
use crate::units::{ExpertId, LayerId};

/// The name of this version of the document.
pub(super) const SCHEMA: &str = "orkpack-plan-1";

/// What a plan is made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Whatever pays: a prompt of 512 tokens answered in 256.
    #[default]
    Auto,
    /// Tokens one at a time.
    Decode,
    /// Prompts of 512 tokens.
    Prefill,
    /// Most calls served, whatever it costs: for study, tests and demonstrations.
    Hits,
}

/// What of a layer may be shared between the NPU and the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shares {
    /// Whichever is worth more, layer by layer.
    #[default]
    Auto,
    /// Its experts: some are on the NPU, with all their rows.
    Experts,
    /// The rows of every expert: the first are on the NPU. For study, tests and demonstrations.
    Rows,
}

/// Whether a run decodes or reads a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Regime {
    /// One token.
    Decode,
    /// Many.
    Prefill,
}

/// How a number came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Counted or timed.
    Measured,
    /// From the software NPU and its clock.
    Simulated,
    /// From a model and assumptions.
    Estimated,
}

/// A number with its plausible range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// Lowest.
    pub low: f64,
    /// The one to plan with.
    pub value: f64,
    /// Highest.
    pub high: f64,
}

/// Which device the plan is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileId {
    /// Short name.
    pub name: String,
    /// blake3 of the profile as JSON, hex.
    pub digest: String,
}

/// What of an expert becomes resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Holds {
    /// Gate, up and down.
    #[serde(rename = "whole")]
    Whole,
    /// Gate and up; down stays on the CPU.
    #[serde(rename = "gate+up")]
    GateUp,
    /// Down; gate and up stay on the CPU.
    #[serde(rename = "down")]
    Down,
    /// The first rows of some of its matrices, as many as of every other expert of the layer: [`MatrixPlan::rows`].
    #[serde(rename = "rows")]
    Rows,
}

/// One line of a layer's ranking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Item {
    /// The expert.
    pub expert: u32,
    /// What of it is, or would be, resident.
    pub holds: Holds,
    /// Its page-rounded bytes on the device.
    pub bytes: u64,
    /// Share of the layer's calls, as planned with.
    pub share: f64,
    /// Seconds that it saves per decoded token when all before it are hot too; negative where it costs.
    pub decode_seconds: f64,
    /// The same for a prompt of 512 tokens.
    pub prefill_seconds: f64,
    /// Named by the user.
    pub forced: bool,
}

/// How one projection of a layer's experts fits the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixPlan {
    /// `gate`, `up` or `down`.
    pub projection: String,
    /// Inputs.
    pub n_in: u64,
    /// Outputs.
    pub n_out: u64,
    /// In a layer whose rows are shared: how many of them, from the first, are resident in every expert; 0 where the whole
    /// projection stays on the CPU. Left out where experts are resident with all their rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Programs per expert; 0 where none can hold it and it stays on the CPU.
    pub programs: u32,
    /// Bytes of its tiles, padding included; `n_in` × [`MatrixPlan::n_rows`] of them are weights.
    pub tile_bytes: u64,
}

impl MatrixPlan {
    /// Outputs that a resident copy has.
    pub fn n_rows(&self) -> u64 {
        self.rows.unwrap_or(self.n_out)
    }
}

/// One layer with experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlan {
    /// The block number.
    pub layer: u32,
    /// The domain that holds its resident matrices.
    pub domain: u32,
    /// Its experts.
    pub n_expert: u32,
    /// Experts per token.
    pub n_used: u32,
    /// Gate, up and down.
    pub matrices: Vec<MatrixPlan>,
    /// So many items from the front of `ranking` are resident.
    pub resident: u32,
    /// Every expert once, best first.
    pub ranking: Vec<Item>,
}

/// How far down the rankings one regime goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// Which.
    pub regime: Regime,
    /// It begins with batches of so many tokens.
    pub from_tokens: u32,
    /// For each layer with experts how many items are hot, never more than are resident.
    pub layers: Vec<u32>,
    /// Share of expert calls that these serve, in the calibration text.
    pub hit_rate: f64,
}

/// One program's weights in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "PlacedJson", try_from = "PlacedJson")]
pub struct Placed {
    /// The matrix.
    pub matrix: MatrixId,
    /// Which of its parts, as [`crate::tile::cut`] numbers them.
    pub part: u32,
    /// That part.
    pub tiles: SubMatrix,
    /// Its first byte in the chunk, a multiple of 4096.
    pub offset: u64,
}

/// One native device buffer of weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The domain that maps it.
    pub domain: u32,
    /// Its bytes, as long as its content, whole pages.
    pub bytes: u64,
    /// What it holds, by offset.
    pub parts: Vec<Placed>,
}

/// What one domain maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainFootprint {
    /// Weights, bytes: the sum of its chunks.
    pub weight_bytes: u64,
    /// Programs, tasks, activations and results, bytes.
    pub scratch_bytes: u64,
    /// Chunks.
    pub n_chunks: u32,
}

/// Exactly what the runtime will map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Footprint {
    /// Weights of all domains, bytes.
    pub weight_bytes: u64,
    /// Scratch of all domains, bytes.
    pub scratch_bytes: u64,
    /// Chunks of all domains.
    pub n_chunks: u32,
    /// Bytes of weights that the fullest domain could still map.
    pub headroom_bytes: u64,
    /// Each domain.
    pub domains: Vec<DomainFootprint>,
}

/// Share of expert calls that a resident matrix serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HitRate {
    /// In the text that the plan was made from, with its 95 % interval.
    pub calibration: Range,
    /// In text that was set aside; `None` without any.
    pub held_out: Option<Range>,
    /// What even routing would give.
    pub uniform: f64,
    /// Held-out rate (calibration, without any) over `uniform`; 1 where nothing is resident.
    pub lift: f64,
}

/// Hit rates with everything resident in use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HitRates {
    /// How the counts came about.
    pub basis: Basis,
    /// Mean of the three projections.
    pub overall: HitRate,
    /// Gate (and up, which are resident together).
    pub gate: HitRate,
    /// Up.
    pub up: HitRate,
    /// Down.
    pub down: HitRate,
}

/// Predicted speeds of one regime, tokens per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forecast {
    /// Which.
    pub regime: Regime,
    /// Tokens per batch.
    pub tokens: u32,
    /// How the numbers came about.
    pub basis: Basis,
    /// Everything on the CPU.
    pub cpu_only: Range,
    /// As planned.
    pub planned: Range,
    /// Every expert resident, if the window were large enough.
    pub all_resident: Range,
    /// `planned` over `cpu_only`, from the least to the most favourable of the three cases.
    pub gain: Range,
}

/// What to do in one regime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Advice {
    /// The NPU pays.
    #[serde(rename = "npu")]
    Npu,
    /// It does not.
    #[serde(rename = "cpu only")]
    CpuOnly,
    /// The user asked for it, whatever it costs.
    #[serde(rename = "as asked")]
    AsAsked,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdict {
    /// For tokens one at a time.
    pub decode: Advice,
    /// For prompts.
    pub prefill: Advice,
    /// In one sentence.
    pub sentence: String,
}

/// What a reader of the plan should know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Note {
    /// Shares were assumed; experts are not told apart.
    AssumedRouting,
    /// The text was short.
    TooFewTokens {
        /// Tokens read.
        tokens: u64,
        /// Tokens at which each expert is chosen 20 times where routing is even.
        wanted: u64,
    },
    /// Experts that the text never reached; they rank last.
    NeverSeen {
        /// Layer and expert.
        experts: Vec<(u32, u32)>,
        /// Of so many.
        of: u64,
    },
    /// No text was set aside, so nothing checks the choice.
    NoHeldOut,
    /// Routing is even: any set of experts serves as many calls.
    NoSkew {
        /// Share of the calls that the more used half of the experts serves.
        hotter_half: f64,
    },
    /// The set-aside text uses other experts: less is served than the choice promised.
    Drift {
        /// Hit rate in the calibration text.
        calibration: f64,
        /// Hit rate in the text set aside.
        held_out: f64,
    },
    /// Model, copies and scratch are more than the board's memory.
    OverRam {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        ram: u64,
    },
    /// Part of the budget is left unused: more copies would take the memory that the model's own weights need.
    KeptForModel {
        /// Bytes of copies.
        used: u64,
    },
    /// What to be wary of in the device's profile.
    Device {
        /// In words.
        what: String,
    },
    /// A projection that no program can hold stays on the CPU.
    StaysOnCpu {
        /// The layer.
        layer: u32,
        /// The projection.
        projection: String,
    },
    /// Padding of a projection to legal shapes, where it is more than a tenth.
    Padded {
        /// The first such layer.
        layer: u32,
        /// The projection.
        projection: String,
        /// Bytes of tiles over weights.
        factor: f64,
    },
}

/// What the plan takes of the board's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryAccount {
    /// The model's weights in source quantisation, mapped from the file.
    pub source_bytes: u64,
    /// Resident copies.
    pub npu_bytes: u64,
    /// Device scratch.
    pub scratch_bytes: u64,
    /// Key-value cache at `context_tokens`.
    pub kv_bytes: u64,
    /// What layers without such a cache remember, whatever the length. Left out where there are none, and in plans
    /// of older versions: these keep their bytes, and so their digests.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub state_bytes: u64,
    /// Length of the context that was counted.
    pub context_tokens: u32,
    /// All of these.
    pub total_bytes: u64,
    /// The board's memory.
    pub ram_bytes: u64,
}

fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A plan: what is resident where, how far each regime goes, and what that is expected to give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// `orkpack-plan-1`.
    pub schema: String,
    /// The answer, first.
    pub verdict: Verdict,
    /// Predicted speeds.
    pub forecasts: Vec<Forecast>,
    /// What else to know.
    pub notes: Vec<Note>,
    /// The device.
    pub profile: ProfileId,
    /// blake3 of the routing statistics, hex; `None` where routing was assumed.
    pub statistics: Option<String>,
    /// The model's family.
    pub architecture: String,
    /// What it was made for.
    pub objective: Objective,
    /// Bytes of weights allowed in one domain.
    pub budget_bytes: u64,
    /// Bytes of weights that one domain can map at most.
    pub window_bytes: u64,
    /// Domains used.
    pub n_domains: u32,
    /// What is mapped.
    pub footprint: Footprint,
    /// Calls served.
    pub hit_rates: HitRates,
    /// What it takes of the board's memory.
    pub memory: MemoryAccount,
    /// How much more of the time that is saved another choice within the budget could save, at most, in the regimes that
    /// count; 0 where this is the best.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gap: f64,
    /// Decode first, then prefill.
    pub cuts: Vec<Cut>,
    /// The rankings.
    pub layers: Vec<LayerPlan>,
    /// The chunks, best content first: the first ones are a good hot set for a smaller window.
    pub chunks: Vec<Chunk>,
}

impl LayerPlan {
    /// The projections of an item of which anything is, or would be, resident, in order of use.
    pub fn projections(&self, holds: Holds) -> &'static [Projection] {
        let has_rows =
            |p: Projection| self.matrices.get(p as usize).is_some_and(|matrix| matrix.rows != Some(0));
        match holds {
            Holds::Whole => &Projection::ALL,
            Holds::GateUp => &[Projection::Gate, Projection::Up],
            Holds::Down => &[Projection::Down],
            Holds::Rows => match (has_rows(Projection::Gate), has_rows(Projection::Down)) {
                (true, true) => &Projection::ALL,
                (true, false) => &[Projection::Gate, Projection::Up],
                (false, true) => &[Projection::Down],
                (false, false) => &[],
            },
        }
    }

    /// Whether it is shared by rows, not by experts.
    pub fn is_by_rows(&self) -> bool {
        self.matrices.iter().any(|matrix| matrix.rows.is_some())
    }
}

impl Plan {
    /// The plan as JSON, with a line feed at its end: equal plans give equal bytes.
    ///
    /// # Errors
    ///
    /// [`PlanError::Json`], which no plan of [`super::choose`] meets.
    pub fn to_json(&self) -> Result<Vec<u8>, PlanError> {
        let mut json = serde_json::to_vec(self)?;
        json.push(b'\n');
        Ok(json)
    }

    /// A plan from a file's bytes. Everything that can be checked without the model is; then call [`Plan::check`].
    ///
    /// # Errors
    ///
    /// [`PlanError::Json`] and [`PlanError::Document`].
    pub fn from_json(json: &[u8]) -> Result<Plan, PlanError> {
        let plan: Plan = serde_json::from_slice(json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json))?;
        plan.check_document()?;
        Ok(plan)
    }

    /// blake3 of [`Plan::to_json`], hex.
    ///
    /// # Errors
    ///
    /// As [`Plan::to_json`].
    pub fn digest(&self) -> Result<String, PlanError> {
        Ok(blake3::hash(&self.to_json()?).to_hex().to_string())
    }

    /// The cut for a prompt or step of so many tokens.
    pub fn cut(&self, tokens: u32) -> Option<&Cut> {
        self.cuts.iter().rev().find(|cut| cut.from_tokens <= tokens.max(1))
    }

    /// The hot items of a layer for a prompt or step of so many tokens, best first; nothing for other layers.
    pub fn hot(&self, layer: LayerId, tokens: u32) -> &[Item] {
        let at = self.layers.iter().position(|plan| plan.layer == layer.0);
        let hot = || {
            let n = *self.cut(tokens)?.layers.get(at?)?;
            self.layers.get(at?)?.ranking.get(..n as usize)
        };
        hot().unwrap_or_default()
    }

    /// The matrices that have copies, in the order of the chunks, each once.
    pub fn matrices(&self) -> impl Iterator<Item = MatrixId> {
        self.chunks.iter().flat_map(|chunk| &chunk.parts).filter(|placed| placed.part == 0).map(|p| p.matrix)
    }

    /// Outputs of a matrix that have a copy where it is resident: all, or the first rows; `None` where it is not the plan's.
    pub fn n_rows(&self, matrix: MatrixId) -> Option<u64> {
        let layer = self.layers.iter().find(|plan| plan.layer == matrix.layer.0)?;
        Some(layer.matrices.get(matrix.projection as usize)?.n_rows())
    }

    /// Whether nothing is resident.
    pub fn is_cold(&self) -> bool {
        self.chunks.is_empty()
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::AssumedRouting => {
                f.write_str("routing was assumed, not counted; `orkpack calibrate MODEL` counts it")
            }
            Note::TooFewTokens { tokens, wanted } => {
                write!(f, "too few tokens: {tokens} read, {wanted} wanted for 20 calls of each expert")
            }
            Note::NeverSeen { experts, of } => {
                let share = 100.0 * experts.len() as f64 / (*of).max(1) as f64;
                let much = if share > 10.0 { "; calibrate with more text" } else { "" };
                write!(
                    f,
                    "{} of {of} experts ({share:.1} %) were never seen and rank last{much}",
                    experts.len()
                )
            }
            Note::NoHeldOut => {
                f.write_str("no text was set aside: the hit rate is that of the text chosen from")
            }
            Note::NoSkew { hotter_half } => write!(
                f,
                "no skew to exploit: the more used half of the experts serves {:.1} % of the calls",
                100.0 * hotter_half
            ),
            Note::Drift { calibration, held_out } => write!(
                f,
                "the set-aside text uses other experts: {:.1} % of calls served instead of {:.1} %",
                100.0 * held_out,
                100.0 * calibration
            ),
            Note::OverRam { needed, ram } => write!(
                f,
                "{} are needed and the board has {}: parts of the model will be read from disk again and again",
                crate::units::Bytes(*needed),
                crate::units::Bytes(*ram)
            ),
            Note::KeptForModel { used } => write!(
                f,
                "only {} of the budget are used: more copies would take the memory of the model's own weights, which \
                 would be read from disk instead",
                crate::units::Bytes(*used)
            ),
            Note::Device { what } => f.write_str(what),
            Note::StaysOnCpu { layer, projection } => {
                write!(
                    f,
                    "layer {layer}: no program can hold the {projection} projection, it stays on the CPU"
                )
            }
            Note::Padded { layer, projection, factor } => write!(
                f,
                "the {projection} projection (first in layer {layer}) is padded by {:.1} % to a legal shape",
                100.0 * (factor - 1.0)
            ),
        }
    }
}

/// [`Placed`] as JSON: `k` and `n` are first, weights, padded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacedJson {
    layer: u32,
    expert: u32,
    projection: String,
    part: u32,
    k: [u32; 3],
    n: [u32; 3],
    offset: u64,
}

impl From<Placed> for PlacedJson {
    fn from(placed: Placed) -> PlacedJson {
        let Placed { matrix, part, tiles, offset } = placed;
        PlacedJson {
            layer: matrix.layer.0,
            expert: matrix.expert.0,
            projection: matrix.projection.name().to_owned(),
            part,
            k: [tiles.k0, tiles.k_len, tiles.k_padded],
            n: [tiles.n0, tiles.n_len, tiles.n_padded],
            offset,
        }
    }
}

impl TryFrom<PlacedJson> for Placed {
    type Error = String;

    fn try_from(json: PlacedJson) -> Result<Placed, String> {
        let projection = Projection::ALL.into_iter().find(|p| p.name() == json.projection);
        let projection = projection.ok_or_else(|| "projection is not gate, up or down".to_owned())?;
        let [k0, k_len, k_padded] = json.k;
        let [n0, n_len, n_padded] = json.n;
        Ok(Placed {
            matrix: MatrixId { layer: LayerId(json.layer), expert: ExpertId(json.expert), projection },
            part: json.part,
            tiles: SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded },
            offset: json.offset,
        })
    }
}

/// A float as the document keeps it: nine digits, and nothing below a picosecond.
pub(super) fn tidy(x: f64) -> f64 {
    if !x.is_finite() || x.abs() < 1e-12 {
        return 0.0;
    }
    format!("{x:.8e}").parse().unwrap_or(x)
}
