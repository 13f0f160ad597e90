//! SentencePiece vocabularies, held to the algorithm as it was published, written down here in the plainest way.

use std::collections::HashMap;

use orkpack::tensor::{Metadata, Value};
use orkpack::tokenizer::{Special, Tokenizer};
use proptest::prelude::*;

use crate::support::gguf_builder::text;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// Tokens with their scores and types; ids as in files of this kind: unknown, BOS, EOS, 256 bytes, then text.
struct Tokens(Vec<(String, f32, i32)>);

impl Tokens {
    /// Some merges compete, some tie, and one token has a space inside if `spaced`.
    fn new(spaced: bool) -> Tokens {
        let special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)];
        let special = special.map(|(token, kind)| (token.to_owned(), 0.0, kind));
        let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 0.0, BYTE));
        let words =
            ["ab", "bc", "▁a", "▁ab", "abc", "aa", "aaa", "▁▁", "▁▁▁▁", "é", "bé", "▁é", "ca", "cab", "</"];
        let words = words.iter().chain(spaced.then_some(&"b▁a")).enumerate();
        // Scores in steps, so that two tokens tie here and there; later ones are worse.
        let words = words.map(|(i, word)| ((*word).to_owned(), -((i * 7 % 11) as f32) / 2.0, NORMAL));
        let letters = ["▁", "a", "b", "c", "<", "s", ">", "/"].iter().enumerate();
        let letters = letters.map(|(i, letter)| ((*letter).to_owned(), -100.0 - i as f32, NORMAL));
        let user = [("<tool>".to_owned(), -1000.0, USER_DEFINED)];
        Tokens(special.into_iter().chain(bytes).chain(words).chain(letters).chain(user).collect())
    }

    fn metadata(&self) -> Metadata {
        let array =
            |value: fn(&(String, f32, i32)) -> Value| Value::Array(self.0.iter().map(value).collect());
        let entries = [
            ("model", text("llama")),
            ("tokens", array(|(token, _, _)| text(token))),
            ("scores", array(|(_, score, _)| Value::F32(*score))),
            ("token_type", array(|(_, _, kind)| Value::I32(*kind))),
            ("bos_token_id", Value::U32(1)),
            ("eos_token_id", Value::U32(2)),
        ];
        Metadata(entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect())
    }

    fn id(&self, token: &str) -> u32 {
        self.0.iter().position(|(text, _, _)| text == token).unwrap() as u32
    }

    /// Again and again the pair that makes the token with the best score, the leftmost of equal ones.
    fn naive(&self, text: &str, ids: &mut Vec<u32>) {
        let scores: HashMap<&str, f32> = self
            .0
            .iter()
            .filter(|(_, _, kind)| *kind == NORMAL)
            .map(|(token, score, _)| (token.as_str(), *score))
            .collect();
        let mut pieces: Vec<String> = text.replace(' ', "▁").chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for at in 1..pieces.len() {
                if let Some(score) = scores.get(&*(pieces[at - 1].clone() + &pieces[at]))
                    && best.is_none_or(|(best, _)| *score > best)
                {
                    best = Some((*score, at));
                }
            }
            let Some((_, at)) = best else { break };
            let right = pieces.remove(at);
            pieces[at - 1] += &right;
        }
        for piece in pieces {
            if scores.contains_key(piece.as_str()) {
                ids.push(self.id(&piece));
            } else {
                ids.extend(piece.bytes().map(|byte| self.id(&format!("<0x{byte:02X}>"))));
            }
        }
    }

    /// The whole of it: user-defined tokens always, control tokens if `parse`, a space before each stretch that
    /// begins the text or follows one of them.
    fn encode(&self, text: &str, parse: bool) -> Vec<u32> {
        let mut ids = vec![1];
        let counts: &[&str] = if parse { &["<tool>", "<unk>", "</s>", "<s>"] } else { &["<tool>"] };
        let (mut rest, mut begins) = (text, true);
        while !rest.is_empty() {
            if let Some(token) = counts.iter().find(|token| rest.starts_with(**token)) {
                ids.push(self.id(token));
                (rest, begins) = (&rest[token.len()..], true);
                continue;
            }
            let end = counts.iter().filter_map(|token| rest.find(token)).min().unwrap_or(rest.len());
            let space = if begins { " " } else { "" };
            self.naive(&format!("{space}{}", &rest[..end]), &mut ids);
            (rest, begins) = (&rest[end..], false);
        }
        // A text that says BOS itself gets no second one.
        if ids.get(1) == Some(&1) {
            ids.remove(0);
        }
        ids
    }
}

