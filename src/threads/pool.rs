//! The pool itself: who waits for whom, and the only `unsafe` of this module.
//!
//! A job is a list of phases, each a number of pieces. Pieces of all phases are numbered through and claimed
//! in order from one counter; a piece of a later phase waits until every earlier piece is done. As claimed
//! pieces are always being worked on, nobody waits for a thread that has not come: a worker that wakes late
//! finds the gate shut and sleeps on, and a busy machine slows a job down without stopping it.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::hint;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::cpus::Cpus;

/// One phase: how many pieces, and what a piece does.
type Phase<'a> = (usize, &'a (dyn Fn(usize) + Sync));

/// How long an idle worker looks for the next job before it sleeps: longer than the pause between two
/// dispatches of one token, too short to be seen on a power meter.
const SPIN: Duration = Duration::from_micros(40);

/// Persistent threads that run the pieces of one job at a time. The thread that calls takes part.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// Held by the thread whose job is running.
    turn: Mutex<()>,
}

struct Worker {
    thread: Thread,
    asleep: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

/// The running job, its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    phases: *const [Phase<'static>],
    n_pieces: usize,
}

/// The gate word: number of the job in the high half, then the shut bit, then how many workers are inside.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Gate(u64);

impl Gate {
    const SHUT: u64 = 1 << 31;

    fn opened_after(self) -> Gate {
        Gate((u64::from(self.job()).wrapping_add(1)) << 32)
    }

