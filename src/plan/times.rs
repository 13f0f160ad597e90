//! Where each layer's predicted time goes: the CPU alone, both sides, the NPU alone, starting.

use serde::Serialize;

use super::cost::{Parts, Phase};
use super::document::{Plan, tidy};
use super::layer::Curves;
use super::state::State;
use super::{PROMPT_TOKENS, Planner};

/// Gives a layer's curves by a measure of its phases.
type ByMeasure<'a> = &'a dyn Fn(&dyn Fn(&Phase) -> f64) -> Curves;

/// Predicted seconds of one layer's experts, as planned.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerTime {
    /// The layer.
    pub layer: u32,
    /// One token.
    pub decode: Parts,
    /// A prompt of 512 tokens.
    pub prefill: Parts,
}

impl Planner<'_> {
    /// The time of every layer of a plan that this planner made, in the likely case.
    pub fn layer_times(&self, plan: &Plan) -> Vec<LayerTime> {
        let likely = &self.cases[1];
        let time = |(i, layer): (usize, &super::LayerPlan)| {
            let model = &likely.models[i];
            let parts = |regime: usize, curves: ByMeasure<'_>| {
                let hot = State::of_plan(layer, model, plan.cuts[regime].layers[i] as usize);
                let part = |of: fn(&Parts) -> f64| {
                    tidy(curves(&|phase| of(&likely.rates.phase_parts(phase))).of(hot))
                };
                Parts {
                    cpu: part(|p| p.cpu),
                    both: part(|p| p.both),
                    npu: part(|p| p.npu),
                    start: part(|p| p.start),
                }
            };
            LayerTime {
                layer: layer.layer,
                decode: parts(0, &|measure| model.decode_by(&likely.rates, measure)),
                prefill: parts(1, &|measure| model.batch_by(&likely.rates, PROMPT_TOKENS, measure)),
            }
        };
        plan.layers.iter().enumerate().map(time).collect()
    }
}
