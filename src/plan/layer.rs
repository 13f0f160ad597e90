//! What a layer's experts cost: its experts best first, and the time of each number of hot ones, or of hot rows.
//!
//! The two phases of a layer, gate and up, then down, have two curves each: entry `j` is the phase's time when the
//! first `j` experts' matrices of that phase are on the NPU, or the first `j` steps of rows of every expert's. Nothing
//! is chosen here.

use super::cost::{Load, Phase, Rates};
use super::hits::{inclusion, prefix_hits};
use super::routing::LayerRouting;
use super::rows::{Passes, RowStep, RowSteps};
use super::state::{Split, State};
use crate::calibrate::{RowsPerExpert, bin_edges};
use crate::model::MoeLayerShape;
use crate::profile::DeviceProfile;
use crate::tensor::{Dtype, Projection};
use crate::tile::{self, SubMatrix, TileError};

/// A layer as the planner sees it, its experts sorted best first.
#[derive(Debug)]
pub(super) struct LayerModel {
    /// Expert numbers, best first.
    pub order: Vec<u32>,
    /// Probability that a token uses each expert, in that order.
    pub inclusion: Vec<f64>,
    /// Logarithm of the probability that a token does not use each; finite where all tokens do.
    pub log_unused: Vec<f64>,
    /// How many at the front are hot because the user said so.
    pub n_forced: usize,
    /// The programs of gate, up and down; `None` where no program can hold the matrix.
    pub parts: [Option<Vec<SubMatrix>>; 3],
    /// How many rows of every expert can be on the NPU instead.
    pub rows: RowSteps,
    n_used: usize,
    shapes: [Matrix; 3],
    /// `[n_expert][3]`, in order: source bytes of gate, up and down.
    source_bytes: Vec<[f64; 3]>,
    /// `[n_expert + 1][n_used + 1]`, in order.
    hits: Vec<Vec<f64>>,
    /// The counted rows per expert, for batches where there are any.
    counted: Vec<BatchRows>,
}

/// One projection of every expert of the layer.
#[derive(Clone, Debug)]
struct Matrix {
    n_in: f64,
    n_out: f64,
    /// Its type in the source.
    dtype: Dtype,
    /// Tile bytes, most rows of a program.
    parts: Vec<(f64, f64)>,
}

/// Rows that each expert gets in batches of one length: how many, how likely.
#[derive(Debug)]
struct BatchRows {
    tokens: u32,
    bins: Vec<(f64, f64)>,
    /// `[n_expert]`, in order: where each expert's bins end.
    ends: Vec<usize>,
}

/// Seconds of the two phases by what is hot.
#[derive(Clone, Debug)]
pub(super) struct Curves {
    /// By number of hot experts, `[n_expert + 1]`.
    pub experts: Phases,
    /// By steps of hot rows, as many as [`LayerModel::rows`] has.
    pub rows: Phases,
}

/// A curve of each phase.
#[derive(Clone, Debug)]
pub(super) struct Phases {
    pub gate_up: Vec<f64>,
    pub down: Vec<f64>,
}

impl Phases {
    /// Seconds of the layer so far along both curves.
    pub fn at(&self, gate_up: usize, down: usize) -> f64 {
        self.gate_up[gate_up] + self.down[down]
    }

    /// No two points together are less.
    fn least(&self) -> f64 {
        let least = |curve: &[f64]| curve.iter().copied().fold(f64::INFINITY, f64::min);
        least(&self.gate_up) + least(&self.down)
    }
}

impl Curves {
    /// Seconds of the layer in a state.
    pub fn of(&self, state: State) -> f64 {
        match state.split {
            Split::Experts => self.experts.at(state.gate_up, state.down),
            Split::Rows => self.rows.at(state.gate_up, state.down),
        }
    }

    /// No state takes less.
    pub fn least(&self) -> f64 {
        self.experts.least().min(self.rows.least())
    }
}

