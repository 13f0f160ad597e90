//! What a layer remembers of the positions before.

use std::ops::Range;

use half::f16;

use super::delta_net::NetMemory;
use crate::kernel::half;
use crate::model::parts::{Attention, LatentAttention, LatentHeads, Mixer, ShortConv};
use crate::tensor::{Dtype, WeightView};

/// The memory of one layer, of the kind that its mixer needs.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    Keys(KvCache),
    Tail(Tail),
    Net(NetMemory),
}

impl Memory {
    pub fn new(mixer: &Mixer, cache: CacheType) -> Memory {
        match mixer {
            Mixer::Attention(attention) => Memory::Keys(KvCache::new(attention.into(), cache)),
            Mixer::Latent(latent) => Memory::Keys(KvCache::new(latent.into(), cache)),
            Mixer::ShortConv(conv) => Memory::Tail(Tail::new(conv)),
            Mixer::DeltaNet(net) => Memory::Net(NetMemory::new(net)),
        }
    }

    /// Whether this memory was made for such a mixer.
    pub fn fits(&self, mixer: &Mixer) -> bool {
        match (self, mixer) {
            (Memory::Keys(cache), Mixer::Attention(attention)) => cache.shape == attention.into(),
            (Memory::Keys(cache), Mixer::Latent(latent)) => cache.shape == latent.into(),
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

    /// Whether it goes back by being cut, as the next call does with a cache.
    pub fn holds_every_position(&self) -> bool {
        matches!(self, Memory::Keys(_))
    }

    /// A copy of what it cannot cut.
    pub fn copied(&self) -> Vec<f32> {
        match self {
            Memory::Keys(_) => Vec::new(),
            Memory::Tail(tail) => tail.past.clone(),
            Memory::Net(memory) => memory.copied(),
        }
    }

    /// Takes a copy back.
    pub fn restore(&mut self, copy: &[f32]) {
        match self {
            Memory::Keys(_) => {}
            Memory::Tail(tail) => tail.past.copy_from_slice(copy),
            Memory::Net(memory) => memory.restore(copy),
        }
    }

    /// Whether the next calls note what is needed to keep only their first rows; what was noted is forgotten.
    pub fn note(&mut self, on: bool) {
        match self {
            // Rows that do not count are written over.
            Memory::Keys(_) => {}
            Memory::Tail(tail) => tail.line = on.then(Vec::new),
            Memory::Net(memory) => memory.note(on),
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

/// What keys and values are kept as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    /// As they were computed.
    #[default]
    F32,
    /// In half precision: half of the memory, and half of what has to be read for every token of a long context.
    F16,
}

impl CacheType {
    /// Bytes of a number.
    pub const fn bytes(self) -> u64 {
        match self {
            CacheType::F32 => 4,
            CacheType::F16 => 2,
        }
    }
}

/// Keys and values, each head's positions one after the other.
#[derive(Clone, Debug)]
pub(super) struct KvCache {
    shape: KvShape,
    heads: Vec<Head>,
}

/// What a position leaves in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KvShape {
    n_head: usize,
    key_dim: usize,
    /// 0 where values are a part of the keys.
    value_dim: usize,
}

impl From<&Attention> for KvShape {
    fn from(attention: &Attention) -> KvShape {
        let &Attention { n_head_kv, head_dim, .. } = attention;
        KvShape { n_head: n_head_kv, key_dim: head_dim, value_dim: head_dim }
    }
}

impl From<&LatentAttention> for KvShape {
    fn from(latent: &LatentAttention) -> KvShape {
        let &LatentAttention { n_head, n_rank, n_nope, n_rot, n_value, .. } = latent;
        match latent.kv_b {
            LatentHeads::Absorbed { .. } => KvShape { n_head: 1, key_dim: n_rank + n_rot, value_dim: 0 },
            LatentHeads::Expanded(_) => KvShape { n_head, key_dim: n_nope + n_rot, value_dim: n_value },
        }
    }
}

/// `[n_positions, key_dim]` and `[n_positions, value_dim]`.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub keys: Store,
    pub values: Store,
}

/// Rows of numbers.
#[derive(Clone, Debug)]
pub(super) enum Store {
    F32(Vec<f32>),
    /// Half-precision numbers, all finite.
    F16(Vec<u16>),
}

/// Rows of a [`Store`].
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
}

impl Head {
    pub fn new(cache: CacheType) -> Head {
        Head { keys: Store::new(cache), values: Store::new(cache) }
    }
}

impl Store {
    fn new(cache: CacheType) -> Store {
        match cache {
            CacheType::F32 => Store::F32(Vec::new()),
            CacheType::F16 => Store::F16(Vec::new()),
        }
    }

