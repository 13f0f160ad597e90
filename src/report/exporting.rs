//! The result of `orkpack export`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::units::Bytes;

/// The files that were made of a pack, as JSON (schema: `formats/export.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct ExportDocument {
    /// `orkpack-export-1`.
    pub schema: &'static str,
    /// The pack.
    pub pack: String,
    /// The files, in order of the model's.
    pub files: Vec<ExportedPart>,
}

/// One file.
#[derive(Clone, Debug, Serialize)]
pub struct ExportedPart {
    /// Its path.
    pub file: String,
    /// Its length.
    pub bytes: u64,
}

impl ExportDocument {
    /// The document of a finished export.
    pub fn of(pack: &Path, paths: &[PathBuf], lengths: &[u64]) -> ExportDocument {
        let files = paths.iter().zip(lengths);
        let part = |(path, bytes): (&PathBuf, &u64)| ExportedPart {
            file: path.display().to_string(),
            bytes: *bytes,
        };
        ExportDocument {
            schema: "orkpack-export-1",
            pack: pack.display().to_string(),
            files: files.map(part).collect(),
        }
    }

    /// The document as text.
    pub fn text(&self) -> String {
        let line = |part: &ExportedPart| {
            let (file, size) = (super::escape(&part.file), Bytes(part.bytes));
            format!("{file}: {} bytes ({size}), as before conversion\n", part.bytes)
        };
        self.files.iter().map(line).collect()
    }
}
