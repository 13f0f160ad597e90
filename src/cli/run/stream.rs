//! Generated tokens on their way to stdout.

use crate::cli::Stop;
use crate::cli::output::Output;
use crate::tokenizer::{Detokenizer, Tokenizer};

/// Text, or ids where there is no tokenizer.
pub struct Stream<'t> {
    detokenizer: Option<Detokenizer<'t>>,
    silent: bool,
    text: String,
    tokens: Vec<u32>,
}

impl<'t> Stream<'t> {
    pub fn new(tokenizer: Option<&'t Tokenizer>, silent: bool) -> Stream<'t> {
        let detokenizer = tokenizer.map(Tokenizer::detokenizer);
        Stream { detokenizer, silent, text: String::new(), tokens: Vec::new() }
    }

    pub fn push(&mut self, token: u32) -> Result<(), Stop> {
        self.tokens.push(token);
        let piece = match &mut self.detokenizer {
            Some(detokenizer) => detokenizer.push(token),
            None if self.tokens.len() == 1 => token.to_string(),
            None => format!(",{token}"),
        };
        self.emit(&piece)
    }

    fn emit(&mut self, piece: &str) -> Result<(), Stop> {
        self.text.push_str(piece);
        if self.silent || piece.is_empty() { Ok(()) } else { Output::new().text(piece) }
    }

    /// The rest of a character that never came, a line feed, and what was generated in all.
    pub fn end(mut self) -> Result<(Option<String>, Vec<u32>), Stop> {
        let is_text = self.detokenizer.is_some();
        if let Some(detokenizer) = self.detokenizer.take() {
            self.emit(&detokenizer.finish())?;
        }
        if !self.silent {
            Output::new().text("\n")?;
        }
        Ok((is_text.then_some(self.text), self.tokens))
    }
}
