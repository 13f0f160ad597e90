//! SentencePiece in the manner of llama: neighbours are joined by the score of the token that they make, and a
//! character without a token is spelled in bytes. `tokenizer.ggml.model` = `llama`.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::TokenizerError;
use super::merge::merge;
use super::vocabulary::{Kind, SPACE, Tables};

pub(super) struct Spm {
    /// Id of each token that text may become, and its key: the best score is the least.
    ids: HashMap<Box<str>, (u32, Reverse<i32>)>,
    /// The token of each byte, `<0x00>` and on.
    bytes: Vec<Option<u32>>,
    /// Whether a text begins with a space that nobody wrote.
    adds_space: bool,
    /// Whether no token has a space after another character, so that words can be merged one by one.
    splits_words: bool,
}

impl Spm {
    pub(super) fn new(tables: &Tables<'_>, adds_space: bool) -> Spm {
        let mut ids: HashMap<Box<str>, _> = HashMap::with_capacity(tables.tokens.len());
        let mut bytes = vec![None; 256];
        let tokens = tables.tokens.iter().zip(&tables.kinds).zip(&tables.scores);
        for (id, ((token, kind), score)) in (0..).zip(tokens) {
            match kind {
                Kind::Text => drop(ids.insert((*token).into(), (id, Reverse(sortable(*score))))),
                Kind::Byte(byte) => bytes[usize::from(*byte)] = Some(id),
                Kind::Control | Kind::UserDefined => {}
            }
        }
        let splits_words = ids.keys().all(|token| inner_space(token).is_none());
        Spm { ids, bytes, adds_space, splits_words }
    }

    /// Appends the ids of `text`, in which no special token counts. `begins`: nothing or a special token is
    /// before it.
    pub(super) fn encode(&self, text: &str, begins: bool, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let space = if begins && self.adds_space { " " } else { "" };
        let spaced = format!("{space}{text}").replace(' ', SPACE);
        let mut rest = spaced.as_str();
        while !rest.is_empty() {
            let end = if self.splits_words { inner_space(rest) } else { None };
            let (word, tail) = rest.split_at(end.unwrap_or(rest.len()));
            self.word(word, ids).ok_or_else(|| TokenizerError::unspelled(&word.replace(SPACE, " ")))?;
            rest = tail;
        }
        Ok(())
    }

    /// `None` for a byte without a token.
    fn word(&self, word: &str, ids: &mut Vec<u32>) -> Option<()> {
        for piece in merge(word, |joined, _| self.ids.get(joined).map(|(_, key)| *key)) {
            match self.ids.get(piece) {
                Some((id, _)) => ids.push(*id),
                None => piece.bytes().try_for_each(|byte| {
                    ids.push((*self.bytes.get(usize::from(byte))?)?);
                    Some(())
                })?,
            }
        }
        Some(())
    }
}

/// Where the first space begins that follows another character.
fn inner_space(text: &str) -> Option<usize> {
    let first = text.find(|c| !SPACE.contains(c))?;
    text[first..].find(SPACE).map(|at| first + at)
}

/// Integers in the order of the scores. Zeros are equal; none is NaN.
fn sortable(score: f32) -> i32 {
    let bits = (score + 0.0).to_bits() as i32;
    if bits < 0 { bits ^ i32::MAX } else { bits }
}
