//! Checks every byte of an open pack, and goes on past what is wrong until all of it is listed.
//!
//! Digests say that the bytes are those that were written. The NPU area is also read for sense, by an index
//! walk of its own: codes that the contract forbids, tiles that do not fade to zero, scales that cannot be.
//! What a passing check proves, and what it does not, is told in `docs/verify.md`.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::collections::BTreeMap;
use std::fmt;
use std::slice::ChunksExact;

use rayon::prelude::*;

use super::layout::TILE;
use super::manifest::{Kind, Part, Placement, Section, SubMatrix};
use super::{Digest, Pack, PackError, digest, slice, wide};

/// How much is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every byte.
    Full,
    /// Header, index, chunks and scales: what a device will be given.
    Npu,
    /// Header and index, which opening has checked.
    Quick,
}

/// What a check found. Data only: printing is the report's.
#[derive(Debug)]
pub struct Report {
    /// The digest that names the whole content.
    pub root: Digest,
    /// How much was read.
    pub mode: Mode,
    /// Bytes of the file.
    pub file_len: u64,
    /// Every section, in order of the file.
    pub sections: Vec<SectionReport>,
    /// What is wrong between the sections.
    pub padding: Vec<Finding>,
}

/// One section of a checked pack.
#[derive(Debug)]
pub struct SectionReport {
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Digests it has: one per expert of a stacked tensor, else one.
    pub n_parts: usize,
    /// Whether its bytes were read.
    pub checked: bool,
    /// What is wrong with it.
    pub findings: Vec<Finding>,
}

/// One thing that is wrong. Offsets are in the file.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finding {
    /// A section, or one expert in it, is not what was written.
    Digest(PackError),
    /// A byte that must be zero and is not: behind the index, a section, or a part in a chunk.
    Padding {
        /// What it lies behind.
        behind: String,
        /// Where the byte is.
        offset: u64,
    },
    /// Code −128, which the contract forbids.
    Code {
        /// The matrix.
        matrix: String,
        /// Input of the matrix.
        k: u64,
        /// Output of the matrix.
        n: u64,
        /// Where the byte is.
        offset: u64,
    },
    /// A code outside the matrix, in its padding, that is not zero.
    TilePadding {
        /// The matrix.
        matrix: String,
        /// Input, counted on from the first of the part.
        k: u64,
        /// Output, counted on from the first of the part.
        n: u64,
        /// Where the byte is.
        offset: u64,
    },
    /// A scale that is negative or not finite, or 0 although its row has codes.
    Scale {
        /// The matrix.
        matrix: String,
        /// The output row.
        row: u64,
        /// The scale.
        found: f32,
    },
}

impl Report {
    /// Whether all that was read is right.
    pub fn is_ok(&self) -> bool {
        self.findings().next().is_none()
    }

    /// Everything that is wrong, in order of the file's sections, padding last.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|section| &section.findings).chain(&self.padding)
    }

    /// Sections whose bytes were read.
    pub fn n_checked(&self) -> usize {
        self.sections.iter().filter(|section| section.checked).count()
    }

    /// Sections with something wrong.
    pub fn n_bad(&self) -> usize {
        self.sections.iter().filter(|section| !section.findings.is_empty()).count()
    }

    /// Bytes of the sections that were read.
    pub fn bytes_checked(&self) -> u64 {
        let checked = self.sections.iter().filter(|section| section.checked);
        checked.fold(0, |sum, section| sum.saturating_add(section.len))
    }
}

/// Checks `pack`. `progress` hears the bytes of every section part as it is done, from any thread.
pub fn verify(pack: &Pack, mode: Mode, progress: &(dyn Fn(u64) + Sync)) -> Report {
    let inside = contents(pack);
    let sections = pack.sections().par_iter().enumerate().map(|(number, section)| {
        let npu = matches!(section.kind, Kind::Chunk | Kind::Scales);
        let checked = mode == Mode::Full || (mode == Mode::Npu && npu);
        let content = u32::try_from(number).ok().and_then(|number| inside.get(&number));
        SectionReport {
            kind: section.kind,
            name: section.name.clone(),
            offset: section.offset,
            len: section.len,
            n_parts: section.digests.len(),
            checked,
            findings: if checked {
                check_section(pack, section, content.unwrap_or(&Content::default()), progress)
            } else {
                Vec::new()
            },
        }
    });
    let sections = sections.collect();
    let padding = if mode == Mode::Full { check_padding(pack) } else { Vec::new() };
    Report { root: pack.root(), mode, file_len: wide(pack.file().len()), sections, padding }
}

/// What a section of the NPU area holds.
#[derive(Default)]
struct Content<'a> {
    /// In a chunk.
    parts: Vec<(&'a Placement, &'a Part)>,
    /// In scales.
    matrices: Vec<&'a Placement>,
}

