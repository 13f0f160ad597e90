//! The arguments of both binaries, as clap reads them.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::profile::DeviceProfile;
use crate::units::{Bytes, ExpertId, LayerId};

const EXIT_CODES: &str = "Exit codes: 0 done; 1 the check says no (mismatch, over the usable window, below \
                          --require-gain); 2 could not do it; 130 interrupted.";

/// Convert, plan and verify mixture-of-experts models for Rockchip NPUs
#[derive(Debug, Parser)]
#[command(name = "orkpack", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Orkpack {
    #[command(subcommand)]
    pub command: Command,
}

/// What orkpack can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Calibrate, plan and pack a GGUF in one go
    ///
    /// Reads MODEL, measures which experts its router calls on calibration prompts, picks the experts that are worth
    /// keeping on the NPU within the budget, and writes a pack: the whole model in its source quantisation, and beside
    /// it int8 copies of the chosen matrices in the NPU's own layout. The pack runs anywhere; without an NPU it runs on
    /// the CPU.
    Convert(ConvertArgs),
    /// Say what would be resident and what it would gain, or that it would not
    ///
    /// Needs no NPU. Without routing statistics it answers at once from the model's shapes, with an assumed range of
    /// skew, and says how to measure it. Every number is marked measured, simulated or estimated.
    Plan(PlanArgs),
    /// Count which experts the router calls
    ///
    /// Runs the model on the CPU over calibration text and writes routing statistics, which `plan` and `convert` pick up
    /// by themselves when they lie beside the model. They hold counts only, no text.
    Calibrate(CalibrateArgs),
    /// Merge routing statistics of one model
    Merge(MergeArgs),
    /// Prove that packs are whole and are what they claim
    ///
    /// Without PACK: every *.orkpack of the current folder. Checks every byte, goes on past a mismatch, names what is
    /// broken, and prints the root digest, one number that stands for the whole content.
    Verify(VerifyArgs),
    /// Rebuild damaged int8 copies of a pack from its source rows
    ///
    /// Nothing else is repaired: a pack whose source rows, header or index are damaged is refused. What is rebuilt must
    /// have the digest that the pack holds of it, so the repaired pack is the one that was written, byte for byte.
    Repair(RepairArgs),
    /// Show what is in a GGUF, a pack or a folder of them
    Inspect(InspectArgs),
    /// Give back the GGUF that a pack was made from
    ///
    /// Byte for byte, from a fat pack: a single file, or every file of a split model under its own name.
    Export(ExportArgs),
    /// Take the bundled model through the whole job
    ///
    /// Calibrate, plan, convert, verify, decode with the partition on the software NPU, compare with the CPU. Needs
    /// nothing but this binary; writes to target/demo.
    Demo(DemoArgs),
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write man pages into a folder
    Man {
        /// Folder for orkpack.1, orkpack-convert.1, …, ork-run.1
        dir: PathBuf,
    },
}

impl Command {
    /// What it takes as every command does.
    pub fn common(&self) -> Option<&Common> {
        match self {
            Command::Convert(arguments) => Some(&arguments.common),
            Command::Plan(arguments) => Some(&arguments.common),
            Command::Calibrate(arguments) => Some(&arguments.common),
            Command::Merge(arguments) => Some(&arguments.common),
            Command::Verify(arguments) => Some(&arguments.common),
            Command::Repair(arguments) => Some(&arguments.common),
            Command::Inspect(arguments) => Some(&arguments.common),
            Command::Export(arguments) => Some(&arguments.common),
            Command::Demo(arguments) => Some(&arguments.common),
            Command::Completions { .. } | Command::Man { .. } => None,
        }
    }
}

/// What every command takes.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// One JSON object on stdout instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// Threads; default: the fastest cores that affinity and cgroup allow
    #[arg(long, value_name = "N", global = true, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// No progress and no remarks; errors still come
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// What the plan aims at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveArg {
    /// Speed of one token after another
    Decode,
    /// Speed of reading prompts
    Prefill,
    /// Fill the budget with the most-called experts: for study and tests
    Hits,
}

/// What of a layer may be shared between the NPU and the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SharesArg {
    /// Whichever is worth more, layer by layer
    #[default]
    Auto,
    /// Its experts: some are on the NPU, with all their rows
    Experts,
    /// The rows of every expert: the first ones are on the NPU. For study and tests
    Rows,
}

