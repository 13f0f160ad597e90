//! Text to ids and back, held to llama.cpp's ids.

use std::collections::BTreeMap;

use orkpack::bytes::Limits;
use orkpack::gguf::GgufFile;
use orkpack::tensor::{Metadata, TensorSource, Value};
use orkpack::tokenizer::{self, Special, Tokenizer, TokenizerError};
use serde::Deserialize;

use crate::support::fixture;
use crate::support::gguf_builder::{MoeSpec, text, tiny_moe};

fn metadata(model: &str) -> Metadata {
    let path = fixture("models").join(model);
    GgufFile::open(&path, Default::default(), &Limits::default()).unwrap().metadata().clone()
}

fn tokenizer(model: &str) -> Tokenizer {
    Tokenizer::from_metadata(&metadata(model)).unwrap()
}

fn json<T: for<'a> Deserialize<'a>>(path: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(fixture(path)).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Cases {
    model: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    plain: Vec<u32>,
    parse_special: Vec<u32>,
}

fn assert_cases(tokenizer: &Tokenizer, cases: &[Case]) {
    for Case { text, plain, parse_special } in cases {
        let encode = |special| tokenizer.encode(text, special).unwrap();
        assert_eq!(encode(Special::Plain), *plain, "{text:?}");
        assert_eq!(encode(Special::Parse), *parse_special, "{text:?} with control tokens");
        assert_eq!(tokenizer.decode(plain), *text);
    }
}

#[test]
fn the_trained_model_tokenizes_as_the_reference() {
    #[derive(Deserialize)]
    struct File {
        tokenizer: Vec<Pair>,
    }
    #[derive(Deserialize)]
    struct Pair {
        text: String,
        ids: Vec<u32>,
    }
    let tokenizer = tokenizer("tiny-moe-q8_0.gguf");
    for Pair { text, ids } in json::<File>("vectors/tiny-moe.json").tokenizer {
        assert_eq!(tokenizer.encode(&text, Special::Parse).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids), text.replace("<|endoftext|>", ""));
    }
}

#[test]
fn the_reference_models_tokenize_as_the_reference() {
    for (pre, Cases { model, cases }) in json::<BTreeMap<String, Cases>>("vectors/tokenizer-cases.json") {
        let metadata = metadata(&format!("reference/{model}"));
        assert_eq!(metadata.str("tokenizer.ggml.pre"), Ok(pre.as_str()));
        assert_cases(&Tokenizer::from_metadata(&metadata).unwrap(), &cases);
    }
}

/// The models of these cases have the vocabulary of `tiny-qwen3moe-f32.gguf` and another rule; BOS is added
/// where the rule adds it by itself, and in the model of `deepseek-llm` by a key.
#[test]
fn other_rules_tokenize_as_the_reference() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let all = json::<BTreeMap<String, Cases>>("vectors/tokenizer-cases-more.json");
    let names = ["deepseek-llm", "gpt-4o", "lfm2", "llama-bpe", "qwen35", "refact"];
    assert_eq!(all.keys().collect::<Vec<_>>(), names);
    for (pre, Cases { cases, .. }) in all {
        let add_bos = (pre == "deepseek-llm").then_some(Value::Bool(true));
        let mut metadata = with(&with(&qwen, "pre", Some(text(&pre))), "add_bos_token", add_bos);
        if pre == "qwen35" {
            with_marks(&mut metadata);
        }
        assert_cases(&Tokenizer::from_metadata(&metadata).unwrap(), &cases);
    }
}

/// The last nine merges of the vocabulary of `tiny-qwen35moe-f32.gguf`, which join letters and marks.
fn with_marks(metadata: &mut Metadata) {
    let merges = ["Ì ģ", "e Ìģ", "Ì Ģ", "a ÌĢ", "à ¤", "à¤ ķ", "à ¥", "à¥ į", "à¤ķ à¥į"];
    let mut replace = |key, first: usize, values: &[String]| {
        let Some(Value::Array(all)) = metadata.0.get_mut(key) else { panic!() };
        all[first..][..9].iter_mut().zip(values).for_each(|(old, value)| *old = text(value));
    };
    replace("tokenizer.ggml.merges", 243, &merges.map(str::to_owned));
    replace("tokenizer.ggml.tokens", 499, &merges.map(|merge| merge.replace(' ', "")));
}

