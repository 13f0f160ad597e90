//! The expert matrices that a pack placed for the device: where each lies, its scales, its rank.

use std::sync::Arc;

use crate::device::{ChunkId, DeviceMatrix, PlacedPart};
use crate::error::Error;
use crate::executor::WeightTable;
use crate::pack::Pack;
use crate::tensor::{MatrixId, Projection};
use crate::units::{ExpertId, LayerId};

/// One matrix inside the plan.
#[derive(Clone, Debug)]
pub struct HotMatrix {
    /// Its place in the ranking of its layer: hot in a regime whose cut is larger.
    pub rank: u32,
    /// Its parts; a chunk number is the pack's.
    pub matrix: DeviceMatrix,
    /// The same parts with the device's own chunk numbers, once all of them are filled.
    pub resident: Option<DeviceMatrix>,
    /// `[n_out]`: the scale of each output that has a copy.
    pub scales: Arc<[f32]>,
}

/// What is hot of one expert in one regime: the first outputs of its projections. The others come from source rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// Outputs of gate, and as many of up.
    pub gate_up: u32,
    /// Outputs of down.
    pub down: u32,
}

/// Every placed matrix, by layer, expert and projection.
#[derive(Clone, Debug, Default)]
pub struct HotTable {
    layers: Vec<Vec<[Option<HotMatrix>; 3]>>,
}

impl HotTable {
    /// The table of an open pack, whose placements must be the first rows, or all, of the model's experts' matrices.
    /// Placements of dense tensors are left alone: no executor asks for them yet.
    ///
    /// # Errors
    ///
    /// [`Error`] naming the first placement that is of no expert of the model.
    pub fn of(pack: &Pack, weights: &WeightTable) -> Result<HotTable, Error> {
        let mut table = HotTable::default();
        let mut ranks: Vec<u32> = Vec::new();
        for placement in pack.placements() {
            let Some(id) = placement.matrix.expert() else { continue };
            let weight = weights.bank(id.layer).and_then(|bank| bank.weight(id.expert, id.projection));
            let shape = weight.map(|weight| (weight.n_in, weight.n_out));
            let placed = (placement.n_in as usize, placement.n_out as usize);
            if !shape.is_some_and(|(n_in, n_out)| n_in == placed.0 && placed.1 <= n_out) {
                return Err(Error::usage(format!(
                    "the pack places {id} as {placed:?} (inputs, outputs), the model has {shape:?}"
                )));
            }
            let layer = id.layer.index();
            if ranks.len() <= layer {
                ranks.resize(layer + 1, 0);
                table.layers.resize(layer + 1, Vec::new());
            }
            let experts = &mut table.layers[layer];
            if experts.len() <= id.expert.index() {
                experts.resize(id.expert.index() + 1, [None, None, None]);
            }
            let parts = placement.parts.iter().map(|part| PlacedPart {
                part: part.sub.into(),
                chunk: ChunkId(part.chunk),
                offset: part.offset,
            });
            let matrix =
                DeviceMatrix { n_in: placement.n_in, n_out: placement.n_out, parts: parts.collect() };
            let scales = pack.scales(placement).collect();
            let hot = HotMatrix { rank: ranks[layer], matrix, resident: None, scales };
            ranks[layer] += 1;
            experts[id.expert.index()][slot(id.projection)] = Some(hot);
        }
        Ok(table)
    }

    /// A matrix of the plan, whichever regime it is hot in.
    pub fn get(&self, id: MatrixId) -> Option<&HotMatrix> {
        self.layers.get(id.layer.index())?.get(id.expert.index())?[slot(id.projection)].as_ref()
    }

    /// What of an expert is hot where the first `cut` matrices of its layer are.
    pub fn share(&self, layer: LayerId, expert: ExpertId, cut: u32) -> Share {
        let hot = |projection| {
            let matrix = self.get(MatrixId { layer, expert, projection }).filter(|matrix| matrix.rank < cut);
            matrix.map_or(0, |matrix| matrix.matrix.n_out)
        };
        Share { gate_up: hot(Projection::Gate).min(hot(Projection::Up)), down: hot(Projection::Down) }
    }

    /// Every matrix, in order of layer, expert and projection.
    pub fn matrices(&self) -> impl Iterator<Item = &HotMatrix> {
        self.layers.iter().flatten().flatten().flatten()
    }

    /// The same, to be marked as resident.
    pub fn matrices_mut(&mut self) -> impl Iterator<Item = &mut HotMatrix> {
        self.layers.iter_mut().flatten().flatten().flatten()
    }
}

fn slot(projection: Projection) -> usize {
    match projection {
        Projection::Gate => 0,
        Projection::Up => 1,
        Projection::Down => 2,
    }
}
