//! The header as a whole: counts, metadata, tensor directory, where the data begins, and the checks across them.

use super::error::{GgufError, shown};
use super::second;
use super::walk::{Walk, What, at_most};
use crate::bytes::{Cursor, Limits, align_up};
use crate::tensor::{Dtype, Metadata, Place, TensorInfo, Value};

/// The first four bytes of every GGUF file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// Alignment of tensor data where the file does not say. Source: the GGUF specification.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A whole GGUF header, checked: names are unique, every extent lies in the file, aligned, and overlaps none.
#[derive(Clone, Debug)]
pub struct Header {
    /// All keys, typed.
    pub metadata: Metadata,
    /// Every tensor in the order of the directory; places are absolute, in file 0.
    pub tensors: Vec<TensorInfo>,
    /// First byte of the tensor data.
    pub data_offset: u64,
    /// Bytes to which tensors are aligned.
    pub alignment: u64,
    /// 2 or 3.
    pub version: u32,
    /// What is odd but harmless, one line each.
    pub warnings: Vec<String>,
    /// Numbers of the tensors, in order of their names.
    by_name: Vec<usize>,
}

/// One line of the directory, before the data offset is known.
struct Entry {
    name: String,
    dims: Vec<u64>,
    dtype: Dtype,
    offset: u64,
    len: u64,
}

impl Header {
    /// Reads the header at the start of `bytes`, the beginning (or all) of a file of `file_len` bytes.
    ///
    /// Looks at no more than `limits.header_bytes`; allocates only in proportion to bytes that are there.
    ///
    /// # Errors
    ///
    /// [`GgufError`] for the first thing that is wrong, with its place.
    pub fn parse(bytes: &[u8], file_len: u64, limits: &Limits) -> Result<Header, GgufError> {
        if bytes.is_empty() {
            return Err(GgufError::Empty);
        }
        let mut walk = Walk::new(bytes, limits);
        let version = version(&mut walk)?;
        let n_tensors = walk.read(What::Field("tensor_count"), Cursor::u64)?;
        let n_keys = walk.read(What::Field("metadata_kv_count"), Cursor::u64)?;
        at_most(limits.tensors, n_tensors, || "tensor_count".to_owned())?;
        at_most(limits.keys, n_keys, || "metadata_kv_count".to_owned())?;

        // The least key and value: two lengths or types and a byte. The least entry: no name, one dimension.
        walk.expect_room(What::Entries("metadata entries", n_keys), n_keys, 8 + 4 + 1)?;
        let (metadata, warnings) = walk.metadata(n_keys)?;
        walk.expect_room(What::Entries("tensor entries", n_tensors), n_tensors, 8 + 4 + 8 + 4 + 8)?;
        let entries = (0..n_tensors).map(|index| entry(&mut walk, index)).collect::<Result<Vec<_>, _>>()?;

        let alignment = alignment(&metadata)?;
        let overflow = GgufError::HeaderTooLong { limit: limits.header_bytes };
        let data_offset = align_up(walk.offset(), alignment).ok_or(overflow)?;
        let place = |entry| place(entry, data_offset, alignment, file_len);
        let tensors = entries.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let by_name = by_name(&tensors)?;
        disjoint(&tensors)?;

        let header = Header { metadata, tensors, data_offset, alignment, version, warnings, by_name };
        second::compare(bytes, walk.offset(), &header)?;
        Ok(header)
    }

    /// The tensor with this name.
    pub fn find(&self, name: &str) -> Option<&TensorInfo> {
        let name_of = |index: &usize| self.tensors.get(*index).map(|tensor| tensor.name.as_str());
        let at = self.by_name.binary_search_by(|index| name_of(index).cmp(&Some(name))).ok()?;
        self.tensors.get(*self.by_name.get(at)?)
    }
}

/// Magic and version, with the words for what is not ours to read.
fn version(walk: &mut Walk<'_>) -> Result<u32, GgufError> {
    let found = walk.read(What::Field("the magic"), Cursor::u32)?.to_le_bytes();
    match &found {
        b"GGUF" => {}
        b"FUGG" => return Err(GgufError::BigEndian),
        _ => return Err(GgufError::NotGguf { found }),
    }
    match walk.read(What::Field("the version"), Cursor::u32)? {
        version @ (2 | 3) => Ok(version),
        // A small number stored most significant byte first.
        swapped if swapped != 0 && swapped.trailing_zeros() >= 16 => Err(GgufError::BigEndian),
        found => Err(GgufError::Version { found }),
    }
}

