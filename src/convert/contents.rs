//! The plan in the pack's words: chunks, matrices and their parts, cuts, manifest.

use crate::error::Error;
use crate::executor::WeightTable;
use crate::model::ModelShape;
use crate::pack::{ChunkContents, Cut, Digest, Manifest, MatrixContents, ModelDims, Part, Tier};
use crate::plan::{self, Chunk, Plan};
use crate::quantize;
use crate::tensor::TensorSource;
use crate::tokenizer;

pub(super) fn chunk_contents((chunk, order): (&Chunk, u32)) -> ChunkContents {
    ChunkContents { len: chunk.bytes, tier: Tier::Resident, domain: chunk.domain, order }
}

/// The plan's matrices in the order of the chunks, each with the places of its parts.
pub(super) fn matrices(plan: &Plan, weights: &WeightTable) -> Vec<MatrixContents> {
    let mut matrices: Vec<MatrixContents> = Vec::new();
    for (number, chunk) in (0..).zip(&plan.chunks) {
        for placed in &chunk.parts {
            let id = placed.matrix;
            if placed.part == 0 {
                let weight = weights.bank(id.layer).and_then(|bank| bank.weight(id.expert, id.projection));
                let n_in = weight.map_or(0, |weight| weight.n_in as u32);
                let n_out = plan.n_rows(id).unwrap_or(0) as u32;
                matrices.push(MatrixContents { matrix: id.into(), n_in, n_out, parts: Vec::new() });
            }
            if let Some(matrix) = matrices.iter_mut().rev().find(|matrix| matrix.matrix == id.into()) {
                matrix.parts.push(Part::new(placed.tiles, number, placed.offset));
            }
        }
    }
    matrices
}

/// The plan's cuts in matrices per layer, as the pack counts them.
pub(super) fn cuts(plan: &Plan, n_layer: u32) -> Vec<Cut> {
    let cut = |cut: &plan::Cut| {
        let mut experts = vec![0; n_layer as usize];
        for (layer, &items) in plan.layers.iter().zip(&cut.layers) {
            let hot = layer.ranking.iter().take(items as usize);
            let matrices = hot.map(|item| layer.projections(item.holds).len() as u32).sum();
            if let Some(count) = experts.get_mut(layer.layer as usize) {
                *count = matrices;
            }
        }
        Cut { from_tokens: cut.from_tokens, experts, dense: 0 }
    };
    plan.cuts.iter().map(cut).collect()
}
/// What is converted, and how: nothing that another machine or day would change.
pub(super) fn manifest(
    source: &dyn TensorSource,
    shape: &ModelShape,
    fingerprint: &str,
    plan: &Plan,
) -> Result<Manifest, Error> {
    let first = shape.moe_layers.first();
    let n_ff = first.and_then(|layer| layer.experts.first()).map_or(0, |[gate, ..]| gate.n_out as u32);
    Ok(Manifest {
        tool: concat!("orkpack ", env!("CARGO_PKG_VERSION")).to_owned(),
        architecture: shape.architecture.clone(),
        dims: ModelDims {
            n_layer: shape.n_layer as u32,
            n_embd: shape.n_embd as u32,
            n_ff,
            n_expert: first.map_or(0, |layer| layer.n_expert() as u32),
            n_expert_used: first.map_or(0, |layer| layer.n_used as u32),
            n_vocab: shape.n_vocab as u32,
        },
        contract: quantize::CONTRACT.to_owned(),
        device: plan.profile.name.clone(),
        tokenizer: Digest(tokenizer::digest(source.metadata())),
        fingerprint: fingerprint.parse().map_err(|_| Error::usage("the model has no fingerprint"))?,
    })
}
