//! Files that appear whole or not at all, and never in the place of an input.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{AtFile, Error};
use crate::pack::{Existing, PackError, Partial, Sink};

/// Refuses an output that is one of the inputs, or that is there already and not to be replaced.
///
/// # Errors
///
/// [`Error`] with the output's name.
pub fn check_output(inputs: &[PathBuf], output: &Path, replace: bool) -> Result<(), Error> {
    refuse_same_file(inputs, output)?;
    if !replace && output.symlink_metadata().is_ok() {
        return Err(Error::usage("exists already; --force replaces it").or_at(output));
    }
    Ok(())
}

/// Refuses an output that is an input in another spelling, by link or by path.
///
/// # Errors
///
/// [`Error`] with the output's name.
pub fn refuse_same_file(inputs: &[PathBuf], output: &Path) -> Result<(), Error> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    let Some(output_is) = identity(output) else { return Ok(()) };
    if inputs.iter().any(|input| identity(input) == Some(output_is)) {
        return Err(Error::usage("is the input itself; choose another output").or_at(output));
    }
    Ok(())
}

/// Writes a small document whole or not at all, in place of what was there.
///
/// # Errors
///
/// [`Error`] with the file's name.
pub fn write_beside(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write(Partial::create(path, Existing::Replace), bytes).at(path)
}

/// As [`write_beside`], for nobody else to read.
///
/// # Errors
///
/// [`Error`] with the file's name.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write(Partial::create_private(path, Existing::Replace), bytes).at(path)
}

fn write(partial: Result<Partial, PackError>, bytes: &[u8]) -> Result<(), PackError> {
    let (mut partial, len) = (partial?, bytes.len() as u64);
    partial.reserve(len)?;
    partial.write_all(bytes).map_err(|error| partial.explain(error, len))?;
    partial.commit()
}