/// One line of the directory, with everything checked that needs no other line.
fn entry(walk: &mut Walk<'_>, index: u64) -> Result<Entry, GgufError> {
    let name = walk.name(What::TensorName(index))?;
    let what = What::Tensor(name);
    let found = walk.read(what, Cursor::u32)?;
    if !(1..=4).contains(&found) {
        return Err(GgufError::Dimensions { name: shown(name), found });
    }
    let dims = (0..found).map(|_| walk.read(what, Cursor::u64)).collect::<Result<Vec<_>, _>>()?;
    let found = walk.read(what, Cursor::u32)?;
    let offset = walk.read(what, Cursor::u64)?;
    let dtype = Dtype::from_gguf(found).ok_or(GgufError::ElementType { name: shown(name), found })?;
    let len = byte_len(name, dtype, &dims)?;
    Ok(Entry { name: name.to_owned(), dims, dtype, offset, len })
}

/// Bytes of a tensor; also makes sure that the number of its weights can be counted.
fn byte_len(name: &str, dtype: Dtype, dims: &[u64]) -> Result<u64, GgufError> {
    let n_in = dims.first().copied().unwrap_or(1);
    let whole_blocks = u64::try_from(dtype.block_len()).is_ok_and(|block| n_in.is_multiple_of(block));
    if !whole_blocks {
        return Err(GgufError::Row { name: shown(name), dtype, n_in });
    }
    let product = |first: u64| dims.iter().skip(1).try_fold(first, |product, &dim| product.checked_mul(dim));
    let overflow = || GgufError::SizeOverflow { name: shown(name), dims: dims.to_vec(), dtype };
    product(n_in).ok_or_else(overflow)?;
    dtype.row_bytes(n_in).and_then(product).ok_or_else(overflow)
}

/// The file's alignment. It must be what the specification says, a u32: a reader that took another kind for
/// the default would find the data elsewhere.
fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(value)) if value.is_power_of_two() && (8..=65_536).contains(value) => {
            Ok(u64::from(*value))
        }
        Some(Value::U32(value)) => Err(GgufError::Alignment { found: value.to_string() }),
        Some(other) => Err(GgufError::Alignment { found: format!("{} of another type", other.describe()) }),
    }
}

/// Turns an offset in the data into a place in the file.
fn place(entry: Entry, data_offset: u64, alignment: u64, file_len: u64) -> Result<TensorInfo, GgufError> {
    let Entry { name, dims, dtype, offset, len } = entry;
    let begin = data_offset.checked_add(offset);
    let Some((begin, end)) = begin.and_then(|begin| Some((begin, begin.checked_add(len)?))) else {
        return Err(GgufError::OffsetOverflow { name: shown(&name), offset, len });
    };
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Misaligned { name: shown(&name), offset, alignment });
    }
    if end > file_len {
        return Err(GgufError::PastEnd { name: shown(&name), end, file_len });
    }
    Ok(TensorInfo { name, dtype, dims, place: Place { file: 0, offset: begin, len } })
}

/// The order of names, each of which must be there once.
fn by_name(tensors: &[TensorInfo]) -> Result<Vec<usize>, GgufError> {
    let mut order: Vec<(&str, usize)> =
        tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
    order.sort_unstable();
    for ((first, _), (second, _)) in order.iter().zip(order.iter().skip(1)) {
        if first == second {
            return Err(GgufError::DuplicateTensor { name: shown(first) });
        }
    }
    Ok(order.into_iter().map(|(_, index)| index).collect())
}

/// No two tensors may share a byte.
fn disjoint(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|tensor| tensor.place.len > 0).collect();
    order.sort_by_key(|tensor| tensor.place.offset);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        let offset = second.place.offset;
        // Ends were checked against the file's length, so this cannot saturate.
        if first.place.offset.saturating_add(first.place.len) > offset {
            let (first, second) = (shown(&first.name), shown(&second.name));
            return Err(GgufError::Overlap { first, second, offset });
        }
    }
    Ok(())
}
