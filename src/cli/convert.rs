//! `orkpack convert`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::{Choice as ChoiceArgs, ConvertArgs, ObjectiveArg, SharesArg};
use super::output::{Output, say};
use super::{Done, n_threads, profile, terminal};
use crate::convert::{Choice, Request, StatisticsFrom, prepare};
use crate::error::{AtFile, Error};
use crate::pack::Existing;
use crate::plan::{Objective, Shares};
use crate::report::{self, ConvertDocument};
use crate::source;

pub fn convert(arguments: ConvertArgs, interrupted: Arc<AtomicBool>) -> Done {
    let ConvertArgs { model, output, choice: words, thin, dry_run, force, allow_nonfinite, common } =
        arguments;
    let model = one_model(model)?;
    let output = output.unwrap_or_else(|| source::beside(&model, "orkpack"));
    let request = Request {
        choice: choice(&words)?,
        model,
        output: output.clone(),
        existing: if force || dry_run { Existing::Replace } else { Existing::Keep },
        plan: words.plan,
        thin,
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
        ConvertDocument::dry(&prepared, &output, prepared.layout()?.file_len, prepared.sizes()?)
    } else {
        {
            let outcome = prepared.write(&mut progress)?;
            ConvertDocument::written(&prepared, &outcome, prepared.sizes()?)
        }
    };
    if common.json {
        Output::new().json(&document)?
    } else {
        Output::new().text(&document.text())?
    }
    Ok(0)
}

/// The model that was named. A shell's pattern may name every file of a set; nothing else comes in several words.
fn one_model(models: Vec<PathBuf>) -> Result<PathBuf, Error> {
    match &models[..] {
        [model] => source::locate(model).at(model),
        several => source::one_set(several).ok_or_else(|| {
            let name = |i: usize| several.get(i).map(|path| path.display().to_string()).unwrap_or_default();
            let (first, second) = (name(0), name(1));
            Error::usage(format!(
                "one model at a time, and its output after -o: `orkpack convert {first} -o OUT.orkpack` \
                 (found also `{second}`); of a split model name any one shard"
            ))
        }),
    }
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
        shares: match words.shares {
            SharesArg::Auto => Shares::Auto,
            SharesArg::Experts => Shares::Experts,
            SharesArg::Rows => Shares::Rows,
        },
        force_hot: words.force_hot.clone(),
        statistics,
        ram: words.ram,
        accept_foreign: words.accept_foreign_statistics,
    })
}
