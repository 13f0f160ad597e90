//! The values of an index: everything that a reader relies on later is checked here, once, for both doors.
//!
//! The writer runs the same check on what it is about to write, so it cannot write what a reader refuses.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{MAX_K, MAX_N, PAGE, TILE, gaps, is_file_name};
use super::manifest::{
    Chunk, Index, Kind, LayoutId, MatrixName, Part, Placement, ProjectionCode, Section, SourceTensor,
    SubMatrix,
};
use super::{PackError, entry, wide};
use crate::bytes::align_up;

/// Checks every value of an index of `index_len` bytes in a pack of `file_len` bytes.
///
/// # Errors
///
/// [`PackError::Value`] at the first that cannot be.
pub(super) fn index(index: &Index, index_len: u64, file_len: u64) -> Result<(), PackError> {
    sections(&index.sections, PAGE.saturating_add(index_len), file_len)?;
    let mut claims = Claims { index, taken: BTreeSet::new() };
    documents(&mut claims)?;
    tensors(&mut claims)?;
    files(&mut claims)?;
    chunks(&mut claims)?;
    claims.all_taken()?;
    names(index)?;
    cuts(index)
}

/// Sections follow each other, each on the first page boundary after the one before, and fill the file.
fn sections(sections: &[Section], index_end: u64, file_len: u64) -> Result<(), PackError> {
    let mut end = index_end;
    let mut names = BTreeSet::new();
    for section in sections {
        let expected = align_up(end, PAGE).unwrap_or(u64::MAX);
        if section.offset != expected {
            return Err(PackError::value(section.label(), "offset", section.offset, expected));
        }
        end = section.offset.checked_add(section.len).filter(|end| *end <= file_len).ok_or_else(|| {
            let room = file_len.saturating_sub(section.offset);
            PackError::value(
                section.label(),
                "length",
                section.len,
                format!("at most {room}, to the file's end"),
            )
        })?;
        let n_parts = wide(section.digests.len());
        if section.len.checked_rem(n_parts) != Some(0) {
            return Err(PackError::value(
                section.label(),
                "number of parts",
                n_parts,
                "a divisor of its length",
            ));
        }
        let layout = match section.kind {
            Kind::Header | Kind::Residue | Kind::Profile | Kind::Statistics | Kind::Plan => LayoutId::Plain,
            Kind::Tensor => LayoutId::Rows,
            Kind::Chunk => LayoutId::Tiles,
            Kind::Scales => LayoutId::F32,
        };
        if section.layout != layout {
            let (found, expected) = (format!("{:?}", section.layout), format!("{layout:?}"));
            return Err(PackError::value(section.label(), "layout", found, expected));
        }
        if !names.insert((section.kind, &section.name)) {
            return Err(PackError::value(section.label(), "name", "used twice", "once per kind"));
        }
    }
    if end == file_len { Ok(()) } else { Err(PackError::value("header", "file length", file_len, end)) }
}

/// Which sections the tables have pointed at: each is pointed at once, and none is left over.
struct Claims<'a> {
    index: &'a Index,
    taken: BTreeSet<u32>,
}

impl<'a> Claims<'a> {
    fn take(&mut self, number: u32, kind: Kind, item: &str) -> Result<&'a Section, PackError> {
        let section = entry(&self.index.sections, number).filter(|section| section.kind == kind);
        match section {
            Some(section) if self.taken.insert(number) => Ok(section),
            Some(_) => Err(PackError::value(item, "section", format!("{number}, taken already"), "its own")),
            None => Err(PackError::value(item, "section", number, format!("a section of kind {kind}"))),
        }
    }

    fn all_taken(&self) -> Result<(), PackError> {
        let mut numbered = self.index.sections.iter().zip(0u32..);
        match numbered.find(|(_, number)| !self.taken.contains(number)) {
            Some((section, _)) => {
                Err(PackError::value(section.label(), "use", "none", "an entry of a table that points at it"))
            }
            None => Ok(()),
        }
    }
}

/// One profile, one plan, at most one document of statistics.
fn documents(claims: &mut Claims<'_>) -> Result<(), PackError> {
    for (kind, least) in [(Kind::Profile, 1), (Kind::Plan, 1), (Kind::Statistics, 0)] {
        let numbered = claims.index.sections.iter().zip(0u32..);
        let found: Vec<u32> = numbered.filter(|(s, _)| s.kind == kind).map(|(_, number)| number).collect();
        if found.len() > 1 || found.len() < least {
            let expected = if least == 1 { "1" } else { "0 or 1" };
            return Err(PackError::value("index", "number of documents of one kind", found.len(), expected));
        }
        for number in found {
            claims.take(number, kind, "index")?;
        }
    }
    Ok(())
}