/// What decides the hot set, shared by `plan` and `convert`.
#[derive(Clone, Debug, Args)]
pub struct Choice {
    /// NPU memory for weights in one domain, like 1.2GiB; default: what the profile leaves
    #[arg(long, value_name = "SIZE")]
    pub budget: Option<Bytes>,
    /// IOMMU domains that may be used, whole layers in each, the budget in each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub domains: u32,
    /// Device profile: a built-in name or a JSON file
    #[arg(long, value_name = "NAME|FILE", default_value = DeviceProfile::DEFAULT, value_parser = ProfileParser)]
    pub profile: String,
    /// Calibration text to measure routing with: plain text, JSON lines, or chat transcripts
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["routing", "imatrix"])]
    pub prompts: Vec<PathBuf>,
    /// Routing statistics to use
    #[arg(long, value_name = "FILE", conflicts_with = "imatrix")]
    pub routing: Option<PathBuf>,
    /// Take the expert counts of an imatrix file (GGUF) instead of running the model
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Use a plan written by `orkpack plan -o`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["budget", "objective", "shares", "force_hot", "routing", "imatrix", "prompts"])]
    pub plan: Option<PathBuf>,
    /// What to plan for; default: each regime keeps what pays in it
    #[arg(long, value_enum, value_name = "WHAT")]
    pub objective: Option<ObjectiveArg>,
    /// What of a layer the NPU and the CPU share
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    pub shares: SharesArg,
    /// Memory of the board, like 8GiB; default: what the profile says
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Bytes>,
    /// Experts to keep hot whatever they cost, as LAYER:EXPERT
    #[arg(long, value_name = "L:E", value_delimiter = ',', value_parser = layer_expert)]
    pub force_hot: Vec<(LayerId, ExpertId)>,
    /// Use statistics although they were measured on another model
    #[arg(long)]
    pub accept_foreign_statistics: bool,
}

/// Takes any name or file; help and completions list the built-in names.
#[derive(Clone)]
struct ProfileParser;

impl TypedValueParser for ProfileParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(DeviceProfile::names().map(PossibleValue::new)))
    }
}

fn layer_expert(text: &str) -> Result<(LayerId, ExpertId), String> {
    let parse = || {
        let (layer, expert) = text.split_once(':')?;
        Some((LayerId(layer.parse().ok()?), ExpertId(expert.parse().ok()?)))
    };
    parse().ok_or_else(|| format!("`{text}` is not LAYER:EXPERT, as in 3:17"))
}

fn size_range(text: &str) -> Result<(Bytes, Bytes), String> {
    let (from, to) = text.split_once("..").ok_or_else(|| format!("`{text}` is not A..B, as in 0..3.5GiB"))?;
    let size = |text: &str| text.trim().parse::<Bytes>().map_err(|error| error.to_string());
    match (size(from)?, size(to)?) {
        (from, to) if from > to => Err(format!("`{text}` begins above its end")),
        range => Ok(range),
    }
}

