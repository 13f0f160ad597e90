//! Ids to text, one at a time: a character is given out when its last byte has come, never in halves.

use super::vocabulary::Vocabulary;

/// A streaming decoder. Control tokens have no text.
pub struct Detokenizer<'a> {
    vocabulary: &'a Vocabulary,
    /// The first bytes of a character that is not complete: at most three.
    pending: Vec<u8>,
}

impl<'a> Detokenizer<'a> {
    pub(super) fn new(vocabulary: &'a Vocabulary) -> Self {
        Detokenizer { vocabulary, pending: Vec::new() }
    }

    /// The text that `id` completes, possibly none. Bytes that can no longer become UTF-8, and ids outside the
    /// vocabulary, are U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        let bytes = self.vocabulary.bytes(id).unwrap_or("\u{fffd}".as_bytes());
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        // Each round takes what is UTF-8 and one run of bytes that is not, unless more bytes may complete it.
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, tail) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = tail;
            let Some(wrong) = error.error_len() else { break };
            text.push('\u{fffd}');
            rest = &rest[wrong..];
        }
        if let Ok(valid) = std::str::from_utf8(rest) {
            text.push_str(valid);
            rest = &[];
        }
        self.pending = rest.to_vec();
        text
    }

    /// What is left when no more ids come: U+FFFD for half a character, else nothing.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
