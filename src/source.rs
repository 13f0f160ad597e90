//! Opens a model, whichever kind of file holds it, and gives it as one [`TensorSource`].
//!
//! What a file is follows from its first bytes, never from its name. A fat pack stands in for the GGUF it was
//! made from: same metadata, same tensors, same bytes, at places in the pack.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

mod folder;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use crate::bytes::{Io, Limits};
use crate::gguf::{GgufError, GgufSet, Header, SetError, is_gguf};
use crate::pack::{FileContents, Pack, PackError, SourceTensor};
use crate::tensor::{Metadata, Place, SourceError, TensorInfo, TensorSource};

pub use folder::{Role, beside, files_in, files_of, locate, models_in, one_set};

/// Why a model could not be opened. The caller adds the path.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system could not read it.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// A file of no bytes.
    #[error("file is empty")]
    Empty,
    /// Neither GGUF nor pack.
    #[error("neither a GGUF nor a pack: begins with `{}`", .found.escape_ascii())]
    Unknown {
        /// The first bytes, 8 at most.
        found: Vec<u8>,
    },
    /// A folder without a model.
    #[error("there is no model (*.gguf) in this folder")]
    NoModel,
    /// A folder with more than one.
    #[error("there are several models in this folder; name one of: {}", .found.join(", "))]
    SeveralModels {
        /// Their names.
        found: Vec<String>,
    },
    /// A GGUF header in a pack that was refused.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A GGUF, or a set of them, that was refused.
    #[error(transparent)]
    Set(#[from] SetError),
    /// A pack that was refused.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A sound pack without the model's tensors.
    #[error("a thin pack: it holds the NPU's copies, not the model's tensors")]
    Thin,
    /// A pack whose table of tensors is not that of the GGUF header it holds.
    #[error("tensor {number} is {found} in the pack's table, but {expected} in its GGUF header")]
    Table {
        /// Its number.
        number: usize,
        /// The pack's entry.
        found: String,
        /// The header's entry.
        expected: String,
    },
}

impl OpenError {
    /// What to do about it, where there is something to do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            OpenError::Empty => Some("the download or copy may be incomplete"),
            OpenError::Unknown { .. } => Some("give a .gguf file, or a pack made by `orkpack convert`"),
            OpenError::Thin => Some("name the GGUF it was made from with --model"),
            OpenError::Pack(error) => error.hint(),
            OpenError::Set(error) => error.hint(),
            _ => None,
        }
    }
}

/// A model that was opened.
#[derive(Clone, Debug)]
pub enum Opened {
    /// From a GGUF, or a set of them.
    Gguf(Arc<GgufSet>),
    /// From a fat pack.
    Pack(Arc<PackedModel>),
}

impl Opened {
    /// The model's metadata and tensors.
    pub fn source(&self) -> Arc<dyn TensorSource> {
        match self {
            Opened::Gguf(set) => set.clone(),
            Opened::Pack(model) => model.clone(),
        }
    }

    /// The model's tensors in the order of [`TensorSource::tensors`], each at its place in the GGUF: what a pack
    /// is told of them. For a GGUF both are the same.
    pub fn original_tensors(&self) -> Vec<TensorInfo> {
        match self {
            Opened::Gguf(set) => set.tensors().to_vec(),
            Opened::Pack(model) => model.original_tensors(),
        }
    }

    /// The pack, if it is one.
    pub fn pack(&self) -> Option<&Pack> {
        match self {
            Opened::Gguf(_) => None,
            Opened::Pack(model) => Some(model.pack()),
        }
    }
}

