//! Tensors that go from one pack to another without being written again, where the file system can share extents.
//!
//! Sections begin on page boundaries in every pack, so whole pages of a tensor can belong to both files. The kernel
//! copies what cannot be shared, and all of it on file systems that share nothing.

use std::fs::File;
use std::io;
use std::path::Path;

use super::manifest::SourceTensor;
use super::writer::Writer;
use super::{Pack, PackError, Partial, wide};

/// A pack that gives tensors to another.
#[derive(Debug)]
pub struct Giver<'a> {
    pack: &'a Pack,
    file: File,
    shares: bool,
}

impl<'a> Giver<'a> {
    /// Opens `pack` once more, for a pack that is written in the folder of `output`.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn new(pack: &'a Pack, output: &Path) -> io::Result<Giver<'a>> {
        let file = File::open(pack.file().path())?;
        let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Sharing all of it with a file without a name costs nothing and shows whether it can be done.
        let probe = tempfile::tempfile_in(folder.unwrap_or(Path::new(".")))?;
        let shares = rustix::fs::ioctl_ficlone(&probe, &file).is_ok();
        Ok(Giver { pack, file, shares })
    }

    /// Whether the two files can share extents; else everything is copied.
    pub fn shares(&self) -> bool {
        self.shares
    }
}

impl Writer<Partial> {
    /// Adds the next tensor as another pack holds it, after its digests were checked there.
    ///
    /// # Errors
    ///
    /// As [`Writer::push_tensor`]; [`PackError::SectionDigest`] when the other pack is damaged.
    pub fn push_given(&mut self, giver: &Giver<'_>, tensor: &SourceTensor) -> Result<(), PackError> {
        let bytes = giver.pack.tensor_bytes(tensor).unwrap_or_default();
        let from = tensor.section.and_then(|number| Some((number, giver.pack.section(number)?)));
        let Some((number, from)) = from.filter(|(_, from)| self.is_next(from)) else {
            return self.push_tensor(bytes);
        };
        giver.pack.check_section(number)?;
        let written = match self.next_section() {
            Some(to) => self.sink().take_range(&giver.file, from.offset, to.offset, from.len).is_ok(),
            // A thin pack keeps the digests alone.
            None => true,
        };
        // Not every file system lets the kernel copy.
        if written { self.skip_tensor(from.digests.clone()) } else { self.push_tensor(bytes) }
    }
}

impl Partial {
    /// Brings `len` bytes of `from` here, shared or copied by the kernel.
    fn take_range(&self, from: &File, mut offset: u64, mut to: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let piece = usize::try_from(len.min(1 << 30)).unwrap_or(1 << 30);
            let n = rustix::fs::copy_file_range(from, Some(&mut offset), self.file(), Some(&mut to), piece)?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            len = len.saturating_sub(wide(n));
        }
        Ok(())
    }
}
