//! The tokenizer's tables, checked: what each id stands for, and which ids are no ordinary text.

use std::collections::HashMap;

use super::TokenizerError;
use crate::tensor::{Metadata, MetadataError, Value};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

/// How SentencePiece writes a space.
pub(super) const SPACE: &str = "\u{2581}";

/// How tokens are written, and which further table there is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Each byte as one character, and merges.
    ByteLevel,
    /// As text with [`SPACE`], and scores.
    SentencePiece,
}

/// What a token is. Source: the numbers of `tokenizer.ggml.token_type`; all others are text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, in the vocabulary's style.
    Text,
    /// One byte of a character that has no token: written `<0x0A>`, in SentencePiece vocabularies only.
    Byte(u8),
    /// Not part of any text: 2 (unknown) or 3 (control).
    Control,
    /// Text as it stands, always one token: 4 (user-defined).
    UserDefined,
}

/// The tables as the metadata holds them, after every check.
pub(super) struct Tables<'a> {
    style: Style,
    pub(super) tokens: Vec<&'a str>,
    /// One for each token.
    pub(super) kinds: Vec<Kind>,
    /// Pairs of tokens with a space between; none in SentencePiece vocabularies.
    pub(super) merges: Vec<&'a str>,
    /// One for each token, none of them NaN; none at all in byte-level vocabularies.
    pub(super) scores: Vec<f32>,
}

impl<'a> Tables<'a> {
    pub(super) fn read(metadata: &'a Metadata, style: Style) -> Result<Tables<'a>, TokenizerError> {
        let tokens = strings(array(metadata, TOKENS)?, TOKENS)?;
        let (mut merges, mut scores) = (Vec::new(), Vec::new());
        match style {
            Style::ByteLevel => merges = strings(array(metadata, MERGES)?, MERGES)?,
            Style::SentencePiece => scores = numbers(array(metadata, SCORES)?, tokens.len())?,
        }
        let mut kinds = match metadata.get(TOKEN_TYPES) {
            Some(_) => kinds(array(metadata, TOKEN_TYPES)?, tokens.len())?,
            None => vec![Kind::Text; tokens.len()],
        };
        if style == Style::SentencePiece {
            let bytes = kinds.iter_mut().zip(&tokens).filter(|(kind, _)| **kind == Kind::Text);
            bytes.for_each(|(kind, token)| *kind = byte(token).map_or(Kind::Text, Kind::Byte));
        }
        let ids = ids(&tokens)?;
        let joins_tokens = |merge: &str| {
            merge
                .split_once(' ')
                .is_some_and(|(a, b)| !b.contains(' ') && ids.contains_key(a) && ids.contains_key(b))
        };
        match merges.iter().position(|merge| !joins_tokens(merge)) {
            Some(index) => Err(TokenizerError::Merge { index }),
            None => Ok(Tables { style, tokens, kinds, merges, scores }),
        }
    }

    /// What decoding needs.
    pub(super) fn vocabulary(&self) -> Vocabulary {
        let mut vocabulary = Vocabulary { bytes: Vec::new(), ends: Vec::new(), specials: Vec::new() };
        for (id, (token, kind)) in (0..).zip(self.tokens.iter().zip(&self.kinds)) {
            match (kind, self.style) {
                (Kind::Text, Style::ByteLevel) => {
                    token.chars().for_each(|c| push_byte(c, &mut vocabulary.bytes));
                }
                (Kind::Text, Style::SentencePiece) => {
                    vocabulary.bytes.extend(token.replace(SPACE, " ").as_bytes());
                }
                (Kind::Byte(byte), _) => vocabulary.bytes.push(*byte),
                (Kind::UserDefined, _) => vocabulary.bytes.extend(token.as_bytes()),
                (Kind::Control, _) => {}
            }
            vocabulary.ends.push(vocabulary.bytes.len());
            if matches!(kind, Kind::Control | Kind::UserDefined) && !token.is_empty() {
                vocabulary.specials.push(SpecialToken { text: token.to_string(), id, kind: *kind });
            }
        }
        vocabulary.specials.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
        vocabulary
    }
}

/// The byte that `<0x0A>` stands for.
fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)
}

