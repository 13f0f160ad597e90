//! Files that appear whole or not at all, and never in the place of an input.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{AtFile, Error};

/// Refuses an output that is an input in another spelling, by link or by path.
pub(super) fn refuse_same_file(inputs: &[PathBuf], output: &Path) -> Result<(), Error> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    let Some(output_is) = identity(output) else { return Ok(()) };
    if inputs.iter().any(|input| identity(input) == Some(output_is)) {
        return Err(Error::usage("is the input itself; choose another output").or_at(output));
    }
    Ok(())
}

/// Writes a small document whole or not at all: a temporary file in the same folder, synced, renamed.
///
/// # Errors
///
/// [`Error`] with the file's name.
pub fn write_beside(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write(path, bytes, 0o644)
}

/// As [`write_beside`], for nobody else to read.
///
/// # Errors
///
/// [`Error`] with the file's name.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write(path, bytes, 0o600)
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let permissions = fs::Permissions::from_mode(mode);
        let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        File::open(folder)?.sync_all()
    };
    write().at(path)
}
