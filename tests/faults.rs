//! A device that fails: whatever goes wrong at whatever moment, the tokens are the same, and nothing stays mapped.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use orkpack::convert::Choice;
use orkpack::device::port::{Buffer, BufferId, Clock, Direction, Port, Submission, Ticket};
use orkpack::device::{Device, DeviceMatrix, Fault, Job, Npu, PlacedPart, PortError, Sim};
use orkpack::error::Error;
use orkpack::model::evaluate::argmax;
use orkpack::pack::Pack;
use orkpack::plan::{Plan, Shares};
use orkpack::profile::DeviceProfile;
use orkpack::runtime::{DeviceChoice, Options, Runtime, Session};
use orkpack::tensor::{Int8Matrix, MatrixView};
use orkpack::tile::{cut, tile};
use serde_json::Value;

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{
    TOKENS, bundled_in, calibrate_beside, convert, folder, hits, model_in, request, runtime,
};
use crate::support::program::{ORK_RUN, done, run};

/// A software NPU that outlives the devices on it, as a driver does.
#[derive(Clone)]
struct Driver(Arc<Mutex<Sim>>);

impl Driver {
    fn new(profile: &DeviceProfile) -> Driver {
        Driver(Arc::new(Mutex::new(Sim::new(profile))))
    }

    fn sim(&self) -> MutexGuard<'_, Sim> {
        self.0.lock().unwrap()
    }

    /// Bytes and buffers mapped in any domain.
    fn mapped(&self) -> (u64, usize) {
        (0..16).map(|domain| self.sim().mapped(domain)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }
}

