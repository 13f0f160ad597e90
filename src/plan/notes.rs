//! What a plan takes of the board's memory, and what else its reader should know.

use super::document::{HitRates, LayerPlan, MatrixPlan, MemoryAccount, Note, tidy};
use super::layer::LayerModel;
use super::{CONTEXT_TOKENS, EVEN, PlanRequest, Routing, forecast};
use crate::model::MoeLayerShape;
use crate::tensor::Projection;

/// What a plan with copies of so many bytes takes of the board's memory.
pub(super) fn memory(request: &PlanRequest<'_>, npu_bytes: u64, scratch_bytes: u64) -> MemoryAccount {
    let shape = request.shape;
    let experts: u64 =
        shape.moe_layers.iter().flat_map(|moe| &moe.experts).flatten().map(|matrix| matrix.bytes).sum();
    let source_bytes = experts + shape.dense_bytes;
    let kv_bytes = shape.kv_bytes_per_token.saturating_mul(u64::from(CONTEXT_TOKENS));
    let state_bytes = shape.state_bytes;
    let total = [source_bytes, npu_bytes, scratch_bytes, kv_bytes, state_bytes];
    MemoryAccount {
        source_bytes,
        npu_bytes,
        scratch_bytes,
        kv_bytes,
        state_bytes,
        context_tokens: CONTEXT_TOKENS,
        total_bytes: total.into_iter().fold(0, u64::saturating_add),
        ram_bytes: request.ram.map_or(request.profile.memory.ram_bytes.value, |ram| ram.0),
    }
}

/// What a reader of the plan should know.
pub(super) fn notes(
    request: &PlanRequest<'_>,
    layers: &[LayerPlan],
    models: &[LayerModel],
    hit_rates: &HitRates,
    memory: &MemoryAccount,
) -> Vec<Note> {
    let warnings = request.profile.warnings().into_iter();
    let mut notes: Vec<Note> = warnings.map(|warning| Note::Device { what: warning.to_string() }).collect();
    match request.routing {
        Routing::Assumed(_) => {
            notes.push(Note::AssumedRouting);
            if request.shape.moe_layers.iter().all(MoeLayerShape::uses_all) {
                notes.push(Note::NoSkew { hotter_half: 0.5 });
            }
        }
        Routing::Measured(statistics) => {
            let coverage = statistics.coverage();
            if coverage.is_thin() {
                notes.push(Note::TooFewTokens { tokens: coverage.tokens, wanted: coverage.tokens_wanted });
            }
            if !coverage.never_seen.is_empty() {
                let experts = coverage.never_seen.iter().map(|(layer, expert)| (layer.0, expert.0));
                notes.push(Note::NeverSeen { experts: experts.collect(), of: coverage.n_experts });
            }
            if statistics.held_out.is_none() {
                notes.push(Note::NoHeldOut);
            }
            let hotter_half = forecast::hotter_half(statistics, models);
            if hotter_half <= 0.5 * EVEN {
                notes.push(Note::NoSkew { hotter_half: tidy(hotter_half) });
            }
            let calibration = hit_rates.overall.calibration.value;
            if let Some(held_out) = hit_rates.overall.held_out.filter(|held_out| held_out.high < calibration)
            {
                notes.push(Note::Drift { calibration, held_out: held_out.value });
            }
        }
    }
    if memory.total_bytes > memory.ram_bytes {
        notes.push(Note::OverRam { needed: memory.total_bytes, ram: memory.ram_bytes });
    }
    for projection in Projection::ALL {
        let of = |layer: &LayerPlan| layer.matrices.get(projection as usize).cloned();
        let found = |test: fn(&MatrixPlan) -> bool| {
            layers.iter().find_map(|layer| Some((layer.layer, of(layer).filter(test)?)))
        };
        let name = projection.name().to_owned();
        if let Some((layer, _)) = found(|matrix| matrix.programs == 0 && matrix.rows.is_none()) {
            notes.push(Note::StaysOnCpu { layer, projection: name.clone() });
        }
        let weights = |matrix: &MatrixPlan| (matrix.n_in * matrix.n_rows()) as f64;
        let factor = |matrix: &MatrixPlan| matrix.tile_bytes as f64 / weights(matrix).max(1.0);
        let padded =
            |matrix: &MatrixPlan| matrix.tile_bytes as f64 > 1.1 * (matrix.n_in * matrix.n_rows()) as f64;
        if let Some((layer, matrix)) = found(padded) {
            notes.push(Note::Padded { layer, projection: name, factor: tidy(factor(&matrix)) });
        }
    }
    notes
}