/// A name that llama.cpp takes for another's rule gives the other's ids.
#[test]
fn names_of_one_rule_are_alike() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let input = "It's 12345 caf\u{e9}\u{301}  camelCase\t\tx\n\n y, 東京! 'S\n";
    let ids = |pre: &str| {
        let metadata = with(&with(&qwen, "pre", Some(text(pre))), "add_bos_token", Some(Value::Bool(false)));
        Tokenizer::from_metadata(&metadata).unwrap().encode(input, Special::Plain).unwrap()
    };
    for (name, others) in [
        ("qwen2", &["deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"][..]),
        ("olmo", &["gpt-2", "granite-docling"]),
        ("refact", &["starcoder", "smollm"]),
        ("llama-bpe", &["llama3", "llama-v3", "lfm2"]),
        ("gpt-4o", &["llama4"]),
    ] {
        others.iter().for_each(|other| assert_eq!(ids(other), ids(name), "{other}"));
    }
}

/// Metadata with one key of the tokenizer replaced or removed.
fn with(metadata: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut metadata = metadata.clone();
    let key = format!("tokenizer.ggml.{key}");
    match value {
        Some(value) => metadata.0.insert(key, value),
        None => metadata.0.remove(&key),
    };
    metadata
}

fn texts(values: &[&str]) -> Option<Value> {
    Some(Value::Array(values.iter().map(|value| text(value)).collect()))
}

#[test]
fn case_j2_only_verified_rules_are_accepted() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    for pre in [None, Some("default"), Some("deepseek-v3"), Some("GPT-2"), Some("")] {
        let error = Tokenizer::from_metadata(&with(&qwen, "pre", pre.map(text))).err().unwrap();
        let found = pre.unwrap_or("none");
        assert_eq!(
            error.to_string(),
            format!(
                "pre-tokenizer `{found}` is not supported, so text cannot be split as this model expects; \
                 token ids still work, with --tokens"
            )
        );
    }
    let error = Tokenizer::from_metadata(&with(&qwen, "model", Some(text("bert")))).err().unwrap();
    assert!(matches!(&error, TokenizerError::Model { found } if found == "bert"));
    assert!(error.to_string().contains("token ids still work, with --tokens"), "{error}");
}