/// Arguments of `orkpack convert`.
#[derive(Clone, Debug, Args)]
pub struct ConvertArgs {
    /// The model: a GGUF, any shard of one or its folder, or a pack to pack anew
    #[arg(required = true, value_name = "MODEL")]
    pub model: Vec<PathBuf>,
    /// Where the pack goes; default: beside the model, with the ending .orkpack
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub choice: Choice,
    /// Leave the source tensors out; the pack then needs the GGUF, or one with the same tensors, to run
    #[arg(long)]
    pub thin: bool,
    /// Say the exact size of the pack, fat and thin, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    /// Clamp NaN and infinite weights to zero instead of refusing them
    #[arg(long)]
    pub allow_nonfinite: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack plan`.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// The model: a GGUF or a pack; default: the one model of this folder
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub choice: Choice,
    /// Write the plan to a file, for `convert --plan`
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Say of experts why they are in or out, and at which budget that would turn, as LAYER:EXPERT
    #[arg(long, value_name = "L:E", value_delimiter = ',', value_parser = layer_expert, conflicts_with = "plan")]
    pub explain: Vec<(LayerId, ExpertId)>,
    /// Plan for a dozen budgets, like 0..3.5GiB, both ends among them
    #[arg(long, value_name = "A..B", value_parser = size_range, conflicts_with = "plan")]
    pub sweep: Option<(Bytes, Bytes)>,
    /// Write the plan as one page for a browser, which needs no scripts and nothing from elsewhere
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    pub report: Option<PathBuf>,
    /// Replace an existing plan or report
    #[arg(long)]
    pub force: bool,
    /// Exit with 1 unless the plan is that many times as fast as the CPU alone, in decode or prefill
    #[arg(long, value_name = "X")]
    pub require_gain: Option<f64>,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack calibrate`.
#[derive(Clone, Debug, Args)]
pub struct CalibrateArgs {
    /// The model: a GGUF or a pack
    pub model: PathBuf,
    /// Text to measure with; default: a built-in mixture of chat, prose, code, mathematics and twelve languages
    ///
    /// A file is one plain text, or JSON lines (or a JSON array) with a text each: a string, {"text": …} (also
    /// "prompt", "content"), or a conversation, {"messages": [{"role", "content"}…]} or {"conversations": [{"from",
    /// "value"}…]}, which goes through the model's own chat template. What a file is, its content says.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub prompts: Vec<PathBuf>,
    /// Where the statistics go; default: beside the model, with the ending .routing.json
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack merge`.
#[derive(Clone, Debug, Args)]
pub struct MergeArgs {
    /// Two or more routing statistics
    #[arg(required = true, num_args = 2..)]
    pub statistics: Vec<PathBuf>,
    /// Where the merged statistics go
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// One weight for each, like 2,1
    #[arg(long, value_delimiter = ',', value_name = "W")]
    pub weights: Vec<u32>,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack verify`.
#[derive(Clone, Debug, Args)]
pub struct VerifyArgs {
    /// Packs; default: every *.orkpack of this folder
    pub packs: Vec<PathBuf>,
    /// Only header and index
    #[arg(long)]
    pub quick: bool,
    /// The GGUF with the tensors of a thin pack, every one of which is checked; default: the one beside it, if there
    #[arg(long, value_name = "GGUF", conflicts_with = "quick")]
    pub model: Option<PathBuf>,
    /// A model (GGUF or fat pack) that every tensor must be equal to, and from whose weights every int8 copy is derived again
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["quick", "model"])]
    pub against: Option<PathBuf>,
    /// The root digest that the pack must have (one pack)
    #[arg(long, value_name = "ROOT")]
    pub expect: Option<String>,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack repair`.
#[derive(Clone, Debug, Args)]
pub struct RepairArgs {
    /// A pack whose int8 copies or their scales are damaged
    pub pack: PathBuf,
    /// The GGUF with the source rows of a thin pack; default: the one beside it, if there
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Where the repaired pack goes; default: in the place of the damaged one
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack inspect`.
#[derive(Clone, Debug, Args)]
pub struct InspectArgs {
    /// A GGUF, any shard of one, a pack, or a folder, which gives a line for each; default: the one model of this folder
    pub model: Option<PathBuf>,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    #[command(flatten)]
    pub common: Common,
}

/// What a pack can be turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// The original GGUF, or all files of the set
    Gguf,
}

