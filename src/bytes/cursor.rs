//! A little-endian cursor over a slice, every read checked against what is left.

use thiserror::Error;

/// A read that would pass the end of the bytes.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
#[error("needs {needed} bytes at byte {offset}, but {left} are left")]
pub struct OutOfBounds {
    /// Where the read began.
    pub offset: u64,
    /// How many bytes it wanted.
    pub needed: u64,
    /// How many there were.
    pub left: u64,
}

/// Reads numbers and slices from the front of `bytes`, remembering the offset for messages.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    offset: u64,
}

impl<'a> Cursor<'a> {
    /// A cursor at the first of `bytes`, whose offset is 0.
    pub fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, offset: 0 }
    }

    /// How far the cursor has come.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes are left.
    pub fn left(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The next `n` bytes.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] when fewer are left; the cursor then stays where it was.
    pub fn take(&mut self, n: u64) -> Result<&'a [u8], OutOfBounds> {
        let refused = OutOfBounds { offset: self.offset, needed: n, left: self.left() };
        let at = usize::try_from(n).map_err(|_| refused)?;
        let (head, tail) = self.bytes.split_at_checked(at).ok_or(refused)?;
        self.bytes = tail;
        self.offset = self.offset.saturating_add(n);
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], OutOfBounds> {
        let refused = OutOfBounds { offset: self.offset, needed: N as u64, left: self.left() };
        self.take(N as u64)?.try_into().map_err(|_| refused)
    }
}

/// One reader per number type, all little-endian.
macro_rules! numbers {
    ($($name:ident: $type:ty),*) => {
        impl Cursor<'_> {
            $(
                /// The next number of this type, little-endian.
                ///
                /// # Errors
                ///
                /// [`OutOfBounds`] when the bytes end first.
                pub fn $name(&mut self) -> Result<$type, OutOfBounds> {
                    self.array().map(<$type>::from_le_bytes)
                }
            )*
        }
    };
}

numbers!(u8: u8, i8: i8, u16: u16, i16: i16, u32: u32, i32: i32, u64: u64, i64: i64, f32: f32, f64: f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_little_endian_and_stops_at_the_end() {
        let mut cursor = Cursor::new(&[1, 2, 0, 0, 0, 9]);
        assert_eq!(cursor.u8(), Ok(1));
        assert_eq!(cursor.u32(), Ok(2));
        let refused = OutOfBounds { offset: 5, needed: 2, left: 1 };
        assert_eq!(cursor.u16(), Err(refused));
        assert_eq!(cursor.take(u64::MAX).unwrap_err().needed, u64::MAX);
        assert_eq!(cursor.u8(), Ok(9));
        assert_eq!((cursor.offset(), cursor.left()), (6, 0));
    }
}
