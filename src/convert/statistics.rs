//! Where a conversion's routing statistics come from: a file, an imatrix, a document beside the model, or a pass now.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::prompts::Texts;
use super::{check_interrupt, write_beside};
use crate::bytes::{Io, Limits};
use crate::calibrate::{
    self, Counts, Cut, RoutedLayer, Statistics, StatisticsError, check_imatrix_magic, n_groups, read_imatrix,
};
use crate::error::{AtFile, Error};
use crate::executor::cpu::{CpuExecutor, KernelMode};
use crate::model::{Model, Outline};
use crate::pack::Pack;
use crate::progress::{Progress, Unit};
use crate::source;
use crate::tensor::TensorSource;
use crate::threads::Pool;
use crate::tokenizer::Tokenizer;
use crate::units::Bytes;

/// The arithmetic that counts, as the document names it: every path of the fast kernel gives the same bits.
const KERNEL: &str = "fast";

/// Where statistics come from.
#[derive(Clone, Debug, Default)]
pub enum StatisticsFrom {
    /// A document beside the model or the output if its fingerprint fits, else that of a pack, else a pass over the
    /// built-in text.
    #[default]
    Found,
    /// A document.
    File(PathBuf),
    /// The expert counts of an imatrix.
    Imatrix(PathBuf),
    /// A pass over these files.
    Prompts(Vec<PathBuf>),
}

impl StatisticsFrom {
    /// The files that are named.
    pub fn files(&self) -> &[PathBuf] {
        match self {
            StatisticsFrom::Found => &[],
            StatisticsFrom::File(file) | StatisticsFrom::Imatrix(file) => std::slice::from_ref(file),
            StatisticsFrom::Prompts(files) => files,
        }
    }
}

/// Statistics, and where they were found.
#[derive(Clone, Debug)]
pub struct FoundStatistics {
    /// The document.
    pub statistics: Statistics,
    /// Its file: read from, or written to.
    pub file: Option<PathBuf>,
    /// Whether they were counted just now.
    pub is_new: bool,
}

/// The model that statistics are for.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Its file.
    pub path: &'a Path,
    /// Its tensors.
    pub source: &'a Arc<dyn TensorSource>,
    /// What is known of it.
    pub outline: &'a Outline,
    /// The pack, if it is one: it may hold statistics.
    pub pack: Option<&'a Pack>,
}

/// Where the document of a model lies: beside it, with the ending `.routing.json`.
pub fn beside(model: &Path) -> PathBuf {
    source::beside(model, "routing.json")
}

/// Finds statistics as `from` says, without running the model; `None` where that would be needed.
///
/// # Errors
///
/// [`Error`] for a named file that cannot be read or belongs to another model.
pub fn find(
    subject: Subject<'_>,
    from: &StatisticsFrom,
    accept_foreign: bool,
    progress: &mut dyn Progress,
) -> Result<Option<FoundStatistics>, Error> {
    let known = |statistics, file: &Path| {
        Ok(Some(FoundStatistics { statistics, file: Some(file.to_owned()), is_new: false }))
    };
    match from {
        StatisticsFrom::Prompts(_) => Ok(None),
        StatisticsFrom::File(path) => known(read(subject, path, accept_foreign)?, path),
        StatisticsFrom::Imatrix(path) => known(imatrix(subject, path)?, path),
        StatisticsFrom::Found => {
            let path = beside(subject.path);
            if path.exists() {
                match read(subject, &path, accept_foreign) {
                    Ok(statistics) => return known(statistics, &path),
                    Err(error) => progress.note(&format!("note: not used: {error}")),
                }
            }
            match subject.pack.and_then(Pack::statistics) {
                Some(json) => known(parse(subject, json, subject.path, accept_foreign)?, subject.path),
                None => Ok(None),
            }
        }
    }
}

/// Finds statistics as `from` says, or counts them now and keeps the document as `keep`, where nothing is yet.
///
/// # Errors
///
/// As [`find`], and what a calibration meets.
pub fn find_or_run(
    subject: Subject<'_>,
    from: &StatisticsFrom,
    accept_foreign: bool,
    keep: Option<&Path>,
    n_threads: usize,
    progress: &mut dyn Progress,
) -> Result<FoundStatistics, Error> {
    if let Some(found) = find(subject, from, accept_foreign, progress)? {
        return Ok(found);
    }
    if let (StatisticsFrom::Found, Some(path)) = (from, keep)
        && let Ok(statistics) = read(subject, path, accept_foreign)
    {
        return Ok(FoundStatistics { statistics, file: Some(path.to_owned()), is_new: false });
    }
    let texts = match from {
        StatisticsFrom::Prompts(prompts) => Texts::Files(prompts),
        _ => Texts::BuiltIn,
    };
    let statistics = count(subject, texts, n_threads, progress)?;
    let mut file = keep.filter(|path| !path.exists());
    if let Some(path) = file
        && let Err(error) = write_beside(path, &statistics.to_json()?)
    {
        // They are in the pack too; a name that is too long, say, is no reason to stop.
        progress.note(&format!("note: the routing statistics are not kept: {error}"));
        file = None;
    }
    Ok(FoundStatistics { statistics, file: file.map(Path::to_owned), is_new: true })
}

