//! The model in a pack: its own tensors in a fat one, those of a GGUF in a thin one.

use std::path::{Path, PathBuf};

use super::bound::Bound;
use super::{OpenError, open};
use crate::bytes::{FileBytes, Io, Limits};
use crate::gguf::Header;
use crate::pack::{FileContents, Pack, SourceTensor};
use crate::tensor::{Metadata, Place, SourceError, TensorInfo, TensorSource};

/// The model in a pack.
#[derive(Debug)]
pub struct PackedModel {
    pack: Pack,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    weights: Weights,
}

/// Where its tensors are.
#[derive(Debug)]
enum Weights {
    /// In the pack.
    Stored,
    /// In another file.
    Bound(Box<Bound>),
    /// Not here.
    Absent,
}

impl PackedModel {
    /// The model in a fat `pack`, whose GGUF headers are read as hostile as any.
    ///
    /// # Errors
    ///
    /// [`OpenError::Thin`] when the pack is thin; [`OpenError::Gguf`] and [`OpenError::Table`] when headers
    /// are unsound or say another thing than the pack's own table.
    pub fn new(pack: Pack, limits: &Limits) -> Result<PackedModel, OpenError> {
        let (metadata, original) = read_headers(&pack, limits)?;
        let stored = original.into_iter().zip(pack.tensors()).map(|(tensor, entry)| {
            let section = entry.section.and_then(|number| pack.section(number))?;
            Some(TensorInfo { place: Place { file: 0, offset: section.offset, len: section.len }, ..tensor })
        });
        let Some(tensors) = stored.collect() else { return Err(thin(&pack)) };
        Ok(PackedModel { pack, metadata, tensors, weights: Weights::Stored })
    }

    /// The model of a thin `pack`, with the tensors of `model` or of the GGUF beside it.
    ///
    /// # Errors
    ///
    /// As [`PackedModel::new`]; [`OpenError::Thin`] when there is no model, [`OpenError::Model`] when it cannot be
    /// opened, [`OpenError::OtherTensor`] when it is another by its tensors' names, types and shapes.
    pub fn thin(pack: Pack, model: Option<&Path>, io: Io, limits: &Limits) -> Result<PackedModel, OpenError> {
        let path = match model {
            Some(path) => path.to_owned(),
            None => beside(&pack).ok_or_else(|| thin(&pack))?,
        };
        let at = |error| OpenError::Model { path: path.clone(), error: Box::new(error) };
        // A thin pack that named a thin pack, itself even, would lead round and round.
        let opened = match Pack::open(&path, Io::Map) {
            Ok(other) if !other.is_fat() => return Err(at(thin(&other))),
            _ => open(&path, io, limits).map_err(at)?,
        };
        let (metadata, original) = read_headers(&pack, limits)?;
        let (bound, tensors) = Bound::new(&pack, &original, &path, opened).map_err(at)?;
        let weights = Weights::Bound(Box::new(bound));
        Ok(PackedModel { pack, metadata, tensors, weights })
    }

    /// What a pack tells of its model without any tensor: all but the bytes.
    ///
    /// # Errors
    ///
    /// As [`PackedModel::new`].
    pub fn without_tensors(pack: Pack, limits: &Limits) -> Result<PackedModel, OpenError> {
        let (metadata, tensors) = read_headers(&pack, limits)?;
        Ok(PackedModel { pack, metadata, tensors, weights: Weights::Absent })
    }

    /// The pack.
    pub fn pack(&self) -> &Pack {
        &self.pack
    }

    /// The file that gives a thin pack its tensors.
    pub fn bound_to(&self) -> Option<&Path> {
        match &self.weights {
            Weights::Bound(bound) => Some(bound.path()),
            _ => None,
        }
    }

    /// The files that it is read from.
    pub fn files_read(&self) -> Vec<&FileBytes> {
        let mut files = match &self.weights {
            Weights::Bound(bound) => bound.model().files_read(),
            _ => Vec::new(),
        };
        files.push(self.pack.file());
        files
    }

    /// One line when the file that gives the tensors says something else about the model than the pack.
    pub fn note(&self) -> Option<String> {
        match &self.weights {
            Weights::Bound(bound) if !bound.has_header(&self.pack) => Some(format!(
                "{} has other metadata than the pack was made from: template, tokenizer and settings are the pack's",
                bound.path().display()
            )),
            _ => None,
        }
    }

    /// Checks every tensor that is not in the pack itself; `progress` hears bytes, from any thread.
    pub fn check_bound(&self, progress: &(dyn Fn(u64) + Sync)) -> Vec<SourceError> {
        match &self.weights {
            Weights::Bound(bound) => bound.check_all(progress),
            _ => Vec::new(),
        }
    }

