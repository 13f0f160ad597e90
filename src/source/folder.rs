//! Which model a path means: a file, any file of a set, or the one model of a folder.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::OpenError;
use crate::bytes::{Io, Limits};
use crate::gguf::{GgufFile, ShardName};
use crate::tensor::Metadata;

/// What a GGUF file is for, as its metadata says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A model, or a part of one.
    Model,
    /// Turns images or sound into what a model reads.
    Projector,
    /// Counts of activations, kept for quantising.
    Imatrix,
    /// Differences to a model.
    Adapter,
    /// A tokenizer alone.
    Vocabulary,
}

impl Role {
    /// The role of a file with this metadata.
    pub fn of(metadata: &Metadata) -> Role {
        let text = |key: &str| metadata.get(key).and_then(|value| value.as_str());
        match (text("general.type"), text("general.architecture")) {
            (Some("imatrix"), _) => Role::Imatrix,
            (Some("mmproj"), _) | (_, Some("clip")) => Role::Projector,
            (Some("adapter"), _) => Role::Adapter,
            (Some("vocab"), _) => Role::Vocabulary,
            _ => Role::Model,
        }
    }
}

/// The file to open for `path`: itself, or, for a folder, the first file of the one model in it.
///
/// # Errors
///
/// [`OpenError::NoModel`] and [`OpenError::SeveralModels`] for a folder that does not hold exactly one.
pub fn locate(path: &Path) -> Result<PathBuf, OpenError> {
    if !path.as_os_str().is_empty() && !path.is_dir() {
        return Ok(path.to_owned());
    }
    let mut models = models_in(path)?;
    match (models.pop(), models.len()) {
        (Some(model), 0) => Ok(model),
        (None, _) => Err(OpenError::NoModel),
        (Some(last), _) => {
            models.push(last);
            let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Err(OpenError::SeveralModels { found: models.iter().map(name).collect() })
        }
    }
}

/// The models of a folder, sorted: of a set its first file there; importance matrices, projectors and other parts are
/// none. A file that cannot be read is listed, so that its error is seen. The empty path is the current folder.
///
/// # Errors
///
/// What the system says of the folder.
pub fn models_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let files = files_in(folder, "gguf")?;
    // Sorted, so the first of a set that is met has the lowest number.
    let mut sets: BTreeMap<(PathBuf, u32), ()> = BTreeMap::new();
    let is_first = |path: &PathBuf| match ShardName::of(path) {
        Some(name) => sets.insert((name.stem, name.count), ()).is_none(),
        None => true,
    };
    let role = |path: &PathBuf| {
        let file = GgufFile::open(path, Io::Map, &Limits::default()).ok()?;
        Some(Role::of(&file.parsed().metadata))
    };
    let firsts: Vec<PathBuf> = files.into_iter().filter(is_first).collect();
    Ok(firsts.into_iter().filter(|path| matches!(role(path), None | Some(Role::Model))).collect())
}

/// The files of a folder with this ending, sorted. The empty path is the current folder.
///
/// # Errors
///
/// What the system says of the folder.
pub fn files_in(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let mut files = Vec::new();
    for entry in fs::read_dir(here)? {
        let path = folder.join(entry?.file_name());
        if path.extension().is_some_and(|found| found == ending) && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// All files of the model that `path` belongs to: the set's, or itself.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    match ShardName::of(path) {
        Some(name) => name.paths().collect(),
        None => vec![path.to_owned()],
    }
}

/// The path beside a model with another ending; the number of a shard is no part of it.
pub fn beside(model: &Path, ending: &str) -> PathBuf {
    match ShardName::of(model) {
        Some(name) => {
            let mut path = name.stem.into_os_string();
            path.push(".");
            path.push(ending);
            path.into()
        }
        None => model.with_extension(ending),
    }
}

/// The one model that several paths of a command line are, which is so when they are all files of one set.
pub fn one_set(paths: &[PathBuf]) -> Option<PathBuf> {
    let first = ShardName::of(paths.first()?)?;
    let mut given = paths.to_vec();
    given.sort();
    given.iter().eq(first.paths().collect::<Vec<_>>().iter()).then(|| first.path(1))
}
