//! Where everything in a pack lies: the header's bytes, and the places of sections before any is written.
//!
//! The length of a pack follows from what goes in (counts, names, lengths), so that a dry run and a full disk
//! are known to the byte before the work begins.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde::Serialize;

pub use super::digest::{HEADER_CONTEXT, INDEX_CONTEXT, SECTION_CONTEXT};
use super::digest::{keyed, parts};
use super::manifest::{
    Chunk, Cut, Index, Kind, LayoutId, Manifest, MatrixName, Part, Placement, Section, SourceFile,
    SourceTensor, Tier,
};
use super::{Digest, PackError, check, slice, wide};
use crate::bytes::{Cursor, OutOfBounds, align_up};
use crate::tensor::TensorInfo;

/// The first bytes of a pack. The first of them is no ASCII, so no text begins like this.
pub const MAGIC: [u8; 8] = *b"\x89ORKPACK";
/// How the existing ggml backend ends its own `.orkpack` files.
pub const FOREIGN_MAGIC: [u8; 7] = *b"ORKPK01";
/// The version of the format that is written and read here.
pub const VERSION: u32 = 1;
/// Feature bits that this version knows: none yet.
pub const FEATURES: u64 = 0;
/// Boundary of sections and of the parts in a chunk; unit of a chunk's length; length of the header.
pub const PAGE: u64 = 4096;
/// Most bytes of an index.
pub const INDEX_LIMIT: usize = 64 << 20;
/// Edge of a tile: 32 x 32 codes.
pub const TILE: u32 = 32;
/// Most inputs of one sub-matrix. Source: docs/npu.md, "Which shapes run".
pub const MAX_K: u32 = 4096;
/// Most outputs of one sub-matrix. Source: docs/npu.md, "Which shapes run".
pub const MAX_N: u32 = 8192;
/// Where in the header its digest is; it covers the bytes before.
pub const HEADER_DIGEST_OFFSET: usize = 4064;
/// Most bytes of the name of a file, as most file systems have it.
pub const MAX_NAME: usize = 255;
/// More stacked matrices than this share one digest: no model has so many experts.
const MAX_PARTS: u64 = 4096;

/// The first 4096 bytes, without magic, version and digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    /// Bit n: the pack cannot be read without feature n.
    pub features: u64,
    /// Bytes of the whole file.
    pub file_len: u64,
    /// Where the index is: directly behind the header.
    pub index_offset: u64,
    /// Bytes of the index.
    pub index_len: u64,
    /// Digest of the index.
    pub index_digest: Digest,
}

impl Header {
    /// The header of a pack of `file_len` bytes with this index.
    pub fn new(index: &[u8], file_len: u64) -> Header {
        Header {
            features: 0,
            file_len,
            index_offset: PAGE,
            index_len: wide(index.len()),
            index_digest: keyed(INDEX_CONTEXT, index),
        }
    }

    /// The header's 4096 bytes. The last 32 of them are its digest: the root of the pack.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        for number in [self.features, self.file_len, self.index_offset, self.index_len] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.index_digest.0);
        bytes.resize(HEADER_DIGEST_OFFSET, 0);
        let root = keyed(HEADER_CONTEXT, &bytes);
        bytes.extend(root.0);
        bytes
    }

    /// Reads and checks the header of `file`, all bytes of a pack; gives it with the root.
    ///
    /// # Errors
    ///
    /// [`PackError`]: no pack, another's container, another version, unknown features, damage, or a file that
    /// is shorter or longer than the header says.
    pub fn decode(file: &[u8]) -> Result<(Header, Digest), PackError> {
        let found = wide(file.len());
        recognise(file)?;
        let bytes = slice(file, 0, PAGE).ok_or(PackError::Truncated { found, expected: PAGE })?;
        let root = check_digest(bytes)?;
        let (header, version, reserved) = Header::fields(bytes)
            .map_err(|problem| PackError::Index { offset: 0, problem: problem.to_string() })?;
        header.check(version, reserved)?;
        match found.cmp(&header.file_len) {
            std::cmp::Ordering::Less => Err(PackError::Truncated { found, expected: header.file_len }),
            std::cmp::Ordering::Greater => Err(PackError::Trailing { found, expected: header.file_len }),
            std::cmp::Ordering::Equal => Ok((header, root)),
        }
    }

    /// The header, its version, and the first reserved byte that is not zero, if any.
    fn fields(bytes: &[u8]) -> Result<(Header, u32, Option<u8>), OutOfBounds> {
        let mut cursor = Cursor::new(bytes);
        cursor.take(wide(MAGIC.len()))?;
        let version = cursor.u32()?;
        let reserved = cursor.take(4)?;
        let header = Header {
            features: cursor.u64()?,
            file_len: cursor.u64()?,
            index_offset: cursor.u64()?,
            index_len: cursor.u64()?,
            index_digest: read_digest(&mut cursor)?,
        };
        let rest = wide(HEADER_DIGEST_OFFSET).saturating_sub(cursor.offset());
        let mut reserved = reserved.iter().chain(cursor.take(rest)?);
        Ok((header, version, reserved.find(|byte| **byte != 0).copied()))
    }

    fn check(&self, version: u32, reserved: Option<u8>) -> Result<(), PackError> {
        let unknown = self.features & !FEATURES;
        if version != VERSION {
            return Err(PackError::Version { found: version, expected: VERSION });
        }
        if unknown != 0 {
            return Err(PackError::Feature { bit: unknown.trailing_zeros() });
        }
        if let Some(byte) = reserved {
            return Err(PackError::value("header", "a reserved byte", byte, 0));
        }
        if self.index_offset != PAGE {
            return Err(PackError::value("header", "index offset", self.index_offset, PAGE));
        }
        if self.index_len > wide(INDEX_LIMIT) {
            let most = format!("at most {INDEX_LIMIT}");
            return Err(PackError::value("header", "index length", self.index_len, most));
        }
        Ok(())
    }
}

