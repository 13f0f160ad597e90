//! Families that cannot be run: their sizes and experts, from the names that all families share.

use std::collections::{BTreeMap, BTreeSet};

use super::{EMBEDDING, HEAD, MAX_SIZE, Reader, in_layer};
use crate::executor::WeightTable;
use crate::model::shape::{Dense, MatrixShape, ModelShape, moe_layers};
use crate::model::{CacheType, ModelError};
use crate::tensor::TensorInfo;
use crate::units::LayerId;

impl Reader<'_> {
    /// The shape of the model, and a weight table that has its experts alone.
    ///
    /// Every tensor that is no expert counts as read by each token, but of the embedding as such one row.
    pub(in crate::model) fn outline(mut self) -> Result<(ModelShape, WeightTable), ModelError> {
        let n_embd = self.count("embedding_length")?;
        let n_vocab = self.n_vocab()?;
        let n_layer = self.n_layer_run()?;
        let mut n_used = BTreeMap::new();
        for at in (0..n_layer).map(|at| LayerId(at as u32)) {
            self.layer = Some(at.index());
            if self.has_experts(at) {
                let (n_expert, used) = self.expert_counts()?;
                let n_ff = self.expert_width(at)?;
                self.bank(at, n_embd, n_ff, n_expert)?;
                n_used.insert(at, used);
            }
        }
        self.layer = None;
        let dense = self.dense_tensors(n_layer, n_embd, n_vocab);
        for (at, _) in self.weights.banks() {
            let router = in_layer(at, "ffn_gate_inp");
            self.source.find(&router).ok_or(ModelError::MissingTensor(router))?;
        }
        let shape = ModelShape {
            architecture: self.architecture.to_owned(),
            n_layer,
            n_embd,
            n_vocab,
            moe_layers: moe_layers(&self.weights, |at| n_used.get(&at).copied()),
            dense_weights: dense.weights,
            dense_bytes: dense.bytes,
            kv_bytes_per_token: (0..n_layer).map(|at| self.cached_bytes(LayerId(at as u32))).sum(),
            state_bytes: 0,
        };
        Ok((shape, self.weights))
    }

    /// Layers that a run goes through: those at the end that predict further tokens are left out.
    fn n_layer_run(&self) -> Result<usize, ModelError> {
        let (key, stated) = ("block_count", self.count("block_count")?);
        let layers: BTreeSet<u32> = self.source.tensors().iter().filter_map(layer_of).collect();
        if !layers.iter().copied().eq(0..stated as u32) {
            let expected = format!("{}, the layers that have tensors", layers.len());
            return Err(self.setting(key, stated, expected));
        }
        let key = "nextn_predict_layers";
        let further = self.count_or_zero(key)?;
        match stated.checked_sub(further) {
            Some(n_layer @ 1..) => Ok(n_layer),
            _ => Err(self.setting(key, further, format!("fewer than the {stated} layers"))),
        }
    }

    /// Inputs of the down projections of a layer.
    fn expert_width(&self, at: LayerId) -> Result<usize, ModelError> {
        let names = ["ffn_down_exps", "ffn_down.0"].map(|part| in_layer(at, part));
        let down = names.iter().find_map(|name| self.source.find(name));
        let down = down.ok_or_else(|| ModelError::MissingTensor(names[0].clone()))?;
        let width = usize::try_from(down.n_in()).ok().filter(|width| (1..=MAX_SIZE).contains(width));
        width.ok_or_else(|| ModelError::Shape {
            tensor: down.name.clone(),
            found: down.dims.clone(),
            expected: vec![MAX_SIZE as u64],
        })
    }

    /// What a token reads of the tensors that are in no bank.
    fn dense_tensors(&self, n_layer: usize, n_embd: usize, n_vocab: usize) -> Dense {
        let is_dense = |tensor: &&TensorInfo| {
            let runs = layer_of(tensor).is_none_or(|layer| (layer as usize) < n_layer);
            runs && !self.used.contains(tensor.name.as_str()) && !tensor.name.contains("_exps.")
        };
        let mut dense = Dense::default();
        for tensor in self.source.tensors().iter().filter(is_dense) {
            dense.add(tensor.n_elements(), tensor.place.len);
        }
        if let Some(tensor) = self.source.find(EMBEDDING) {
            let (n_in, n_out, bytes) = (n_embd, n_vocab, tensor.place.len);
            let embedding = MatrixShape { n_in, n_out, dtype: tensor.dtype, bytes };
            dense = dense.with_embedding(&embedding, !self.has(HEAD));
        }
        dense
    }

    /// Bytes that a position adds to the cache of a layer: a number for each output of its key and value projections.
    fn cached_bytes(&self, at: LayerId) -> u64 {
        let rows = |part: &str| self.source.find(&in_layer(at, part)).map_or(0, TensorInfo::n_out);
        let inputs = |part: &str| self.source.find(&in_layer(at, part)).map_or(0, TensorInfo::n_in);
        // Where one matrix gives q, k and v, q is as wide as the output's inputs.
        let fused = match inputs("attn_output") {
            0 => 0,
            q => rows("attn_qkv").saturating_sub(q),
        };
        let rows = [rows("attn_k"), rows("attn_v"), rows("attn_kv_a_mqa"), fused];
        rows.iter().fold(0u64, |sum, rows| sum.saturating_add(*rows)).saturating_mul(CacheType::F16.bytes())
    }
}

/// The layer that a tensor belongs to, if to any: 3 of `blk.3.attn_q.weight`.
fn layer_of(tensor: &TensorInfo) -> Option<u32> {
    tensor.name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}
