//! The walk over a header's bytes: names, numbers, typed values, every length checked before it is believed.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use super::error::{GgufError, shown};
use crate::bytes::{Cursor, Limits, OutOfBounds};
use crate::tensor::{Metadata, Value};

/// Bytes of a key or of a tensor's name. Source: the GGUF specification, for keys.
const NAME_BYTES: u64 = 65_535;

/// The element type id of an array.
const ARRAY: u32 = 9;

/// What is being read, for the message when the bytes end there.
#[derive(Clone, Copy)]
pub(super) enum What<'a> {
    Field(&'static str),
    Entries(&'static str, u64),
    Key(u64),
    Value(&'a str),
    TensorName(u64),
    Tensor(&'a str),
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Field(name) => f.write_str(name),
            What::Entries(name, count) => write!(f, "the {count} {name}"),
            What::Key(index) => write!(f, "metadata key {index}"),
            What::Value(key) => write!(f, "the value of metadata key `{}`", shown(key)),
            What::TensorName(index) => write!(f, "the name of tensor {index}"),
            What::Tensor(name) => write!(f, "the entry of tensor `{}`", shown(name)),
        }
    }
}

/// A cursor over header bytes that knows the limits.
pub(super) struct Walk<'a> {
    cursor: Cursor<'a>,
    limits: &'a Limits,
    /// Whether the bytes were cut at the limit on headers, not by the end of the file.
    capped: bool,
    /// Array elements that may still be read, under `tokenizer.` and elsewhere. The bound for all arrays of a
    /// file together keeps the memory for their typed values in proportion.
    tokenizer_elements_left: u64,
    other_elements_left: u64,
}

impl<'a> Walk<'a> {
    /// Begins at the first of `bytes`, of which no more than the limit on headers are looked at.
    pub(super) fn new(bytes: &'a [u8], limits: &'a Limits) -> Self {
        let limit = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
        let seen = bytes.get(..limit).unwrap_or(bytes);
        Walk {
            cursor: Cursor::new(seen),
            limits,
            capped: seen.len() < bytes.len(),
            tokenizer_elements_left: limits.tokenizer_elements.saturating_mul(2),
            other_elements_left: limits.array_elements.saturating_mul(16),
        }
    }

    pub(super) fn offset(&self) -> u64 {
        self.cursor.offset()
    }

