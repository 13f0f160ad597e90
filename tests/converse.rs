//! `ork-run` as a partner: prompts through a template, turns typed and piped, conversations that are kept.

use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use orkpack::tensor::Dtype;
use serde_json::Value;

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{bundled_in, folder};
use crate::support::schema;
use crate::support::typist::Typist;

const RUN: &str = env!("CARGO_BIN_EXE_ork-run");
const MODEL: &str = "tiny-moe-q4_k_m.gguf";

/// Turns end with the one control token that the bundled model has.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' + m.content + '<|endoftext|>' }}\
    {% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}";

const TURNS: &str = "Table of 7\nThe expert in the layer\n";

fn run(folder: &Path, words: &[&str], stdin: &str) -> Output {
    Command::new(RUN).current_dir(folder).arg(MODEL).args(words).write_stdin(stdin).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn done(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(output), stderr(output));
    stdout(output)
}

fn document(text: &str, name: &str) -> Value {
    let document: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    schema::check(&schema::load(name), &document).unwrap_or_else(|problem| panic!("{name}: {problem}"));
    document
}

fn json(folder: &Path, words: &[&str], stdin: &str) -> Value {
    document(&done(&run(folder, &[words, &["--json"]].concat(), stdin)), "run.schema.json")
}

fn session(path: &Path) -> Value {
    document(&fs::read_to_string(path).unwrap(), "session.schema.json")
}

/// A folder with the bundled model and the template.
fn at_home() -> tempfile::TempDir {
    let folder = folder();
    bundled_in(folder.path(), MODEL);
    fs::write(folder.path().join("chat.jinja"), TEMPLATE).unwrap();
    folder
}

fn counts(turn: &Value) -> [u64; 3] {
    ["prompt_tokens", "reused_tokens", "computed_tokens"].map(|count| turn[count].as_u64().unwrap())
}

#[test]
fn two_turns_typed_and_piped_give_the_same_text() {
    let folder = at_home();
    let path = folder.path();
    let chat = ["--chat-template-file", "chat.jinja", "-n", "12", "--temp", "0.7", "--seed", "4"];
    let with = |words: &[&'static str]| [&chat[..], words].concat();
    let piped = run(path, &with(&["--turns", "--session", "piped.json"]), TURNS);
    let text = done(&piped);

    let mut typist = Typist::start(RUN, path, &[&[MODEL], &with(&["--session", "typed.json"])[..]].concat());
    TURNS.lines().for_each(|line| typist.line(line));
    typist.keys("\x04");
    let (code, screen) = typist.end();
    assert_eq!(code, Some(0), "{screen}");

    let [piped, typed] = ["piped.json", "typed.json"].map(|name| session(&path.join(name)));
    assert_eq!(typed, piped);
    let said = |role| {
        let messages = piped["messages"].as_array().unwrap().iter();
        messages.filter(move |m| m["role"] == role).map(|m| m["content"].as_str().unwrap())
    };
    assert_eq!(said("user").map(|line| format!("{line}\n")).collect::<String>(), TURNS);
    assert_eq!(said("assistant").map(|answer| format!("{answer}\n")).collect::<String>(), text);
    assert!(said("assistant").all(|answer| screen.contains(answer) && !answer.is_empty()), "{screen}");

    // Counted: of the second turn's tokens those of the first, and its answer but for the token drawn last, were
    // there. What is new: that token, the end of the turn, the line, and where the answer begins.
    let document = json(path, &with(&["--turns"]), TURNS);
    let turns = document["turns"].as_array().unwrap();
    let answer = turns[0]["tokens"].as_array().unwrap().len() as u64;
    assert_eq!((turns.len(), answer), (2, 12));
    let ([first, none, all], [second, reused, computed]) = (counts(&turns[0]), counts(&turns[1]));
    assert_eq!((none, all), (0, first));
    assert_eq!((reused, computed), (first + answer - 1, second - reused));
    assert!(computed < first + 12, "{document}");
    assert_eq!(document["prefill"]["tokens"].as_u64().unwrap(), first + computed);
    assert_eq!(document["text"], turns[1]["text"]);
}

#[test]
fn a_conversation_is_kept_from_run_to_run() {
    let folder = at_home();
    let path = folder.path();
    let chat =
        ["--chat-template-file", "chat.jinja", "-n", "12", "--temp", "0.9", "--seed", "7", "--session"];
    let with = |words: &[&'static str]| [&chat[..], words].concat();
    let lines: Vec<&'static str> = TURNS.lines().collect();
    done(&run(path, &with(&["one.json", "--turns"]), TURNS));
    done(&run(path, &with(&["two.json", "-p", lines[0]]), ""));
    let again = run(path, &with(&["two.json", "-p", lines[1], "--json"]), "");
    let again = document(&done(&again), "run.schema.json");
    let [prompt, reused, computed] = counts(&again["turns"][0]);
    assert_eq!((reused, computed), (0, prompt), "no cache is kept");
    assert_eq!(session(&path.join("two.json")), session(&path.join("one.json")));
    let third = run(path, &with(&["two.json", "-p", "x"]), "");
    let n_ids = session(&path.join("one.json"))["ids"].as_array().unwrap().len();
    let says = format!("two.json: goes on after 4 messages; their {n_ids} tokens are computed again");
    assert!(stderr(&third).contains(&says), "{}", stderr(&third));
    done(&run(path, &with(&["two.json", "--turns"]), "/clear\n"));
    assert_eq!(session(&path.join("two.json"))["messages"], Value::Array(Vec::new()));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path.join("one.json")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "words are for nobody else");
}

#[test]
fn sessions_of_others_and_other_files_are_refused_in_a_line() {
    let folder = at_home();
    let path = folder.path();
    fs::write(path.join("other.gguf"), tiny_moe(&MoeSpec { dtype: Dtype::F32, ..MoeSpec::default() }))
        .unwrap();
    let words = ["-p", "Hi", "-n", "2", "--temp", "0", "--session", "kept.json"];
    done(&run(path, &words, ""));
    let kept = fs::read_to_string(path.join("kept.json")).unwrap();
    let with = |from: &str, to: &str| kept.replacen(from, to, 1);
    let ids = kept.split("\"ids\":[").nth(1).unwrap();
    for (name, text, says) in [
        ("text.json", "precious".to_owned(), "this is no session"),
        ("cut.json", kept[..kept.len() / 2].to_owned(), "this is no session"),
        (
            "new.json",
            with("session-1", "session-2"),
            "schema is `orkpack-session-2`, expected `orkpack-session-1`",
        ),
        ("random.json", with("\"random\":\"", "\"random\":\"x"), "expected 16 hexadecimal digits"),
        ("ids.json", with(ids, &format!("2048,{ids}")), "token 2048 is not in the vocabulary of 2048"),
        ("more.json", with("{", "{\"more\":1,"), "unknown field `more`"),
        (
            "tokens.json",
            with("\"tokenizer\":\"", "\"tokenizer\":\"0"),
            "the session was with another tokenizer",
        ),
        ("model.json", with("\"model\":\"", "\"model\":\"0"), "the session was with another model: 0"),
    ] {
        fs::write(path.join(name), &text).unwrap();
        let refused = run(path, &["-p", "Hi", "--session", name], "");
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(2), "{name}: {said}");
        assert!(said.starts_with(&format!("error: {name}: ")) && said.contains(says), "{name}: {said}");
        assert_eq!((said.lines().count(), stdout(&refused).as_str()), (1, ""), "{said}");
        assert_eq!(fs::read_to_string(path.join(name)).unwrap(), text, "it stays as it is");
    }
    let other = ["other.gguf", "-p", "Hi", "--session", "kept.json"];
    let other = Command::new(RUN).current_dir(path).args(other).write_stdin("").output().unwrap();
    assert!(other.status.code() == Some(2) && stderr(&other).contains("another model"), "{}", stderr(&other));
}

