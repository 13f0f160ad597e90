//! `orkpack calibrate` and `orkpack merge`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::{CalibrateArgs, MergeArgs};
use super::output::Output;
use super::{Done, n_threads, terminal};
use crate::bytes::{Io, Limits};
use crate::calibrate::{self, Statistics};
use crate::convert::{Subject, Texts, beside, check_output, count, write_beside};
use crate::error::{AtFile, Error};
use crate::model::Outline;
use crate::report;
use crate::source;

/// From this share of experts on, those never seen are a fault of the text rather than of the experts.
const MANY_UNSEEN: f64 = 0.1;

pub fn calibrate(arguments: CalibrateArgs, interrupted: Arc<AtomicBool>) -> Done {
    let CalibrateArgs { model: path, prompts, output, force, common } = arguments;
    let path = source::locate(&path).at(&path)?;
    let output = output.unwrap_or_else(|| beside(&path));
    check_output(&[source::files_of(&path), prompts.clone()].concat(), &output, force)?;
    let source = source::open(&path, Io::Map, &Limits::default()).at(&path)?.source();
    let outline = Outline::of_runnable(source.as_ref()).at(&path)?;
    let subject = Subject { path: &path, source: &source, outline: &outline, pack: None };
    let mut progress = terminal(&common, interrupted);
    let texts = if prompts.is_empty() { Texts::BuiltIn } else { Texts::Files(&prompts) };
    let statistics = count(subject, texts, n_threads(&common), &mut progress)?;
    keep(&statistics, &output, common.json)
}

pub fn merge(arguments: MergeArgs) -> Done {
    let MergeArgs { statistics, output, weights, force, common } = arguments;
    check_output(&statistics, &output, force)?;
    if !weights.is_empty() && weights.len() != statistics.len() {
        let (given, needed) = (weights.len(), statistics.len());
        return Err(Error::usage(format!("--weights has {given} weights for {needed} documents")).into());
    }
    let mut documents = Vec::with_capacity(statistics.len());
    for (i, path) in statistics.iter().enumerate() {
        let document = Statistics::from_json(&std::fs::read(path).at(path)?).at(path)?;
        documents.push((document, weights.get(i).copied().unwrap_or(1)));
    }
    keep(&calibrate::merge(&documents)?, &output, common.json)
}

fn keep(statistics: &Statistics, output: &Path, json: bool) -> Done {
    let document = statistics.to_json()?;
    write_beside(output, &document)?;
    if json {
        Output::new().bytes(&document)?;
        return Ok(0);
    }
    let coverage = statistics.coverage();
    let mut text = format!(
        "{}: {} tokens, {} of {} experts never seen (measured)\n",
        report::escape(&output.display().to_string()),
        coverage.tokens,
        coverage.never_seen.len(),
        coverage.n_experts
    );
    if coverage.is_thin() {
        let wanted = coverage.tokens_wanted;
        text += &format!("note: too few tokens to rank every expert; {wanted} give each about 20 calls\n");
    }
    let unseen = coverage.unseen_share();
    if unseen >= MANY_UNSEEN {
        text += &format!(
            "warning: {:.1} % of the experts were never seen, and a plan ranks them last whatever they are worth; \
             calibrate with more text, of the kind that the model will read\n",
            100.0 * unseen
        );
    } else if unseen > 0.0 {
        text += "note: a plan ranks experts that were never seen last, and lists them\n";
    }
    Output::new().text(&text)?;
    Ok(0)
}
