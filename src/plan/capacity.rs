//! How much of a model's experts a budget could hold: arithmetic on sizes, before anything is planned.

use crate::model::ModelShape;
use crate::profile::DeviceProfile;
use crate::tile;
use crate::units::Bytes;

/// The page to which each part of a matrix is rounded up in device memory.
const PAGE: u64 = 4096;

/// The experts of a model, as stored and as copies for a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// Bytes of all experts' matrices in the source.
    pub source_bytes: u64,
    /// Bytes of int8 copies of all of them, padded and in whole pages; those of shapes that cannot run left out.
    pub copy_bytes: u64,
    /// What each budget holds.
    pub fits: Vec<Fit>,
}

/// What a budget holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The budget.
    pub budget: Bytes,
    /// The share of the experts' source bytes whose copies fit, in whole experts, from 0 to 1.
    pub share: f64,
}

/// The capacity for a model's shape: for each budget as many whole experts as fit, whichever they are.
pub fn capacity(shape: &ModelShape, profile: &DeviceProfile, budgets: &[Bytes]) -> Capacity {
    let experts = shape.moe_layers.iter().flat_map(|layer| &layer.experts);
    let mut sizes: Vec<(Option<u64>, u64)> = experts
        .map(|matrices| {
            let copies = matrices.iter().map(|matrix| copy_bytes(matrix.n_in, matrix.n_out, profile));
            (copies.sum(), matrices.iter().map(|matrix| matrix.bytes).sum())
        })
        .collect();
    // Small ones first: more of them fit.
    sizes.sort_unstable();
    let source_bytes: u64 = sizes.iter().map(|(_, source)| source).sum();
    let fit = |budget: &Bytes| {
        let (mut left, mut held) = (budget.0, 0);
        for (copy, source) in &sizes {
            let Some(rest) = copy.and_then(|copy| left.checked_sub(copy)) else { continue };
            (left, held) = (rest, held + source);
        }
        Fit { budget: *budget, share: held as f64 / source_bytes.max(1) as f64 }
    };
    Capacity {
        source_bytes,
        copy_bytes: sizes.iter().filter_map(|(copy, _)| *copy).sum(),
        fits: budgets.iter().map(fit).collect(),
    }
}

/// Device memory of one matrix; `None` for a shape that cannot be cut into programs.
fn copy_bytes(n_in: usize, n_out: usize, profile: &DeviceProfile) -> Option<u64> {
    let parts = tile::cut(n_in as u64, n_out as u64, profile).ok()?;
    Some(parts.iter().map(|part| part.bytes().next_multiple_of(PAGE)).sum())
}
