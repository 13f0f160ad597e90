//! `ork-run`: a prompt, a conversation, a perplexity, a comparison or a measurement.

mod answer;
mod converse;
mod input;
mod stream;
mod talk;

use std::fs;
use std::io::{IsTerminal, Read, stdin};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::args::{DeviceArg, IoArg, KernelArg, OrkRun, VerifyArg};
use super::output::{Output, say};
use super::{Done, Interrupt, Stop, board, terminal};
use crate::bytes::Io;
use crate::convert;
use crate::error::{AtFile, Error, Failure};
use crate::executor::cpu::KernelMode;
use crate::report::{self, PerplexityPart, RunDocument, TurnPart};
use crate::runtime::{Check, DeviceChoice, Engine, Options, Reading, Runtime, Session, Turn};
use crate::sample::{SampleOptions, Sampler};
use crate::tokenizer::Special;
use crate::units::Bytes;
use answer::{Beside, End};
use talk::Talk;

/// Context where neither the user nor a shorter model says otherwise.
const DEFAULT_CONTEXT: usize = 4096;

pub fn run(arguments: OrkRun, interrupt: &Interrupt) -> Done {
    let interrupted = &interrupt.pressed;
    let runtime = Runtime::open(&arguments.file, options(&arguments)?)?;
    let run = Run { runtime: &runtime, arguments: &arguments, interrupted };
    for output in arguments.dump_logits.iter().chain(&arguments.session) {
        convert::check_output(runtime.files(), output, true)?;
    }
    runtime.notes().iter().for_each(|line| say(run.is_quiet(), line));
    // What cannot be done is said before anything is loaded or computed.
    let task = run.task()?;
    if arguments.prefault {
        runtime.prefault();
    }
    let engine = if arguments.reference { runtime.reference()? } else { runtime.engine()? };
    say(run.is_quiet(), &arithmetic_line(&runtime, &engine, arguments.reference));
    say(run.is_quiet(), &run.context_line());
    let mut session = run.session(engine);
    session.look_ahead(arguments.lookup as usize);
    interrupt.is_answering.store(!matches!(task, Task::Bench | Task::Perplexity(_)), Ordering::Relaxed);
    let document = match task {
        Task::Bench => run.bench(session)?,
        Task::Perplexity(file) => run.perplexity(session, file)?,
        Task::Tokens(tokens) => run.generate(session, &Turn { border: tokens.len(), ids: tokens }, None)?,
        Task::Text(talk, turn) => run.generate(session, &turn, Some(*talk))?,
        Task::Conversation(talk) => run.converse(session, *talk)?,
    };
    if arguments.common.json {
        Output::new().json(&document)?;
    } else {
        say(run.is_quiet(), report::run(&document).trim_end());
    }
    let fell_back = document.device.as_ref().is_some_and(|device| device.fallbacks > 0);
    // On a terminal somebody saw that a turn was refused, and said something else.
    let refused = document.refused > 0 && !stdin().is_terminal();
    match interrupted.load(Ordering::Relaxed) {
        true => Ok(130),
        false => Ok(if refused || (fell_back && arguments.strict) { 2 } else { 0 }),
    }
}

fn options(arguments: &OrkRun) -> Result<Options, Error> {
    Ok(Options {
        device: match arguments.device {
            DeviceArg::Auto => DeviceChoice::Auto,
            DeviceArg::Cpu => DeviceChoice::Cpu,
            DeviceArg::Sim => DeviceChoice::Sim,
        },
        kernel: match arguments.kernel {
            KernelArg::Fast => KernelMode::Fast,
            KernelArg::Exact => KernelMode::Exact,
        },
        threads: arguments.common.threads.map(usize::from),
        check: match arguments.verify {
            None => Check::Loaded,
            Some(VerifyArg::Full) => Check::Full,
            Some(VerifyArg::None) => Check::Index,
        },
        io: match arguments.io {
            IoArg::Map => Io::Map,
            IoArg::Pread => Io::Pread,
        },
        strict: arguments.strict,
        model: arguments.model.clone(),
        here: board::here(arguments.profile.as_deref())?,
    })
}

