//! The other order: many sequences through one layer before any goes through the next.
//!
//! A model that is larger than memory is then read once for all of them, a layer at a time, where running one sequence
//! after the other reads it once for each. Every sequence starts from nothing and no logits come out: the order is
//! for whoever watches the executor. What the executor is asked for is to the bit what [`forward`](super::forward) asks.

use super::memory::{CacheType, Memory};
use super::{ForwardError, Pass, check_tokens, embed};
use crate::executor::Executor;
use crate::model::Model;
use crate::units::LayerId;

/// Sequences on their way through the layers, each from an empty state.
pub struct Group<'a> {
    model: &'a Model,
    /// The residual stream of each sequence, `[m, n_embd]`.
    streams: Vec<Vec<f32>>,
}

impl<'a> Group<'a> {
    /// Embeds the sequences.
    ///
    /// # Errors
    ///
    /// [`ForwardError`] for a sequence without tokens, one with a token that is none, or an embedding that cannot be read.
    pub fn new(
        model: &'a Model,
        executor: &mut dyn Executor,
        sequences: &[&[u32]],
    ) -> Result<Group<'a>, ForwardError> {
        executor.ahead(LayerId(0));
        let stream = |tokens: &&[u32]| {
            check_tokens(model, tokens)?;
            embed(model, executor, tokens)
        };
        let streams = sequences.iter().map(stream).collect::<Result<_, _>>()?;
        Ok(Group { model, streams })
    }

    /// Sends one sequence through one layer. Every sequence has to go through layer 0, 1, … in this order; the caller
    /// sees to it, and sends all through one layer before it begins with the next.
    ///
    /// # Errors
    ///
    /// [`ForwardError`], also for a layer or sequence that is not there; the sequence is then of no more use.
    pub fn layer(
        &mut self,
        executor: &mut dyn Executor,
        index: usize,
        sequence: usize,
    ) -> Result<(), ForwardError> {
        let (Some(layer), Some(stream)) = (self.model.layers.get(index), self.streams.get_mut(sequence))
        else {
            return Err(ForwardError::OtherModel);
        };
        if sequence == 0 && index + 1 < self.model.layers.len() {
            executor.ahead(LayerId(index as u32 + 1));
        }
        let mut pass = Pass::new(self.model, executor, 0, std::mem::take(stream));
        pass.layer(LayerId(index as u32), layer, &mut Memory::new(&layer.mixer, CacheType::F32))?;
        *stream = pass.x;
        Ok(())
    }
}
