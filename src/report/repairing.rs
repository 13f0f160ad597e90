//! The result of `orkpack repair`.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::check::Repaired;

/// A repair as JSON (schema: `formats/repair.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct RepairDocument {
    /// `orkpack-repair-1`.
    pub schema: &'static str,
    /// The damaged pack.
    pub pack: String,
    /// The repaired one; `null` when nothing was written.
    pub output: Option<String>,
    /// Whether the pack is whole now, or was.
    pub ok: bool,
    /// Its root, which a repair does not change.
    pub root: String,
    /// Sections that were made again.
    pub rebuilt: Vec<String>,
    /// Runs of padding that were made zero again.
    pub padding: u64,
    /// Why nothing was written, a line each.
    pub refused: Vec<String>,
}

impl RepairDocument {
    /// The document of a repair.
    pub fn of(pack: &Path, output: &Path, repaired: &Repaired) -> RepairDocument {
        let ok = repaired.refused.is_empty();
        let is_written = ok && repaired.is_damaged();
        RepairDocument {
            schema: "orkpack-repair-1",
            pack: pack.display().to_string(),
            output: is_written.then(|| output.display().to_string()),
            ok,
            root: repaired.root.to_string(),
            rebuilt: if ok { repaired.rebuilt.clone() } else { Vec::new() },
            padding: if ok { repaired.padding } else { 0 },
            refused: repaired.refused.clone(),
        }
    }

    /// The document as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = match &self.output {
            Some(output) => writeln!(text, "{}: whole again\n  root {}", super::escape(output), self.root),
            None if self.ok => writeln!(text, "{}: whole, nothing to repair", super::escape(&self.pack)),
            None => writeln!(
                text,
                "{}: cannot be repaired, nothing was written; convert the model again",
                super::escape(&self.pack)
            ),
        };
        for section in &self.rebuilt {
            let _ = writeln!(text, "  {} was made again from its source rows", super::escape(section));
        }
        if self.padding > 0 {
            let runs = super::counted(self.padding, "run of padding is", "runs of padding are");
            let _ = writeln!(text, "  {runs} zero again");
        }
        for why in &self.refused {
            let _ = writeln!(text, "  {}", super::escape(why));
        }
        text
    }
}