    /// Reads with one of the cursor's methods, naming what was read if the bytes end.
    pub(super) fn read<T>(
        &mut self,
        what: What<'_>,
        read: impl FnOnce(&mut Cursor<'a>) -> Result<T, OutOfBounds>,
    ) -> Result<T, GgufError> {
        read(&mut self.cursor).map_err(|end| self.ended(what, end.offset, end.needed))
    }

    fn ended(&self, what: What<'_>, offset: u64, needed: u64) -> GgufError {
        if self.capped {
            return GgufError::HeaderTooLong { limit: self.limits.header_bytes };
        }
        GgufError::Truncated { what: what.to_string(), offset, needed, left: self.cursor.left() }
    }

    /// Refuses a count of items whose least size would pass the end; nothing is allocated before this.
    pub(super) fn expect_room(&self, what: What<'_>, count: u64, least_bytes: u64) -> Result<(), GgufError> {
        let needed = count.saturating_mul(least_bytes);
        if needed <= self.cursor.left() { Ok(()) } else { Err(self.ended(what, self.offset(), needed)) }
    }

    /// Length-prefixed bytes.
    fn string(&mut self, what: What<'_>) -> Result<&'a [u8], GgufError> {
        let len = self.read(what, Cursor::u64)?;
        self.expect_room(what, len, 1)?;
        at_most(self.limits.string_bytes, len, || format!("the length of {what}"))?;
        self.read(what, |cursor| cursor.take(len))
    }

    /// A key or tensor name: UTF-8 that can be shown.
    pub(super) fn name(&mut self, what: What<'_>) -> Result<&'a str, GgufError> {
        let bytes = self.string(what)?;
        at_most(NAME_BYTES, len(bytes), || format!("the length of {what}"))?;
        let refused = |problem| GgufError::Name { what: what.to_string(), problem };
        let name = std::str::from_utf8(bytes).map_err(|_| refused("is not UTF-8"))?;
        if name.chars().any(char::is_control) {
            return Err(refused("holds a control character"));
        }
        Ok(name)
    }

    /// The metadata: `count` keys and values. An equal duplicate is a warning, an unequal one an error.
    pub(super) fn metadata(&mut self, count: u64) -> Result<(Metadata, Vec<String>), GgufError> {
        let mut map = BTreeMap::new();
        let mut warnings = Vec::new();
        for index in 0..count {
            let key = self.name(What::Key(index))?;
            let value = self.value(key)?;
            match map.entry(key.to_owned()) {
                Entry::Vacant(free) => {
                    free.insert(value);
                }
                Entry::Occupied(first) if *first.get() == value => {
                    warnings
                        .push(format!("metadata key `{}` is there twice with the same value", shown(key)));
                }
                Entry::Occupied(_) => return Err(GgufError::DuplicateKey { key: shown(key) }),
            }
        }
        Ok((Metadata(map), warnings))
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        match self.read(What::Value(key), Cursor::u32)? {
            ARRAY => self.array(key),
            kind => self.scalar(key, kind),
        }
    }

    fn array(&mut self, key: &str) -> Result<Value, GgufError> {
        let what = What::Value(key);
        let kind = self.read(what, Cursor::u32)?;
        let count = self.read(what, Cursor::u64)?;
        self.expect_room(what, count, least_bytes(key, kind)?)?;
        self.charge(key, count)?;
        let mut values = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        for _ in 0..count {
            values.push(self.scalar(key, kind)?);
        }
        Ok(Value::Array(values))
    }

    /// Takes `count` elements from what the arrays of this file may hold.
    fn charge(&mut self, key: &str, count: u64) -> Result<(), GgufError> {
        let (limit, left) = if key.starts_with("tokenizer.") {
            (self.limits.tokenizer_elements, &mut self.tokenizer_elements_left)
        } else {
            (self.limits.array_elements, &mut self.other_elements_left)
        };
        let limit = limit.min(*left);
        at_most(limit, count, || format!("the number of elements of metadata key `{}`", shown(key)))?;
        *left = left.saturating_sub(count);
        Ok(())
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Value, GgufError> {
        let what = What::Value(key);
        Ok(match kind {
            0 => Value::U8(self.read(what, Cursor::u8)?),
            1 => Value::I8(self.read(what, Cursor::i8)?),
            2 => Value::U16(self.read(what, Cursor::u16)?),
            3 => Value::I16(self.read(what, Cursor::i16)?),
            4 => Value::U32(self.read(what, Cursor::u32)?),
            5 => Value::I32(self.read(what, Cursor::i32)?),
            6 => Value::F32(self.read(what, Cursor::f32)?),
            7 => match self.read(what, Cursor::u8)? {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                found => return Err(GgufError::Bool { key: shown(key), found }),
            },
            8 => Value::String(self.string(what)?.to_vec()),
            10 => Value::U64(self.read(what, Cursor::u64)?),
            11 => Value::I64(self.read(what, Cursor::i64)?),
            12 => Value::F64(self.read(what, Cursor::f64)?),
            found => return Err(GgufError::ValueType { key: shown(key), found }),
        })
    }
}

/// The fewest bytes that an array element of this kind can take.
fn least_bytes(key: &str, kind: u32) -> Result<u64, GgufError> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        8 | 10..=12 => Ok(8),
        ARRAY => Err(GgufError::NestedArray { key: shown(key) }),
        found => Err(GgufError::ValueType { key: shown(key), found }),
    }
}

/// Refuses a count above `limit`.
pub(super) fn at_most(limit: u64, found: u64, what: impl FnOnce() -> String) -> Result<(), GgufError> {
    if found <= limit { Ok(()) } else { Err(GgufError::Count { what: what(), found, limit }) }
}

fn len(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}
