//! What `orkpack inspect` shows of a file or a folder.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::model::{MatrixShape, ModelShape, MoeLayerShape};
use crate::pack::Pack;
use crate::plan::Capacity;
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
    /// The files that hold it.
    pub files: Vec<FilePart>,
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, if it has one.
    pub name: Option<String>,
    /// What else than a model it is; `null` for a model.
    pub role: Option<&'static str>,
    /// Why this version cannot run it; `null` when it can.
    pub problem: Option<String>,
    /// Why it can be neither planned nor packed; `null` when it can.
    pub plan_problem: Option<String>,
    /// Its tokenizer.
    pub tokenizer: TokenizerPart,
    /// Its chat template.
    pub chat_template: TemplatePart,
    /// Layers with experts.
    pub moe_layers: u64,
    /// Experts of the first of them.
    pub experts: u64,
    /// Experts per token there.
    pub experts_used: u64,
    /// The experts, a row for consecutive layers that are alike.
    pub expert_table: Vec<ExpertsPart>,
    /// How much of them fits; `null` where there are none.
    pub capacity: Option<CapacityPart>,
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

/// One file of a model.
#[derive(Clone, Debug, Serialize)]
pub struct FilePart {
    /// Its path.
    pub file: String,
    /// Its length.
    pub bytes: u64,
}

/// The tokenizer in a model's metadata.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizerPart {
    /// `tokenizer.ggml.model`.
    pub model: Option<String>,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// Tokens of the vocabulary: rows of the embedding, with which the token list agrees; `null` where the model cannot
    /// be described.
    pub tokens: Option<u64>,
    /// Why text cannot be used with it; `null` when it can.
    pub problem: Option<String>,
}

/// The chat template in a model's metadata.
#[derive(Clone, Debug, Serialize)]
pub struct TemplatePart {
    /// Whether there is one.
    pub present: bool,
    /// Why it cannot be used; `null` when it can.
    pub problem: Option<String>,
}

/// The experts of consecutive layers that are alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertsPart {
    /// The first of the layers.
    pub first_layer: u64,
    /// The last of them.
    pub last_layer: u64,
    /// Experts of each.
    pub experts: u64,
    /// Experts per token.
    pub experts_used: u64,
    /// Gate, up and down of the first expert.
    pub matrices: Vec<MatrixPart>,
    /// Bytes of one expert as stored, the first.
    pub expert_bytes: u64,
}

/// One matrix of an expert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MatrixPart {
    /// `gate`, `up` or `down`.
    pub projection: &'static str,
    /// Inputs.
    pub n_in: u64,
    /// Outputs.
    pub n_out: u64,
    /// Its type.
    pub dtype: String,
}

/// What budgets hold of the experts.
#[derive(Clone, Debug, Serialize)]
pub struct CapacityPart {
    /// The device profile that the copies are for.
    pub device: String,
    /// Bytes of all experts as stored.
    pub source_bytes: u64,
    /// Bytes of int8 copies of all of them.
    pub copy_bytes: u64,
    /// The budgets.
    pub budgets: Vec<BudgetPart>,
}

/// What one budget holds.
#[derive(Clone, Debug, Serialize)]
pub struct BudgetPart {
    /// The budget.
    pub bytes: u64,
    /// Share of the experts' bytes whose copies fit, from 0 to 1: counted from sizes, no plan.
    pub share: f64,
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
    /// Whether it holds the model's tensors.
    pub is_fat: bool,
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

/// What was found out about a file, to be shown.
pub struct Inspected<'a> {
    /// Its path.
    pub path: &'a Path,
    /// The files that hold the model, and their lengths.
    pub files: Vec<FilePart>,
    /// Metadata and tensors.
    pub source: &'a dyn TensorSource,
    /// What else than a model it is.
    pub role: Option<&'static str>,
    /// Its sizes, where it can be planned.
    pub shape: Option<&'a ModelShape>,
    /// Why it cannot be run.
    pub problem: Option<String>,
    /// Why it cannot be planned.
    pub plan_problem: Option<String>,
    /// The pack, if it is one.
    pub pack: Option<&'a Pack>,
    /// Why its tokenizer cannot be used.
    pub tokenizer_problem: Option<String>,
    /// Why its chat template cannot be used.
    pub template_problem: Option<String>,
    /// What budgets hold on the device of this name.
    pub capacity: Option<(String, Capacity)>,
}

