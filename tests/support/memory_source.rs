//! A model held in memory, tensor by tensor, that a test may spoil in one place.

use orkpack::tensor::{Dtype, Metadata, Place, SourceError, TensorInfo, TensorSource, Value};

use super::gguf_builder::GgufBuilder;

/// A [`TensorSource`] whose tensor `i` is file `i`.
#[derive(Clone, Debug, Default)]
pub struct MemorySource {
    pub metadata: Metadata,
    pub tensors: Vec<TensorInfo>,
    pub data: Vec<Vec<u8>>,
}

impl TensorSource for MemorySource {
    fn header(&self) -> &[u8] {
        &[]
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    fn bytes(&self, place: Place) -> Result<&[u8], SourceError> {
        let Place { file, offset, len } = place;
        let range = offset as usize..offset.saturating_add(len) as usize;
        let data = self.data.get(file as usize).and_then(|data| data.get(range));
        data.ok_or(SourceError::OutOfFile { file, offset, len })
    }
}

/// The sizes of [`MemorySource::random`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub n_layer: usize,
    pub n_embd: usize,
    pub n_head: usize,
    pub n_head_kv: usize,
    pub head_dim: usize,
    pub n_ff: usize,
    pub n_expert: usize,
    pub n_used: usize,
    pub n_vocab: usize,
}

/// Every size different from every other that it could be taken for.
pub const SMALL: Sizes = Sizes {
    n_layer: 2,
    n_embd: 48,
    n_head: 4,
    n_head_kv: 2,
    head_dim: 16,
    n_ff: 24,
    n_expert: 6,
    n_used: 2,
    n_vocab: 80,
};

impl MemorySource {
    /// A model of `qwen3moe` or `olmoe` with random F32 weights, the same for the same seed.
    pub fn random(architecture: &str, sizes: Sizes, seed: u64) -> MemorySource {
        let Sizes { n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_expert, n_used, n_vocab } = sizes;
        let mut source = MemorySource::default();
        source.set("general.architecture", Value::String(architecture.into()));
        for (key, value) in [
            ("block_count", n_layer),
            ("context_length", 512),
            ("embedding_length", n_embd),
            ("feed_forward_length", n_ff),
            ("attention.head_count", n_head),
            ("attention.head_count_kv", n_head_kv),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("expert_count", n_expert),
            ("expert_used_count", n_used),
            ("expert_feed_forward_length", n_ff),
            ("vocab_size", n_vocab),
        ] {
            source.set(&format!("{architecture}.{key}"), Value::U32(value as u32));
        }
        let eps = format!("{architecture}.attention.layer_norm_rms_epsilon");
        source.set(&eps, Value::F32(1e-6));

        let mut random = Random(seed);
        let (q, kv) = (n_head * head_dim, n_head_kv * head_dim);
        let (q_norm, k_norm) = if architecture == "olmoe" { (q, kv) } else { (head_dim, head_dim) };
        source.push(&mut random, "token_embd.weight", &[n_embd, n_vocab]);
        source.push(&mut random, "output_norm.weight", &[n_embd]);
        source.push(&mut random, "output.weight", &[n_embd, n_vocab]);
        for layer in 0..n_layer {
            for (part, dims) in [
                ("attn_norm", vec![n_embd]),
                ("attn_q", vec![n_embd, q]),
                ("attn_k", vec![n_embd, kv]),
                ("attn_v", vec![n_embd, kv]),
                ("attn_output", vec![q, n_embd]),
                ("attn_q_norm", vec![q_norm]),
                ("attn_k_norm", vec![k_norm]),
                ("ffn_norm", vec![n_embd]),
                ("ffn_gate_inp", vec![n_embd, n_expert]),
                ("ffn_gate_exps", vec![n_embd, n_ff, n_expert]),
                ("ffn_up_exps", vec![n_embd, n_ff, n_expert]),
                ("ffn_down_exps", vec![n_ff, n_embd, n_expert]),
            ] {
                source.push(&mut random, &format!("blk.{layer}.{part}.weight"), &dims);
            }
        }
        source
    }

    /// The same model as `source`, in memory.
    pub fn copy(source: &dyn TensorSource) -> MemorySource {
        let mut copy = MemorySource { metadata: source.metadata().clone(), ..MemorySource::default() };
        for tensor in source.tensors() {
            copy.add(tensor.clone(), source.bytes(tensor.place).unwrap().to_vec());
        }
        copy
    }

    /// The model as a file.
    pub fn to_gguf(&self) -> Vec<u8> {
        let entries = self.metadata.0.iter();
        let builder = entries.fold(GgufBuilder::new(), |file, (key, value)| file.kv(key, value.clone()));
        let tensors = self.tensors.iter();
        let with = |file: GgufBuilder, tensor: &TensorInfo| {
            let data = self.bytes(tensor.place).unwrap().to_vec();
            file.tensor(&tensor.name, tensor.dtype, &tensor.dims, data)
        };
        tensors.fold(builder, with).build()
    }

    /// Sets a metadata key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.0.insert(key.to_owned(), value);
    }

    /// The tensor with this name, to be spoilt.
    pub fn tensor(&mut self, name: &str) -> &mut TensorInfo {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// The bytes of the tensor with this name, to be spoilt.
    pub fn bytes_of(&mut self, name: &str) -> &mut Vec<u8> {
        let file = self.tensor(name).place.file;
        &mut self.data[file as usize]
    }

    /// Drops the tensor with this name.
    pub fn remove(&mut self, name: &str) {
        self.tensors.retain(|tensor| tensor.name != name);
    }

    /// Adds an F32 tensor of random values.
    pub fn push(&mut self, random: &mut Random, name: &str, dims: &[usize]) {
        let n: usize = dims.iter().product();
        // Norms about 1, matrices of fan-in scale, routers wide enough to have preferences.
        let (mean, spread) = match dims {
            [_] => (1.0, 0.2),
            _ if name.contains("ffn_gate_inp") => (0.0, 3.0 / (dims[0] as f32).sqrt()),
            _ => (0.0, 1.7 / (dims[0] as f32).sqrt()),
        };
        let values = (0..n).map(|_| mean + spread * random.next());
        let data = values.flat_map(f32::to_le_bytes).collect();
        let dims = dims.iter().map(|dim| *dim as u64).collect();
        let place = Place { file: 0, offset: 0, len: 4 * n as u64 };
        self.add(TensorInfo { name: name.to_owned(), dtype: Dtype::F32, dims, place }, data);
    }

    /// Adds a tensor whose place is set here.
    pub fn add(&mut self, mut tensor: TensorInfo, data: Vec<u8>) {
        tensor.place = Place { file: self.data.len() as u32, offset: 0, len: data.len() as u64 };
        self.tensors.push(tensor);
        self.data.push(data);
    }
}

/// A small generator (splitmix64), so that a seed means the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From −1 to 1.
    pub fn next(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
