//! How a text is cut into words before anything is merged, by `tokenizer.ggml.pre`.
//!
//! The rules are those that the families' publishers wrote for backtracking engines, put so that none looks
//! ahead: they run in linear time over any text. Their usual end, `\s+(?!\S)|\s+`, is [`Step::Words`].

use std::ops::Range;

use fancy_regex::Regex;

use super::TokenizerError;

/// The rule for one or more values of `tokenizer.ggml.pre`.
pub(super) struct Rule {
    /// The names in files. The first was held to llama.cpp's ids, the others stand for the same rule there.
    names: &'static [&'static str],
    /// Applied in turn, each to all that the ones before it left.
    steps: &'static [Step],
    /// Whether BOS is added where no key says so. Source: llama.cpp's defaults.
    pub(super) adds_bos: bool,
    /// Whether a word that is a token is taken whole, without merges.
    pub(super) takes_whole: bool,
}

/// One pattern; what it matches become words of their own.
enum Step {
    /// What lies between matches stays in one piece.
    Isolate(&'static str),
    /// What lies between matches is white space: before a match that begins with none, its last character is
    /// cut off, as that may become the beginning of a word.
    Words(&'static str),
}

const GPT_2: Step = Step::Words(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+");

const LLAMA_3: Step = Step::Words(concat!(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
));

const QWEN_2: Step = Step::Words(concat!(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
));

/// As before, with marks in words.
const QWEN_35: Step = Step::Words(concat!(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
));

/// Words end where a capital follows a small letter. Only those of ASCII are told apart, as in llama.cpp.
const GPT_4O: Step = Step::Words(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
));

/// Letters with a case, as the publisher lists them.
const DEEPSEEK_LETTERS: Step = Step::Isolate(concat!(
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}",
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}-\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}",
    r"\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}",
    r"\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}",
    r"\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}",
    r"\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}",
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}",
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}",
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}-\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}",
    r"\x{2ceb}-\x{2cee}\x{2cf2}-\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}",
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}",
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}",
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
));

const DIGIT: Step = Step::Isolate(r"\p{N}");

const RULES: [Rule; 8] = [
    Rule {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"],
        steps: &[QWEN_2],
        adds_bos: false,
        takes_whole: false,
    },
    Rule { names: &["qwen35"], steps: &[QWEN_35], adds_bos: false, takes_whole: false },
    Rule {
        names: &["olmo", "gpt-2", "granite-docling"],
        steps: &[GPT_2],
        adds_bos: false,
        takes_whole: false,
    },
    Rule {
        names: &["refact", "starcoder", "smollm"],
        steps: &[DIGIT, GPT_2],
        adds_bos: false,
        takes_whole: false,
    },
    Rule {
        names: &["llama-bpe", "lfm2", "llama3", "llama-v3"],
        steps: &[LLAMA_3],
        adds_bos: true,
        takes_whole: true,
    },
    Rule { names: &["dbrx"], steps: &[LLAMA_3], adds_bos: false, takes_whole: false },
    Rule { names: &["gpt-4o", "llama4"], steps: &[GPT_4O], adds_bos: false, takes_whole: false },
    Rule {
        names: &["deepseek-llm"],
        steps: &[
            Step::Isolate(r"[\r\n]"),
            DEEPSEEK_LETTERS,
            Step::Isolate(
                r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            ),
            Step::Isolate(r"\s+$"),
            Step::Isolate(r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"),
            Step::Isolate(r"\p{N}+"),
        ],
        adds_bos: false,
        takes_whole: false,
    },
];

/// The rule of this name, if it is known.
pub(super) fn rule(name: &str) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.names.contains(&name))
}

/// A rule, ready to use.
pub(super) struct Splitter(Vec<(Regex, bool)>);

impl Splitter {
    pub(super) fn new(rule: &Rule) -> Result<Splitter, TokenizerError> {
        let compile = |step: &Step| {
            let (Step::Isolate(pattern) | Step::Words(pattern)) = step;
            Ok((Regex::new(pattern).map_err(failed)?, matches!(step, Step::Words(_))))
        };
        rule.steps.iter().map(compile).collect::<Result<_, TokenizerError>>().map(Splitter)
    }

