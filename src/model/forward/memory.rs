//! What a layer remembers of the positions before.

use crate::model::parts::{Attention, Mixer};

/// The memory of one layer, of the kind that its mixer needs.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    Keys(KvCache),
}

impl Memory {
    pub fn new(mixer: &Mixer) -> Memory {
        match mixer {
            Mixer::Attention(attention) => Memory::Keys(KvCache::new(attention)),
        }
    }

    /// Whether this memory was made for such a mixer.
    pub fn fits(&self, mixer: &Mixer) -> bool {
        match (self, mixer) {
            (Memory::Keys(cache), Mixer::Attention(attention)) => {
                cache.head_dim == attention.head_dim && cache.heads.len() == attention.n_head_kv
            }
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
