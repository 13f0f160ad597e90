//! Keys of the metadata, each with the range that it may have.

use super::{MAX_SIZE, Reader, Sizes};
use crate::model::ModelError;
use crate::model::parts::Gating;
use crate::tensor::{Metadata, MetadataError, Value};

/// More experts than any router ranks in time; a number beyond it is a broken file.
const MAX_EXPERTS: usize = 1 << 16;

impl<'a> Reader<'a> {
    pub(super) fn metadata(&self) -> &'a Metadata {
        self.source.metadata()
    }

    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub(super) fn setting(&self, key: &str, found: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::Setting { key: self.key(key), found: found.to_string(), expected: expected.to_string() }
    }

    /// A size that must be there, from 1 to [`MAX_SIZE`].
    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)).into())
    }

    /// A size that may be missing.
    pub fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(found) = self.number(key)? else { return Ok(None) };
        match usize::try_from(found) {
            Ok(count) if (1..=MAX_SIZE).contains(&count) => Ok(Some(count)),
            _ => Err(self.setting(key, found, format!("1 to {MAX_SIZE}"))),
        }
    }

    /// A size that may be 0, which is also what a missing one means.
    pub fn count_or_zero(&self, key: &str) -> Result<usize, ModelError> {
        match self.number(key)? {
            None | Some(0) => Ok(0),
            Some(_) => self.count(key),
        }
    }

    /// A number that may be missing. Of a list, which has one for each layer, that of the layer that is being read; of
    /// the whole model the largest.
    fn number(&self, key: &str) -> Result<Option<u64>, ModelError> {
        let Some(each) = self.list(key) else {
            return Ok(self.metadata().optional_u32(&self.key(key))?.map(u64::from));
        };
        let expected = || "as many numbers as there are layers";
        let n_block = self.metadata().optional_u32(&self.key("block_count"))?;
        if n_block.is_none_or(|n_block| each.len() as u64 != u64::from(n_block)) {
            return Err(self.setting(key, format!("{} values", each.len()), expected()));
        }
        let found = match self.layer {
            Some(at) => each.get(at).and_then(Value::as_u64),
            None => each.iter().map(Value::as_u64).max().flatten(),
        };
        found.map(Some).ok_or_else(|| self.setting(key, "other values", expected()))
    }

    fn list(&self, key: &str) -> Option<&'a [Value]> {
        match self.metadata().get(&self.key(key)) {
            Some(Value::Array(each)) => Some(each),
            _ => None,
        }
    }

    /// A factor, where GGUF may write none as 0 or leave the key out.
    pub fn factor(&self, key: &str) -> Result<f32, ModelError> {
        Ok(self.optional_f32(key)?.filter(|factor| *factor != 0.0).unwrap_or(1.0))
    }

    /// A yes or no that may be missing.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata().optional_bool(&self.key(key))?)
    }

    pub(super) fn optional_f32(&self, key: &str) -> Result<Option<f32>, ModelError> {
        Ok(self.metadata().optional_f32(&self.key(key))?)
    }

    /// The factor of all expert weights, for which files may write none as 0, too.
    pub fn expert_weights_scale(&self) -> Result<Option<f32>, ModelError> {
        Ok(self.optional_f32("expert_weights_scale")?.filter(|scale| *scale != 0.0 && *scale != 1.0))
    }

    /// The function that turns router logits into scores, where it is stated.
    pub fn gating(&self) -> Result<Option<Gating>, ModelError> {
        let key = "expert_gating_func";
        match self.metadata().optional_u32(&self.key(key))? {
            None | Some(0) => Ok(None),
            Some(1) => Ok(Some(Gating::Softmax)),
            Some(2) => Ok(Some(Gating::Sigmoid)),
            Some(3) => Ok(Some(Gating::SoftmaxOfChosen)),
            Some(other) => {
                Err(self.setting(key, other, "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)"))
            }
        }
    }

    /// The same where it must be stated.
    pub fn required_gating(&self) -> Result<Gating, ModelError> {
        self.gating()?.ok_or_else(|| MetadataError::Missing(self.key("expert_gating_func")).into())
    }

    /// What logits are divided by, which must be there.
    pub fn logit_scale(&self) -> Result<f32, ModelError> {
        let key = "logit_scale";
        let scale = self.optional_f32(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)))?;
        if scale != 0.0 { Ok(scale) } else { Err(self.setting(key, scale, "a number other than 0")) }
    }

    /// What scores are multiplied by: the key, or `1 / √head_dim` where it is missing or 0.
    pub fn attention_scale(&self, head_dim: usize) -> Result<f32, ModelError> {
        let stated = self.optional_f32("attention.scale")?.filter(|scale| *scale != 0.0);
        Ok(stated.unwrap_or(1.0 / (head_dim as f32).sqrt()))
    }

    /// The sizes that every family has, each possible by itself and with the others.
    pub fn sizes(&self) -> Result<Sizes, ModelError> {
        let sizes = self.sizes_but_head_dim()?;
        Ok(Sizes { head_dim: self.head_dim(sizes.n_embd, sizes.n_head)?, ..sizes })
    }

    /// The same with a `head_dim` of 0, for families whose keys and values differ in length.
    pub fn sizes_but_head_dim(&self) -> Result<Sizes, ModelError> {
        let (n_embd, n_head) = (self.count("embedding_length")?, self.count("attention.head_count")?);
        let (n_expert, n_used) = self.expert_counts()?;
        let n_layer = self.count("block_count")?;
        let kv_heads = "attention.head_count_kv";
        let n_head_kv = match self.number(kv_heads)? {
            None => n_head,
            Some(_) => self.count_or_zero(kv_heads)?,
        };
        Ok(Sizes {
            n_layer,
            n_ctx: self.count("context_length")?,
            n_embd,
            n_head,
            n_head_kv,
            head_dim: 0,
            n_expert,
            n_used,
            eps: self.eps()?,
        })
    }

    /// Experts of a layer, and those that a token is sent to.
    pub(super) fn expert_counts(&self) -> Result<(usize, usize), ModelError> {
        // A list has zeros where layers are dense.
        if self.list("expert_count").is_some() && self.count_or_zero("expert_count")? == 0 {
            return Ok((0, 0));
        }
        let (n_expert, n_used) = (self.count("expert_count")?, self.count("expert_used_count")?);
        if n_expert > MAX_EXPERTS {
            return Err(self.setting("expert_count", n_expert, format!("1 to {MAX_EXPERTS}")));
        }
        if n_used > n_expert {
            return Err(self.setting("expert_used_count", n_used, format!("1 to {n_expert}")));
        }
        Ok((n_expert, n_used))
    }

    fn head_dim(&self, n_embd: usize, n_head: usize) -> Result<usize, ModelError> {
        let Some(head_dim) = self.optional_count("attention.key_length")? else {
            let whole = n_embd.is_multiple_of(n_head);
            let expected = || format!("a divisor of {n_embd}, or `{}`", self.key("attention.key_length"));
            return if whole {
                Ok(n_embd / n_head)
            } else {
                Err(self.setting("attention.head_count", n_head, expected()))
            };
        };
        match self.optional_count("attention.value_length")? {
            Some(found) if found != head_dim => {
                Err(self.setting("attention.value_length", found, format!("{head_dim}, as the keys")))
            }
            _ => Ok(head_dim),
        }
    }

    fn eps(&self) -> Result<f32, ModelError> {
        let key = "attention.layer_norm_rms_epsilon";
        let eps = self.optional_f32(key)?.ok_or_else(|| MetadataError::Missing(self.key(key)))?;
        if eps > 0.0 && eps < 1.0 { Ok(eps) } else { Err(self.setting(key, eps, "between 0 and 1")) }
    }
}
