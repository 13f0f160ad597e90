//! Gives a GGUF file back from a fat pack, byte for byte.

#![deny(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::arithmetic_side_effects
)]

use std::io::{self, Read, Write};

use super::layout::gaps;
use super::{Pack, entry, slice, wide};

impl Pack {
    /// Writes file number `file` of the model as it was before conversion. Every section is checked before its bytes
    /// go out.
    ///
    /// # Errors
    ///
    /// What `out` says; `NotFound` when there is no such file or the pack is thin; a [`PackError`](super::PackError) inside when a
    /// section is damaged.
    pub fn write_gguf(&self, file: u32, out: &mut dyn Write) -> io::Result<()> {
        let missing =
            || io::Error::new(io::ErrorKind::NotFound, "the pack does not hold this file's tensors");
        let source = entry(self.files(), file).filter(|_| self.is_fat()).ok_or_else(missing)?;
        let (len, header) = (source.len, self.gguf_header(file).ok_or_else(missing)?);
        let check = |section| self.check_section(section).map_err(io::Error::other);
        [Some(source.header), source.residue].into_iter().flatten().try_for_each(check)?;
        let mut pieces = Vec::new();
        for tensor in self.tensors().iter().filter(|tensor| tensor.file == file) {
            let bytes = self.tensor_bytes(tensor).ok_or_else(missing)?;
            pieces.push((tensor.offset, Piece::Stored(bytes), tensor.section));
        }
        let places = pieces.iter().map(|(offset, piece, _)| (*offset, piece.len())).collect::<Vec<_>>();
        let mut residue = self.residue(file);
        for gap in gaps(wide(header.len()), places.into_iter(), len).ok_or_else(missing)? {
            let gap_len = gap.end.saturating_sub(gap.start);
            let piece = match residue {
                None => Piece::Zero(gap_len),
                Some(bytes) => {
                    residue = slice(bytes, gap_len, wide(bytes.len()).saturating_sub(gap_len));
                    Piece::Stored(slice(bytes, 0, gap_len).ok_or_else(missing)?)
                }
            };
            pieces.push((gap.start, piece, None));
        }
        pieces.sort_by_key(|(offset, piece, _)| (*offset, piece.len()));
        out.write_all(header)?;
        pieces.iter().try_for_each(|(_, piece, section)| {
            section.map_or(Ok(()), check)?;
            piece.write(out)
        })
    }
}

/// A run of bytes of the file.
enum Piece<'a> {
    Stored(&'a [u8]),
    Zero(u64),
}

impl Piece<'_> {
    fn len(&self) -> u64 {
        match self {
            Piece::Stored(bytes) => wide(bytes.len()),
            Piece::Zero(len) => *len,
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Piece::Stored(bytes) => out.write_all(bytes),
            Piece::Zero(len) => io::copy(&mut io::repeat(0).take(*len), out).map(drop),
        }
    }
}
