//! The model's own chat template, rendered: messages in, the text that the model was trained on out.
//!
//! The template is a program from a stranger's file. It runs without files, network, clock or randomness, with
//! a bounded number of steps and a bounded depth, and it is never replaced by another when it fails. What it
//! builds in memory is not bounded.
//!
//! Only the template's own text may become control tokens, never what a message says. So a rendered prompt
//! comes with the ranges that messages wrote; how they are found is said in `origin`.

mod origin;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;

use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, ErrorKind, State, Value as Jinja};
use minijinja_contrib::pycompat;
use serde::{Deserialize, Serialize};
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};
use thiserror::Error;

use crate::tensor::{Metadata, MetadataError, Value};

const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// Steps that a template may take; real ones take a few hundred for each message.
const FUEL: u64 = 200_000;

/// Depth of macros, includes and recursive loops.
const RECURSION: usize = 64;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// `system`, `user` or `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// What the model reads. Control tokens stand in it as text.
    pub text: String,
    /// Ranges of the text in bytes, ascending, in which no control token counts as the template did not write
    /// it there: for [`crate::tokenizer::Tokenizer::encode_around`].
    pub foreign: Vec<Range<usize>>,
}

/// Why there is no prompt.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ChatError {
    /// The template, or a token that it may ask for, is not what it should be.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The template cannot be read.
    #[error("the chat template is not valid, line {line}: {problem}")]
    Syntax {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// The template does not accept these messages.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template runs on and on.
    #[error("the chat template does not end within {FUEL} steps")]
    Endless,
    /// The template asks for something that is not there.
    #[error("the chat template failed, line {line}: {problem}")]
    Render {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

impl ChatError {
    /// What the user may do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ChatError::Refused(_) => None,
            _ => Some("the prompt can be given as it is with --raw"),
        }
    }
}

/// A model's chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    /// The texts of the control tokens.
    controls: Vec<String>,
    /// What the user sets, beside what every template gets.
    arguments: BTreeMap<String, Jinja>,
}

impl ChatTemplate {
    /// The template under `tokenizer.chat_template`; `None` where there is none.
    ///
    /// # Errors
    ///
    /// [`ChatError::Metadata`] or [`ChatError::Syntax`]: the template cannot be used.
    pub fn from_metadata(metadata: &Metadata) -> Result<Option<ChatTemplate>, ChatError> {
        let source = metadata.optional_str(TEMPLATE_KEY)?;
        source.map(|source| ChatTemplate::new(source, metadata)).transpose()
    }

    /// A template that the file does not carry, for the model of this metadata.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::from_metadata`].
    pub fn new(source: &str, metadata: &Metadata) -> Result<ChatTemplate, ChatError> {
        let mut environment = environment();
        environment.add_template_owned("chat", source.to_owned()).map_err(|error| ChatError::Syntax {
            line: error.line().unwrap_or(0),
            problem: problem(&error),
        })?;
        let bos_token = token(metadata, "tokenizer.ggml.bos_token_id")?;
        let eos_token = token(metadata, "tokenizer.ggml.eos_token_id")?;
        let (controls, arguments) = (controls(metadata), BTreeMap::new());
        Ok(ChatTemplate { environment, bos_token, eos_token, controls, arguments })
    }

    /// Sets one of the template's own variables. What reads as a boolean, a number or null of JSON is that, all else
    /// a string. What every template gets anyway cannot be set.
    pub fn set(&mut self, name: &str, value: &str) {
        self.arguments.insert(name.to_owned(), argument(value));
    }

    /// Whether the template asks for a variable.
    pub fn mentions(&self, name: &str) -> bool {
        self.environment
            .get_template("chat")
            .is_ok_and(|chat| chat.undeclared_variables(false).contains(name))
    }

    /// What the template writes after an answer, up to the next turn; empty where it takes no answer.
    pub fn after_answer(&self) -> String {
        const ANSWER: &str = "orkpack-answer";
        let message =
            |role: &str, content: &str| Message { role: role.to_owned(), content: content.to_owned() };
        let rendered = self.render(&[message("user", "x"), message("assistant", ANSWER)], false);
        let text = rendered.map(|rendered| rendered.text).unwrap_or_default();
        text.rsplit_once(ANSWER).map(|(_, after)| after.to_owned()).unwrap_or_default()
    }