    fn truncate(&mut self, n: usize) {
        match self {
            Store::F32(values) => values.truncate(n),
            Store::F16(values) => values.truncate(n),
        }
    }

    /// Appends numbers; what is too large for the type becomes its largest.
    pub fn extend(&mut self, row: &[f32]) {
        match self {
            Store::F32(values) => values.extend_from_slice(row),
            Store::F16(values) => values.extend(row.iter().map(|&value| {
                let most = f16::MAX.to_f32();
                f16::from_f32(value.clamp(-most, most)).to_bits()
            })),
        }
    }

    /// All of them.
    pub fn rows(&self) -> Rows<'_> {
        match self {
            Store::F32(values) => Rows::F32(values),
            Store::F16(values) => Rows::F16(values),
        }
    }
}

impl<'a> Rows<'a> {
    /// How many numbers.
    pub fn len(self) -> usize {
        match self {
            Rows::F32(values) => values.len(),
            Rows::F16(values) => values.len(),
        }
    }

    /// The first `n` numbers, or all if there are less.
    pub fn first(self, n: usize) -> Rows<'a> {
        match self {
            Rows::F32(values) => Rows::F32(&values[..n.min(values.len())]),
            Rows::F16(values) => Rows::F16(&values[..n.min(values.len())]),
        }
    }

    /// As rows of a matrix, `n_in` each; `None` where they are not whole.
    pub fn matrix(self, n_in: usize) -> Option<WeightView<'a>> {
        let n_rows = self.len() / n_in.max(1);
        match self {
            Rows::F32(values) => WeightView::new(Dtype::F32, n_in, n_rows, bytemuck::cast_slice(values)),
            Rows::F16(values) => WeightView::new(Dtype::F16, n_in, n_rows, bytemuck::cast_slice(values)),
        }
    }

    /// The numbers of `range` in f32; where they are not kept so, in `scratch`, which is at least as long.
    #[inline(always)]
    pub fn widened<'s>(self, range: Range<usize>, scratch: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Rows::F32(values) => &values[range],
            Rows::F16(values) => {
                let scratch = &mut scratch[..range.len()];
                scratch.iter_mut().zip(&values[range]).for_each(|(wide, bits)| *wide = half(*bits));
                scratch
            }
        }
    }
}

impl KvCache {
    fn new(shape: KvShape, cache: CacheType) -> KvCache {
        KvCache { shape, heads: vec![Head::new(cache); shape.n_head] }
    }

    /// Appends rows of all heads' keys and of all heads' values after `position`, over whatever a call that failed
    /// left there.
    pub fn append(&mut self, position: usize, keys: &[f32], values: &[f32]) {
        let KvShape { n_head, key_dim, value_dim } = self.shape;
        for (h, head) in self.heads.iter_mut().enumerate() {
            for (store, rows, dim) in [(&mut head.keys, keys, key_dim), (&mut head.values, values, value_dim)]
            {
                store.truncate(position * dim);
                for row in rows.chunks_exact((n_head * dim).max(1)) {
                    store.extend(&row[h * dim..(h + 1) * dim]);
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
    /// What the last call convolved, `[n_taps − 1 + m, n_embd]`, where calls note it.
    pub line: Option<Vec<f32>>,
}

impl Tail {
    fn new(conv: &ShortConv) -> Tail {
        let past = vec![0.0; Tail::len(conv)];
        Tail { next: past.clone(), past, line: None }
    }

    /// As if the last call, which was noted, had had its first `n` rows only.
    pub fn keep_first(&mut self, conv: &ShortConv, n: usize) {
        let n_embd = conv.taps.len() / conv.n_taps;
        let kept = self.line.as_ref().and_then(|line| line.get(n * n_embd..)?.get(..self.past.len()));
        if let Some(kept) = kept {
            self.past.copy_from_slice(kept);
        }
    }

    fn len(conv: &ShortConv) -> usize {
        conv.taps.len() - conv.taps.len() / conv.n_taps
    }
}