/// A name and a header each; tensors inside their file and apart; the residue, of fat packs alone, as long as the gaps.
fn files(claims: &mut Claims<'_>) -> Result<(), PackError> {
    let fat = claims.index.tensors.iter().any(|tensor| tensor.section.is_some());
    let mut inside: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for tensor in &claims.index.tensors {
        let place = (tensor.offset, tensor.source_len().unwrap_or(u64::MAX));
        inside.entry(tensor.file).or_default().push(place);
    }
    let mut names = BTreeSet::new();
    for (file, number) in claims.index.files.iter().zip(0u32..) {
        let item = format!("source file {number}");
        if !is_file_name(&file.name) {
            let found = file.name.escape_debug();
            return Err(PackError::value(item, "name", found, "a plain file name of at most 255 bytes"));
        }
        if !names.insert(&file.name) {
            return Err(PackError::value(item, "name", file.name.escape_debug(), "a name of its own"));
        }
        if file.residue.is_some() && !fat {
            return Err(PackError::value(item, "residue", "there without tensors", "none in a thin pack"));
        }
        let header = claims.take(file.header, Kind::Header, &item)?;
        let residue = file.residue.map(|section| claims.take(section, Kind::Residue, &item)).transpose()?;
        let places = inside.remove(&number).unwrap_or_default().into_iter();
        let gaps = gaps(header.len, places, file.len).ok_or_else(|| {
            PackError::value(&item, "tensors", "overlapping or outside", "apart and inside the file")
        })?;
        let len = gaps.iter().fold(0u64, |len, gap| len.saturating_add(gap.end.saturating_sub(gap.start)));
        if let Some(residue) = residue.filter(|section| section.len != len) {
            return Err(PackError::value(residue.label(), "length", residue.len, len));
        }
    }
    Ok(())
}

/// Known types, whole blocks, as many bytes as the shape needs, the digests of the rows that are stored.
fn tensors(claims: &mut Claims<'_>) -> Result<(), PackError> {
    let fat = claims.index.tensors.iter().any(|tensor| tensor.section.is_some());
    let mut file = 0;
    for tensor in &claims.index.tensors {
        let item = tensor.label();
        if !(1..=4).contains(&tensor.dims.len()) {
            return Err(PackError::value(item, "number of dimensions", tensor.dims.len(), "1 to 4"));
        }
        let Some(len) = tensor.source_len() else {
            let found = format!("type {} with dimensions {:?}", tensor.dtype, tensor.dims);
            return Err(PackError::value(item, "shape", found, "a known type in whole blocks"));
        };
        if entry(&claims.index.files, tensor.file).is_none() || tensor.file < file {
            return Err(PackError::value(item, "file", tensor.file, "a file of the model, in order"));
        }
        file = tensor.file;
        if len.checked_rem(wide(tensor.digests.len())) != Some(0) {
            return Err(PackError::value(
                item,
                "number of digests",
                tensor.digests.len(),
                "a divisor of its length",
            ));
        }
        if tensor.section.is_some() != fat {
            return Err(PackError::value(
                item,
                "section",
                "there without the others",
                "there for all or none",
            ));
        }
        if let Some(number) = tensor.section {
            stored(claims.take(number, Kind::Tensor, &item)?, tensor, len)?;
        }
    }
    Ok(())
}

fn stored(section: &Section, tensor: &SourceTensor, len: u64) -> Result<(), PackError> {
    if section.name != tensor.name {
        return Err(PackError::value(section.label(), "name", "another", tensor.label()));
    }
    if section.len != len {
        return Err(PackError::value(section.label(), "length", section.len, format!("{len} by its shape")));
    }
    if section.digests != tensor.digests {
        return Err(PackError::value(
            section.label(),
            "list of digests",
            "another",
            "that of the source rows",
        ));
    }
    Ok(())
}

/// One part of a matrix in a chunk.
struct Held<'a> {
    placement: &'a Placement,
    part: &'a Part,
    /// The matrix begins here, and so its scales are those of this chunk.
    is_first: bool,
}

