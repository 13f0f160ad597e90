//! Opens a model or pack, fills the device with its hot chunks, decodes, counts.
//!
//! ```text
//! open ─► Runtime ─► engine ─► Session ─► tokens
//!         model,     who       prompt, step
//!         threads    computes
//! ```
//!
//! It never writes a file and never prints.

mod counters;
mod dialogue;
mod hot;
mod load;
mod lookup;
mod modelled;
mod partition;
mod record;
mod session;
mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bytes::{Io, Limits};
use crate::chat::ChatTemplate;
use crate::device::{Account, CpuTiles, Device, Npu, Sim, probe};
use crate::error::{AtFile, Error};
use crate::executor::cpu::{CpuExecutor, KernelMode};
use crate::executor::{Executor, WeightTable};
use crate::model::{CacheType, Model};
use crate::pack::Cut;
use crate::pack::verify::{Mode, verify};
use crate::profile::DeviceProfile;
use crate::source::{self, Opened, PackedModel};
use crate::tensor::TensorSource;
use crate::threads::Pool;
use crate::tokenizer::{Tokenizer, TokenizerError};

pub use counters::{Calls, Counters};
pub use dialogue::{Dialogue, Turn};
pub use hot::{HotTable, Share};
pub use load::Loaded;
pub use lookup::Lookup;
pub use partition::Partition;
pub use record::Record;
pub use session::{Reading, Session, Speed};

use modelled::Modelled;
use worker::Worker;

/// Where hot experts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A board's NPU that passes its probe, else nowhere: everything from source rows. No board port exists yet.
    #[default]
    Auto,
    /// The int8 contract on the CPU.
    Cpu,
    /// The software NPU.
    Sim,
}

/// What is checked before a pack runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// Every byte.
    Full,
    /// Header, index, and the chunks that are loaded.
    #[default]
    Loaded,
    /// Header and index.
    Index,
}

/// How to run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where hot experts are computed.
    pub device: DeviceChoice,
    /// Arithmetic of source rows.
    pub kernel: KernelMode,
    /// Threads of the CPU; `None`: the fastest cores allowed.
    pub threads: Option<usize>,
    /// What is checked first.
    pub check: Check,
    /// How files are read.
    pub io: Io,
    /// A fallback to the CPU is an error.
    pub strict: bool,
    /// The model with the tensors of a thin pack; `None`: the one beside it.
    pub model: Option<PathBuf>,
    /// The device that is here; `None`: the one that the pack is for.
    pub here: Option<Here>,
}

/// The device that is here, by the name of its profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Here {
    /// The name, as in `rk3588`.
    pub device: String,
    /// Whether somebody named it, who then wants no other.
    pub is_named: bool,
}

/// An open model, ready to be run.
pub struct Runtime {
    path: PathBuf,
    options: Options,
    source: Arc<dyn TensorSource>,
    packed: Option<Arc<PackedModel>>,
    model: Model,
    weights: Arc<WeightTable>,
    pool: Arc<Pool>,
    profile: Option<DeviceProfile>,
    files: Vec<PathBuf>,
    notes: Vec<String>,
}

impl Runtime {
    /// Opens a GGUF or a pack.
    ///
    /// # Errors
    ///
    /// [`Error`] with the file's name when it is unsound, not supported, or (under [`Check::Full`]) damaged.
    pub fn open(path: &Path, options: Options) -> Result<Runtime, Error> {
        let opened =
            source::open_with(path, options.model.as_deref(), options.io, &Limits::default()).at(path)?;
        Runtime::of(path, opened, options)
    }

    /// Runs what was opened; `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`Runtime::open`].
    pub fn of(path: &Path, opened: Opened, options: Options) -> Result<Runtime, Error> {
        let source = opened.source();
        let model = Model::describe(source.as_ref()).at(path)?;
        let files = opened.paths();
        let mut notes: Vec<String> = opened.files_read().iter().filter_map(|file| file.note()).collect();
        let packed = match opened {
            Opened::Pack(packed) => Some(packed),
            Opened::Gguf(_) => None,
        };
        notes.extend(packed.as_ref().and_then(|packed| packed.note()));
        if let (Some(packed), Check::Full) = (&packed, options.check) {
            let report = verify(packed.pack(), Mode::Full, &|_| ());
            if let Some(finding) = report.findings().next() {
                return Err(Error::usage(format!("the pack is damaged: {finding}")).or_at(path));
            }
            if let Some(wrong) = packed.check_bound(&|_| ()).into_iter().next() {
                return Err(Error::from(wrong).or_at(packed.bound_to().unwrap_or(path)));
            }
        }
        let profile = match &packed {
            Some(packed) => Some(DeviceProfile::from_json(packed.pack().profile()).at(path)?),
            None => None,
        };
        let threads = options.threads.unwrap_or_else(Pool::default_threads);
        let weights = Arc::clone(model.weights());
        let pool = Arc::new(Pool::new(threads));
        Ok(Runtime {
            path: path.to_owned(),
            options,
            source,
            packed,
            model,
            weights,
            pool,
            profile,
            files,
            notes,
        })
    }

