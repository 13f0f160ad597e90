//! Qwen3-Next: as Qwen3.5-MoE, but for the order of value heads, which go with the key heads in runs, and for
//! matrices that lie together.

use crate::model::parts::KeyHeads;
use crate::model::reader::{Head, OUTPUT_NORM, Reader};
use crate::model::{Model, ModelError};

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let mut sizes = file.sizes()?;
    file.skip_next_token_blocks(&mut sizes)?;
    let nets = file.nets(&sizes, KeyHeads::InRuns)?;
    let layers = file.layers(&sizes, |file, at, sizes| file.net_layer(at, sizes, &nets))?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}
