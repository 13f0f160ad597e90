//! The file an output is written to before it bears its name: `<output>.partial`, locked, full length at once.
//!
//! Whoever holds the lock owns the partial file, so two conversions cannot meet in one, and what a dead
//! process left behind is cleared by the next. The output's name appears only when all bytes are on the disk.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::fs::{CWD, FallocateFlags, FlockOperation, RenameFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::direct::{Direct, to_block};
use super::writer::Sink;
use super::{PackError, wide};
use crate::units::Bytes;

/// What becomes of an output that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and writing is refused.
    Keep,
    /// It is replaced, by a rename: who has it mapped keeps the old bytes.
    Replace,
}

/// The longest name of a file that Linux takes, in bytes.
const NAME_MAX: usize = 255;

/// The disk is set to work whenever so many bytes more were written, rather than with all of them at the end.
const FLUSHED_AT_ONCE: usize = 64 << 20;

/// Files of so many bytes and more are written past the page cache.
pub(super) const LARGE: u64 = 64 << 20;

/// The partial files of this process.
static OPEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn open_partials() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every partial file of this process, which is about to end: nothing of its work is left then.
pub fn discard_partials() {
    for path in open_partials().iter() {
        // Where this fails, the next conversion clears it.
        let _ = fs::remove_file(path);
    }
}

/// A locked partial file. Dropped before it is committed, it is removed.
#[derive(Debug)]
pub struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    existing: Existing,
    committed: bool,
    /// Where the next byte goes.
    at: u64,
    direct: Option<Direct>,
    flusher: Option<Flusher>,
    /// Bytes written through the page cache since the flusher was last woken.
    unflushed: usize,
}

/// A thread that brings bytes to the disk while others are written.
#[derive(Debug)]
struct Flusher {
    wake: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Flusher {
    /// `None` where no thread is to be had: the end of the file is time enough.
    fn start(file: &File) -> Option<Flusher> {
        let file = file.try_clone().ok()?;
        let (wake, woken) = sync_channel(1);
        let flush = move || woken.iter().try_for_each(|()| file.sync_data());
        Some(Flusher { wake, thread: thread::Builder::new().name("flush".to_owned()).spawn(flush).ok()? })
    }

    /// Waits for what is under way. An error is told once for all copies of a file, and it may be here.
    fn join(self) -> io::Result<()> {
        drop(self.wake);
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the flushing thread has panicked")))
    }
}

impl Partial {
    /// Opens and locks `<target>.partial`, in place of one that nobody writes any more.
    ///
    /// # Errors
    ///
    /// [`PackError::Exists`] when the target is there and is to be kept, [`PackError::Busy`] when another
    /// conversion writes to it, [`PackError::Io`] when the folder does not let us, or the target is something else
    /// than a file.
    pub fn create(target: &Path, existing: Existing) -> Result<Partial, PackError> {
        Partial::with_mode(target, existing, 0o644)
    }

    /// As [`Partial::create`], for nobody else to read.
    ///
    /// # Errors
    ///
    /// As [`Partial::create`].
    pub fn create_private(target: &Path, existing: Existing) -> Result<Partial, PackError> {
        Partial::with_mode(target, existing, 0o600)
    }

