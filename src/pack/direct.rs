//! Writing past the page cache, by a thread of its own: the processor neither copies what it has made into the cache, nor
//! are the pages of others driven out of it. Not every file system can; then the same thread writes as usual.
//!
//! Such writes begin and end at multiples of a block, in memory and in the file. So bytes that follow each other are
//! gathered in aligned buffers; what is no whole block at the ends of a run goes through the cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rustix::io::Errno;

use super::wide;

/// What starts and lengths are multiples of: no disk asks for more.
const ALIGNMENT: usize = 4096;

/// Bytes of a buffer.
const BUFFER: usize = 4 << 20;

/// Buffers: one that is filled, one that is written, one in between.
const BUFFERS: usize = 3;

/// Bytes from a place in a file to the next one where a block begins; as many as a block has, where one begins there.
pub(super) fn to_block(at: u64) -> usize {
    ALIGNMENT - (at % wide(ALIGNMENT)) as usize
}

/// Memory whose bytes begin at a multiple of [`ALIGNMENT`].
#[derive(Debug)]
struct Buffer {
    memory: Vec<u8>,
    first: usize,
    len: usize,
}

impl Buffer {
    fn new() -> Buffer {
        let memory = vec![0; BUFFER + ALIGNMENT];
        let first = memory.as_ptr().align_offset(ALIGNMENT);
        Buffer { memory, first, len: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.first..self.first + self.len]
    }

    /// Takes as many bytes as fit and says how many.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(BUFFER - self.len);
        let at = self.first + self.len;
        self.memory[at..at + n].copy_from_slice(&bytes[..n]);
        self.len += n;
        n
    }
}

/// The buffers of one file, and the thread that writes them.
#[derive(Debug)]
pub(super) struct Direct {
    /// The buffer being filled, and where it goes.
    now: Option<(u64, Buffer)>,
    free: Receiver<Buffer>,
    full: SyncSender<(u64, Buffer)>,
    /// Ends at the first write that fails.
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Direct {
    /// Begins for `file`, which is at `path`. `None` where the file system does not write past the cache, or there is no
    /// thread to be had.
    pub fn start(file: &File, path: &Path) -> Option<Direct> {
        let flags = libc::O_DIRECT | libc::O_NOFOLLOW;
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(path).ok()?;
        let (ours, there) = (file.metadata().ok()?, direct.metadata().ok()?);
        if (ours.dev(), ours.ino()) != (there.dev(), there.ino()) {
            return None;
        }
        let usual = file.try_clone().ok()?;
        let (full, filled) = sync_channel::<(u64, Buffer)>(BUFFERS);
        let (done, free) = sync_channel(BUFFERS);
        (0..BUFFERS).try_for_each(|_| done.send(Buffer::new())).ok()?;
        let write = move || {
            for (at, mut buffer) in filled {
                write(&direct, &usual, buffer.bytes(), at)?;
                buffer.len = 0;
                // Nobody waits for it where the file has ended.
                let _ = done.send(buffer);
            }
            Ok(())
        };
        let thread = thread::Builder::new().name("write".to_owned()).spawn(write).ok()?;
        Some(Direct { now: None, free, full, thread: Some(thread) })
    }

    /// Takes some bytes for this place in the file and says how many. `None` where they begin a run and no block begins
    /// with them.
    ///
    /// # Errors
    ///
    /// Those of any write before.
    pub fn take(&mut self, file: &File, at: u64, bytes: &[u8]) -> io::Result<Option<usize>> {
        let follows = |(start, buffer): &(u64, Buffer)| start + wide(buffer.len) == at;
        if !self.now.as_ref().is_some_and(follows) {
            self.end_run(file)?;
            if !at.is_multiple_of(wide(ALIGNMENT)) {
                return Ok(None);
            }
            let buffer = self.free.recv().map_err(|_| self.failure())?;
            self.now = Some((at, buffer));
        }
        let Some((_, buffer)) = &mut self.now else { return Ok(None) };
        let n = buffer.take(bytes);
        if buffer.len == BUFFER {
            self.end_run(file)?;
        }
        Ok(Some(n))
    }

    /// Hands the buffer on. What is no whole block at its end goes through the cache.
    fn end_run(&mut self, file: &File) -> io::Result<()> {
        let Some((at, mut buffer)) = self.now.take() else { return Ok(()) };
        let whole = buffer.len - buffer.len % ALIGNMENT;
        file.write_all_at(&buffer.bytes()[whole..], at + wide(whole))?;
        buffer.len = whole;
        self.full.send((at, buffer)).map_err(|_| self.failure())
    }

    /// Why the thread has ended.
    fn failure(&mut self) -> io::Error {
        let ended = || io::Error::other("the writing thread has ended");
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) => error,
            _ => ended(),
        }
    }

    /// Writes what is left and waits for what is under way.
    ///
    /// # Errors
    ///
    /// The first that any write met.
    pub fn finish(mut self, file: &File) -> io::Result<()> {
        let ended = self.end_run(file);
        let Direct { full, thread, .. } = self;
        drop(full);
        let panicked = |_| Err(io::Error::other("the writing thread has panicked"));
        let written = thread.map_or(Ok(()), |thread| thread.join().unwrap_or_else(panicked));
        written.and(ended)
    }
}

/// Past the cache; through it where the file system takes the flag but not the write.
fn write(direct: &File, usual: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    match direct.write_all_at(bytes, at) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            usual.write_all_at(bytes, at)
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::{BUFFER, Direct};
    use crate::pack::partial::{Existing, LARGE, Partial};
    use crate::pack::writer::Sink;

    /// Runs of every kind: whole buffers and more, ends and beginnings between blocks, a run that goes on where one
    /// has ended, one before the others.
    #[test]
    fn a_file_written_past_the_cache_has_every_byte_at_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut partial = Partial::create(&path, Existing::Keep).unwrap();
        partial.reserve(LARGE).unwrap();
        let mut expected = vec![0u8; LARGE as usize];
        let mut byte = 0u32;
        let runs = [
            (4096, 2 * BUFFER + 5),
            (2 * BUFFER + 4101, 100),
            (3 * BUFFER + 7, 5000),
            (3 * BUFFER + 8192, BUFFER),
            (4 * BUFFER + 8192, BUFFER + 1),
            (8 * BUFFER, 4096),
            (9 * BUFFER, 5),
            (0, 4096),
            (10 * BUFFER + 1, 3 * BUFFER),
        ];
        for (at, len) in runs {
            partial.seek(SeekFrom::Start(at as u64)).unwrap();
            for piece in expected[at..at + len].chunks_mut(1_000_003) {
                for to in piece.iter_mut() {
                    byte = byte.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *to = (byte >> 24) as u8;
                }
                partial.write_all(piece).unwrap();
            }
        }
        partial.commit().unwrap();
        assert!(std::fs::read(&path).unwrap() == expected, "another byte");
    }

    #[test]
    fn a_write_that_fails_is_told_to_who_writes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "").unwrap();
        let reading = std::fs::File::open(&path).unwrap();
        // Nowhere to write past the cache, or a thread that finds no room at the end of all files.
        let Some(mut direct) = Direct::start(&reading, &path) else { return };
        let beyond = i64::MAX as u64 / 4096 * 4096;
        let bytes = vec![1; BUFFER];
        let failed = (0..100).find_map(|_| direct.take(&reading, beyond, &bytes).err());
        assert!(failed.is_some_and(|error| error.raw_os_error().is_some()));
    }
}
