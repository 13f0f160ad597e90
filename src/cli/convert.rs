//! `orkpack convert`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::{Choice as ChoiceArgs, ConvertArgs, ObjectiveArg};
use super::output::{Output, say};
use super::{Done, n_threads, profile, terminal};
use crate::convert::{Choice, Request, StatisticsFrom, prepare};
use crate::error::Error;
use crate::pack::Existing;
use crate::plan::Objective;
use crate::report::{self, ConvertDocument};

pub fn convert(arguments: ConvertArgs, interrupted: Arc<AtomicBool>) -> Done {
    let ConvertArgs { model, output, choice: words, dry_run, force, allow_nonfinite, common } = arguments;
    let output = output.unwrap_or_else(|| model.with_extension("orkpack"));
    let request = Request {
        choice: choice(&words)?,
        model,
        output: output.clone(),
        existing: if force || dry_run { Existing::Replace } else { Existing::Keep },
        plan: words.plan,
        allow_nonfinite,
        n_threads: n_threads(&common),
        keep_statistics: !dry_run,
    };
    let mut progress = terminal(&common, interrupted);
    let prepared = prepare(request, &mut progress)?;
    let routing = report::routing(prepared.statistics.as_ref());
    if !common.quiet && !common.json {
        say(false, &report::plan(&prepared.plan, &routing));
    }
    let document = if dry_run {
        ConvertDocument::dry(&prepared, &output, prepared.layout()?.file_len)
    } else {
        ConvertDocument::written(&prepared, &prepared.write(&mut progress)?)
    };
    if common.json {
        Output::new().json(&document)?
    } else {
        Output::new().text(&document.text())?
    }
    Ok(0)
}

/// The words of a command as a choice.
pub fn choice(words: &ChoiceArgs) -> Result<Choice, Error> {
    let statistics = match words {
        ChoiceArgs { routing: Some(file), .. } => StatisticsFrom::File(file.clone()),
        ChoiceArgs { imatrix: Some(file), .. } => StatisticsFrom::Imatrix(file.clone()),
        ChoiceArgs { prompts, .. } if !prompts.is_empty() => StatisticsFrom::Prompts(prompts.clone()),
        _ => StatisticsFrom::Found,
    };
    Ok(Choice {
        profile: profile(&words.profile)?,
        budget: words.budget,
        domains: words.domains,
        objective: match words.objective {
            None => Objective::Auto,
            Some(ObjectiveArg::Decode) => Objective::Decode,
            Some(ObjectiveArg::Prefill) => Objective::Prefill,
            Some(ObjectiveArg::Hits) => Objective::Hits,
        },
        force_hot: words.force_hot.clone(),
        statistics,
        ram: words.ram,
        accept_foreign: words.accept_foreign_statistics,
    })
}