    fn with_mode(target: &Path, existing: Existing, mode: u32) -> Result<Partial, PackError> {
        let is_folder = target.is_dir() || target.as_os_str().as_bytes().ends_with(b"/");
        if existing == Existing::Keep && !is_folder && target.symlink_metadata().is_ok() {
            return Err(PackError::Exists { path: target.to_owned() });
        }
        let refuse = |source| Err(PackError::Io { what: "write", path: target.to_owned(), source });
        if is_folder {
            return refuse(io::ErrorKind::IsADirectory.into());
        }
        // A name that a rename would take away from a device or a pipe.
        if target.metadata().is_ok_and(|there| !there.is_file()) {
            return refuse(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        let path = partial_path(target);
        let file = open_locked(&path, mode)?;
        open_partials().insert(path.clone());
        Ok(Partial {
            file,
            path,
            target: target.to_owned(),
            existing,
            committed: false,
            at: 0,
            direct: None,
            flusher: None,
            unflushed: 0,
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    fn free(&self) -> u64 {
        rustix::fs::fstatvfs(&self.file).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
    }

    fn no_space(&self, needed: u64, free: u64) -> PackError {
        PackError::NoSpace { needed: Bytes(needed), free: Bytes(free), thin: None }
    }

    fn rename(&self) -> rustix::io::Result<()> {
        let flags = match self.existing {
            Existing::Keep => RenameFlags::NOREPLACE,
            Existing::Replace => return rustix::fs::rename(&self.path, &self.target),
        };
        match rustix::fs::renameat_with(CWD, &self.path, CWD, &self.target, flags) {
            // Not every file system knows the flag; the lock keeps out our own kind all the same.
            Err(Errno::INVAL | Errno::NOSYS) if self.target.symlink_metadata().is_err() => {
                rustix::fs::rename(&self.path, &self.target)
            }
            done => done,
        }
    }
}

impl Sink for Partial {
    type Done = ();

    /// Takes the whole length from the file system now, so that a full disk is known before the work.
    fn reserve(&mut self, len: u64) -> Result<(), PackError> {
        if len == 0 {
            return Ok(());
        }
        // Going over this limit would end the process by a signal.
        if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current.filter(|limit| len > *limit)
        {
            return Err(self.no_space(len, limit));
        }
        let free = self.free();
        // Some network file systems report no size at all; they are simply tried.
        if free < len && rustix::fs::fstatvfs(&self.file).is_ok_and(|fs| fs.f_blocks > 0) {
            return Err(self.no_space(len, free));
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.file.set_len(len).map_err(|e| self.explain(e, len))?;
            }
            Err(e) => return Err(self.explain(e.into(), len)),
        }
        if len >= LARGE {
            self.direct = Direct::start(&self.file, &self.path);
        }
        Ok(())
    }

    fn explain(&self, error: io::Error, needed: u64) -> PackError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => self.no_space(needed, self.free()),
            _ => PackError::Io { what: "write", path: self.path.clone(), source: error },
        }
    }

    /// Brings the bytes to the disk, then gives them their name.
    fn commit(mut self) -> Result<(), PackError> {
        let failed = |what, path: &Path, source| PackError::Io { what, path: path.to_owned(), source };
        let written = self.direct.take().map_or(Ok(()), |direct| direct.finish(&self.file));
        written.map_err(|e| failed("write", &self.path, e))?;
        let flushed = self.flusher.take().map_or(Ok(()), Flusher::join);
        flushed.and_then(|()| self.file.sync_all()).map_err(|e| failed("flush", &self.path, e))?;
        match self.rename() {
            Ok(()) => self.committed = true,
            Err(Errno::EXIST) => return Err(PackError::Exists { path: self.target.clone() }),
            Err(e) => return Err(failed("rename to", &self.target, e.into())),
        }
        sync_folder(&self.target).map_err(|e| failed("flush the folder of", &self.target, e))
    }
}

impl Partial {
    /// Writes through the page cache at the place that is due.
    fn write_usually(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write_at(bytes, self.at)?;
        self.unflushed += n;
        if self.unflushed >= FLUSHED_AT_ONCE {
            self.unflushed = 0;
            self.flusher = self.flusher.take().or_else(|| Flusher::start(&self.file));
            if let Some(flusher) = &self.flusher {
                // Whether it is still busy or has met an error: the end of the file sees to both.
                let _ = flusher.wake.try_send(());
            }
        }
        Ok(n)
    }
}

impl Write for Partial {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = match &mut self.direct {
            Some(direct) => direct.take(&self.file, self.at, bytes)?,
            None => None,
        };
        let n = match taken {
            Some(n) => n,
            // Only up to the next block where there is a direct way from there on.
            None if self.direct.is_some() => {
                self.write_usually(&bytes[..bytes.len().min(to_block(self.at))])?
            }
            None => self.write_usually(bytes)?,
        };
        self.at += wide(n);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Partial {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, by) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(by) => (self.at, by),
            SeekFrom::End(by) => (self.file.metadata()?.len(), by),
        };
        let before = || io::Error::new(io::ErrorKind::InvalidInput, "a place before the file's beginning");
        self.at = from.checked_add_signed(by).ok_or_else(before)?;
        Ok(self.at)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.committed {
            // Still locked, so it is ours. Where even this fails, the next conversion clears it.
            let _ = fs::remove_file(&self.path);
        }
        open_partials().remove(&self.path);
    }
}

/// `<name>.partial`; a digest of the name where that would be too long for a name.
fn partial_path(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default();
    let mut partial = name.to_owned();
    partial.push(".partial");
    if partial.len() > NAME_MAX {
        partial = format!("{}.partial", blake3::hash(name.as_bytes()).to_hex()).into();
    }
    target.with_file_name(partial)
}

/// Opens and locks a fresh file at `path`.
fn open_locked(path: &Path, mode: u32) -> Result<File, PackError> {
    let failed = |e| PackError::Io { what: "create", path: path.to_owned(), source: e };
    let busy = || PackError::Busy { path: path.to_owned() };
    loop {
        let file = open(OpenOptions::new().create(true), path, mode).map_err(failed)?;
        lock(&file, busy, failed)?;
        // Between opening and locking, the one before us may have renamed or removed what we opened.
        let ours = file.metadata().map_err(failed)?;
        match fs::symlink_metadata(path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {}
            _ => continue,
        }
        if ours.len() == 0 {
            return Ok(file);
        }
        // Left by a process that is gone. A new file, since nothing of ours shrinks a file in place; the old
        // one stays locked until the new one is.
        fs::remove_file(path).map_err(failed)?;
        match open(OpenOptions::new().create_new(true), path, mode) {
            Ok(fresh) => {
                lock(&fresh, busy, failed)?;
                return Ok(fresh);
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(busy()),
            Err(e) => return Err(failed(e)),
        }
    }
}

fn open(options: &mut OpenOptions, path: &Path, mode: u32) -> io::Result<File> {
    // Not through a link: it might lead to a file that is not ours to lock and clear.
    options.read(true).write(true).mode(mode).custom_flags(libc::O_NOFOLLOW).open(path)
}

fn lock(
    file: &File,
    busy: impl Fn() -> PackError,
    failed: impl Fn(io::Error) -> PackError,
) -> Result<(), PackError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(busy()),
        // File systems without locks: the name alone keeps conversions apart.
        Err(Errno::NOTSUP | Errno::NOLCK | Errno::NOSYS) => Ok(()),
        Err(e) => Err(failed(e.into())),
    }
}

/// Makes the new name durable.
fn sync_folder(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match File::open(folder)?.sync_all() {
        // Some network file systems cannot flush a folder.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
        done => done,
    }
}