fn array<'a>(metadata: &'a Metadata, key: &'static str) -> Result<&'a [Value], TokenizerError> {
    match metadata.get(key) {
        Some(Value::Array(values)) => Ok(values),
        Some(other) => {
            let (key, found) = (key.to_owned(), other.describe());
            Err(MetadataError::Wrong { key, found, expected: "an array" }.into())
        }
        None => Err(MetadataError::Missing(key.to_owned()).into()),
    }
}

fn strings<'a>(values: &'a [Value], key: &'static str) -> Result<Vec<&'a str>, TokenizerError> {
    let string = |(index, value): (usize, &'a Value)| {
        value.as_str().ok_or(TokenizerError::Element { key, index, expected: "a UTF-8 string" })
    };
    values.iter().enumerate().map(string).collect()
}

fn kinds(values: &[Value], n_vocab: usize) -> Result<Vec<Kind>, TokenizerError> {
    if values.len() != n_vocab {
        return Err(TokenizerError::Length { key: TOKEN_TYPES, found: values.len(), n_vocab });
    }
    let kind = |(index, value): (usize, &Value)| match value.as_u64() {
        Some(2 | 3) => Ok(Kind::Control),
        Some(4) => Ok(Kind::UserDefined),
        Some(_) => Ok(Kind::Text),
        None => Err(TokenizerError::Element { key: TOKEN_TYPES, index, expected: "a token type" }),
    };
    values.iter().enumerate().map(kind).collect()
}

fn numbers(values: &[Value], n_vocab: usize) -> Result<Vec<f32>, TokenizerError> {
    if values.len() != n_vocab {
        return Err(TokenizerError::Length { key: SCORES, found: values.len(), n_vocab });
    }
    let number = |(index, value): (usize, &Value)| match value {
        Value::F32(score) if !score.is_nan() => Ok(*score),
        _ => Err(TokenizerError::Element { key: SCORES, index, expected: "a number of 32 bits" }),
    };
    values.iter().enumerate().map(number).collect()
}

fn ids<'a>(tokens: &[&'a str]) -> Result<HashMap<&'a str, u32>, TokenizerError> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, token) in (0..).zip(tokens) {
        if let Some(first) = ids.insert(*token, id) {
            return Err(TokenizerError::DuplicateToken { first, second: id });
        }
    }
    Ok(ids)
}

/// Appends the byte that a character of a byte-level vocabulary stands for.
///
/// The bytes that print stand for themselves; the 68 others are written U+0100 and on, in order:
///
/// ```text
/// byte   00..=20     21..=7e   7f..=a0     a1..=ac   ad       ae..=ff
/// char   U+0100..    itself    U+0121..    itself    U+0143   itself
/// ```
///
/// A character that is neither is no byte-level text; it stands for itself.
fn push_byte(c: char, bytes: &mut Vec<u8>) {
    match c as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => bytes.push(code as u8),
        code @ 0x100..=0x120 => bytes.push((code - 0x100) as u8),
        code @ 0x121..=0x142 => bytes.push((code - 0x121 + 0x7f) as u8),
        0x143 => bytes.push(0xad),
        _ => bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
    }
}

/// The character that stands for `byte` in a byte-level vocabulary.
pub(super) fn byte_char(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x00..=0x20 => code + 0x100,
        0x7f..=0xa0 => code - 0x7f + 0x121,
        0xad => 0x143,
        _ => code,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// A token that is taken whole out of a text before it is split.
pub(super) struct SpecialToken {
    pub(super) text: String,
    pub(super) id: u32,
    pub(super) kind: Kind,
}

/// What each id stands for in text.
pub(super) struct Vocabulary {
    /// All tokens' bytes, one after the other; control tokens have none.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<usize>,
    /// Longest first, then by id.
    specials: Vec<SpecialToken>,
}

impl Vocabulary {
    pub(super) fn n_tokens(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; `None` outside the vocabulary.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let begin = if id == 0 { 0 } else { *self.ends.get(id - 1)? };
        self.bytes.get(begin..*self.ends.get(id)?)
    }

    pub(super) fn specials(&self) -> &[SpecialToken] {
        &self.specials
    }

    /// The id of a control token.
    pub(super) fn control(&self, text: &str) -> Option<u32> {
        let special = self.specials.iter().find(|special| special.text == text)?;
        (special.kind == Kind::Control).then_some(special.id)
    }
}
