//! What is known of the routing: counted, or assumed within a range.

use crate::calibrate::{LayerCounts, Statistics};
use crate::model::{ModelShape, MoeLayerShape};
use crate::units::{ExpertId, LayerId};

/// Where the shares of calls come from.
#[derive(Clone, Copy, Debug)]
pub enum Routing<'a> {
    /// Counted.
    Measured(&'a Statistics),
    /// Nothing was counted: a skew within a range. Which experts are hot is then unknown, only how many calls the
    /// hottest would serve; such a plan answers a question and cannot be packed.
    Assumed(Skew),
}

/// How uneven routing is assumed to be: shares fall off as `exp(-rate · rank / n_expert)`, 0 is even.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// Least skew.
    pub low: f64,
    /// The skew to plan with.
    pub value: f64,
    /// Most skew.
    pub high: f64,
}

impl Skew {
    /// From even routing to that of published counts: 90 % of the calls in 51 % of the experts (Qwen3-30B-A3B, mixed
    /// text), and half of that rate between. Source: docs/planning.md. Confidence: estimated.
    pub const RANGE: Skew = Skew { low: 0.0, value: 2.2, high: 4.4 };
}

/// One layer's routing.
#[derive(Clone, Debug)]
pub(super) struct LayerRouting<'a> {
    /// `[n_expert]`: shares of calls to plan with, none zero, adding up to 1.
    pub shares: Vec<f64>,
    /// The counts they come from.
    pub counts: Option<&'a LayerCounts>,
}

/// Which skew of an assumed range is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SkewEnd {
    Low,
    Value,
    High,
}

impl<'a> Routing<'a> {
    /// The routing of each layer with experts.
    pub(super) fn layers(&self, shape: &ModelShape, end: SkewEnd) -> Vec<LayerRouting<'a>> {
        shape.moe_layers.iter().map(|layer| self.layer(layer, end)).collect()
    }

    fn layer(&self, shape: &MoeLayerShape, end: SkewEnd) -> LayerRouting<'a> {
        let n_expert = shape.n_expert();
        match *self {
            Routing::Measured(statistics) => {
                let share = |e| statistics.share(shape.layer, ExpertId(e as u32)).unwrap_or(0.0);
                let counts = statistics.calibration.layer(LayerId(shape.layer.0));
                LayerRouting { shares: (0..n_expert).map(share).collect(), counts }
            }
            Routing::Assumed(skew) => {
                let rate = match end {
                    _ if shape.uses_all() => 0.0,
                    SkewEnd::Low => skew.low,
                    SkewEnd::Value => skew.value,
                    SkewEnd::High => skew.high,
                };
                let raw: Vec<f64> =
                    (0..n_expert).map(|e| (-rate * e as f64 / n_expert as f64).exp()).collect();
                let sum: f64 = raw.iter().sum();
                LayerRouting { shares: raw.iter().map(|share| share / sum).collect(), counts: None }
            }
        }
    }
}
