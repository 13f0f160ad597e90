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

mod bound;
mod folder;
mod packed;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::bytes::{FileBytes, Io, Limits};
use crate::gguf::{GgufError, GgufSet, SetError, is_gguf};
use crate::pack::{FileContents, Pack, PackError};
use crate::tensor::{TensorInfo, TensorSource};

pub use folder::{Role, beside, files_in, files_of, locate, models_in, one_set};
pub use packed::{PackedModel, check_packed};

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
    /// A sound pack without the model's tensors, which were not found either.
    #[error("a thin pack: the model's tensors are in `{wanted}`, which is not beside it")]
    Thin {
        /// The name of the model's first file.
        wanted: String,
    },
    /// A model was named although the file has its own tensors.
    #[error("holds its tensors itself; another model is for thin packs only")]
    NotThin,
    /// The model that was to give a thin pack its tensors cannot be opened.
    #[error("{}: {error}", path.display())]
    Model {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: Box<OpenError>,
    },
    /// The model that was to give a thin pack its tensors has others.
    #[error("the pack was made from another model: tensor `{tensor}` is {found}, expected {expected}")]
    OtherTensor {
        /// The tensor.
        tensor: String,
        /// Type and shape there.
        found: String,
        /// Type and shape in the pack.
        expected: String,
    },
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
            OpenError::Thin { .. } => Some("put the GGUF beside it, or name it with --model"),
            OpenError::Model { error, .. } => error.hint(),
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
    /// From a fat pack, or a thin one with its GGUF.
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

    /// The same, borrowed.
    fn as_source(&self) -> &dyn TensorSource {
        match self {
            Opened::Gguf(set) => set.as_ref(),
            Opened::Pack(model) => model.as_ref(),
        }
    }

    /// The files that it is read from.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Opened::Gguf(set) => set.files().iter().map(|file| file.file().path().to_owned()).collect(),
            Opened::Pack(model) => {
                let mut paths = model.bound_to().map(files_of).unwrap_or_default();
                paths.push(model.pack().file().path().to_owned());
                paths
            }
        }
    }

    /// The same files, open.
    pub fn files_read(&self) -> Vec<&FileBytes> {
        match self {
            Opened::Gguf(set) => set.files().iter().map(|file| file.file()).collect(),
            Opened::Pack(model) => model.files_read(),
        }
    }

    /// The model's GGUF files as a fat or thin pack keeps them: with the tensors, every byte of the original.
    ///
    /// `None` when a fat pack is asked for and not all of these bytes are at hand.
    pub fn files(&self, thin: bool) -> Option<Vec<FileContents<'_>>> {
        match self {
            Opened::Gguf(set) => {
                let contents = set.files().iter().zip(0u32..).map(|(file, number)| {
                    let header = u64::try_from(file.header().len()).ok()?;
                    FileContents::new(file.file().path(), file.file(), header, set.tensors(), number)
                });
                contents.collect()
            }
            Opened::Pack(model) => model.files(thin),
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

/// Opens the model at `path`: a GGUF, any file of a set, a fat pack, a thin pack with its GGUF beside it, or a folder
/// with one model.
///
/// # Errors
///
/// [`OpenError`], without the path.
pub fn open(path: &Path, io: Io, limits: &Limits) -> Result<Opened, OpenError> {
    open_with(path, None, io, limits)
}

/// The same; the tensors of a thin pack are those of `model`, where one is named.
///
/// # Errors
///
/// As [`open`]; [`OpenError::NotThin`] when a model is named and not needed.
pub fn open_with(path: &Path, model: Option<&Path>, io: Io, limits: &Limits) -> Result<Opened, OpenError> {
    let path = &locate(path)?;
    let opened = match read_start(path)? {
        Some(found) if found.is_empty() => return Err(OpenError::Empty),
        Some(found) if !is_gguf(&found) => match Pack::open(path, io) {
            Ok(pack) if pack.is_fat() => Opened::Pack(Arc::new(PackedModel::new(pack, limits)?)),
            Ok(pack) => return Ok(Opened::Pack(Arc::new(PackedModel::thin(pack, model, io, limits)?))),
            Err(PackError::NotAPack { .. }) => return Err(OpenError::Unknown { found }),
            Err(error) => return Err(error.into()),
        },
        _ => Opened::Gguf(Arc::new(GgufSet::open(path, io, limits)?)),
    };
    if model.is_none() { Ok(opened) } else { Err(OpenError::NotThin) }
}

/// The first bytes of a file; `None` for one that is not there, but is one of a set of which there are others: what is
/// missing is found out when the set is opened.
fn read_start(path: &Path) -> Result<Option<Vec<u8>>, OpenError> {
    let mut found = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(8).read_to_end(&mut found)?,
        Err(_) if files_of(path).iter().any(|file| file.exists()) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(Some(found))
}
