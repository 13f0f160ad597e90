//! The tensors of a thin pack, from another file: each is held to the pack's digest before its bytes are first used.
//!
//! What counts is the tensors. Where they lie, in how many files, and what else their file says does not: a model that
//! was published again with another template still fits.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::{OpenError, Opened};
use crate::pack::{Digest, Pack, digest};
use crate::tensor::{Place, SourceError, TensorInfo, TensorSource};

/// The model that gives a thin pack its tensors.
#[derive(Debug)]
pub(super) struct Bound {
    path: PathBuf,
    model: Opened,
    /// By file and offset.
    spans: Vec<Span>,
}

/// One tensor, in as many equal parts as the pack has digests of it.
#[derive(Debug)]
struct Span {
    name: String,
    place: Place,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    digest: Digest,
    is_checked: AtomicBool,
}

impl Bound {
    /// Finds every tensor of `pack` in `model`; gives the tensors at their places there as well.
    pub(super) fn new(
        pack: &Pack,
        tensors: &[TensorInfo],
        path: &Path,
        model: Opened,
    ) -> Result<(Bound, Vec<TensorInfo>), OpenError> {
        let source = model.as_source();
        let mut found = Vec::with_capacity(tensors.len());
        let mut spans = Vec::with_capacity(tensors.len());
        for (tensor, entry) in tensors.iter().zip(pack.tensors()) {
            let theirs = same(tensor, source.find(&tensor.name))?;
            let part = |digest: &Digest| Part { digest: *digest, is_checked: AtomicBool::new(false) };
            let parts = entry.digests.iter().map(part).collect();
            spans.push(Span { name: tensor.name.clone(), place: theirs.place, parts });
            found.push(theirs.clone());
        }
        spans.sort_by_key(|span| (span.place.file, span.place.offset, span.place.len));
        Ok((Bound { path: path.to_owned(), model, spans }, found))
    }

    /// The file that was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What was opened.
    pub(super) fn model(&self) -> &Opened {
        &self.model
    }

    /// Whether its files are those that the pack was made from, as far as lengths and headers go.
    pub(super) fn is_original(&self, pack: &Pack) -> bool {
        let Opened::Gguf(set) = &self.model else { return self.has_header(pack) };
        let same = set.files().iter().zip(pack.files()).zip(0u32..).all(|((file, kept), number)| {
            let len = u64::try_from(file.file().len()).unwrap_or(u64::MAX);
            len == kept.len && Some(file.header()) == pack.gguf_header(number)
        });
        same && set.files().len() == pack.files().len()
    }

    /// Whether it has the metadata that the pack was made from, byte for byte.
    pub(super) fn has_header(&self, pack: &Pack) -> bool {
        Some(self.model.as_source().header()) == pack.gguf_header(0)
    }

    /// The bytes at a place in the model, if their tensor is the pack's.
    pub(super) fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        let source = self.model.as_source();
        let Place { file, offset, len } = place;
        let outside = || SourceError::OutOfFile { file, offset, len };
        let after = self.spans.partition_point(|span| (span.place.file, span.place.offset) <= (file, offset));
        let before = after.checked_sub(1).and_then(|at| self.spans.get(at)).ok_or_else(outside)?;
        let within = offset.checked_sub(before.place.offset).filter(|_| before.place.file == file);
        let within = within.filter(|within| before.place.part(*within, len).is_some()).ok_or_else(outside)?;
        before.check(source, within, len)?;
        source.bytes(place)
    }

    /// Checks every tensor; `progress` hears the bytes of each part, from any thread.
    pub(super) fn check_all(&self, progress: &(dyn Fn(u64) + Sync)) -> Vec<SourceError> {
        let source = self.model.as_source();
        let wrong = self.spans.par_iter().flat_map_iter(|span| {
            let part_len = span.part_len();
            (0u64..).zip(&span.parts).filter_map(move |(number, _)| {
                let checked = span.check(source, number.saturating_mul(part_len), part_len);
                progress(part_len);
                checked.err()
            })
        });
        wrong.collect()
    }
}

impl Span {
    fn part_len(&self) -> u64 {
        let n_parts = u64::try_from(self.parts.len()).unwrap_or(u64::MAX);
        self.place.len.checked_div(n_parts).unwrap_or(0)
    }

    /// Checks the parts that `len` bytes from `offset` on touch, each once.
    fn check(&self, source: &dyn TensorSource, offset: u64, len: u64) -> Result<(), SourceError> {
        let part_len = self.part_len();
        // A tensor without bytes has none that could be wrong.
        let Some(first) = offset.checked_div(part_len).filter(|_| len > 0) else { return Ok(()) };
        let last = offset.saturating_add(len).saturating_sub(1).checked_div(part_len).unwrap_or(first);
        for number in first..=last {
            let part = usize::try_from(number).ok().and_then(|number| self.parts.get(number));
            let Some(part) = part.filter(|part| !part.is_checked.load(Ordering::Relaxed)) else { continue };
            let place = self.place.part(number.saturating_mul(part_len), part_len).unwrap_or(self.place);
            if digest(source.bytes(place)?) != part.digest {
                let part = (self.parts.len() > 1).then_some(number);
                return Err(SourceError::Differs { tensor: self.name.clone(), part });
            }
            part.is_checked.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The model's tensor, if it is of the type and shape that the pack knows.
fn same<'a>(expected: &TensorInfo, found: Option<&'a TensorInfo>) -> Result<&'a TensorInfo, OpenError> {
    let describe = |tensor: &TensorInfo| format!("{} {:?}", tensor.dtype, tensor.dims);
    match found {
        Some(found) if (found.dtype, &found.dims) == (expected.dtype, &expected.dims) => Ok(found),
        other => Err(OpenError::OtherTensor {
            tensor: expected.name.escape_debug().to_string(),
            found: other.map_or_else(|| "missing".to_owned(), describe),
            expected: describe(expected),
        }),
    }
}