/// Which numbers the run is about to compute, in one line.
fn arithmetic_line(runtime: &Runtime, engine: &Engine, reference: bool) -> String {
    let threads = runtime.n_threads();
    if let Some(distrust) = engine.distrust() {
        return format!("{distrust}: everything on {threads} CPU threads from source rows");
    }
    match (engine.device(), runtime.packed().is_some()) {
        (Some(name), _) => {
            let chunks = engine.loaded().map_or(0, |loaded| loaded.chunks);
            let chunks = report::counted(chunks as u64, "chunk", "chunks");
            format!("hot experts on `{name}` ({chunks}), cold ones on {threads} CPU threads")
        }
        (None, _) if reference => format!("reference: everything on {threads} CPU threads from source rows"),
        (None, true) => format!(
            "no NPU here: everything on {threads} CPU threads from source rows (--device sim runs the software NPU)"
        ),
        (None, false) => format!("everything on {threads} CPU threads"),
    }
}

/// What is to be done.
enum Task<'a> {
    Bench,
    Perplexity(&'a Path),
    Tokens(Vec<u32>),
    Text(Box<Talk>, Turn),
    Conversation(Box<Talk>),
}

struct Run<'a> {
    runtime: &'a Runtime,
    arguments: &'a OrkRun,
    interrupted: &'a Arc<AtomicBool>,
}

impl<'a> Run<'a> {
    fn is_quiet(&self) -> bool {
        self.arguments.common.quiet || self.arguments.common.json
    }

    fn n_ctx(&self) -> usize {
        let trained = self.runtime.model().n_ctx();
        self.arguments.context.map_or(trained.min(DEFAULT_CONTEXT), |n| n as usize)
    }

