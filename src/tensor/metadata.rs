//! A model's metadata as typed values: the keys of a GGUF header, whichever file they came from.

use std::collections::BTreeMap;

use thiserror::Error;

/// One metadata value. Strings may hold any bytes; arrays hold one kind of element and never nest.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// Raw bytes, as files in the wild are not always UTF-8.
    String(Vec<u8>),
    Array(Vec<Value>),
}

/// A key that is missing or does not hold what the model needs.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
pub enum MetadataError {
    /// The key is not there.
    #[error("metadata key `{0}` is missing")]
    Missing(String),
    /// The key is there with another type or an impossible value.
    #[error("metadata key `{key}` holds {found}, expected {expected}")]
    Wrong {
        /// The key.
        key: String,
        /// What it holds, in words.
        found: String,
        /// What was needed, in words.
        expected: &'static str,
    },
}

/// All keys of a model, sorted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub BTreeMap<String, Value>);

impl Value {
    /// Any integer as u64; `None` for other kinds and negatives.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A float; `None` for other kinds.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// A string that is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// What this value is, in words, for messages.
    pub fn describe(&self) -> String {
        match self {
            Value::String(bytes) => format!("a string of {} bytes", bytes.len()),
            Value::Array(values) => format!("an array of {}", values.len()),
            Value::Bool(v) => format!("{v}"),
            Value::F32(v) => format!("{v}"),
            Value::F64(v) => format!("{v}"),
            other => other.as_u64().map_or_else(|| "a negative number".to_owned(), |v| v.to_string()),
        }
    }
}

impl Metadata {
    /// The value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// A count, width or id that must be there and fit 32 bits.
    ///
    /// # Errors
    ///
    /// [`MetadataError`] when the key is missing or is no such number.
    pub fn u32(&self, key: &str) -> Result<u32, MetadataError> {
        self.optional_u32(key)?.ok_or_else(|| MetadataError::Missing(key.to_owned()))
    }

    /// A count, width or id that may be missing.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Wrong`] when the key is there and is no number of 32 bits.
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, MetadataError> {
        self.typed(key, "a number below 2^32", |v| v.as_u64().and_then(|v| u32::try_from(v).ok()))
    }

    /// A finite float that may be missing.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Wrong`] when the key is there and is no finite float.
    pub fn optional_f32(&self, key: &str) -> Result<Option<f32>, MetadataError> {
        self.typed(key, "a finite float", |v| v.as_f32().filter(|v| v.is_finite()))
    }

    /// A bool that may be missing.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Wrong`] when the key is there and is no bool.
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, MetadataError> {
        self.typed(key, "a bool", |v| if let Value::Bool(v) = v { Some(*v) } else { None })
    }

    /// A UTF-8 string that may be missing.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Wrong`] when the key is there and is no UTF-8 string.
    pub fn optional_str(&self, key: &str) -> Result<Option<&str>, MetadataError> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| wrong(key, v, "a UTF-8 string"))).transpose()
    }

    /// A UTF-8 string that must be there.
    ///
    /// # Errors
    ///
    /// [`MetadataError`] when the key is missing or is no UTF-8 string.
    pub fn str(&self, key: &str) -> Result<&str, MetadataError> {
        self.optional_str(key)?.ok_or_else(|| MetadataError::Missing(key.to_owned()))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, MetadataError> {
        self.get(key).map(|v| read(v).ok_or_else(|| wrong(key, v, expected))).transpose()
    }
}

fn wrong(key: &str, value: &Value, expected: &'static str) -> MetadataError {
    MetadataError::Wrong { key: key.to_owned(), found: value.describe(), expected }
}