impl LayerModel {
    /// Sorts a layer's experts: those the user named, then by how often they are used, the lower number first
    /// among equals. Experts never seen come last.
    pub fn new(
        shape: &MoeLayerShape,
        routing: &LayerRouting,
        forced: &[u32],
        profile: &DeviceProfile,
    ) -> Result<LayerModel, TileError> {
        let p = inclusion(&routing.shares, shape.n_used);
        let mut order: Vec<u32> = (0..shape.n_expert() as u32).collect();
        let rank = |&expert: &u32| forced.iter().position(|f| *f == expert).unwrap_or(forced.len());
        order.sort_by(|a, b| {
            let used = |expert: &u32| p[*expert as usize];
            rank(a).cmp(&rank(b)).then(used(b).total_cmp(&used(a))).then(a.cmp(b))
        });
        let inclusion: Vec<f64> = order.iter().map(|&expert| p[expert as usize]).collect();
        let bytes = |expert: &u32| shape.experts[*expert as usize].map(|matrix| matrix.bytes as f64);
        let (shapes, parts) = programs(shape, profile)?;
        let rows = RowSteps::of(shape, &parts, profile)?;
        let counted = routing.counts.iter().flat_map(|counts| &counts.rows);
        let counted = counted.filter(|rows| rows.batch > 1 && rows.batches > 0);
        Ok(LayerModel {
            source_bytes: order.iter().map(bytes).collect(),
            hits: prefix_hits(&inclusion, shape.n_used),
            counted: counted.map(|rows| BatchRows::counted(rows, &order, &inclusion)).collect(),
            rows,
            log_unused: inclusion.iter().map(|used| (-used.min(1.0 - 1e-12)).ln_1p()).collect(),
            n_forced: forced.len(),
            n_used: shape.n_used,
            order,
            inclusion,
            parts,
            shapes,
        })
    }

    /// Number of experts.
    pub fn n_expert(&self) -> usize {
        self.order.len()
    }

    /// Page-rounded bytes of all its experts, as far as they can be hot.
    pub fn all_bytes(&self, page: u64) -> u64 {
        let (gate_up, down) = self.bytes(page);
        (gate_up + down) * self.n_expert() as u64
    }

    /// Calls per token that a state serves, mean of the three projections. A share of rows serves that share of each
    /// call.
    pub fn served(&self, state: State) -> f64 {
        let of = |n: usize, steps: &[RowStep]| match state.split {
            Split::Experts => self.inclusion[..n].iter().sum::<f64>(),
            Split::Rows => steps[n].share * self.n_used as f64,
        };
        (2.0 * of(state.gate_up, &self.rows.gate_up) + of(state.down, &self.rows.down)) / 3.0
    }

    /// What the CPU still reads of the expert at a place of the ranking, from 0 to 1: of gate and up, and of down. Rows lie
    /// one after the other, so what is hot of an expert are whole pages but for one.
    pub fn cold_shares(&self, state: State, at: usize) -> (f64, f64) {
        let of = |n: usize, steps: &[RowStep]| match state.split {
            Split::Experts => f64::from(u8::from(at >= n)),
            Split::Rows => 1.0 - steps[n].share,
        };
        (of(state.gate_up, &self.rows.gate_up), of(state.down, &self.rows.down))
    }

    /// `[n_expert][3]`, best first: source bytes of gate, up and down.
    pub fn source_bytes(&self) -> &[[f64; 3]] {
        &self.source_bytes
    }

    /// Whether gate and up can be hot at all, and whether down can.
    pub fn may_be_hot(&self) -> (bool, bool) {
        let gate_up = self.parts[0].is_some() && self.parts[1].is_some();
        (gate_up, gate_up && self.parts[2].is_some())
    }

    /// Page-rounded bytes of one expert's gate and up, and of its down; 0 for what cannot be hot.
    pub fn bytes(&self, page: u64) -> (u64, u64) {
        let bytes = |parts: &Option<Vec<SubMatrix>>| -> u64 {
            parts.iter().flatten().map(|part| part.bytes().next_multiple_of(page)).sum()
        };
        (bytes(&self.parts[0]) + bytes(&self.parts[1]), bytes(&self.parts[2]))
    }

    /// One token: each phase over the distribution of hits.
    pub fn decode(&self, rates: &Rates) -> Curves {
        self.decode_by(rates, &|phase| rates.phase_seconds(phase))
    }

