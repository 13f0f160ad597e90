//! shimmytok behind a wall: it is built from checked tables, fed in pieces that it handles rightly, and its
//! ids are held to the bytes of the text.

use super::TokenizerError;
use super::vocabulary::{Tables, Vocabulary};

/// How a text is split before merging, for one value of `tokenizer.ggml.pre`.
pub(super) struct Rule {
    /// The name in the file.
    name: &'static str,
    /// The name under which the engine has this rule.
    engine_name: &'static str,
    /// Whether BOS is added where no key says so. Source: llama.cpp's defaults.
    pub(super) adds_bos: bool,
    /// Whether the engine's pattern loses a white-space character that stands alone before other text.
    loses_lone_space: bool,
}

/// The rules that were held to llama.cpp's ids; see `tests/tokenizer.rs`.
const RULES: [Rule; 6] = [
    Rule { name: "qwen2", engine_name: "qwen2", adds_bos: false, loses_lone_space: false },
    Rule { name: "olmo", engine_name: "olmo", adds_bos: false, loses_lone_space: true },
    Rule { name: "llama-bpe", engine_name: "llama-bpe", adds_bos: true, loses_lone_space: false },
    // The same rule under another name: a piece that is itself a token is taken whole.
    Rule { name: "lfm2", engine_name: "llama-bpe", adds_bos: true, loses_lone_space: false },
    Rule { name: "refact", engine_name: "refact", adds_bos: false, loses_lone_space: false },
    Rule { name: "gpt-4o", engine_name: "gpt-4o", adds_bos: false, loses_lone_space: false },
];

/// The rule of this name, if it is one of the verified ones.
pub(super) fn rule(name: &str) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.name == name)
}

/// Bytes from which on a text is cut at the next border. Keeps the engine below its limit of a million ids.
const PIECE: usize = 1 << 16;

/// Bytes that the engine gets at most. Its patterns give up after a million steps back, such as in a run of
/// a million spaces, and then it never returns; this many of anything are well below that.
const LONGEST_PIECE: usize = 1 << 17;

pub(super) struct Engine {
    rule: &'static Rule,
    inner: shimmytok::Tokenizer,
}

impl Engine {
    pub(super) fn new(rule: &'static Rule, tables: &Tables<'_>) -> Result<Engine, TokenizerError> {
        let inner = shimmytok::Tokenizer::from_bytes(&header(rule.engine_name, tables))
            .map_err(|error| TokenizerError::Engine(error.to_string()))?;
        Ok(Engine { rule, inner })
    }

    /// Appends the ids of `text`, in which no special token counts.
    pub(super) fn encode(
        &self,
        text: &str,
        vocabulary: &Vocabulary,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        self.encode_pieces(pieces(text, PIECE), vocabulary, ids)
    }

    fn encode_pieces<'a>(
        &self,
        pieces: impl Iterator<Item = &'a str>,
        vocabulary: &Vocabulary,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        for piece in pieces {
            if piece.len() > LONGEST_PIECE {
                return Err(TokenizerError::Unbroken { len: piece.len(), limit: LONGEST_PIECE });
            }
            if self.rule.loses_lone_space {
                lone_spaces(piece).try_for_each(|piece| self.piece(piece, vocabulary, ids))?;
            } else {
                self.piece(piece, vocabulary, ids)?;
            }
        }
        Ok(())
    }

    fn piece(&self, text: &str, vocabulary: &Vocabulary, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let found =
            self.inner.encode(text, false).map_err(|error| TokenizerError::Engine(error.to_string()))?;
        let bytes = found.iter().flat_map(|&id| vocabulary.bytes(id).unwrap_or_default());
        if !bytes.eq(text.as_bytes()) {
            return Err(TokenizerError::Lost { near: text.chars().take(20).collect() });
        }
        ids.extend(found);
        Ok(())
    }
}

