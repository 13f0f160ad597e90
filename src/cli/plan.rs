//! `orkpack plan`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::args::PlanArgs;
use super::convert::choice;
use super::output::{Output, say};
use super::{Done, n_threads, terminal, the_model_here};
use crate::bytes::{Io, Limits};
use crate::convert::{
    StatisticsFrom, Subject, check_output, find, find_or_run, limits, request, write_beside,
};
use crate::error::{AtFile, Error};
use crate::model::Outline;
use crate::plan::{Plan, Planner, Routing, Skew};
use crate::report::{self, PlanDocument};
use crate::source;

pub fn plan(arguments: PlanArgs, interrupted: Arc<AtomicBool>) -> Done {
    let common = &arguments.common;
    let path = arguments.model.clone().map_or_else(the_model_here, Ok)?;
    let path = source::locate(&path).at(&path)?;
    for output in arguments.report.iter().chain(&arguments.output) {
        check_output(&source::files_of(&path), output, arguments.force)?;
    }
    let opened = source::open(&path, Io::Map, &Limits::default()).at(&path)?;
    let source = opened.source();
    let outline = Outline::of(source.as_ref()).at(&path)?;
    let subject = Subject { path: &path, source: &source, outline: &outline, pack: opened.pack() };
    let choice = choice(&arguments.choice)?;
    let mut progress = terminal(common, interrupted);
    let found = match &choice.statistics {
        StatisticsFrom::Prompts(_) => {
            let threads = n_threads(common);
            Some(find_or_run(
                subject,
                &choice.statistics,
                choice.accept_foreign,
                None,
                threads,
                &mut progress,
            )?)
        }
        from => find(subject, from, choice.accept_foreign, &mut progress)?,
    };
    if let Some(line) = limits(&outline, found.as_ref()) {
        say(common.quiet, &line);
    }
    let known = match &found {
        Some(found) => Routing::Measured(&found.statistics),
        None => Routing::Assumed(Skew::RANGE),
    };
    if let Some(file) = &arguments.choice.plan {
        let plan = Plan::from_json(&std::fs::read(file).at(file)?).at(file)?;
        plan.check(outline.shape(), &choice.profile).at(file)?;
        return finish(&arguments, &PlanDocument::of(&plan), &format!("as in {}", file.display()));
    }
    let request = request(outline.shape(), known, &choice);
    let planner = Planner::new(&request)?;
    let plan = planner.plan()?;
    let range = match (arguments.sweep, &arguments.report) {
        (None, Some(_)) => Some((planner.least_budget(), planner.most_budget())),
        (range, _) => range,
    };
    let mut document = PlanDocument {
        plan: &plan,
        explanations: planner.explain(&plan, &arguments.explain)?,
        sweep: range.map(|(from, to)| planner.sweep(from, to)).transpose()?.unwrap_or_default(),
        times: Vec::new(),
        assumptions: choice.profile.assumptions(),
    };
    let source = report::routing(found.as_ref());
    if let Some(report) = &arguments.report {
        document.times = planner.layer_times(&plan);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        write_beside(report, report::page(&document, &name, &source).as_bytes())?;
        say(common.quiet, &format!("report written to {}", report.display()));
    }
    finish(&arguments, &document, &source)
}

/// Writes and prints what was planned, and says whether it gains as much as is required.
fn finish(arguments: &PlanArgs, document: &PlanDocument<'_>, source: &str) -> Done {
    let (plan, common) = (document.plan, &arguments.common);
    if let Some(output) = &arguments.output {
        write_beside(output, &plan.to_json()?)?;
        say(common.quiet, &format!("plan written to {}", output.display()));
    }
    if common.json {
        Output::new().json(document)?;
    } else {
        Output::new().text(&report::planned(document, source))?;
    }
    Ok(gain(plan, arguments.require_gain, common.quiet)?)
}

/// 0 when some regime's planned speed is at least `least` times the CPU's.
fn gain(plan: &Plan, least: Option<f64>, quiet: bool) -> Result<u8, Error> {
    let Some(least) = least else { return Ok(0) };
    if !least.is_finite() || least <= 0.0 {
        return Err(Error::usage(format!("--require-gain {least}: expected a factor like 1.1")));
    }
    let best = plan.forecasts.iter().map(|forecast| forecast.gain.value).fold(0.0, f64::max);
    if best >= least {
        return Ok(0);
    }
    say(quiet, &format!("the best predicted gain is {best:.2}×, below the required {least:.2}× (estimated)"));
    Ok(1)
}
