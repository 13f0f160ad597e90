//! The result of `orkpack verify`.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::check::Against;
use crate::interop::{PriorError, PriorPack};
use crate::pack::PackError;
use crate::pack::verify::{Mode, Report};
use crate::units::Bytes;

/// One checked pack as JSON (schema: `formats/verify.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct VerifyDocument {
    /// `orkpack-verify-1`.
    pub schema: &'static str,
    /// The pack.
    pub file: String,
    /// Whether all that was read is right.
    pub ok: bool,
    /// `full`, `npu` or `quick`.
    pub mode: &'static str,
    /// The digest that stands for the whole content; empty when the pack could not be opened.
    pub root: String,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the sections that were read.
    pub checked_bytes: u64,
    /// Sections, and how many of them were read.
    pub sections: u64,
    /// Sections whose bytes were read.
    pub sections_checked: u64,
    /// The GGUF whose tensors were held to a thin pack's digests.
    pub model: Option<String>,
    /// The name of the GGUF that a thin pack is bound to, when it was not found.
    pub unchecked: Option<String>,
    /// The model that tensors and int8 copies were held to.
    pub against: Option<String>,
    /// Int8 matrices that were derived from its weights again.
    pub derived: u64,
    /// What is said beside, and is no fault, a line each.
    pub notes: Vec<String>,
    /// What is wrong, a line each.
    pub findings: Vec<String>,
    /// Whether it is a pack at all.
    #[serde(skip)]
    is_pack: bool,
}

impl VerifyDocument {
    /// The document of a report.
    pub fn of(file: &Path, report: &Report) -> VerifyDocument {
        VerifyDocument {
            schema: "orkpack-verify-1",
            file: file.display().to_string(),
            ok: report.is_ok(),
            mode: mode(report.mode),
            root: report.root.to_string(),
            file_bytes: report.file_len,
            checked_bytes: report.bytes_checked(),
            sections: report.sections.len() as u64,
            sections_checked: report.n_checked() as u64,
            model: None,
            unchecked: None,
            against: None,
            derived: 0,
            notes: Vec::new(),
            findings: report.findings().map(|finding| finding.to_string()).collect(),
            is_pack: true,
        }
    }

    /// The document of a pack that could not even be opened.
    pub fn refused(file: &Path, problem: String) -> VerifyDocument {
        VerifyDocument {
            schema: "orkpack-verify-1",
            file: file.display().to_string(),
            ok: false,
            mode: "quick",
            root: String::new(),
            file_bytes: 0,
            checked_bytes: 0,
            sections: 0,
            sections_checked: 0,
            model: None,
            unchecked: None,
            against: None,
            derived: 0,
            notes: Vec::new(),
            findings: vec![problem],
            is_pack: true,
        }
    }

    /// The document of a container of the prior system, which is no pack: what it is, and what it lacks.
    pub fn prior(file: &Path, prior: &Result<PriorPack, PriorError>) -> VerifyDocument {
        let refused = VerifyDocument::refused(file, PackError::Foreign.to_string());
        let mut document = VerifyDocument { is_pack: false, ..refused };
        match prior {
            Ok(prior) => {
                document.notes.push(kinds(prior));
                document.findings.extend(prior.findings.iter().cloned());
            }
            Err(error) => document.findings.push(error.to_string()),
        }
        document.notes.extend(PriorPack::lacks().map(|lack| format!("it has {lack}")));
        document
    }

    /// Takes in how the pack compares with a model.
    pub fn compare(&mut self, model: &Path, against: Against) {
        self.against = Some(model.display().to_string());
        self.derived = against.n_matrices;
        self.notes.extend(against.notes);
        against.findings.into_iter().for_each(|finding| self.find(finding));
    }

    /// Adds something that is wrong.
    pub fn find(&mut self, problem: String) {
        self.ok = false;
        self.findings.push(problem);
    }
}

/// What the index of a container of the prior system lists.
fn kinds(prior: &PriorPack) -> String {
    let version = prior.version;
    if prior.entries.is_empty() && prior.n_entries > 0 {
        let n = super::counted(prior.n_entries.into(), "matrix", "matrices");
        return format!("version {version}, {n}, whose entries this orkpack does not know");
    }
    let kinds = [(1, "int8"), (4, "compact int4"), (5, "int4 tiles")].map(|(kind, name)| {
        let n = prior.entries.iter().filter(|entry| entry.kind == kind).count();
        format!("{n} {name}")
    });
    let blobs = prior.entries.iter().map(|entry| entry.blob_len.saturating_add(entry.second_len));
    let bytes = blobs.fold(0, u64::saturating_add);
    let n = super::counted(prior.n_entries.into(), "matrix", "matrices");
    format!("version {version}, {n} ({}) of {} by its index", kinds.join(", "), Bytes(bytes))
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Full => "full",
        Mode::Npu => "npu",
        Mode::Quick => "quick",
    }
}

/// The document as text: one line when all is well, a line for each finding otherwise.
pub fn verification(document: &VerifyDocument) -> String {
    let mut text = String::new();
    let file = super::escape(&document.file);
    let (size, read) = (Bytes(document.file_bytes), Bytes(document.checked_bytes));
    // Writing to a string cannot fail.
    let _ = if document.ok {
        let what = match document.mode {
            "quick" => "header and index are whole".to_owned(),
            _ => format!("whole: {} sections, {read} of {size} read", document.sections_checked),
        };
        writeln!(text, "{file}: {what}\n  root {}", document.root)
    } else {
        writeln!(
            text,
            "{file}: {}, {}",
            if document.is_pack { "DAMAGED" } else { "NOT A PACK" },
            super::counted(document.findings.len() as u64, "finding", "findings")
        )
    };
    if let Some(model) = &document.model {
        let _ = writeln!(text, "  thin: the tensors of {} were held to its digests", super::escape(model));
    }
    if let Some(wanted) = &document.unchecked {
        let _ = writeln!(
            text,
            "  thin: the tensors were not checked, {} is not beside it (name it with --model)",
            super::escape(wanted)
        );
    }
    if let Some(model) = document.against.as_ref().filter(|_| document.ok) {
        let derived = super::counted(document.derived, "int8 matrix is", "int8 matrices are");
        let _ = writeln!(
            text,
            "  against {}: every tensor is its own, and {derived} what its weights give",
            super::escape(model)
        );
    }
    for note in &document.notes {
        let _ = writeln!(text, "  note: {}", super::escape(note));
    }
    for finding in &document.findings {
        let _ = writeln!(text, "  {}", super::escape(finding));
    }
    text
}