/// Refuses what does not begin like a pack, and says what it is where that can be told.
fn recognise(file: &[u8]) -> Result<(), PackError> {
    if file.is_empty() {
        return Err(PackError::Empty);
    }
    if file.starts_with(&MAGIC) {
        return Ok(());
    }
    // The foreign magic is the file's last 8 bytes, sometimes with up to 4 stray ones behind it.
    let tail = file.get(file.len().saturating_sub(12)..).unwrap_or_default();
    if tail.windows(FOREIGN_MAGIC.len()).any(|window| window == FOREIGN_MAGIC) {
        return Err(PackError::Foreign);
    }
    // Whoever has the digest of a header is one, whatever became of the magic.
    let damaged = slice(file, 0, PAGE).map(<[u8]>::to_vec).map(|mut header| {
        header.iter_mut().zip(MAGIC).for_each(|(byte, magic)| *byte = magic);
        check_digest(&header)
    });
    let head = file.get(..file.len().min(MAGIC.len())).unwrap_or_default();
    let show = |bytes: &[u8]| format!("`{}`", bytes.escape_ascii());
    if let Some(Ok(_)) = damaged {
        return Err(PackError::Magic { found: show(head), expected: show(&MAGIC) });
    }
    Err(PackError::NotAPack { found: show(head), expected: show(&MAGIC) })
}

/// The digest of a header, if it is right.
fn check_digest(header: &[u8]) -> Result<Digest, PackError> {
    let (before, stored) = header
        .split_at_checked(HEADER_DIGEST_OFFSET)
        .ok_or(PackError::Truncated { found: wide(header.len()), expected: PAGE })?;
    let (expected, found) = (stored.try_into().map(Digest), keyed(HEADER_CONTEXT, before));
    match expected {
        Ok(expected) if expected == found => Ok(found),
        expected => Err(PackError::HeaderDigest { found, expected: expected.unwrap_or(Digest::UNKNOWN) }),
    }
}

fn read_digest(cursor: &mut Cursor<'_>) -> Result<Digest, OutOfBounds> {
    let mut digest = [0; 32];
    for byte in &mut digest {
        *byte = cursor.u8()?;
    }
    Ok(Digest(digest))
}

/// All that goes into a pack, the tensors' and chunks' bytes excepted: these are pushed into the writer.
#[derive(Clone, Debug)]
pub struct Contents<'a> {
    /// What is converted, and how.
    pub manifest: Manifest,
    /// The model's GGUF files, in order of their shards.
    pub files: Vec<FileContents<'a>>,
    /// The model's tensors in order of the files and their directories, each with its place in the GGUF.
    pub tensors: &'a [TensorInfo],
    /// Leaves the tensors and what lies between them out; keeps the headers and the tensors' digests.
    pub thin: bool,
    /// The device profile, JSON.
    pub profile: &'a [u8],
    /// The routing statistics, JSON, if the plan rests on any.
    pub statistics: Option<&'a [u8]>,
    /// The plan, JSON.
    pub plan: &'a [u8],
    /// The chunks, in order of rank.
    pub chunks: Vec<ChunkContents>,
    /// The matrices in them, best first.
    pub matrices: Vec<MatrixContents>,
    /// How far down the ranking each regime goes.
    pub cuts: Vec<Cut>,
}

/// What a pack keeps of one GGUF file beside its tensors.
#[derive(Clone, Debug)]
pub struct FileContents<'a> {
    /// Its name, without a folder.
    pub name: String,
    /// Length of the file.
    pub len: u64,
    /// Its first bytes, up to the tensor data.
    pub header: &'a [u8],
    /// Its bytes that are neither header nor tensor; empty when all are zero.
    pub residue: Vec<u8>,
}

