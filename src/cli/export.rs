//! `orkpack export`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::{ExportArgs, ExportFormat};
use super::output::Output;
use super::{Done, terminal};
use crate::bytes::Io;
use crate::convert::{export as write, export_paths};
use crate::error::{AtFile, Error};
use crate::pack::{Existing, Pack};
use crate::report::ExportDocument;

pub fn export(arguments: ExportArgs, interrupted: Arc<AtomicBool>) -> Done {
    let ExportArgs { pack: path, to: ExportFormat::Gguf, output, force, common } = arguments;
    let pack = Pack::open(&path, Io::Map).at(&path)?;
    if !pack.is_fat() {
        return Err(Error::usage("a thin pack: it does not hold the model's tensors").or_at(&path).into());
    }
    let existing = if force { Existing::Replace } else { Existing::Keep };
    let paths = export_paths(&pack, output.as_deref())?;
    let lengths = write(&pack, &paths, existing, &mut terminal(&common, interrupted))?;
    let document = ExportDocument::of(&path, &paths, &lengths);
    if common.json {
        Output::new().json(&document)?;
    } else {
        Output::new().text(&document.text())?;
    }
    Ok(0)
}