/// Cuts a text into pieces of at least `least` bytes, at borders only. A piece is longer where no border comes.
fn pieces(text: &str, least: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let from = rest.ceil_char_boundary(least.saturating_sub(1));
        let (head, tail) = rest.split_at(from);
        let at = border(tail).map_or(rest.len(), |at| head.len() + at);
        let (piece, tail) = rest.split_at(at);
        rest = tail;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The first place where a letter ends and white space or plain punctuation begins: every rule splits there,
/// and none looks across. Letters are some that no version of Unicode took for anything else.
fn border(text: &str) -> Option<usize> {
    let letter = |c| {
        matches!(c, 'a'..='z' | 'A'..='Z' | 'à'..='ö' | 'ø'..='ÿ' | 'α'..='ω' | 'а'..='я' | 'ء'..='غ'
            | 'अ'..='ह' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='龥' | '가'..='힣')
    };
    let ends_word = |c: char| c.is_whitespace() || ".,:;!?。、，".contains(c);
    let mut pairs = text.chars().zip(text.char_indices().skip(1));
    pairs.find(|(last, (_, next))| letter(*last) && ends_word(*next)).map(|(_, (at, _))| at)
}

/// Cuts out each white-space character but the plain space that is followed by other text: llama.cpp makes it
/// a piece of its own, the engine's pattern matches it nowhere.
fn lone_spaces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let at = lone_space(rest);
        let at = match at {
            Some((0, len)) => len,
            Some((begin, _)) => begin,
            None => rest.len(),
        };
        let (piece, tail) = rest.split_at(at);
        rest = tail;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Where the first such character begins, and its length.
fn lone_space(text: &str) -> Option<(usize, usize)> {
    let mut chars = text.char_indices().zip(text.chars().skip(1));
    let ((begin, space), _) =
        chars.find(|((_, space), next)| space.is_whitespace() && *space != ' ' && !next.is_whitespace())?;
    Some((begin, space.len_utf8()))
}

/// A GGUF header with the few keys that the engine reads. Its own special ids are all 0 and never used.
fn header(pre: &str, tables: &Tables<'_>) -> Vec<u8> {
    const U32: u32 = 4;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    let ids = ["bos_token_id", "eos_token_id", "unknown_token_id"];
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(0u64.to_le_bytes());
    out.extend((4 + ids.len() as u64).to_le_bytes());
    let key = |out: &mut Vec<u8>, key: &str, kind: u32| {
        string(out, &format!("tokenizer.ggml.{key}"));
        out.extend(kind.to_le_bytes());
    };
    for (name, value) in [("model", "gpt2"), ("pre", pre)] {
        key(&mut out, name, STRING);
        string(&mut out, value);
    }
    for (name, values) in [("tokens", &tables.tokens), ("merges", &tables.merges)] {
        key(&mut out, name, ARRAY);
        out.extend(STRING.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| string(&mut out, value));
    }
    for name in ids {
        key(&mut out, name, U32);
        out.extend(0u32.to_le_bytes());
    }
    out
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::Limits;
    use crate::gguf::GgufFile;
    use crate::tensor::TensorSource;

    /// An engine for every rule, over the vocabulary of the bundled model.
    fn engines() -> (Vocabulary, Vec<Engine>) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/tiny-moe-q8_0.gguf");
        let file = GgufFile::open(path.as_ref(), Default::default(), &Limits::default()).unwrap();
        let tables = Tables::read(file.metadata()).unwrap();
        (tables.vocabulary(), RULES.iter().map(|rule| Engine::new(rule, &tables).unwrap()).collect())
    }

    #[test]
    fn cutting_at_every_border_changes_nothing() {
        let text = "The the a.b, c;\n\nd\te \r\nf'll 'g' h  i\u{a0}j\u{a0}\u{a0}k. л\nм 東京。 北京、x\u{301} \u{301}y é\n/z \
                    हि ह\n가 A.B!!\n\nC\n\n\nD ?\n  \n e...\n f";
        let (vocabulary, engines) = engines();
        assert!(pieces(text, 1).count() > 20);
        for engine in engines {
            let (mut whole, mut cut) = (Vec::new(), Vec::new());
            engine.encode_pieces([text].into_iter(), &vocabulary, &mut whole).unwrap();
            engine.encode_pieces(pieces(text, 1), &vocabulary, &mut cut).unwrap();
            assert_eq!(cut, whole, "{}", engine.rule.name);
        }
    }

    #[test]
    fn the_longest_run_of_anything_ends() {
        let (vocabulary, engines) = engines();
        for engine in &engines {
            for run in [" ", "A", "東"] {
                let text = run.repeat(LONGEST_PIECE / run.len() - 1) + "x";
                engine.encode(&text, &vocabulary, &mut Vec::new()).unwrap();
            }
        }
        let text = " ".repeat(LONGEST_PIECE) + "x";
        let error = engines[0].encode(&text, &vocabulary, &mut Vec::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a stretch of 131073 bytes has no end of a word, expected one every 131072 bytes at least"
        );
    }
}
