//! The command line: arguments to requests, results to messages and exit codes.
//!
//! Data goes to stdout, words to stderr. Everything that a command does is in the library; a file here per command
//! turns its words into one call and the result into text or JSON.

mod args;
mod board;
mod calibrate;
mod convert;
mod demo;
mod export;
mod inspect;
mod output;
mod plan;
mod repair;
mod run;
mod terminal;
mod verify;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{CommandFactory, Parser};
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::error::Error;
use crate::pack::discard_partials;
use crate::profile::DeviceProfile;
use crate::source;
use crate::threads::Pool;
use args::{Command, Common, OrkRun, Orkpack};
use output::Output;
use terminal::Terminal;

/// The binary `orkpack`: parses `words` (the program's name first), does it, says how it went.
pub fn orkpack(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    finish(parse::<Orkpack>(words).and_then(|arguments| {
        let interrupted = watch_signals()?.pressed;
        arguments.command.common().map_or(Ok(()), use_threads)?;
        match arguments.command {
            Command::Convert(arguments) => convert::convert(arguments, interrupted),
            Command::Plan(arguments) => plan::plan(arguments, interrupted),
            Command::Calibrate(arguments) => calibrate::calibrate(arguments, interrupted),
            Command::Merge(arguments) => calibrate::merge(arguments),
            Command::Verify(arguments) => verify::verify(arguments, interrupted),
            Command::Repair(arguments) => repair::repair(arguments, interrupted),
            Command::Inspect(arguments) => inspect::inspect(arguments),
            Command::Export(arguments) => export::export(arguments, interrupted),
            Command::Demo(arguments) => demo::demo(arguments, interrupted),
            Command::Completions { shell } => completions(shell),
            Command::Man { dir } => man(&dir),
        }
    }))
}

/// The binary `ork-run`.
pub fn ork_run(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    finish(parse::<OrkRun>(words).and_then(|arguments| {
        use_threads(&arguments.common)?;
        run::run(arguments, &watch_signals()?)
    }))
}

/// How a command ended when it did not fail: its exit code.
type Done = Result<u8, Stop>;

/// Why a command ended early.
enum Stop {
    /// clap has something to print: help, a version, or a usage error.
    Clap(Box<clap::Error>),
    /// It failed.
    Failed(Box<Error>),
    /// Nobody reads our output any more, which is no failure.
    ClosedPipe,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(Box::new(error))
    }
}

macro_rules! stops {
    ($($error:ty),*) => {
        $(impl From<$error> for Stop {
            fn from(error: $error) -> Stop {
                Error::from(error).into()
            }
        })*
    };
}

stops!(
    std::io::Error,
    crate::calibrate::MergeError,
    crate::calibrate::StatisticsError,
    crate::plan::PlanError,
    crate::profile::ProfileError,
    crate::sample::SampleError
);

fn parse<A: Parser>(words: impl IntoIterator<Item = OsString>) -> Result<A, Stop> {
    A::try_parse_from(words).map_err(|error| Stop::Clap(Box::new(error)))
}

fn finish(done: Done) -> ExitCode {
    match done {
        Ok(code) => ExitCode::from(code),
        Err(Stop::ClosedPipe) => ExitCode::SUCCESS,
        Err(Stop::Clap(error)) => {
            // A closed pipe is no reason to fail here either.
            let _ = error.print();
            ExitCode::from(error.exit_code().clamp(0, 255) as u8)
        }
        Err(Stop::Failed(error)) => {
            output::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// What Ctrl-C does.
struct Interrupt {
    /// Somebody pressed it: work that looks here stops by itself, and cleans up.
    pressed: Arc<AtomicBool>,
    /// An answer is being given, which may take its time to stop.
    is_answering: Arc<AtomicBool>,
}

/// How long work may take to see that it was interrupted, before it is ended.
const GRACE: Duration = Duration::from_millis(200);

/// Ctrl-C asks the work to stop. What does not look in time is ended, and so is everything when it is pressed again.
///
/// Writing past a limit of file sizes, and reading what is no longer there, become errors instead of signals.
fn watch_signals() -> Result<Interrupt, Error> {
    crate::bytes::end_on_lost_pages()?;
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let interrupt = Interrupt { pressed: Arc::default(), is_answering: Arc::default() };
    let (pressed, is_answering) = (Arc::clone(&interrupt.pressed), Arc::clone(&interrupt.is_answering));
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in &mut signals {
            if !pressed.swap(true, Ordering::Relaxed) {
                if is_answering.load(Ordering::Relaxed) {
                    continue;
                }
                std::thread::sleep(GRACE);
            }
            discard_partials();
            // Without a word: stderr may be a pipe that nobody reads, and whoever writes to it holds its lock.
            std::process::exit(130);
        }
    })?;
    Ok(interrupt)
}

/// Threads of a command.
fn n_threads(common: &Common) -> usize {
    common.threads.map_or_else(Pool::default_threads, usize::from)
}

/// Keeps what is hashed, quantised and checked side by side to the threads of the command as well.
fn use_threads(common: &Common) -> Result<(), Error> {
    let n = n_threads(common);
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(|i| format!("work-{i}")).build_global();
    // Without a source of the error there is a pool already.
    match pool.as_ref().err().and_then(std::error::Error::source) {
        Some(error) => {
            Err(Error::usage(format!("{n} threads cannot be started: {error}; ask for fewer with --threads")))
        }
        None => Ok(()),
    }
}

fn terminal(common: &Common, interrupted: Arc<AtomicBool>) -> Terminal {
    Terminal::new(common.quiet, interrupted)
}

/// A built-in profile by name, or one from a file.
fn profile(name: &str) -> Result<DeviceProfile, Error> {
    let path = Path::new(name);
    if path.extension().is_some_and(|extension| extension == "json") || path.exists() {
        let json = std::fs::read(path).map_err(|error| Error::from(error).or_at(path))?;
        return DeviceProfile::from_json(&json).map_err(|error| Error::from(error).or_at(path));
    }
    Ok(DeviceProfile::built_in(name)?)
}

/// The one model of the current folder. Importance matrices, projectors and later shards are no models.
fn the_model_here() -> Result<PathBuf, Error> {
    Ok(source::locate(Path::new(""))?)
}

/// The files of the current folder with this ending, sorted.
fn files_here(ending: &str) -> Result<Vec<PathBuf>, Error> {
    source::files_in(Path::new(""), ending).map_err(|error| Error::from(error).or_at(Path::new(".")))
}

fn completions(shell: clap_complete::Shell) -> Done {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Orkpack::command(), "orkpack", &mut text);
    clap_complete::generate(shell, &mut OrkRun::command(), "ork-run", &mut text);
    Output::new().bytes(&text)?;
    Ok(0)
}

/// One page per command: `orkpack.1`, `orkpack-convert.1`, …, `ork-run.1`.
fn man(dir: &Path) -> Done {
    std::fs::create_dir_all(dir).map_err(|error| Error::from(error).or_at(dir))?;
    let mut pages = vec![("ork-run".to_owned(), OrkRun::command())];
    let mut orkpack = Orkpack::command();
    orkpack.build();
    for command in orkpack.get_subcommands().filter(|command| command.get_name() != "help") {
        pages.push((format!("orkpack-{}", command.get_name()), command.clone()));
    }
    pages.push(("orkpack".to_owned(), orkpack));
    for (name, command) in pages {
        let path = dir.join(format!("{name}.1"));
        let mut page = Vec::new();
        clap_mangen::Man::new(command.display_name(name.clone())).title(name).render(&mut page)?;
        crate::convert::write_beside(&path, &page)?;
    }
    Ok(0)
}
