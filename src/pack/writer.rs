//! Writes a pack front to back, hashing on the way; index and header go in last, the name after them.
//!
//! [`Writer::create`] writes what is small itself (headers, documents). The caller then pushes the bytes of
//! every tensor, in the order announced, and of every chunk with its scales. Anything else than what was
//! announced is refused, so the layout computed before is the file that results.

use std::fmt;
use std::io::{self, Cursor, Seek, SeekFrom, Write};
use std::path::Path;

use super::digest;
use super::layout::{Header, Layout, PAGE, section_parts};
use super::manifest::{Index, Kind, Section};
use super::partial::{Existing, Partial};
use super::{Contents, Digest, PackError, digest_parts, wide};

/// Bytes that are hashed and written at one time, side by side.
const PIECE: usize = 4 << 20;
/// Below this, a second thread does not pay.
const WORTH_THREADS: usize = 256 << 10;

/// Where a pack is written: a file, or memory.
pub trait Sink: Write + Seek + Send {
    /// What is left in the caller's hands at the end.
    type Done;

    /// Makes sure of room for `len` bytes, all zero.
    ///
    /// # Errors
    ///
    /// [`PackError::NoSpace`] when there is none.
    fn reserve(&mut self, len: u64) -> Result<(), PackError>;

    /// The error for a failed write to a pack of `len` bytes.
    fn explain(&self, error: io::Error, len: u64) -> PackError;

    /// Makes the pack durable and visible.
    ///
    /// # Errors
    ///
    /// [`PackError`] when the system refuses; nothing bears the final name then.
    fn commit(self) -> Result<Self::Done, PackError>;
}

/// For tests, and for packs that are never stored.
impl Sink for Cursor<Vec<u8>> {
    type Done = Vec<u8>;

    fn reserve(&mut self, len: u64) -> Result<(), PackError> {
        let len = usize::try_from(len).map_err(|e| self.explain(io::Error::other(e), len))?;
        self.get_mut().resize(len, 0);
        Ok(())
    }

    fn explain(&self, error: io::Error, _len: u64) -> PackError {
        PackError::Io { what: "write to", path: "memory".into(), source: error }
    }

    fn commit(self) -> Result<Vec<u8>, PackError> {
        Ok(self.into_inner())
    }
}

/// A pack being written. Dropped before [`Writer::finish`], it leaves nothing behind.
pub struct Writer<S: Sink = Partial> {
    sink: S,
    layout: Layout,
    next_tensor: usize,
    next_chunk: usize,
}

/// A pack that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished<D = ()> {
    /// The digest that names its whole content.
    pub root: Digest,
    /// Its length.
    pub file_len: u64,
    /// What the sink left: the bytes, when it was memory.
    pub done: D,
}

impl Writer {
    /// Begins a pack at `output`: takes the lock and all the space, writes headers and documents.
    ///
    /// # Errors
    ///
    /// As [`Partial::create`]; [`PackError::Value`] for contents that no reader would accept;
    /// [`PackError::NoSpace`] with nothing left behind.
    pub fn create(output: &Path, contents: &Contents<'_>, existing: Existing) -> Result<Writer, PackError> {
        let layout = contents.layout()?;
        Writer::begin(Partial::create(output, existing)?, layout, contents)
    }

    /// Begins a pack in a partial file that is locked already.
    ///
    /// # Errors
    ///
    /// [`PackError::Value`] and [`PackError::NoSpace`] as [`Writer::create`].
    pub fn over(partial: Partial, contents: &Contents<'_>) -> Result<Writer, PackError> {
        Writer::begin(partial, contents.layout()?, contents)
    }
}

impl Writer<Cursor<Vec<u8>>> {
    /// Begins a pack in memory.
    ///
    /// # Errors
    ///
    /// [`PackError::Value`] for contents that no reader would accept.
    pub fn in_memory(contents: &Contents<'_>) -> Result<Self, PackError> {
        Writer::begin(Cursor::new(Vec::new()), contents.layout()?, contents)
    }
}

