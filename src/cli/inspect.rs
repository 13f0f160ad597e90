//! `orkpack inspect`.

use super::args::InspectArgs;
use super::output::Output;
use super::{Done, the_model_here};
use crate::bytes::{Io, Limits};
use crate::error::AtFile;
use crate::model::{Model, Outline};
use crate::report::{InspectDocument, inspection};
use crate::source;

pub fn inspect(arguments: InspectArgs) -> Done {
    let path = arguments.model.map_or_else(the_model_here, Ok)?;
    let path = source::locate(&path).at(&path)?;
    let opened = source::open(&path, Io::Map, &Limits::default()).at(&path)?;
    let source = opened.source();
    let problem = Model::describe(source.as_ref()).err().map(|problem| problem.to_string());
    let outline = Outline::of(source.as_ref()).ok();
    let shape = outline.as_ref().map(Outline::shape);
    let (pack, tensors) = (opened.pack(), arguments.tensors);
    let document = InspectDocument::of(&path, source.as_ref(), shape, problem, pack, tensors);
    if arguments.common.json {
        Output::new().json(&document)?;
    } else {
        Output::new().text(&inspection(&document))?;
    }
    Ok(0)
}
