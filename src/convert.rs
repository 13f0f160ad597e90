//! From a GGUF to a pack, on one page: the table of contents of the house.
//!
//! Calibrate, plan, quantise, tile, write. One chunk is in memory at a time, whatever the model's size; the output
//! appears under its name only when it is complete and on the disk.

mod contents;
mod export;
mod fill;
mod output;
mod prompts;
mod statistics;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::blocks::{NotFinite, not_finite};
use crate::bytes::{Io, Limits};
use crate::error::{AtFile, Error, Failure};
use crate::executor::WeightTable;
use crate::model::{ModelShape, Outline};
use crate::pack::verify::{Mode, verify};
use crate::pack::{
    Contents, Digest, Existing, FileContents, Finished, Giver, Layout, Manifest, Pack, PackError, Partial,
    SourceTensor, Writer,
};
use crate::plan::{Objective, Plan, PlanRequest, Routing, Shares};
use crate::profile::DeviceProfile;
use crate::progress::{Progress, Unit};
use crate::source::{self, Opened};
use crate::tensor::{MatrixId, TensorInfo, TensorSource};
use crate::tokenizer::Tokenizer;
use crate::units::{Bytes, ExpertId, LayerId};
use contents::{chunk_contents, cuts, manifest, matrices};
use fill::Errors;

pub use export::{export, export_paths};
pub use output::{check_output, refuse_same_file, write_beside, write_private};
pub use prompts::{Texts, count_texts};
pub use statistics::{FoundStatistics, StatisticsFrom, Subject, beside, count, find, find_or_run, limits};

/// What decides the hot set.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The device.
    pub profile: DeviceProfile,
    /// Weights in one domain; `None`: what the profile leaves.
    pub budget: Option<Bytes>,
    /// Domains to use.
    pub domains: u32,
    /// What to plan for.
    pub objective: Objective,
    /// What may be shared between the NPU and the CPU.
    pub shares: Shares,
    /// Experts to keep hot whatever they cost.
    pub force_hot: Vec<(LayerId, ExpertId)>,
    /// Where routing statistics come from.
    pub statistics: StatisticsFrom,
    /// Memory of the board; `None`: what the profile says.
    pub ram: Option<Bytes>,
    /// Statistics of another model of the same shape are welcome.
    pub accept_foreign: bool,
}

/// What to convert, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// A GGUF, or a pack to pack anew.
    pub model: PathBuf,
    /// Where the pack goes.
    pub output: PathBuf,
    /// Whether an existing output may be replaced.
    pub existing: Existing,
    /// What decides the hot set.
    pub choice: Choice,
    /// A plan to use instead of making one.
    pub plan: Option<PathBuf>,
    /// The source tensors are left out and known by digest.
    pub thin: bool,
    /// NaN and infinite weights become zero instead of an error.
    pub allow_nonfinite: bool,
    /// Threads.
    pub n_threads: usize,
    /// New statistics are kept beside the output, so that they need not be counted again, and the output is locked
    /// from the start. Not for a dry run, which writes nothing.
    pub keep_statistics: bool,
}

/// A conversion that is about to write: everything decided, nothing written.
pub struct Prepared {
    request: Request,
    /// The output, locked before the long work begins; [`Prepared::write`] takes it.
    partial: Mutex<Option<Partial>>,
    opened: Opened,
    source: Arc<dyn TensorSource>,
    /// The tensors with their places in the GGUF, wherever they are read from now.
    original: Vec<TensorInfo>,
    weights: Arc<WeightTable>,
    /// The statistics of the plan, if it rests on any.
    pub statistics: Option<FoundStatistics>,
    /// The plan.
    pub plan: Plan,
    statistics_json: Option<Vec<u8>>,
    plan_json: Vec<u8>,
    profile_json: Vec<u8>,
    manifest: Manifest,
}