    /// The same of another measure of a phase than its seconds.
    pub fn decode_by(&self, rates: &Rates, measure: &dyn Fn(&Phase) -> f64) -> Curves {
        let curves = |projections: &[Projection]| -> [Vec<f64>; 2] {
            let npu = self.npu(rates, projections, 1.0);
            let cpu: Vec<Load> = (0..self.n_expert()).map(|e| self.cpu(rates, e, projections, 1.0)).collect();
            let mut cold = weighted(&self.inclusion, &cpu);
            let calls = [(1.0, cold.0)];
            let by_rows = self.by_rows(rates, projections, &calls, 1.0, cold.1, measure);
            let mut curve = Vec::with_capacity(self.hits.len());
            for (j, hits) in self.hits.iter().enumerate() {
                if j > 0 {
                    cold = less(cold, self.inclusion[j - 1], cpu[j - 1]);
                }
                let cold_each = if cold.0 > 1e-12 { cold.1.times(1.0 / cold.0) } else { Load::default() };
                let seconds = |(h, p): (usize, &f64)| {
                    let (hot, cold) = (h as f64, (self.n_used - h) as f64);
                    let around = self.around(rates, projections, hot, hot.min(1.0));
                    let phase = Phase {
                        npu: npu.times(hot),
                        submits: hot.min(1.0),
                        cpu: cold_each.times(cold).plus(around),
                    };
                    p * measure(&phase)
                };
                curve.push(hits.iter().enumerate().filter(|&(_, &p)| p > 0.0).map(seconds).sum());
            }
            [curve, by_rows]
        };
        both(curves)
    }

    /// A batch of tokens: each expert's load is its mean over the rows it gets, and the phase that of the sums.
    pub fn batch(&self, rates: &Rates, tokens: u32) -> Curves {
        self.batch_by(rates, tokens, &|phase| rates.phase_seconds(phase))
    }

    /// The same of another measure of a phase than its seconds.
    pub fn batch_by(&self, rates: &Rates, tokens: u32, measure: &dyn Fn(&Phase) -> f64) -> Curves {
        let assumed;
        let rows = match self.counted.iter().find(|rows| rows.tokens == tokens) {
            Some(counted) => counted,
            None => {
                assumed = BatchRows::binomial(tokens, &self.inclusion);
                &assumed
            }
        };
        let curves = |projections: &[Projection]| -> [Vec<f64>; 2] {
            let mean = |bins: &[(f64, f64)], load: &dyn Fn(f64) -> Load| {
                bins.iter().fold(Load::default(), |sum, &(rows, p)| sum.plus(load(rows).times(p)))
            };
            let cpu: Vec<Load> = (0..self.n_expert())
                .map(|e| mean(rows.of(e), &|rows| self.cpu(rates, e, projections, rows)))
                .collect();
            let mut phase =
                Phase { cpu: cpu.iter().copied().fold(Load::default(), Load::plus), ..Phase::default() };
            let layer_rows = f64::from(tokens);
            let by_rows = self.by_rows(rates, projections, &rows.bins, layer_rows, phase.cpu, measure);
            let mut curve = vec![measure(&phase)];
            for (e, &cold) in cpu.iter().enumerate() {
                let bins = rows.of(e);
                let rows_hot: f64 = bins.iter().map(|(rows, p)| rows * p).sum();
                let first = if e == 0 { layer_rows } else { 0.0 };
                phase.npu = phase.npu.plus(mean(bins, &|rows| self.npu(rates, projections, rows)));
                phase.cpu = phase.cpu.less(cold).plus(self.around(rates, projections, rows_hot, first));
                phase.submits = 1.0;
                curve.push(measure(&phase));
            }
            [curve, by_rows]
        };
        both(curves)
    }

