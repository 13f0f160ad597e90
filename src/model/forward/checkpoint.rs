//! Going back: from which positions before its end a sequence can be taken up again.
//!
//! A cache holds every position, so it goes back by being cut. A convolution's tail and a delta net's states hold
//! only what the last position left: they are copied where somebody may want to go back to, at a few positions.

use std::collections::VecDeque;

use super::memory::Memory;

/// Checkpoints that are kept at most: the last ones.
const MOST: usize = 4;

/// Bytes of all checkpoints at most. One of the largest delta nets that are known takes some 200 MiB.
const MOST_BYTES: usize = 256 << 20;

/// The positions to which a sequence can go back, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct Checkpoints(VecDeque<Checkpoint>);

#[derive(Clone, Debug)]
struct Checkpoint {
    position: usize,
    /// What each layer cannot cut; nothing for a cache.
    layers: Vec<Vec<f32>>,
}

impl Checkpoint {
    fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| size_of_val(layer.as_slice())).sum()
    }
}

impl Checkpoints {
    /// Keeps what the memories hold at `position`, and drops the oldest where there are too many.
    pub fn keep(&mut self, position: usize, memories: &[Memory]) {
        let is_kept = self.0.back().is_some_and(|last| last.position == position);
        if position == 0 || is_kept || memories.iter().all(Memory::holds_every_position) {
            return;
        }
        self.0.push_back(Checkpoint { position, layers: memories.iter().map(Memory::copied).collect() });
        while self.0.len() > MOST || self.0.iter().map(Checkpoint::bytes).sum::<usize>() > MOST_BYTES {
            self.0.pop_front();
        }
    }

    /// Takes the memories back to the last possible position at or before `position`, and gives it.
    pub fn go_back(&mut self, position: usize, memories: &mut [Memory]) -> usize {
        if memories.iter().all(Memory::holds_every_position) {
            return position;
        }
        while self.0.back().is_some_and(|last| last.position > position) {
            self.0.pop_back();
        }
        let Some(last) = self.0.back() else {
            memories.iter_mut().for_each(Memory::clear);
            return 0;
        };
        memories.iter_mut().zip(&last.layers).for_each(|(memory, layer)| memory.restore(layer));
        last.position
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}