#[test]
fn odd_tables_are_refused_by_name() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let types = |n| Some(Value::Array(vec![Value::I32(1); n]));
    for (key, value, expected) in [
        ("tokens", None, "metadata key `tokenizer.ggml.tokens` is missing"),
        ("tokens", Some(Value::U8(1)), "metadata key `tokenizer.ggml.tokens` holds 1, expected an array"),
        (
            "tokens",
            Some(Value::Array(vec![Value::U8(1)])),
            "element 0 of `tokenizer.ggml.tokens` is not a UTF-8 string",
        ),
        (
            "tokens",
            Some(Value::Array(vec![text("a"), Value::String(vec![0xff])])),
            "element 1 of `tokenizer.ggml.tokens` is not a UTF-8 string",
        ),
        (
            "tokens",
            Some(Value::Array(vec![])),
            "`tokenizer.ggml.token_type` has 512 elements, expected one for each of 0 tokens",
        ),
        (
            "token_type",
            types(511),
            "`tokenizer.ggml.token_type` has 511 elements, expected one for each of 512 tokens",
        ),
        (
            "token_type",
            Some(Value::Array(vec![Value::I32(-1); 512])),
            "element 0 of `tokenizer.ggml.token_type` is not a token type",
        ),
        ("merges", None, "metadata key `tokenizer.ggml.merges` is missing"),
        ("merges", texts(&["t h", "th"]), "merge 1 does not join two tokens"),
        ("merges", texts(&["nothing there"]), "merge 0 does not join two tokens"),
        ("merges", texts(&["t h e"]), "merge 0 does not join two tokens"),
        (
            "bos_token_id",
            Some(Value::U32(512)),
            "`tokenizer.ggml.bos_token_id` is 512, expected an id below 512",
        ),
        (
            "eot_token_id",
            Some(Value::U32(u32::MAX)),
            "`tokenizer.ggml.eot_token_id` is 4294967295, expected an id below 512",
        ),
        (
            "eos_token_id",
            Some(text("x")),
            "metadata key `tokenizer.ggml.eos_token_id` holds a string of 1 bytes, expected a number below 2^32",
        ),
    ] {
        let error = Tokenizer::from_metadata(&with(&qwen, key, value)).err().expect(expected);
        assert_eq!(error.to_string(), expected);
    }
    let mut tokens = vec!["a"; 512];
    tokens[0] = "b";
    let error = Tokenizer::from_metadata(&with(&qwen, "tokens", texts(&tokens))).err().unwrap();
    assert_eq!(error.to_string(), "tokens 1 and 2 are the same");
    let mut no_bos = with(&qwen, "add_bos_token", Some(Value::Bool(true)));
    no_bos.0.remove("tokenizer.ggml.bos_token_id");
    let error = Tokenizer::from_metadata(&no_bos).err().unwrap();
    assert_eq!(error.to_string(), "metadata key `tokenizer.ggml.bos_token_id` is missing");
}

#[test]
fn text_that_the_vocabulary_cannot_spell_is_an_error_not_a_loss() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let Some(Value::Array(mut tokens)) = qwen.get("tokenizer.ggml.tokens").cloned() else { panic!() };
    tokens[usize::from(b'z')] = text("<no z>");
    let tokenizer = Tokenizer::from_metadata(&with(&qwen, "tokens", Some(Value::Array(tokens)))).unwrap();
    assert!(tokenizer.encode("abc", Special::Plain).is_ok());
    let error = tokenizer.encode("zebra", Special::Plain).unwrap_err();
    assert_eq!(error.to_string(), "the vocabulary has no token for some byte of `zebra`");
}

#[test]
fn special_tokens_are_cut_out_longest_first_and_user_defined_ones_always() {
    let file = GgufFile::from_bytes("x", tiny_moe(&MoeSpec { n_layer: 0, ..MoeSpec::default() })).unwrap();
    let Some(Value::Array(mut tokens)) = file.metadata().get("tokenizer.ggml.tokens").cloned() else {
        panic!()
    };
    let Some(Value::Array(mut types)) = file.metadata().get("tokenizer.ggml.token_type").cloned() else {
        panic!()
    };
    // 300: user-defined with a raw space; 301, 302: control, one inside the other's end.
    for (id, token, kind) in [(300, "x y", 4), (301, "<ab", 3), (302, "ab>>", 3)] {
        (tokens[id], types[id]) = (text(token), Value::I32(kind));
    }
    let metadata = with(file.metadata(), "tokens", Some(Value::Array(tokens)));
    let metadata = with(&metadata, "token_type", Some(Value::Array(types)));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let (lt, x, a, b, gt) = (60, 120, 97, 98, 62);
    for (input, plain, parsed) in [
        ("x y", vec![300], vec![300]),
        ("xx yx", vec![x, 300, x], vec![x, 300, x]),
        ("<ab", vec![lt, a, b], vec![301]),
        // The longer one wins although the other begins first.
        ("<ab>>", vec![lt, a, b, gt, gt], vec![lt, 302]),
        ("<ab<ab", vec![lt, a, b, lt, a, b], vec![301, 301]),
    ] {
        assert_eq!(tokenizer.encode(input, Special::Plain).unwrap(), plain, "{input}");
        assert_eq!(tokenizer.encode(input, Special::Parse).unwrap(), parsed, "{input}");
    }
    assert_eq!(tokenizer.decode(&[300, 301, a]), "x ya");
}