    /// The prompt for `messages`; with `add_generation_prompt` it ends where the assistant begins to speak.
    ///
    /// # Errors
    ///
    /// [`ChatError`]: the template refused, failed or did not end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Prompt, ChatError> {
        let text = self.text(messages, add_generation_prompt).map_err(render_error)?;
        let again = |messages: &[Message]| self.text(messages, add_generation_prompt).ok();
        let foreign = origin::foreign(&text, messages, &self.controls, again);
        Ok(Prompt { text, foreign })
    }

    fn text(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, minijinja::Error> {
        // What every template expects, by the names that they use; nothing that is set goes before it.
        let given = [
            ("messages", Jinja::from_serialize(messages)),
            ("add_generation_prompt", Jinja::from(add_generation_prompt)),
            ("bos_token", Jinja::from(self.bos_token.as_str())),
            ("eos_token", Jinja::from(self.eos_token.as_str())),
        ];
        let mut context = self.arguments.clone();
        context.extend(given.map(|(name, value)| (name.to_owned(), value)));
        self.environment.get_template("chat")?.render(context)
    }
}

/// A value that was typed. No `serde_json::Value` may go into a template: its numbers arrive there as maps.
fn argument(text: &str) -> Jinja {
    let integer = || serde_json::from_str::<i64>(text).ok().map(Jinja::from);
    let number = || serde_json::from_str::<f64>(text).ok().map(Jinja::from);
    match text {
        "true" | "false" => Jinja::from(text == "true"),
        "null" => Jinja::from(()),
        _ => integer().or_else(number).unwrap_or_else(|| Jinja::from(text)),
    }
}

/// The text of the token that `key` points at; empty where there is no such key.
fn token(metadata: &Metadata, key: &str) -> Result<String, ChatError> {
    let Some(id) = metadata.optional_u32(key)? else { return Ok(String::new()) };
    let Some(Value::Array(tokens)) = metadata.get("tokenizer.ggml.tokens") else { return Ok(String::new()) };
    let text = tokens.get(id as usize).and_then(Value::as_str).map(str::to_owned);
    let wrong = || {
        let (key, found) = (key.to_owned(), id.to_string());
        MetadataError::Wrong { key, found, expected: "the id of a token" }
    };
    Ok(text.ok_or_else(wrong)?)
}

/// The texts of all control tokens. Tables that are not what they should be are the tokenizer's to refuse.
fn controls(metadata: &Metadata) -> Vec<String> {
    /// Unknown and control tokens, by `tokenizer.ggml.token_type`.
    const CONTROL: [Option<u64>; 2] = [Some(2), Some(3)];
    let array = |key| match metadata.get(key) {
        Some(Value::Array(values)) => values.as_slice(),
        _ => &[],
    };
    let tokens = array("tokenizer.ggml.tokens").iter().zip(array("tokenizer.ggml.token_type"));
    let control = tokens.filter(|(_, kind)| CONTROL.contains(&kind.as_u64()));
    control
        .filter_map(|(token, _)| token.as_str())
        .filter(|token| !token.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The rules that chat templates are written for: those of Python's Jinja2 as model publishers set it up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    // These allocate whatever number the template names.
    ["indent", "slice", "batch", "format"].iter().for_each(|name| environment.remove_filter(name));
    environment
}

/// Python's methods of strings, lists and dicts, but for the one that pads to any width.
fn method(
    state: &State<'_, '_>,
    value: &Jinja,
    name: &str,
    arguments: &[Jinja],
) -> Result<Jinja, minijinja::Error> {
    if name == "format" {
        return Err(ErrorKind::UnknownMethod.into());
    }
    pycompat::unknown_method_callback(state, value, name, arguments)
}

/// The error of `raise_exception`, to tell it from the template's own faults.
#[derive(Debug, Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Jinja, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

/// A fixed day, 2025-01-01, as equal inputs give equal prompts. Knows the parts that chat templates use.
fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    let parts = [("%Y", "2025"), ("%m", "01"), ("%d", "01"), ("%B", "January"), ("%b", "Jan")];
    let day = parts.iter().fold(format, |day, (part, value)| day.replace(part, value));
    if day.contains('%') {
        let problem = format!("strftime_now knows no more than a date, not `{day}`");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(day)
}

/// JSON as Python writes it: a space after `,` and `:`, nothing escaped for HTML.
fn tojson(value: &Jinja, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    let failed = |error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, "cannot be written as JSON").with_source(error)
    };
    let indent = options.get::<Option<usize>>("indent")?.map(|indent| " ".repeat(indent.min(16)));
    // Python's other options make no difference to what templates give it.
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    match &indent {
        Some(indent) => value.serialize(&mut Serializer::with_formatter(
            &mut out,
            PrettyFormatter::with_indent(indent.as_bytes()),
        )),
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    }
    .map_err(failed)?;
    Ok(Jinja::from(String::from_utf8_lossy(&out)))
}

