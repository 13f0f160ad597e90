//! What the run would have taken on the profile's device: the planner's cost model, fed with what really happened.
//!
//! Nothing here is timed. Hits, rows and bytes are counted as they occur and priced by the profile's rates, so a number
//! from here is *simulated*.

use super::hot::{HotMatrix, HotTable};
use crate::model::{ModelShape, MoeLayerShape};
use crate::plan::cost::{Bound, Load, Phase, Rates};
use crate::profile::DeviceProfile;
use crate::tensor::{MatrixId, Projection};
use crate::units::{ExpertId, LayerId};

/// How many rows each expert got, by where it is computed. No expert twice in a list.
#[derive(Clone, Debug, Default)]
pub struct LayerRows {
    /// All three projections on the device.
    pub whole: Vec<(ExpertId, u32)>,
    /// Gate and up on the device.
    pub gate_up: Vec<(ExpertId, u32)>,
    /// Down on the device.
    pub down: Vec<(ExpertId, u32)>,
    /// Nothing on the device.
    pub cold: Vec<(ExpertId, u32)>,
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
    pub fn layer_seconds(&self, layer: LayerId, m: usize, rows: &LayerRows, hot: &HotTable) -> f64 {
        let Some(shape) = self.shape.moe_layers.iter().find(|shape| shape.layer == layer) else { return 0.0 };
        let Some([gate, _, down]) = shape.experts.first() else { return 0.0 };
        let (n_embd, n_ff) = (gate.n_in as f64, gate.n_out as f64);
        let count = |lists: [&[(ExpertId, u32)]; 2]| -> f64 {
            lists.iter().flat_map(|list| list.iter()).map(|(_, rows)| f64::from(*rows)).sum()
        };
        let hot_up = count([&rows.whole, &rows.gate_up]);
        let hot_down = count([&rows.whole, &rows.down]);
        let quantized_rows = if hot_up > 0.0 { m as f64 * n_embd } else { 0.0 };
        let gate_up = Phase {
            npu: self.npu(layer, [&rows.whole, &rows.gate_up], &[Projection::Gate, Projection::Up], hot),
            submits: if hot_up > 0.0 { 1.0 } else { 0.0 },
            cpu: self
                .cpu(shape, [&rows.cold, &rows.down], &[0, 1])
                .plus(self.rates.around(quantized_rows, 2.0 * hot_up * n_ff)),
        };
        let down_phase = Phase {
            npu: self.npu(layer, [&rows.whole, &rows.down], &[Projection::Down], hot),
            submits: if hot_down > 0.0 { 1.0 } else { 0.0 },
            cpu: self
                .cpu(shape, [&rows.cold, &rows.gate_up], &[2])
                .plus(self.rates.around(hot_down * n_ff, hot_down * down.n_out as f64)),
        };
        self.rates.layer_seconds(&[gate_up, down_phase])
    }

    /// Seconds of everything but the experts for `m` tokens that go through the model at once.
    pub fn rest_seconds(&self, m: usize) -> f64 {
        let macs = self.shape.dense_weights as f64 * m as f64;
        self.rates.cpu(self.shape.dense_bytes as f64, macs).seconds
    }

    fn npu(
        &self,
        layer: LayerId,
        experts: [&[(ExpertId, u32)]; 2],
        projections: &[Projection],
        hot: &HotTable,
    ) -> Load {
        let mut load = Load::default();
        for &(expert, rows) in experts.iter().flat_map(|list| list.iter()) {
            for &projection in projections {
                if let Some(matrix) = hot.get(MatrixId { layer, expert, projection }) {
                    load = load.plus(self.product(matrix, rows));
                }
            }
        }
        load
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

    fn cpu(&self, shape: &MoeLayerShape, experts: [&[(ExpertId, u32)]; 2], projections: &[usize]) -> Load {
        let mut load = Load::default();
        for (expert, rows) in experts.iter().flat_map(|list| list.iter()) {
            let Some(matrices) = shape.experts.get(expert.index()) else { continue };
            for &projection in projections {
                let matrix = &matrices[projection];
                let (bytes, n_weights) = (matrix.bytes as f64, matrix.n_weights() as f64);
                load = load.plus(self.rates.cpu_matrix(matrix.dtype, bytes, n_weights, f64::from(*rows)));
            }
        }
        load
    }
}
