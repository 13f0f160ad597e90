//! Qwen3.5-MoE: gated delta nets whose value heads go with the key heads in turn, gated attention in every fourth
//! layer, an expert that every token goes to.

use crate::model::parts::KeyHeads;
use crate::model::reader::{Head, OUTPUT_NORM, Reader};
use crate::model::{Model, ModelError};

pub(super) fn describe(mut file: Reader<'_>) -> Result<Model, ModelError> {
    let mut sizes = file.sizes()?;
    // Which pairs turn by which of an image's positions: of text, all positions are one.
    file.rope_sections()?;
    file.skip_next_token_blocks(&mut sizes)?;
    let nets = file.nets(&sizes, KeyHeads::InTurn)?;
    let layers = file.layers(&sizes, |file, at, sizes| file.net_layer(at, sizes, &nets))?;
    file.finish(&sizes, layers, OUTPUT_NORM, Head::TiedIfAbsent)
}