    /// The files that it is read from.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// What a user should know of how it was opened, a line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What keys and values are kept as: exact arithmetic keeps them as they were computed.
    pub fn cache(&self) -> CacheType {
        match self.options.kernel {
            KernelMode::Fast => CacheType::F16,
            KernelMode::Exact => CacheType::F32,
        }
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its tensors come from.
    pub fn source(&self) -> &dyn TensorSource {
        self.source.as_ref()
    }

    /// The pack, if it is one.
    pub fn packed(&self) -> Option<&Arc<PackedModel>> {
        self.packed.as_ref()
    }

    /// The device profile of the pack.
    pub fn profile(&self) -> Option<&DeviceProfile> {
        self.profile.as_ref()
    }

    /// Threads of the CPU.
    pub fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }

    /// Text to tokens and back.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`] for a tokenizer that this version does not know; tokens can still be given as numbers.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::from_metadata(self.source.metadata())
    }

    /// The model's own chat template, if it has one.
    ///
    /// # Errors
    ///
    /// [`Error`] when the template is not one.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, Error> {
        ChatTemplate::from_metadata(self.source.metadata()).at(&self.path)
    }

    /// Touches every byte of the model once, so that it is in memory; returns how many there are.
    pub fn prefault(&self) -> u64 {
        let pages = self.source.tensors().iter().filter_map(|tensor| self.source.bytes(tensor.place).ok());
        let touched = pages.map(|bytes| {
            let sum = bytes.iter().step_by(4096).fold(0u8, |sum, byte| sum ^ byte);
            std::hint::black_box(sum);
            bytes.len() as u64
        });
        touched.sum()
    }

    /// Everything on the CPU from source rows.
    ///
    /// # Errors
    ///
    /// [`Error`] when the weights do not suit the executor.
    pub fn reference(&self) -> Result<Engine, Error> {
        Ok(Engine::Source(Box::new(self.cpu()?), None))
    }

    /// The engine that the options ask for: a partition where there are a pack and a device.
    ///
    /// # Errors
    ///
    /// As [`Runtime::engine_on`]; also, under strict rules, when there is no NPU, and when the pack is for another device
    /// than the one that is here and nothing may fall back.
    pub fn engine(&self) -> Result<Engine, Error> {
        let Some(profile) = &self.profile else { return self.reference() };
        if let Some(here) = self.options.here.as_ref().filter(|here| here.device != profile.name) {
            let line = format!("the pack is for {}, this is {}", profile.name, here.device);
            return match self.options.strict || here.is_named {
                true => Err(Error::usage(line).or_at(&self.path)),
                false => Ok(Engine::Source(Box::new(self.cpu()?), Some(line))),
            };
        }
        match self.options.device {
            DeviceChoice::Auto if self.options.strict => {
                Err(Error::usage("there is no NPU here, and --strict allows no other").or_at(&self.path))
            }
            DeviceChoice::Auto => self.reference(),
            DeviceChoice::Cpu => self.engine_on(Box::new(CpuTiles::on(Arc::clone(&self.pool)))),
            DeviceChoice::Sim => {
                let sim = Sim::new(profile).on(Arc::clone(&self.pool));
                self.engine_on(Box::new(Npu::new(sim, profile)))
            }
        }
    }

    /// A partition between this device, which is probed and filled first, and the CPU. Without a pack there is nothing
    /// for a device, and everything is computed from source rows; likewise where the device does not pass its probe.
    ///
    /// # Errors
    ///
    /// [`Error`] when a chunk is damaged, or, under strict rules, when the device does not pass its probe or not
    /// everything fits.
    pub fn engine_on(&self, mut device: Box<dyn Device>) -> Result<Engine, Error> {
        let (Some(packed), Some(profile)) = (&self.packed, &self.profile) else { return self.reference() };
        match probe(device.as_mut(), profile) {
            Err(error) if self.options.strict => return Err(error.into()),
            Err(error) => return Ok(Engine::Source(Box::new(self.cpu()?), Some(error.to_string()))),
            Ok(()) => {}
        }
        let (name, pack) = (device.name(), packed.pack());
        let mut hot = HotTable::of(pack, &self.weights).map_err(|error| error.or_at(&self.path))?;
        let check = self.options.check == Check::Loaded;
        let loaded =
            load::load(device.as_mut(), pack, &mut hot, check).map_err(|error| error.or_at(&self.path))?;
        if let (Some(refused), true) = (&loaded.refused, self.options.strict) {
            return Err(Error::usage(format!("the device has no room: {refused}")));
        }
        let (hot, account) = (Arc::new(hot), device.account());
        let weights = Arc::clone(&self.weights);
        let worker = Worker::start(device, Arc::clone(&hot), weights, Arc::clone(packed))?;
        let modelled = Modelled::new(self.model.shape(), profile.clone());
        let (weights, strict) = (Arc::clone(&self.weights), self.options.strict);
        let partition = Partition::new(self.cpu()?, weights, worker, hot, modelled, strict);
        Ok(Engine::Split(Box::new(Split { partition, name, loaded, account, cuts: pack.cuts().to_vec() })))
    }

    fn cpu(&self) -> Result<CpuExecutor, Error> {
        let (source, weights) = (Arc::clone(&self.source), Arc::clone(&self.weights));
        CpuExecutor::new(source, weights, Arc::clone(&self.pool), self.options.kernel).at(&self.path)
    }
}

