//! Text to token ids and back, by the tables that the model's own metadata carries.
//!
//! Two kinds are known: byte-level BPE (a text is cut into words by a published rule, `split`, and the bytes of
//! a word are joined by a table of merges, `bpe`) and SentencePiece in the manner of llama (characters are
//! joined by score, `spm`). Both join by `merge`. Only rules that were held to a reference are accepted; for any
//! other model token ids still work, text does not.
//!
//! Control tokens are a matter of who wrote the text. `<|im_end|>` is one token where a chat template says it,
//! and ten characters where a user does; see [`Tokenizer::encode_around`]. Around the stretches that are plain,
//! nothing else changes: what stands between two control tokens is one text, whoever wrote which part.

mod bpe;
mod detokenizer;
mod merge;
mod special;
mod split;
mod spm;
mod vocabulary;

use std::ops::Range;

use thiserror::Error;

pub use detokenizer::Detokenizer;

use crate::tensor::{Metadata, MetadataError, Value};
use bpe::Bpe;
use spm::Spm;
use vocabulary::{Style, Tables, Vocabulary};

/// Why a model's text cannot be turned into ids.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key is missing or of the wrong kind.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// Another algorithm than byte-level BPE and SentencePiece.
    #[error(
        "tokenizer model `{found}` is not supported, expected `gpt2` or `llama`; token ids still work, with --tokens"
    )]
    Model {
        /// `tokenizer.ggml.model`.
        found: String,
    },
    /// A splitting rule that is missing or was not held to a reference.
    #[error(
        "pre-tokenizer `{found}` is not supported, so text cannot be split as this model expects; \
             token ids still work, with --tokens"
    )]
    Pre {
        /// `tokenizer.ggml.pre`, or `none`.
        found: String,
    },
    /// An element of the wrong kind.
    #[error("element {index} of `{key}` is not {expected}")]
    Element {
        /// The array's key.
        key: &'static str,
        /// Which element.
        index: usize,
        /// What it should be.
        expected: &'static str,
    },
    /// Tables of different lengths.
    #[error("`{key}` has {found} elements, expected one for each of {n_vocab} tokens")]
    Length {
        /// The array's key.
        key: &'static str,
        /// Its length.
        found: usize,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },
    /// Two ids for one text.
    #[error("tokens {first} and {second} are the same")]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// A merge that cannot be applied.
    #[error("merge {index} does not join two tokens")]
    Merge {
        /// Which merge.
        index: usize,
    },
    /// A special id outside the vocabulary.
    #[error("`{key}` is {found}, expected an id below {n_vocab}")]
    Id {
        /// The key.
        key: &'static str,
        /// The id.
        found: u32,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },
    /// A rule for words cannot be applied.
    #[error("the text cannot be cut into words: {0}")]
    Split(String),
    /// A byte that no token stands for.
    #[error("the vocabulary has no token for some byte of `{near}`")]
    Unspelled {
        /// The beginning of the word in question.
        near: String,
    },
}

impl TokenizerError {
    fn unspelled(word: &str) -> TokenizerError {
        TokenizerError::Unspelled { near: word.chars().take(20).collect() }
    }
}

/// What control tokens in a text are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `<|im_end|>` is the control token of that name: for prompts that are written token by token.
    Parse,
    /// `<|im_end|>` is ten characters: for what users wrote.
    Plain,
}

/// A model's tokenizer.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    engine: Engine,
    /// Whether a text begins with a space that nobody wrote.
    adds_space: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    ends: Vec<u32>,
    digest: [u8; 32],
}

/// What makes ids of text without special tokens.
enum Engine {
    Bpe(Bpe),
    Spm(Spm),
}

/// Control tokens that end a turn or a text in one family or another, whether or not a key points at them.
const ENDS: [&str; 8] = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
];

impl Tokenizer {
    /// The tokenizer that `metadata` describes.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`]: what is missing, malformed or not supported.
    pub fn from_metadata(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::with_rule(metadata, rule)
    }

    /// As [`Tokenizer::from_metadata`], with the words of gpt-2 where the model's own rule is not known: near
    /// enough to count routing over text, not to prompt a model.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`]: what is missing, malformed or not supported.
    pub fn near(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::with_rule(metadata, |metadata| {
            rule(metadata).or_else(|error| split::rule("gpt-2").ok_or(error))
        })
    }

