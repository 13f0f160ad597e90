//! Calibration text: plain files, JSON lines and conversations, as the token ids that a model would read.
//!
//! A file is one text, or holds one a line (`.jsonl`) or one an item (a JSON array). What it is, its content says. The
//! built-in mixture is JSON lines too, so that there is one way in.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::chat::{ChatTemplate, Message};
use crate::error::{AtFile, Error};
use crate::progress::Progress;
use crate::tensor::TensorSource;
use crate::tokenizer::{Special, Tokenizer};

/// The built-in mixture by kind, a text or a conversation a line. fixtures/README.md says where they are from.
const BUILT_IN: [(&str, &str); 5] = [
    ("prose", include_str!("../../fixtures/calibration/prose.jsonl")),
    ("chat", include_str!("../../fixtures/calibration/chat.jsonl")),
    ("code", include_str!("../../fixtures/calibration/code.jsonl")),
    ("languages", include_str!("../../fixtures/calibration/languages.jsonl")),
    ("mathematics", include_str!("../../fixtures/calibration/mathematics.jsonl")),
];

/// What a calibration reads.
#[derive(Clone, Copy, Debug)]
pub enum Texts<'a> {
    /// The built-in mixture of conversations, prose, code, mathematics and languages.
    BuiltIn,
    /// Files of text, JSON lines or conversations.
    Files(&'a [PathBuf]),
    /// These, each on its own.
    Plain(&'a [&'a str]),
}

/// A text and where it is from: the file, with the number of the line or item.
#[derive(Debug, PartialEq)]
struct Prompt {
    place: PathBuf,
    content: Content,
}

#[derive(Debug, PartialEq)]
enum Content {
    Text(String),
    Chat(Vec<Message>),
}

impl Texts<'_> {
    /// The texts as token ids, conversations through the model's own template where it has one that takes them, else
    /// one message after the other; a note says so of conversations in files.
    ///
    /// # Errors
    ///
    /// [`Error`] with file and line for what is no text, and for text that the vocabulary cannot spell.
    pub(super) fn encode(
        &self,
        model: &Path,
        source: &dyn TensorSource,
        tokenizer: &Tokenizer,
        progress: &mut dyn Progress,
    ) -> Result<Vec<Vec<u32>>, Error> {
        let (template, mut refusal) = match ChatTemplate::from_metadata(source.metadata()) {
            Ok(Some(template)) => (Some(template), None),
            Ok(None) => (None, Some("the model has no chat template".to_owned())),
            Err(error) => (None, Some(error.to_string())),
        };
        let mut n_untold = 0;
        let mut encode = |prompt: &Prompt| {
            let messages = match &prompt.content {
                Content::Text(text) => return tokenizer.encode(text, Special::Plain),
                Content::Chat(messages) => messages,
            };
            if let Some(template) = &template {
                match template.render(messages, false) {
                    Ok(told) => return tokenizer.encode_around(&told.text, &told.foreign),
                    Err(error) => {
                        refusal.get_or_insert_with(|| format!("{}: {error}", prompt.place.display()));
                    }
                }
            }
            n_untold += 1;
            let lines: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
            tokenizer.encode(&lines.join("\n"), Special::Plain)
        };
        let mut texts = Vec::new();
        for prompt in self.prompts()? {
            let file = if matches!(self, Texts::Files(_)) { prompt.place.as_path() } else { model };
            texts.push(encode(&prompt).at(file)?);
        }
        // Of conversations that nobody gave there is nothing to say.
        if let Some(why) = refusal.filter(|_| n_untold > 0 && matches!(self, Texts::Files(_))) {
            progress.note(&format!(
                "note: {n_untold} conversations are read as plain text, their messages one after the other: {why}"
            ));
        }
        Ok(texts)
    }

    fn prompts(&self) -> Result<Vec<Prompt>, Error> {
        match self {
            Texts::BuiltIn => {
                let kinds = BUILT_IN.map(|(kind, lines)| parse(Path::new(kind), lines.as_bytes()));
                Ok(interleave(kinds.into_iter().collect::<Result<_, _>>()?))
            }
            Texts::Files(files) => {
                let mut prompts = Vec::new();
                for file in *files {
                    prompts.extend(parse(file, &fs::read(file).at(file)?)?);
                }
                Ok(prompts)
            }
            Texts::Plain(texts) => Ok(texts.iter().map(|text| plain(Path::new(""), text)).collect()),
        }
    }
}

/// One list in which every kind is spread evenly, so that any front of it is a fair mixture.
fn interleave(kinds: Vec<Vec<Prompt>>) -> Vec<Prompt> {
    let mut spread = Vec::new();
    for (kind, prompts) in kinds.into_iter().enumerate() {
        let n = prompts.len();
        // The middle of the i-th of n equal parts, as a fraction with one denominator for all.
        let place = |i: usize| ((2 * i as u64 + 1) << 32) / (2 * n as u64).max(1);
        spread.extend(prompts.into_iter().enumerate().map(|(i, prompt)| (place(i), kind, prompt)));
    }
    spread.sort_by_key(|(place, kind, _)| (*place, *kind));
    spread.into_iter().map(|(.., prompt)| prompt).collect()
}

