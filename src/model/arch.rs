//! The families: one file each, one line each in the registry.

mod deepseek2;
mod gpt_oss;
mod granitemoe;
mod lfm2moe;
mod llama;
mod olmoe;
mod qwen2moe;
mod qwen35moe;
mod qwen3moe;
mod qwen3next;

use super::reader::Reader;
use super::{Model, ModelError};

/// A family of models.
pub(super) struct Family {
    /// Its `general.architecture`.
    pub name: &'static str,
    /// Builds its description.
    pub describe: fn(Reader<'_>) -> Result<Model, ModelError>,
}

const FAMILIES: &[Family] = &[
    Family { name: "deepseek2", describe: deepseek2::describe },
    Family { name: "gpt-oss", describe: gpt_oss::describe },
    Family { name: "granitemoe", describe: granitemoe::describe },
    Family { name: "lfm2moe", describe: lfm2moe::describe },
    Family { name: "llama", describe: llama::describe },
    Family { name: "olmoe", describe: olmoe::describe },
    Family { name: "qwen2moe", describe: qwen2moe::describe },
    Family { name: "qwen35moe", describe: qwen35moe::describe },
    Family { name: "qwen3moe", describe: qwen3moe::describe },
    Family { name: "qwen3next", describe: qwen3next::describe },
];

/// The family with this name.
pub(super) fn find(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

/// All names, for messages.
pub(super) fn names() -> String {
    FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", ")
}
