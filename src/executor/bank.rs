//! The experts of a layer: their matrices, and what happens between and after these.

use std::ops::Range;

use super::Weight;
use crate::kernel::exp;
use crate::tensor::Projection;
use crate::units::ExpertId;

/// The experts of one layer. Every list is `n_expert` long; types may differ from expert to expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertBank {
    /// Gate projections, each `[n_ff, n_embd]`.
    pub gate: Vec<Weight>,
    /// Up projections, each `[n_ff, n_embd]`.
    pub up: Vec<Weight>,
    /// Down projections, each `[n_embd, n_ff]`.
    pub down: Vec<Weight>,
    /// What becomes of gate and up.
    pub activation: Activation,
    /// What is added to the outputs of the projections.
    pub biases: Option<ExpertBiases>,
}

/// How the outputs of gate and up become the inputs of down.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `silu(gate) · up`.
    #[default]
    SwiGlu,
    /// `g · σ(slope · g) · (u + 1)` with `g = min(gate, limit)` and `u` within `± limit`.
    ClampedSwiGlu {
        /// How steep the sigmoid is.
        slope: f32,
        /// Where gate and up are cut off.
        limit: f32,
    },
}

/// What is added to each projection's outputs, expert by expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertBiases {
    /// `[n_expert, n_ff]`.
    pub gate: Vec<f32>,
    /// `[n_expert, n_ff]`.
    pub up: Vec<f32>,
    /// `[n_expert, n_embd]`, added before the expert's weight is applied.
    pub down: Vec<f32>,
}

impl ExpertBank {
    /// Experts without biases, `silu(gate) · up` between their projections.
    pub fn new(gate: Vec<Weight>, up: Vec<Weight>, down: Vec<Weight>) -> ExpertBank {
        ExpertBank { gate, up, down, activation: Activation::SwiGlu, biases: None }
    }

    /// Number of experts.
    pub fn n_expert(&self) -> usize {
        self.gate.len()
    }

    /// One matrix of one expert; `None` for an expert that is not there.
    pub fn weight(&self, expert: ExpertId, projection: Projection) -> Option<&Weight> {
        let list = match projection {
            Projection::Gate => &self.gate,
            Projection::Up => &self.up,
            Projection::Down => &self.down,
        };
        list.get(expert.index())
    }

    /// Turns the outputs `cols` of the gate projection, `gate`, and those of up into the inputs of down, in `gate`.
    ///
    /// Biases are added here: the projections' outputs come as the matrices gave them.
    #[inline(always)]
    pub fn activate(&self, expert: ExpertId, cols: Range<usize>, gate: &mut [f32], up: &[f32]) {
        match &self.biases {
            None => self.activation.apply(gate.iter_mut().zip(up.iter().copied())),
            Some(biases) => {
                let n_ff = biases.gate.len() / self.n_expert();
                let gate_bias = row(&biases.gate, expert, n_ff, cols.clone());
                let up_bias = row(&biases.up, expert, n_ff, cols);
                gate.iter_mut().zip(gate_bias).for_each(|(gate, bias)| *gate += bias);
                self.activation
                    .apply(gate.iter_mut().zip(up.iter().zip(up_bias).map(|(up, bias)| up + bias)));
            }
        }
    }

    /// Adds the expert's bias to the outputs `cols` of its down projection.
    pub fn finish_down(&self, expert: ExpertId, cols: Range<usize>, out: &mut [f32]) {
        let Some(biases) = &self.biases else { return };
        let n_embd = biases.down.len() / self.n_expert();
        let bias = row(&biases.down, expert, n_embd, cols);
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}

/// Columns of an expert's row in `[n_expert, width]`.
fn row(list: &[f32], expert: ExpertId, width: usize, cols: Range<usize>) -> &[f32] {
    &list[expert.index() * width..][cols]
}

impl Activation {
    #[inline(always)]
    fn apply<'a>(self, pairs: impl Iterator<Item = (&'a mut f32, f32)>) {
        match self {
            Activation::SwiGlu => {
                for (gate, up) in pairs {
                    *gate = silu(*gate) * up;
                }
            }
            Activation::ClampedSwiGlu { slope, limit } => {
                for (gate, up) in pairs {
                    let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
                    *gate = g / (1.0 + exp(-slope * g)) * (u + 1.0);
                }
            }
        }
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}