#[test]
fn long_texts_are_words_like_short_ones() {
    let tokenizer = tokenizer("tiny-moe-q8_0.gguf");
    let phrase = " the experts of layer 12: don't\n\n  panic, write";
    let ids = tokenizer.encode(phrase, Special::Plain).unwrap();
    for n in [1300, 1500, 5000] {
        assert_eq!(tokenizer.encode(&phrase.repeat(n), Special::Plain).unwrap(), ids.repeat(n));
    }
    // Nowhere to cut.
    let word = "é".repeat(1 << 20);
    assert_eq!(tokenizer.decode(&tokenizer.encode(&word, Special::Plain).unwrap()), word);
}

#[test]
fn characters_are_never_given_out_in_halves() {
    let tokenizer = tokenizer("reference/tiny-qwen3moe-f32.gguf");
    // The ids of this vocabulary's first 256 tokens are bytes.
    for (ids, expected) in [
        (&[0xf0, 0x9f, 0x9a, 0x80, 0x21][..], &["", "", "", "🚀", "!"][..]),
        (&[0xc3, 0x41], &["", "\u{fffd}A"]),
        (&[0xff, 0x41], &["\u{fffd}", "A"]),
        (&[0xe6, 0x9d, 0xe6, 0x9d, 0xb1], &["", "", "\u{fffd}", "", "東"]),
        // A control token in between has no text; an id outside the vocabulary is a replacement.
        (&[0xc3, 509, 0xa9], &["", "", "é"]),
        (&[512, 0x41], &["\u{fffd}", "A"]),
    ] {
        let mut detokenizer = tokenizer.detokenizer();
        let given: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        assert_eq!(given, expected);
        assert_eq!(detokenizer.finish(), "");
        assert_eq!(tokenizer.decode(ids), expected.concat());
    }
    let mut half = tokenizer.detokenizer();
    assert_eq!(half.push(0xc3), "");
    assert_eq!(half.finish(), "\u{fffd}");
    assert_eq!(tokenizer.decode(&[0x41, 0xe6, 0x9d]), "A\u{fffd}");
}

#[test]
fn special_ids_come_from_the_metadata() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let ends = |tokenizer: &Tokenizer| (0..513).filter(|&id| tokenizer.is_end(id)).collect::<Vec<_>>();
    let tokenizer = Tokenizer::from_metadata(&qwen).unwrap();
    assert_eq!((tokenizer.n_vocab(), tokenizer.bos(), tokenizer.eos()), (512, Some(508), Some(509)));
    assert_eq!(ends(&tokenizer), [509, 511]);
    // Without the keys, `<|endoftext|>` and `<|im_end|>` are known by name; a key may name another.
    let bare = with(&with(&qwen, "eos_token_id", None), "eot_token_id", Some(Value::U32(510)));
    let tokenizer = Tokenizer::from_metadata(&bare).unwrap();
    assert_eq!(tokenizer.eos(), None);
    assert_eq!(ends(&tokenizer), [509, 510, 511]);
}

#[test]
fn the_digest_covers_the_tokenizer_and_nothing_else() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let digest = tokenizer::digest(&qwen);
    assert_eq!(Tokenizer::from_metadata(&qwen).unwrap().digest(), digest);
    let mut renamed = qwen.clone();
    renamed.0.insert("general.name".to_owned(), text("other"));
    renamed.0.insert("tokenizer.chat_template".to_owned(), text("other"));
    assert_eq!(tokenizer::digest(&renamed), digest);
    for (key, value) in [
        ("pre", Some(text("x"))),
        ("bos_token_id", None),
        ("bos_token_id", Some(Value::U64(508))),
        ("tokens", texts(&["ab", "c"])),
        ("tokens", texts(&["a", "bc"])),
        ("tokens", texts(&["abc"])),
    ] {
        assert_ne!(tokenizer::digest(&with(&qwen, key, value)), digest, "{key}");
    }
    let split = |tokens: &[&str]| tokenizer::digest(&with(&qwen, "tokens", texts(tokens)));
    assert_ne!(split(&["ab", "c"]), split(&["a", "bc"]));
}

