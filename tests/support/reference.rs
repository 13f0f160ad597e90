//! The reference models: files, and what llama.cpp says of each.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::gguf::GgufFile;
use orkpack::model::Model;
use orkpack::threads::Pool;
use serde_json::Value;

use super::fixture;

/// A model with what llama.cpp says of it.
pub struct Reference {
    pub path: PathBuf,
    pub json: Value,
    pub file: Arc<GgufFile>,
    pub model: Model,
}

impl Reference {
    pub fn open(path: &Path) -> Reference {
        let file = GgufFile::open(path, Io::Map, &Limits::default()).unwrap();
        let model = Model::describe(&file).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let json = serde_json::from_slice(&fs::read(path.with_extension("json")).unwrap()).unwrap();
        Reference { path: path.to_owned(), json, file: Arc::new(file), model }
    }

    pub fn name(&self) -> &str {
        self.path.file_stem().and_then(|stem| stem.to_str()).unwrap()
    }

    /// As the tool that quantised it names it.
    pub fn dtype(&self) -> &str {
        self.json["type"].as_str().unwrap()
    }

    pub fn is_f32(&self) -> bool {
        self.dtype() == "F32"
    }

    /// What the file's weights give in f32: the run itself, or that of the dequantised weights.
    pub fn exact(&self) -> &Value {
        if self.is_f32() { &self.json } else { &self.json["dequantized_f32"] }
    }

    pub fn exact_logits(&self) -> Vec<f32> {
        self.floats(if self.is_f32() { "logits.f32" } else { "deq.logits.f32" })
    }

    pub fn floats(&self, extension: &str) -> Vec<f32> {
        let bytes = fs::read(self.path.with_extension(extension)).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// What the reference chose with its own rounding, `[layer][position][slot]`.
    pub fn choices(&self) -> Vec<Vec<Vec<u32>>> {
        let layer = |layer: usize| &self.json["routing"][layer.to_string()]["topk"];
        let rows = |topk: &Value| topk.as_array().map_or(Vec::new(), |rows| rows.iter().map(ids).collect());
        (0..self.model.n_layer()).map(|at| rows(layer(at))).collect()
    }

    pub fn prompt(&self) -> Vec<u32> {
        ids(&self.json["prompt_tokens"])
    }
}

/// The executor of the runtime. One thread each: the tests themselves run side by side.
pub fn executor(file: &Arc<GgufFile>, model: &Model, mode: KernelMode) -> CpuExecutor {
    CpuExecutor::new(file.clone(), model.weights().clone(), Arc::new(Pool::new(1)), mode).unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The bundled reference models.
pub fn bundled() -> Vec<Reference> {
    models(&fixture("models/reference")).iter().map(|path| Reference::open(path)).collect()
}

/// The bundled reference models and those of `ORKPACK_REFERENCE` that are not among them.
pub fn references() -> Vec<Reference> {
    let mut all = bundled();
    if let Some(folder) = std::env::var_os("ORKPACK_REFERENCE") {
        let more: Vec<Reference> =
            models(Path::new(&folder)).iter().map(|path| Reference::open(path)).collect();
        let is_known = |one: &Reference| all.iter().any(|known| known.json["sha256"] == one.json["sha256"]);
        let more: Vec<Reference> = more.into_iter().filter(|one| !is_known(one)).collect();
        all.extend(more);
    }
    all
}

fn models(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_model = |path: &PathBuf| {
        path.extension().is_some_and(|e| e == "gguf") && path.with_extension("json").exists()
    };
    let mut models: Vec<PathBuf> = files.filter(is_model).collect();
    models.sort();
    models
}
