//! Control and user-defined tokens inside a text: taken out whole before anything else is split.

use std::ops::Range;

use super::vocabulary::{Kind, SpecialToken};

/// A stretch of a text.
pub(super) enum Part {
    Token(u32),
    /// Bytes from and to, never empty.
    Text(Range<usize>),
}

/// Cuts `text` at every special token that counts. As in llama.cpp a longer token goes first everywhere, even
/// where a shorter one begins before it. Control tokens do not count where they touch a range of `plain`,
/// which ascend; user-defined ones always do.
pub(super) fn split(text: &str, specials: &[SpecialToken], plain: &[Range<usize>]) -> Vec<Part> {
    let whole = 0..text.len();
    let is_plain = plain.contains(&whole);
    let mut parts = if whole.is_empty() { Vec::new() } else { vec![Part::Text(whole)] };
    for token in specials.iter().filter(|token| token.kind == Kind::UserDefined || !is_plain) {
        if text.contains(&token.text) {
            parts = parts.into_iter().flat_map(|part| cut(part, text, token, plain)).collect();
        }
    }
    parts
}

fn cut(part: Part, text: &str, token: &SpecialToken, plain: &[Range<usize>]) -> Vec<Part> {
    let Part::Text(range) = part else { return vec![part] };
    let mut parts = Vec::new();
    let (mut done, mut from) = (range.start, range.start);
    while let Some(at) = text[from..range.end].find(&token.text) {
        let found = from + at..from + at + token.text.len();
        if token.kind == Kind::Control && touches(&found, plain) {
            from = text.ceil_char_boundary(found.start + 1);
            continue;
        }
        parts.push(Part::Text(done..found.start));
        parts.push(Part::Token(token.id));
        (done, from) = (found.end, found.end);
    }
    parts.push(Part::Text(done..range.end));
    parts.retain(|part| !matches!(part, Part::Text(range) if range.is_empty()));
    parts
}

fn touches(found: &Range<usize>, plain: &[Range<usize>]) -> bool {
    let after = plain.partition_point(|range| range.end <= found.start);
    plain.get(after).is_some_and(|range| range.start < found.end)
}