/// `encode_around` with every byte range of this text that is between `[[` and `]]`, without these.
fn around(tokenizer: &Tokenizer, marked: &str) -> Vec<u32> {
    let (mut text, mut plain) = (String::new(), Vec::new());
    for (index, part) in marked.split("[[").enumerate() {
        let (inner, rest) = if index > 0 { part.split_once("]]").unwrap() } else { ("", part) };
        plain.push(text.len()..text.len() + inner.len());
        text += inner;
        text += rest;
    }
    tokenizer.encode_around(&text, &plain[1..]).unwrap()
}

#[test]
fn control_tokens_count_only_where_no_plain_range_touches_them() {
    let tokenizer = tokenizer("reference/tiny-qwen3moe-f32.gguf");
    let encode = |text: &str, special| tokenizer.encode(text, special).unwrap();
    let (im_end, plain) = (511, encode("<|im_end|>", Special::Plain));
    for (marked, expected) in [
        ("<|im_end|>", vec![im_end]),
        ("[[<|im_end|>]]", plain.clone()),
        ("<|im_end|>[[<|im_end|>]]<|im_end|>", [&[im_end][..], &plain, &[im_end]].concat()),
        // Half from one and half from the other is nobody's.
        ("<|im_[[end|>]]", plain.clone()),
        ("[[<]]|im_end|>", plain.clone()),
        ("<|im_end[[|]]>", plain.clone()),
        // A range that only borders on it, or is empty beside it, is none.
        ("[[]]<|im_end|>[[]]", vec![im_end]),
        // What is left of a place that does not count may begin another.
        ("[[<]]<|im_end|>", [&encode("<", Special::Plain)[..], &[im_end]].concat()),
    ] {
        assert_eq!(around(&tokenizer, marked), expected, "{marked}");
    }
    // Borders change nothing else.
    let whole = encode("<|im_end|>user\nHello world, the experts", Special::Parse);
    assert_eq!(around(&tokenizer, "<|im_end|>us[[er\nHel]]lo wo[[rld, the exp]]erts"), whole);
}

#[test]
fn bos_comes_once() {
    let qwen = metadata("reference/tiny-qwen3moe-f32.gguf");
    let tokenizer = Tokenizer::from_metadata(&with(&qwen, "add_bos_token", Some(Value::Bool(true)))).unwrap();
    let encode = |text: &str, special| tokenizer.encode(text, special).unwrap();
    assert_eq!(encode("a", Special::Parse), [508, 97]);
    assert_eq!(encode("<|startoftext|>a", Special::Parse), [508, 97]);
    assert_eq!(encode("<|startoftext|>a", Special::Plain)[..2], [508, 60]);
    assert_eq!(encode("", Special::Plain), [508]);
}

/// What a word may become on its way must not be a control token either.
#[test]
fn merges_make_no_control_token_of_a_text() {
    let file = GgufFile::from_bytes("x", tiny_moe(&MoeSpec { n_layer: 0, ..MoeSpec::default() })).unwrap();
    let mut metadata = with(file.metadata(), "pre", Some(text("llama-bpe")));
    for (key, value) in [("tokens", text("zq")), ("token_type", Value::I32(3))] {
        let Some(Value::Array(all)) = metadata.0.get_mut(&format!("tokenizer.ggml.{key}")) else { panic!() };
        all[300] = value;
    }
    let metadata =
        with(&with(&metadata, "merges", texts(&["z q"])), "add_bos_token", Some(Value::Bool(false)));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.encode("zq", Special::Plain).unwrap(), [122, 113]);
    assert_eq!(tokenizer.encode("zq", Special::Parse).unwrap(), [300]);
}
