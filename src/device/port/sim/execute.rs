//! Executes one core's chain of programs on the software NPU's memory.

use super::decode::{Decoded, PROGRAM_LEN, decode};
use super::memory::{Memory, Span};
use super::{Counters, Flight, Rates};
use crate::device::cpu::multiply;
use crate::device::port::{CoreTasks, PortError};
use crate::tensor::MatrixView;
use crate::threads::Pool;
use crate::tile::TILE;

/// Bytes of a task.
const TASK_LEN: u64 = 40;

/// How the weights are read, and whether results are kept: what faults change.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mood {
    /// Blocks are read as if inputs and outputs changed places.
    pub(super) wrong_order: bool,
    /// Results are lost on the way.
    pub(super) stale: bool,
    /// Results are zeros.
    pub(super) zeros: bool,
}

/// Runs the tasks of one core; adds to the counters and returns the modelled microseconds.
pub(super) fn run(
    memory: &mut Memory,
    flight: &Flight,
    tasks: CoreTasks,
    mood: Mood,
    pool: Option<&Pool>,
    rates: &Rates,
    counters: &mut Counters,
) -> Result<f64, PortError> {
    let mut micros = 0.0;
    let mut linked = None;
    for index in 0..tasks.count {
        let fail = |reason| PortError::Program { program: index, reason };
        let program = task(memory, flight, u64::from(tasks.first) + u64::from(index)).map_err(fail)?;
        if linked.is_some_and(|linked| linked != program) {
            return Err(fail(format!("the chain leads to {linked:x?}, the task to {program:#x}")));
        }
        let decoded = fetch(memory, flight, program).map_err(fail)?;
        if decoded.next.is_some() != (index + 1 < tasks.count) {
            return Err(fail(format!("the chain ends, or goes on, at {} of {}", index + 1, tasks.count)));
        }
        linked = decoded.next;
        compute(memory, flight, &decoded, mood, pool).map_err(fail)?;
        let (bytes, macs) = (decoded.k * decoded.n, decoded.m * decoded.k * decoded.n);
        micros += (bytes as f64 / rates.bytes_per_us).max(macs as f64 / rates.macs_per_us);
        counters.programs += 1;
        counters.macs += macs;
        counters.weight_bytes += bytes;
    }
    Ok(micros)
}

/// The program's address from a task, which must say what a task of a product says.
fn task(memory: &Memory, flight: &Flight, index: u64) -> Result<u32, String> {
    let span = Span { id: flight.tasks, offset: index * TASK_LEN, len: TASK_LEN };
    let bytes = memory.device_read(span)?;
    let field = |i: usize| bytes.as_chunks::<4>().0.get(i).map_or(0, |field| u32::from_le_bytes(*field));
    let fields: [u32; 10] = std::array::from_fn(field);
    let [_, _, enable, int_mask, int_clear, _, amount, offset, address, high] = fields;
    if (enable, int_mask, int_clear, amount, offset, high) != (0xd, 0x300, 0x1_ffff, 108, 0, 0) {
        return Err(format!("a task of {fields:x?}"));
    }
    Ok(address)
}

fn fetch(memory: &Memory, flight: &Flight, program: u32) -> Result<Decoded, String> {
    let span = memory.resolve(flight.domain, program, PROGRAM_LEN)?;
    decode(listed(memory.device_read(span)?, span, &flight.inputs)?)
}

/// Passes on what is in a listed buffer: a driver that waits for buffers only waits for those.
fn listed<T>(value: T, span: Span, buffers: &[super::BufferId]) -> Result<T, String> {
    if buffers.contains(&span.id) { Ok(value) } else { Err(format!("buffer {} is not listed", span.id.0)) }
}

/// Computes one product from the bytes that its addresses point at.
fn compute(
    memory: &mut Memory,
    flight: &Flight,
    program: &Decoded,
    mood: Mood,
    pool: Option<&Pool>,
) -> Result<(), String> {
    let &Decoded { m, k, n, .. } = program;
    let a = memory.resolve(flight.domain, program.a, m * k)?;
    let weights = memory.resolve(flight.domain, program.weights, k * n)?;
    let c = memory.resolve(flight.domain, program.c, 4 * m * n)?;
    listed((), a, &flight.inputs)?;
    listed((), weights, &flight.inputs)?;
    listed((), c, &flight.outputs)?;
    if c.id == a.id || c.id == weights.id || c.offset % 16 != 0 || a.offset % 16 != 0 {
        return Err("results overlap what is read, or addresses are not aligned".to_owned());
    }
    if mood.stale {
        return Ok(());
    }
    let mut view = memory.take_device_view(c.id);
    let result = memory.device_read(a).and_then(|a| Ok((a, memory.device_read(weights)?)));
    let result = result.map(|(a, weights)| {
        let out: &mut [i32] = bytemuck::cast_slice_mut(&mut view);
        let out = &mut out[(c.offset / 4) as usize..][..(m * n) as usize];
        match mood.zeros {
            true => out.fill(0),
            false => {
                product(program, bytemuck::cast_slice(a), bytemuck::cast_slice(weights), mood, pool, out);
            }
        }
    });
    memory.put_device_view(c.id, view);
    result
}

fn product(program: &Decoded, a: &[i8], weights: &[i8], mood: Mood, pool: Option<&Pool>, out: &mut [i32]) {
    let (m, k, n) = (program.m as usize, program.k as usize, program.n as usize);
    let turned;
    let weights = if mood.wrong_order {
        turned = turn_blocks(weights);
        &turned
    } else {
        weights
    };
    let held = program.rows_held as usize;
    let wrapped: Vec<i8>;
    let a = if m > held {
        wrapped = (0..m).flat_map(|row| &a[row % held * k..][..k]).copied().collect();
        &wrapped
    } else {
        a
    };
    if let Some(a) = MatrixView::new(a, m, k) {
        multiply(pool, weights, k, n, a, out);
    }
}

/// Each block of 32 outputs by 32 inputs with the two exchanged.
fn turn_blocks(weights: &[i8]) -> Vec<i8> {
    let byte = |i: usize| weights[i / (TILE * TILE) * TILE * TILE + i % TILE * TILE + i / TILE % TILE];
    (0..weights.len()).map(byte).collect()
}