/// One device buffer to be.
#[derive(Clone, Copy, Debug)]
pub struct ChunkContents {
    /// Its bytes: up to the end of its last part, rounded up to whole pages.
    pub len: u64,
    /// When it is in device memory.
    pub tier: Tier,
    /// Which IOMMU domain it is for.
    pub domain: u32,
    /// Its turn in one pass through the model.
    pub order: u32,
}

/// One matrix to be in one or more chunks.
#[derive(Clone, Debug)]
pub struct MatrixContents {
    /// Which matrix.
    pub matrix: MatrixName,
    /// Inputs.
    pub n_in: u32,
    /// Outputs that get a copy: the first of the matrix.
    pub n_out: u32,
    /// The parts that cover it, each at its place: by `n0`, then by `k0`.
    pub parts: Vec<Part>,
}

/// The finished arrangement of a pack: its index, whose digests are not known yet, and its length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The index with every offset and length.
    pub index: Index,
    /// Bytes of the index.
    pub index_len: u64,
    /// Bytes of the whole pack.
    pub file_len: u64,
}

impl<'a> FileContents<'a> {
    /// What a pack keeps of file number `file` of a model, given its path, all its bytes and all tensors of the model.
    ///
    /// `None` when a tensor's place or the header leaves the file.
    pub fn new(
        path: &Path,
        bytes: &'a [u8],
        header_len: u64,
        tensors: &[TensorInfo],
        file: u32,
    ) -> Option<Self> {
        let here = tensors.iter().filter(|tensor| tensor.place.file == file);
        let places = here.map(|tensor| (tensor.place.offset, tensor.place.len));
        let mut residue = Vec::new();
        for gap in gaps(header_len, places, wide(bytes.len()))? {
            residue.extend_from_slice(slice(bytes, gap.start, gap.end.checked_sub(gap.start)?)?);
        }
        Some(Self::kept(&file_name(path), wide(bytes.len()), slice(bytes, 0, header_len)?, residue))
    }

    /// What a pack kept of a file, to be kept by another.
    pub(crate) fn kept(name: &str, len: u64, header: &'a [u8], mut residue: Vec<u8>) -> Self {
        if residue.iter().all(|byte| *byte == 0) {
            residue.clear();
        }
        FileContents { name: name.to_owned(), len, header, residue }
    }
}

/// The name of a file as a pack keeps it: text that every file system takes and no terminal obeys.
fn file_name(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = name.chars().map(|c| if c.is_control() { '_' } else { c });
    let ends = plain.scan(0usize, |len, c| {
        *len = len.saturating_add(c.len_utf8());
        (*len <= MAX_NAME).then_some(c)
    });
    let name: String = ends.collect();
    if is_file_name(&name) { name } else { "model.gguf".to_owned() }
}

/// Whether a file can be written under this name in any folder, and nowhere else.
pub(super) fn is_file_name(name: &str) -> bool {
    let is_plain = |c: char| !c.is_control() && c != '/';
    (1..=MAX_NAME).contains(&name.len()) && name != "." && name != ".." && name.chars().all(is_plain)
}

/// The ranges of a GGUF file that are neither its header nor a tensor, in order, empty ones left out.
///
/// `None` when header or tensors overlap or leave the file.
pub fn gaps(
    header_len: u64,
    tensors: impl Iterator<Item = (u64, u64)>,
    file_len: u64,
) -> Option<Vec<Range<u64>>> {
    let mut places: Vec<(u64, u64)> = tensors.filter(|(_, len)| *len > 0).collect();
    places.sort_unstable();
    places.push((file_len, 0));
    let mut gaps = Vec::new();
    let mut at = header_len;
    for (offset, len) in places {
        if offset < at {
            return None;
        }
        if offset > at {
            gaps.push(at..offset);
        }
        at = offset.checked_add(len)?;
    }
    Some(gaps)
}

