//! What `orkpack inspect` shows of a file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::model::ModelShape;
use crate::pack::Pack;
use crate::tensor::TensorSource;
use crate::units::Bytes;

/// A model file as JSON (schema: `formats/inspect.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct InspectDocument {
    /// `orkpack-inspect-1`.
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// `gguf` or `pack`.
    pub kind: &'static str,
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, if it has one.
    pub name: Option<String>,
    /// Why this version cannot run it; `null` when it can.
    pub problem: Option<String>,
    /// Layers with experts.
    pub moe_layers: u64,
    /// Experts of the first of them.
    pub experts: u64,
    /// Experts per token there.
    pub experts_used: u64,
    /// Number of weights.
    pub weights: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes by element type, by name.
    pub types: Vec<TypePart>,
    /// The NPU area; `null` for a GGUF.
    pub npu: Option<NpuPart>,
    /// Every tensor, if asked for.
    pub tensors: Vec<TensorPart>,
}

/// The tensors of one type.
#[derive(Clone, Debug, Serialize)]
pub struct TypePart {
    /// The type.
    pub dtype: String,
    /// Bytes of all its tensors.
    pub bytes: u64,
}

/// A pack's NPU area.
#[derive(Clone, Debug, Serialize)]
pub struct NpuPart {
    /// The digest that stands for the whole content.
    pub root: String,
    /// The device profile it is for.
    pub device: String,
    /// Chunks.
    pub chunks: u64,
    /// Matrices in them.
    pub matrices: u64,
    /// Bytes of the chunks.
    pub bytes: u64,
}

/// One tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorPart {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its dimensions, fastest first.
    pub dims: Vec<u64>,
    /// Its first byte in the file.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl InspectDocument {
    /// The document of an open file: the `shape` of its model, where one is found, and the `problem` if it cannot be
    /// run.
    pub fn of(
        file: &Path,
        source: &dyn TensorSource,
        shape: Option<&ModelShape>,
        problem: Option<String>,
        pack: Option<&Pack>,
        tensors: bool,
    ) -> InspectDocument {
        let metadata = source.metadata();
        let text = |key: &str| metadata.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        let first = shape.and_then(|shape| shape.moe_layers.first());
        let mut types: BTreeMap<String, u64> = BTreeMap::new();
        for tensor in source.tensors() {
            *types.entry(tensor.dtype.to_string()).or_default() += tensor.place.len;
        }
        InspectDocument {
            schema: "orkpack-inspect-1",
            file: file.display().to_string(),
            kind: if pack.is_some() { "pack" } else { "gguf" },
            architecture: text("general.architecture").unwrap_or_default(),
            name: text("general.name"),
            moe_layers: shape.map_or(0, |shape| shape.moe_layers.len() as u64),
            experts: first.map_or(0, |layer| layer.n_expert() as u64),
            experts_used: first.map_or(0, |layer| layer.n_used as u64),
            problem,
            weights: source.tensors().iter().map(|tensor| tensor.n_elements()).sum(),
            tensor_bytes: types.values().sum(),
            types: types.into_iter().map(|(dtype, bytes)| TypePart { dtype, bytes }).collect(),
            npu: pack.map(npu),
            tensors: if tensors { source.tensors().iter().map(tensor_part).collect() } else { Vec::new() },
        }
    }
}

fn npu(pack: &Pack) -> NpuPart {
    NpuPart {
        root: pack.root().to_string(),
        device: pack.manifest().device.clone(),
        chunks: pack.chunks().len() as u64,
        matrices: pack.placements().len() as u64,
        bytes: pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).len() as u64).sum(),
    }
}

fn tensor_part(tensor: &crate::tensor::TensorInfo) -> TensorPart {
    TensorPart {
        name: tensor.name.clone(),
        dtype: tensor.dtype.to_string(),
        dims: tensor.dims.clone(),
        offset: tensor.place.offset,
        bytes: tensor.place.len,
    }
}

/// The document as text.
pub fn inspection(document: &InspectDocument) -> String {
    let mut text = String::new();
    let InspectDocument { file, kind, architecture, .. } = document;
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}: {kind}, architecture {}", super::escape(file), super::escape(architecture));
    if let Some(name) = &document.name {
        let _ = writeln!(text, "  name: {}", super::escape(name));
    }
    if let Some(problem) = &document.problem {
        let _ = writeln!(text, "  not supported: {}", super::escape(problem));
    }
    if document.moe_layers > 0 || document.problem.is_none() {
        let InspectDocument { moe_layers, experts, experts_used, .. } = document;
        let _ = writeln!(text, "  experts: {moe_layers} layers of {experts}, {experts_used} used per token");
    }
    let types: Vec<String> =
        document.types.iter().map(|part| format!("{} {}", part.dtype, Bytes(part.bytes))).collect();
    let size = Bytes(document.tensor_bytes);
    let _ = writeln!(text, "  {} weights, {size}: {}", document.weights, types.join(", "));
    if let Some(npu) = &document.npu {
        let (matrices, chunks) = (npu.matrices, super::counted(npu.chunks, "chunk", "chunks"));
        let bytes = Bytes(npu.bytes);
        let _ =
            writeln!(text, "  for {}: {matrices} matrices in {chunks}, {bytes}", super::escape(&npu.device));
        let _ = writeln!(text, "  root {}", npu.root);
    }
    for tensor in &document.tensors {
        let dims: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
        let (name, dims) = (super::escape(&tensor.name), dims.join(" × "));
        let _ = writeln!(text, "  {:>12} {:8} {dims:24} {name}", tensor.offset, tensor.dtype);
    }
    text
}