/// Arguments of `orkpack export`.
#[derive(Clone, Debug, Args)]
pub struct ExportArgs {
    /// A fat pack
    pub pack: PathBuf,
    /// What to make of it
    #[arg(long, value_enum)]
    pub to: ExportFormat,
    /// The file, or the folder for the files of a split model; default: beside the pack, under the original names
    #[arg(long, short, value_name = "FILE|DIR")]
    pub output: Option<PathBuf>,
    /// Replace existing outputs
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `orkpack demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Folder to work in
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    pub dir: PathBuf,
    #[command(flatten)]
    pub common: Common,
}

/// Where hot experts are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// A board's NPU that passes its probe, else the CPU from source rows
    Auto,
    /// The int8 contract on the CPU: the reference for the others
    Cpu,
    /// The software NPU
    Sim,
}

/// How much of a pack is checked before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyArg {
    /// Every byte first
    Full,
    /// Trust the file
    None,
}

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoArg {
    /// Map them
    Map,
    /// Read them into memory: for network and removable disks
    Pread,
}

/// Which arithmetic source rows are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KernelArg {
    /// Activations in 8 bits, keys and values in 16
    Fast,
    /// Weights dequantised, everything else in f32
    Exact,
}

/// Whether a model thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ThinkArg {
    /// It does
    On,
    /// It does not
    Off,
}

fn template_arg(text: &str) -> Result<(String, String), String> {
    const GIVEN: [&str; 4] = ["messages", "add_generation_prompt", "bos_token", "eos_token"];
    match text.split_once('=') {
        Some((name, _)) if GIVEN.contains(&name) => {
            Err(format!("every template gets `{name}` from the conversation"))
        }
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not K=V, as in reasoning_effort=high")),
    }
}

/// Run a model: hot experts on the NPU, the rest on the CPU
///
/// MODEL is a pack made by `orkpack convert`, or a GGUF, which runs on the CPU. Started on a terminal without a prompt
/// it converses; text piped in is the prompt, or under --turns a turn a line. Generated text goes to stdout, everything else to stderr.
#[derive(Debug, Parser)]
#[command(name = "ork-run", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct OrkRun {
    /// A pack or a GGUF
    #[arg(value_name = "MODEL")]
    pub file: PathBuf,
    /// The GGUF with the tensors of a thin pack; default: the one beside it, under the name it was made from
    #[arg(long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// The prompt; `-` reads it from stdin
    #[arg(short, long, value_name = "TEXT", conflicts_with = "tokens")]
    pub prompt: Option<String>,
    /// The prompt as token ids, like 1,2,3; ids are printed instead of text
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub tokens: Vec<u32>,
    /// Most tokens to generate
    #[arg(short, long, value_name = "N", default_value_t = 256)]
    pub n_predict: u32,
    /// Context length in tokens; default: the model's, at most 4096
    #[arg(short = 'c', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Do not wrap the prompt in the model's chat template
    #[arg(long, conflicts_with_all = ["chat_template_file", "system", "template_arg", "think"])]
    pub raw: bool,
    /// Use this chat template (Jinja) in the place of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// System message, before everything that is said
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Set a variable of the chat template, as k=v; true, false, null and numbers are these, all else text
    #[arg(long, value_name = "K=V", value_parser = template_arg)]
    pub template_arg: Vec<(String, String)>,
    /// Let the model think first, or not, where its chat template has a switch for it
    #[arg(long, value_enum, value_name = "on|off")]
    pub think: Option<ThinkArg>,
    /// Converse with a pipe: each line of stdin is a turn
    #[arg(long, conflicts_with_all = ["prompt", "tokens", "perplexity", "bench", "compare", "dump_logits"])]
    pub turns: bool,
    /// Keep the conversation in a file, and go on with it if it is there
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "perplexity", "bench", "compare"])]
    pub session: Option<PathBuf>,
    /// Temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.8)]
    pub temp: f32,
    /// Choose among the K likeliest tokens; 0: all
    #[arg(long, default_value_t = 40)]
    pub top_k: u32,
    /// Choose among the likeliest tokens that together have this probability
    #[arg(long, default_value_t = 0.95)]
    pub top_p: f32,
    /// Leave out tokens below this share of the likeliest one's probability
    #[arg(long, default_value_t = 0.05)]
    pub min_p: f32,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Guess up to N tokens ahead where the text repeats itself, and run them together; the output stays the same
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=64), conflicts_with_all = ["perplexity", "bench"])]
    pub lookup: u32,
    /// Where hot experts are computed
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceArg,
    /// The device that is here, a built-in name or a JSON file: a pack for another is refused
    #[arg(long, value_name = "NAME|FILE", value_parser = ProfileParser)]
    pub profile: Option<String>,
    /// Rows of a prompt that are computed together
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,
    /// Everything on the CPU from source rows
    #[arg(long, conflicts_with = "device")]
    pub reference: bool,
    /// Run the partition and the reference, and say how far they differ
    #[arg(long, conflicts_with = "reference")]
    pub compare: bool,
    /// Exit with 2 when anything falls back to the CPU
    #[arg(long)]
    pub strict: bool,
    /// What to check before running; default: header, index and the chunks that are loaded
    #[arg(long, value_enum)]
    pub verify: Option<VerifyArg>,
    /// How files are read
    #[arg(long, value_enum, default_value = "map")]
    pub io: IoArg,
    /// Read every weight once before the first token
    #[arg(long)]
    pub prefault: bool,
    /// Write the logits after the last prompt token, raw little-endian f32
    #[arg(long, value_name = "FILE")]
    pub dump_logits: Option<PathBuf>,
    /// Perplexity of a text: windows of 512 tokens, tokens 257 to 511 scored
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "tokens"])]
    pub perplexity: Option<PathBuf>,
    /// Arithmetic of source rows
    #[arg(long, value_enum, default_value = "fast")]
    pub kernel: KernelArg,
    /// Measure speed: --pp prompt tokens and --tg generated ones, --reps times
    #[arg(long, conflicts_with_all = ["prompt", "tokens", "perplexity", "compare"])]
    pub bench: bool,
    /// Prompt tokens of --bench
    #[arg(long, default_value_t = 512, requires = "bench")]
    pub pp: u32,
    /// Generated tokens of --bench
    #[arg(long, default_value_t = 64, requires = "bench")]
    pub tg: u32,
    /// Repetitions of --bench
    #[arg(long, default_value_t = 5, requires = "bench", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub reps: u32,
    #[command(flatten)]
    pub common: Common,
}