/// Who computes a run.
pub enum Engine {
    /// The CPU, from source rows; with why a device is not trusted, if there was one.
    Source(Box<CpuExecutor>, Option<String>),
    /// A device and the CPU.
    Split(Box<Split>),
}

/// A partition that is loaded.
pub struct Split {
    partition: Partition,
    name: &'static str,
    loaded: Loaded,
    account: Account,
    cuts: Vec<Cut>,
}

/// What the tokens that come next are part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// A prompt of that many tokens, in however many micro-batches.
    Prompt(usize),
    /// Generated tokens, one after the other.
    Decode,
}

impl Engine {
    /// Says what comes next, which decides how far down the ranking experts are hot.
    pub fn begin(&mut self, regime: Regime) {
        let Engine::Split(split) = self else { return };
        let tokens = match regime {
            Regime::Prompt(tokens) => tokens,
            Regime::Decode => 1,
        };
        let cut = split.cuts.iter().rev().find(|cut| cut.from_tokens as usize <= tokens);
        let experts = cut.map(|cut| cut.experts.as_slice()).unwrap_or_default();
        split.partition.set_regime(experts, regime == Regime::Decode);
    }

    /// The executor for the forward pass.
    pub fn executor(&mut self) -> &mut dyn Executor {
        match self {
            Engine::Source(cpu, _) => cpu.as_mut(),
            Engine::Split(split) => &mut split.partition,
        }
    }

    /// The device's name; `None` where everything is computed from source rows.
    pub fn device(&self) -> Option<&'static str> {
        match self {
            Engine::Source(..) => None,
            Engine::Split(split) => Some(split.name),
        }
    }

    /// Why a device that was asked for is not trusted.
    pub fn distrust(&self) -> Option<&str> {
        match self {
            Engine::Source(_, distrust) => distrust.as_deref(),
            Engine::Split(_) => None,
        }
    }

    /// What loading did; `None` without a device.
    pub fn loaded(&self) -> Option<&Loaded> {
        match self {
            Engine::Source(..) => None,
            Engine::Split(split) => Some(&split.loaded),
        }
    }

    /// What was counted so far; `None` without a device.
    pub fn counters(&self) -> Option<Counters> {
        let Engine::Split(split) = self else { return None };
        let mut counters = split.partition.counters().clone();
        if counters.account == Account::default() {
            counters.account.clone_from(&split.account);
        }
        Some(counters)
    }

    /// Modelled seconds of the last `m` tokens since this was last asked; `None` without a device.
    pub fn take_modelled_seconds(&mut self, m: usize) -> Option<f64> {
        match self {
            Engine::Source(..) => None,
            Engine::Split(split) => Some(split.partition.take_modelled_seconds(m)),
        }
    }
}