/// How many texts and conversations calibration would read of a file of this name and content.
///
/// # Errors
///
/// [`Error`] with file and line for what is no text.
pub fn count_texts(file: &Path, bytes: &[u8]) -> Result<usize, Error> {
    Ok(parse(file, bytes)?.len())
}

/// The texts of a file.
fn parse(file: &Path, bytes: &[u8]) -> Result<Vec<Prompt>, Error> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = String::from_utf8_lossy(bytes);
    let lines = || text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    if let Ok(Value::Array(items)) = serde_json::from_str(&text) {
        let places = (1..).map(|i| file.with_file_name(format!("{}: item {i}", name(file))));
        let prompts = items.into_iter().zip(places).map(|(item, place)| prompt(place, item));
        return prompts.filter(|prompt| !matches!(prompt, Ok(prompt) if prompt.is_blank())).collect();
    }
    let is_named = file.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson");
    // An object in the first line is enough: a broken line further down is then a fault, not a sign of plain text.
    let is_text = |line: &str| matches!(serde_json::from_str(line), Ok(Value::Object(_) | Value::String(_)));
    let first = lines().next().and_then(|(_, line)| serde_json::from_str(line).ok());
    let begins = matches!(first, Some(Value::Object(_)));
    if !(is_named || begins || (first.is_some() && lines().all(|(_, line)| is_text(line)))) {
        return Ok(vec![plain(file, &text)]);
    }
    let mut prompts = Vec::new();
    for (i, line) in lines() {
        let place = file.with_file_name(format!("{}:{}", name(file), i + 1));
        let value = serde_json::from_str(line).map_err(|error| {
            // The position in the line; the line's own number is in the place.
            let (column, what) =
                (error.column(), if error.is_eof() { "it ends too early" } else { "it is no JSON" });
            Error::usage(format!("{what}, column {column}; expected one text or conversation a line as JSON"))
                .or_at(&place)
        })?;
        prompts.push(prompt(place, value)?);
    }
    prompts.retain(|prompt| !prompt.is_blank());
    Ok(prompts)
}

impl Prompt {
    /// Whether it says nothing.
    fn is_blank(&self) -> bool {
        match &self.content {
            Content::Text(text) => text.trim().is_empty(),
            Content::Chat(messages) => messages.iter().all(|message| message.content.trim().is_empty()),
        }
    }
}

fn name(file: &Path) -> std::borrow::Cow<'_, str> {
    file.file_name().unwrap_or_default().to_string_lossy()
}

fn plain(file: &Path, text: &str) -> Prompt {
    Prompt { place: file.to_owned(), content: Content::Text(text.to_owned()) }
}

/// A text or a conversation in one of the forms that are in use.
fn prompt(place: PathBuf, value: Value) -> Result<Prompt, Error> {
    let content = match value {
        Value::String(text) => Ok(Content::Text(text)),
        Value::Object(fields) => content(&fields),
        _ => Err("it is neither a string nor an object".to_owned()),
    };
    match content {
        Ok(content) => Ok(Prompt { place, content }),
        Err(what) => Err(Error::usage(what).or_at(&place)),
    }
}

fn content(fields: &Map<String, Value>) -> Result<Content, String> {
    if let Some(messages) = fields.get("messages") {
        return messages_of(messages, "messages", ["role", "content"]).map(Content::Chat);
    }
    if let Some(messages) = fields.get("conversations") {
        return messages_of(messages, "conversations", ["from", "value"]).map(Content::Chat);
    }
    let text = ["text", "prompt", "content"].iter().find_map(|key| Some((key, fields.get(*key)?)));
    match text {
        Some((_, Value::String(text))) => Ok(Content::Text(text.clone())),
        Some((key, _)) => Err(format!("`{key}` is no string")),
        None => Err("it has none of `text`, `prompt`, `content`, `messages` and `conversations`".to_owned()),
    }
}

/// The messages of a list whose items call the speaker and what is said as `keys` says.
fn messages_of(list: &Value, field: &str, keys: [&str; 2]) -> Result<Vec<Message>, String> {
    let Value::Array(list) = list else { return Err(format!("`{field}` is no list")) };
    let message = |(i, item): (usize, &Value)| {
        let [role, said] = keys.map(|key| item.get(key));
        let wrong = |key: &str| format!("message {} of `{field}` has no `{key}` that is text", i + 1);
        let role = match role.and_then(Value::as_str).ok_or_else(|| wrong(keys[0]))? {
            "human" => "user",
            "gpt" => "assistant",
            role => role,
        };
        let content = said.and_then(words).ok_or_else(|| wrong(keys[1]))?;
        Ok(Message { role: role.to_owned(), content })
    };
    list.iter().enumerate().map(message).collect()
}

