//! The error of a whole command: which file, what went wrong there, what to do, and the exit code.
//!
//! Each stage has an enum of its own; here it meets the file's name.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::blocks::{BlockError, NotFinite};
use crate::calibrate::{CalibrateError, ImatrixError, MergeError, StatisticsError};
use crate::chat::ChatError;
use crate::device::DeviceError;
use crate::executor::ExecutorError;
use crate::gguf::GgufError;
use crate::model::evaluate::EvaluateError;
use crate::model::{ForwardError, ModelError};
use crate::pack::PackError;
use crate::plan::PlanError;
use crate::profile::ProfileError;
use crate::quantize::QuantizeError;
use crate::sample::SampleError;
use crate::source::OpenError;
use crate::tensor::SourceError;
use crate::tile::TileError;
use crate::tokenizer::TokenizerError;

macro_rules! failures {
    ($($variant:ident($error:ty),)*) => {
        /// What went wrong, whichever stage says so.
        #[derive(Debug, thiserror::Error)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum Failure {
            $(#[error(transparent)] $variant(#[from] $error),)*
            /// An expert's matrix could not be quantised.
            #[error("{matrix}: {error}")]
            Quantize { matrix: String, error: QuantizeError },
            /// Weights or scales are NaN or infinite.
            #[error("{0}")]
            NotFinite(NotFinite),
            /// Arguments that make no sense together, or files that are not what they were taken for.
            #[error("{0}")]
            Usage(String),
            /// Somebody pressed Ctrl-C.
            #[error("interrupted")]
            Interrupted,
        }

        $(impl From<$error> for Error {
            fn from(error: $error) -> Error {
                Failure::from(error).into()
            }
        })*
    };
}

failures! {
    Block(BlockError),
    Calibrate(CalibrateError),
    Chat(ChatError),
    Device(DeviceError),
    Evaluate(EvaluateError),
    Executor(ExecutorError),
    Forward(ForwardError),
    Gguf(GgufError),
    Imatrix(ImatrixError),
    Io(io::Error),
    Json(serde_json::Error),
    Merge(MergeError),
    Model(ModelError),
    Open(OpenError),
    Pack(PackError),
    Plan(PlanError),
    Profile(ProfileError),
    Sample(SampleError),
    Source(SourceError),
    Statistics(StatisticsError),
    Tile(TileError),
    Tokenizer(TokenizerError),
}

/// A failure with the file it is about.
#[derive(Debug)]
pub struct Error {
    /// The file, where there is one.
    pub file: Option<PathBuf>,
    /// What went wrong.
    pub failure: Box<Failure>,
}

impl Error {
    /// Arguments that make no sense together.
    pub fn usage(message: impl Into<String>) -> Error {
        Failure::Usage(message.into()).into()
    }

    /// The same error, about `file` where it named none.
    pub fn or_at(self, file: &Path) -> Error {
        Error { file: self.file.or_else(|| Some(file.to_owned())), ..self }
    }

    /// The exit code: 1 the check says no, 2 could not do it, 130 interrupted.
    pub fn exit_code(&self) -> u8 {
        match self.failure.as_ref() {
            Failure::Plan(PlanError::OverWindow { .. }) => 1,
            Failure::Interrupted => 130,
            _ => 2,
        }
    }

    /// What to do about it, where there is something.
    pub fn hint(&self) -> Option<&str> {
        match self.failure.as_ref() {
            Failure::Chat(error) => error.hint(),
            Failure::Gguf(error) => error.hint(),
            Failure::Pack(error) => error.hint(),
            Failure::Open(error) => error.hint(),
            Failure::NotFinite(_) => Some(
                "the file is damaged or was badly quantised: get it again, or let --allow-nonfinite make zeros of them \
                 in the NPU's copies",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{}: {}", file.display(), self.failure),
            None => self.failure.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.failure)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error { file: None, failure: Box::new(failure) }
    }
}

/// Names the file that a stage's error is about.
pub trait AtFile<T> {
    /// The same result, its error with the file's name.
    ///
    /// # Errors
    ///
    /// The error it came with.
    fn at(self, file: &Path) -> Result<T, Error>;
}

impl<T, F: Into<Failure>> AtFile<T> for Result<T, F> {
    fn at(self, file: &Path) -> Result<T, Error> {
        self.map_err(|failure| Error { file: Some(file.to_owned()), failure: Box::new(failure.into()) })
    }
}
