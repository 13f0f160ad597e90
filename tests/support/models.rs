//! Small models and packs in a folder of their own, made by the library as a user would.

use std::path::{Path, PathBuf};

use orkpack::convert::{Choice, Outcome, Prepared, Request, StatisticsFrom, prepare};
use orkpack::error::Error;
use orkpack::pack::Existing;
use orkpack::plan::Objective;
use orkpack::profile::DeviceProfile;
use orkpack::progress::Silent;
use orkpack::runtime::{DeviceChoice, Options, Runtime};
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

/// A copy of a bundled model.
pub fn bundled_in(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::copy(super::fixture("models").join(name), &path).unwrap();
    path
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
        force_hot: Vec::new(),
        statistics: StatisticsFrom::Found,
        ram: None,
        accept_foreign: false,
    }
}

/// Converting `model` to `<model>.orkpack`.
pub fn request(model: &Path, choice: Choice) -> Request {
    Request {
        model: model.to_owned(),
        output: model.with_extension("orkpack"),
        existing: Existing::Keep,
        choice,
        plan: None,
        allow_nonfinite: false,
        n_threads: 2,
        keep_statistics: true,
    }
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