/// What a message says: a string, nothing, or parts of which those of text count.
fn words(said: &Value) -> Option<String> {
    match said {
        Value::String(text) => Some(text.clone()),
        Value::Null => Some(String::new()),
        Value::Array(parts) => Some(parts.iter().filter_map(|part| part.get("text")?.as_str()).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(file: &str, bytes: &str) -> Result<Vec<Content>, String> {
        let prompts = parse(Path::new(file), bytes.as_bytes()).map_err(|error| error.to_string())?;
        Ok(prompts.into_iter().map(|prompt| prompt.content).collect())
    }

    fn text(text: &str) -> Content {
        Content::Text(text.to_owned())
    }

    fn chat(turns: &[(&str, &str)]) -> Content {
        let message = |&(role, said): &(&str, &str)| Message { role: role.into(), content: said.into() };
        Content::Chat(turns.iter().map(message).collect())
    }

    #[test]
    fn files_are_told_apart_by_their_content() {
        let told = chat(&[("user", "Hi"), ("assistant", "Hello")]);
        let cases = [
            ("a.txt", "Plain\ntext.\n", vec![text("Plain\ntext.\n")]),
            // Prose may begin with a quotation, code with a brace.
            ("a.txt", "\"Come in!\"\nsaid she.", vec![text("\"Come in!\"\nsaid she.")]),
            ("a.txt", "{\n  x\n}", vec![text("{\n  x\n}")]),
            ("a.txt", "\"one\"\r\n\r\n\"two\"\r\n", vec![text("one"), text("two")]),
            (
                "a.txt",
                "\u{feff}{\"text\": \"one\"}\r\n{\"prompt\": \"two\"}\r\n",
                vec![text("one"), text("two")],
            ),
            ("a.jsonl", "\"one\"\n{\"content\": \"two\", \"id\": 7}\n\"  \"", vec![text("one"), text("two")]),
            (
                "a",
                r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}"#,
                vec![chat(&[("user", "Hi"), ("assistant", "Hello")])],
            ),
            (
                "a",
                r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}"#,
                vec![told],
            ),
            (
                "a.json",
                "[\n \"one\",\n {\"messages\": [{\"role\": \"tool\", \"content\": [{\"type\": \"text\", \"text\": \"x\"}]}]}\n]",
                vec![text("one"), chat(&[("tool", "x")])],
            ),
        ];
        for (file, bytes, expected) in cases {
            assert_eq!(parsed(file, bytes).unwrap(), expected, "{bytes}");
        }
    }

    #[test]
    fn what_is_no_text_is_named_by_line() {
        for (file, bytes, expected) in [
            ("d/a.jsonl", "\"one\"\n\n{\"text\": \"tw", "d/a.jsonl:3: it ends too early, column 12"),
            ("d/a.txt", "{\"text\": \"one\"}\r\nplain\r\n", "d/a.txt:2: it is no JSON, column 1"),
            ("a.jsonl", "7", "a.jsonl:1: it is neither a string nor an object"),
            ("a.jsonl", "{\"txt\": \"one\"}", "a.jsonl:1: it has none of `text`, `prompt`"),
            ("a.jsonl", "{\"text\": 7}", "a.jsonl:1: `text` is no string"),
            ("a.jsonl", "{\"messages\": {}}", "a.jsonl:1: `messages` is no list"),
            (
                "a.jsonl",
                "{\"messages\": [{\"role\": \"user\"}]}",
                "a.jsonl:1: message 1 of `messages` has no `content` that is text",
            ),
            (
                "a.jsonl",
                "{\"conversations\": [{\"role\": \"user\"}]}",
                "a.jsonl:1: message 1 of `conversations` has no `from` that is text",
            ),
            ("a.json", "[\"one\", 2]", "a.json: item 2: it is neither a string nor an object"),
        ] {
            let error = parsed(file, bytes).unwrap_err();
            assert!(error.starts_with(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn any_front_of_the_built_in_mixture_has_every_kind() {
        let prompts = Texts::BuiltIn.prompts().unwrap();
        let kind =
            |prompt: &Prompt| prompt.place.to_string_lossy().split(':').next().unwrap_or_default().to_owned();
        for (name, _) in BUILT_IN {
            let places: Vec<usize> = (0..prompts.len()).filter(|&i| kind(&prompts[i]) == name).collect();
            let most = prompts.len() / places.len() + 3;
            assert!(places.len() >= 12 && places[0] < most, "{name}: {places:?}");
            assert!(places.windows(2).all(|pair| pair[1] - pair[0] <= most), "{name}: {places:?}");
        }
    }
}
