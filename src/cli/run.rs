//! `ork-run`: a prompt, a conversation, a perplexity, a comparison or a measurement.

use std::fs;
use std::io::{IsTerminal, Read, Write, stderr, stdin};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::args::{DeviceArg, IoArg, KernelArg, OrkRun, VerifyArg};
use super::output::{Output, say};
use super::{Done, Stop, board, terminal};
use crate::bytes::Io;
use crate::chat::{ChatTemplate, Message};
use crate::error::{AtFile, Error, Failure};
use crate::executor::cpu::KernelMode;
use crate::model::evaluate::Comparison;
use crate::report::{self, PerplexityPart, RunDocument};
use crate::runtime::{Check, DeviceChoice, Engine, Options, Runtime, Session};
use crate::sample::{SampleOptions, Sampler};
use crate::tokenizer::{Detokenizer, Special, Tokenizer};

/// Context where neither the user nor a shorter model says otherwise.
const DEFAULT_CONTEXT: usize = 4096;

pub fn run(arguments: OrkRun, interrupted: Arc<AtomicBool>) -> Done {
    let runtime = Runtime::open(&arguments.file, options(&arguments)?)?;
    if arguments.prefault {
        runtime.prefault();
    }
    let engine = if arguments.reference { runtime.reference()? } else { runtime.engine()? };
    let quiet = arguments.common.quiet || arguments.common.json;
    if let Some(line) = runtime.packed().and_then(|packed| packed.note()) {
        say(quiet, &line);
    }
    say(quiet, &arithmetic_line(&runtime, &engine, arguments.reference));
    let run = Run { runtime: &runtime, arguments: &arguments, interrupted: &interrupted };
    let session = run.session(engine);
    let document = if arguments.bench {
        run.bench(session)?
    } else if let Some(file) = &arguments.perplexity {
        run.perplexity(session, file)?
    } else {
        match run.prompt()? {
            Prompt::Tokens(tokens) => run.generate(session, &tokens, None)?,
            Prompt::Text(text) => {
                let tokenizer = runtime.tokenizer().at(runtime.path())?;
                let tokens = run.encode(&tokenizer, &text)?;
                run.generate(session, &tokens, Some(&tokenizer))?
            }
            Prompt::Conversation => run.converse(session)?,
        }
    };
    if arguments.common.json {
        Output::new().json(&document)?;
    } else {
        say(quiet, report::run(&document).trim_end());
    }
    let failed = document.device.as_ref().is_some_and(|device| device.fallbacks > 0);
    match interrupted.load(Ordering::Relaxed) {
        true => Ok(130),
        false => Ok(if failed && arguments.strict { 2 } else { 0 }),
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
            format!("hot experts on `{name}` ({chunks} chunks), cold ones on {threads} CPU threads")
        }
        (None, _) if reference => format!("reference: everything on {threads} CPU threads from source rows"),
        (None, true) => format!(
            "no NPU here: everything on {threads} CPU threads from source rows (--device sim runs the software NPU)"
        ),
        (None, false) => format!("everything on {threads} CPU threads"),
    }
}

/// What is to be continued.
enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
    Conversation,
}

struct Run<'a> {
    runtime: &'a Runtime,
    arguments: &'a OrkRun,
    interrupted: &'a Arc<AtomicBool>,
}

