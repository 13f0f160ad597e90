//! The second reading: another reader of GGUF goes over the same bytes, and every difference is an error.
//!
//! It sees only headers that our own walk has accepted, because it panics on some tensor types and believes
//! lengths. Its sizes are not compared: for some types it has them wrong. Array values stay ours.

use std::io;

use gguf_rs::{ByteOrder, GGUFContainer, GGUFModel};

use super::error::{GgufError, shown};
use super::header::{Header, MAGIC};
use crate::tensor::TensorInfo;

/// Reads `bytes[..end]` again and compares names, types, shapes, offsets and the start of the data.
pub(super) fn compare(bytes: &[u8], end: u64, header: &Header) -> Result<(), GgufError> {
    // It wants an owned reader that stands after the magic, and reads a number at a time.
    let end = usize::try_from(end).ok();
    let after_magic = end.and_then(|end| bytes.get(MAGIC.len()..end)).unwrap_or_default().to_vec();
    let reader = Box::new(io::Cursor::new(after_magic));
    let model = GGUFContainer::new(ByteOrder::LE, reader, 0)
        .decode()
        .map_err(|error| differs(format!("it refuses the file: {error}")))?;

    if !model.metadata().keys().eq(header.metadata.0.keys()) {
        return Err(differs("other metadata keys".to_owned()));
    }
    if model.data_offset() != header.data_offset {
        let (theirs, ours) = (model.data_offset(), header.data_offset);
        return Err(differs(format!("the data begins at byte {theirs}, here at {ours}")));
    }
    compare_tensors(&model, header)
}

fn compare_tensors(model: &GGUFModel, header: &Header) -> Result<(), GgufError> {
    let (theirs, ours) = (model.tensors(), &header.tensors);
    if theirs.len() != ours.len() {
        return Err(differs(format!("{} tensors, here {}", theirs.len(), ours.len())));
    }
    for (theirs, ours) in theirs.iter().zip(ours) {
        let TensorInfo { name, dtype, dims, place } = ours;
        let offset = theirs.offset.checked_add(header.data_offset);
        let same = theirs.name == *name
            && theirs.kind == dtype.gguf_id()
            && theirs.shape == *dims
            && offset == Some(place.offset);
        if !same {
            return Err(differs(format!("tensor `{}` is {theirs:?}", shown(name))));
        }
    }
    Ok(())
}

fn differs(difference: String) -> GgufError {
    GgufError::SecondReading { difference }
}