impl InspectDocument {
    /// The document; with every tensor if `tensors`.
    pub fn of(found: Inspected<'_>, tensors: bool) -> InspectDocument {
        let Inspected { source, shape, pack, .. } = found;
        let metadata = source.metadata();
        let text = |key: &str| metadata.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        let layers = shape.map_or(&[][..], |shape| &shape.moe_layers);
        let first = layers.first();
        let mut types: BTreeMap<String, u64> = BTreeMap::new();
        for tensor in source.tensors() {
            *types.entry(tensor.dtype.to_string()).or_default() += tensor.place.len;
        }
        InspectDocument {
            schema: "orkpack-inspect-1",
            file: found.path.display().to_string(),
            kind: if pack.is_some() { "pack" } else { "gguf" },
            files: found.files,
            architecture: text("general.architecture").unwrap_or_default(),
            name: text("general.name"),
            role: found.role,
            problem: found.problem,
            plan_problem: found.plan_problem,
            tokenizer: TokenizerPart {
                model: text("tokenizer.ggml.model"),
                pre: text("tokenizer.ggml.pre"),
                tokens: shape.map(|shape| shape.n_vocab as u64),
                problem: found.tokenizer_problem,
            },
            chat_template: TemplatePart {
                present: metadata.get("tokenizer.chat_template").is_some(),
                problem: found.template_problem,
            },
            moe_layers: layers.len() as u64,
            experts: first.map_or(0, |layer| layer.n_expert() as u64),
            experts_used: first.map_or(0, |layer| layer.n_used as u64),
            expert_table: expert_table(layers),
            capacity: found.capacity.map(|(device, capacity)| capacity_part(device, &capacity)),
            weights: source.tensors().iter().map(|tensor| tensor.n_elements()).sum(),
            tensor_bytes: types.values().sum(),
            types: types.into_iter().map(|(dtype, bytes)| TypePart { dtype, bytes }).collect(),
            npu: pack.map(npu),
            tensors: if tensors { source.tensors().iter().map(tensor_part).collect() } else { Vec::new() },
        }
    }
}

/// A row for each run of layers whose experts are alike.
fn expert_table(layers: &[MoeLayerShape]) -> Vec<ExpertsPart> {
    let mut table: Vec<ExpertsPart> = Vec::new();
    for layer in layers {
        let row = experts_part(layer);
        match table.last_mut() {
            Some(last)
                if last.last_layer + 1 == row.first_layer
                    && ExpertsPart { first_layer: last.first_layer, ..row.clone() }
                        == ExpertsPart { last_layer: row.last_layer, ..last.clone() } =>
            {
                last.last_layer = row.last_layer;
            }
            _ => table.push(row),
        }
    }
    table
}

fn experts_part(layer: &MoeLayerShape) -> ExpertsPart {
    let at = u64::from(layer.layer.0);
    let first = layer.experts.first().map(|matrices| matrices.as_slice()).unwrap_or_default();
    let matrix = |(projection, matrix): (&'static str, &MatrixShape)| MatrixPart {
        projection,
        n_in: matrix.n_in as u64,
        n_out: matrix.n_out as u64,
        dtype: matrix.dtype.to_string(),
    };
    ExpertsPart {
        first_layer: at,
        last_layer: at,
        experts: layer.n_expert() as u64,
        experts_used: layer.n_used as u64,
        matrices: ["gate", "up", "down"].into_iter().zip(first).map(matrix).collect(),
        expert_bytes: first.iter().map(|matrix| matrix.bytes).sum(),
    }
}

fn capacity_part(device: String, capacity: &Capacity) -> CapacityPart {
    let budgets = capacity.fits.iter().map(|fit| BudgetPart { bytes: fit.budget.0, share: fit.share });
    CapacityPart {
        device,
        source_bytes: capacity.source_bytes,
        copy_bytes: capacity.copy_bytes,
        budgets: budgets.collect(),
    }
}

