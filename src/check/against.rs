//! `orkpack verify --against MODEL`: every tensor is the model's, and every int8 copy is what its rows give.

use rayon::prelude::*;

use super::Deriver;
use crate::bytes::Limits;
use crate::error::Error;
use crate::gguf::Header;
use crate::pack::{Pack, Part, Placement, SourceTensor, digest};
use crate::tensor::{Int8Matrix, Metadata, TensorSource};
use crate::tile;

/// How a pack compares with a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Against {
    /// Tensors whose digests were compared.
    pub n_tensors: u64,
    /// Matrices that were derived anew.
    pub n_matrices: u64,
    /// Where the model's metadata say something else, a line each. That is no fault: the weights are what counts.
    pub notes: Vec<String>,
    /// What differs, a line each, in the pack's order.
    pub findings: Vec<String>,
}

/// Bytes that [`against`] will read of a pack's model, for a progress bar.
pub fn bytes_against(pack: &Pack) -> u64 {
    let tensors: u64 = pack.tensors().iter().filter_map(SourceTensor::source_len).sum();
    tensors
        + pack
            .placements()
            .iter()
            .flat_map(|placement| &placement.parts)
            .map(|part| part.sub.len())
            .sum::<u64>()
}

/// Compares every tensor of `pack` with the model's by digest, and every int8 copy with what the model's rows give.
///
/// Reads the whole model and the whole NPU area; keeps a matrix per thread. `progress` hears bytes, from any thread.
///
/// # Errors
///
/// [`Error`] when the model cannot be described or read. A difference is no error.
pub fn against(
    pack: &Pack,
    source: &dyn TensorSource,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Against, Error> {
    let mut result = Against { notes: metadata(pack, source), ..Against::default() };
    result.findings = tensors(pack, source, progress)?;
    result.n_tensors = pack.tensors().len() as u64;
    // Copies of other tensors would differ everywhere; that they are others has been said.
    if !result.findings.is_empty() {
        return Ok(result);
    }
    let placements: Vec<&Placement> = pack.placements().iter().collect();
    let found = Deriver::new(pack, source)?.each(&placements, |placement, matrix| {
        let bytes: u64 = placement.parts.iter().map(|part| part.sub.len()).sum();
        let found = compare(pack, placement, &matrix);
        progress(bytes);
        found
    })?;
    result.n_matrices = placements.len() as u64;
    result.findings.extend(found.into_iter().flatten());
    Ok(result)
}

/// Keys that differ between the header in the pack and the model's.
fn metadata(pack: &Pack, source: &dyn TensorSource) -> Vec<String> {
    let header = pack.gguf_header(0).unwrap_or_default();
    if header == source.header() {
        return Vec::new();
    }
    let len = pack.files().first().map_or(0, |file| file.len);
    let Ok(kept) = Header::parse(header, len, &Limits::default()) else {
        return vec!["the header in the pack cannot be read".to_owned()];
    };
    let mut notes = differences(&kept.metadata, source.metadata());
    if notes.is_empty() {
        notes.push("the header differs in the order of its entries or in where tensors lie".to_owned());
    }
    notes
}

fn differences(kept: &Metadata, found: &Metadata) -> Vec<String> {
    let mut keys: Vec<&String> = kept.0.keys().chain(found.0.keys()).collect();
    keys.sort();
    keys.dedup();
    let note = |key: &String| {
        let what = match (kept.get(key), found.get(key)) {
            (Some(kept), Some(found)) if kept == found => return None,
            (Some(_), Some(_)) => "has another value than when the pack was made",
            (Some(_), None) => "is gone since the pack was made",
            _ => "was not there when the pack was made",
        };
        Some(format!("metadata key `{}` {what}", key.escape_debug()))
    };
    keys.into_iter().filter_map(note).collect()
}

/// Tensors that are not the model's, each of its parts for itself.
fn tensors(
    pack: &Pack,
    source: &dyn TensorSource,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<String>, Error> {
    let compare = |tensor: &SourceTensor| -> Result<Vec<String>, Error> {
        let label = tensor.label();
        let Some(found) = source.find(&tensor.name) else {
            return Ok(vec![format!("{label} is not in the model")]);
        };
        if (found.dtype.gguf_id(), &found.dims) != (tensor.dtype, &tensor.dims) {
            let (expected, dims) =
                (tensor.dtype().map_or_else(String::new, |dtype| dtype.to_string()), &tensor.dims);
            let what =
                format!("is {} {:?} in the model, expected {expected} {dims:?}", found.dtype, found.dims);
            return Ok(vec![format!("{label} {what}")]);
        }
        let bytes = source.bytes(found.place)?;
        let len = bytes.len() / tensor.digests.len().max(1);
        let parts = tensor.digests.par_iter().enumerate().filter_map(|(number, expected)| {
            let part = bytes.get(number * len..(number + 1) * len).unwrap_or_default();
            progress(part.len() as u64);
            let expert = if tensor.digests.len() > 1 { format!(", expert {number},") } else { String::new() };
            let found = digest(part);
            (found != *expected).then(|| {
                format!("{label}{expert} is another in the model: its digest is {found}, expected {expected}")
            })
        });
        Ok(parts.collect())
    };
    let mut findings = Vec::new();
    for tensor in pack.tensors() {
        findings.extend(compare(tensor)?);
    }
    let known = |name: &str| pack.tensor_number(name).is_some();
    let more = source.tensors().iter().filter(|tensor| !known(&tensor.name));
    findings.extend(
        more.map(|tensor| format!("tensor `{}` of the model is not in the pack", tensor.name.escape_debug())),
    );
    Ok(findings)
}

/// The first code, and the first scale, of a matrix that is not what the model's rows give.
fn compare(pack: &Pack, placement: &Placement, expected: &Int8Matrix) -> Result<Vec<String>, Error> {
    let mut findings = Vec::new();
    for part in &placement.parts {
        let mut tiles = vec![0; part.sub.len() as usize];
        tile::tile(expected, &part.sub.into(), &mut tiles)?;
        let found = pack.part_bytes(part);
        if found != tiles.as_slice() {
            findings.push(code(placement, part, expected, found));
            break;
        }
    }
    let scales = pack.scales(placement).zip(&expected.scales).zip(0u64..);
    let same = |((found, expected), _): &((f32, &f32), u64)| found.to_bits() == expected.to_bits();
    if let Some(((found, expected), row)) = scales.into_iter().find(|scale| !same(scale)) {
        let name = placement.matrix;
        findings.push(format!("{name}: scale of row {row} is {found}, the model's weights give {expected}"));
    }
    Ok(findings)
}

/// Names the first code of a part that differs; its padding, when no code does.
fn code(placement: &Placement, part: &Part, expected: &Int8Matrix, found: &[u8]) -> String {
    let name = placement.matrix;
    let sub = tile::SubMatrix::from(part.sub);
    for n in 0..sub.n_len {
        for k in 0..sub.k_len {
            let (row, column) = ((sub.n0 + n) as usize, (sub.k0 + k) as usize);
            let code = found.get(sub.byte_of(k as usize, n as usize)).map(|byte| *byte as i8);
            let right = expected.codes.get(row * expected.n_in + column).copied();
            if let (Some(code), Some(right)) = (code, right)
                && code != right
            {
                return format!(
                    "{name}: code at row {row}, column {column} is {code}, the model's weights give {right}"
                );
            }
        }
    }
    format!("{name}: the padding of its tiles is not zero")
}
