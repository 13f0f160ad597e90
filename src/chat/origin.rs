//! Who wrote which part of a rendered prompt: the template, or somebody in a message.
//!
//! A template may do anything with a message, so its output is not searched for messages. It is rendered again
//! with messages that can be told from the template's text, and the answer is used only if it explains the
//! prompt to the byte. Three ways, the first that does:
//!
//! 1. Each content is replaced by a name that nobody can guess. If the prompt is that rendering with the
//!    contents put back, the contents lie where the names are.
//! 2. Where the template trims, splits or writes JSON: the beginning of each content, and each character that
//!    begins a control token, is marked by a character that occurs nowhere else. If the prompt is that rendering
//!    without the marks, the characters after a mark came from a message. A token needs its first character.
//! 3. Where the template looks closer than that: a control token that some message holds, or that the prompt
//!    holds more often than the rendering with names, counts nowhere in this prompt.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Message;

/// Unicode sets these apart for private use inside of programs: they are no characters of any text.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The ranges of `prompt`, in bytes and ascending, in which none of the tokens `controls` counts. `render` does
/// to other messages what made `prompt` of `messages`.
pub(super) fn foreign(
    prompt: &str,
    messages: &[Message],
    controls: &[String],
    render: impl Fn(&[Message]) -> Option<String>,
) -> Vec<Range<usize>> {
    let prefix = name_prefix(messages);
    let name = |index: usize| format!("{prefix}{index}x");
    let named = render(&with_contents(messages, |index, _| name(index)));
    let by_name = named.as_deref().and_then(|named| by_name(prompt, messages, &prefix, named));
    by_name
        .or_else(|| by_mark(prompt, messages, controls, render))
        .unwrap_or_else(|| distrusted(prompt, messages, controls, named.as_deref().unwrap_or_default()))
}

fn with_contents(messages: &[Message], content: impl Fn(usize, &str) -> String) -> Vec<Message> {
    let other = |(index, message): (usize, &Message)| {
        let content = content(index, &message.content);
        Message { role: message.role.clone(), content }
    };
    messages.iter().enumerate().map(other).collect()
}

/// What all names begin with: lower-case letters and digits, so that nothing is trimmed or escaped. It depends
/// on every byte of every message, so no message can hold it.
fn name_prefix(messages: &[Message]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("orkpack names of messages version 1");
    for Message { role, content } in messages {
        [role, content].iter().for_each(|text| {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        });
    }
    format!("x{}n", hasher.finalize().to_hex())
}

/// Where the contents are, if `named` with contents for names is `prompt`.
fn by_name(prompt: &str, messages: &[Message], prefix: &str, named: &str) -> Option<Vec<Range<usize>>> {
    let mut parts = named.split(prefix);
    let mut rebuilt = parts.next()?.to_owned();
    let mut ranges = Vec::new();
    for part in parts {
        let (index, text) = part.split_once('x')?;
        let content = &messages.get(index.parse::<usize>().ok()?)?.content;
        ranges.push(rebuilt.len()..rebuilt.len() + content.len());
        rebuilt.push_str(content);
        rebuilt.push_str(text);
    }
    (rebuilt == prompt).then_some(ranges)
}

/// The marked characters, if the rendering with marks is `prompt` with marks.
fn by_mark(
    prompt: &str,
    messages: &[Message],
    controls: &[String],
    render: impl Fn(&[Message]) -> Option<String>,
) -> Option<Vec<Range<usize>>> {
    let is_used = |mark| prompt.contains(mark) || messages.iter().any(|m| m.content.contains(mark));
    let mark = MARKS.into_iter().find(|mark| !is_used(*mark))?;
    let begins: BTreeSet<char> = controls.iter().filter_map(|token| token.chars().next()).collect();
    let marked = render(&with_contents(messages, |_, content| marked(content, mark, &begins)))?;
    let (mut rebuilt, mut ranges) = (String::with_capacity(prompt.len()), Vec::new());
    for (index, part) in marked.split(mark).enumerate() {
        if index > 0
            && let Some(first) = part.chars().next()
        {
            ranges.push(rebuilt.len()..rebuilt.len() + first.len_utf8());
        }
        rebuilt.push_str(part);
    }
    (rebuilt == prompt).then_some(ranges)
}

fn marked(content: &str, mark: char, begins: &BTreeSet<char>) -> String {
    let first = content.find(|c: char| !c.is_whitespace());
    let mut out = String::with_capacity(content.len());
    for (at, c) in content.char_indices() {
        if first == Some(at) || begins.contains(&c) {
            out.push(mark);
        }
        out.push(c);
    }
    out
}

/// Every place of every control token that may have come from a message.
fn distrusted(prompt: &str, messages: &[Message], controls: &[String], named: &str) -> Vec<Range<usize>> {
    let is_distrusted = |token: &&String| {
        messages.iter().any(|message| message.content.contains(token.as_str()))
            || prompt.matches(token.as_str()).count() > named.matches(token.as_str()).count()
    };
    let places = |token: &String| {
        prompt.match_indices(token.as_str()).map(|(at, found)| at..at + found.len()).collect::<Vec<_>>()
    };
    let mut all: Vec<Range<usize>> = controls.iter().filter(is_distrusted).flat_map(places).collect();
    all.sort_unstable_by_key(|range| (range.start, range.end));
    // One range where they overlap.
    let mut apart: Vec<Range<usize>> = Vec::new();
    for range in all {
        match apart.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => apart.push(range),
        }
    }
    apart
}