impl Port for Driver {
    fn name(&self) -> &'static str {
        "sim"
    }
    fn create(&mut self, bytes: u64, domain: u32) -> Result<Buffer, PortError> {
        self.sim().create(bytes, domain)
    }
    fn fill(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        writer: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> Result<(), PortError> {
        self.sim().fill(buffer, range, writer)
    }
    fn read(
        &mut self,
        buffer: BufferId,
        range: Range<u64>,
        reader: &mut dyn FnMut(&[u8]),
    ) -> Result<(), PortError> {
        self.sim().read(buffer, range, reader)
    }
    fn sync(&mut self, buffer: BufferId, range: Range<u64>, direction: Direction) -> Result<(), PortError> {
        self.sim().sync(buffer, range, direction)
    }
    fn submit(&mut self, submission: &Submission<'_>) -> Result<Ticket, PortError> {
        self.sim().submit(submission)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<(), PortError> {
        self.sim().wait(ticket, timeout)
    }
    fn reset(&mut self) -> Result<(), PortError> {
        self.sim().reset()
    }
    fn destroy(&mut self, buffer: BufferId) -> Result<(), PortError> {
        self.sim().destroy(buffer)
    }
    fn clock(&self) -> Clock {
        self.sim().clock()
    }
}

/// Every fault that happens at a moment, by what its moments are counted in.
const AT_CREATION: [fn(u64) -> Fault; 2] = [Fault::NoIovaAtCreate, Fault::NoMemoryAtCreate];
const AT_CLAIM: [fn(u64) -> Fault; 1] = [Fault::Busy];
const AT_SUBMISSION: [fn(u64) -> Fault; 6] =
    [Fault::Refused, Fault::NeverRuns, Fault::Misses, Fault::StaleOutput, Fault::ZeroOutput, Fault::TimeOut];

const PROMPT: [u32; 3] = [72, 101, 108];

/// The logits of a prompt and two tokens after it, bit for bit.
fn bits(session: &mut Session<'_>) -> Result<Vec<u32>, Error> {
    let mut bits: Vec<u32> = session.prompt(&PROMPT)?.iter().map(|logit| logit.to_bits()).collect();
    for _ in 0..2 {
        let next = argmax(session.logits());
        bits.extend(session.step(next)?.iter().map(|logit| logit.to_bits()));
    }
    Ok(bits)
}

/// A pack with all experts hot, or some rows of all, in two chunks at least.
fn hot(folder: &Path, shares: Shares) -> PathBuf {
    let spec = MoeSpec {
        n_layer: 2,
        n_expert: 3,
        n_embd: 64,
        n_ff: 64,
        n_head: 2,
        n_head_kv: 1,
        ..MoeSpec::default()
    };
    let model = model_in(folder, &tiny_moe(&spec));
    calibrate_beside(&model, &TOKENS);
    // All of them take 288 KiB.
    let budget = if shares == Shares::Rows { 240 << 10 } else { 1 << 30 };
    let mut request = request(&model, Choice { shares, ..hits(budget) });
    request.choice.profile.memory.chunk_bytes.value = 128 << 10;
    convert(request).unwrap().1.output
}

/// How a run with a fault went.
struct Run {
    bits: Result<Vec<u32>, Error>,
    is_trusted: bool,
    /// What was not on the device that should have been, or was not done there.
    is_noticed: bool,
    retries: u64,
}

fn run_with(runtime: &Runtime, fault: Option<Fault>) -> (Run, Driver) {
    let profile = runtime.profile().unwrap();
    let driver = Driver::new(profile);
    fault.into_iter().for_each(|fault| driver.sim().inject(fault));
    let engine = match runtime.engine_on(Box::new(Npu::new(driver.clone(), profile))) {
        Ok(engine) => engine,
        Err(error) => {
            return (Run { bits: Err(error), is_trusted: true, is_noticed: true, retries: 0 }, driver);
        }
    };
    let is_trusted = engine.distrust().is_none();
    let refused = engine.loaded().is_some_and(|loaded| loaded.refused.is_some());
    let mut session = Session::new(runtime, engine, 16, 16);
    let bits = bits(&mut session);
    let counters = session.engine().counters().unwrap_or_default();
    if let Some(failure) = &counters.failure {
        assert!(counters.fallbacks > 0, "{failure}");
    }
    let is_noticed = !is_trusted || refused || counters.fallbacks > 0;
    (Run { bits, is_trusted, is_noticed, retries: counters.account.retries }, driver)
}

#[test]
fn every_fault_at_every_operation_of_a_run_changes_no_bit_and_leaves_nothing_mapped() {
    every_fault(Shares::Experts);
}

#[test]
fn every_fault_at_every_operation_of_a_run_that_shares_rows_changes_no_bit_either() {
    every_fault(Shares::Rows);
}

fn every_fault(shares: Shares) {
    let folder = folder();
    let pack = hot(folder.path(), shares);
    let plan = Plan::from_json(Pack::open(&pack, Default::default()).unwrap().plan()).unwrap();
    assert!(plan.layers.iter().all(|layer| layer.is_by_rows() == (shares == Shares::Rows)));
    let lenient = runtime(&pack, DeviceChoice::Sim, 1);
    let options = Options { device: DeviceChoice::Sim, strict: true, threads: Some(1), ..Options::default() };
    let strict = Runtime::open(&pack, options).unwrap();
    let on = |engine| bits(&mut Session::new(&lenient, engine, 16, 16)).unwrap();
    let on_cpu = on(runtime(&pack, DeviceChoice::Cpu, 1).engine().unwrap());
    let from_source = on(lenient.reference().unwrap());
    assert!(on_cpu != from_source);
    let (whole, driver) = run_with(&lenient, None);
    assert!(whole.bits.unwrap() == on_cpu && !whole.is_noticed);
    assert_eq!(driver.mapped(), (0, 0));
    let counts = driver.sim().counters();
    let kinds = AT_CREATION.iter().map(|fault| (fault, counts.creates));
    let kinds = kinds.chain(AT_CLAIM.iter().map(|fault| (fault, counts.claims)));
    let kinds = kinds.chain(AT_SUBMISSION.iter().map(|fault| (fault, counts.submissions)));
    for (fault, n_moments) in kinds {
        let mut of_kind = 0;
        for moment in 1..=n_moments {
            let fault = fault(moment);
            let (run, driver) = run_with(&lenient, Some(fault));
            let expected = if run.is_trusted { &on_cpu } else { &from_source };
            assert!(run.bits.unwrap_or_else(|error| panic!("{fault:?}: {error}")) == *expected, "{fault:?}");
            assert_eq!(driver.mapped(), (0, 0), "{fault:?}");
            of_kind += u64::from(run.is_noticed || run.retries > 0);
            // Under strict rules whatever falls back ends the run, and nothing else does.
            let (strictly, driver) = run_with(&strict, Some(fault));
            match strictly.bits {
                Ok(bits) => assert!(!run.is_noticed && bits == on_cpu, "{fault:?}"),
                Err(error) => assert!(run.is_noticed && error.exit_code() == 2, "{fault:?}: {error}"),
            }
            assert_eq!(driver.mapped(), (0, 0), "{fault:?}, strict");
        }
        assert!(n_moments >= 9 && of_kind > n_moments / 2, "{:?}: {of_kind} of {n_moments}", fault(0));
    }
}

#[test]
fn a_domain_that_stays_busy_and_a_wrong_tile_order_harm_nothing_either() {
    let folder = folder();
    let lenient = runtime(&hot(folder.path(), Shares::Experts), DeviceChoice::Sim, 1);
    let from_source = bits(&mut Session::new(&lenient, lenient.reference().unwrap(), 16, 16)).unwrap();
    let (run, driver) = run_with(&lenient, Some(Fault::WrongTileOrder));
    assert!(!run.is_trusted && run.bits.unwrap() == from_source && driver.mapped() == (0, 0));
    // Everything is in domain 0, which is the active one.
    let (run, driver) = run_with(&lenient, Some(Fault::DomainBusy));
    assert!(run.is_trusted && !run.is_noticed && driver.mapped() == (0, 0));
}

/// A small matrix through a device that is opened and closed again, with another fault each time.
#[test]
fn a_thousand_devices_opened_and_closed_leave_no_address_taken() {
    let profile = DeviceProfile::built_in("rk3588").unwrap();
    let driver = Driver::new(&profile);
    let (n_in, n_out) = (256, 32);
    let codes: Vec<i8> =
        (0..n_in * n_out).map(|i| (i * 31 % 255) as u8 as i8).map(|code| code.max(-127)).collect();
    let weights = Int8Matrix { codes, scales: vec![1.0; n_out], n_in, n_out };
    let rows: Vec<i8> = (0..n_in).map(|i| (i % 11) as i8 - 5).collect();
    let expected: Vec<i32> = weights
        .codes
        .chunks(n_in)
        .map(|row| row.iter().zip(&rows).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum())
        .collect();
    let part = cut(n_in as u64, n_out as u64, &profile).unwrap()[0];
    let faults = [&AT_CREATION[..], &AT_CLAIM, &AT_SUBMISSION].concat();
    let (mut right, mut failed) = (0, 0);
    for cycle in 0..1000 {
        let domain = cycle as u32 % 3;
        if cycle % 2 == 1 {
            let moment = 1 + cycle as u64 / 2 % 16;
            driver.sim().inject(faults[cycle / 2 % faults.len()](moment));
        }
        let mut device = Npu::new(driver.clone(), &profile);
        let mut once = || {
            let chunk = device.create_chunk(part.bytes(), domain)?;
            device.fill_chunk(chunk, &mut |bytes| tile(&weights, &part, bytes).map_err(io::Error::other))?;
            device.prepare(&[(domain, part)])?;
            let parts = vec![PlacedPart { part, chunk, offset: 0 }];
            let matrix = DeviceMatrix { n_in: n_in as u32, n_out: n_out as u32, parts };
            let mut out = vec![7; n_out];
            let rows = MatrixView::new(&rows, 1, n_in).unwrap();
            device.run(&mut [Job { matrix: &matrix, rows, out: &mut out }])?;
            Ok::<_, orkpack::device::DeviceError>(out)
        };
        match once() {
            Ok(out) => {
                assert_eq!(out, expected, "cycle {cycle}");
                right += 1;
            }
            Err(_) => failed += 1,
        }
        drop(device);
        assert_eq!(driver.mapped(), (0, 0), "cycle {cycle}");
        let mut sim = driver.sim();
        sim.heal();
        sim.reset().unwrap();
    }
    assert!(right >= 500 && failed >= 50, "{right} {failed}");
    for domain in 0..3 {
        assert_eq!(driver.sim().create(1, domain).unwrap().iova, 0xffff_f000, "the top is free again");
    }
}

/// An empty hot set computes what the reference computes; a full one is off by what int8 costs, the same each time.
#[test]
fn case_h12_the_logit_error_and_the_first_other_token_are_told_and_do_not_change() {
    let folder = folder();
    let path = folder.path();
    let model = bundled_in(path, "tiny-moe-q8_0.gguf");
    for (name, budget) in [("empty.orkpack", 0), ("full.orkpack", 1 << 30)] {
        let mut request = request(&model, hits(budget));
        request.output = path.join(name);
        convert(request).unwrap();
    }
    let compare = |pack: &str, threads: &str| -> (Value, Value) {
        let words =
            [pack, "-p", "Once upon a time", "-n", "48", "--temp", "0", "--raw", "--json", "--compare"];
        let text =
            done(&run(ORK_RUN, path, &[&words[..], &["--device", "sim", "--threads", threads]].concat()));
        let mut document: Value = serde_json::from_str(&text).unwrap();
        (document["comparison"].take(), document["tokens"].take())
    };
    let (empty, from_source) = compare("empty.orkpack", "1");
    assert_eq!((empty["max_logit_error"].as_f64(), &empty["first_difference"]), (Some(0.0), &Value::Null));
    let (full, tokens) = compare("full.orkpack", "1");
    let error = full["max_logit_error"].as_f64().unwrap();
    assert!(error > 0.0 && error < 1.0, "{full}");
    for threads in ["1", "2"] {
        assert_eq!(compare("empty.orkpack", threads), (empty.clone(), from_source.clone()));
        assert_eq!(compare("full.orkpack", threads), (full.clone(), tokens.clone()));
    }
    let first = full["first_difference"].as_u64().unwrap() as usize;
    assert!(first > 0 && first < full["positions"].as_u64().unwrap() as usize, "{full}");
    assert_ne!(tokens, from_source);
}