/// The content of chunks and scales, by number of section.
fn contents(pack: &Pack) -> BTreeMap<u32, Content<'_>> {
    let mut inside: BTreeMap<u32, Content<'_>> = BTreeMap::new();
    for placement in pack.placements() {
        for (part, i) in placement.parts.iter().zip(0..) {
            let Some(chunk) = super::entry(pack.chunks(), part.chunk) else { continue };
            inside.entry(chunk.section).or_default().parts.push((placement, part));
            if i == 0 {
                inside.entry(chunk.scales).or_default().matrices.push(placement);
            }
        }
    }
    inside.values_mut().for_each(|content| content.parts.sort_by_key(|(_, part)| part.offset));
    inside
}

/// The digests of all parts of a section, and the sense of what it holds for the NPU.
fn check_section(
    pack: &Pack,
    section: &Section,
    content: &Content<'_>,
    progress: &(dyn Fn(u64) + Sync),
) -> Vec<Finding> {
    if section.kind == Kind::Chunk {
        return check_chunk(pack, section, &content.parts, progress);
    }
    let parts = (0..section.digests.len()).into_par_iter().filter_map(|part| {
        let found = pack.check_part(section, part).err();
        progress(section.part_len());
        found.map(Finding::Digest)
    });
    let mut findings: Vec<Finding> = parts.collect();
    if section.kind == Kind::Scales {
        findings.extend(content.matrices.iter().filter_map(|placement| check_scales(pack, placement)));
    }
    findings
}

/// The digest of a chunk and the sense of its tiles, a piece after the other: read for sense while it is still in the
/// cache that hashing brought it to. Then what lies between its parts, which are sorted.
fn check_chunk(
    pack: &Pack,
    section: &Section,
    parts: &[(&Placement, &Part)],
    progress: &(dyn Fn(u64) + Sync),
) -> Vec<Finding> {
    let mut walks = parts.iter().map(|(placement, part)| Walk::new(pack, section, placement, part));
    let mut walk = walks.next();
    let (mut hasher, mut walked) = (digest::hasher(), Vec::new());
    let mut end = section.offset;
    for piece in pack.bytes(section).chunks(PIECE) {
        digest::update(&mut hasher, piece);
        end = end.saturating_add(wide(piece.len()));
        while let Some(part) = &mut walk
            && part.up_to(end)
        {
            walked.extend(part.findings());
            walk = walks.next();
        }
        progress(wide(piece.len()));
    }
    let wrong = pack.compare(section, 0, digest::finish(&hasher)).err().map(Finding::Digest);
    wrong.into_iter().chain(walked).chain(check_gaps(pack, section, parts)).collect()
}

/// The first byte of `range` that is not zero.
fn not_zero(bytes: &[u8], start: u64, end: u64) -> Option<u64> {
    let range = slice(bytes, start, end.checked_sub(start)?)?;
    if !any_bit(range) {
        return None;
    }
    let at = range.iter().position(|byte| *byte != 0)?;
    start.checked_add(wide(at))
}

/// Zero between index and sections. Behind the last section there is nothing: the file's length says so.
fn check_padding(pack: &Pack) -> Vec<Finding> {
    let header = pack.header();
    let mut end = header.index_offset.saturating_add(header.index_len);
    let mut behind = "index".to_owned();
    let mut findings = Vec::new();
    for section in pack.sections() {
        if let Some(offset) = not_zero(pack.file(), end, section.offset) {
            findings.push(Finding::Padding { behind, offset });
        }
        (end, behind) = (section.end(), section.label());
    }
    findings
}

/// Zero between the parts of a chunk, which are sorted, and behind the last.
fn check_gaps(pack: &Pack, section: &Section, parts: &[(&Placement, &Part)]) -> Vec<Finding> {
    let tiles = pack.bytes(section);
    let ends = parts.iter().map(|(_, part)| part.end());
    let starts = parts.iter().skip(1).map(|(_, part)| part.offset).chain([section.len]);
    let dirty = ends.zip(starts).filter_map(|(end, start)| not_zero(tiles, end, start));
    let finding = |at| Finding::Padding {
        behind: format!("a part of {}", section.label()),
        offset: section.offset.saturating_add(at),
    };
    dirty.map(finding).collect()
}

/// The first scale of a matrix that cannot be.
fn check_scales(pack: &Pack, placement: &Placement) -> Option<Finding> {
    let (found, row) =
        pack.scales(placement).zip(0u64..).find(|(s, _)| !s.is_finite() || s.is_sign_negative())?;
    Some(Finding::Scale { matrix: placement.matrix.to_string(), row, found })
}

/// The first of each kind in a part.
#[derive(Default)]
struct Wrong {
    code: Option<At>,
    padding: Option<At>,
    scale: Option<u64>,
}

/// A code: its input and output in the matrix, its byte in the file.
#[derive(Clone, Copy)]
struct At {
    k: u64,
    n: u64,
    offset: u64,
}

/// Bytes of a chunk that are hashed, then read for sense: the second cache of a core holds them.
const PIECE: usize = 256 << 10;
/// A run of 32 codes: one output, 32 consecutive inputs.
const RUN: usize = 32;
/// A tile of 32 runs.
const TILE_BYTES: usize = 1024;

