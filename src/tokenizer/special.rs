//! Control and user-defined tokens inside a text: taken out whole before anything else is split.

use super::Special;
use super::vocabulary::{Kind, SpecialToken};

/// A stretch of a text.
pub(super) enum Part<'a> {
    Token(u32),
    Text(&'a str),
}

/// Cuts `text` at every special token that counts. As in llama.cpp a longer token goes first everywhere, even
/// where a shorter one begins before it; user-defined tokens count in plain text too.
pub(super) fn split<'a>(text: &'a str, specials: &[SpecialToken], special: Special) -> Vec<Part<'a>> {
    let counts = |token: &&SpecialToken| special == Special::Parse || token.kind == Kind::UserDefined;
    let mut parts = vec![Part::Text(text)];
    for token in specials.iter().filter(counts) {
        if text.contains(&token.text) {
            parts = parts.into_iter().flat_map(|part| cut(part, token)).collect();
        }
    }
    parts
}

fn cut<'a>(part: Part<'a>, token: &SpecialToken) -> Vec<Part<'a>> {
    let Part::Text(text) = part else { return vec![part] };
    let mut parts = Vec::new();
    for (index, text) in text.split(&token.text).enumerate() {
        if index > 0 {
            parts.push(Part::Token(token.id));
        }
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
    }
    parts
}
