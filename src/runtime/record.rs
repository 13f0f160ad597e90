//! A conversation as a document, for another run to go on with (schema: `formats/session.schema.json`).
//!
//! It holds words and ids, never the caches: those are computed again, on whatever device there is then.

use serde::{Deserialize, Serialize};

use super::Dialogue;
use crate::chat::Message;
use crate::error::Error;
use crate::sample::Sampler;

const SCHEMA: &str = "orkpack-session-1";

/// A conversation between two runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// `orkpack-session-1`.
    schema: String,
    /// The model's fingerprint: 64 hexadecimal digits.
    model: String,
    /// Digest of its tokenizer: 64 hexadecimal digits.
    tokenizer: String,
    /// What was said, and by whom.
    messages: Vec<Message>,
    /// The last turn and its answer.
    ids: Vec<u32>,
    /// Where the sampling stands: 16 hexadecimal digits.
    random: String,
}

impl Record {
    /// The record of a conversation with the model of this fingerprint.
    pub fn of(model: &str, dialogue: &Dialogue, sampler: &Sampler) -> Record {
        Record {
            schema: SCHEMA.to_owned(),
            model: model.to_owned(),
            tokenizer: tokenizer(dialogue),
            messages: dialogue.messages().to_vec(),
            ids: dialogue.ids().to_vec(),
            random: format!("{:016x}", sampler.state()),
        }
    }

    /// The document.
    ///
    /// # Errors
    ///
    /// None that are known.
    pub fn to_json(&self) -> Result<Vec<u8>, Error> {
        let mut json = serde_json::to_vec(self)?;
        json.push(b'\n');
        Ok(json)
    }

    /// A record from a file's bytes.
    ///
    /// # Errors
    ///
    /// [`Error`] for anything else.
    pub fn from_json(json: &[u8]) -> Result<Record, Error> {
        let record: Record = serde_json::from_slice(json)
            .map_err(|error| Error::usage(format!("this is no session: {error}")))?;
        match record.schema.as_str() {
            SCHEMA => Ok(record),
            other => Err(Error::usage(format!("schema is `{other}`, expected `{SCHEMA}`"))),
        }
    }

    /// Takes the conversation up again.
    ///
    /// # Errors
    ///
    /// [`Error`] when it was with another model, or with one that reads text otherwise.
    pub fn resume(self, model: &str, dialogue: &mut Dialogue, sampler: &mut Sampler) -> Result<(), Error> {
        for (what, found, expected) in
            [("model", &self.model, model), ("tokenizer", &self.tokenizer, &tokenizer(dialogue))]
        {
            if found != expected {
                let problem = format!("the session was with another {what}: {found}, this one is {expected}");
                return Err(Error::usage(problem));
            }
        }
        let state = u64::from_str_radix(&self.random, 16);
        let odd = |_| Error::usage(format!("`random` is `{}`, expected 16 hexadecimal digits", self.random));
        sampler.resume(state.map_err(odd)?);
        let n_vocab = dialogue.tokenizer().n_vocab();
        if let Some(id) = self.ids.iter().find(|id| **id as usize >= n_vocab) {
            return Err(Error::usage(format!("token {id} is not in the vocabulary of {n_vocab}")));
        }
        dialogue.resume(self.messages, self.ids);
        Ok(())
    }
}

fn tokenizer(dialogue: &Dialogue) -> String {
    blake3::Hash::from_bytes(dialogue.tokenizer().digest()).to_hex().to_string()
}