/// How long a pack is, to the byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// With the source tensors; `None` where they cannot all be given back.
    pub fat: Option<Bytes>,
    /// Without them.
    pub thin: Bytes,
}

/// What a conversion made.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The pack's path.
    pub output: PathBuf,
    /// Its digest.
    pub root: Digest,
    /// Its length.
    pub file_len: Bytes,
    /// Relative RMS error of the int8 copies, the largest and its matrix; `None` when there are none.
    pub worst_error: Option<(MatrixId, f64)>,
    /// Mean of these errors.
    pub mean_error: f64,
    /// Weights that were not finite and became zero in the int8 copies.
    pub n_clamped: u64,
    /// Where the source rows hold NaN or infinity. They are carried as they are.
    pub not_finite: Vec<NotFinite>,
}

/// Reads the model, finds or counts routing statistics, makes the plan.
///
/// # Errors
///
/// [`Error`] naming the file, the tensor or key, and what was expected.
pub fn prepare(mut request: Request, progress: &mut dyn Progress) -> Result<Prepared, Error> {
    let path = source::locate(&request.model).at(&request.model)?;
    request.model.clone_from(&path);
    let mut inputs = source::files_of(&path);
    inputs.extend(request.plan.iter().chain(request.choice.statistics.files()).cloned());
    check_output(&inputs, &request.output, request.existing == Existing::Replace)?;
    let opened = source::open(&path, Io::Map, &Limits::default()).at(&path)?;
    refuse_same_file(&opened.paths(), &request.output)?;
    opened.files_read().iter().filter_map(|file| file.note()).for_each(|line| progress.note(&line));
    let source = opened.source();
    let outline = Outline::of(source.as_ref()).at(&path)?;
    let shape = outline.shape();
    // Who writes to the same output, and a folder that cannot be written to, are met now and not hours later.
    let partial = match request.keep_statistics {
        true => Some(Partial::create(&request.output, request.existing).at(&request.output)?),
        false => None,
    };
    let (plan, statistics) = match &request.plan {
        Some(file) => (read_plan(file, shape, &request.choice.profile)?, None),
        None => {
            let subject = Subject { path: &path, source: &source, outline: &outline, pack: opened.pack() };
            let choice = &request.choice;
            let keep = beside(&request.output);
            let found = find_or_run(
                subject,
                &choice.statistics,
                choice.accept_foreign,
                request.keep_statistics.then_some(keep.as_path()),
                request.n_threads,
                progress,
            )?;
            (choose(shape, Routing::Measured(&found.statistics), choice)?, Some(found))
        }
    };
    if let Some(line) = limits(&outline, statistics.as_ref()) {
        progress.note(&line);
    }
    // Who counted just now has said it.
    if !statistics.as_ref().is_some_and(|found: &FoundStatistics| found.is_new)
        && let Err(problem) = Tokenizer::from_metadata(source.metadata())
    {
        progress.note(&format!("note: {problem}; the pack carries it as it is"));
    }
    let statistics_json = statistics.as_ref().map(|found| found.statistics.to_json()).transpose()?;
    Ok(Prepared {
        weights: Arc::clone(outline.weights()),
        manifest: manifest(source.as_ref(), shape, outline.fingerprint(), &plan)?,
        plan_json: plan.to_json()?,
        profile_json: request.choice.profile.to_json()?,
        statistics_json,
        statistics,
        plan,
        original: opened.original_tensors(),
        opened,
        source,
        partial: Mutex::new(partial),
        request,
    })
}

/// The plan for a model's shape: what `orkpack plan` shows and `convert` packs.
///
/// # Errors
///
/// [`Error`] for a budget above the device's window, or experts that are not there.
pub fn choose(shape: &ModelShape, routing: Routing<'_>, choice: &Choice) -> Result<Plan, Error> {
    Ok(crate::plan::choose(&request(shape, routing, choice))?)
}

