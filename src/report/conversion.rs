//! The result of `orkpack convert`.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::convert::{Outcome, Prepared, Sizes};
use crate::units::Bytes;

/// Matrices that are listed in text.
const MOST_LINES: usize = 10;

/// A finished conversion as JSON (schema: `formats/convert.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct ConvertDocument {
    /// `orkpack-convert-1`.
    pub schema: &'static str,
    /// The pack's path.
    pub output: String,
    /// Whether it was written (not after `--dry-run`).
    pub written: bool,
    /// Its exact length in bytes.
    pub file_bytes: u64,
    /// Its length with the source tensors; `null` where these cannot all be given back.
    pub fat_bytes: Option<u64>,
    /// Its length without them.
    pub thin_bytes: u64,
    /// Its digest; `null` after `--dry-run`.
    pub root: Option<String>,
    /// Expert matrices with an int8 copy.
    pub hot_matrices: u64,
    /// Bytes of these on the device.
    pub npu_bytes: u64,
    /// Chunks they lie in.
    pub chunks: u64,
    /// Mean relative RMS error of the int8 copies, measured; `null` where none were made.
    pub mean_error: Option<f64>,
    /// The largest of these errors, measured; `null` where none were made.
    pub worst_error: Option<f64>,
    /// Weights that were not finite and became zero in the int8 copies.
    pub clamped: u64,
    /// Where the source rows hold NaN or infinity, a line for each matrix.
    pub not_finite: Vec<String>,
    /// Where the routing statistics are; `null` when a plan was given.
    pub statistics: Option<String>,
    /// The plan's answer in one sentence.
    pub verdict: String,
}

impl ConvertDocument {
    /// What a dry run knows.
    pub fn dry(prepared: &Prepared, output: &Path, file_bytes: u64, sizes: Sizes) -> ConvertDocument {
        let plan = &prepared.plan;
        let found = prepared.statistics.as_ref().and_then(|found| found.file.as_ref());
        ConvertDocument {
            schema: "orkpack-convert-1",
            output: output.display().to_string(),
            written: false,
            file_bytes,
            fat_bytes: sizes.fat.map(|size| size.0),
            thin_bytes: sizes.thin.0,
            root: None,
            hot_matrices: plan.matrices().count() as u64,
            npu_bytes: plan.footprint.weight_bytes,
            chunks: plan.chunks.len() as u64,
            mean_error: None,
            worst_error: None,
            clamped: 0,
            not_finite: Vec::new(),
            statistics: found.map(|file| file.display().to_string()),
            verdict: plan.verdict.sentence.clone(),
        }
    }

    /// What a finished conversion knows.
    pub fn written(prepared: &Prepared, outcome: &Outcome, sizes: Sizes) -> ConvertDocument {
        ConvertDocument {
            written: true,
            root: Some(outcome.root.to_string()),
            mean_error: outcome.worst_error.map(|_| outcome.mean_error),
            worst_error: outcome.worst_error.map(|(_, error)| error),
            clamped: outcome.n_clamped,
            not_finite: outcome.not_finite.iter().map(ToString::to_string).collect(),
            ..ConvertDocument::dry(prepared, &outcome.output, outcome.file_len.0, sizes)
        }
    }

    /// The document as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let (output, size) = (super::escape(&self.output), Bytes(self.file_bytes));
        // Writing to a string cannot fail.
        let _ = match &self.root {
            None => {
                let sizes = [("fat", self.fat_bytes), ("thin", Some(self.thin_bytes))];
                let size = |(kind, bytes): (&str, Option<u64>)| {
                    Some(format!("{} bytes ({}) {kind}", bytes?, Bytes(bytes?)))
                };
                let sizes: Vec<String> = sizes.into_iter().filter_map(size).collect();
                writeln!(text, "{output}: would be {}; nothing was written", sizes.join(", "))
            }
            Some(root) => writeln!(text, "{output}: {} bytes ({size})\n  root {root}", self.file_bytes),
        };
        let _ = writeln!(
            text,
            "  {} for the NPU in {}, {}",
            super::counted(self.hot_matrices, "expert matrix", "expert matrices"),
            super::counted(self.chunks, "chunk", "chunks"),
            Bytes(self.npu_bytes)
        );
        if let (Some(mean), Some(worst)) = (self.mean_error, self.worst_error) {
            let _ = writeln!(
                text,
                "  int8 copies are off by {:.2} % RMS on average, {:.2} % at most (measured)",
                100.0 * mean,
                100.0 * worst
            );
        }
        if !self.not_finite.is_empty() {
            let matrices = super::counted(self.not_finite.len() as u64, "matrix", "matrices");
            let clamped = self.clamped;
            let _ = writeln!(
                text,
                "  {matrices} with NaN or infinity: {clamped} weights became zero for the NPU, source rows stay as they are"
            );
        }
        for line in self.not_finite.iter().take(MOST_LINES) {
            let _ = writeln!(text, "    {}", super::escape(line));
        }
        if let Some(more) = self.not_finite.len().checked_sub(MOST_LINES).filter(|more| *more > 0) {
            let _ = writeln!(text, "    and {more} more (all with --json)");
        }
        text
    }
}
