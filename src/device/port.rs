//! What the NPU's code needs of a driver: buffers with addresses, submissions, and waiting for them.
//!
//! Small on purpose: the vendor kernel, the mainline kernel and the software NPU all offer it. No slice of device
//! memory outlives a call, because another process image, a copy or a register window may be behind it. A port
//! decides nothing and repeats nothing.

use std::io;
use std::ops::Range;
use std::time::Duration;

use thiserror::Error;

pub mod sim;

/// A buffer of a port. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u64);

/// A buffer that both sides see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its number.
    pub id: BufferId,
    /// Where the device sees it.
    pub iova: u32,
    /// The domain in which it does.
    pub domain: u32,
    /// Bytes asked for. The mapping is rounded up to whole pages.
    pub bytes: u64,
}

/// Which side is to see what the other wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The device sees what the CPU wrote.
    ToDevice,
    /// The CPU sees what the device wrote.
    FromDevice,
}

/// Work for one core: tasks of the submission's task buffer, chained by their programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreTasks {
    /// Which core.
    pub core: u32,
    /// Its first task.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// Work for several cores at once; complete when all of them are.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The domain in which every address is.
    pub domain: u32,
    /// The buffer of 40-byte tasks.
    pub tasks: BufferId,
    /// Who does which of them; at most one entry per core.
    pub cores: &'a [CoreTasks],
    /// Buffers that are read: programs, activations, weights.
    pub inputs: &'a [BufferId],
    /// Buffers that are written.
    pub outputs: &'a [BufferId],
}

/// A submission under way.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// Counters of a port, for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Clock {
    /// Submissions and domain switches, microseconds by the profile; 0 on hardware.
    pub run_us: f64,
    /// Creation of buffers, microseconds by the profile; 0 on hardware.
    pub create_us: f64,
    /// Changes of the active domain.
    pub switches: u64,
}

/// What a driver says when it does not do what it was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PortError {
    /// No gap in the domain's addresses (EFAULT at creation). Nothing is left behind.
    #[error("domain {domain} has no {bytes} bytes of addresses left (EFAULT)")]
    NoIova {
        /// The domain.
        domain: u32,
        /// Bytes asked for.
        bytes: u64,
    },
    /// No pages (ENOMEM at creation).
    #[error("no memory for a buffer of {bytes} bytes (ENOMEM)")]
    NoMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The domain, or the buffer, cannot be had while jobs run (EINVAL).
    #[error("domain {domain} is wanted while jobs run in domain {active} (EINVAL)")]
    Busy {
        /// Wanted.
        domain: u32,
        /// Where jobs run.
        active: u32,
    },
    /// The job did not end in time (ETIMEDOUT). The port wants a reset.
    #[error("submission {ticket} did not end in time (ETIMEDOUT)")]
    TimedOut {
        /// Which.
        ticket: u64,
    },
    /// The job was accepted and never executed. The port wants a reset.
    #[error("submission {ticket} was accepted and never ran")]
    NeverRan {
        /// Which.
        ticket: u64,
    },
    /// A submission that is refused (EINVAL): a core, a count or a buffer that is not there.
    #[error("submission refused (EINVAL): {0}")]
    Refused(String),
    /// A program that the software NPU does not understand. Silicon would compute something else, or hang.
    #[error("program {program}: {reason}")]
    Program {
        /// Which program of the core's chain.
        program: u32,
        /// What is wrong.
        reason: String,
    },
    /// No such buffer, or no longer.
    #[error("buffer {0} does not exist")]
    NoBuffer(u64),
    /// Bytes outside the buffer.
    #[error("bytes {start} to {end} of a buffer of {bytes}")]
    OutOfBuffer {
        /// First.
        start: u64,
        /// One past the last.
        end: u64,
        /// Bytes of the buffer.
        bytes: u64,
    },
    /// What the writer of [`Port::fill`] said.
    #[error("writing into a device buffer: {0}")]
    Fill(#[source] io::Error),
    /// Anything else that the system says.
    #[error("the NPU's driver: {0}")]
    System(#[source] io::Error),
}

/// A driver of the NPU.
pub trait Port: Send {
    /// `sim`, …
    fn name(&self) -> &'static str;

    /// Creates and maps a buffer of `bytes` (more than 0). Its contents are unknown.
    ///
    /// # Errors
    ///
    /// [`PortError::NoIova`], [`PortError::NoMemory`], [`PortError::Busy`].
    fn create(&mut self, bytes: u64, domain: u32) -> Result<Buffer, PortError>;

    /// Lets `writer` write `range` of a buffer. The device sees it after [`Port::sync`].
    ///
    /// # Errors
    ///
    /// [`PortError::Fill`], [`PortError::OutOfBuffer`], [`PortError::Busy`] while a job uses the buffer.
    fn fill(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        writer: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), PortError>;

    /// Shows `range` of a buffer to `reader`, as the CPU sees it: what the device wrote only after [`Port::sync`].
    ///
    /// # Errors
    ///
    /// [`PortError::OutOfBuffer`].
    fn read(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        reader: &mut dyn FnMut(&[u8]),
    ) -> Result<(), PortError>;

    /// Makes one side see what the other wrote. Makes the buffer's domain the active one.
    ///
    /// # Errors
    ///
    /// [`PortError::Busy`] while jobs run in another domain.
    fn sync(&mut self, buffer: BufferId, range: Range<u64>, direction: Direction) -> Result<(), PortError>;

    /// Starts work. Makes its domain the active one.
    ///
    /// # Errors
    ///
    /// [`PortError::Refused`], [`PortError::Busy`].
    fn submit(&mut self, submission: &Submission<'_>) -> Result<Ticket, PortError>;

    /// Waits for a submission.
    ///
    /// # Errors
    ///
    /// [`PortError::TimedOut`] and [`PortError::NeverRan`], after which the port wants a [`Port::reset`].
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<(), PortError>;

    /// Stops what runs and makes the device ready again. Buffers keep their places.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn reset(&mut self) -> Result<(), PortError>;

    /// Unmaps a buffer and gives its addresses back.
    ///
    /// # Errors
    ///
    /// [`PortError::NoBuffer`], [`PortError::Busy`].
    fn destroy(&mut self, buffer: BufferId) -> Result<(), PortError>;

    /// Counters, where the port keeps any.
    fn clock(&self) -> Clock {
        Clock::default()
    }
}
