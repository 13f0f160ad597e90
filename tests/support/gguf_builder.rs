//! Writes small GGUF files in memory: right ones, and ones that lie in a chosen field.

mod tiny_moe;

use orkpack::tensor::{Dtype, Value};

#[allow(unused_imports)]
pub use tiny_moe::{MoeSpec, encode, hollow_moe, tiny_moe, tiny_moe_builder};

/// A GGUF file in the making. Every field is public, so that a test may set what no writer would.
#[derive(Clone, Debug)]
pub struct GgufBuilder {
    pub magic: [u8; 4],
    pub version: u32,
    /// Written instead of the true number.
    pub tensor_count: Option<u64>,
    /// Written instead of the true number.
    pub kv_count: Option<u64>,
    /// Key-value entries, each whole as it will be written.
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<TensorSpec>,
    /// To what the data and each tensor in it are padded. Says nothing in the metadata by itself.
    pub alignment: usize,
}

/// One tensor; the `Option` fields are written instead of the true value.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    pub name: Vec<u8>,
    /// Fastest dimension first.
    pub dims: Vec<u64>,
    pub n_dims: Option<u32>,
    pub type_id: u32,
    /// Offset in the data.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        GgufBuilder {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            kv_count: None,
            entries: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
        }
    }
}

impl GgufBuilder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key and its value.
    pub fn kv(mut self, key: &str, value: Value) -> Self {
        self.entries.push(entry(key.as_bytes(), type_id(&value), &payload(&value)));
        self
    }

    /// Adds a key and a UTF-8 string.
    pub fn text(self, key: &str, value: &str) -> Self {
        self.kv(key, text(value))
    }

    /// Adds an entry with any type id and any bytes after it.
    pub fn raw_kv(mut self, key: &[u8], type_id: u32, payload: &[u8]) -> Self {
        self.entries.push(entry(key, type_id, payload));
        self
    }

    /// Adds a tensor with the bytes that it is to have.
    pub fn tensor(self, name: &str, dtype: Dtype, dims: &[u64], data: Vec<u8>) -> Self {
        self.raw_tensor(TensorSpec::new(name, dtype, dims, data))
    }

    pub fn raw_tensor(mut self, tensor: TensorSpec) -> Self {
        self.tensors.push(tensor);
        self
    }

    /// The header without the padding before the data.
    pub fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.kv_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        out.extend(self.entries.concat());
        let mut next = 0u64;
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend(tensor.n_dims.unwrap_or(tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(next).to_le_bytes());
            next += tensor.data.len().next_multiple_of(self.alignment) as u64;
        }
        out
    }

    /// The whole file. The last tensor is not padded, so that every byte of the file matters.
    pub fn build(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.data);
        }
        out
    }
}

impl TensorSpec {
    pub fn new(name: &str, dtype: Dtype, dims: &[u64], data: Vec<u8>) -> Self {
        let (name, dims) = (name.as_bytes().to_vec(), dims.to_vec());
        TensorSpec { name, dims, n_dims: None, type_id: dtype.gguf_id(), offset: None, data }
    }
}

/// A string value.
pub fn text(value: &str) -> Value {
    Value::String(value.as_bytes().to_vec())
}

/// Length-prefixed bytes.
pub fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

fn entry(key: &[u8], type_id: u32, payload: &[u8]) -> Vec<u8> {
    [&string(key)[..], &type_id.to_le_bytes(), payload].concat()
}

fn type_id(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn payload(value: &Value) -> Vec<u8> {
    match value {
        Value::U8(v) => v.to_le_bytes().to_vec(),
        Value::I8(v) => v.to_le_bytes().to_vec(),
        Value::U16(v) => v.to_le_bytes().to_vec(),
        Value::I16(v) => v.to_le_bytes().to_vec(),
        Value::U32(v) => v.to_le_bytes().to_vec(),
        Value::I32(v) => v.to_le_bytes().to_vec(),
        Value::F32(v) => v.to_le_bytes().to_vec(),
        Value::Bool(v) => vec![u8::from(*v)],
        Value::String(v) => string(v),
        Value::Array(values) => {
            // An empty array is one of u32.
            let mut out = values.first().map_or(4, type_id).to_le_bytes().to_vec();
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(payload(value)));
            out
        }
        Value::U64(v) => v.to_le_bytes().to_vec(),
        Value::I64(v) => v.to_le_bytes().to_vec(),
        Value::F64(v) => v.to_le_bytes().to_vec(),
    }
}

/// A model cut into `n` files as `gguf-split` does it: all keys in the first, a third key in each that numbers it from 0.
pub fn shards(model: &GgufBuilder, n: usize) -> Vec<GgufBuilder> {
    let per_file = model.tensors.len().div_ceil(n);
    let total = model.tensors.len() as i32;
    let part = |(i, tensors): (usize, &[TensorSpec])| {
        let entries = if i == 0 { model.entries.clone() } else { Vec::new() };
        let file = GgufBuilder { entries, tensors: tensors.to_vec(), ..model.clone() };
        file.kv("split.no", Value::U16(i as u16))
            .kv("split.count", Value::U16(n as u16))
            .kv("split.tensors.count", Value::I32(total))
    };
    model.tensors.chunks(per_file).enumerate().map(part).collect()
}