/// One line for a model that can be planned and packed but not run; none for the others.
pub fn limits(outline: &Outline, statistics: Option<&FoundStatistics>) -> Option<String> {
    let Err(_) = outline.runnable() else { return None };
    let from = match statistics.and_then(|found| found.file.as_ref()) {
        Some(file) => file.display().to_string(),
        None => "its shapes".to_owned(),
    };
    Some(format!(
        "architecture {} is not one that ork-run can run: no calibration, no run; planned from {from}",
        outline.shape().architecture
    ))
}

/// Runs the model over text and counts.
///
/// # Errors
///
/// [`Error`] for a text that cannot be read, a tokenizer that is not known, or a pass that stops.
pub fn count(
    subject: Subject<'_>,
    texts: Texts<'_>,
    n_threads: usize,
    progress: &mut dyn Progress,
) -> Result<Statistics, Error> {
    let model = subject.outline.runnable().at(subject.path)?;
    let texts = tokens(subject, model, texts, progress)?;
    let model_bytes = model_bytes(subject.source.as_ref());
    let group = group_tokens(model_bytes, model.n_embd(), available_memory());
    let cut = Cut { group, ..Cut::default() };
    let total: usize = texts.iter().map(Vec::len).sum();
    progress.note(&format!(
        "calibrating on {total} tokens; the model's {} are read {}",
        Bytes(model_bytes),
        match n_groups(&texts, cut) {
            0 | 1 => "once".to_owned(),
            n => format!("{n} times, once for each group of tokens"),
        },
    ));
    progress.begin("calibrating", total as u64, Unit::Tokens);
    let weights = Arc::clone(model.weights());
    let pool = Arc::new(Pool::new(n_threads));
    let mut cpu =
        CpuExecutor::new(Arc::clone(subject.source), weights, pool, KernelMode::Fast).at(subject.path)?;
    let counts = run_interruptible(subject, model, &mut cpu, &texts, cut, progress);
    progress.end();
    let fingerprint = subject.outline.fingerprint().to_owned();
    counts?.into_statistics(fingerprint, model.architecture(), KERNEL).at(subject.path)
}