impl<S: Sink> Writer<S> {
    fn begin(mut sink: S, layout: Layout, contents: &Contents<'_>) -> Result<Self, PackError> {
        sink.reserve(layout.file_len)?;
        let mut writer = Writer { sink, layout, next_tensor: 0, next_chunk: 0 };
        let files: Vec<(u32, Option<u32>)> =
            writer.layout.index.files.iter().map(|file| (file.header, file.residue)).collect();
        for ((header, residue), file) in files.into_iter().zip(&contents.files) {
            writer.store(header, file.header)?;
            residue.map(|section| writer.store(section, &file.residue)).transpose()?;
        }
        for (number, kind) in writer.kinds() {
            match kind {
                Kind::Profile => writer.store(number, contents.profile)?,
                Kind::Statistics => writer.store(number, contents.statistics.unwrap_or_default())?,
                Kind::Plan => writer.store(number, contents.plan)?,
                _ => {}
            }
        }
        Ok(writer)
    }

    fn kinds(&self) -> Vec<(u32, Kind)> {
        (0u32..).zip(&self.layout.index.sections).map(|(number, section)| (number, section.kind)).collect()
    }

    /// Where everything will be, and the exact length.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Adds the bytes of the next tensor, as they are in the source. A thin pack keeps only their digests.
    ///
    /// # Errors
    ///
    /// [`PackError::Pushed`] when no tensor or another length is due; [`PackError::Io`] and
    /// [`PackError::NoSpace`] when they cannot be written.
    pub fn push_tensor(&mut self, bytes: &[u8]) -> Result<(), PackError> {
        let no_more = || PackError::Pushed {
            section: "a tensor more".to_owned(),
            found: wide(bytes.len()),
            expected: 0,
        };
        let tensor = self.layout.index.tensors.get(self.next_tensor).ok_or_else(no_more)?;
        let (found, expected) = (wide(bytes.len()), tensor.source_len().unwrap_or(0));
        let pushed = || PackError::Pushed { section: tensor.label(), found, expected };
        if found != expected {
            return Err(pushed());
        }
        let digests = match tensor.section {
            Some(section) => {
                self.store(section, bytes)?;
                self.section(section)?.digests.clone()
            }
            None => digest_parts(bytes, tensor.digests.len()).ok_or_else(pushed)?,
        };
        if let Some(tensor) = self.layout.index.tensors.get_mut(self.next_tensor) {
            tensor.digests = digests;
        }
        self.next_tensor += 1;
        Ok(())
    }

    /// Adds the next chunk: its tiles, and the f32 scales of the matrices whose first part lies in it, in the order
    /// of these parts' offsets.
    ///
    /// # Errors
    ///
    /// As [`Writer::push_tensor`].
    pub fn push_chunk(&mut self, tiles: &[u8], scales: &[f32]) -> Result<(), PackError> {
        let chunk = *self.layout.index.chunks.get(self.next_chunk).ok_or_else(|| too_much("chunk", tiles))?;
        self.store(chunk.section, tiles)?;
        let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.store(chunk.scales, &scales)?;
        self.next_chunk += 1;
        Ok(())
    }

    /// Ends the pack: index, header, flush, name.
    ///
    /// # Errors
    ///
    /// [`PackError::Pushed`] when something announced was not pushed; else as [`Writer::push_tensor`].
    pub fn finish(mut self) -> Result<Finished<S::Done>, PackError> {
        let Index { tensors, chunks, .. } = &self.layout.index;
        for (what, pushed, announced) in
            [("tensors", self.next_tensor, tensors.len()), ("chunks", self.next_chunk, chunks.len())]
        {
            if pushed != announced {
                let section = format!("number of {what}");
                return Err(PackError::Pushed { section, found: wide(pushed), expected: wide(announced) });
            }
        }
        let index = self.layout.index.encode()?;
        let header = Header::new(&index, self.layout.file_len).encode();
        let (_, root) = header.split_at(super::layout::HEADER_DIGEST_OFFSET);
        let root = Digest(root.try_into().unwrap_or_default());
        self.write_at(PAGE, &index)?;
        self.write_at(0, &header)?;
        let file_len = self.layout.file_len;
        Ok(Finished { root, file_len, done: self.sink.commit()? })
    }

