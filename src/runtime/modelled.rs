//! What the run would have taken on the profile's device: the planner's cost model, fed with what really happened.
//!
//! Nothing here is timed. Hits, rows and bytes are counted as they occur and priced by the profile's rates, so a number
//! from here is *simulated*.

use super::hot::{HotMatrix, HotTable, Share};
use crate::model::{ModelShape, MoeLayerShape};
use crate::plan::cost::{Bound, Load, Phase, Rates};
use crate::profile::DeviceProfile;
use crate::tensor::{MatrixId, Projection};
use crate::units::{ExpertId, LayerId};

/// The rows that one expert got, and what of it is on the device.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRows {
    /// The expert; in a layer each once.
    pub expert: ExpertId,
    /// Its rows.
    pub rows: u32,
    /// What is hot of it.
    pub share: Share,
}

/// Prices layers and tokens.
#[derive(Clone, Debug)]
pub struct Modelled {
    rates: Rates,
    profile: DeviceProfile,
    shape: ModelShape,
}

impl Modelled {
    /// Prices a model on a profile's device.
    pub fn new(shape: ModelShape, profile: DeviceProfile) -> Modelled {
        Modelled { rates: Rates::of(&profile, Bound::Likely), profile, shape }
    }

    /// Seconds of a layer's experts for `m` rows.
    pub fn layer_seconds(&self, layer: LayerId, m: usize, calls: &[ExpertRows], hot: &HotTable) -> f64 {
        let Some(shape) = self.shape.moe_layers.iter().find(|shape| shape.layer == layer) else { return 0.0 };
        let Some([gate, _, down]) = shape.experts.first() else { return 0.0 };
        let (n_embd, n_ff) = (gate.n_in as f64, down.n_in as f64);
        let phase = |projections: &[Projection]| {
            let is_down = projections.contains(&Projection::Down);
            let mut phase = Phase::default();
            let (mut hot_rows, mut scaled) = (0.0, 0.0);
            for call in calls {
                let outputs = if is_down { call.share.down } else { call.share.gate_up };
                for &projection in projections {
                    let id = MatrixId { layer, expert: call.expert, projection };
                    if let Some(matrix) = hot.get(id).filter(|_| outputs > 0) {
                        phase.npu = phase.npu.plus(self.product(matrix, call.rows));
                        scaled += f64::from(call.rows) * f64::from(outputs);
                    }
                    phase.cpu = phase.cpu.plus(self.cold(shape, call, projection, outputs));
                }
                hot_rows += if outputs > 0 { f64::from(call.rows) } else { 0.0 };
            }
            let quantized = match is_down {
                true => hot_rows * n_ff,
                false if hot_rows > 0.0 => m as f64 * n_embd,
                false => 0.0,
            };
            phase.submits = if hot_rows > 0.0 { 1.0 } else { 0.0 };
            phase.cpu = phase.cpu.plus(self.rates.around(quantized, scaled));
            phase
        };
        self.rates.layer_seconds(&[phase(&[Projection::Gate, Projection::Up]), phase(&[Projection::Down])])
    }

    /// Seconds of everything but the experts for `m` tokens that go through the model at once.
    pub fn rest_seconds(&self, m: usize) -> f64 {
        let macs = self.shape.dense_weights as f64 * m as f64;
        self.rates.cpu(self.shape.dense_bytes as f64, macs).seconds
    }

    /// One matrix on the device: every part's tiles once per pass of its row cap.
    fn product(&self, matrix: &HotMatrix, rows: u32) -> Load {
        let mut load = Load::default();
        for placed in &matrix.matrix.parts {
            let cap = self.profile.max_rows(placed.part.k_padded).unwrap_or(1);
            let passes = f64::from(rows.div_ceil(cap));
            let bytes = placed.part.bytes() as f64;
            load = load.plus(self.rates.npu(bytes * passes, bytes * f64::from(rows), passes));
        }
        load
    }

    /// What of one matrix is left to the CPU: all outputs but the first `hot`.
    fn cold(&self, shape: &MoeLayerShape, call: &ExpertRows, projection: Projection, hot: u32) -> Load {
        let Some(matrices) = shape.experts.get(call.expert.index()) else { return Load::default() };
        let matrix = &matrices[projection as usize];
        let share = 1.0 - f64::from(hot) / matrix.n_out.max(1) as f64;
        if share <= 0.0 {
            return Load::default();
        }
        let (bytes, n_weights) = (share * matrix.bytes as f64, share * matrix.n_weights() as f64);
        self.rates.cpu_matrix(matrix.dtype, bytes, n_weights, f64::from(call.rows))
    }
}
