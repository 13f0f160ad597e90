//! A model in several files, `model-00001-of-00003.gguf` and so on, as one source.
//!
//! Names decide which files belong together, and every file's own metadata must agree with its name. Names are those
//! of the paths that were given, never of what a link leads to: caches keep files under their digests and give them
//! their names by links.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::error::shown;
use super::{GgufError, GgufFile};
use crate::bytes::{Io, Limits};
use crate::tensor::{Metadata, Place, SourceError, TensorInfo, TensorSource, Value};

/// The ending of every GGUF file.
const ENDING: &[u8] = b".gguf";
/// Digits of a shard's number in its name.
const DIGITS: usize = 5;

/// The parts of a path like `folder/model-00002-of-00003.gguf`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardName {
    /// The path up to the number: `folder/model`.
    pub stem: PathBuf,
    /// How many files the set has.
    pub count: u32,
    /// Which of them this is, from 1.
    pub number: u32,
}

impl ShardName {
    /// The parts of `path`, if it is named as one of a set of two files and more.
    pub fn of(path: &Path) -> Option<ShardName> {
        path.file_name()?;
        let rest = path.as_os_str().as_bytes().strip_suffix(ENDING)?;
        let (rest, count) = strip_number(rest, b"-of-")?;
        let (stem, number) = strip_number(rest, b"-")?;
        let sound = count >= 2 && (1..=count).contains(&number) && !stem.is_empty() && !stem.ends_with(b"/");
        let stem = PathBuf::from(OsString::from_vec(stem.to_vec()));
        sound.then_some(ShardName { stem, count, number })
    }

    /// The path of another file of the set.
    pub fn path(&self, number: u32) -> PathBuf {
        let mut path = self.stem.clone().into_os_string();
        path.push(ending(number, self.count));
        path.into()
    }

    /// The paths of all files of the set, in order.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> + '_ {
        (1..=self.count).map(|number| self.path(number))
    }
}

/// `-00002-of-00003.gguf`.
fn ending(number: u32, count: u32) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

/// Takes a number of five digits and what stands before it from the end of a name.
fn strip_number<'a>(name: &'a [u8], before: &[u8]) -> Option<(&'a [u8], u32)> {
    let (rest, digits) = name.split_at_checked(name.len().checked_sub(DIGITS)?)?;
    let digits = digits.iter().all(u8::is_ascii_digit).then_some(digits)?;
    Some((rest.strip_suffix(before)?, std::str::from_utf8(digits).ok()?.parse().ok()?))
}

/// Why files are no model together. The caller adds the path that was given.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SetError {
    /// The only file is unsound.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// One of the files is unsound.
    #[error("shard `{shard}`: {error}")]
    Shard {
        /// Its name.
        shard: String,
        /// Why.
        error: GgufError,
    },
    /// A file of the set is not there.
    #[error("missing shard {number:05}: `{shard}` is not there{}", others(*.n_missing))]
    Missing {
        /// Its number, from 1.
        number: u32,
        /// Its name.
        shard: String,
        /// How many are missing in all.
        n_missing: u32,
    },
    /// A file whose metadata says another thing than its name.
    #[error("shard `{shard}`: `{key}` is {found}, expected {expected} by its name")]
    Disagrees {
        /// Its name.
        shard: String,
        /// The key.
        key: &'static str,
        /// What it holds, in words.
        found: String,
        /// What the name says.
        expected: u64,
    },
    /// A file of a set that is not named like one.
    #[error(
        "is one of {count} shards by its metadata, but its name does not end in `-0000N-of-{count:05}.gguf`"
    )]
    Unnamed {
        /// `split.count`.
        count: u64,
    },
    /// A tensor that two files hold.
    #[error("tensor `{tensor}` is in shard `{first}` and again in `{second}`")]
    Repeated {
        /// The tensor.
        tensor: String,
        /// The first file.
        first: String,
        /// The other.
        second: String,
    },
    /// Tensors that no file holds, or too many.
    #[error("the shards hold {found} tensors, expected {expected} by `split.tensors.count` of the first")]
    Tensors {
        /// Tensors of all files.
        found: u64,
        /// What the first file says.
        expected: u64,
    },
}

impl SetError {
    /// What to do about it, where there is something to do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            SetError::Gguf(error) | SetError::Shard { error, .. } => error.hint(),
            SetError::Missing { .. } => {
                Some("all shards of a model belong in one folder, under their own names")
            }
            SetError::Disagrees { .. } | SetError::Repeated { .. } | SetError::Tensors { .. } => {
                Some("these files are not of one download; fetch the whole set again")
            }
            SetError::Unnamed { .. } => Some("give the file or link that bears the shard's published name"),
        }
    }
}

fn others(n_missing: u32) -> String {
    match n_missing.saturating_sub(1) {
        0 => String::new(),
        n => format!(", nor are {n} others"),
    }
}