/// Texts of the characters that the vocabulary has merges for, and some that it has none for.
fn texts() -> impl Strategy<Value = String> {
    const PARTS: [&str; 15] =
        ["a", "b", "c", " ", "é", "x", "東", "🚀", "\n", "<s>", "</s>", "<tool>", "▁", "<0x41>", "ab"];
    proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_texts_are_merged_as_published(input in texts(), spaced in any::<bool>()) {
        let tokens = Tokens::new(spaced);
        let tokenizer = Tokenizer::from_metadata(&tokens.metadata()).unwrap();
        for (special, parse) in [(Special::Plain, false), (Special::Parse, true)] {
            let ids = tokenizer.encode(&input, special).unwrap();
            prop_assert_eq!(&ids, &tokens.encode(&input, parse), "{:?}", input);
        }
        // A ▁ in a text comes back as the space that it stands for.
        if !input.contains("<tool>") {
            let ids = tokenizer.encode(&input, Special::Plain).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), input.replace('▁', " "));
        }
    }
}

#[test]
fn bytes_spaces_and_tokens_are_where_they_should_be() {
    let tokens = Tokens::new(false);
    let tokenizer = Tokenizer::from_metadata(&tokens.metadata()).unwrap();
    let ids = |names: &[&str]| names.iter().map(|name| tokens.id(name)).collect::<Vec<_>>();
    for (input, special, expected) in [
        ("", Special::Plain, &["<s>"][..]),
        ("a", Special::Plain, &["<s>", "▁a"]),
        // The space is added to one that is there.
        (" a", Special::Plain, &["<s>", "▁", "▁a"]),
        ("\n", Special::Plain, &["<s>", "▁", "<0x0A>"]),
        ("東", Special::Plain, &["<s>", "▁", "<0xE6>", "<0x9D>", "<0xB1>"]),
        ("c<tool>c", Special::Plain, &["<s>", "▁", "c", "<tool>", "▁", "c"]),
        ("</s>", Special::Plain, &["<s>", "▁", "</", "s", ">"]),
        ("c</s>c", Special::Parse, &["<s>", "▁", "c", "</s>", "▁", "c"]),
        ("<s>c", Special::Parse, &["<s>", "▁", "c"]),
        // The name of a byte is not that byte.
        ("<0x41>", Special::Plain, &["<s>", "▁", "<", "<0x30>", "<0x78>", "<0x34>", "<0x31>", ">"]),
    ] {
        assert_eq!(tokenizer.encode(input, special).unwrap(), ids(expected), "{input:?}");
    }
    assert_eq!(tokenizer.decode(&ids(&["<s>", "▁a", "<0xE6>", "<0x9D>", "<0xB1>", "▁", "</s>"])), "a東 ");
}

#[test]
fn keys_decide_about_bos_and_the_space() {
    let tokens = Tokens::new(false);
    let mut metadata = tokens.metadata();
    metadata.0.insert("tokenizer.ggml.add_bos_token".to_owned(), Value::Bool(false));
    metadata.0.insert("tokenizer.ggml.add_space_prefix".to_owned(), Value::Bool(false));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("a a", Special::Plain).unwrap(), [tokens.id("a"), tokens.id("▁a")]);
    assert_eq!(tokenizer.decode(&[tokens.id("▁a")]), " a");
}

#[test]
fn tables_that_fit_no_algorithm_are_refused() {
    let refusal = |change: &dyn Fn(&mut Tokens)| {
        let mut tokens = Tokens::new(false);
        change(&mut tokens);
        Tokenizer::from_metadata(&tokens.metadata()).err().map(|error| error.to_string())
    };
    assert_eq!(refusal(&|_| ()), None);
    let expected = "element 9 of `tokenizer.ggml.scores` is not a number of 32 bits";
    assert_eq!(refusal(&|tokens| tokens.0[9].1 = f32::NAN).as_deref(), Some(expected));
    let mut metadata = Tokens::new(false).metadata();
    metadata.0.insert("tokenizer.ggml.scores".to_owned(), Value::Array(vec![Value::F32(0.0)]));
    let n = Tokens::new(false).0.len();
    let error = Tokenizer::from_metadata(&metadata).err().unwrap().to_string();
    assert_eq!(error, format!("`tokenizer.ggml.scores` has 1 elements, expected one for each of {n} tokens"));
    // A vocabulary without bytes cannot spell everything.
    let mut tokens = Tokens::new(false);
    tokens.0.iter_mut().filter(|token| token.2 == BYTE).for_each(|token| token.2 = CONTROL);
    let tokenizer = Tokenizer::from_metadata(&tokens.metadata()).unwrap();
    let error = tokenizer.encode("ab x", Special::Plain).unwrap_err().to_string();
    assert_eq!(error, "the vocabulary has no token for some byte of ` x`");
}
