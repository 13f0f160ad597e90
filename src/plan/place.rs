//! Where each resident matrix lies: chunks in rank order, filled page by page.
//!
//! A part goes into the open chunk of its domain, or opens the next one where it no longer fits. A chunk is as long
//! as its content, so nothing is lost at its end and a plan's bytes are the sum of its parts' pages.

use super::PlanError;
use super::document::{Chunk, DomainFootprint, Footprint, Placed};
use crate::profile::DeviceProfile;
use crate::tensor::{MatrixId, Projection};
use crate::tile::{Scratch, SubMatrix};
use crate::units::{ExpertId, LayerId};

/// One resident item, as it is to be placed.
pub(super) struct Resident<'a> {
    pub layer: LayerId,
    pub expert: ExpertId,
    pub domain: u32,
    /// Which projections, and the programs of each.
    pub parts: Vec<(Projection, &'a [SubMatrix])>,
}

/// Places items, best first.
pub(super) fn place(items: &[Resident<'_>], n_domains: u32, profile: &DeviceProfile) -> Vec<Chunk> {
    let page = profile.memory.page_bytes.value;
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut open: Vec<Option<usize>> = vec![None; n_domains as usize];
    for item in items {
        for &(projection, parts) in &item.parts {
            let matrix = MatrixId { layer: item.layer, expert: item.expert, projection };
            for (part, &tiles) in (0u32..).zip(parts) {
                let bytes = tiles.bytes().next_multiple_of(page);
                let fits = |at: &usize| chunks[*at].bytes + bytes <= profile.memory.chunk_bytes.value;
                let at = open[item.domain as usize].filter(fits).unwrap_or_else(|| {
                    chunks.push(Chunk { domain: item.domain, bytes: 0, parts: Vec::new() });
                    chunks.len() - 1
                });
                open[item.domain as usize] = Some(at);
                let chunk = &mut chunks[at];
                chunk.parts.push(Placed { matrix, part, tiles, offset: chunk.bytes });
                chunk.bytes += bytes;
            }
        }
    }
    chunks
}

/// What these chunks make each domain map.
pub(super) fn footprint(
    chunks: &[Chunk],
    n_domains: u32,
    profile: &DeviceProfile,
) -> Result<Footprint, PlanError> {
    let mut domains = Vec::with_capacity(n_domains as usize);
    for domain in 0..n_domains {
        let chunks: Vec<&Chunk> = chunks.iter().filter(|chunk| chunk.domain == domain).collect();
        let parts = chunks.iter().flat_map(|chunk| chunk.parts.iter().map(|placed| &placed.tiles));
        let scratch_bytes = Scratch::for_parts(parts, profile).total();
        let reserve = profile.memory.scratch_reserve_bytes.value;
        if scratch_bytes > reserve {
            return Err(PlanError::Scratch { needed: scratch_bytes, reserve });
        }
        // Four mappings are scratch.
        let (n_chunks, most) = (chunks.len() as u32, profile.memory.mappings_per_domain.value);
        if n_chunks.saturating_add(4) > most {
            return Err(PlanError::Mappings { needed: n_chunks.saturating_add(4), most });
        }
        let weight_bytes = chunks.iter().map(|chunk| chunk.bytes).sum();
        domains.push(DomainFootprint { weight_bytes, scratch_bytes, n_chunks });
    }
    let fullest = domains.iter().map(|domain| domain.weight_bytes).max().unwrap_or(0);
    Ok(Footprint {
        weight_bytes: domains.iter().map(|domain| domain.weight_bytes).sum(),
        scratch_bytes: domains.iter().map(|domain| domain.scratch_bytes).sum(),
        n_chunks: chunks.len() as u32,
        headroom_bytes: profile.window().0.saturating_sub(fullest),
        domains,
    })
}

/// Layers to domains: whole consecutive layers, so that a prompt crosses each boundary once, even in bytes.
pub(super) fn domains(layer_bytes: &[u64], n_domains: u32) -> Vec<u32> {
    let total: u128 = layer_bytes.iter().map(|&bytes| u128::from(bytes)).sum();
    let mut before: u128 = 0;
    let domain = |&bytes: &u64| {
        let middle = 2 * before + u128::from(bytes);
        before += u128::from(bytes);
        let domain = (middle * u128::from(n_domains)).checked_div(2 * total).unwrap_or(0);
        domain.min(u128::from(n_domains.saturating_sub(1))) as u32
    };
    layer_bytes.iter().map(domain).collect()
}

/// Index of a projection by its name in the document.
pub(super) fn projection_index(name: &str) -> Option<usize> {
    Projection::ALL.iter().position(|projection| projection.name() == name)
}
