//! Opens a pack: header, index digest, index, its values. After that every range it names lies in the file.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::collections::BTreeMap;
use std::path::Path;

use super::digest::{INDEX_CONTEXT, digest, keyed};
use super::layout::{Header, section_parts};
use super::manifest::{
    Chunk, Cut, Index, Kind, Manifest, MatrixName, Part, Placement, Section, SourceFile, SourceTensor,
};
use super::{Digest, PackError, check, entry, slice};
use crate::bytes::{FileBytes, Io};
use crate::units::LayerId;

/// An open pack. Header and index are checked; the content of a section is when it is asked for
/// ([`Pack::check_section`]).
#[derive(Debug)]
pub struct Pack {
    bytes: FileBytes,
    root: Digest,
    header: Header,
    index: Index,
    by_name: BTreeMap<String, u32>,
}

impl Pack {
    /// Opens the pack at `path`. Reads header and index only.
    ///
    /// # Errors
    ///
    /// [`PackError`] when it cannot be read or is no sound pack.
    pub fn open(path: &Path, io: Io) -> Result<Pack, PackError> {
        let failed = |source| PackError::Io { what: "read", path: path.to_owned(), source };
        Pack::new(FileBytes::open(path, io).map_err(failed)?)
    }

    /// A pack in memory, under a name for messages.
    ///
    /// # Errors
    ///
    /// As [`Pack::open`].
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Pack, PackError> {
        Pack::new(FileBytes::from_vec(name, bytes))
    }

    fn new(bytes: FileBytes) -> Result<Pack, PackError> {
        let (header, root) = Header::decode(&bytes)?;
        let Header { index_offset, index_len, index_digest: expected, .. } = header;
        let encoded = slice(&bytes, index_offset, index_len).ok_or_else(|| {
            let room = header.file_len.saturating_sub(index_offset);
            PackError::value(
                "header",
                "index length",
                index_len,
                format!("at most {room}, to the file's end"),
            )
        })?;
        let found = keyed(INDEX_CONTEXT, encoded);
        if found != expected {
            return Err(PackError::IndexDigest { offset: index_offset, found, expected });
        }
        let index = Index::decode(encoded)?;
        check::index(&index, index_len, header.file_len)?;
        let by_name = (0u32..).zip(&index.tensors).map(|(number, tensor)| (tensor.name.clone(), number));
        Ok(Pack { root, header, by_name: by_name.collect(), index, bytes })
    }

    /// The digest that names the whole content.
    pub fn root(&self) -> Digest {
        self.root
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// What was converted, and how.
    pub fn manifest(&self) -> &Manifest {
        &self.index.manifest
    }

    /// All bytes of the file, with its path.
    pub fn file(&self) -> &FileBytes {
        &self.bytes
    }

    /// Whether it holds the model's tensors (else it is thin and needs the GGUF).
    pub fn is_fat(&self) -> bool {
        self.index.tensors.iter().any(|tensor| tensor.section.is_some())
    }

    /// The sections, in order of the file.
    pub fn sections(&self) -> &[Section] {
        &self.index.sections
    }

    /// The section with this number.
    pub fn section(&self, number: u32) -> Option<&Section> {
        entry(&self.index.sections, number)
    }

    /// The bytes of a section of this pack, unchecked.
    pub fn bytes(&self, section: &Section) -> &[u8] {
        // A section of this pack was checked to be inside; another pack's yields nothing at worst.
        slice(&self.bytes, section.offset, section.len).unwrap_or_default()
    }

    fn numbered(&self, number: u32) -> &[u8] {
        self.section(number).map(|section| self.bytes(section)).unwrap_or_default()
    }

    fn document(&self, kind: Kind) -> Option<&Section> {
        self.index.sections.iter().find(|section| section.kind == kind)
    }

    /// The device profile, JSON.
    pub fn profile(&self) -> &[u8] {
        self.document(Kind::Profile).map(|section| self.bytes(section)).unwrap_or_default()
    }

    /// The plan, JSON.
    pub fn plan(&self) -> &[u8] {
        self.document(Kind::Plan).map(|section| self.bytes(section)).unwrap_or_default()
    }

    /// The routing statistics, JSON, if the plan rested on any.
    pub fn statistics(&self) -> Option<&[u8]> {
        self.document(Kind::Statistics).map(|section| self.bytes(section))
    }

    /// The digest of the profile, plan or statistics, as [`digest`] gives it for the document.
    pub fn document_digest(&self, kind: Kind) -> Option<Digest> {
        self.document(kind)?.digests.first().copied()
    }

    /// The model's GGUF files.
    pub fn files(&self) -> &[SourceFile] {
        &self.index.files
    }

    /// The first bytes of a GGUF file of the model, up to its tensor data.
    pub fn gguf_header(&self, file: u32) -> Option<&[u8]> {
        entry(&self.index.files, file).map(|file| self.numbered(file.header))
    }

    /// The bytes of a GGUF file that are neither header nor tensor, unless all are zero.
    pub fn residue(&self, file: u32) -> Option<&[u8]> {
        entry(&self.index.files, file)?.residue.map(|section| self.numbered(section))
    }

    /// The model's tensors, in order of the files and their directories.
    pub fn tensors(&self) -> &[SourceTensor] {
        &self.index.tensors
    }

    /// The number of the tensor with this name.
    pub fn tensor_number(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        entry(&self.index.tensors, self.tensor_number(name)?)
    }

    /// The bytes of a tensor; `None` in a thin pack.
    pub fn tensor_bytes(&self, tensor: &SourceTensor) -> Option<&[u8]> {
        tensor.section.map(|section| self.numbered(section))
    }

    /// The NPU's chunks, in order of rank.
    pub fn chunks(&self) -> &[Chunk] {
        &self.index.chunks
    }

    /// The tiles of a chunk: what its device buffer will hold, whole pages.
    pub fn chunk_bytes(&self, chunk: &Chunk) -> &[u8] {
        self.numbered(chunk.section)
    }

    /// The matrices with a copy for the NPU, best first.
    pub fn placements(&self) -> &[Placement] {
        &self.index.placements
    }

    /// The tiles of one part of a matrix.
    pub fn part_bytes(&self, part: &Part) -> &[u8] {
        let chunk = entry(&self.index.chunks, part.chunk);
        let bytes = chunk.map(|chunk| self.numbered(chunk.section)).unwrap_or_default();
        slice(bytes, part.offset, part.sub.len()).unwrap_or_default()
    }

    /// The scales of a matrix, one per output that has a copy.
    pub fn scales(&self, placement: &Placement) -> impl ExactSizeIterator<Item = f32> + '_ {
        self.stored_scales(placement).iter().map(|le| f32::from_le_bytes(*le))
    }

