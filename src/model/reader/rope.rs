//! How fast each pair of a head turns: the base, and what the file says of longer contexts.

use std::f64::consts::TAU;

use super::Reader;
use crate::model::ModelError;
use crate::model::parts::{Pairing, Rope};
use crate::tensor::{MetadataError, Value};

/// YaRN's numbers. Source: the reference implementation's defaults.
struct Yarn {
    /// The context that the model was first trained for.
    n_ctx: f64,
    /// Pairs that turn more often than this in that context keep their speed.
    beta_fast: f64,
    /// Pairs that turn less often than this are slowed down in full.
    beta_slow: f64,
    /// How much of their speed the former keep.
    ext_factor: f64,
}

impl Reader<'_> {
    /// The rotation of heads of `head_dim` values, of which the file may say that only some turn.
    pub fn rope(&mut self, pairing: Pairing, head_dim: usize) -> Result<Rope, ModelError> {
        let n_rot = self.optional_count("rope.dimension_count")?.unwrap_or(head_dim);
        if n_rot > head_dim || !n_rot.is_multiple_of(2) {
            let expected = format!("an even number up to {head_dim}");
            return Err(self.setting("rope.dimension_count", n_rot, expected));
        }
        let base = f64::from(self.optional_f32("rope.freq_base")?.unwrap_or(10_000.0));
        if base <= 0.0 {
            return Err(self.setting("rope.freq_base", base, "a positive number"));
        }
        let mut speeds: Vec<f64> =
            (0..n_rot / 2).map(|p| base.powf(-2.0 * p as f64 / n_rot as f64)).collect();
        for (speed, factor) in speeds.iter_mut().zip(self.rope_factors(n_rot / 2)?) {
            *speed /= f64::from(factor);
        }
        let factor = self.rope_scaling_factor()?;
        match self.metadata().optional_str(&self.key("rope.scaling.type"))?.unwrap_or("linear") {
            "none" => Ok(Rope { pairing, speeds, magnitude: 1.0 }),
            "linear" => {
                speeds.iter_mut().for_each(|speed| *speed /= factor);
                Ok(Rope { pairing, speeds, magnitude: 1.0 })
            }
            "yarn" => {
                self.yarn()?.slow_down(&mut speeds, base, factor);
                Ok(Rope { pairing, speeds, magnitude: self.yarn_magnitude(factor)? })
            }
            other => Err(self.setting("rope.scaling.type", other, "none, linear or yarn")),
        }
    }

    /// Makes sure that the file says which pairs turn by which of four positions.
    pub fn rope_sections(&self) -> Result<(), ModelError> {
        let key = "rope.dimension_sections";
        let name = self.key(key);
        match self.metadata().get(&name).ok_or(MetadataError::Missing(name))? {
            Value::Array(sections) if sections.len() != 4 => {
                Err(self.setting(key, format!("{} values", sections.len()), "4 numbers"))
            }
            Value::Array(sections) if sections.iter().all(|section| section.as_u64().is_some()) => Ok(()),
            Value::Array(_) => Err(self.setting(key, "other values", "4 numbers")),
            _ => Err(self.setting(key, "no list", "4 numbers")),
        }
    }

    /// What each pair's speed is divided by: a tensor of Llama 3.1 and its kin, of which all layers share one.
    fn rope_factors(&mut self, n_pairs: usize) -> Result<Vec<f32>, ModelError> {
        const FACTORS: &str = "rope_freqs.weight";
        if self.source.find(FACTORS).is_none() {
            return Ok(Vec::new());
        }
        let factors = self.f32_values(FACTORS, &[n_pairs])?;
        match factors.iter().find(|factor| !factor.is_normal()) {
            None => Ok(factors),
            Some(found) => Err(ModelError::Setting {
                key: FACTORS.to_owned(),
                found: found.to_string(),
                expected: "numbers other than 0".to_owned(),
            }),
        }
    }

    /// How many times longer the context is than the one first trained for; 1 where nothing is said.
    pub fn rope_scaling_factor(&self) -> Result<f64, ModelError> {
        let factor = match self.optional_f32("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.optional_f32("rope.scale_linear")?.unwrap_or(1.0),
        };
        match factor {
            0.0 => Ok(1.0),
            _ if factor > 0.0 && factor.is_finite() => Ok(f64::from(factor)),
            _ => Err(self.setting("rope.scaling.factor", factor, "a positive number")),
        }
    }

    fn yarn(&self) -> Result<Yarn, ModelError> {
        let n_ctx = match self.optional_count("rope.scaling.original_context_length")? {
            Some(n_ctx) => n_ctx,
            None => self.count("context_length")?,
        };
        let number = |key: &str, default: f32| -> Result<f64, ModelError> {
            let number = self.optional_f32(&format!("rope.scaling.yarn_{key}"))?;
            Ok(number.unwrap_or(default).into())
        };
        Ok(Yarn {
            n_ctx: n_ctx as f64,
            beta_fast: number("beta_fast", 32.0)?,
            beta_slow: number("beta_slow", 1.0)?,
            ext_factor: number("ext_factor", 1.0)?,
        })
    }

    /// What heads are multiplied by: `1 + 0.1 ln factor`, over the same with the log multiplier where there is one.
    fn yarn_magnitude(&self, factor: f64) -> Result<f32, ModelError> {
        Ok((self.stated_magnitude()? * magnitude(factor, 1.0)
            / magnitude(factor, self.yarn_log_multiplier()?)) as f32)
    }

    /// What the file itself says that heads are multiplied by, besides YaRN's correction.
    pub(super) fn stated_magnitude(&self) -> Result<f64, ModelError> {
        let stated = |key: &str| self.optional_f32(key).map(|factor| f64::from(factor.unwrap_or(1.0)));
        Ok(stated("rope.scaling.attn_factor")? * stated("rope.scaling.yarn_attn_factor")?)
    }

    /// How much of the correction for a longer context the scores get; files hold a tenth of it.
    pub fn yarn_log_multiplier(&self) -> Result<f64, ModelError> {
        let stored = self.optional_f32("rope.scaling.yarn_log_multiplier")?;
        Ok(f64::from(stored.unwrap_or(0.0)) / 0.1)
    }
}

/// YaRN's correction of magnitudes for a context `factor` times as long.
pub(in crate::model) fn magnitude(factor: f64, multiplier: f64) -> f64 {
    if factor > 1.0 { 1.0 + 0.1 * multiplier * factor.ln() } else { 1.0 }
}

impl Yarn {
    /// Divides by `factor` the speed of slow pairs, keeps that of fast ones, and blends in between.
    fn slow_down(&self, speeds: &mut [f64], base: f64, factor: f64) {
        let n_rot = 2.0 * speeds.len() as f64;
        let pair = |turns: f64| n_rot * (self.n_ctx / (TAU * turns)).ln() / (2.0 * base.ln());
        let low = pair(self.beta_fast).floor().max(0.0);
        let high = pair(self.beta_slow).ceil().min(n_rot - 1.0);
        for (p, speed) in speeds.iter_mut().enumerate() {
            let slowed = ((p as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let kept = (1.0 - slowed) * self.ext_factor;
            *speed *= (1.0 - kept) / factor + kept;
        }
    }
}