/// Every chunk is exactly as long as its parts, which lie apart in it, and so are its scales.
fn chunks(claims: &mut Claims<'_>) -> Result<(), PackError> {
    let mut inside: BTreeMap<u32, Vec<Held<'_>>> = BTreeMap::new();
    for placement in &claims.index.placements {
        geometry(placement)?;
        home(&claims.index.chunks, placement)?;
        for (i, part) in placement.parts.iter().enumerate() {
            inside.entry(part.chunk).or_default().push(Held { placement, part, is_first: i == 0 });
        }
    }
    for (chunk, number) in claims.index.chunks.iter().zip(0u32..) {
        let item = format!("chunk {number}");
        let section = claims.take(chunk.section, Kind::Chunk, &item)?;
        let scales = claims.take(chunk.scales, Kind::Scales, &item)?;
        let Some(mut parts) = inside.remove(&number) else {
            return Err(PackError::value(item, "content", "nothing", "a part of a matrix at least"));
        };
        parts.sort_by_key(|held| held.part.offset);
        exactly(section, tiles_len(&parts)?)?;
        exactly(scales, scales_len(&parts)?)?;
    }
    Ok(())
}

/// The chunks of a matrix are of one domain and tier.
fn home(chunks: &[Chunk], placement: &Placement) -> Result<(), PackError> {
    let item = || placement.matrix.to_string();
    let mut first = None;
    for part in &placement.parts {
        let Some(chunk) = entry(chunks, part.chunk) else {
            return Err(PackError::value(item(), "chunk", part.chunk, "a chunk of the pack"));
        };
        let first: &Chunk = first.get_or_insert(chunk);
        if chunk.domain != first.domain {
            let expected = format!("{}, that of its first part", first.domain);
            return Err(PackError::value(item(), "domain of a part", chunk.domain, expected));
        }
        if chunk.tier != first.tier {
            let (found, expected) = (format!("{:?}", chunk.tier), format!("{:?}", first.tier));
            return Err(PackError::value(item(), "tier of a part", found, expected));
        }
    }
    Ok(())
}

