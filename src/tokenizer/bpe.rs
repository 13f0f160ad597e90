//! Byte-level BPE: words of bytes, joined in the order of the merges table. `tokenizer.ggml.model` = `gpt2`.

use std::collections::HashMap;

use super::TokenizerError;
use super::merge::merge;
use super::split::{Rule, Splitter};
use super::vocabulary::{Kind, Tables, byte_char};

pub(super) struct Bpe {
    splitter: Splitter,
    takes_whole: bool,
    /// Id of each token, and whether it may stand for text.
    ids: HashMap<Box<str>, (u32, bool)>,
    /// Place in the merges table of a pair of tokens.
    ranks: HashMap<(u32, u32), u32>,
}

impl Bpe {
    pub(super) fn new(rule: &Rule, tables: &Tables<'_>) -> Result<Bpe, TokenizerError> {
        let tokens = (0..).zip(tables.tokens.iter().zip(&tables.kinds));
        let ids: HashMap<Box<str>, (u32, bool)> =
            tokens.map(|(id, (token, kind))| ((*token).into(), (id, *kind == Kind::Text))).collect();
        let mut ranks = HashMap::with_capacity(tables.merges.len());
        for (index, pair) in tables.merges.iter().enumerate() {
            let id = |token: &str| ids.get(token).map(|(id, _)| *id);
            let pair = pair.split_once(' ').and_then(|(left, right)| id(left).zip(id(right)));
            let rank = u32::try_from(index).ok();
            let (pair, rank) = pair.zip(rank).ok_or(TokenizerError::Merge { index })?;
            ranks.entry(pair).or_insert(rank);
        }
        Ok(Bpe { splitter: Splitter::new(rule)?, takes_whole: rule.takes_whole, ids, ranks })
    }

    /// Appends the ids of `text`, in which no special token counts.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        for word in self.splitter.words(text)? {
            self.word(&word.bytes().map(byte_char).collect::<String>(), ids)
                .ok_or_else(|| TokenizerError::unspelled(word))?;
        }
        Ok(())
    }

    /// `None` for a byte without a token.
    fn word(&self, word: &str, ids: &mut Vec<u32>) -> Option<()> {
        if self.takes_whole
            && let Some(id) = self.text_id(word)
        {
            ids.push(id);
            return Some(());
        }
        for piece in merge(word, |joined, middle| self.rank(joined.split_at(middle))) {
            match self.text_id(piece) {
                Some(id) => ids.push(id),
                None => piece.chars().try_for_each(|byte| {
                    ids.push(self.text_id(byte.encode_utf8(&mut [0; 4]))?);
                    Some(())
                })?,
            }
        }
        Some(())
    }

    fn rank(&self, (left, right): (&str, &str)) -> Option<u32> {
        let ((left, _), (right, _)) = (self.ids.get(left)?, self.ids.get(right)?);
        self.ranks.get(&(*left, *right)).copied()
    }

    /// A text never becomes a control token, whatever the merges make of it.
    fn text_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).filter(|(_, is_text)| *is_text).map(|(id, _)| *id)
    }
}