impl Run<'_> {
    fn session(&self, engine: Engine) -> Session<'_> {
        let trained = self.runtime.model().n_ctx();
        let n_ctx = self.arguments.context.map_or(trained.min(DEFAULT_CONTEXT), |n| n as usize);
        Session::new(self.runtime, engine, n_ctx, self.arguments.batch as usize)
    }

    fn prompt(&self) -> Result<Prompt, Error> {
        if !self.arguments.tokens.is_empty() {
            return Ok(Prompt::Tokens(self.arguments.tokens.clone()));
        }
        match self.arguments.prompt.as_deref() {
            Some("-") => {}
            Some(text) => return Ok(Prompt::Text(text.to_owned())),
            None if stdin().is_terminal() => return Ok(Prompt::Conversation),
            None => {}
        }
        let mut bytes = Vec::new();
        stdin().lock().read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if text.is_empty() {
            return Err(Error::usage("there is no prompt: -p TEXT, or text on stdin"));
        }
        Ok(Prompt::Text(text))
    }

    fn template(&self) -> Result<Option<ChatTemplate>, Error> {
        if self.arguments.raw { Ok(None) } else { self.runtime.chat_template() }
    }

    /// A prompt's tokens: in the model's chat template where it has one and `--raw` is not given.
    fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Error> {
        let encode = |special| tokenizer.encode(text, special).at(self.runtime.path());
        match self.template()? {
            Some(template) => {
                let messages = [Message { role: "user".to_owned(), content: text.to_owned() }];
                self.encode_turns(tokenizer, &template, &messages)
            }
            None => encode(if self.arguments.raw { Special::Parse } else { Special::Plain }),
        }
    }

    /// A conversation's tokens, up to where the assistant speaks.
    fn encode_turns(
        &self,
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
        messages: &[Message],
    ) -> Result<Vec<u32>, Error> {
        let prompt = template.render(messages, true).at(self.runtime.path())?;
        tokenizer.encode_around(&prompt.text, &prompt.foreign).at(self.runtime.path())
    }

    fn sampler(&self) -> Result<Sampler, Error> {
        let OrkRun { temp, top_k, top_p, min_p, seed, .. } = *self.arguments;
        Ok(Sampler::new(SampleOptions { temp, top_k: top_k as usize, top_p, min_p, seed })?)
    }

    /// Reads the prompt, generates, streams. With `--compare` the reference reads the same tokens beside it.
    fn generate(
        &self,
        mut session: Session<'_>,
        prompt: &[u32],
        tokenizer: Option<&Tokenizer>,
    ) -> Result<RunDocument, Stop> {
        let mut comparison = Comparison::default();
        let mut reference = None;
        let logits = if self.arguments.compare {
            let beside = reference.insert(self.session(self.runtime.reference()?));
            session.compare_prompt(beside, prompt, &mut comparison)?
        } else {
            session.prompt(prompt)?
        };
        if let Some(path) = &self.arguments.dump_logits {
            let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            fs::write(path, bytes).at(path)?;
        }
        let mut sampler = self.sampler()?;
        let mut next = sampler.next(logits)?;
        let mut stream = Stream::new(tokenizer, self.arguments.common.json);
        for step in 0..self.arguments.n_predict {
            if tokenizer.is_some_and(|tokenizer| tokenizer.is_end(next))
                || self.interrupted.load(Ordering::Relaxed)
            {
                break;
            }
            stream.push(next)?;
            let last = step + 1 == self.arguments.n_predict || session.position() >= session.n_ctx();
            if last {
                break;
            }
            let token = next;
            next = sampler.next(session.step(token)?)?;
            if let Some(reference) = &mut reference {
                comparison.push(reference.step(token)?, session.logits());
            }
        }
        let (text, tokens) = stream.end()?;
        let mut document = RunDocument::of(self.runtime, &session);
        (document.text, document.tokens) = (text, tokens);
        document.comparison = reference.map(|_| (&comparison).into());
        Ok(document)
    }

    /// Turns typed on a terminal, until `/exit` or the end of input.
    fn converse(&self, mut session: Session<'_>) -> Result<RunDocument, Stop> {
        let tokenizer = self.runtime.tokenizer().at(self.runtime.path())?;
        let template = self.template()?;
        let mut sampler = self.sampler()?;
        let mut messages: Vec<Message> = Vec::new();
        say(false, "type a message; /clear forgets, /exit ends");
        while let Some(line) = ask()? {
            match line.as_str() {
                "" => continue,
                "/exit" => break,
                "/clear" => {
                    messages.clear();
                    session.clear();
                    continue;
                }
                _ => {}
            }
            self.interrupted.store(false, Ordering::Relaxed);
            let tokens = match &template {
                Some(template) => {
                    messages.push(Message { role: "user".to_owned(), content: line });
                    session.clear();
                    self.encode_turns(&tokenizer, template, &messages)?
                }
                None => tokenizer.encode(&line, Special::Plain).at(self.runtime.path())?,
            };
            match self.answer(&mut session, &tokens, &tokenizer, &mut sampler) {
                Ok(answer) => messages.push(Message { role: "assistant".to_owned(), content: answer }),
                // A turn that does not fit ends the turn, not the conversation.
                Err(Stop::Failed(error)) => {
                    super::output::error(&error);
                    messages.pop();
                }
                Err(stop) => return Err(stop),
            }
        }
        self.interrupted.store(false, Ordering::Relaxed);
        Ok(RunDocument::of(self.runtime, &session))
    }

    fn answer(
        &self,
        session: &mut Session<'_>,
        prompt: &[u32],
        tokenizer: &Tokenizer,
        sampler: &mut Sampler,
    ) -> Result<String, Stop> {
        let mut stream = Stream::new(Some(tokenizer), false);
        let mut next = sampler.next(session.prompt(prompt)?)?;
        for _ in 0..self.arguments.n_predict {
            let full = session.position() >= session.n_ctx();
            if tokenizer.is_end(next) || full || self.interrupted.load(Ordering::Relaxed) {
                break;
            }
            stream.push(next)?;
            next = sampler.next(session.step(next)?)?;
        }
        let (text, _) = stream.end()?;
        Ok(text.unwrap_or_default())
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

fn relabel(error: Error, file: &Path) -> Error {
    match *error.failure {
        Failure::Evaluate(_) => Error { file: Some(file.to_owned()), ..error },
        _ => error,
    }
}

/// One line from the terminal; `None` at its end.
fn ask() -> Result<Option<String>, Error> {
    let mut err = stderr().lock();
    // A terminal that takes no prompt still takes the line.
    let _ = write!(err, "> ").and_then(|()| err.flush());
    drop(err);
    let mut line = String::new();
    let n = stdin().read_line(&mut line)?;
    Ok((n > 0).then(|| line.trim().to_owned()))
}

/// Generated tokens on their way to stdout: text, or ids where there is no tokenizer.
struct Stream<'t> {
    detokenizer: Option<Detokenizer<'t>>,
    silent: bool,
    text: String,
    tokens: Vec<u32>,
}

