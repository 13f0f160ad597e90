//! The software NPU: the same buffers, addresses, programs and errors as a board's, without the board.
//!
//! It reads every register program again, word by word, and computes from the tiled bytes that the program points at.
//! So what a board would be told is what is tested here, against our reading of the hardware. It also keeps a
//! modelled clock (the profile's latencies and rates; never this host's time) and injects faults. It is strict where
//! silicon would be silent: bytes that were never synced, buffers that were not listed, registers that disagree.
//!
//! Jobs run when they are waited for; until then they are under way, and nothing may be touched in another domain.

mod decode;
mod execute;
mod iova;
mod memory;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{Buffer, BufferId, Clock, CoreTasks, Direction, Port, PortError, Submission, Ticket};
use crate::profile::DeviceProfile;
use crate::threads::Pool;
use memory::Memory;

/// What goes wrong, and when: numbers count from the injection on, 1 being the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The n-th creation finds no addresses (EFAULT); later ones do.
    NoIovaAtCreate(u64),
    /// The n-th creation finds no pages (ENOMEM); later ones do.
    NoMemoryAtCreate(u64),
    /// The n-th time that a domain is wanted, by a creation, a sync, a submission or a removal, it cannot be had
    /// (EINVAL); later it can.
    Busy(u64),
    /// The n-th submission is refused (EINVAL).
    Refused(u64),
    /// From the n-th submission on, nothing that is accepted ever runs.
    NeverRuns(u64),
    /// The n-th submission never runs; repeated after a reset, it does.
    Misses(u64),
    /// From the n-th submission on, results never arrive.
    StaleOutput(u64),
    /// From the n-th submission on, results are zeros.
    ZeroOutput(u64),
    /// The n-th submission does not end in time.
    TimeOut(u64),
    /// Weights are read with inputs and outputs of each block exchanged.
    WrongTileOrder,
    /// No other domain than the active one can be had.
    DomainBusy,
}

/// What was executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Buffers created, failures included.
    pub creates: u64,
    /// Times that a domain was wanted, failures included.
    pub claims: u64,
    /// Submissions, refused ones included.
    pub submissions: u64,
    /// Programs executed.
    pub programs: u64,
    /// Multiply-accumulates in them, padding included.
    pub macs: u64,
    /// Weight bytes that they read.
    pub weight_bytes: u64,
    /// Resets.
    pub resets: u64,
}

/// What the clock needs of the profile.
#[derive(Clone, Copy, Debug)]
struct Rates {
    bytes_per_us: f64,
    macs_per_us: f64,
    submit_us: f64,
    program_us: f64,
    switch_us: f64,
    create_us: f64,
}

/// A submission under way.
#[derive(Clone, Debug)]
struct Flight {
    number: u64,
    domain: u32,
    tasks: BufferId,
    cores: Vec<CoreTasks>,
    inputs: Vec<BufferId>,
    outputs: Vec<BufferId>,
}

/// The software NPU.
#[derive(Debug)]
pub struct Sim {
    memory: Memory,
    n_cores: u32,
    tasks_per_submit: u32,
    rates: Rates,
    active: u32,
    flights: Vec<Flight>,
    /// A job failed, and nothing runs before a reset.
    wedged: bool,
    faults: Vec<Fault>,
    counters: Counters,
    clock: Clock,
    pool: Option<Arc<Pool>>,
}

impl Sim {
    /// An NPU as the profile describes it: domains, ceiling, memory, cores, latencies and rates.
    pub fn new(profile: &DeviceProfile) -> Sim {
        let (memory, latency) = (&profile.memory, &profile.latency_us);
        Sim {
            memory: Memory::new(
                profile.domains(),
                memory.domain_bytes.value,
                memory.domain_ceiling_bytes.value,
                memory.ram_bytes.value,
            ),
            n_cores: profile.cores.count.value,
            tasks_per_submit: profile.cores.tasks_per_submit.value,
            rates: Rates {
                bytes_per_us: profile.rates.npu_bytes_per_s.value * profile.memory_share() / 1e6,
                macs_per_us: profile.rates.npu_macs_per_s.value / 1e6,
                submit_us: latency.submit.value,
                program_us: latency.program.value,
                switch_us: latency.domain_switch.value,
                create_us: latency.buffer_create.value,
            },
            active: 0,
            flights: Vec::new(),
            wedged: false,
            faults: Vec::new(),
            counters: Counters::default(),
            clock: Clock::default(),
            pool: None,
        }
    }