/// Opens the model at `path`: a GGUF, any file of a set, a fat pack, or a folder with one model.
///
/// # Errors
///
/// [`OpenError`], without the path.
pub fn open(path: &Path, io: Io, limits: &Limits) -> Result<Opened, OpenError> {
    let path = &locate(path)?;
    let mut found = Vec::new();
    match File::open(path) {
        Ok(file) => drop(file.take(8).read_to_end(&mut found)?),
        // Of a set the missing files are named, so long as there is any.
        Err(_) if files_of(path).iter().any(|file| file.exists()) => {
            return Ok(Opened::Gguf(Arc::new(GgufSet::open(path, io, limits)?)));
        }
        Err(error) => return Err(error.into()),
    }
    if found.is_empty() {
        return Err(OpenError::Empty);
    }
    if is_gguf(&found) {
        return Ok(Opened::Gguf(Arc::new(GgufSet::open(path, io, limits)?)));
    }
    match Pack::open(path, io) {
        Ok(pack) => Ok(Opened::Pack(Arc::new(PackedModel::new(pack, limits)?))),
        Err(PackError::NotAPack { .. }) => Err(OpenError::Unknown { found }),
        Err(error) => Err(error.into()),
    }
}

/// The model in a fat pack.
#[derive(Debug)]
pub struct PackedModel {
    pack: Pack,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
}

impl PackedModel {
    /// The model in `pack`, whose GGUF headers are read as hostile as any.
    ///
    /// # Errors
    ///
    /// [`OpenError::Thin`] when the pack has none; [`OpenError::Gguf`] and [`OpenError::Table`] when headers
    /// are unsound or say another thing than the pack's own table.
    pub fn new(pack: Pack, limits: &Limits) -> Result<PackedModel, OpenError> {
        let (metadata, tensors) = read_headers(&pack, limits)?;
        Ok(PackedModel { pack, metadata, tensors })
    }

    /// The pack.
    pub fn pack(&self) -> &Pack {
        &self.pack
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
    pub fn files(&self) -> Vec<FileContents<'_>> {
        let files = self.pack.files().iter().zip(0u32..).map(|(file, number)| {
            let residue = self.pack.residue(number).unwrap_or_default().to_vec();
            FileContents::kept(
                &file.name,
                file.len,
                self.pack.gguf_header(number).unwrap_or_default(),
                residue,
            )
        });
        files.collect()
    }
}

/// Checks the GGUF headers in a fat pack and compares them with its table of tensors, as opening its model does.
///
/// Reads the headers alone.
///
/// # Errors
///
/// As [`PackedModel::new`].
pub fn check_packed(pack: &Pack, limits: &Limits) -> Result<(), OpenError> {
    read_headers(pack, limits).map(drop)
}

/// The metadata of the first header, and the tensors of all at their places in the pack.
fn read_headers(pack: &Pack, limits: &Limits) -> Result<(Metadata, Vec<TensorInfo>), OpenError> {
    let mut metadata = None;
    let mut entries = Vec::new();
    for (file, number) in pack.files().iter().zip(0u32..) {
        let header = pack.gguf_header(number).ok_or(OpenError::Thin)?;
        let parsed = Header::parse(header, file.len, limits)?;
        entries.extend(parsed.tensors.into_iter().map(|tensor| (number, tensor)));
        metadata.get_or_insert(parsed.metadata);
    }
    Ok((metadata.ok_or(OpenError::Thin)?, places(pack, entries)?))
}

/// The headers' tensors at their places in the pack, if its table lists the same ones.
fn places(pack: &Pack, entries: Vec<(u32, TensorInfo)>) -> Result<Vec<TensorInfo>, OpenError> {
    let none = || "missing".to_owned();
    let mut table = pack.tensors().iter();
    let mut tensors = Vec::new();
    for (number, (file, tensor)) in entries.into_iter().enumerate() {
        let expected =
            describe(&tensor.name, tensor.dtype.gguf_id(), &tensor.dims, file, tensor.place.offset);
        let entry = table.next();
        let found = entry.map_or_else(none, describe_entry);
        let section = entry.and_then(|entry| pack.section(entry.section?));
        match section {
            Some(section) if found == expected => {
                let place = Place { file: 0, offset: section.offset, len: section.len };
                tensors.push(TensorInfo { place, ..tensor });
            }
            _ => return Err(OpenError::Table { number, found, expected }),
        }
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
        let Place { file, offset, len } = place;
        let range = || usize::try_from(offset).ok().zip(usize::try_from(offset.checked_add(len)?).ok());
        let bytes =
            if file == 0 { range().and_then(|(begin, end)| self.pack.file().get(begin..end)) } else { None };
        bytes.ok_or(SourceError::OutOfFile { file, offset, len })
    }
}
