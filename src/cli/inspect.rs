//! `orkpack inspect`.

use std::fs;
use std::path::{Path, PathBuf};

use super::args::InspectArgs;
use super::output::Output;
use super::{Done, the_model_here};
use crate::bytes::{Io, Limits};
use crate::chat::ChatTemplate;
use crate::error::{AtFile, Error};
use crate::gguf::{GgufFile, ShardName};
use crate::model::{Model, ModelError, ModelShape, Outline};
use crate::pack::Pack;
use crate::plan::{Capacity, capacity};
use crate::profile::DeviceProfile;
use crate::report::{EntryPart, FilePart, FolderDocument, InspectDocument, Inspected, counted, inspection};
use crate::source::{self, OpenError, Opened, PackedModel, Role, files_in, files_of};
use crate::tensor::Metadata;
use crate::tokenizer::Tokenizer;
use crate::units::Bytes;

/// Budgets that are asked about: a small window, what is left beside a mapped backbone, a whole domain.
const BUDGETS: [Bytes; 3] = [Bytes(256 << 20), Bytes(1_288_490_189), Bytes(3584 << 20)];

pub fn inspect(arguments: InspectArgs) -> Done {
    let path = arguments.model.map_or_else(the_model_here, Ok)?;
    if path.is_dir() {
        let document = folder(&path)?;
        if arguments.common.json {
            Output::new().json(&document)?;
        } else {
            Output::new().text(&document.text())?;
        }
        return Ok(0);
    }
    let document = file(&path, arguments.tensors)?;
    if arguments.common.json {
        Output::new().json(&document)?;
    } else {
        Output::new().text(&inspection(&document))?;
    }
    Ok(0)
}

/// Opens a model, and a thin pack without its GGUF as far as that goes.
fn open(path: &Path) -> Result<Opened, Error> {
    match source::open(path, Io::Map, &Limits::default()) {
        Err(OpenError::Thin { .. }) => {
            let pack = Pack::open(path, Io::Map).at(path)?;
            let model = PackedModel::without_tensors(pack, &Limits::default()).at(path)?;
            Ok(Opened::Pack(model.into()))
        }
        opened => opened.at(path),
    }
}

fn file(path: &Path, tensors: bool) -> Result<InspectDocument, Error> {
    let opened = open(path)?;
    let source = opened.source();
    let metadata = source.metadata();
    let role = role_words(Role::of(metadata));
    let problem = Model::describe(source.as_ref()).err().map(|problem| problem.to_string());
    let outline = Outline::of(source.as_ref());
    let plan_problem = outline.as_ref().err().map(ModelError::to_string);
    let shape = outline.as_ref().ok().map(Outline::shape);
    let found = Inspected {
        path,
        files: file_parts(path),
        source: source.as_ref(),
        role,
        shape,
        problem: if role.is_some() { Some("this is no model".to_owned()) } else { problem },
        plan_problem,
        pack: opened.pack(),
        tokenizer_problem: Tokenizer::from_metadata(metadata).err().map(|problem| problem.to_string()),
        template_problem: ChatTemplate::from_metadata(metadata).err().map(|problem| problem.to_string()),
        capacity: shape.map(|shape| fits(shape, opened.pack())).transpose()?,
    };
    Ok(InspectDocument::of(found, tensors))
}

/// What budgets hold on the pack's device, or on the one that plans are made for by default.
fn fits(shape: &ModelShape, pack: Option<&Pack>) -> Result<(String, Capacity), Error> {
    let profile = match pack {
        Some(pack) => DeviceProfile::from_json(pack.profile()).at(pack.file().path())?,
        None => DeviceProfile::built_in(DeviceProfile::DEFAULT)?,
    };
    Ok((profile.name.clone(), capacity(shape, &profile, &BUDGETS)))
}

fn file_parts(path: &Path) -> Vec<FilePart> {
    let part = |file: PathBuf| FilePart { file: file.display().to_string(), bytes: len(&file) };
    files_of(path).into_iter().map(part).collect()
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// What a file is that is no model.
fn role_words(role: Role) -> Option<&'static str> {
    match role {
        Role::Model => None,
        Role::Projector => Some("a projector: turns images or sound into what a model reads"),
        Role::Imatrix => Some("an importance matrix: counts for --imatrix"),
        Role::Adapter => Some("an adapter: differences to a model"),
        Role::Vocabulary => Some("a tokenizer alone"),
    }
}