#[test]
fn templates_get_what_the_flags_say() {
    let folder = at_home();
    let path = folder.path();
    // Says what it got instead of making a prompt of it.
    let shows = "{{ raise_exception(messages | tojson ~ ' ' ~ (enable_thinking | default('unset')) ~ ' ' ~ (level | \
                 default(0) + 1)) }}";
    fs::write(path.join("shows.jinja"), shows).unwrap();
    let user = r#"{"role": "user", "content": "Hi"}"#;
    let system = r#"{"role": "system", "content": "Be kind."}"#;
    for (words, stdin, says) in [
        (&["-p", "Hi"][..], "", format!("[{user}] unset 1")),
        (&[], "Hi\n", format!("[{user}] unset 1")),
        (&["-p", "-"], "Hi", format!("[{user}] unset 1")),
        (&["-p", "Hi", "--think", "off", "--system", "Be kind."], "", format!("[{system}, {user}] False 1")),
        (&["-p", "Hi", "--think", "on", "--template-arg", "level=41"], "", format!("[{user}] True 42")),
    ] {
        let output = run(path, &[&["--chat-template-file", "shows.jinja"], words].concat(), stdin);
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert!(said.contains(&format!("refuses these messages: {says}")), "{words:?}: {said}");
    }
    let chat = ["--chat-template-file", "chat.jinja", "-n", "1", "-p", "Hi"];
    for (words, says) in [
        (&["--think", "off"][..], "the chat template has no switch for thinking (`enable_thinking`)"),
        (&["--template-arg", "level=1"], "the chat template does not ask for `level`"),
    ] {
        let output = run(path, &[&chat, words].concat(), "");
        done(&output);
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    }
    fs::write(path.join("broken.jinja"), "{% if %}").unwrap();
    fs::write(path.join("bytes.jinja"), b"\xff").unwrap();
    for (words, says) in [
        (&["--system", "x"][..], "there is no chat template for --system and --template-arg"),
        (&["--raw", "--system", "x"], "cannot be used with"),
        (&["--template-arg", "level"], "`level` is not K=V"),
        (&["--template-arg", "messages=x"], "every template gets `messages` from the conversation"),
        (&["--chat-template-file", "gone.jinja"], "gone.jinja: "),
        (&["--chat-template-file", "broken.jinja"], "broken.jinja: the chat template is not valid, line 1"),
        (&["--chat-template-file", "bytes.jinja"], "bytes.jinja: the chat template is not UTF-8"),
    ] {
        let output = run(path, &[&["-p", "Hi"], words].concat(), "");
        let said = stderr(&output);
        assert!(output.status.code() == Some(2) && said.contains(says), "{words:?}: {said}");
    }
}

