//! A conversation as the model reads it: messages through the chat template, or text after text where there is none.

use std::mem;

use super::Runtime;
use crate::chat::{ChatTemplate, Message};
use crate::error::Error;
use crate::model::CacheType;
use crate::tokenizer::{Special, Tokenizer};

/// A conversation.
pub struct Dialogue {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// What control tokens are taken for in what is said without a template.
    special: Special,
    messages: Vec<Message>,
    /// The last turn and its answer.
    ids: Vec<u32>,
    /// The same before the turn that is under way.
    before: Vec<u32>,
    /// Ends an answer, beside what the tokenizer knows to.
    end: Option<u32>,
}

/// What the model reads before it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The whole conversation so far.
    pub ids: Vec<u32>,
    /// How many of them will begin the next turn too, whatever the template does to the answer.
    pub border: usize,
}

impl Dialogue {
    /// A conversation without words. Without a template, `special` says what control tokens in the text are.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, special: Special) -> Dialogue {
        let end = template.as_ref().and_then(|template| end_of_answer(&tokenizer, template));
        let (messages, ids, before) = Default::default();
        Dialogue { tokenizer, template, special, messages, ids, before, end }
    }

    /// Puts a system message first, in the place of another.
    pub fn set_system(&mut self, text: String) {
        self.messages.retain(|message| message.role != "system");
        self.messages.insert(0, message("system", text));
    }

    /// Goes on where another conversation ended: after these messages, or, without a template, after these ids.
    pub fn resume(&mut self, messages: Vec<Message>, ids: Vec<u32>) {
        (self.messages, self.ids) = (messages, ids);
    }

    /// The user says `text`: gives what the model reads before it answers.
    ///
    /// # Errors
    ///
    /// [`Error`] when the template refuses or the text has no ids; nothing is then said.
    pub fn say(&mut self, text: String) -> Result<Turn, Error> {
        self.messages.push(message("user", text));
        match self.turn() {
            Ok(turn) => {
                self.before = mem::replace(&mut self.ids, turn.ids.clone());
                Ok(turn)
            }
            Err(error) => {
                self.messages.pop();
                Err(error)
            }
        }
    }

    /// The model answered `text`, which is `ids`.
    pub fn answer(&mut self, text: String, ids: &[u32]) {
        self.messages.push(message("assistant", text));
        self.ids.extend_from_slice(ids);
    }

    /// What was said last gets no answer: it was not said.
    pub fn take_back(&mut self) {
        if self.messages.last().is_some_and(|last| last.role == "user") {
            self.messages.pop();
            self.ids = mem::take(&mut self.before);
        }
    }

    /// Forgets all but the system message.
    pub fn clear(&mut self) {
        self.messages.retain(|message| message.role == "system");
        self.ids.clear();
    }

    /// What was said, and by whom.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The last turn and its answer.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether an answer is over with `id`.
    pub fn is_end(&self, id: u32) -> bool {
        self.end == Some(id) || self.tokenizer.is_end(id)
    }

    fn turn(&self) -> Result<Turn, Error> {
        match &self.template {
            Some(template) => {
                let ids = self.rendered(template, true)?;
                // A template that takes no messages but with an answer to come has no border.
                let said = self.rendered(template, false).unwrap_or_default();
                let border = ids.iter().zip(&said).take_while(|(a, b)| a == b).count();
                Ok(Turn { ids, border })
            }
            None => {
                let ids = self.continued()?;
                Ok(Turn { border: ids.len(), ids })
            }
        }
    }

    /// The messages' ids. This is the one place where a template's text becomes ids.
    fn rendered(&self, template: &ChatTemplate, add_generation_prompt: bool) -> Result<Vec<u32>, Error> {
        let prompt = template.render(&self.messages, add_generation_prompt)?;
        Ok(self.tokenizer.encode_around(&prompt.text, &prompt.foreign)?)
    }

    /// What was read and written so far, then the last message on a line of its own.
    fn continued(&self) -> Result<Vec<u32>, Error> {
        let text = self.messages.last().map_or("", |last| last.content.as_str());
        if self.ids.is_empty() {
            return Ok(self.tokenizer.encode(text, self.special)?);
        }
        let more = self.tokenizer.encode(&format!("\n{text}"), self.special)?;
        // A text begins once.
        let more = match more.split_first() {
            Some((first, rest)) if Some(*first) == self.tokenizer.bos() => rest,
            _ => &more,
        };
        Ok([&self.ids, more].concat())
    }
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.to_owned(), content }
}

/// The control token that the template writes after an answer.
fn end_of_answer(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    let after = template.after_answer();
    let ids = tokenizer.encode(after.trim_start(), Special::Parse).ok()?;
    let first = ids.into_iter().find(|id| Some(*id) != tokenizer.bos())?;
    tokenizer.decode(&[first]).is_empty().then_some(first)
}

impl Runtime {
    /// Bytes that a sequence takes when it fills a context of `n_ctx` tokens: keys and values, then what layers
    /// remember that do not grow.
    pub fn context_bytes(&self, n_ctx: usize) -> [u64; 2] {
        let shape = self.model().shape();
        let per_token = shape.kv_bytes_per_token / CacheType::F16.bytes() * self.cache().bytes();
        [per_token.saturating_mul(n_ctx as u64), shape.state_bytes]
    }
}
