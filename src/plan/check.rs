//! Plans that come from files: checked against themselves, then against the model and the device.
//!
//! A plan says which bytes a device will read, so nothing in a stranger's is believed.

use std::collections::BTreeSet;

use super::document::{Chunk, LayerPlan, Plan, Regime, SCHEMA};
use super::place::{footprint, projection_index};
use super::{Holds, Item, PlanError, routed_layers};
use crate::calibrate::RoutedLayer;
use crate::model::ModelShape;
use crate::profile::DeviceProfile;
use crate::tensor::Projection;
use crate::tile::{self, TILE};

/// The page of the pack format.
const PAGE: u64 = 4096;

/// Larger sizes are no sizes.
const MAX_BYTES: u64 = 1 << 48;

fn refuse<T>(what: String) -> Result<T, PlanError> {
    Err(PlanError::Document(what))
}

impl Plan {
    /// Checks a plan that was read against the model it shall be used for and the device.
    ///
    /// # Errors
    ///
    /// [`PlanError::Document`] saying what differs.
    pub fn check(&self, shape: &ModelShape, profile: &DeviceProfile) -> Result<(), PlanError> {
        self.check_document()?;
        let digest = blake3::hash(&profile.to_json()?).to_hex().to_string();
        if self.profile.digest != digest {
            return refuse(format!(
                "made for device profile `{}`, which is not this `{}`; plan again",
                self.profile.name, profile.name
            ));
        }
        let routed = |plan: &LayerPlan| RoutedLayer {
            layer: plan.layer,
            n_expert: plan.n_expert,
            n_used: plan.n_used,
        };
        if self.layers.iter().map(routed).collect::<Vec<_>>() != routed_layers(shape) {
            return refuse("made for a model with other layers or experts".to_owned());
        }
        for (plan, moe) in self.layers.iter().zip(&shape.moe_layers) {
            for (matrix, projection) in plan.matrices.iter().zip(Projection::ALL) {
                let found = (matrix.n_in, matrix.n_out);
                let same = |e: &[crate::model::MatrixShape; 3]| {
                    let expected = &e[projection as usize];
                    found == (expected.n_in as u64, expected.n_out as u64)
                };
                if !moe.experts.iter().all(same) {
                    return refuse(format!(
                        "made for another model: layer {} has another {} projection",
                        plan.layer,
                        projection.name()
                    ));
                }
            }
        }
        self.check_parts(profile)?;
        if self.window_bytes != profile.window().0 || self.budget_bytes > self.window_bytes {
            return refuse(format!("the window is {} bytes, not {}", profile.window().0, self.window_bytes));
        }
        if footprint(&self.chunks, self.n_domains, profile)? != self.footprint {
            return refuse("the footprint is not that of the chunks".to_owned());
        }
        Ok(())
    }

    /// Every part must be what this program would cut.
    fn check_parts(&self, profile: &DeviceProfile) -> Result<(), PlanError> {
        for plan in &self.layers {
            for (matrix, projection) in plan.matrices.iter().zip(Projection::ALL) {
                let parts = tile::cut(matrix.n_in, matrix.n_rows(), profile).unwrap_or_default();
                if parts.len() != matrix.programs as usize {
                    return refuse(format!("layer {}: {} programs", plan.layer, matrix.programs));
                }
                let mine = |placed: &&super::Placed| {
                    placed.matrix.layer.0 == plan.layer && placed.matrix.projection == projection
                };
                for placed in self.chunks.iter().flat_map(|chunk| &chunk.parts).filter(mine) {
                    if parts.get(placed.part as usize) != Some(&placed.tiles) {
                        return refuse(format!(
                            "{}: part {} is not cut as the device needs it",
                            placed.matrix, placed.part
                        ));
                    }
                }
            }
        }
        let most = profile.memory.chunk_bytes.value;
        match self.chunks.iter().position(|chunk| chunk.bytes > most) {
            Some(i) => refuse(format!("chunk {i} is longer than the device's {most} bytes")),
            None => Ok(()),
        }
    }