    /// Writes a section whole and keeps the digests of its parts.
    fn store(&mut self, number: u32, bytes: &[u8]) -> Result<(), PackError> {
        let section = self.section(number)?.clone();
        let wrong = || PackError::Pushed {
            section: section.label(),
            found: wide(bytes.len()),
            expected: section.len,
        };
        if wide(bytes.len()) != section.len {
            return Err(wrong());
        }
        self.seek(section.offset)?;
        let parts = section_parts(&section, bytes).ok_or_else(wrong)?;
        let digests: Result<Vec<Digest>, PackError> = parts.map(|part| self.write_hashed(part)).collect();
        self.section(number)?.digests = digests?;
        Ok(())
    }

    pub(super) fn sink(&self) -> &S {
        &self.sink
    }

    /// Whether a section of another pack is the next tensor, in as many parts.
    pub(super) fn is_next(&self, other: &Section) -> bool {
        self.layout.index.tensors.get(self.next_tensor).is_some_and(|tensor| {
            let same = (Some(other.len), other.digests.len()) == (tensor.source_len(), tensor.digests.len());
            same && other.name == tensor.name
        })
    }

    /// Where the next tensor goes; `None` in a thin pack.
    pub(super) fn next_section(&self) -> Option<&Section> {
        let tensor = self.layout.index.tensors.get(self.next_tensor)?;
        self.layout.index.sections.get(tensor.section? as usize)
    }

    /// Takes the next tensor as written, with these digests.
    pub(super) fn skip_tensor(&mut self, digests: Vec<Digest>) -> Result<(), PackError> {
        let section = self.layout.index.tensors.get(self.next_tensor).and_then(|tensor| tensor.section);
        if let Some(number) = section {
            self.section(number)?.digests.clone_from(&digests);
        }
        if let Some(tensor) = self.layout.index.tensors.get_mut(self.next_tensor) {
            tensor.digests = digests;
        }
        self.next_tensor += 1;
        Ok(())
    }

    fn section(&mut self, number: u32) -> Result<&mut Section, PackError> {
        self.layout
            .index
            .sections
            .get_mut(number as usize)
            .ok_or_else(|| PackError::value("index", "section", number, "a section of the pack"))
    }

    /// Writes while another thread hashes: the disk and the processor need not wait for each other.
    fn write_hashed(&mut self, bytes: &[u8]) -> Result<Digest, PackError> {
        let mut hasher = digest::hasher();
        for piece in bytes.chunks(PIECE) {
            let sink = &mut self.sink;
            let written = if piece.len() < WORTH_THREADS {
                digest::update(&mut hasher, piece);
                sink.write_all(piece)
            } else {
                rayon::join(|| digest::update(&mut hasher, piece), || sink.write_all(piece)).1
            };
            written.map_err(|e| self.failed(e))?;
        }
        Ok(digest::finish(&hasher))
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), PackError> {
        self.seek(offset)?;
        self.sink.write_all(bytes).map_err(|e| self.failed(e))
    }

    fn seek(&mut self, offset: u64) -> Result<(), PackError> {
        self.sink.seek(SeekFrom::Start(offset)).map(drop).map_err(|e| self.failed(e))
    }

    fn failed(&self, error: io::Error) -> PackError {
        self.sink.explain(error, self.layout.file_len)
    }
}

impl<S: Sink> fmt::Debug for Writer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("file_len", &self.layout.file_len)
            .field("next_tensor", &self.next_tensor)
            .field("next_chunk", &self.next_chunk)
            .finish()
    }
}

fn too_much(what: &str, bytes: &[u8]) -> PackError {
    PackError::Pushed { section: format!("a {what} more"), found: wide(bytes.len()), expected: 0 }
}
