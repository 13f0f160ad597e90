//! Who talks, and how: the dialogue that the arguments ask for, its sampling, and the file that keeps both.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::Run;
use super::answer::Answer;
use crate::chat::ChatTemplate;
use crate::cli::args::ThinkArg;
use crate::cli::output::say;
use crate::convert;
use crate::error::{AtFile, Error};
use crate::runtime::{Dialogue, Record};
use crate::sample::Sampler;
use crate::tokenizer::Special;

/// Bytes that a template or a session may have.
const MOST_BYTES: u64 = 64 << 20;

/// The switch that templates have for thinking.
const THINKING: &str = "enable_thinking";

/// A dialogue with all that goes on from turn to turn.
pub struct Talk {
    pub dialogue: Dialogue,
    pub sampler: Sampler,
    kept: Option<Kept>,
}

/// Where a conversation is kept.
struct Kept {
    path: PathBuf,
    /// The model's fingerprint.
    model: String,
}

impl Run<'_> {
    /// The dialogue that the arguments ask for; the one of `--session` goes on.
    pub fn talk(&self) -> Result<Talk, Error> {
        let tokenizer = self.runtime.tokenizer().at(self.runtime.path())?;
        let template = self.template()?;
        let special = if self.arguments.raw { Special::Parse } else { Special::Plain };
        if template.is_none() && (self.arguments.system.is_some() || !self.arguments.template_arg.is_empty())
        {
            let problem =
                "there is no chat template for --system and --template-arg; --chat-template-file gives one";
            return Err(Error::usage(problem).or_at(self.runtime.path()));
        }
        let mut talk = Talk {
            dialogue: Dialogue::new(tokenizer, template, special),
            sampler: self.sampler()?,
            kept: None,
        };
        if let Some(path) = &self.arguments.session {
            self.resume(&mut talk, path)?;
        }
        if let Some(system) = &self.arguments.system {
            talk.dialogue.set_system(system.clone());
        }
        Ok(talk)
    }

    fn resume(&self, talk: &mut Talk, path: &Path) -> Result<(), Error> {
        let model = self.runtime.model().fingerprint(self.runtime.source()).at(self.runtime.path())?;
        if path.exists() {
            let record = Record::from_json(&read(path)?).map_err(|error| error.or_at(path))?;
            let resumed = record.resume(&model, &mut talk.dialogue, &mut talk.sampler);
            resumed.map_err(|error| error.or_at(path))?;
            let (n_messages, n_ids) = (talk.dialogue.messages().len(), talk.dialogue.ids().len());
            let line = format!(
                "{}: goes on after {n_messages} messages; their {n_ids} tokens are computed again",
                path.display()
            );
            say(self.is_quiet(), &line);
        }
        talk.kept = Some(Kept { path: path.to_owned(), model });
        // A folder that takes no file is better known before an answer than after it.
        talk.keep()
    }

    /// The file's own template or the one that was given, with its variables set; none under `--raw`.
    fn template(&self) -> Result<Option<ChatTemplate>, Error> {
        let mut template = match &self.arguments.chat_template_file {
            _ if self.arguments.raw => None,
            Some(path) => {
                let source = String::from_utf8(read(path)?);
                let source =
                    source.map_err(|_| Error::usage("the chat template is not UTF-8").or_at(path))?;
                Some(ChatTemplate::new(&source, self.runtime.source().metadata()).at(path)?)
            }
            None => self.runtime.chat_template()?,
        };
        if let Some(think) = self.arguments.think {
            match template.as_mut().filter(|template| template.mentions(THINKING)) {
                Some(template) => {
                    template.set(THINKING, if think == ThinkArg::On { "true" } else { "false" })
                }
                None => say(
                    self.is_quiet(),
                    &format!(
                        "the chat template has no switch for thinking (`{THINKING}`): --think changes nothing"
                    ),
                ),
            }
        }
        if let Some(template) = &mut template {
            for (name, value) in &self.arguments.template_arg {
                if !template.mentions(name) {
                    say(self.is_quiet(), &format!("the chat template does not ask for `{name}`"));
                }
                template.set(name, value);
            }
        }
        Ok(template)
    }
}

impl Talk {
    /// Takes an answer into the conversation, and keeps it.
    pub fn answered(&mut self, answer: Answer) -> Result<(), Error> {
        self.dialogue.answer(answer.text.unwrap_or_default(), &answer.ids);
        self.keep()
    }

    /// Forgets what was said, also in the file.
    pub fn clear(&mut self) -> Result<(), Error> {
        self.dialogue.clear();
        self.keep()
    }

    fn keep(&self) -> Result<(), Error> {
        let Some(Kept { path, model }) = &self.kept else { return Ok(()) };
        let json = Record::of(model, &self.dialogue, &self.sampler).to_json()?;
        convert::write_private(path, &json)
    }
}

/// A file that is not too large to be what it should be.
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let len = fs::metadata(path).at(path)?.len();
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes)).at(path)?;
    match bytes.len() as u64 <= MOST_BYTES {
        true => Ok(bytes),
        false => Err(Error::usage(format!("{len} bytes, expected at most {MOST_BYTES}")).or_at(path)),
    }
}