fn run_interruptible(
    subject: Subject<'_>,
    model: &Model,
    cpu: &mut CpuExecutor,
    texts: &[Vec<u32>],
    cut: Cut,
    progress: &mut dyn Progress,
) -> Result<Counts, Error> {
    let (mut last, mut estimate) = (0, Estimate::new(model, texts, cut));
    let counts = calibrate::run(model, cpu, texts, cut, &mut |done, total| {
        progress.advance((done - last) as u64);
        last = done;
        if let Some(words) = estimate.words(done, total) {
            progress.note(&words);
        }
        if progress.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    check_interrupt(progress)?;
    counts.at(subject.path)
}

/// How long a calibration will take, said once, when the first group has passed the first layers.
struct Estimate {
    begun: Instant,
    /// The tokens done by then.
    after: Option<usize>,
}

impl Estimate {
    /// Shorter than this is not worth a line.
    const WORTH: Duration = Duration::from_secs(20);

    fn new(model: &Model, texts: &[Vec<u32>], cut: Cut) -> Estimate {
        let total: usize = texts.iter().map(Vec::len).sum();
        let first_moe = model.shape().moe_layers.first().map_or(0, |moe| moe.layer.index());
        let after = total.min(cut.group).saturating_mul(first_moe + 1) / model.n_layer().max(1);
        Estimate { begun: Instant::now(), after: Some(after) }
    }

    fn words(&mut self, done: usize, total: usize) -> Option<String> {
        self.after.take_if(|after| done >= *after)?;
        estimate(self.begun.elapsed(), done, total)
    }
}

/// What is left where so much time was spent on so many tokens of the total; `None` where it is not worth a line.
fn estimate(spent: Duration, done: usize, total: usize) -> Option<String> {
    let left = spent.mul_f64(total.saturating_sub(done) as f64 / done.max(1) as f64);
    let about = |time: Duration| match time.as_secs() {
        0..10 => format!("{:.1} seconds", time.as_secs_f64()),
        seconds @ 10..120 => format!("{seconds} seconds"),
        seconds @ 120..7200 => format!("{} minutes", seconds / 60),
        seconds => format!("{:.1} hours", seconds as f64 / 3600.0),
    };
    let (left, spent) = (left >= Estimate::WORTH).then_some((about(left), about(spent)))?;
    Some(format!("calibrating takes about {left} more (estimated from its first {spent})"))
}

/// How many tokens go through a layer together: a few where the file fits into the memory that is available and is read
/// from there again, else as many as a quarter of it holds.
fn group_tokens(model_bytes: u64, n_embd: usize, available: Option<u64>) -> usize {
    let least = Cut::default().group;
    match available {
        Some(available) if model_bytes > available => {
            let row_bytes = 4 * n_embd.max(1) as u64;
            usize::try_from(available / 4 / row_bytes).unwrap_or(least).max(least)
        }
        _ => least,
    }
}

/// Bytes of all tensors.
fn model_bytes(source: &dyn TensorSource) -> u64 {
    source.tensors().iter().map(|tensor| tensor.place.len).sum()
}

/// Bytes that the system says it could give; `None` where it does not say.
fn available_memory() -> Option<u64> {
    let told = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = told.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kibibytes.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The texts as token ids. A model whose text cannot be split as it was trained is counted over something near, and a
/// note says what.
fn tokens(
    subject: Subject<'_>,
    model: &Model,
    texts: Texts<'_>,
    progress: &mut dyn Progress,
) -> Result<Vec<Vec<u32>>, Error> {
    let metadata = subject.source.metadata();
    let tokenizer = match Tokenizer::from_metadata(metadata) {
        Ok(tokenizer) => tokenizer,
        Err(error) => match Tokenizer::near(metadata) {
            Ok(near) => {
                progress.note(&format!("note: {error}; routing is counted with the words of gpt-2"));
                near
            }
            Err(_) if matches!(texts, Texts::BuiltIn) => {
                progress
                    .note(&format!("note: {error}; routing is counted over ids from all of the vocabulary"));
                return Ok(spread_ids(model.n_vocab()));
            }
            Err(_) => return Err(error).at(subject.path),
        },
    };
    texts.encode(subject.path, subject.source.as_ref(), &tokenizer, progress)
}

/// Four texts of 256 ids that are spread over the vocabulary.
fn spread_ids(n_vocab: usize) -> Vec<Vec<u32>> {
    let n_vocab = u32::try_from(n_vocab).unwrap_or(u32::MAX).max(1);
    let ids: Vec<u32> = (0..1024u32).map(|i| i.wrapping_mul(2_654_435_761) % n_vocab).collect();
    ids.chunks(256).map(<[u32]>::to_vec).collect()
}

fn read(subject: Subject<'_>, path: &Path, accept_foreign: bool) -> Result<Statistics, Error> {
    parse(subject, &fs::read(path).at(path)?, path, accept_foreign)
}

fn parse(subject: Subject<'_>, json: &[u8], path: &Path, accept_foreign: bool) -> Result<Statistics, Error> {
    let statistics = Statistics::from_json(json).at(path)?;
    match statistics.check_model(&layers(subject.outline), Some(subject.outline.fingerprint())) {
        Err(StatisticsError::Foreign { .. }) if accept_foreign => {}
        checked => checked.at(path)?,
    }
    Ok(statistics)
}

fn imatrix(subject: Subject<'_>, path: &Path) -> Result<Statistics, Error> {
    let bytes = crate::bytes::FileBytes::open(path, Io::Map).at(path)?;
    check_imatrix_magic(&bytes).at(path)?;
    let opened = source::open(path, Io::Map, &Limits::default()).at(path)?;
    let statistics = read_imatrix(
        opened.source().as_ref(),
        &subject.outline.shape().architecture,
        &layers(subject.outline),
    )
    .at(path)?;
    statistics.check_model(&layers(subject.outline), None).at(path)?;
    Ok(statistics)
}

fn layers(outline: &Outline) -> Vec<RoutedLayer> {
    Counts::new(outline.shape()).layers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_larger_than_memory_is_read_in_larger_groups() {
        const GIB: u64 = 1 << 30;
        let cases = [
            (20 * GIB, 2048, None, 16_384),
            (20 * GIB, 2048, Some(32 * GIB), 16_384),
            (20 * GIB, 2048, Some(8 * GIB), 262_144),
            (600 * GIB, 7168, Some(32 * GIB), 299_593),
            (20 * GIB, 2048, Some(GIB / 4), 16_384),
        ];
        for (model_bytes, n_embd, available, expected) in cases {
            assert_eq!(group_tokens(model_bytes, n_embd, available), expected, "{model_bytes} {available:?}");
        }
    }

    #[test]
    fn an_estimate_is_said_where_there_is_time_to_read_it() {
        let estimate = |seconds, done, total| estimate(Duration::from_millis(seconds), done, total);
        let said = "calibrating takes about 90 seconds more (estimated from its first 10 seconds)";
        assert_eq!(estimate(10_000, 100, 1000).as_deref(), Some(said));
        let said = "calibrating takes about 99 minutes more (estimated from its first 6.0 seconds)";
        assert_eq!(estimate(6_000, 1, 1000).as_deref(), Some(said));
        assert!(estimate(40_000, 10, 10_000).is_some_and(|line| line.contains("about 11.1 hours more")));
        assert_eq!(estimate(2_000, 100, 1000), None);
        assert_eq!(estimate(2_000, 0, 5), None);
    }
}
