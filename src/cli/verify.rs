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
use crate::source::check_packed;

pub fn verify(arguments: VerifyArgs, interrupted: Arc<AtomicBool>) -> Done {
    let VerifyArgs { mut packs, quick, expect, common } = arguments;
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
    let expect: Option<Digest> = expect.map(|root| root.parse()).transpose().map_err(|_| {
        Error::usage("--expect: expected the 64 hexadecimal digits that `orkpack verify` prints as root")
    })?;
    let mode = if quick { Mode::Quick } else { Mode::Full };
    let progress = Mutex::new(terminal(&common, interrupted));
    let mut worst = 0;
    for path in &packs {
        let (document, code) = one(path, mode, expect, &progress)?;
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
    if let (true, Err(problem)) = (pack.is_fat(), check_packed(&pack, &Limits::default())) {
        document.ok = false;
        document.findings.push(problem.to_string());
    }
    if let Some(expected) = expect.filter(|expected| *expected != report.root) {
        document.ok = false;
        document.findings.push(format!("the root is {}, expected {expected}", report.root));
    }
    let code = u8::from(!document.ok);
    Ok((document, code))
}
