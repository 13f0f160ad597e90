//! Gives the GGUF files back that a fat pack was made from, byte for byte.
//!
//! All files get their space before the first is written, and their names when all are on the disk.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::check_interrupt;
use super::output::refuse_same_file;
use crate::error::{AtFile, Error};
use crate::pack::{Existing, Pack, PackError, Partial, Sink};
use crate::progress::{Progress, Unit};

/// Where the files of a pack's model go: `output` itself for a single file, else into that folder under their own
/// names. Without an output they go beside the pack.
///
/// # Errors
///
/// [`Error`] when several files are to become one.
pub fn export_paths(pack: &Pack, output: Option<&Path>) -> Result<Vec<PathBuf>, Error> {
    let in_folder = |folder: &Path| pack.files().iter().map(|file| folder.join(&file.name)).collect();
    match output {
        None => Ok(in_folder(pack.file().path().parent().unwrap_or(Path::new("")))),
        Some(folder) if folder.is_dir() => Ok(in_folder(folder)),
        Some(file) if pack.files().len() == 1 => Ok(vec![file.to_owned()]),
        Some(other) => {
            let n = pack.files().len();
            Err(Error::usage(format!("is no folder, and the model is {n} files")).or_at(other))
        }
    }
}

/// Writes every file of a pack's model to its path; gives their lengths.
///
/// # Errors
///
/// [`Error`] naming the section that is damaged, the output that exists already or is the pack itself, or what the
/// system says. Nothing bears a final name then, unless the system refuses a name after others were given.
pub fn export(
    pack: &Pack,
    paths: &[PathBuf],
    existing: Existing,
    progress: &mut dyn Progress,
) -> Result<Vec<u64>, Error> {
    let input = [pack.file().path().to_owned()];
    let mut outputs = Vec::with_capacity(paths.len());
    for (path, file) in paths.iter().zip(pack.files()) {
        refuse_same_file(&input, path)?;
        let mut output = Partial::create(path, existing).at(path)?;
        output.reserve(file.len).at(path)?;
        outputs.push((output, path, file.len));
    }
    let total = outputs.iter().fold(0u64, |sum, (.., len)| sum.saturating_add(*len));
    progress.begin("exporting", total, Unit::Bytes);
    for ((output, path, len), number) in outputs.iter_mut().zip(0..) {
        let mut out = Watched { out: output, progress };
        let written = pack.write_gguf(number, &mut out);
        check_interrupt(progress)?;
        written.map_err(|error| match error.downcast::<PackError>() {
            Ok(damage) => Error::from(damage).or_at(pack.file().path()),
            Err(error) => Error::from(output.explain(error, *len)).or_at(path),
        })?;
    }
    progress.end();
    let lengths = outputs.iter().map(|(.., len)| *len).collect();
    outputs.into_iter().try_for_each(|(output, path, _)| output.commit().at(path))?;
    Ok(lengths)
}

/// Counts what is written, and stops when somebody pressed Ctrl-C.
struct Watched<'a> {
    out: &'a mut Partial,
    progress: &'a mut dyn Progress,
}

/// Bytes between two looks at the clock and the keyboard.
const PIECE: usize = 8 << 20;

impl Write for Watched<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.progress.is_interrupted() {
            // `Interrupted` itself would be tried again.
            return Err(io::Error::other("interrupted"));
        }
        let n = self.out.write(bytes.get(..bytes.len().min(PIECE)).unwrap_or(bytes))?;
        self.progress.advance(n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