/// Reads the tiles of one part in the order they lie in: 32 outputs, 32 inputs, output, input.
struct Walk<'a> {
    placement: &'a Placement,
    sub: &'a SubMatrix,
    /// Those of its outputs.
    scales: Vec<f32>,
    /// What is left of the tiles, and where in the file it begins.
    tiles: ChunksExact<'a, u8>,
    offset: u64,
    /// The first input and output of the next tile, counted in the part.
    k: u32,
    n: u32,
    /// Whether the rows of the next tile lie inside the matrix and none of them has scale 0.
    plain_rows: bool,
    wrong: Wrong,
}

impl<'a> Walk<'a> {
    fn new(pack: &'a Pack, section: &Section, placement: &'a Placement, part: &'a Part) -> Walk<'a> {
        let sub = &part.sub;
        let rows = index(sub.n0)..index(sub.n0.saturating_add(sub.n_len));
        let scales = pack.stored_scales(placement).get(rows).unwrap_or_default();
        let mut walk = Walk {
            placement,
            sub,
            scales: scales.iter().map(|le| f32::from_le_bytes(*le)).collect(),
            tiles: pack.part_bytes(part).chunks_exact(TILE_BYTES),
            offset: section.offset.saturating_add(part.offset),
            k: 0,
            n: 0,
            plain_rows: false,
            wrong: Wrong::default(),
        };
        walk.plain_rows = walk.has_plain_rows();
        walk
    }

    /// Goes on up to the first tile that begins at `end` of the file or behind it, and says whether there is none.
    fn up_to(&mut self, end: u64) -> bool {
        while self.offset < end
            && let Some(tile) = self.tiles.next()
        {
            // Almost all tiles are whole and have scales: they are only searched for the forbidden code.
            let plain = self.plain_rows && self.k.saturating_add(TILE) <= self.sub.k_len;
            if !plain || memchr::memchr(0x80, tile).is_some() {
                self.tile(tile);
            }
            self.offset = self.offset.saturating_add(wide(TILE_BYTES));
            self.k = self.k.saturating_add(TILE);
            if self.k >= self.sub.k_padded {
                (self.k, self.n) = (0, self.n.saturating_add(TILE));
                self.plain_rows = self.has_plain_rows();
            }
        }
        self.tiles.len() == 0
    }

    fn has_plain_rows(&self) -> bool {
        let end = self.n.saturating_add(TILE);
        let scales = self.scales.get(index(self.n)..index(end));
        end <= self.sub.n_len && scales.is_some_and(|scales| scales.iter().all(|scale| *scale != 0.0))
    }

    /// The first forbidden code, the first code in the padding and the first row of scale 0 with codes.
    fn findings(&self) -> impl Iterator<Item = Finding> {
        let Wrong { code, padding, scale } = &self.wrong;
        let matrix = || self.placement.matrix.to_string();
        let code = code.map(|At { k, n, offset }| Finding::Code { matrix: matrix(), k, n, offset });
        let padding =
            padding.map(|At { k, n, offset }| Finding::TilePadding { matrix: matrix(), k, n, offset });
        let scale = scale.map(|row| Finding::Scale { matrix: matrix(), row, found: 0.0 });
        code.into_iter().chain(padding).chain(scale)
    }

    /// Every code of the next tile.
    fn tile(&mut self, tile: &[u8]) {
        let Walk { sub, scales, offset, k: k0, n: n0, wrong, .. } = self;
        let runs = tile.chunks_exact(RUN).zip(*n0..).zip((*offset..).step_by(RUN));
        // Zeros are right everywhere.
        for ((run, n), offset) in runs.filter(|((run, _), _)| any_bit(run)) {
            for ((byte, k), offset) in
                run.iter().zip(*k0..).zip(offset..).filter(|((byte, _), _)| **byte != 0)
            {
                let (row, column) = (u64::from(sub.n0), u64::from(sub.k0));
                let at = At { k: column.saturating_add(k.into()), n: row.saturating_add(n.into()), offset };
                if *byte == 0x80 {
                    wrong.code.get_or_insert(at);
                }
                if k >= sub.k_len || n >= sub.n_len {
                    wrong.padding.get_or_insert(at);
                } else if scales.get(index(n)) == Some(&0.0) {
                    wrong.scale.get_or_insert(at.n);
                }
            }
        }
    }
}

/// Whether any byte is not zero, without a branch per byte.
fn any_bit(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |any, byte| any | byte) != 0
}

fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Digest(error) => error.fmt(f),
            Finding::Padding { behind, offset } => {
                write!(f, "padding behind {behind}: byte {offset} is not zero")
            }
            Finding::Code { matrix, k, n, offset } => {
                write!(
                    f,
                    "{matrix}: code at row {n}, column {k} (byte {offset}) is -128, expected -127 to 127"
                )
            }
            Finding::TilePadding { matrix, k, n, offset } => {
                write!(f, "{matrix}: padding at row {n}, column {k} (byte {offset}) is not zero")
            }
            Finding::Scale { matrix, row, found } if *found == 0.0 => {
                write!(f, "{matrix}: scale of row {row} is 0, but the row has codes that are not")
            }
            Finding::Scale { matrix, row, found } => {
                write!(f, "{matrix}: scale of row {row} is {found}, expected a finite number from 0")
            }
        }
    }
}
