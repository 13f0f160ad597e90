//! What a domain maps beside its weights: programs, tasks, activations and results.
//!
//! The planner counts it, the device maps it, and both ask here, so that the plan's footprint and the run's are the
//! same number. It depends on the shapes of the parts in the domain alone, never on how many there are.
//!
//! Source: docs/npu.md, "scratch". Confidence: a choice of ours, checked against nothing but arithmetic.

use super::SubMatrix;
use crate::profile::DeviceProfile;

/// Most programs of one submission: two projections of 128 expert calls at one row.
pub const PROGRAMS: u64 = 256;

/// Bytes of one register program: 112 words. Source: docs/npu.md, "Register program". Confidence: proven on boards.
pub const PROGRAM_BYTES: u64 = 896;

/// Bytes of one task, the driver's pointer to a program. Source: docs/npu.md, "Tasks". Confidence: read in source.
pub const TASK_BYTES: u64 = 40;

/// Programs with [`FULL_ROWS`] rows that one submission can hold: two for each of three cores.
const FULL_PROGRAMS: u64 = 6;

/// More rows than this are not needed to keep a core busy.
const FULL_ROWS: u64 = 128;

/// Bytes of one domain's four scratch buffers, each rounded up to whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Register programs: [`PROGRAMS`] of them.
    pub programs_bytes: u64,
    /// Tasks, one per program.
    pub tasks_bytes: u64,
    /// Activations, int8.
    pub a_bytes: u64,
    /// Results, int32.
    pub c_bytes: u64,
}

impl Scratch {
    /// The scratch of a domain that holds these parts; nothing for no parts.
    ///
    /// For each part, activations and results have room for the largest of: one program at its most rows, six
    /// programs at 128 rows (or at their most), and [`PROGRAMS`] programs at one row.
    pub fn for_parts<'a>(parts: impl IntoIterator<Item = &'a SubMatrix>, profile: &DeviceProfile) -> Scratch {
        let page = profile.memory.page_bytes.value.max(1);
        let mut scratch = Scratch::default();
        for part in parts {
            let most = u64::from(profile.max_rows(part.k_padded).unwrap_or(1));
            let rows = most.max(FULL_PROGRAMS * most.min(FULL_ROWS)).max(PROGRAMS);
            scratch.programs_bytes = (PROGRAMS * PROGRAM_BYTES).next_multiple_of(page);
            scratch.tasks_bytes = (PROGRAMS * TASK_BYTES).next_multiple_of(page);
            let a_bytes = (rows * u64::from(part.k_padded)).next_multiple_of(page);
            let c_bytes = (rows * 4 * u64::from(part.n_padded)).next_multiple_of(page);
            scratch.a_bytes = scratch.a_bytes.max(a_bytes);
            scratch.c_bytes = scratch.c_bytes.max(c_bytes);
        }
        scratch
    }

    /// All four, bytes.
    pub fn total(&self) -> u64 {
        self.programs_bytes + self.tasks_bytes + self.a_bytes + self.c_bytes
    }
}