    fn job(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_open(self) -> bool {
        self.0 & Self::SHUT == 0
    }

    fn inside(self) -> u64 {
        self.0 & (Self::SHUT - 1)
    }
}

/// Keeps the words that everybody writes out of each other's cache lines.
#[repr(align(128))]
struct Apart<T>(T);

struct Shared {
    gate: Apart<AtomicU64>,
    /// The next unclaimed piece.
    next: Apart<AtomicUsize>,
    /// Pieces done.
    done: Apart<AtomicUsize>,
    job: UnsafeCell<Job>,
    failed: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    spin: Duration,
}

// SAFETY: `job` is written only by the holder of `Pool::turn` while the gate is shut with nobody inside, and
// read only by threads inside an open gate; the gate's release and acquire order the two. What its pointer
// leads to is `Sync` and outlives the job, for the caller stays until everyone has left.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it belongs to one thread.
unsafe impl Send for Shared {}

thread_local! {
    /// Whether this thread is inside a piece: then a further job runs right here.
    static IN_PIECE: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool of `n_threads` threads, the caller's included; 0 counts as 1.
    ///
    /// Where the system refuses a thread the pool is smaller. On chips whose CPUs differ the workers keep to
    /// the fastest ones, unless there are more threads than those.
    pub fn new(n_threads: usize) -> Pool {
        let cpus = Arc::new(Cpus::detect());
        let crowded = n_threads > cpus.n_threads;
        let shared = Arc::new(Shared {
            gate: Apart(AtomicU64::new(Gate::SHUT)),
            next: Apart(AtomicUsize::new(0)),
            done: Apart(AtomicUsize::new(0)),
            job: UnsafeCell::new(Job { phases: &[], n_pieces: 0 }),
            failed: AtomicBool::new(false),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            // Spinning threads beyond the CPUs would only keep each other from working.
            spin: if crowded { Duration::ZERO } else { SPIN },
        });
        let workers = (1..n_threads)
            .map_while(|i| {
                let (shared, asleep) = (Arc::clone(&shared), Arc::new(AtomicBool::new(false)));
                let cpus = (!crowded).then(|| Arc::clone(&cpus));
                let body = {
                    let asleep = Arc::clone(&asleep);
                    move || {
                        if let Some(cpus) = cpus {
                            cpus.pin_this_thread();
                        }
                        shared.serve(&asleep);
                    }
                };
                let handle = thread::Builder::new().name(format!("pool-{i}")).spawn(body).ok()?;
                Some(Worker { thread: handle.thread().clone(), asleep, handle: Some(handle) })
            })
            .collect();
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    /// The number of threads that pays on this machine: the CPUs allowed by affinity and cgroup quota, and of
    /// those only the fastest where they differ (4 on an RK3588). At least 1.
    pub fn default_threads() -> usize {
        Cpus::detect().n_threads
    }

    /// Threads of this pool, the caller's included.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `piece(0)` to `piece(n_pieces - 1)`, each once, in any order, on any threads; returns when all
    /// are done and what they wrote is visible here.
    ///
    /// Callers on several threads take turns. A call from inside a piece runs on the calling thread alone.
    ///
    /// # Panics
    ///
    /// With a piece's panic, after the running pieces have ended; the rest is then left out.
    pub fn run(&self, n_pieces: usize, piece: &(dyn Fn(usize) + Sync)) {
        self.run_phases(&[(n_pieces, piece)]);
    }

    /// Runs several phases in one dispatch: all pieces of one are done before any of the next begins, and
    /// what they wrote is visible there. Otherwise as [`Pool::run`].
    ///
    /// # Panics
    ///
    /// As [`Pool::run`].
    pub fn run_phases(&self, phases: &[Phase<'_>]) {
        let n_pieces: usize = phases.iter().map(|phase| phase.0).sum();
        if self.workers.is_empty() || n_pieces <= 1 || IN_PIECE.get() {
            phases.iter().for_each(|&(n, piece)| (0..n).for_each(piece));
            return;
        }
        let turn = lock(&self.turn);
        let panic = self.dispatch(phases, n_pieces);
        drop(turn);
        if let Some(payload) = panic {
            panic::resume_unwind(payload);
        }
    }

    fn dispatch(&self, phases: &[Phase<'_>], n_pieces: usize) -> Option<Box<dyn Any + Send>> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is followed only by threads inside the gate, and this
        // function does not return (nor unwind: `work` catches) before the gate is shut and empty.
        let phases = unsafe { std::mem::transmute::<*const [Phase<'_>], *const [Phase<'static>]>(phases) };
        let job = Job { phases, n_pieces };
        // SAFETY: this thread holds the turn and the gate is shut and empty, so nobody reads the cell.
        unsafe { *shared.job.get() = job };
        shared.next.0.store(0, Ordering::Relaxed);
        shared.done.0.store(0, Ordering::Relaxed);
        shared.failed.store(false, Ordering::Relaxed);
        let opened = Gate(shared.gate.0.load(Ordering::Relaxed)).opened_after();
        // Sequentially consistent, against the order in `sleep`: either we see the worker asleep or it sees
        // the open gate.
        shared.gate.0.store(opened.0, Ordering::SeqCst);
        for worker in self.workers.iter().take(n_pieces - 1) {
            if worker.asleep.load(Ordering::SeqCst) && worker.asleep.swap(false, Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        shared.work(job);
        shared.gate.0.fetch_or(Gate::SHUT, Ordering::AcqRel);
        wait_until(|| Gate(shared.gate.0.load(Ordering::Acquire)).inside() == 0);
        lock(&shared.panic).take()
    }
}

impl Shared {
    /// What a worker does all its life.
    fn serve(&self, asleep: &AtomicBool) {
        let mut seen = 0;
        while let Some(gate) = self.next_open_gate(seen, asleep) {
            seen = gate.job();
            if self.enter(gate) {
                // SAFETY: inside the open gate, so the cell is not written until this thread has left.
                let job = unsafe { *self.job.get() };
                self.work(job);
                self.gate.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Waits for a job other than `seen`, spinning first, then asleep; `None` when the pool ends.
    fn next_open_gate(&self, seen: u32, asleep: &AtomicBool) -> Option<Gate> {
        let mut since = Instant::now();
        loop {
            for _ in 0..16 {
                let gate = Gate(self.gate.0.load(Ordering::Acquire));
                if gate.is_open() && gate.job() != seen {
                    return Some(gate);
                }
                hint::spin_loop();
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if since.elapsed() >= self.spin {
                self.sleep(seen, asleep);
                since = Instant::now();
            }
        }
    }

    fn sleep(&self, seen: u32, asleep: &AtomicBool) {
        asleep.store(true, Ordering::SeqCst);
        let gate = Gate(self.gate.0.load(Ordering::SeqCst));
        let called = gate.is_open() && gate.job() != seen;
        // Whoever wakes us clears the flag; a wake-up without cause only costs another round of spinning.
        if !called && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }

    /// Steps inside, unless the gate has been shut meanwhile.
    fn enter(&self, mut gate: Gate) -> bool {
        let job = gate.job();
        while gate.is_open() && gate.job() == job {
            match self.gate.0.compare_exchange_weak(gate.0, gate.0 + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => gate = Gate(now),
            }
        }
        false
    }

    /// Claims pieces until none is left.
    fn work(&self, job: Job) {
        // SAFETY: the caller is the job's owner or inside the gate, so the phases are alive.
        let phases = unsafe { &*job.phases };
        let (mut phase, mut first) = (0, 0);
        loop {
            let i = self.next.0.fetch_add(1, Ordering::Relaxed);
            if i >= job.n_pieces {
                return;
            }
            while i - first >= phases[phase].0 {
                first += phases[phase].0;
                phase += 1;
            }
            if first > 0 {
                wait_until(|| self.done.0.load(Ordering::Acquire) >= first);
            }
            if !self.failed.load(Ordering::Relaxed) {
                self.piece(phases[phase].1, i - first);
            }
            self.done.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Runs one piece; a panic is kept for the caller and makes the others skip what is left.
    fn piece(&self, piece: &(dyn Fn(usize) + Sync), i: usize) {
        IN_PIECE.set(true);
        let result = panic::catch_unwind(AssertUnwindSafe(|| piece(i)));
        IN_PIECE.set(false);
        if let Err(payload) = result {
            self.failed.store(true, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches every panic, so there is none to hear of.
                let _ = handle.join();
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("n_threads", &self.n_threads()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spins, then lets others run: the thread we wait for may need this very CPU.
fn wait_until(mut ready: impl FnMut() -> bool) {
    let mut rounds = 0u32;
    while !ready() {
        if rounds < 1000 {
            rounds += 1;
            hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
}

/// Some rows and a range of columns of a row-major matrix, to be written by one piece of a job.
///
/// Patches are made by [`Patch::cut`] alone, which sees to it that no two of them overlap; so each may go to
/// a thread of its own although all lie in one slice.
#[derive(Debug)]
pub struct Patch<'a> {
    matrix: *mut f32,
    n_cols: usize,
    rows: &'a [u32],
    cols: Range<usize>,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: a patch is an exclusive borrow of its elements, as `&mut [f32]` is, and `cut` never makes two
// patches that share one.
unsafe impl Send for Patch<'_> {}

impl<'a> Patch<'a> {
    /// Cuts `matrix`, `[_, n_cols]`, into patches: each group of rows by itself, `width` columns at a time.
    ///
    /// `None` when the length is no multiple of `n_cols`, a row is not there, or a row is named twice.
    pub fn cut(
        matrix: &'a mut [f32],
        n_cols: usize,
        groups: &[(&'a [u32], usize)],
    ) -> Option<Vec<Patch<'a>>> {
        if n_cols == 0 || !matrix.len().is_multiple_of(n_cols) {
            return None;
        }
        let mut taken = vec![false; matrix.len() / n_cols];
        let mut patches = Vec::new();
        let pointer = matrix.as_mut_ptr();
        for &(rows, width) in groups {
            for &row in rows {
                if std::mem::replace(taken.get_mut(row as usize)?, true) {
                    return None;
                }
            }
            patches.extend((0..n_cols).step_by(width.max(1)).map(|first| Patch {
                matrix: pointer,
                n_cols,
                rows,
                cols: first..n_cols.min(first.saturating_add(width.max(1))),
                life: PhantomData,
            }));
        }
        Some(patches)
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.rows.len()
    }

    /// Which columns of the matrix.
    pub fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The `i`-th row of the patch: its columns of the matrix row that the group lists at `i`.
    ///
    /// # Panics
    ///
    /// When `i` is not below [`Patch::n_rows`]: a bug of the caller.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        let first = self.rows[i] as usize * self.n_cols + self.cols.start;
        // SAFETY: `cut` has checked that the row is in the matrix and in no other group, and that the columns
        // are in the row and in no other patch of the group; the borrow of `self` excludes a second call.
        unsafe { std::slice::from_raw_parts_mut(self.matrix.add(first), self.cols.len()) }
    }
}