    /// The same, its products on the threads of a pool. What is modelled does not change.
    #[must_use]
    pub fn on(self, pool: Arc<Pool>) -> Sim {
        Sim { pool: Some(pool), ..self }
    }

    /// Makes something go wrong from now on.
    pub fn inject(&mut self, fault: Fault) {
        let Counters { creates, claims, submissions, .. } = self.counters;
        self.faults.push(match fault {
            Fault::NoIovaAtCreate(n) => Fault::NoIovaAtCreate(n + creates),
            Fault::NoMemoryAtCreate(n) => Fault::NoMemoryAtCreate(n + creates),
            Fault::Busy(n) => Fault::Busy(n + claims),
            Fault::Refused(n) => Fault::Refused(n + submissions),
            Fault::ZeroOutput(n) => Fault::ZeroOutput(n + submissions),
            Fault::NeverRuns(n) => Fault::NeverRuns(n + submissions),
            Fault::Misses(n) => Fault::Misses(n + submissions),
            Fault::StaleOutput(n) => Fault::StaleOutput(n + submissions),
            Fault::TimeOut(n) => Fault::TimeOut(n + submissions),
            Fault::WrongTileOrder | Fault::DomainBusy => fault,
        });
    }

    /// Takes all faults back.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// What was executed.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes and buffers mapped in a domain.
    pub fn mapped(&self, domain: u32) -> (u64, usize) {
        self.memory.mapped(domain)
    }

    fn has(&self, fault: impl Fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(fault)
    }

    /// Makes a domain the active one, as creating, destroying, syncing and submitting do.
    fn activate(&mut self, domain: u32) -> Result<(), PortError> {
        self.counters.claims += 1;
        let claim = self.counters.claims;
        if self.has(|fault| *fault == Fault::Busy(claim)) {
            return Err(PortError::Busy { domain, active: self.active });
        }
        if domain == self.active {
            return Ok(());
        }
        if !self.flights.is_empty() || self.has(|fault| *fault == Fault::DomainBusy) {
            return Err(PortError::Busy { domain, active: self.active });
        }
        self.active = domain;
        self.clock.switches += 1;
        self.clock.run_us += self.rates.switch_us;
        Ok(())
    }

    /// Refuses to touch a buffer that a job under way uses, or any of another domain than the jobs'.
    fn untouched(&self, id: BufferId) -> Result<(), PortError> {
        let domain = self.memory.buffer(id)?.domain;
        let uses = |flight: &Flight| flight.inputs.contains(&id) || flight.outputs.contains(&id);
        match self.flights.iter().find(|flight| flight.domain != domain || flight.tasks == id || uses(flight))
        {
            Some(flight) => Err(PortError::Busy { domain, active: flight.domain }),
            None => Ok(()),
        }
    }

    fn check(&self, submission: &Submission<'_>) -> Result<(), PortError> {
        let refuse = |what: String| Err(PortError::Refused(what));
        if self.wedged {
            return refuse("the device wants a reset".to_owned());
        }
        let mut seen = 0u64;
        for tasks in submission.cores {
            if tasks.core >= self.n_cores.min(64) || seen >> tasks.core & 1 == 1 {
                return refuse(format!("core {} of {}", tasks.core, self.n_cores));
            }
            seen |= 1 << tasks.core;
            if tasks.count == 0 || tasks.count > self.tasks_per_submit {
                return refuse(format!("{} tasks, at most {}", tasks.count, self.tasks_per_submit));
            }
        }
        if seen == 0 || submission.domain as usize >= self.memory.n_domains() {
            return refuse(format!("no work, or domain {}", submission.domain));
        }
        for &id in submission.inputs.iter().chain(submission.outputs).chain([&submission.tasks]) {
            if self.memory.buffer(id)?.domain != submission.domain {
                return refuse(format!("buffer {} is in another domain", id.0));
            }
        }
        Ok(())
    }

