//! What planning and packing need of a model, whether it can be run or not: sizes, experts, a name.
//!
//! Of a family that can be run all of it comes from its description. Of any other it comes from the names that all
//! families give to routers and experts, whatever mixes their positions.

use std::sync::Arc;

use super::reader::Reader;
use super::{Model, ModelError, ModelShape, fingerprint};
use crate::executor::WeightTable;
use crate::tensor::TensorSource;

/// A model as far as planning and packing go.
#[derive(Clone, Debug)]
pub struct Outline {
    shape: ModelShape,
    fingerprint: String,
    weights: Arc<WeightTable>,
    model: Option<Model>,
}

impl Outline {
    /// The outline of the model that `source` holds.
    ///
    /// # Errors
    ///
    /// [`ModelError`] as [`Model::describe`] has it; for a family that cannot be run only where its experts do not have
    /// the usual names or its metadata does not say how many there are: [`ModelError::Unplannable`].
    pub fn of(source: &dyn TensorSource) -> Result<Outline, ModelError> {
        match Outline::of_runnable(source) {
            Err(ModelError::Architecture { found, supported }) => {
                let outline = Reader::new(source, &found).outline();
                let outline =
                    outline.and_then(|(shape, weights)| Outline::new(source, shape, weights.into(), None));
                outline.map_err(|problem| {
                    let problem = Box::new(problem);
                    ModelError::Unplannable { found, problem, supported }
                })
            }
            other => other,
        }
    }

    /// The outline of a model that can be run.
    ///
    /// # Errors
    ///
    /// As [`Model::describe`].
    pub fn of_runnable(source: &dyn TensorSource) -> Result<Outline, ModelError> {
        let model = Model::describe(source)?;
        Outline::new(source, model.shape(), Arc::clone(model.weights()), Some(model))
    }

    fn new(
        source: &dyn TensorSource,
        shape: ModelShape,
        weights: Arc<WeightTable>,
        model: Option<Model>,
    ) -> Result<Outline, ModelError> {
        Ok(Outline { fingerprint: fingerprint(&shape, source)?, shape, weights, model })
    }

    /// The sizes that the planner needs.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The model's name whatever its quantisation; see [`Model::fingerprint`].
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// The experts' matrices; those outside the experts only of a model that can be run.
    pub fn weights(&self) -> &Arc<WeightTable> {
        &self.weights
    }

    /// The description, where the model can be run.
    ///
    /// # Errors
    ///
    /// [`ModelError::Architecture`], with the list of those that can.
    pub fn runnable(&self) -> Result<&Model, ModelError> {
        let refused = || ModelError::unsupported(&self.shape.architecture);
        self.model.as_ref().ok_or_else(refused)
    }
}