/// Length of a chunk with these parts, which are sorted: each on the first page after the one before.
fn tiles_len(parts: &[Held<'_>]) -> Result<u64, PackError> {
    let mut next = 0;
    for Held { placement, part, .. } in parts {
        if part.offset != next {
            return Err(PackError::value(
                placement.matrix.to_string(),
                "offset of a part",
                part.offset,
                next,
            ));
        }
        next = align_up(part.end(), PAGE).unwrap_or(u64::MAX);
    }
    Ok(next)
}

/// Length of the scales of a chunk with these parts, which are sorted: those of the matrices that begin here.
fn scales_len(parts: &[Held<'_>]) -> Result<u64, PackError> {
    let mut end = 0u64;
    for Held { placement, .. } in parts.iter().filter(|held| held.is_first) {
        if placement.scales != end {
            let item = placement.matrix.to_string();
            return Err(PackError::value(item, "offset of its scales", placement.scales, end));
        }
        end = end.saturating_add(placement.scales_len());
    }
    Ok(end)
}

fn exactly(section: &Section, len: u64) -> Result<(), PackError> {
    if section.len != len {
        return Err(PackError::value(section.label(), "length", section.len, format!("{len} by its parts")));
    }
    if section.digests.len() != 1 {
        return Err(PackError::value(section.label(), "number of digests", section.digests.len(), 1));
    }
    Ok(())
}

/// The parts are a grid without gap or overlap over `[n_out, n_in]`, each of legal size, in order.
fn geometry(placement: &Placement) -> Result<(), PackError> {
    let wrong = |field, found: u64, expected: &str| {
        Err(PackError::value(placement.matrix.to_string(), field, found, expected))
    };
    // Where the next one begins, and the outputs of those beside the last.
    let (mut k, mut n, mut row) = (0u32, 0u32, (0, 0));
    for part in &placement.parts {
        let SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded } = part.sub;
        if k_padded == 0 || !k_padded.is_multiple_of(TILE) || k_padded > MAX_K {
            return wrong("padded K", k_padded.into(), "a multiple of 32 from 32 to 4096");
        }
        if n_padded == 0 || !n_padded.is_multiple_of(TILE) || n_padded > MAX_N {
            return wrong("padded N", n_padded.into(), "a multiple of 32 from 32 to 8192");
        }
        if k_len == 0 || k_len > k_padded || k_len > placement.n_in.saturating_sub(k) {
            return wrong("K of a part", k_len.into(), "1 or more, up to its padded K and the matrix's end");
        }
        if n_len == 0 || n_len > n_padded || n_len > placement.n_out.saturating_sub(n) {
            return wrong("N of a part", n_len.into(), "1 or more, up to its padded N and the matrix's end");
        }
        if k0 != k {
            return wrong("first input of a part", k0.into(), &format!("{k}, the next of the grid"));
        }
        if n0 != n {
            return wrong("first output of a part", n0.into(), &format!("{n}, the next of the grid"));
        }
        if k > 0 && (n_len, n_padded) != row {
            return wrong("N of a part", n_len.into(), "that of the other K-slices of the same outputs");
        }
        row = (n_len, n_padded);
        k = k.saturating_add(k_len);
        if k == placement.n_in {
            (k, n) = (0, n.saturating_add(n_len));
        }
    }
    if k != 0 || n != placement.n_out || n == 0 {
        return wrong("number of parts", wide(placement.parts.len()), "a grid that covers the matrix");
    }
    Ok(())
}

/// Tensors and matrices have one entry each, and matrices are of the model.
fn names(index: &Index) -> Result<(), PackError> {
    let mut tensors = BTreeSet::new();
    if let Some(twice) = index.tensors.iter().find(|tensor| !tensors.insert(&tensor.name)) {
        return Err(PackError::value(twice.label(), "name", "used twice", "once"));
    }
    let mut matrices = BTreeSet::new();
    // What becomes of gate and up needs the same outputs of both.
    let mut pairs: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for placement in &index.placements {
        let item = placement.matrix.to_string();
        if !matrices.insert(placement.matrix) {
            return Err(PackError::value(item, "placement", "given twice", "once"));
        }
        match placement.matrix {
            MatrixName::Expert { layer, expert, projection } => {
                let dims = index.manifest.dims;
                let n_out = match projection {
                    ProjectionCode::Down => placement.n_out,
                    _ => *pairs.entry((layer, expert)).or_insert(placement.n_out),
                };
                if placement.n_out != n_out {
                    let expected = format!("{n_out}, as many as of the other of gate and up");
                    return Err(PackError::value(item, "outputs with a copy", placement.n_out, expected));
                }
                if layer >= dims.n_layer || expert >= dims.n_expert {
                    let expected = format!("{} layers of {} experts", dims.n_layer, dims.n_expert);
                    return Err(PackError::value(item, "name", "outside the model", expected));
                }
            }
            MatrixName::Dense { tensor } => {
                let dims = entry(&index.tensors, tensor).map(|tensor| tensor.dims.as_slice());
                let &[n_in, n_out] = dims.unwrap_or_default() else {
                    return Err(PackError::value(item, "tensor", tensor, "a matrix of the model"));
                };
                if u64::from(placement.n_in) != n_in || u64::from(placement.n_out) > n_out {
                    let found = format!("{} x {}", placement.n_out, placement.n_in);
                    let expected = format!("rows of the {n_out} x {n_in} tensor");
                    return Err(PackError::value(item, "shape", found, expected));
                }
            }
        }
    }
    Ok(())
}

/// Cuts ascend, have a number for every layer, and go no further down than there are entries.
fn cuts(index: &Index) -> Result<(), PackError> {
    let mut dense = 0u32;
    let mut ranked: BTreeMap<u32, u32> = BTreeMap::new();
    for placement in &index.placements {
        let count = match placement.matrix.layer() {
            Some(layer) => ranked.entry(layer.0).or_default(),
            None => &mut dense,
        };
        *count = count.saturating_add(1);
    }
    let mut before = 0;
    for cut in &index.cuts {
        let item = format!("cut from {} tokens", cut.from_tokens);
        if cut.from_tokens <= before {
            return Err(PackError::value(
                item,
                "first batch",
                cut.from_tokens,
                format!("more than {before}"),
            ));
        }
        before = cut.from_tokens;
        let n_layer = index.manifest.dims.n_layer;
        if wide(cut.experts.len()) != u64::from(n_layer) {
            return Err(PackError::value(item, "number of layers", cut.experts.len(), n_layer));
        }
        let layers = cut.experts.iter().zip(0u32..);
        let mut deep = layers.filter(|(depth, layer)| **depth > ranked.get(layer).copied().unwrap_or(0));
        if let Some((depth, layer)) = deep.next() {
            let most = ranked.get(&layer).copied().unwrap_or(0);
            return Err(PackError::value(
                item,
                "depth in a layer",
                format!("{depth} in layer {layer}"),
                format!("at most {most}"),
            ));
        }
        if cut.dense > dense {
            return Err(PackError::value(
                item,
                "depth among plain matrices",
                cut.dense,
                format!("at most {dense}"),
            ));
        }
    }
    Ok(())
}