    /// A phase by steps of hot rows: every call is split, so both sides have the same share of each, whatever the
    /// routing. `calls` are numbers of rows that an expert gets and how often; `cold` is the phase's work on the CPU
    /// alone, which is in proportion to the rows that stay there.
    fn by_rows(
        &self,
        rates: &Rates,
        projections: &[Projection],
        calls: &[(f64, f64)],
        layer_rows: f64,
        cold: Load,
        measure: &dyn Fn(&Phase) -> f64,
    ) -> Vec<f64> {
        let steps =
            if projections.contains(&Projection::Down) { &self.rows.down } else { &self.rows.gate_up };
        let n_calls: f64 = calls.iter().map(|(rows, times)| rows * times).sum();
        let (n_in, n) = (self.shapes[projections[0] as usize].n_in, projections.len() as f64);
        let quantized = if projections.contains(&Projection::Down) { n_calls } else { layer_rows } * n_in;
        let npu = Passes::of(rates, steps, calls);
        let seconds = |step: &RowStep| {
            if step.rows == 0 {
                return measure(&Phase { cpu: cold, ..Phase::default() });
            }
            let around = rates.around(quantized, n * n_calls * step.rows as f64);
            let cpu = cold.times(1.0 - step.share).plus(around);
            measure(&Phase { npu: npu.load(step).times(n), submits: 1.0, cpu })
        };
        steps.iter().map(seconds).collect()
    }

    /// Matrices of expert `e` (in order) on the CPU for some rows.
    fn cpu(&self, rates: &Rates, e: usize, projections: &[Projection], rows: f64) -> Load {
        if rows <= 0.0 {
            return Load::default();
        }
        let load = |p: &Projection| {
            let matrix = &self.shapes[*p as usize];
            rates.cpu_matrix(
                matrix.dtype,
                self.source_bytes[e][*p as usize],
                matrix.n_in * matrix.n_out,
                rows,
            )
        };
        projections.iter().map(load).fold(Load::default(), Load::plus)
    }

    /// Matrices of any expert on the NPU for some rows: weights are read again for each program's rows.
    fn npu(&self, rates: &Rates, projections: &[Projection], rows: f64) -> Load {
        if rows <= 0.0 {
            return Load::default();
        }
        let load = |&(bytes, max_rows): &(f64, f64)| {
            let passes = (rows / max_rows).ceil();
            // An int8 weight is a byte, and one multiply-accumulate for each row.
            rates.npu(bytes * passes, bytes * rows, passes)
        };
        let parts = projections.iter().flat_map(|p| &self.shapes[*p as usize].parts);
        parts.map(load).fold(Load::default(), Load::plus)
    }

    /// Around hot products: gate and up share the layer's quantised rows, down has its own.
    fn around(&self, rates: &Rates, projections: &[Projection], rows: f64, layer_rows: f64) -> Load {
        let scaled: f64 = projections.iter().map(|p| self.shapes[*p as usize].n_out).sum();
        let quantized = match projections {
            [Projection::Down] => rows * self.shapes[2].n_in,
            _ => layer_rows * self.shapes[0].n_in,
        };
        rates.around(quantized, rows * scaled)
    }
}

/// The curves of both phases, each by experts and by rows.
fn both(curves: impl Fn(&[Projection]) -> [Vec<f64>; 2]) -> Curves {
    let [gate_up, mut gate_up_rows] = curves(&[Projection::Gate, Projection::Up]);
    let [down, mut down_rows] = curves(&[Projection::Down]);
    // Both begin with nothing hot: to the bit, so that neither seems to gain by that.
    (gate_up_rows[0], down_rows[0]) = (gate_up[0], down[0]);
    Curves { experts: Phases { gate_up, down }, rows: Phases { gate_up: gate_up_rows, down: down_rows } }
}

/// The shapes of the three projections and their programs.
type Programs = ([Matrix; 3], [Option<Vec<SubMatrix>>; 3]);