/// What is asked of the planner.
pub fn request<'a>(shape: &'a ModelShape, routing: Routing<'a>, choice: &'a Choice) -> PlanRequest<'a> {
    PlanRequest {
        shape,
        routing,
        profile: &choice.profile,
        budget: choice.budget,
        domains: choice.domains,
        objective: choice.objective,
        force_hot: choice.force_hot.clone(),
        ram: choice.ram,
        shares: choice.shares,
    }
}

fn read_plan(file: &Path, shape: &ModelShape, profile: &DeviceProfile) -> Result<Plan, Error> {
    let plan = Plan::from_json(&fs::read(file).at(file)?).at(file)?;
    plan.check(shape, profile).at(file)?;
    if plan.statistics.is_none() && !plan.is_cold() {
        let message =
            "its routing was assumed, so it does not know which experts are hot; plan with statistics";
        return Err(Error::usage(message).or_at(file));
    }
    Ok(plan)
}

impl Prepared {
    /// The exact arrangement of the pack, as a dry run shows it.
    ///
    /// # Errors
    ///
    /// [`Error`] for contents that no pack can hold.
    pub fn layout(&self) -> Result<Layout, Error> {
        self.contents(self.request.thin)?.layout().at(&self.request.output)
    }

    /// The exact length of the pack with the source tensors and without. A thin pack whose GGUF is another upload can
    /// be made thin alone.
    ///
    /// # Errors
    ///
    /// As [`Prepared::layout`].
    pub fn sizes(&self) -> Result<Sizes, Error> {
        let size =
            |thin| Ok::<_, Error>(Bytes(self.contents(thin)?.layout().at(&self.request.output)?.file_len));
        let fat =
            if self.request.thin && self.opened.files(false).is_none() { None } else { Some(size(false)?) };
        Ok(Sizes { fat, thin: size(true)? })
    }

    /// Writes the pack: every tensor as it is, then one chunk after the other, then index and name.
    ///
    /// # Errors
    ///
    /// [`Error`] naming the tensor, expert and row; nothing is left behind then.
    pub fn write(&self, progress: &mut dyn Progress) -> Result<Outcome, Error> {
        let output = &self.request.output;
        let contents = self.contents(self.request.thin)?;
        let locked = self.partial.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pack = match locked {
            Some(partial) => Writer::over(partial, &contents),
            None => Writer::create(output, &contents, self.request.existing),
        };
        let mut pack = pack.map_err(|error| self.or_thin(error)).at(output)?;
        progress.begin("packing", pack.layout().file_len, Unit::Bytes);
        let given = self.giver()?;
        let mut odd = Vec::new();
        for (number, tensor) in self.source.tensors().iter().enumerate() {
            check_interrupt(progress)?;
            let given = given.as_ref().and_then(|(giver, tensors)| Some((giver, tensors.get(number)?)));
            let write = || match given {
                Some((giver, tensor)) => pack.push_given(giver, tensor).at(output),
                None => {
                    let bytes = self.source.bytes(tensor.place).at(&self.request.model)?;
                    pack.push_tensor(bytes).at(output)
                }
            };
            let (numbers, written) = rayon::join(|| self.numbers(tensor), write);
            odd.extend(numbers?);
            written?;
            progress.advance(tensor.place.len);
        }
        if !self.request.thin && given.is_some_and(|(giver, _)| !giver.shares()) {
            let bytes = self.source.tensors().iter().map(|tensor| tensor.place.len).sum();
            let bytes = Bytes(bytes);
            progress.note(&format!(
                "note: this file system cannot share extents: {bytes} of tensors were copied"
            ));
        }
        let mut errors = Errors::default();
        // A chunk is filled while the one before it is written.
        let mut filled = self.plan.chunks.first().map(|chunk| self.fill(chunk, &mut errors)).transpose()?;
        for (number, chunk) in self.plan.chunks.iter().enumerate() {
            check_interrupt(progress)?;
            let Some((tiles, scales)) = filled else { break };
            let next = self.plan.chunks.get(number + 1);
            let (pushed, following) = rayon::join(
                || pack.push_chunk(&tiles, &scales),
                || next.map(|chunk| self.fill(chunk, &mut errors)).transpose(),
            );
            pushed.at(output)?;
            filled = following?;
            progress.advance(chunk.bytes);
        }
        for file in self.opened.files_read() {
            file.check_unchanged().at(file.path())?;
        }
        let Finished { root, file_len, .. } = pack.finish().at(output)?;
        progress.end();
        self.read_back(root)?;
        Ok(Outcome {
            output: output.clone(),
            root,
            file_len: Bytes(file_len),
            mean_error: errors.mean(),
            worst_error: errors.worst,
            n_clamped: errors.n_clamped,
            not_finite: odd,
        })
    }