/// Python's default separators.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

fn render_error(error: minijinja::Error) -> ChatError {
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    if let Some(Raised(message)) = causes.filter_map(|cause| cause.downcast_ref()).next() {
        return ChatError::Refused(message.clone());
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Endless,
        _ => ChatError::Render { line: error.line().unwrap_or(0), problem: problem(&error) },
    }
}

/// The error in one line.
fn problem(error: &minijinja::Error) -> String {
    let kind = error.kind();
    error.detail().map_or_else(|| kind.to_string(), |detail| format!("{kind}: {detail}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}\
        {{ '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

    /// In the manner of models that think: namespaces, slices, Python methods, blocks on lines of their own.
    const THINKING: &str = r#"
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content.strip() + ('!' if loop.index0 == ns.last else '') + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"#;

    fn metadata(template: &[u8]) -> Metadata {
        let text = |text: &str| Value::String(text.into());
        let entries = [
            (TEMPLATE_KEY, Value::String(template.to_vec())),
            ("tokenizer.ggml.tokens", Value::Array(vec![text("<s>"), text("</s>")])),
            ("tokenizer.ggml.bos_token_id", Value::U32(0)),
            ("tokenizer.ggml.eos_token_id", Value::U32(1)),
        ];
        Metadata(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        let message = |(role, content): &(&str, &str)| Message {
            role: (*role).to_owned(),
            content: (*content).to_owned(),
        };
        turns.iter().map(message).collect()
    }

    fn render(template: &str, turns: &[(&str, &str)]) -> Result<String, ChatError> {
        let template = ChatTemplate::from_metadata(&metadata(template.as_bytes()))?.unwrap();
        template.render(&messages(turns), true).map(|prompt| prompt.text)
    }

    #[test]
    fn chatml_renders() {
        let turns =
            [("system", "Be <brief> & 'kind'."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "東京")];
        let expected = "<|im_start|>system\nBe <brief> & 'kind'.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
                        <|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n東京<|im_end|>\n";
        assert_eq!(render(CHATML, &turns).unwrap(), format!("{expected}<|im_start|>assistant\n"));
        let template = ChatTemplate::from_metadata(&metadata(CHATML.as_bytes())).unwrap().unwrap();
        assert_eq!(template.render(&messages(&turns), false).unwrap().text, expected);
    }

    #[test]
    fn python_methods_and_namespaces_work() {
        let turns = [
            ("system", "S"),
            ("user", " one "),
            ("assistant", "<think>\nhm\n</think>\n\nfine"),
            ("user", "two"),
            ("user", "<tool>3</tool>"),
        ];
        assert_eq!(
            render(THINKING, &turns).unwrap(),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n\
             <|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\ntwo!<|im_end|>\n\
             <|im_start|>user\n<tool>3</tool><|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn blocks_leave_no_white_space_and_tokens_have_their_text() {
        let template =
            "{% if true %}\n  {% if true %}\n{{ bos_token }}x{{ eos_token }}\n  {% endif %}\n{% endif %}\n";
        assert_eq!(render(template, &[]).unwrap(), "<s>x</s>\n");
        let mut bare = metadata(b"[{{ bos_token }}]");
        bare.0.remove("tokenizer.ggml.bos_token_id");
        let template = ChatTemplate::from_metadata(&bare).unwrap().unwrap();
        assert_eq!(template.render(&[], false).unwrap().text, "[]");
    }

    #[test]
    fn json_is_written_as_python_does() {
        for (template, expected) in [
            ("{{ messages | tojson }}", r#"[{"role": "user", "content": "<'é'>"}]"#),
            ("{{ {'a': [1, 2.5, none, true]} | tojson }}", r#"{"a": [1, 2.5, null, true]}"#),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            ("{{ [] | tojson(indent=99999999999999) }}{{ 1 | tojson(ensure_ascii=false) }}", "[]1"),
        ] {
            assert_eq!(render(template, &[("user", "<'é'>")]).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn arguments_are_what_they_look_like() {
        let mut template = ChatTemplate::new(
            "{{ a is boolean }}{{ a }} {{ b + 1 }} {{ c + 1 }} {{ d is none }} \
            {{ e is string }}{{ e }} {{ f is string }} {{ g is defined }} {{ messages | length }}",
            &Metadata::default(),
        )
        .unwrap();
        for (name, value) in
            [("a", "false"), ("b", "41"), ("c", "-1.5e0"), ("d", "null"), ("e", "high, True"), ("f", "1.")]
        {
            template.set(name, value);
        }
        template.set("messages", "[]");
        let rendered = template.render(&messages(&[("user", "x")]), true).unwrap();
        assert_eq!(rendered.text, "TrueFalse 42 -0.5 True Truehigh, True True False 1");
    }

    #[test]
    fn switches_and_the_end_of_an_answer_are_the_templates() {
        let mut thinking = ChatTemplate::new(THINKING, &Metadata::default()).unwrap();
        let chatml = ChatTemplate::new(CHATML, &Metadata::default()).unwrap();
        assert!(thinking.mentions("enable_thinking") && !chatml.mentions("enable_thinking"));
        assert!(!thinking.mentions("ns") && chatml.mentions("messages"));
        let quiet = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        let prompt =
            |template: &ChatTemplate| template.render(&messages(&[("user", "x")]), true).unwrap().text;
        assert!(!prompt(&thinking).ends_with(quiet));
        thinking.set("enable_thinking", "false");
        assert!(prompt(&thinking).ends_with(quiet));
        assert_eq!([&thinking, &chatml].map(ChatTemplate::after_answer), ["<|im_end|>\n", "<|im_end|>\n"]);
        for (source, after) in [
            ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "</s>"),
            ("{{ messages[0].content }}", ""),
            ("{{ raise_exception('no') }}", ""),
        ] {
            assert_eq!(ChatTemplate::new(source, &Metadata::default()).unwrap().after_answer(), after);
        }
    }

    #[test]
    fn the_day_is_fixed() {
        let template = "{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d') }}";
        assert_eq!(render(template, &[]).unwrap(), "01 Jan 2025 2025-01-01");
        let error = render("{{ strftime_now('%H') }}", &[]).unwrap_err();
        assert!(error.to_string().contains("knows no more than a date"), "{error}");
    }

    #[test]
    fn a_refusal_is_the_templates_own_words() {
        let template =
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}ok";
        assert_eq!(render(template, &[("user", "x")]).unwrap(), "ok");
        let error = render(template, &[("system", "x")]).unwrap_err();
        assert_eq!(error, ChatError::Refused("No system role".to_owned()));
        assert_eq!(error.to_string(), "the chat template refuses these messages: No system role");
    }

    #[test]
    fn runaway_templates_end() {
        let nested = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        assert_eq!(render(nested, &[]), Err(ChatError::Endless));
        for template in [
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ range(999999999) }}",
            "{{ 'x' * 999999999999 }}",
            "{{ '%999999999d'|format(1) }}",
            "{{ '{:999999999}'.format(1) }}",
            "{{ 'x'|indent(18446744073709551615) }}",
            "{{ [1]|batch(18446744073709551615) }}",
            "{{ [1]|slice(18446744073709551615) }}",
            "{% include 'chat' %}",
            "{{ messages.nothing.here }}",
        ] {
            assert!(
                matches!(render(template, &[]), Err(ChatError::Render { .. } | ChatError::Syntax { .. })),
                "{template}"
            );
        }
    }

    #[test]
    fn a_template_that_cannot_be_read_is_an_error_and_none_is_none() {
        assert!(ChatTemplate::from_metadata(&Metadata::default()).unwrap().is_none());
        let error = ChatTemplate::from_metadata(&metadata(b"a\n{% generation %}")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the chat template is not valid, line 2: syntax error: unknown statement generation"
        );
        assert!(error.hint().is_some_and(|hint| hint.contains("--raw")));
        let error = ChatTemplate::from_metadata(&metadata(b"\xff")).unwrap_err();
        assert!(matches!(error, ChatError::Metadata(_)));
        let mut odd = metadata(b"x");
        odd.0.insert("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(2));
        let error = ChatTemplate::from_metadata(&odd).unwrap_err().to_string();
        assert_eq!(error, "metadata key `tokenizer.ggml.eos_token_id` holds 2, expected the id of a token");
    }
}