impl Contents<'_> {
    /// Arranges the pack: offsets, lengths, the exact size. Nothing is written.
    ///
    /// # Errors
    ///
    /// [`PackError::Value`] for contents that a reader would refuse.
    pub fn layout(&self) -> Result<Layout, PackError> {
        let mut index = Index {
            manifest: self.manifest.clone(),
            files: Vec::new(),
            tensors: Vec::new(),
            sections: Vec::new(),
            chunks: Vec::new(),
            placements: Vec::new(),
            cuts: self.cuts.clone(),
        };
        self.lay_files(&mut index);
        self.lay_documents(&mut index);
        self.lay_tensors(&mut index);
        self.lay_chunks(&mut index);
        let index_len = wide(index.encode()?.len());
        let file_len = place(&mut index.sections, PAGE.saturating_add(index_len))?;
        check::index(&index, index_len, file_len)?;
        Ok(Layout { index, index_len, file_len })
    }

    fn lay_files(&self, index: &mut Index) {
        for (number, file) in self.files.iter().enumerate() {
            let name = format!("file {number}");
            let header = add(index, Kind::Header, &name, LayoutId::Plain, file.header.len());
            let keeps = !self.thin && !file.residue.is_empty();
            let residue =
                keeps.then(|| add(index, Kind::Residue, &name, LayoutId::Plain, file.residue.len()));
            index.files.push(SourceFile { name: file.name.clone(), len: file.len, header, residue });
        }
    }

    fn lay_documents(&self, index: &mut Index) {
        add(index, Kind::Profile, &self.manifest.device, LayoutId::Plain, self.profile.len());
        if let Some(statistics) = self.statistics {
            add(index, Kind::Statistics, "routing", LayoutId::Plain, statistics.len());
        }
        add(index, Kind::Plan, "plan", LayoutId::Plain, self.plan.len());
    }

    fn lay_tensors(&self, index: &mut Index) {
        for tensor in self.tensors {
            let n_parts = if (2..=MAX_PARTS).contains(&tensor.n_stack()) { tensor.n_stack() } else { 1 };
            let digests = vec![Digest::UNKNOWN; usize::try_from(n_parts).unwrap_or(1)];
            let section = (!self.thin).then(|| {
                push(
                    index,
                    Section {
                        kind: Kind::Tensor,
                        name: tensor.name.clone(),
                        layout: LayoutId::Rows,
                        offset: 0,
                        len: tensor.place.len,
                        digests: digests.clone(),
                    },
                )
            });
            index.tensors.push(SourceTensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype.gguf_id(),
                dims: tensor.dims.clone(),
                file: tensor.place.file,
                offset: tensor.place.offset,
                section,
                digests,
            });
        }
    }

    /// Parts lie where they are given. The scales of a chunk lie in the order in which matrices begin in it.
    fn lay_chunks(&self, index: &mut Index) {
        index.placements = self.matrices.iter().map(MatrixContents::placement).collect();
        let mut by_place: Vec<&mut Placement> = index.placements.iter_mut().collect();
        by_place.sort_by_key(|placement| placement.parts.first().map(|first| (first.chunk, first.offset)));
        let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
        for placement in by_place {
            // The check refuses one without parts.
            let Some(first) = placement.parts.first() else { continue };
            let end = ends.entry(first.chunk).or_default();
            placement.scales = *end;
            *end = end.saturating_add(placement.scales_len());
        }
        for (spec, number) in self.chunks.iter().zip(0u32..) {
            let name = number.to_string();
            let &ChunkContents { len, tier, domain, order } = spec;
            let scales = ends.get(&number).copied().unwrap_or(0);
            let tiles = Section { len, ..section(Kind::Chunk, &name, LayoutId::Tiles) };
            let scales = Section { len: scales, ..section(Kind::Scales, &name, LayoutId::F32) };
            let (section, scales) = (push(index, tiles), push(index, scales));
            index.chunks.push(Chunk { section, scales, tier, domain, order });
        }
    }
}

impl MatrixContents {
    /// Its entry in the index, the place of its scales excepted.
    fn placement(&self) -> Placement {
        let &MatrixContents { matrix, n_in, n_out, ref parts } = self;
        Placement { matrix, n_in, n_out, scales: 0, parts: parts.clone() }
    }
}

fn section(kind: Kind, name: &str, layout: LayoutId) -> Section {
    Section { kind, name: name.to_owned(), layout, offset: 0, len: 0, digests: vec![Digest::UNKNOWN] }
}

fn add(index: &mut Index, kind: Kind, name: &str, layout: LayoutId, len: usize) -> u32 {
    push(index, Section { len: wide(len), ..section(kind, name, layout) })
}

fn push(index: &mut Index, section: Section) -> u32 {
    let number = u32::try_from(index.sections.len()).unwrap_or(u32::MAX);
    index.sections.push(section);
    number
}

/// Sets the sections' offsets, each on the first page boundary after what comes before; gives the end.
fn place(sections: &mut [Section], index_end: u64) -> Result<u64, PackError> {
    let mut end = index_end;
    for section in sections {
        let range = align_up(end, PAGE).and_then(|start| Some((start, start.checked_add(section.len)?)));
        (section.offset, end) = range
            .ok_or_else(|| PackError::value(section.label(), "end", "past 2^64", "a place in a file"))?;
    }
    Ok(end)
}

/// The equal parts of a section's bytes; `None` when there are none or they would not be equal.
pub(super) fn section_parts<'b>(
    section: &Section,
    bytes: &'b [u8],
) -> Option<impl Iterator<Item = &'b [u8]>> {
    parts(bytes, section.digests.len())
}