    /// The words of `text`; together they are the text.
    pub(super) fn words<'t>(&self, text: &'t str) -> Result<Vec<&'t str>, TokenizerError> {
        self.0.iter().try_fold(vec![text], |words, (regex, cuts_spaces)| {
            let mut finer = Vec::new();
            words.into_iter().try_for_each(|word| cut(word, regex, *cuts_spaces, &mut finer))?;
            Ok(finer)
        })
    }
}

fn cut<'t>(
    text: &'t str,
    regex: &Regex,
    cuts_spaces: bool,
    words: &mut Vec<&'t str>,
) -> Result<(), TokenizerError> {
    let mut push = |range: Range<usize>| {
        if !range.is_empty() {
            words.push(&text[range]);
        }
    };
    let mut done = 0;
    for found in regex.find_iter(text) {
        let found = found.map_err(failed)?.range();
        let last_space = text[done..found.start].char_indices().next_back().map_or(0, |(at, _)| at);
        let is_bare = !text[found.clone()].starts_with(char::is_whitespace);
        let split = if cuts_spaces && is_bare { done + last_space } else { done };
        push(done..split);
        push(split..found.start);
        done = found.end;
        push(found);
    }
    push(done..text.len());
    Ok(())
}

fn failed(error: fancy_regex::Error) -> TokenizerError {
    TokenizerError::Split(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        Splitter::new(rule(name).unwrap()).unwrap().words(text).unwrap()
    }

    #[test]
    fn every_rule_keeps_every_byte() {
        let text = "The the a.b, c;\n\nd\te \r\nf'll 'g' h  i\u{a0}j\u{a0}\u{a0}k. л\nм 東京。 北京、x\u{301} \u{301}y é\n/z \
                    हि ह\n가 A.B!!\n\nC\n\n\nD ?\n  \n e...\n f 1234 ｆ１ \u{10ffff}\0 ǅ ʔ ა  ";
        for rule in &RULES {
            let words = Splitter::new(rule).unwrap().words(text).unwrap();
            assert_eq!(words.concat(), text, "{}", rule.names[0]);
            assert!(words.len() > 40 && words.iter().all(|word| !word.is_empty()));
        }
    }

    #[test]
    fn white_space_goes_where_the_published_patterns_put_it() {
        for (name, text, expected) in [
            ("gpt-2", "a   b", &["a", "  ", " b"][..]),
            ("gpt-2", "a\t\tb", &["a", "\t", "\t", "b"]),
            ("gpt-2", "a\n\n b \n", &["a", "\n\n", " b", " \n"]),
            ("qwen2", "a\t\tb\t\t1", &["a", "\t", "\tb", "\t", "\t", "1"]),
            ("qwen2", "a \n\n  b\n", &["a", " \n\n", " ", " b", "\n"]),
            ("refact", "a  12", &["a", "  ", "1", "2"]),
            ("llama-bpe", "1234 it's", &["123", "4", " it", "'s"]),
            ("gpt-4o", "camelCase ABCd's a/\n/b", &["camel", "Case", " ABCd's", " a", "/\n/", "b"]),
            ("qwen35", "x\u{301}y \u{301}z", &["x\u{301}y", " \u{301}z"]),
            ("deepseek-llm", "café 12\n  東京!", &["caf", "é", " ", "12", "\n", "  ", "東京", "!"]),
        ] {
            assert_eq!(words(name, text), expected, "{name} {text:?}");
        }
    }

    #[test]
    fn runs_of_anything_take_linear_time() {
        for rule in &RULES {
            for run in [" ", "\n", "A", "1", "東", "'"] {
                let text = run.repeat(1 << 20) + "x";
                assert_eq!(Splitter::new(rule).unwrap().words(&text).unwrap().concat().len(), text.len());
            }
        }
    }
}