    fn session(&self, engine: Engine) -> Session<'a> {
        let mut session = Session::new(self.runtime, engine, self.n_ctx(), self.arguments.batch as usize);
        session.watch(Arc::clone(self.interrupted));
        session
    }

    /// What the context takes, in one line.
    fn context_line(&self) -> String {
        let (n_ctx, trained) = (self.n_ctx(), self.runtime.model().n_ctx());
        let [keys_and_values, states] = self.runtime.context_bytes(n_ctx).map(Bytes);
        let states = if states.0 > 0 { format!(" and {states} of states") } else { String::new() };
        let beyond = match n_ctx > trained {
            true => format!("; the model was trained for {trained} tokens and may not make sense beyond"),
            false => String::new(),
        };
        format!("context of {n_ctx} tokens: {keys_and_values} of keys and values{states}{beyond}")
    }

    fn task(&self) -> Result<Task<'a>, Error> {
        let arguments = self.arguments;
        if arguments.bench {
            return Ok(Task::Bench);
        }
        if let Some(file) = &arguments.perplexity {
            return Ok(Task::Perplexity(file));
        }
        if !arguments.tokens.is_empty() {
            self.check_length(arguments.tokens.len(), "the prompt", "")?;
            return Ok(Task::Tokens(arguments.tokens.clone()));
        }
        let text = match arguments.prompt.as_deref() {
            Some("-") => self.piped()?,
            Some(text) => text.to_owned(),
            None if arguments.turns || stdin().is_terminal() => {
                return Ok(Task::Conversation(Box::new(self.talk()?)));
            }
            None => self.piped()?,
        };
        let mut talk = self.talk()?;
        let turn = talk.dialogue.say(text).map_err(|error| error.or_at(self.runtime.path()))?;
        self.check_length(turn.ids.len(), "the prompt", "")?;
        Ok(Task::Text(Box::new(talk), turn))
    }

    /// The text on stdin. Only under `--raw` is the line feed at its end a part of it.
    fn piped(&self) -> Result<String, Error> {
        let mut bytes = Vec::new();
        stdin().lock().read_to_end(&mut bytes)?;
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        if !self.arguments.raw && text.ends_with('\n') {
            text.pop();
        }
        match text.is_empty() {
            true => Err(Error::usage("there is no prompt: -p TEXT, or text on stdin")),
            false => Ok(text),
        }
    }

    /// An error with both counts where something is longer than the context; `instead` is what else helps.
    fn check_length(&self, n_tokens: usize, what: &str, instead: &str) -> Result<(), Error> {
        let n_ctx = self.n_ctx();
        if n_tokens <= n_ctx {
            return Ok(());
        }
        let instead = if instead.is_empty() { String::new() } else { format!("{instead}, ") };
        Err(Error::usage(format!(
            "{what} has {n_tokens} tokens, and the context holds {n_ctx}: {instead}a larger -c holds more"
        )))
    }

    fn sampler(&self) -> Result<Sampler, Error> {
        let OrkRun { temp, top_k, top_p, min_p, seed, .. } = *self.arguments;
        Ok(Sampler::new(SampleOptions { temp, top_k: top_k as usize, top_p, min_p, seed })?)
    }

    /// Reads the prompt, generates, streams. With `--compare` the reference reads the same tokens beside it.
    fn generate(
        &self,
        mut session: Session<'_>,
        turn: &Turn,
        talk: Option<Talk>,
    ) -> Result<RunDocument, Stop> {
        let mut beside = match self.arguments.compare {
            true => Some(Beside::new(self.session(self.runtime.reference()?))),
            false => None,
        };
        let reading = read(&mut session, turn, beside.as_mut())?;
        if let Some(path) = &self.arguments.dump_logits {
            let bytes: Vec<u8> = session.logits().iter().flat_map(|logit| logit.to_le_bytes()).collect();
            convert::write_beside(path, &bytes)?;
        }
        let (answer, talk) = match talk {
            Some(mut talk) => {
                let Talk { sampler, dialogue, .. } = &mut talk;
                let answer = self.answer(&mut session, sampler, Some(dialogue), beside.as_mut())?;
                (answer, Some(talk))
            }
            None => (self.answer(&mut session, &mut self.sampler()?, None, beside.as_mut())?, None),
        };
        if answer.end == End::Context {
            let line = format!("the context of {} tokens is full: a larger -c holds more", self.n_ctx());
            say(self.is_quiet(), &line);
        }
        let mut document = RunDocument::of(self.runtime, &session);
        document.take_turns(vec![TurnPart::of(reading, answer.text.as_deref(), &answer.ids)]);
        document.comparison = beside.map(|beside| (&beside.comparison).into());
        if let Some(mut talk) = talk {
            talk.answered(answer)?;
        }
        Ok(document)
    }

    fn perplexity(&self, mut session: Session<'_>, file: &Path) -> Result<RunDocument, Stop> {
        let text = String::from_utf8_lossy(&fs::read(file).at(file)?).into_owned();
        let tokenizer = self.runtime.tokenizer().at(self.runtime.path())?;
        let tokens = tokenizer.encode(&text, Special::Plain).at(file)?;
        let mut progress = terminal(&self.arguments.common, Arc::clone(self.interrupted));
        let scored = session.perplexity(&tokens, &mut progress).map_err(|error| relabel(error, file))?;
        let reference = match self.arguments.compare {
            true => Some(self.session(self.runtime.reference()?).perplexity(&tokens, &mut progress)?),
            false => None,
        };
        let mut document = RunDocument::of(self.runtime, &session);
        document.perplexity = Some(PerplexityPart::of(scored, reference));
        Ok(document)
    }

    /// Reads `--pp` tokens and generates `--tg`, each from an empty cache, `--reps` times after a round that is not counted.
    fn bench(&self, mut session: Session<'_>) -> Result<RunDocument, Stop> {
        let OrkRun { pp, tg, reps, .. } = *self.arguments;
        let n_vocab = self.runtime.model().n_vocab() as u32;
        // Any tokens will do; spread over the vocabulary they route like nothing in particular.
        let prompt: Vec<u32> = (0..pp.max(1)).map(|i| i.wrapping_mul(2_654_435_761) % n_vocab).collect();
        let round = |session: &mut Session<'_>| -> Result<(), Error> {
            session.clear();
            session.prompt(&prompt)?;
            session.clear();
            (0..tg).try_for_each(|i| session.step(prompt[i as usize % prompt.len()]).map(|_| ()))
        };
        round(&mut session)?;
        session.forget_speeds();
        for _ in 0..reps {
            round(&mut session)?;
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(Error::from(Failure::Interrupted).into());
            }
        }
        Ok(RunDocument::of(self.runtime, &session))
    }
}

/// Reads a prompt into an empty session, and beside it.
fn read(session: &mut Session<'_>, turn: &Turn, beside: Option<&mut Beside<'_>>) -> Result<Reading, Error> {
    let Some(Beside { session: reference, comparison }) = beside else {
        return session.turn(&turn.ids, turn.border);
    };
    session.compare_prompt(reference, &turn.ids, comparison)?;
    Ok(Reading { reused: 0, computed: turn.ids.len() })
}

fn relabel(error: Error, file: &Path) -> Error {
    match *error.failure {
        Failure::Evaluate(_) => Error { file: Some(file.to_owned()), ..error },
        _ => error,
    }
}