fn folder(path: &Path) -> Result<FolderDocument, Error> {
    let mut files = files_in(path, "gguf").at(path)?;
    files.extend(files_in(path, "orkpack").at(path)?);
    files.sort();
    let entries = files.iter().map(|file| entry(file)).collect();
    Ok(FolderDocument { schema: "orkpack-inspect-folder-1", folder: path.display().to_string(), entries })
}

fn entry(path: &Path) -> EntryPart {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let blank = EntryPart {
        file: name,
        kind: "unreadable",
        bytes: len(path),
        architecture: None,
        runs: false,
        summary: String::new(),
    };
    if let Some(shard) = ShardName::of(path).filter(|shard| shard.number > 1) {
        let first = shard.path(1);
        let first = first.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let summary = format!("shard {} of {}, see {first}", shard.number, shard.count);
        return EntryPart { kind: "shard", summary, ..blank };
    }
    if let Some((kind, summary)) = other_role(path) {
        return EntryPart { kind, summary: summary.to_owned(), ..blank };
    }
    match open(path) {
        Ok(opened) => {
            EntryPart { bytes: file_parts(path).iter().map(|part| part.bytes).sum(), ..model(&opened, blank) }
        }
        Err(error) => {
            let problem = error.failure.to_string();
            EntryPart { summary: format!("cannot be opened: {problem}"), ..blank }
        }
    }
}

/// Kind and words for a file that is no model; its header alone is read.
fn other_role(path: &Path) -> Option<(&'static str, &'static str)> {
    let file = GgufFile::open(path, Io::Map, &Limits::default()).ok()?;
    let role = Role::of(&file.parsed().metadata);
    let kind = match role {
        Role::Model => return None,
        Role::Projector => "projector",
        Role::Imatrix => "imatrix",
        Role::Adapter => "adapter",
        Role::Vocabulary => "vocabulary",
    };
    Some((kind, role_words(role)?))
}

fn model(opened: &Opened, blank: EntryPart) -> EntryPart {
    let source = opened.source();
    let architecture = architecture(source.metadata());
    let named = architecture.clone().unwrap_or_else(|| "no architecture".to_owned());
    let runs = Model::describe(source.as_ref());
    let outline = Outline::of(source.as_ref());
    let shape = outline.as_ref().map(Outline::shape);
    let experts = shape.map(|shape| {
        let (n, layer) = (shape.moe_layers.len(), shape.moe_layers.first());
        let (n_expert, n_used) = layer.map_or((0, 0), |layer| (layer.n_expert(), layer.n_used));
        let layers = counted(n as u64, "layer", "layers");
        format!("{named}, {layers} of {n_expert} experts, {n_used} used")
    });
    let ability = match (&runs, &outline) {
        (Ok(_), _) => "runs".to_owned(),
        (Err(_), Ok(_)) => "can be planned and packed, not run".to_owned(),
        (Err(problem), Err(_)) => problem.to_string(),
    };
    let (kind, summary) = match (opened, &runs, experts) {
        (Opened::Pack(packed), ..) => {
            let pack = packed.pack();
            let (size, device) = (if pack.is_fat() { "fat" } else { "thin" }, &pack.manifest().device);
            let here = pack.is_fat() || packed.bound_to().is_some();
            let ability = if here { ability } else { "its GGUF is not here".to_owned() };
            ("pack", format!("{size} pack for {device}, {named}: {ability}"))
        }
        (_, Err(ModelError::Dense(_)), _) => ("dense", format!("dense model, {named}: no experts to place")),
        (.., Ok(experts)) => ("model", format!("{experts}: {ability}")),
        (.., Err(_)) => ("model", format!("{named}: {ability}")),
    };
    EntryPart { kind, architecture, runs: runs.is_ok(), summary, ..blank }
}

fn architecture(metadata: &Metadata) -> Option<String> {
    metadata.get("general.architecture").and_then(|value| value.as_str()).map(str::to_owned)
}