    /// The tensors, each at its place in the GGUF that the pack was made from.
    pub fn original_tensors(&self) -> Vec<TensorInfo> {
        let stored = self.tensors.iter().zip(self.pack.tensors());
        let original = stored.map(|(tensor, entry)| TensorInfo {
            place: Place { file: entry.file, offset: entry.offset, len: tensor.place.len },
            ..tensor.clone()
        });
        original.collect()
    }

    /// The GGUF's files as a pack keeps them. With [`PackedModel::original_tensors`] a pack made from this one
    /// holds the same model, byte for byte, as one made from the GGUF.
    ///
    /// `None` for a thin pack whose original files are not at hand: a thin pack can be made of it, not a fat one.
    pub fn files(&self, thin: bool) -> Option<Vec<FileContents<'_>>> {
        match &self.weights {
            Weights::Bound(bound) if !thin => {
                bound.model().files(thin).filter(|_| bound.is_original(&self.pack))
            }
            Weights::Absent if !thin => None,
            _ => Some(self.kept_files()),
        }
    }

    fn kept_files(&self) -> Vec<FileContents<'_>> {
        let files = self.pack.files().iter().zip(0u32..).map(|(file, number)| {
            let residue = self.pack.residue(number).unwrap_or_default().to_vec();
            let header = self.pack.gguf_header(number).unwrap_or_default();
            FileContents::kept(&file.name, file.len, header, residue)
        });
        files.collect()
    }
}

/// The model's first file beside a thin pack, under the name that the pack was made from.
fn beside(pack: &Pack) -> Option<PathBuf> {
    let path = pack.file().path().with_file_name(&pack.files().first()?.name);
    super::files_of(&path).iter().any(|file| file.exists()).then_some(path)
}

fn thin(pack: &Pack) -> OpenError {
    OpenError::Thin { wanted: pack.files().first().map(|file| file.name.clone()).unwrap_or_default() }
}

/// Checks the GGUF headers in a pack and compares them with its table of tensors, as opening its model does.
///
/// Reads the headers alone.
///
/// # Errors
///
/// As [`PackedModel::new`].
pub fn check_packed(pack: &Pack, limits: &Limits) -> Result<(), OpenError> {
    read_headers(pack, limits).map(drop)
}

/// The metadata of the first header, and the tensors of all at their places in the GGUF files.
fn read_headers(pack: &Pack, limits: &Limits) -> Result<(Metadata, Vec<TensorInfo>), OpenError> {
    let mut metadata = None;
    let mut entries = Vec::new();
    for (file, number) in pack.files().iter().zip(0u32..) {
        let header = pack.gguf_header(number).unwrap_or_default();
        let parsed = Header::parse(header, file.len, limits)?;
        entries.extend(parsed.tensors.into_iter().map(|tensor| (number, tensor)));
        metadata.get_or_insert(parsed.metadata);
    }
    Ok((metadata.ok_or_else(|| thin(pack))?, compared(pack, entries)?))
}

/// The headers' tensors, if the pack's table lists the same ones.
fn compared(pack: &Pack, entries: Vec<(u32, TensorInfo)>) -> Result<Vec<TensorInfo>, OpenError> {
    let none = || "missing".to_owned();
    let mut table = pack.tensors().iter();
    let mut tensors = Vec::new();
    for (number, (file, tensor)) in entries.into_iter().enumerate() {
        let expected =
            describe(&tensor.name, tensor.dtype.gguf_id(), &tensor.dims, file, tensor.place.offset);
        let found = table.next().map_or_else(none, describe_entry);
        if found != expected {
            return Err(OpenError::Table { number, found, expected });
        }
        tensors.push(TensorInfo { place: Place { file, ..tensor.place }, ..tensor });
    }
    match table.next() {
        Some(entry) => {
            let found = describe_entry(entry);
            Err(OpenError::Table { number: tensors.len(), found, expected: none() })
        }
        None => Ok(tensors),
    }
}

fn describe_entry(entry: &SourceTensor) -> String {
    describe(&entry.name, entry.dtype, &entry.dims, entry.file, entry.offset)
}

fn describe(name: &str, dtype: u32, dims: &[u64], file: u32, offset: u64) -> String {
    format!("`{}` of type {dtype}, {dims:?}, at byte {offset} of file {file}", name.escape_debug())
}

impl TensorSource for PackedModel {
    fn header(&self) -> &[u8] {
        self.pack.gguf_header(0).unwrap_or_default()
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(usize::try_from(self.pack.tensor_number(name)?).ok()?)
    }

    fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        match &self.weights {
            Weights::Stored => {}
            Weights::Bound(bound) => return bound.bytes(place),
            Weights::Absent => return Err(SourceError::Absent),
        }
        let Place { file, offset, len } = place;
        let range = || usize::try_from(offset).ok().zip(usize::try_from(offset.checked_add(len)?).ok());
        let bytes =
            if file == 0 { range().and_then(|(begin, end)| self.pack.file().get(begin..end)) } else { None };
        bytes.ok_or(SourceError::OutOfFile { file, offset, len })
    }
}
