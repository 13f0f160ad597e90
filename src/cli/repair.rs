//! `orkpack repair`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::RepairArgs;
use super::output::Output;
use super::{Done, terminal};
use crate::check;
use crate::convert::refuse_same_file;
use crate::pack::Existing;
use crate::report::RepairDocument;
use crate::source;

pub fn repair(arguments: RepairArgs, interrupted: Arc<AtomicBool>) -> Done {
    let RepairArgs { pack, model, output, force, common } = arguments;
    let in_place = output.is_none();
    let output = output.unwrap_or_else(|| pack.clone());
    if let Some(model) = &model {
        refuse_same_file(&source::files_of(model), &output)?;
    }
    let existing = if force || in_place { Existing::Replace } else { Existing::Keep };
    let progress = &mut terminal(&common, interrupted);
    let repaired = check::repair(&pack, model.as_deref(), &output, existing, progress)?;
    let document = RepairDocument::of(&pack, &output, &repaired);
    if common.json {
        Output::new().json(&document)?;
    } else {
        Output::new().text(&document.text())?;
    }
    Ok(u8::from(!document.ok))
}
