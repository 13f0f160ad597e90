//! The small number types that every other module speaks: bytes, layer and expert numbers.
//!
//! Sizes are parsed and printed here and nowhere else, so that a budget means the same in every command.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A size in bytes. Prints in binary units (`1.20 GiB`), parses `1.2GiB`, `1200MiB`, `1.2GB`, `4096`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// The number of a transformer block, as in `blk.<layer>.`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u32);

/// The number of an expert inside its layer. Wider than 8 bits everywhere: models with 512 experts exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId(pub u32);

impl LayerId {
    /// The layer as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl ExpertId {
    /// The expert as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a size could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BytesError {
    /// Not a decimal number followed by a known unit.
    #[error("`{0}` is not a size; write it like 1.2GiB, 1200MiB, 1.2GB or 4096 (bytes)")]
    Malformed(String),
    /// Larger than 2^64 − 1 bytes.
    #[error("`{0}` is more bytes than 64 bits can count")]
    TooLarge(String),
}

/// Units, the longer suffix first where one ends in the other. Decimal where the SI letter stands alone.
const UNITS: [(&str, u64); 13] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("K", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("B", 1),
];

impl FromStr for Bytes {
    type Err = BytesError;

    /// Reads a size exactly, in integers: `1.2GiB` is 1,288,490,188 (a fraction of a byte is dropped).
    ///
    /// # Errors
    ///
    /// [`BytesError::Malformed`] for signs, commas, `nan`, exponents or unknown units;
    /// [`BytesError::TooLarge`] where the product leaves 64 bits.
    fn from_str(text: &str) -> Result<Self, BytesError> {
        let malformed = || BytesError::Malformed(text.to_owned());
        let trimmed = text.trim();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(suffix, unit)| trimmed.strip_suffix(suffix).map(|number| (number.trim_end(), *unit)))
            .unwrap_or((trimmed, 1));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if whole.is_empty()
            || !digits(whole)
            || !digits(fraction)
            || fraction.len() > 18
            || number.ends_with('.')
        {
            return Err(malformed());
        }
        let too_large = || BytesError::TooLarge(text.to_owned());
        let whole: u128 = whole.parse().map_err(|_| too_large())?;
        let scale = 10u128.pow(fraction.len() as u32);
        let fraction: u128 =
            if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| malformed())? };
        whole
            .checked_mul(scale)
            .and_then(|n| n.checked_add(fraction))
            .and_then(|n| n.checked_mul(u128::from(unit)))
            .and_then(|n| u64::try_from(n / scale).ok())
            .map(Bytes)
            .ok_or_else(too_large)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            0..1024 => return write!(f, "{} B", self.0),
            1024..0x10_0000 => (1u64 << 10, "KiB"),
            0x10_0000..0x4000_0000 => (1 << 20, "MiB"),
            0x4000_0000..0x100_0000_0000 => (1 << 30, "GiB"),
            _ => (1 << 40, "TiB"),
        };
        write!(f, "{:.2} {name}", self.0 as f64 / unit as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_exactly_or_refused() {
        for (text, bytes) in [
            ("1.2GiB", 1_288_490_188),
            ("1200MiB", 1_258_291_200),
            ("1.2GB", 1_200_000_000),
            ("1200M", 1_200_000_000),
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            (" 1 KiB ", 1024),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in
            ["", "-1", "+1", "1e99", "nan", "1,2GiB", "GiB", ".5GiB", "1.GiB", "1.2.3MiB", "1 QiB", "0x10"]
        {
            assert!(matches!(text.parse::<Bytes>(), Err(BytesError::Malformed(_))), "{text}");
        }
        for text in ["18446744073709551616", "99999999999GiB", "999999999999999999999999999999999999999999"] {
            assert!(matches!(text.parse::<Bytes>(), Err(BytesError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn sizes_print_in_binary_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1_288_490_188, "1.20 GiB"),
            (1 << 44, "16.00 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
