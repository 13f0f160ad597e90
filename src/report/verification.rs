//! The result of `orkpack verify`.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

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
    /// What is wrong, a line each.
    pub findings: Vec<String>,
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
            findings: report.findings().map(|finding| finding.to_string()).collect(),
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
            findings: vec![problem],
        }
    }

    /// Adds something that is wrong.
    pub fn find(&mut self, problem: String) {
        self.ok = false;
        self.findings.push(problem);
    }
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
            "{file}: DAMAGED, {}",
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
    for finding in &document.findings {
        let _ = writeln!(text, "  {}", super::escape(finding));
    }
    text
}