    /// Whatever can be checked without model and device.
    pub(super) fn check_document(&self) -> Result<(), PlanError> {
        if self.schema != SCHEMA {
            return refuse(format!("schema is `{}`, expected `{SCHEMA}`", self.schema));
        }
        let hex = |digest: &str| {
            digest.len() == 64 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        if !hex(&self.profile.digest) || !self.statistics.as_deref().is_none_or(hex) {
            return refuse("a digest is not 64 hex digits".to_owned());
        }
        if !(1..=16).contains(&self.n_domains) || self.budget_bytes > MAX_BYTES {
            return refuse(format!("{} domains of {} bytes", self.n_domains, self.budget_bytes));
        }
        let regimes: Vec<Regime> = self.forecasts.iter().map(|forecast| forecast.regime).collect();
        if regimes != [Regime::Decode, Regime::Prefill] {
            return refuse("forecasts are not decode and prefill".to_owned());
        }
        for (i, plan) in self.layers.iter().enumerate() {
            if i > 0 && self.layers[i - 1].layer >= plan.layer {
                return refuse(format!("layer {} is out of order", plan.layer));
            }
            self.check_layer(plan)?;
        }
        self.check_cuts()?;
        self.check_chunks()
    }

    fn check_layer(&self, plan: &LayerPlan) -> Result<(), PlanError> {
        let layer = plan.layer;
        if plan.domain >= self.n_domains {
            return refuse(format!("layer {layer}: domain {} of {}", plan.domain, self.n_domains));
        }
        let projections: Vec<_> = plan.matrices.iter().map(|m| projection_index(&m.projection)).collect();
        if projections != [Some(0), Some(1), Some(2)] {
            return refuse(format!("layer {layer}: matrices are not gate, up and down"));
        }
        if !(1..=plan.n_expert).contains(&plan.n_used) || plan.ranking.len() != plan.n_expert as usize {
            return refuse(format!(
                "layer {layer}: {} of {} experts used, {} ranked",
                plan.n_used,
                plan.n_expert,
                plan.ranking.len()
            ));
        }
        let mut seen = vec![false; plan.ranking.len()];
        for item in &plan.ranking {
            match seen.get_mut(item.expert as usize) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return refuse(format!("layer {layer}: expert {} is ranked twice", item.expert)),
                None => {
                    return refuse(format!(
                        "layer {layer}: expert {} of {} is ranked",
                        item.expert, plan.n_expert
                    ));
                }
            }
        }
        let resident = plan.ranking.get(..plan.resident as usize);
        let Some(resident) = resident else {
            return refuse(format!("layer {layer}: {} of {} experts resident", plan.resident, plan.n_expert));
        };
        check_rows(plan)?;
        // Whole experts come first, then the same part of each: a cut then splits both phases alike.
        let follows = |pair: &[Item]| pair[0].holds == Holds::Whole || pair[0].holds == pair[1].holds;
        if !resident.windows(2).all(follows) {
            return refuse(format!("layer {layer}: an expert after one that holds less or something else"));
        }
        Ok(())
    }

    fn check_cuts(&self) -> Result<(), PlanError> {
        let regimes: Vec<Regime> = self.cuts.iter().map(|cut| cut.regime).collect();
        if regimes != [Regime::Decode, Regime::Prefill] {
            return refuse("cuts are not decode and prefill".to_owned());
        }
        if self.cuts[0].from_tokens != 1 || self.cuts[1].from_tokens <= 1 {
            return refuse("decode begins with 1 token, prefill with more".to_owned());
        }
        for cut in &self.cuts {
            if cut.layers.len() != self.layers.len() {
                return refuse(format!("a cut of {} layers, not {}", cut.layers.len(), self.layers.len()));
            }
            for (&n, plan) in cut.layers.iter().zip(&self.layers) {
                if n > plan.resident {
                    return refuse(format!(
                        "layer {}: {n} experts hot, {} resident",
                        plan.layer, plan.resident
                    ));
                }
                if plan.is_by_rows() && n != 0 && n != plan.n_expert {
                    return refuse(format!(
                        "layer {}: rows are hot in {n} of {} experts, expected all or none",
                        plan.layer, plan.n_expert
                    ));
                }
            }
        }
        Ok(())
    }

    /// The parts that must be in a chunk: never more than the document places.
    fn resident_parts(&self) -> Result<BTreeSet<PartKey>, PlanError> {
        let placed = self.chunks.iter().map(|chunk| chunk.parts.len() as u64).sum::<u64>();
        let mut expected = BTreeSet::new();
        let mut n_parts = 0u64;
        for plan in &self.layers {
            for item in plan.ranking.iter().take(plan.resident as usize) {
                for &projection in plan.projections(item.holds) {
                    let programs = plan.matrices.get(projection as usize).map_or(0, |m| m.programs);
                    n_parts += u64::from(programs);
                    if programs == 0 || n_parts > placed {
                        return refuse(format!(
                            "layer {}, expert {}, {}: {programs} parts are resident, {placed} of all are in chunks",
                            plan.layer,
                            item.expert,
                            projection.name()
                        ));
                    }
                    expected.extend((0..programs).map(|p| (plan.layer, item.expert, projection, p)));
                }
            }
        }
        Ok(expected)
    }