fn npu(pack: &Pack) -> NpuPart {
    NpuPart {
        root: pack.root().to_string(),
        device: pack.manifest().device.clone(),
        is_fat: pack.is_fat(),
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
    if let [_, _, ..] = document.files[..] {
        let bytes = document.files.iter().map(|file| file.bytes).sum();
        let _ = writeln!(text, "  in {} files of {} together", document.files.len(), Bytes(bytes));
    }
    supported(document, &mut text);
    experts(document, &mut text);
    let types: Vec<String> =
        document.types.iter().map(|part| format!("{} {}", part.dtype, Bytes(part.bytes))).collect();
    let size = Bytes(document.tensor_bytes);
    let _ = writeln!(text, "  {} weights, {size}: {}", document.weights, types.join(", "));
    if let Some(npu) = &document.npu {
        let (matrices, chunks) = (npu.matrices, super::counted(npu.chunks, "chunk", "chunks"));
        let (kind, bytes) = (if npu.is_fat { "fat" } else { "thin" }, Bytes(npu.bytes));
        let device = super::escape(&npu.device);
        let _ = writeln!(text, "  {kind} pack for {device}: {matrices} matrices in {chunks}, {bytes}");
        let _ = writeln!(text, "  root {}", npu.root);
    }
    for tensor in &document.tensors {
        let dims: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
        let (name, dims) = (super::escape(&tensor.name), dims.join(" × "));
        let _ = writeln!(text, "  {:>12} {:8} {dims:24} {name}", tensor.offset, tensor.dtype);
    }
    text
}

/// What can be done with it.
fn supported(document: &InspectDocument, text: &mut String) {
    if let Some(role) = document.role {
        let _ = writeln!(text, "  no model: {role}");
        return;
    }
    let yes_or = |problem: &Option<String>| match problem {
        Some(problem) => format!("no, {}", super::escape(problem)),
        None => "yes".to_owned(),
    };
    let _ = writeln!(text, "  runs: {}", yes_or(&document.problem));
    // Where both have one reason it is said once.
    if document.problem != document.plan_problem {
        let _ = writeln!(text, "  can be planned and packed: {}", yes_or(&document.plan_problem));
    }
    let TokenizerPart { model, pre, tokens, problem } = &document.tokenizer;
    let tokens = tokens.map_or(String::new(), |tokens| format!(", {tokens} tokens"));
    let names: Vec<String> = [model, pre].into_iter().flatten().map(|name| super::escape(name)).collect();
    let _ = match (problem, names.is_empty()) {
        (_, true) => writeln!(text, "  tokenizer: none{tokens}, so token ids only"),
        (None, false) => writeln!(text, "  tokenizer: {}{tokens}, known", names.join(" / ")),
        (Some(problem), false) => {
            let names = names.join(" / ");
            writeln!(text, "  tokenizer: {names}{tokens}, not known: {}", super::escape(problem))
        }
    };
    let _ = match (&document.chat_template, document.chat_template.present) {
        (_, false) => writeln!(text, "  chat template: none"),
        (TemplatePart { problem: None, .. }, true) => writeln!(text, "  chat template: there"),
        (TemplatePart { problem: Some(problem), .. }, true) => {
            writeln!(text, "  chat template: there, but cannot be used: {}", super::escape(problem))
        }
    };
}

/// The table of experts, and what fits of them.
fn experts(document: &InspectDocument, text: &mut String) {
    if document.moe_layers == 0 {
        return;
    }
    let InspectDocument { moe_layers, experts, experts_used, .. } = document;
    let _ = writeln!(text, "  experts: {moe_layers} layers of {experts}, {experts_used} used per token");
    for row in &document.expert_table {
        let layers = match (row.first_layer, row.last_layer) {
            (first, last) if first == last => format!("layer {first}"),
            (first, last) => format!("layers {first} to {last}"),
        };
        let matrix =
            |part: &MatrixPart| format!("{} {} × {} {}", part.projection, part.n_in, part.n_out, part.dtype);
        let matrices: Vec<String> = row.matrices.iter().map(matrix).collect();
        let (n, used, size) = (row.experts, row.experts_used, Bytes(row.expert_bytes));
        let _ = writeln!(text, "    {layers}: {used} of {n}, each {size}: {}", matrices.join(", "));
    }
    if let Some(capacity) = &document.capacity {
        let (stored, copies) = (Bytes(capacity.source_bytes), Bytes(capacity.copy_bytes));
        let _ =
            writeln!(text, "    all: {stored} as stored, {copies} as int8 copies for {}", capacity.device);
        let fit = |part: &BudgetPart| format!("{:.0} % in {}", 100.0 * part.share, Bytes(part.bytes));
        let fits: Vec<String> = capacity.budgets.iter().map(fit).collect();
        let _ =
            writeln!(text, "    of these fit: {} (by size; `orkpack plan` says what pays)", fits.join(", "));
    }
}

/// The models of a folder, as JSON (schema: `formats/inspect-folder.schema.json`).
#[derive(Clone, Debug, Serialize)]
pub struct FolderDocument {
    /// `orkpack-inspect-folder-1`.
    pub schema: &'static str,
    /// The folder.
    pub folder: String,
    /// Its model files, by name.
    pub entries: Vec<EntryPart>,
}

/// One file of a folder; the first file of a set stands for all of it.
#[derive(Clone, Debug, Serialize)]
pub struct EntryPart {
    /// Its name.
    pub file: String,
    /// `model`, `dense`, `pack`, `shard`, `imatrix`, `projector`, `adapter`, `vocabulary` or `unreadable`.
    pub kind: &'static str,
    /// Its bytes, of a set those of all files.
    pub bytes: u64,
    /// `general.architecture`, where it can be read.
    pub architecture: Option<String>,
    /// Whether `ork-run` runs it.
    pub runs: bool,
    /// What it is, in a few words.
    pub summary: String,
}

impl FolderDocument {
    /// The document as text: a line for each file.
    pub fn text(&self) -> String {
        let width = |file: &String| super::escape(file).chars().count();
        let widest = self.entries.iter().map(|entry| width(&entry.file)).max().unwrap_or(0);
        let line = |entry: &EntryPart| {
            let (file, size) = (super::escape(&entry.file), Bytes(entry.bytes).to_string());
            format!("{file:widest$}  {size:>10}  {}\n", super::escape(&entry.summary))
        };
        match &self.entries[..] {
            [] => format!("{}: no *.gguf and no *.orkpack\n", super::escape(&self.folder)),
            entries => entries.iter().map(line).collect(),
        }
    }
}
