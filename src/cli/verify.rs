//! `orkpack verify`.

use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::args::VerifyArgs;
use super::output::Output;
use super::{Done, Stop, files_here, terminal};
use crate::bytes::{Io, Limits};
use crate::error::Error;
use crate::pack::verify::{Mode, verify as check};
use crate::pack::{Digest, Pack};
use crate::progress::{Progress, Unit};
use crate::report::{VerifyDocument, verification};
use crate::source::{OpenError, PackedModel, check_packed};

pub fn verify(arguments: VerifyArgs, interrupted: Arc<AtomicBool>) -> Done {
    let VerifyArgs { mut packs, quick, model, expect, common } = arguments;
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
    if model.is_some() && packs.len() > 1 {
        let n = packs.len();
        return Err(Error::usage(format!("--model names one GGUF, but there are {n} packs")).into());
    }
    let expect: Option<Digest> = expect.map(|root| root.parse()).transpose().map_err(|_| {
        Error::usage("--expect: expected the 64 hexadecimal digits that `orkpack verify` prints as root")
    })?;
    let mode = if quick { Mode::Quick } else { Mode::Full };
    let progress = Mutex::new(terminal(&common, interrupted));
    let mut worst = 0;
    for path in &packs {
        let (document, code) = one(path, mode, model.as_deref(), expect, &progress)?;
        worst = worst.max(code);
        if common.json {
            Output::new().json(&document)?;
        } else {
            Output::new().text(&verification(&document))?;
        }
    }
    Ok(worst)
}

/// One pack and its exit code: 1 when it is damaged, 2 when it cannot be read as a pack at all.
fn one(
    path: &Path,
    mode: Mode,
    model: Option<&Path>,
    expect: Option<Digest>,
    progress: &Mutex<impl Progress + Send>,
) -> Result<(VerifyDocument, u8), Stop> {
    let pack = match Pack::open(path, Io::Map) {
        Ok(pack) => pack,
        Err(error) if error.is_damage() => return Ok((VerifyDocument::refused(path, error.to_string()), 1)),
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
    let report = check(&pack, mode, &|bytes| hear(&mut |progress| progress.advance(bytes)));
    hear(&mut |progress| progress.end());
    let mut document = VerifyDocument::of(path, &report);
    if let Err(problem) = check_packed(&pack, &Limits::default()) {
        document.find(problem.to_string());
    } else if pack.is_fat() && model.is_some() {
        return Err(Error::from(OpenError::NotThin).or_at(path).into());
    } else if !pack.is_fat() && mode == Mode::Full {
        tensors(pack, model, &mut document, &|bytes| hear(&mut |progress| progress.advance(bytes)))
            .map_err(|error| Error::from(error).or_at(path))?;
    }
    if let Some(expected) = expect.filter(|expected| *expected != report.root) {
        document.find(format!("the root is {}, expected {expected}", report.root));
    }
    let code = u8::from(!document.ok);
    Ok((document, code))
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
