//! Small models and packs in a folder of their own, made by the library as a user would.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{self, Cut};
use orkpack::convert::{
    Choice, Outcome, Prepared, Request, StatisticsFrom, Subject, Texts, beside, count, prepare,
};
use orkpack::error::Error;
use orkpack::gguf::GgufFile;
use orkpack::model::Outline;
use orkpack::pack::Existing;
use orkpack::plan::Objective;
use orkpack::profile::DeviceProfile;
use orkpack::progress::Silent;
use orkpack::runtime::{DeviceChoice, Options, Runtime};
use orkpack::tensor::TensorSource;
use orkpack::tokenizer::Tokenizer;
use orkpack::units::Bytes;

/// A folder that goes when the test ends.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Puts a model of these bytes into a folder.
pub fn model_in(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A copy of a bundled model, and beside it its routing over the four kinds of text that it was trained for: the built-in
/// mixture is long, and means little to it.
pub fn bundled_in(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::copy(super::fixture("models").join(name), &path).unwrap();
    std::fs::write(beside(&path), bundled_statistics(name)).unwrap();
    path
}

/// The routing of a bundled model over a short text of each kind, counted once.
fn bundled_statistics(name: &str) -> &'static [u8] {
    static COUNTED: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
    COUNTED[usize::from(name.contains("q8_0"))].get_or_init(|| {
        let path = super::fixture("models").join(name);
        let source = orkpack::source::open(&path, Io::Map, &Limits::default()).unwrap().source();
        let outline = Outline::of_runnable(source.as_ref()).unwrap();
        let subject = Subject { path: &path, source: &source, outline: &outline, pack: None };
        count(subject, Texts::Files(&four_texts()), 2, &mut Silent).unwrap().to_json().unwrap()
    })
}

pub fn profile() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Most-called experts in this budget.
pub fn hits(budget: u64) -> Choice {
    Choice {
        profile: profile(),
        budget: Some(Bytes(budget)),
        domains: 1,
        objective: Objective::Hits,
        shares: orkpack::plan::Shares::Auto,
        force_hot: Vec::new(),
        statistics: StatisticsFrom::Found,
        ram: None,
        accept_foreign: false,
    }
}

/// Converting `model` to `<model>.orkpack`. Statistics that would be counted over the built-in mixture are counted over the
/// four short texts: converting is tested in many places, and the mixture is long.
pub fn request(model: &Path, mut choice: Choice) -> Request {
    if matches!(choice.statistics, StatisticsFrom::Found) && !beside(model).exists() && reads_text(model) {
        choice.statistics = StatisticsFrom::Prompts(four_texts());
    }
    Request {
        model: model.to_owned(),
        output: model.with_extension("orkpack"),
        existing: Existing::Keep,
        choice,
        plan: None,
        thin: false,
        allow_nonfinite: false,
        n_threads: 2,
        keep_statistics: true,
    }
}

/// A short text of each kind that the bundled models were trained for.
fn four_texts() -> Vec<PathBuf> {
    let kinds = ["prose", "spanish", "arithmetic", "code"];
    kinds.map(|kind| super::fixture(&format!("corpora/{kind}.txt"))).to_vec()
}

/// Whether the file is a GGUF whose tokenizer is known.
fn reads_text(model: &Path) -> bool {
    let file = GgufFile::open(model, Io::Map, &Limits::default());
    file.is_ok_and(|file| Tokenizer::from_metadata(file.metadata()).is_ok())
}

/// Tokens that every small model has, for counts that only have to be there.
pub const TOKENS: [u32; 70] = {
    let (mut tokens, mut i) = ([0; 70], 0);
    while i < tokens.len() {
        tokens[i] = (i * 7 % 64) as u32;
        i += 1;
    }
    tokens
};

/// Counts routing over a few tokens and leaves it beside the model, so that converting need not read the built-in text.
pub fn calibrate_beside(model: &Path, tokens: &[u32]) {
    let options = Options { threads: Some(1), ..Options::default() };
    let runtime = Runtime::open(model, options).unwrap();
    let mut engine = runtime.reference().unwrap();
    let cut = Cut { window: 16, ..Cut::default() };
    let texts = [tokens.to_vec()];
    let counts =
        calibrate::run(
            runtime.model(),
            engine.executor(),
            &texts,
            cut,
            &mut |_, _| ControlFlow::Continue(()),
        );
    let fingerprint = runtime.model().fingerprint(runtime.source()).unwrap();
    let architecture = runtime.model().architecture();
    let statistics = counts.unwrap().into_statistics(fingerprint, architecture, "fast").unwrap();
    std::fs::write(model.with_extension("routing.json"), statistics.to_json().unwrap()).unwrap();
}

pub fn convert(request: Request) -> Result<(Prepared, Outcome), Error> {
    let prepared = prepare(request, &mut Silent)?;
    let outcome = prepared.write(&mut Silent)?;
    Ok((prepared, outcome))
}

/// A runtime over `path` with its hot experts on `device`.
pub fn runtime(path: &Path, device: DeviceChoice, threads: usize) -> Runtime {
    let options = Options { device, threads: Some(threads), ..Options::default() };
    Runtime::open(path, options).unwrap()
}
