//! A whole file as read-only bytes: mapped, or read into memory where a map is unwanted or impossible.
//!
//! The `unsafe` of this module is the map itself and the handler of SIGBUS, which a file raises that somebody cuts
//! while it is mapped: [`end_on_lost_pages`] makes of it one line and exit code 2. Writers of this tool never cut a
//! file: they write beside and rename.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::ops::{Deref, Range};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

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
    // Dropped in this order: no page of a marked range is ever another file's.
    Mapped { _mark: Mark, map: Mmap },
    Held(Vec<u8>),
}

/// What a file was when it was opened. Content that changes later changes one of these, or is a stranger's trick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// The bytes of one regular file, read-only, with the path for messages.
#[derive(Debug)]
pub struct FileBytes {
    path: PathBuf,
    storage: Storage,
    /// `None` for bytes that come from no file.
    identity: Option<Identity>,
    /// What the system said when it was to be mapped and could not be.
    refused: Option<io::Error>,
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
        let (storage, refused) = match io {
            // An empty file cannot be mapped everywhere, and has nothing to map.
            Io::Map if metadata.len() > 0 => match map(&file) {
                Ok(map) => (Storage::Mapped { _mark: Mark::new(&map, path), map }, None),
                Err(error) if cannot_map(&error) => (Storage::Held(read(&mut file)?), Some(error)),
                Err(error) => return Err(error),
            },
            Io::Map | Io::Pread => (Storage::Held(read(&mut file)?), None),
        };
        let identity = Some(Identity::of(&metadata));
        Ok(FileBytes { path: path.to_owned(), storage, identity, refused })
    }

    /// Bytes held in memory under a name for messages: for tests and for bundled files.
    pub fn from_vec(name: &str, bytes: Vec<u8>) -> FileBytes {
        let storage = Storage::Held(bytes);
        FileBytes { path: PathBuf::from(name), storage, identity: None, refused: None }
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the bytes are mapped (false: held in memory).
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped { .. })
    }

    /// One line where the file was to be mapped and had to be read into memory instead.
    pub fn note(&self) -> Option<String> {
        let (path, len) = (self.path.display(), crate::units::Bytes(self.len() as u64));
        let refused = self.refused.as_ref()?;
        Some(format!("note: {path} cannot be mapped ({refused}): its {len} are read into memory"))
    }

    /// Looks at the path again: it must still be the file that was opened, as long and as old as it was then.
    ///
    /// # Errors
    ///
    /// What has changed, or what the system says.
    pub fn check_unchanged(&self) -> io::Result<()> {
        let Some(before) = self.identity else { return Ok(()) };
        let now = Identity::of(&fs::metadata(&self.path)?);
        let what = match now {
            now if now == before => return Ok(()),
            now if (now.device, now.inode) != (before.device, before.inode) => {
                "another file has its name now".to_owned()
            }
            now if now.len != before.len => format!("it is {} bytes, and was {}", now.len, before.len),
            _ => "it was written to".to_owned(),
        };
        Err(io::Error::other(format!("changed while it was read: {what}")))
    }

    /// Asks the system to bring `range` of a mapped file into the page cache soon. Only a hint.
    pub fn will_need(&self, offset: usize, len: usize) {
        if let Storage::Mapped { map, .. } = &self.storage {
            // The advice may be refused, and then nothing is lost.
            let _ = map.advise_range(memmap2::Advice::WillNeed, offset, len);
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.storage {
            Storage::Mapped { map, .. } => map,
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

/// Whether the file system is to blame, and reading would do: some network and FUSE mounts. A lack of addresses is
/// no such case; reading would want as many.
fn cannot_map(error: &io::Error) -> bool {
    let codes = [libc::ENODEV, libc::EINVAL, libc::EPERM, libc::EACCES, libc::EOPNOTSUPP, libc::ENOSYS];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn read(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes the loss of a mapped file's pages (cut by somebody, or a disk that fails) the end of the process: one line
/// on stderr that names the file, and exit code 2. For a command line; a library leaves signals to its user.
///
/// # Errors
///
/// What the system says.
pub fn end_on_lost_pages() -> io::Result<()> {
    // SAFETY: all bytes of `action` are set, zero being an empty mask; the handler has the signature that SA_SIGINFO
    // asks for, and does nothing that a signal handler may not.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_lost_page as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_lost_page(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo, which for SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    match slots().find(|slot| slot.range().contains(&address)) {
        // SAFETY: a slot with this address in its range belongs to a map that is being read, so its line is there
        // and stays. `write` and `_exit` may be called from a signal handler.
        Some(slot) => unsafe {
            let line = &*slot.line.load(Ordering::Acquire);
            libc::write(2, line.as_ptr().cast(), line.len());
            libc::_exit(2);
        },
        // None of ours: what would have happened without a handler happens when the access is repeated.
        // SAFETY: `signal` may be called from a signal handler.
        None => unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        },
    }
}

/// Addresses of one map, and what to say when they are lost. Slots are used again and never freed, so that a handler
/// can walk over them at any moment.
struct Slot {
    /// 0: free. 1: being filled.
    start: AtomicUsize,
    end: AtomicUsize,
    line: AtomicPtr<Vec<u8>>,
    next: AtomicPtr<Slot>,
}

/// The slot that was added last.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(std::ptr::null_mut());

impl Slot {
    fn range(&self) -> Range<usize> {
        let start = self.start.load(Ordering::Acquire);
        if start <= 1 { 0..0 } else { start..self.end.load(Ordering::Acquire) }
    }

    /// A slot that nobody else has.
    fn take() -> &'static Slot {
        let is_free =
            |slot: &&Slot| slot.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if let Some(slot) = slots().find(is_free) {
            return slot;
        }
        let slot: &'static Slot = Box::leak(Box::new(Slot {
            start: AtomicUsize::new(1),
            end: AtomicUsize::new(0),
            line: AtomicPtr::default(),
            next: AtomicPtr::default(),
        }));
        let add = |first: *mut Slot| {
            slot.next.store(first, Ordering::Release);
            Some(std::ptr::from_ref(slot).cast_mut())
        };
        // Always `Some`, so it cannot be refused.
        let _ = SLOTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        slot
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let at = |slot: &AtomicPtr<Slot>| {
        // SAFETY: null, or a slot that was leaked.
        unsafe { slot.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(at(&SLOTS), move |slot| at(&slot.next))
}

/// Keeps a map's addresses known to the handler as long as the map is there.
struct Mark(&'static Slot);

impl Mark {
    fn new(map: &Mmap, path: &Path) -> Mark {
        let name: String = path
            .display()
            .to_string()
            .chars()
            .map(|c| if c.is_control() { c.escape_default().collect() } else { c.to_string() })
            .collect();
        let line = format!(
            "error: {name}: was cut, or its disk failed, while it was read\n\
             hint: let no other program write to it; where that cannot be, `ork-run --io pread` reads it into memory \
             first\n"
        );
        let (slot, start) = (Slot::take(), map.as_ptr().addr());
        slot.line.store(Box::into_raw(Box::new(line.into_bytes())), Ordering::Release);
        slot.end.store(start + map.len(), Ordering::Release);
        slot.start.store(start, Ordering::Release);
        Mark(slot)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.start.store(1, Ordering::Release);
        let line = self.0.line.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: it came from `Box::into_raw`, and no handler reads it: who drops the map does not read from it.
        drop(unsafe { Box::from_raw(line) });
        self.0.start.store(0, Ordering::Release);
    }
}

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Mark").field(&self.0.range()).finish()
    }
}
