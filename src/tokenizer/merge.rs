//! Neighbours joined to longer pieces, the best pair first: the heart of both kinds of tokenizer.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Cuts `text` into characters and joins neighbours until `key` knows no pair more; gives the pieces in order.
///
/// `key` gets a pair as the joined text and where its left part ends. The pair with the least key goes first, of
/// equal ones the leftmost. Takes n log n steps for n characters.
pub(super) fn merge<'t, K: Ord>(text: &'t str, key: impl Fn(&'t str, usize) -> Option<K>) -> Vec<&'t str> {
    let mut pieces = Pieces::new(text);
    let mut queue = BinaryHeap::new();
    let candidate = |pieces: &Pieces, left: usize| {
        let right = pieces.next[left];
        let (begin, middle, end) = (pieces.begin[left], *pieces.begin.get(right)?, pieces.end(right));
        Some(Reverse((key(&text[begin..end], middle - begin)?, left, right, end)))
    };
    queue.extend((0..pieces.next.len()).filter_map(|left| candidate(&pieces, left)));
    while let Some(Reverse((_, left, right, end))) = queue.pop() {
        // A pair is still there if its right part follows its left part and ends where it did.
        if pieces.next[left] != right || pieces.end(right) != end {
            continue;
        }
        pieces.join(left, right);
        queue.extend(candidate(&pieces, left));
        if left > 0 {
            queue.extend(candidate(&pieces, pieces.previous[left]));
        }
    }
    pieces.all()
}

/// A list of pieces. A piece is named by its first character's number, and keeps it as it grows.
struct Pieces<'t> {
    text: &'t str,
    /// First byte of each character.
    begin: Vec<usize>,
    /// The piece after each piece, the number of characters after the last. A piece that was joined to another
    /// follows itself, which no other piece does.
    next: Vec<usize>,
    /// The piece before each piece; 0 before the first.
    previous: Vec<usize>,
}

impl<'t> Pieces<'t> {
    fn new(text: &'t str) -> Pieces<'t> {
        let begin: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let n = begin.len();
        Pieces {
            text,
            begin,
            next: (1..=n).collect(),
            previous: (0..n).map(|i| i.saturating_sub(1)).collect(),
        }
    }

    fn end(&self, piece: usize) -> usize {
        self.begin.get(self.next[piece]).copied().unwrap_or(self.text.len())
    }

    fn join(&mut self, left: usize, right: usize) {
        let after = self.next[right];
        self.next[left] = after;
        self.next[right] = right;
        if let Some(previous) = self.previous.get_mut(after) {
            *previous = left;
        }
    }

    fn all(&self) -> Vec<&'t str> {
        let first = (!self.begin.is_empty()).then_some(0);
        let pieces = std::iter::successors(first, |piece| {
            let next = self.next[*piece];
            (next < self.begin.len()).then_some(next)
        });
        pieces.map(|piece| &self.text[self.begin[piece]..self.end(piece)]).collect()
    }
}