#[test]
fn what_does_not_fit_is_said_in_a_line_with_both_counts() {
    let folder = at_home();
    let path = folder.path();
    let long = run(path, &["-p", "one two three four five six seven eight nine ten", "-c", "8"], "");
    let said = stderr(&long);
    assert_eq!((long.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("tokens, and the context holds 8: a larger -c holds more"), "{said}");
    let long = run(path, &["--tokens", "1,2,3", "-c", "2"], "");
    assert_eq!(
        stderr(&long),
        "error: the prompt has 3 tokens, and the context holds 2: a larger -c holds more\n"
    );

    let chat = ["--chat-template-file", "chat.jinja", "--temp", "0", "--turns", "-c", "32", "-n", "16"];
    let grown = run(path, &chat, "Table of 7\nThe expert in the layer\n/clear\nTable of 7\n");
    let said = stderr(&grown);
    assert_eq!(grown.status.code(), Some(2), "{said}");
    assert!(said.contains("context of 32 tokens: 48.00 KiB of keys and values\n"), "{said}");
    let refused: Vec<&str> = said.lines().filter(|line| line.contains("the conversation has")).collect();
    assert_eq!(refused.len(), 1, "{said}");
    assert!(
        refused[0].ends_with("tokens, and the context holds 32: /clear forgets it, a larger -c holds more"),
        "{said}"
    );
    let text = stdout(&grown);
    let half = text.len() / 2;
    assert_eq!(text[..half], text[half..], "a conversation that was cleared begins anew: {text}");

    let full =
        run(path, &["--chat-template-file", "chat.jinja", "--turns", "-c", "20", "-n", "64"], "Table of 7\n");
    assert!(
        stderr(&full).contains("the conversation fills the context of 20 tokens: /clear"),
        "{}",
        stderr(&full)
    );
    let full = run(path, &["-p", "Table of 7", "-c", "20", "-n", "64", "--temp", "0"], "");
    assert!(stderr(&full).contains("the context of 20 tokens is full"), "{}", stderr(&full));
    let beyond = run(path, &["-p", "Table", "-c", "1024", "-n", "1"], "");
    assert!(stderr(&beyond).contains("trained for 512 tokens"), "{}", stderr(&beyond));
}

#[test]
fn without_a_template_turns_follow_each_other() {
    let folder = at_home();
    let path = folder.path();
    let greedy = ["--temp", "0", "-n", "9"];
    let document = json(path, &[&greedy[..], &["--turns"]].concat(), TURNS);
    let turns = document["turns"].as_array().unwrap();
    let text = |turn: &Value| turn["text"].as_str().unwrap().to_owned();
    let lines: Vec<&str> = TURNS.lines().collect();
    let straight = format!("{}{}\n{}", lines[0], text(&turns[0]), lines[1]);
    let straight = json(path, &[&greedy[..], &["-p", &straight]].concat(), "");
    assert_eq!(straight["text"], turns[1]["text"]);
    let [first, second] = [counts(&turns[0]), counts(&turns[1])];
    assert_eq!(second[1], first[0] + turns[0]["tokens"].as_array().unwrap().len() as u64 - 1);
}

#[test]
fn ctrl_c_stops_an_answer_then_the_program() {
    let folder = at_home();
    let path = folder.path();
    // Past what the model was trained for it never ends by itself.
    let words = [MODEL, "-c", "100000", "-n", "100000", "--session", "kept.json"];
    let mut typist = Typist::start(RUN, path, &words);
    typist.line("/help");
    typist.await_text("Ctrl-C stops an answer");
    for line in ["Table of 7", "The expert"] {
        typist.line(line);
        // More than the editor writes at the end of a line: the answer has begun.
        typist.await_bytes(100);
        typist.interrupt();
    }
    typist.keys("\x03");
    let (code, screen) = typist.end();
    assert_eq!(code, Some(130), "{screen}");
    let messages = session(&path.join("kept.json"))["messages"].as_array().unwrap().len();
    assert_eq!(messages, 4, "{screen}");

    let mut typist = Typist::start(RUN, path, &[MODEL]);
    typist.keys("half a line\x03");
    typist.await_text("Ctrl-C again ends");
    // Left, backspace: the line is edited to a command.
    typist.line("/exot\x1b[D\x7fi");
    assert_eq!(typist.end().0, Some(0));
}