    fn check_chunks(&self) -> Result<(), PlanError> {
        let mut expected = self.resident_parts()?;
        let mut weights = vec![0u64; self.n_domains as usize];
        for (i, chunk) in self.chunks.iter().enumerate() {
            let Some(sum) = weights.get_mut(chunk.domain as usize) else {
                return refuse(format!("chunk {i}: domain {} of {}", chunk.domain, self.n_domains));
            };
            check_chunk(i, chunk)?;
            *sum = sum.saturating_add(chunk.bytes);
            for placed in &chunk.parts {
                let matrix = placed.matrix;
                let key = (matrix.layer.0, matrix.expert.0, matrix.projection, placed.part);
                if !expected.remove(&key) {
                    return refuse(format!(
                        "chunk {i}: {matrix}, part {}, is placed twice or is not resident",
                        placed.part
                    ));
                }
                let domain = self.layers.iter().find(|plan| plan.layer == matrix.layer.0).map(|p| p.domain);
                if domain != Some(chunk.domain) {
                    return refuse(format!("chunk {i}: {matrix} is in domain {}", chunk.domain));
                }
            }
        }
        if let Some((layer, expert, projection, part)) = expected.first() {
            return refuse(format!(
                "layer {layer}, expert {expert}, {}: part {part} is resident and in no chunk",
                projection.name()
            ));
        }
        let found: Vec<u64> = self.footprint.domains.iter().map(|domain| domain.weight_bytes).collect();
        let total = weights.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        if found != weights || self.footprint.weight_bytes != total {
            return refuse("the footprint is not that of the chunks".to_owned());
        }
        match weights.iter().find(|&&bytes| bytes > self.budget_bytes) {
            Some(bytes) => refuse(format!("{bytes} bytes in a domain, the budget is {}", self.budget_bytes)),
            None => Ok(()),
        }
    }
}

/// A layer is shared by experts or by rows; then the same rows of every expert are resident, and no expert is named.
fn check_rows(plan: &LayerPlan) -> Result<(), PlanError> {
    let layer = plan.layer;
    let by_rows = plan.ranking.iter().filter(|item| item.holds == Holds::Rows).count();
    let rows: Vec<Option<u64>> = plan.matrices.iter().map(|matrix| matrix.rows).collect();
    let [gate, up, down] = rows[..] else { return refuse(format!("layer {layer}: not three matrices")) };
    if by_rows == 0 && (gate, up, down) == (None, None, None) {
        return Ok(());
    }
    let (Some(gate), Some(up), Some(down)) = (gate, up, down) else {
        return refuse(format!("layer {layer}: rows of some projections are given, of others not"));
    };
    if by_rows != plan.ranking.len() || plan.resident != plan.n_expert {
        return refuse(format!(
            "layer {layer}: rows of {by_rows} experts, {} of {} resident, expected all",
            plan.resident, plan.n_expert
        ));
    }
    if gate != up || gate == 0 && down == 0 {
        return refuse(format!("layer {layer}: {gate} rows of gate, {up} of up, {down} of down"));
    }
    for matrix in &plan.matrices {
        let (rows, n_out, programs) = (matrix.n_rows(), matrix.n_out, matrix.programs);
        if rows > n_out || (rows == 0) != (programs == 0) {
            return refuse(format!(
                "layer {layer}: {rows} of {n_out} rows of {} in {programs} programs",
                matrix.projection
            ));
        }
    }
    match plan.ranking.iter().find(|item| item.forced) {
        Some(item) => refuse(format!("layer {layer}: expert {} is forced, and rows are shared", item.expert)),
        None => Ok(()),
    }
}

/// Layer, expert, projection, part.
type PartKey = (u32, u32, Projection, u32);

/// Parts follow each other page by page, without overlaps or holes.
fn check_chunk(i: usize, chunk: &Chunk) -> Result<(), PlanError> {
    let mut end = 0u64;
    for placed in &chunk.parts {
        let tiles = &placed.tiles;
        let block = TILE as u32;
        let legal = tiles.k_len > 0
            && tiles.n_len > 0
            && tiles.k_len <= tiles.k_padded
            && tiles.n_len <= tiles.n_padded
            && tiles.k_padded.is_multiple_of(block)
            && tiles.n_padded.is_multiple_of(block)
            && tiles.bytes() <= MAX_BYTES;
        if !legal {
            return refuse(format!("chunk {i}: {}, part {}, is no program", placed.matrix, placed.part));
        }
        if placed.offset != end {
            return refuse(format!(
                "chunk {i}: {}, part {}, begins at byte {}, expected {end}",
                placed.matrix, placed.part, placed.offset
            ));
        }
        end = end.saturating_add(tiles.bytes().next_multiple_of(PAGE));
        if end > chunk.bytes {
            return refuse(format!(
                "chunk {i}: {}, part {}, ends at byte {end}, past the end of the chunk: {}",
                placed.matrix, placed.part, chunk.bytes
            ));
        }
    }
    if end != chunk.bytes || chunk.parts.is_empty() {
        return refuse(format!("chunk {i} is {} bytes long, its content {end}", chunk.bytes));
    }
    Ok(())
}