    fn execute(&mut self, flight: &Flight) -> Result<(), PortError> {
        let mood = execute::Mood {
            wrong_order: self.has(|fault| *fault == Fault::WrongTileOrder),
            stale: self.has(|fault| matches!(fault, Fault::StaleOutput(n) if flight.number >= *n)),
            zeros: self.has(|fault| matches!(fault, Fault::ZeroOutput(n) if flight.number >= *n)),
        };
        let programs: u32 = flight.cores.iter().map(|tasks| tasks.count).sum();
        let mut micros = self.rates.submit_us + self.rates.program_us * f64::from(programs - 1);
        for &tasks in &flight.cores {
            let (memory, pool) = (&mut self.memory, self.pool.as_deref());
            micros += execute::run(memory, flight, tasks, mood, pool, &self.rates, &mut self.counters)?;
        }
        self.clock.run_us += micros;
        Ok(())
    }
}

impl Port for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn create(&mut self, bytes: u64, domain: u32) -> Result<Buffer, PortError> {
        self.activate(domain)?;
        self.counters.creates += 1;
        let number = self.counters.creates;
        if self.has(|fault| *fault == Fault::NoIovaAtCreate(number)) {
            return Err(PortError::NoIova { domain, bytes });
        }
        if self.has(|fault| *fault == Fault::NoMemoryAtCreate(number)) {
            return Err(PortError::NoMemory { bytes });
        }
        let buffer = self.memory.create(bytes, domain)?;
        self.clock.create_us += self.rates.create_us;
        Ok(buffer)
    }

    fn fill(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        writer: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), PortError> {
        self.untouched(buffer)?;
        writer(self.memory.write(buffer, range)?).map_err(PortError::Fill)
    }

    fn read(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        reader: &mut dyn FnMut(&[u8]),
    ) -> Result<(), PortError> {
        reader(self.memory.read(buffer, &range)?);
        Ok(())
    }

    fn sync(&mut self, buffer: BufferId, range: Range<u64>, direction: Direction) -> Result<(), PortError> {
        self.untouched(buffer)?;
        self.activate(self.memory.buffer(buffer)?.domain)?;
        self.memory.sync(buffer, range, direction)
    }

    fn submit(&mut self, submission: &Submission<'_>) -> Result<Ticket, PortError> {
        self.check(submission)?;
        self.activate(submission.domain)?;
        self.counters.submissions += 1;
        let number = self.counters.submissions;
        if self.has(|fault| *fault == Fault::Refused(number)) {
            return Err(PortError::Refused(format!("submission {number}")));
        }
        self.flights.push(Flight {
            number,
            domain: submission.domain,
            tasks: submission.tasks,
            cores: submission.cores.to_vec(),
            inputs: submission.inputs.to_vec(),
            outputs: submission.outputs.to_vec(),
        });
        Ok(Ticket(number))
    }

    fn wait(&mut self, ticket: Ticket, _timeout: Duration) -> Result<(), PortError> {
        let Ticket(number) = ticket;
        let at = self.flights.iter().position(|flight| flight.number == number);
        let at = at.ok_or_else(|| PortError::Refused(format!("submission {number} is not under way")))?;
        let flight = self.flights.remove(at);
        if self.has(|fault| *fault == Fault::TimeOut(number)) {
            self.wedged = true;
            return Err(PortError::TimedOut { ticket: number });
        }
        let never = |fault: &Fault| match *fault {
            Fault::NeverRuns(n) => number >= n,
            Fault::Misses(n) => number == n,
            _ => false,
        };
        if self.has(never) {
            self.wedged = true;
            return Err(PortError::NeverRan { ticket: number });
        }
        self.execute(&flight)
    }

    fn reset(&mut self) -> Result<(), PortError> {
        self.flights.clear();
        self.wedged = false;
        self.counters.resets += 1;
        Ok(())
    }

    fn destroy(&mut self, buffer: BufferId) -> Result<(), PortError> {
        self.untouched(buffer)?;
        self.activate(self.memory.buffer(buffer)?.domain)?;
        self.memory.destroy(buffer)
    }

    fn clock(&self) -> Clock {
        self.clock
    }
}