    /// Where a tensor holds NaN or infinity: refused, unless that is allowed.
    fn numbers(&self, tensor: &TensorInfo) -> Result<Vec<NotFinite>, Error> {
        let model = &self.request.model;
        let odd = not_finite(tensor, self.source.bytes(tensor.place).at(model)?);
        match odd.first() {
            Some(first) if !self.request.allow_nonfinite => Err(Failure::NotFinite(first.clone())).at(model),
            _ => Ok(odd),
        }
    }

    /// The fat pack that this one is made of: its tensors are checked, and need not be written twice.
    fn giver(&self) -> Result<Option<(Giver<'_>, &[SourceTensor])>, Error> {
        match self.opened.pack() {
            Some(pack) if pack.is_fat() => {
                let giver = Giver::new(pack, &self.request.output).at(&self.request.output)?;
                Ok(Some((giver, pack.tensors())))
            }
            _ => Ok(None),
        }
    }

    /// Opens what was written and checks header, index and the NPU area.
    fn read_back(&self, root: Digest) -> Result<(), Error> {
        let output = &self.request.output;
        let pack = Pack::open(output, Io::Map).at(output)?;
        if pack.root() != root {
            return Err(Error::usage("the file read back is not the one written").or_at(output));
        }
        match verify(&pack, Mode::Npu, &|_| ()).findings().next() {
            Some(finding) => Err(Error::usage(format!("read back: {finding}")).or_at(output)),
            None => Ok(()),
        }
    }

    /// Says in the error of a full disk whether a thin pack would fit.
    fn or_thin(&self, error: PackError) -> PackError {
        match (error, self.sizes()) {
            (PackError::NoSpace { needed, free, .. }, Ok(Sizes { thin, .. })) => {
                PackError::NoSpace { needed, free, thin: (thin <= free && thin < needed).then_some(thin) }
            }
            (error, _) => error,
        }
    }

    fn contents(&self, thin: bool) -> Result<Contents<'_>, Error> {
        Ok(Contents {
            manifest: self.manifest.clone(),
            files: self.files(thin)?,
            tensors: &self.original,
            thin,
            profile: &self.profile_json,
            statistics: self.statistics_json.as_deref(),
            plan: &self.plan_json,
            chunks: self.plan.chunks.iter().zip(0..).map(chunk_contents).collect(),
            matrices: matrices(&self.plan, &self.weights),
            cuts: cuts(&self.plan, self.manifest.dims.n_layer),
        })
    }

    /// The source files' headers and gaps: with the tensors, every byte of the original.
    fn files(&self, thin: bool) -> Result<Vec<FileContents<'_>>, Error> {
        let message = "the GGUF that has its tensors is not the original, which a fat pack could not give back; \
                       make a thin one with --thin, or convert the GGUF itself";
        self.opened.files(thin).ok_or_else(|| Error::usage(message).or_at(&self.request.model))
    }
}

/// Stops the work when somebody pressed Ctrl-C.
fn check_interrupt(progress: &dyn Progress) -> Result<(), Error> {
    if progress.is_interrupted() { Err(Failure::Interrupted.into()) } else { Ok(()) }
}