fn programs(shape: &MoeLayerShape, profile: &DeviceProfile) -> Result<Programs, TileError> {
    let cut = |p: Projection| -> Result<(Matrix, Option<Vec<SubMatrix>>), TileError> {
        let first = shape.experts.first().map(|matrices| matrices[p as usize]);
        let (n_in, n_out) = first.map_or((0, 0), |matrix| (matrix.n_in, matrix.n_out));
        let dtype = first.map_or(Dtype::F32, |matrix| matrix.dtype);
        let parts = match tile::cut(n_in as u64, n_out as u64, profile) {
            Ok(parts) => Some(parts),
            Err(TileError::TooLarge { .. }) => None,
            Err(error) => return Err(error),
        };
        let price = |part: &SubMatrix| {
            (part.bytes() as f64, f64::from(profile.max_rows(part.k_padded).unwrap_or(1).max(1)))
        };
        let priced = parts.iter().flatten().map(price).collect();
        Ok((Matrix { n_in: n_in as f64, n_out: n_out as f64, dtype, parts: priced }, parts))
    };
    let [(gate, gate_parts), (up, up_parts), (down, down_parts)] =
        [cut(Projection::Gate)?, cut(Projection::Up)?, cut(Projection::Down)?];
    Ok(([gate, up, down], [gate_parts, up_parts, down_parts]))
}

impl BatchRows {
    /// The bins of expert `e`: numbers of rows above 0, and how likely.
    fn of(&self, e: usize) -> &[(f64, f64)] {
        let first = if e == 0 { 0 } else { self.ends[e - 1] };
        &self.bins[first..self.ends[e]]
    }

    /// The histograms of a layer. A bin of several numbers stands for its middle, moved so that the mean is what the
    /// calls say.
    fn counted(rows: &RowsPerExpert, order: &[u32], inclusion: &[f64]) -> BatchRows {
        let (edges, most) = (bin_edges(rows.batch), f64::from(rows.batch));
        let mut all =
            BatchRows { tokens: rows.batch, bins: Vec::new(), ends: Vec::with_capacity(order.len()) };
        for (&expert, &used) in order.iter().zip(inclusion) {
            let first = all.bins.len();
            let (mut exact, mut wide) = (0.0, 0.0);
            let histogram = rows.experts.get(expert as usize).map(Vec::as_slice).unwrap_or_default();
            for (i, &n) in histogram.iter().enumerate().skip(1).filter(|&(_, &n)| n > 0) {
                let (least, p) = (edges[i - 1] + 1, n as f64 / rows.batches as f64);
                let middle = f64::from(least + edges[i]) / 2.0;
                *(if least == edges[i] { &mut exact } else { &mut wide }) += middle * p;
                all.bins.push((middle, p));
            }
            let factor = if wide > 0.0 { ((most * used - exact) / wide).clamp(0.5, 2.0) } else { 1.0 };
            // Bins of one number, 1 and 2, are exact; no middle of another is below 3.
            for (middle, _) in all.bins[first..].iter_mut().filter(|(middle, _)| *middle > 2.0) {
                *middle = (*middle * factor).clamp(1.0, most);
            }
            all.ends.push(all.bins.len());
        }
        all
    }

    /// Where nothing was counted: for each expert two numbers of rows that have the mean and the spread of `tokens`
    /// independent choices, none left out.
    fn binomial(tokens: u32, inclusion: &[f64]) -> BatchRows {
        let mut all = BatchRows { tokens, bins: Vec::new(), ends: Vec::with_capacity(inclusion.len()) };
        let tokens = f64::from(tokens);
        for &p in inclusion {
            let some = 1.0 - (1.0 - p).powf(tokens);
            if some > 0.0 {
                let mean = tokens * p / some;
                let square = (tokens * p * (1.0 - p) + (tokens * p).powi(2)) / some;
                let spread = (square - mean * mean).max(0.0).sqrt();
                let spread = spread.min(mean - 1.0).min(tokens - mean).max(0.0);
                all.bins.extend([(mean - spread, some / 2.0), (mean + spread, some / 2.0)]);
            }
            all.ends.push(all.bins.len());
        }
        all
    }
}

/// Sum of probabilities, and of loads so weighted.
fn weighted(p: &[f64], loads: &[Load]) -> (f64, Load) {
    p.iter()
        .zip(loads)
        .fold((0.0, Load::default()), |(sum, load), (&p, &one)| (sum + p, load.plus(one.times(p))))
}

fn less((sum, load): (f64, Load), p: f64, one: Load) -> (f64, Load) {
    (sum - p, load.less(one.times(p)))
}
