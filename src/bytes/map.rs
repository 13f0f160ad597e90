//! A whole file as read-only bytes: mapped, or read into memory where a map is unwanted or impossible.
//!
//! The only `unsafe` of this module is the map itself. A file that somebody truncates while it is mapped
//! raises SIGBUS; the command line installs a handler that says so. Writers of this tool never truncate:
//! they write beside and rename.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// How a file's bytes are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// Map it; read it into memory only where the file system cannot map.
    #[default]
    Map,
    /// Read it into memory, for network and removable disks.
    Pread,
}

#[derive(Debug)]
enum Storage {
    Mapped(Mmap),
    Held(Vec<u8>),
}

/// The bytes of one regular file, read-only, with the path for messages.
#[derive(Debug)]
pub struct FileBytes {
    path: PathBuf,
    storage: Storage,
}

impl FileBytes {
    /// Opens `path`.
    ///
    /// # Errors
    ///
    /// What the system says; a folder, a pipe or a device is `InvalidInput`.
    pub fn open(path: &Path, io: Io) -> io::Result<FileBytes> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        let storage = match io {
            // An empty file cannot be mapped everywhere, and has nothing to map.
            Io::Map if metadata.len() > 0 => match map(&file) {
                Ok(map) => Storage::Mapped(map),
                Err(_) => Storage::Held(read(&mut file)?),
            },
            Io::Map | Io::Pread => Storage::Held(read(&mut file)?),
        };
        Ok(FileBytes { path: path.to_owned(), storage })
    }

    /// Bytes held in memory under a name for messages: for tests and for bundled files.
    pub fn from_vec(name: &str, bytes: Vec<u8>) -> FileBytes {
        FileBytes { path: PathBuf::from(name), storage: Storage::Held(bytes) }
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the bytes are mapped (false: held in memory).
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped(_))
    }

    /// Asks the system to bring `range` of a mapped file into the page cache soon. Only a hint.
    pub fn will_need(&self, offset: usize, len: usize) {
        if let Storage::Mapped(map) = &self.storage {
            // The advice may be refused, and then nothing is lost.
            let _ = map.advise_range(memmap2::Advice::WillNeed, offset, len);
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.storage {
            Storage::Mapped(map) => map,
            Storage::Held(bytes) => bytes,
        }
    }
}

fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and private to readers; this tool never truncates a file in place (it
    // writes beside and renames), so the bytes change under us only when a stranger does it, which at worst
    // yields other bytes (all readers check them) or SIGBUS (handled by the command line).
    unsafe { Mmap::map(file) }
}

fn read(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}
