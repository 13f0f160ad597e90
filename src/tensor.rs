//! What a tensor is: element types, shapes, borrowed matrix views, and where its bytes lie.
//!
//! Shapes are written `[n_out, n_in]`, row-major: row `o` holds the `n_in` weights of output `o`. (GGUF lists
//! the same matrix fastest dimension first, as `{n_in, n_out}`.)

mod dtype;
mod metadata;
mod source;
mod view;

pub use dtype::Dtype;
pub use metadata::{Metadata, MetadataError, Value};
pub use source::{Place, SourceError, TensorInfo, TensorSource};
pub use view::{Int8Matrix, MatrixId, MatrixView, Projection, WeightView};
