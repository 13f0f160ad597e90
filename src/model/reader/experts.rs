//! Feed-forward networks: routed experts, shared ones and dense.

use super::{Reader, Sizes, in_layer};
use crate::executor::{Activation, ExpertBank, ExpertBiases, Weight};
use crate::model::ModelError;
use crate::model::parts::{Dense, Groups, Routed, RoutingRule, Shared};
use crate::tensor::TensorInfo;
use crate::units::LayerId;

impl Reader<'_> {
    /// Groups of experts, where there is more than one.
    pub fn expert_groups(&self, sizes: &Sizes) -> Result<Option<Groups>, ModelError> {
        let &Sizes { n_expert, n_used, .. } = sizes;
        let (count, used) = ("expert_group_count", "expert_group_used_count");
        let n = self.count_or_zero(count)?;
        if n <= 1 {
            return Ok(None);
        }
        if !n_expert.is_multiple_of(n) {
            return Err(self.setting(count, n, format!("a divisor of {n_expert}")));
        }
        // So many groups hold the experts that a token needs.
        let least = n_used.div_ceil(n_expert / n);
        match self.count(used)? {
            found if (least..=n).contains(&found) => Ok(Some(Groups { n, n_used: found })),
            found => Err(self.setting(used, found, format!("{least} to {n}"))),
        }
    }

    /// Whether a layer has experts: a router, or experts that lack one.
    pub fn has_experts(&self, at: LayerId) -> bool {
        ["ffn_gate_inp", "ffn_down_exps", "ffn_down.0"].iter().any(|part| self.has(&in_layer(at, part)))
    }

    /// The router and the experts of a layer.
    pub fn routed(
        &mut self,
        at: LayerId,
        sizes: &Sizes,
        n_ff: usize,
        rule: RoutingRule,
    ) -> Result<Routed, ModelError> {
        let &Sizes { n_embd, n_expert, .. } = sizes;
        self.bank(at, n_embd, n_ff, n_expert)?;
        let router = self.exact_matrix(&in_layer(at, "ffn_gate_inp"), n_embd, n_expert)?;
        Ok(Routed { router, n_expert, rule, shared: None })
    }

    /// What the experts of a layer, read before, do between their projections.
    pub fn set_activation(&mut self, at: LayerId, activation: Activation) {
        if let Some(bank) = self.weights.bank_mut(at) {
            bank.activation = activation;
        }
    }

    /// `ffn_{gate,up,down}_exps.bias` of a layer whose experts are read; gate and up may be fused, gate first.
    pub fn read_expert_biases(&mut self, at: LayerId, sizes: &Sizes, n_ff: usize) -> Result<(), ModelError> {
        let &Sizes { n_embd, n_expert, .. } = sizes;
        let name = |projection: &str| format!("blk.{at}.ffn_{projection}_exps.bias");
        let is_fused = self.source.find(&name("gate_up")).is_some();
        let mut stack =
            |projection: &str, n_out: usize| self.f32_values(&name(projection), &[n_out, n_expert]);
        let (gate, up) = if is_fused {
            let fused = stack("gate_up", 2 * n_ff)?;
            let half = |first: usize| fused.chunks_exact(n_ff).skip(first).step_by(2).flatten().copied();
            (half(0).collect(), half(1).collect())
        } else {
            (stack("gate", n_ff)?, stack("up", n_ff)?)
        };
        let biases = ExpertBiases { gate, up, down: stack("down", n_embd)? };
        if let Some(bank) = self.weights.bank_mut(at) {
            bank.biases = Some(biases);
        }
        Ok(())
    }

    /// The matrices of a layer's experts, in any of the three ways that files store them.
    pub(super) fn bank(
        &mut self,
        at: LayerId,
        n_embd: usize,
        n_ff: usize,
        n_expert: usize,
    ) -> Result<(), ModelError> {
        if n_expert == 0 {
            return Err(self.setting(
                "expert_count",
                0,
                format!("the experts of layer {at}, which has some"),
            ));
        }
        let fused = in_layer(at, "ffn_gate_up_exps");
        let [gate, up] = if self.has(&fused) {
            self.gate_and_up(&fused, n_embd, n_ff, n_expert)?
        } else {
            let mut matrices = |name| self.projection(at, name, n_embd, n_ff, n_expert);
            [matrices("gate")?, matrices("up")?]
        };
        let down = self.projection(at, "down", n_ff, n_embd, n_expert)?;
        self.weights.set_bank(at, ExpertBank::new(gate, up, down));
        Ok(())
    }

    /// The dense FFN whose tensors are named `ffn_<projection><suffix>`.
    pub fn dense(
        &mut self,
        at: LayerId,
        suffix: &str,
        n_embd: usize,
        n_ff: usize,
    ) -> Result<Dense, ModelError> {
        let name = |projection: &str| in_layer(at, &format!("ffn_{projection}{suffix}"));
        Ok(Dense {
            gate: self.matrix(&name("gate"), n_embd, n_ff)?,
            up: self.matrix(&name("up"), n_embd, n_ff)?,
            down: self.matrix(&name("down"), n_ff, n_embd)?,
            n_ff,
        })
    }

    /// The shared expert with a gate of its own.
    pub fn gated_shared(&mut self, at: LayerId, n_embd: usize, n_ff: usize) -> Result<Shared, ModelError> {
        let gate = self.exact_matrix(&in_layer(at, "ffn_gate_inp_shexp"), n_embd, 1)?;
        Ok(Shared { ffn: self.dense(at, "_shexp", n_embd, n_ff)?, gate: Some(gate) })
    }

    /// One projection of every expert: from a stacked tensor or, as the first Mixtral files have it, one each.
    fn projection(
        &mut self,
        at: LayerId,
        projection: &str,
        n_in: usize,
        n_out: usize,
        n_expert: usize,
    ) -> Result<Vec<Weight>, ModelError> {
        let stacked = in_layer(at, &format!("ffn_{projection}_exps"));
        let of_expert = |expert: usize| in_layer(at, &format!("ffn_{projection}.{expert}"));
        if self.has(&stacked) || !(0..n_expert).any(|expert| self.has(&of_expert(expert))) {
            return self.stack(&stacked, n_in, n_out, n_expert);
        }
        let mut matrices = Vec::new();
        for expert in 0..n_expert {
            let tensor = self.tensor(&of_expert(expert), &[n_in, n_out])?;
            matrices.push(Weight { place: tensor.place, dtype: tensor.dtype, n_in, n_out });
        }
        Ok(matrices)
    }

    /// Gate and up from one tensor `{n_embd, 2 · n_ff, n_expert}`: of each expert first gate, then up.
    fn gate_and_up(
        &mut self,
        name: &str,
        n_embd: usize,
        n_ff: usize,
        n_expert: usize,
    ) -> Result<[Vec<Weight>; 2], ModelError> {
        let tensor = self.tensor(name, &[n_embd, 2 * n_ff, n_expert])?;
        let halves = cut(tensor, n_embd, n_ff, 2 * n_expert)?;
        let half = |first: usize| halves.iter().skip(first).step_by(2).copied().collect();
        Ok([half(0), half(1)])
    }

    /// The matrices of a stacked tensor, one after the other.
    pub(super) fn stack(
        &mut self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n: usize,
    ) -> Result<Vec<Weight>, ModelError> {
        cut(self.tensor(name, &[n_in, n_out, n])?, n_in, n_out, n)
    }
}

/// `n` matrices of equal shape, which together are the tensor.
fn cut(tensor: &TensorInfo, n_in: usize, n_out: usize, n: usize) -> Result<Vec<Weight>, ModelError> {
    let len = tensor.place.len / n as u64;
    (0..n as u64)
        .map(|at| {
            // The parts of a place end where it ends.
            let place = tensor.place.part(at * len, len)?;
            Some(Weight { place, dtype: tensor.dtype, n_in, n_out })
        })
        .collect::<Option<_>>()
        .ok_or_else(|| ModelError::MissingTensor(tensor.name.clone()))
}