    /// The same as they are stored.
    pub(super) fn stored_scales(&self, placement: &Placement) -> &[[u8; 4]] {
        let chunk = placement.parts.first().and_then(|first| entry(&self.index.chunks, first.chunk));
        let bytes = chunk.map(|chunk| self.numbered(chunk.scales)).unwrap_or_default();
        slice(bytes, placement.scales, placement.scales_len()).unwrap_or_default().as_chunks().0
    }

    /// All cuts, by ascending first batch.
    pub fn cuts(&self) -> &[Cut] {
        &self.index.cuts
    }

    /// The cut for a batch of this many tokens; none: nothing goes to the NPU.
    pub fn cut(&self, tokens: u32) -> Option<&Cut> {
        self.index.cuts.iter().rev().find(|cut| cut.from_tokens <= tokens)
    }

    /// The expert matrices of a layer that a cut keeps on the NPU, best first.
    pub fn hot<'a>(&'a self, cut: &Cut, layer: LayerId) -> impl Iterator<Item = &'a Placement> {
        let depth = entry(&cut.experts, layer.0).copied().unwrap_or(0);
        let ranked = self.index.placements.iter().filter(move |p| p.matrix.layer() == Some(layer));
        ranked.take(usize::try_from(depth).unwrap_or(usize::MAX))
    }

    /// The plain matrices that a cut keeps on the NPU, best first.
    pub fn hot_dense<'a>(&'a self, cut: &Cut) -> impl Iterator<Item = &'a Placement> {
        let depth = usize::try_from(cut.dense).unwrap_or(usize::MAX);
        let dense = |p: &&Placement| matches!(p.matrix, MatrixName::Dense { .. });
        self.index.placements.iter().filter(dense).take(depth)
    }

    /// Checks the content of one section against its digests.
    ///
    /// # Errors
    ///
    /// [`PackError::SectionDigest`] for the first part that differs; [`PackError::Value`] when there is no
    /// section of this number.
    pub fn check_section(&self, number: u32) -> Result<(), PackError> {
        let section = self
            .section(number)
            .ok_or_else(|| PackError::value("index", "section", number, "a section of the pack"))?;
        (0..section.digests.len()).try_for_each(|part| self.check_part(section, part))
    }

    /// Checks one part of a section: one expert of a stacked tensor, without reading the others.
    ///
    /// # Errors
    ///
    /// [`PackError::SectionDigest`] when it differs; [`PackError::Value`] when there is no such part.
    pub fn check_part(&self, section: &Section, part: usize) -> Result<(), PackError> {
        let bytes = section_parts(section, self.bytes(section)).and_then(|mut parts| parts.nth(part));
        let missing = || PackError::value(section.label(), "part", part, "a part of the section");
        let bytes = bytes.ok_or_else(missing)?;
        self.compare(section, part, digest(bytes))
    }

    /// Holds the digest that a part of a section has to the one that is written in the index.
    pub(super) fn compare(&self, section: &Section, part: usize, found: Digest) -> Result<(), PackError> {
        let missing = || PackError::value(section.label(), "part", part, "a part of the section");
        let expected = *section.digests.get(part).ok_or_else(missing)?;
        if found == expected {
            return Ok(());
        }
        let before = section.part_len().saturating_mul(super::wide(part));
        Err(PackError::SectionDigest {
            section: section.label(),
            part: section.part_number(part),
            offset: section.offset.saturating_add(before),
            found,
            expected,
        })
    }
}