impl<'t> Stream<'t> {
    fn new(tokenizer: Option<&'t Tokenizer>, silent: bool) -> Stream<'t> {
        let detokenizer = tokenizer.map(Tokenizer::detokenizer);
        Stream { detokenizer, silent, text: String::new(), tokens: Vec::new() }
    }

    fn push(&mut self, token: u32) -> Result<(), Stop> {
        self.tokens.push(token);
        let piece = match &mut self.detokenizer {
            Some(detokenizer) => detokenizer.push(token),
            None if self.tokens.len() == 1 => token.to_string(),
            None => format!(",{token}"),
        };
        self.emit(&piece)
    }

    fn emit(&mut self, piece: &str) -> Result<(), Stop> {
        self.text.push_str(piece);
        if self.silent || piece.is_empty() { Ok(()) } else { Output::new().text(piece) }
    }

    /// The rest of a character that never came, a line feed, and what was generated in all.
    fn end(mut self) -> Result<(Option<String>, Vec<u32>), Stop> {
        let is_text = self.detokenizer.is_some();
        if let Some(detokenizer) = self.detokenizer.take() {
            self.emit(&detokenizer.finish())?;
        }
        if !self.silent {
            Output::new().text("\n")?;
        }
        Ok((is_text.then_some(self.text), self.tokens))
    }
}
