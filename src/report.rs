//! Plans, checks, conversions and runs, as text for people and as JSON for programs. It computes nothing.
//!
//! Each kind of result is a file: its text and its document (schema in `formats/`). Every number says how it came
//! about: measured (counted or timed here), simulated (the software NPU and the profile's clock), or estimated.

mod conversion;
mod explaining;
mod exporting;
mod inspection;
mod page;
mod planning;
mod repairing;
mod running;
mod verification;

use serde::Serialize;

pub use conversion::ConvertDocument;
pub use explaining::{PlanDocument, planned};
pub use exporting::{ExportDocument, ExportedPart};
pub use inspection::{EntryPart, FilePart, FolderDocument, InspectDocument, Inspected, inspection};
pub use page::page;
pub use planning::{plan, routing};
pub use repairing::RepairDocument;
pub use running::{
    ComparisonPart, ContextPart, DevicePart, PerplexityPart, RunDocument, SpeedPart, TurnPart, run,
};
pub use verification::{VerifyDocument, verification};

/// A document as one line of JSON, in which nothing is left that a terminal would obey.
///
/// # Errors
///
/// What serde_json says of a float that is not finite.
pub fn json(document: &impl Serialize) -> Result<String, serde_json::Error> {
    // serde_json escapes what JSON demands. The others stand inside strings, and their numbers have four digits.
    let escape = |c: char| {
        if is_obeyed(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() }
    };
    Ok(serde_json::to_string(document)?.chars().map(escape).collect())
}

/// `1 chunk`, `2 chunks`.
pub(crate) fn counted(n: u64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// A file's text with what a terminal would obey made visible.
pub fn escape(text: &str) -> String {
    let escape = |c: char| if is_obeyed(c) { c.escape_default().collect() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// Control characters, and those that turn the direction of what follows.
fn is_obeyed(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
