//! Row shares: the first output rows of every expert of a layer, in steps, and what the NPU needs for them.

use super::cost::{Load, Rates};
use crate::model::MoeLayerShape;
use crate::profile::DeviceProfile;
use crate::tensor::Projection;
use crate::tile::{self, SubMatrix, TILE, TileError};

/// Steps of a projection's rows at most; more would hardly balance the two sides better.
const MOST_STEPS: u64 = 64;

/// The shares of each phase that a layer can have: none first, all rows last.
#[derive(Clone, Debug)]
pub(super) struct RowSteps {
    /// Of gate, and as many of up.
    pub gate_up: Vec<RowStep>,
    pub down: Vec<RowStep>,
}

/// The first rows of one projection of every expert.
#[derive(Clone, Debug, Default)]
pub(super) struct RowStep {
    /// How many.
    pub rows: u64,
    /// Of all of them.
    pub share: f64,
    /// Their programs.
    pub parts: Vec<SubMatrix>,
    /// Tile bytes and most rows of activations of each program.
    priced: Vec<(f64, f64)>,
}

impl RowSteps {
    /// Equal steps of whole blocks of rows, and the rest. A phase whose matrices no program can hold has none.
    pub fn of(
        shape: &MoeLayerShape,
        parts: &[Option<Vec<SubMatrix>>; 3],
        profile: &DeviceProfile,
    ) -> Result<RowSteps, TileError> {
        let size = |p: Projection| {
            shape.experts.first().map_or((0, 0), |e| (e[p as usize].n_in, e[p as usize].n_out))
        };
        let may = |p: Projection| parts[p as usize].is_some();
        // One number of rows goes for gate and up.
        let gate_up =
            may(Projection::Gate) && may(Projection::Up) && size(Projection::Gate) == size(Projection::Up);
        let steps = |p: Projection, may: bool| -> Result<Vec<RowStep>, TileError> {
            let (n_in, n_out) = (size(p).0 as u64, if may { size(p).1 as u64 } else { 0 });
            let step = n_out.div_ceil(TILE as u64 * MOST_STEPS).max(1) * TILE as u64;
            (0..=n_out.div_ceil(step))
                .map(|i| RowStep::of(n_in, (i * step).min(n_out), n_out, profile))
                .collect()
        };
        let down = gate_up && may(Projection::Down);
        Ok(RowSteps { gate_up: steps(Projection::Gate, gate_up)?, down: steps(Projection::Down, down)? })
    }

    /// The steps of a projection.
    pub fn of_projection(&self, projection: Projection) -> &[RowStep] {
        if projection == Projection::Down { &self.down } else { &self.gate_up }
    }

    /// The step of gate and up with so many rows.
    pub fn gate_up_at(&self, rows: u64) -> usize {
        at(&self.gate_up, rows)
    }

    /// The step of down with so many rows.
    pub fn down_at(&self, rows: u64) -> usize {
        at(&self.down, rows)
    }
}

/// The last step with no more than so many rows.
fn at(steps: &[RowStep], rows: u64) -> usize {
    steps.partition_point(|step| step.rows <= rows).saturating_sub(1)
}

impl RowStep {
    fn of(n_in: u64, rows: u64, n_out: u64, profile: &DeviceProfile) -> Result<RowStep, TileError> {
        if rows == 0 {
            return Ok(RowStep::default());
        }
        let parts = tile::cut(n_in, rows, profile)?;
        let price = |part: &SubMatrix| {
            (part.bytes() as f64, f64::from(profile.max_rows(part.k_padded).unwrap_or(1).max(1)))
        };
        let priced = parts.iter().map(price).collect();
        Ok(RowStep { rows, share: rows as f64 / n_out as f64, parts, priced })
    }

    /// Page-rounded bytes of one matrix.
    pub fn bytes(&self, page: u64) -> u64 {
        self.parts.iter().map(|part| part.bytes().next_multiple_of(page)).sum()
    }
}

/// What calls cost the NPU for each byte of tiles and each program: by the most rows that a program takes.
///
/// A program's cost is linear in its bytes, so all steps of a layer share one sum over its experts.
pub(super) struct Passes(Vec<(f64, Load, Load)>);

impl Passes {
    /// `calls` are numbers of rows that an expert gets and how often.
    pub fn of(rates: &Rates, steps: &[RowStep], calls: &[(f64, f64)]) -> Passes {
        let mut passes: Vec<(f64, Load, Load)> = Vec::new();
        for &(_, most) in steps.iter().flat_map(|step| &step.priced) {
            if passes.iter().any(|(known, ..)| *known == most) {
                continue;
            }
            let (mut byte, mut program) = (Load::default(), Load::default());
            for &(rows, times) in calls {
                let n = (rows / most).ceil();
                byte = byte.plus(rates.npu(n, rows, 0.0).times(times));
                program = program.plus(rates.npu(0.0, 0.0, n).times(times));
            }
            passes.push((most, byte, program));
        }
        Passes(passes)
    }

    /// One matrix of every call, as far as the step goes.
    pub fn load(&self, step: &RowStep) -> Load {
        let of_part = |&(bytes, most): &(f64, f64)| {
            let found = self.0.iter().find(|(known, ..)| *known == most);
            found.map_or(Load::default(), |(_, byte, program)| byte.times(bytes).plus(*program))
        };
        step.priced.iter().map(of_part).fold(Load::default(), Load::plus)
    }
}
