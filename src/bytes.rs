//! Bounded reading of bytes that nobody vouches for: a little-endian cursor, checked sizes, a read-only file.
//!
//! Nothing here allocates from a length that the bytes claim, and nothing here panics on any input.

mod cursor;
mod map;

pub use cursor::{Cursor, OutOfBounds};
pub use map::{FileBytes, Io, end_on_lost_pages};

/// Rounds `value` up to a multiple of `step`; `None` when that leaves 64 bits or `step` is 0.
pub fn align_up(value: u64, step: u64) -> Option<u64> {
    let over = value.checked_rem(step)?;
    if over == 0 { Some(value) } else { value.checked_add(step.checked_sub(over)?) }
}

/// Upper bounds on what a reader takes from a file before it refuses.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a GGUF header (metadata and tensor directory).
    pub header_bytes: u64,
    /// Bytes of one string.
    pub string_bytes: u64,
    /// Elements of an array under `tokenizer.`.
    pub tokenizer_elements: u64,
    /// Elements of any other array.
    pub array_elements: u64,
    /// Tensors in one file.
    pub tensors: u64,
    /// Keys in one file.
    pub keys: u64,
}

impl Default for Limits {
    /// Generous for every published model, small enough for a board.
    fn default() -> Self {
        Limits {
            header_bytes: 64 << 20,
            string_bytes: 16 << 20,
            tokenizer_elements: 4 << 20,
            array_elements: 64 << 10,
            tensors: 1 << 18,
            keys: 1 << 16,
        }
    }
}
