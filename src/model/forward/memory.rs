//! What a layer remembers of the positions before.

use super::delta_net::NetMemory;
use crate::model::parts::{Attention, Mixer, ShortConv};

/// The memory of one layer, of the kind that its mixer needs.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    Keys(KvCache),
    Tail(Tail),
    Net(NetMemory),
}

impl Memory {
    pub fn new(mixer: &Mixer) -> Memory {
        match mixer {
            Mixer::Attention(attention) => Memory::Keys(KvCache::new(attention)),
            Mixer::ShortConv(conv) => Memory::Tail(Tail::new(conv)),
            Mixer::DeltaNet(net) => Memory::Net(NetMemory::new(net)),
        }
    }

    /// Whether this memory was made for such a mixer.
    pub fn fits(&self, mixer: &Mixer) -> bool {
        match (self, mixer) {
            (Memory::Keys(cache), Mixer::Attention(attention)) => {
                cache.head_dim == attention.head_dim && cache.heads.len() == attention.n_head_kv
            }
            (Memory::Tail(tail), Mixer::ShortConv(conv)) => tail.past.len() == Tail::len(conv),
            (Memory::Net(memory), Mixer::DeltaNet(net)) => memory.fits(net),
            _ => false,
        }
    }

    /// Takes over what a call has left; called when the whole call has succeeded.
    pub fn commit(&mut self) {
        match self {
            // Positions that do not count yet are written over: there is nothing to take over.
            Memory::Keys(_) => {}
            Memory::Tail(tail) => std::mem::swap(&mut tail.past, &mut tail.next),
            Memory::Net(memory) => memory.commit(),
        }
    }

    /// Forgets all positions.
    pub fn clear(&mut self) {
        match self {
            Memory::Keys(_) => {}
            Memory::Tail(tail) => tail.past.fill(0.0),
            Memory::Net(memory) => memory.clear(),
        }
    }
}

/// Keys and values in f32, each head's positions one after the other.
#[derive(Clone, Debug)]
pub(super) struct KvCache {
    head_dim: usize,
    heads: Vec<Head>,
}

/// `[n_positions, head_dim]` each.
#[derive(Clone, Debug, Default)]
pub(super) struct Head {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl KvCache {
    fn new(attention: &Attention) -> KvCache {
        KvCache { head_dim: attention.head_dim, heads: vec![Head::default(); attention.n_head_kv] }
    }

    /// Appends rows `[m, n_head_kv · head_dim]` after `position`, over whatever a call that failed left there.
    pub fn append(&mut self, position: usize, keys: &[f32], values: &[f32]) {
        let (head_dim, width) = (self.head_dim, self.head_dim * self.heads.len());
        for (h, head) in self.heads.iter_mut().enumerate() {
            for (store, rows) in [(&mut head.keys, keys), (&mut head.values, values)] {
                store.truncate(position * head_dim);
                for row in rows.chunks_exact(width) {
                    store.extend_from_slice(&row[h * head_dim..(h + 1) * head_dim]);
                }
            }
        }
    }

    pub fn head(&self, h: usize) -> &Head {
        &self.heads[h]
    }
}

/// The last `n_taps − 1` positions that a short convolution has seen, zeros before the start.
#[derive(Clone, Debug)]
pub(super) struct Tail {
    /// `[n_taps − 1, n_embd]`, before the state's position.
    pub past: Vec<f32>,
    /// The same after the call that is under way, which may still fail.
    pub next: Vec<f32>,
}

impl Tail {
    fn new(conv: &ShortConv) -> Tail {
        let past = vec![0.0; Tail::len(conv)];
        Tail { next: past.clone(), past }
    }

    fn len(conv: &ShortConv) -> usize {
        conv.taps.len() - conv.taps.len() / conv.n_taps
    }
}