/// A model in one or more GGUF files. A place names its file by number, from 0.
#[derive(Debug)]
pub struct GgufSet {
    files: Vec<GgufFile>,
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
}

impl GgufSet {
    /// Opens the file at `path`, or the whole set that it is named as one of.
    ///
    /// # Errors
    ///
    /// [`SetError`], without the path.
    pub fn open(path: &Path, io: Io, limits: &Limits) -> Result<GgufSet, SetError> {
        let Some(name) = ShardName::of(path) else {
            return GgufSet::single(GgufFile::open(path, io, limits)?);
        };
        let missing = || name.paths().zip(1u32..).filter(|(path, _)| path.metadata().is_err());
        if let Some((path, number)) = missing().next() {
            let n_missing = u32::try_from(missing().count()).unwrap_or(u32::MAX);
            return Err(SetError::Missing { number, shard: shard(&path), n_missing });
        }
        let open = |path: PathBuf| {
            GgufFile::open(&path, io, limits).map_err(|error| SetError::Shard { shard: shard(&path), error })
        };
        let files = name.paths().map(open).collect::<Result<Vec<_>, _>>()?;
        for (file, index) in files.iter().zip(0u64..) {
            agrees(file, "split.count", name.count.into())?;
            agrees(file, "split.no", index)?;
        }
        let set = GgufSet::of(files)?;
        set.is_whole()?;
        Ok(set)
    }

    /// The model in one file.
    ///
    /// # Errors
    ///
    /// [`SetError::Unnamed`] when the file says that it is one of several.
    pub fn single(file: GgufFile) -> Result<GgufSet, SetError> {
        match file.parsed().metadata.get("split.count").and_then(Value::as_u64) {
            Some(count @ 2..) => Err(SetError::Unnamed { count }),
            _ => GgufSet::of(vec![file]),
        }
    }

    fn of(files: Vec<GgufFile>) -> Result<GgufSet, SetError> {
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut by_name = BTreeMap::new();
        for (file, number) in files.iter().zip(0u32..) {
            for tensor in file.tensors() {
                match by_name.entry(tensor.name.clone()) {
                    Entry::Vacant(free) => free.insert(tensors.len()),
                    Entry::Occupied(first) => {
                        let first = tensors.get(*first.get()).map_or(0, |tensor| tensor.place.file);
                        return Err(repeated(&files, &tensor.name, first, number));
                    }
                };
                tensors.push(TensorInfo { place: Place { file: number, ..tensor.place }, ..tensor.clone() });
            }
        }
        Ok(GgufSet { files, tensors, by_name })
    }

    /// Holds the number of tensors to what the first file says.
    fn is_whole(&self) -> Result<(), SetError> {
        let stated = self.metadata().get("split.tensors.count").and_then(Value::as_u64);
        let found = u64::try_from(self.tensors.len()).unwrap_or(u64::MAX);
        match stated {
            Some(expected) if expected != found => Err(SetError::Tensors { found, expected }),
            _ => Ok(()),
        }
    }

    /// The files, in order of their numbers.
    pub fn files(&self) -> &[GgufFile] {
        &self.files
    }
}

/// Compares a key of a shard with what its name says.
fn agrees(file: &GgufFile, key: &'static str, expected: u64) -> Result<(), SetError> {
    let value = file.parsed().metadata.get(key);
    if value.and_then(Value::as_u64) == Some(expected) {
        return Ok(());
    }
    let found = value.map_or_else(|| "missing".to_owned(), Value::describe);
    Err(SetError::Disagrees { shard: shard(file.file().path()), key, found, expected })
}

fn repeated(files: &[GgufFile], tensor: &str, first: u32, second: u32) -> SetError {
    let name = |number: u32| {
        let file = usize::try_from(number).ok().and_then(|number| files.get(number));
        file.map(|file| shard(file.file().path())).unwrap_or_default()
    };
    SetError::Repeated { tensor: shown(tensor), first: name(first), second: name(second) }
}

/// A file's name for messages.
fn shard(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl TensorSource for GgufSet {
    /// The first file's: it alone has the model's metadata.
    fn header(&self) -> &[u8] {
        self.files.first().map(TensorSource::header).unwrap_or_default()
    }

    fn metadata(&self) -> &Metadata {
        static NONE: Metadata = Metadata(BTreeMap::new());
        self.files.first().map_or(&NONE, TensorSource::metadata)
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.by_name.get(name)?)
    }

    fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        let Place { file, offset, len } = place;
        match usize::try_from(file).ok().and_then(|number| self.files.get(number)) {
            // A file calls itself number 0; an error must name it by ours.
            Some(inside) => inside.bytes(Place { file: 0, ..place }),
            None => Err(SourceError::OutOfFile { file, offset, len }),
        }
        .map_err(|_| SourceError::OutOfFile { file, offset, len })
    }
}
