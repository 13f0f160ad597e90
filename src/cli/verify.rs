//! `orkpack verify`.

use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::args::VerifyArgs;
use super::output::{self, Output};
use super::{Done, Stop, files_here, terminal};
use crate::bytes::{FileBytes, Io, Limits};
use crate::check::{self, bytes_against};
use crate::error::{AtFile, Error};
use crate::interop::PriorPack;
use crate::pack::verify::{Mode, verify as check_bytes};
use crate::pack::{Digest, Pack, PackError};
use crate::progress::{Progress, Unit};
use crate::report::{VerifyDocument, verification};
use crate::source::{self, OpenError, PackedModel, check_packed};

pub fn verify(arguments: VerifyArgs, interrupted: Arc<AtomicBool>) -> Done {
    let VerifyArgs { mut packs, quick, model, against, expect, common } = arguments;
    if packs.is_empty() {
        packs = files_here("orkpack")?;
    }
    if packs.is_empty() {
        return Err(Error::usage("there is no pack (*.orkpack) in this folder; name one").into());
    }
    if expect.is_some() && packs.len() > 1 {
        return Err(
            Error::usage(format!("--expect names one root, but there are {} packs", packs.len())).into()
        );
    }
    for (word, _) in
        [("--model", &model), ("--against", &against)].iter().filter(|(_, named)| named.is_some())
    {
        let n = packs.len();
        if n > 1 {
            return Err(Error::usage(format!("{word} names one GGUF, but there are {n} packs")).into());
        }
    }
    let expect: Option<Digest> = expect.map(|root| root.parse()).transpose().map_err(|_| {
        Error::usage("--expect: expected the 64 hexadecimal digits that `orkpack verify` prints as root")
    })?;
    let mode = if quick { Mode::Quick } else { Mode::Full };
    let asked = Asked { mode, model: model.as_deref(), against: against.as_deref(), expect };
    let progress = Mutex::new(terminal(&common, interrupted));
    let mut worst = 0;
    for path in &packs {
        let (document, code) = match one(path, asked, &progress) {
            // The other packs of a folder are not to blame.
            Err(Stop::Failed(error)) if packs.len() > 1 => {
                output::error(&error);
                worst = worst.max(error.exit_code());
                continue;
            }
            done => done?,
        };
        worst = worst.max(code);
        if common.json {
            Output::new().json(&document)?;
        } else {
            Output::new().text(&verification(&document))?;
        }
    }
    Ok(worst)
}

/// What of a pack is to be checked.
#[derive(Clone, Copy)]
struct Asked<'a> {
    mode: Mode,
    model: Option<&'a Path>,
    against: Option<&'a Path>,
    expect: Option<Digest>,
}

/// One pack and its exit code: 1 when it is damaged, 2 when it cannot be read as a pack at all.
fn one(
    path: &Path,
    asked: Asked<'_>,
    progress: &Mutex<impl Progress + Send>,
) -> Result<(VerifyDocument, u8), Stop> {
    let Asked { mode, model, against, expect } = asked;
    let pack = match Pack::open(path, Io::Map) {
        Ok(pack) => pack,
        Err(error) if error.is_damage() => return Ok((VerifyDocument::refused(path, error.to_string()), 1)),
        Err(PackError::Foreign) => return Ok((prior(path)?, 2)),
        Err(error) => return Err(Error::from(error).or_at(path).into()),
    };
    let hear = |done: &mut dyn FnMut(&mut dyn Progress)| {
        if let Ok(mut progress) = progress.lock() {
            done(&mut *progress);
        }
    };
    let total = pack.sections().iter().map(|section| section.len).sum();
    hear(&mut |progress| {
        progress.begin("verifying", if mode == Mode::Quick { 0 } else { total }, Unit::Bytes)
    });
    let report = check_bytes(&pack, mode, &|bytes| hear(&mut |progress| progress.advance(bytes)));
    hear(&mut |progress| progress.end());
    let mut document = VerifyDocument::of(path, &report);
    if let Some(model) = against {
        let opened = source::open(model, Io::Map, &Limits::default()).at(model)?;
        hear(&mut |progress| progress.begin("deriving again", bytes_against(&pack), Unit::Bytes));
        let found = check::against(&pack, opened.source().as_ref(), &|bytes| {
            hear(&mut |progress| progress.advance(bytes))
        });
        hear(&mut |progress| progress.end());
        document.compare(model, found.map_err(|error| error.or_at(model))?);
    }
    if mode == Mode::Full
        && let Err(problem) = check_packed(&pack, &Limits::default())
    {
        document.find(problem.to_string());
    } else if pack.is_fat() && model.is_some() {
        return Err(Error::from(OpenError::NotThin).or_at(path).into());
    } else if !pack.is_fat() && mode == Mode::Full && against.is_none() {
        tensors(pack, model, &mut document, &|bytes| hear(&mut |progress| progress.advance(bytes)))
            .map_err(|error| Error::from(error).or_at(path))?;
    }
    if let Some(expected) = expect.filter(|expected| *expected != report.root) {
        document.find(format!("the root is {}, expected {expected}", report.root));
    }
    let code = u8::from(!document.ok);
    Ok((document, code))
}

/// What can be said of a container of the prior system.
fn prior(path: &Path) -> Result<VerifyDocument, Error> {
    let file = FileBytes::open(path, Io::Map).at(path)?;
    Ok(VerifyDocument::prior(path, &PriorPack::read(&file)))
}

/// Checks the tensors that a thin pack is bound to, if they are here.
fn tensors(
    pack: Pack,
    model: Option<&Path>,
    document: &mut VerifyDocument,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), OpenError> {
    match PackedModel::thin(pack, model, Io::Map, &Limits::default()) {
        Ok(model) => {
            document.model = model.bound_to().map(|path| path.display().to_string());
            model.check_bound(progress).iter().for_each(|wrong| document.find(wrong.to_string()));
        }
        // Nothing is wrong with a pack whose model is elsewhere; the document says that it was not looked at.
        Err(OpenError::Thin { wanted }) if model.is_none() => document.unchecked = Some(wanted),
        Err(OpenError::Model { path, error }) if matches!(*error, OpenError::OtherTensor { .. }) => {
            document.model = Some(path.display().to_string());
            document.find(error.to_string());
        }
        Err(error) => return Err(error),
    }
    Ok(())
}