    fn with_rule(
        metadata: &Metadata,
        rule: impl Fn(&Metadata) -> Result<&'static split::Rule, TokenizerError>,
    ) -> Result<Tokenizer, TokenizerError> {
        let style = match metadata.str("tokenizer.ggml.model")? {
            "gpt2" => Style::ByteLevel,
            "llama" => Style::SentencePiece,
            found => return Err(TokenizerError::Model { found: found.to_owned() }),
        };
        let rule = match style {
            Style::ByteLevel => Some(rule(metadata)?),
            Style::SentencePiece => None,
        };
        let tables = Tables::read(metadata, style)?;
        let vocabulary = tables.vocabulary();
        let n_vocab = tables.tokens.len();

        let id = |key| match metadata.optional_u32(key)? {
            Some(found) if found as usize >= n_vocab => Err(TokenizerError::Id { key, found, n_vocab }),
            id => Ok(id),
        };
        let (bos, eos) = (id("tokenizer.ggml.bos_token_id")?, id("tokenizer.ggml.eos_token_id")?);
        let (eot, eom) = (id("tokenizer.ggml.eot_token_id")?, id("tokenizer.ggml.eom_token_id")?);
        let add_bos = metadata
            .optional_bool("tokenizer.ggml.add_bos_token")?
            .unwrap_or(rule.is_none_or(|rule| rule.adds_bos));
        if add_bos && bos.is_none() {
            return Err(MetadataError::Missing("tokenizer.ggml.bos_token_id".to_owned()).into());
        }
        let named = ENDS.iter().filter_map(|name| vocabulary.control(name));
        let ends = [eos, eot, eom].into_iter().flatten().chain(named).collect();
        let space = metadata.optional_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let adds_space = space && style == Style::SentencePiece;
        let engine = match rule {
            Some(rule) => Engine::Bpe(Bpe::new(rule, &tables)?),
            None => Engine::Spm(Spm::new(&tables, adds_space)),
        };
        Ok(Tokenizer { vocabulary, engine, adds_space, bos, eos, add_bos, ends, digest: digest(metadata) })
    }

    /// The ids of `text`, after BOS where the model wants it. EOS is never added: it would end a prompt.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Unspelled`] for text that the vocabulary has no tokens for.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        match special {
            Special::Parse => self.encode_around(text, &[]),
            Special::Plain => self.encode_around(text, std::slice::from_ref(&(0..text.len()))),
        }
    }

    /// The ids of `text`, in which control tokens count but where they touch a range of `plain`. The ranges are
    /// in bytes and ascend. BOS comes first where the model wants it, once even if the text says it too.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Unspelled`] for text that the vocabulary has no tokens for.
    pub fn encode_around(&self, text: &str, plain: &[Range<usize>]) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        let mut begins = true;
        for part in special::split(text, self.vocabulary.specials(), plain) {
            match (part, &self.engine) {
                (special::Part::Token(id), _) => {
                    ids.push(id);
                    begins = true;
                    continue;
                }
                (special::Part::Text(range), Engine::Bpe(bpe)) => bpe.encode(&text[range], &mut ids)?,
                (special::Part::Text(range), Engine::Spm(spm)) => {
                    spm.encode(&text[range], begins, &mut ids)?;
                }
            }
            begins = false;
        }
        let bos = self.bos.filter(|bos| self.add_bos && ids.first() != Some(bos));
        ids.splice(0..0, bos);
        Ok(ids)
    }

    /// The text of `ids`, without control tokens and the space that encoding put first. Bytes that are no UTF-8,
    /// and ids outside the vocabulary, become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut detokenizer = self.detokenizer();
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        if self.adds_space && text.starts_with(' ') {
            text.remove(0);
        }
        text
    }

    /// A decoder that takes ids one at a time.
    pub fn detokenizer(&self) -> Detokenizer<'_> {
        Detokenizer::new(&self.vocabulary)
    }

    /// Tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.vocabulary.n_tokens()
    }

    /// The token that begins a text, where the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, where the model has one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether generation is over after `id`: the ids that the metadata names as ends of text, turn or message,
    /// and control tokens that are known to be that.
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The same as [`digest`] of the metadata.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

/// How a byte-level vocabulary cuts words.
fn rule(metadata: &Metadata) -> Result<&'static split::Rule, TokenizerError> {
    let pre = metadata.optional_str("tokenizer.ggml.pre")?.unwrap_or("none");
    split::rule(pre).ok_or_else(|| TokenizerError::Pre { found: pre.to_owned() })
}

/// A digest of all that decides how text becomes ids: every entry under `tokenizer.ggml.`. Two models with the
/// same digest tokenize alike, whatever else differs. Needs no supported tokenizer.
pub fn digest(metadata: &Metadata) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("orkpack tokenizer digest version 1");
    for (key, value) in metadata.0.iter().filter(|(key, _)| key.starts_with("tokenizer.ggml.")) {
        hash_bytes(&mut hasher, key.as_bytes());
        hash_value(&mut hasher, value);
    }
    *hasher.finalize().as_bytes()
}

fn hash_bytes(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
}

/// The kind, then the value; strings and arrays with their length first.
fn hash_value(hasher: &mut blake3::Hasher, value: &Value) {
    let mut number = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]).update(bytes);
    };
    match value {
        Value::U8(v) => number(0, &v.to_le_bytes()),
        Value::I8(v) => number(1, &v.to_le_bytes()),
        Value::U16(v) => number(2, &v.to_le_bytes()),
        Value::I16(v) => number(3, &v.to_le_bytes()),
        Value::U32(v) => number(4, &v.to_le_bytes()),
        Value::I32(v) => number(5, &v.to_le_bytes()),
        Value::F32(v) => number(6, &v.to_bits().to_le_bytes()),
        Value::Bool(v) => number(7, &[u8::from(*v)]),
        Value::String(bytes) => {
            number(8, &[]);
            hash_bytes(hasher, bytes);
        }
        Value::Array(values) => {
            number(9, &(values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| hash_value(hasher, value));
        }
        Value::U64(v) => number(10, &v.to_le_bytes()),
        Value::I64(v) => number(11, &v.to_le_bytes()),
        Value::F64(v) => number(12, &v.to_bits().to_le_bytes()),
    }
}
