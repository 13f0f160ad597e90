//! The calls of one layer's experts, grouped so that each expert's weights are read once for all its rows.
//!
//! ```text
//! calls, any order ─► groups: one expert, its rows ─► pieces: a group, a range of outputs
//!
//! phase 1  piece (group, n_ff range)     hidden = activation(gate · x, up · x)   into a tile of its own
//! phase 2  piece (group)                 the group's tiles joined and quantised
//! phase 3  piece (group, n_embd range)   down · hidden                        into the caller's rows
//! ```

use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

use super::{Call, Core, CpuExecutor, ExecutorError, Failure, MOST_SCRATCH};
use super::{expect, lock, shape, shifted, width};
use crate::blocks::BlockError;
use crate::executor::ExpertBank;
use crate::kernel::{Activations, Form, Kernel, Loops};
use crate::tensor::{MatrixView, Projection, WeightView};
use crate::threads::Patch;
use crate::units::{ExpertId, LayerId};

/// Buffers that are kept from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    /// The calls' numbers, grouped by expert.
    order: Vec<u32>,
    /// The activation row of each, in that order.
    rows: Vec<u32>,
    /// 0, 1, 2, …: the row list that names every row.
    pub(super) every_row: Vec<u32>,
    /// One per piece of phase 1.
    tiles: Vec<Mutex<Tile>>,
    /// One per group.
    hidden: Vec<RwLock<Hidden>>,
}

/// Results of one piece of phase 1, `[rows of the group, outputs of the piece]`.
#[derive(Default)]
struct Tile {
    /// The gate's outputs, and then what becomes of them.
    hidden: Vec<f32>,
    up: Vec<f32>,
}

/// `[rows of the group, n_ff]`, as they are and as down wants them.
#[derive(Default)]
struct Hidden {
    rows: Vec<f32>,
    acts: Activations,
}

/// Calls of one expert, a range of [`Scratch::order`], with the expert's matrices.
struct Group<'a> {
    calls: Range<usize>,
    bank: &'a ExpertBank,
    expert: ExpertId,
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Matrix<'a>,
}

/// A matrix and the form of the activations it is multiplied with.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    view: WeightView<'a>,
    form: Form,
}

/// Some outputs of a group, the group by its number.
struct Piece<T> {
    group: usize,
    part: T,
}

/// The sizes of a layer's experts.
#[derive(Clone, Copy)]
struct Sizes {
    n_embd: usize,
    n_ff: usize,
}

impl CpuExecutor {
    /// All `calls` of a layer in one dispatch: `out[c] = down(activation(gate·x, up·x))`, x being the call's row of
    /// `rows`, `[m, n_embd]`. `out` is `[calls.len(), n_embd]`, not weighted.
    ///
    /// # Errors
    ///
    /// [`ExecutorError`] when weights cannot be read, shapes disagree, or a row or expert is not there.
    pub fn expert_calls(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        calls: &[Call],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let sizes = self.core.sizes(layer)?;
        check_calls(sizes, rows, calls)?;
        expect("outputs of the calls", out.len(), calls.len() * sizes.n_embd)?;
        let most_rows = (MOST_SCRATCH / 12 / sizes.n_ff.max(1)).max(1);
        self.scratch.sort(calls);
        let groups = self.core.groups(layer, calls, &self.scratch.order, most_rows)?;
        let inputs = groups.iter().flat_map(|group| [group.gate.form, group.up.form]);
        self.core.quantize_all(&mut self.acts, inputs, rows);
        let mut left = &groups[..];
        while !left.is_empty() {
            let (now, later) = left.split_at(batch_len(left, most_rows));
            self.core.run_batch(sizes, now, &mut self.scratch, &self.acts, out)?;
            left = later;
        }
        Ok(())
    }

    /// The outputs `cols` of the first half of [`CpuExecutor::expert_calls`]: `hidden` is `[calls.len(), cols.len()]`.
    ///
    /// # Errors
    ///
    /// As [`CpuExecutor::expert_calls`].
    pub fn gate_up_calls(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        calls: &[Call],
        cols: Range<usize>,
        hidden: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let sizes = self.core.sizes(layer)?;
        check_calls(sizes, rows, calls)?;
        check_cols(&cols, sizes.n_ff)?;
        expect("hidden values of the calls", hidden.len(), calls.len() * cols.len())?;
        self.scratch.sort(calls);
        let groups = self.core.groups(layer, calls, &self.scratch.order, usize::MAX)?;
        let inputs = groups.iter().flat_map(|group| [group.gate.form, group.up.form]);
        self.core.quantize_all(&mut self.acts, inputs, rows);
        let (core, acts) = (&self.core, &self.acts);
        let Scratch { order, rows, tiles, .. } = &mut self.scratch;
        let pieces = core.pieces(hidden, cols.len(), &groups, order, |group| &group.gate)?;
        grow(tiles, pieces.len());
        let failure = Failure::default();
        core.pool.run(pieces.len(), &|i| {
            let (group, mut patch) = (&groups[pieces[i].group], lock(&pieces[i].part));
            let (rows, mut tile) = (&rows[group.calls.clone()], lock(&tiles[i]));
            failure.note(i, core.gate_up(group, acts, rows, shifted(patch.cols(), cols.start), &mut tile));
            for (r, row) in tile.hidden.chunks_exact(patch.cols().len()).enumerate() {
                patch.row(r).copy_from_slice(row);
            }
        });
        failure.result()
    }

    /// The outputs `cols` of the second half of [`CpuExecutor::expert_calls`], for hidden values that come from
    /// elsewhere: `hidden` is `[calls.len(), n_ff]`, row c for call c; the calls' own rows are not looked at. `out` is
    /// `[calls.len(), cols.len()]`.
    ///
    /// # Errors
    ///
    /// As [`CpuExecutor::expert_calls`].
    pub fn down_calls(
        &mut self,
        layer: LayerId,
        hidden: MatrixView<'_, f32>,
        calls: &[Call],
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let sizes = self.core.sizes(layer)?;
        expect("rows of hidden values", hidden.n_rows(), calls.len())?;
        expect("columns of hidden values", hidden.n_cols(), sizes.n_ff)?;
        check_cols(&cols, sizes.n_embd)?;
        expect("outputs of the calls", out.len(), calls.len() * cols.len())?;
        self.scratch.sort(calls);
        let groups = self.core.groups(layer, calls, &self.scratch.order, usize::MAX)?;
        self.core.quantize_all(&mut self.acts, groups.iter().map(|group| group.down.form), hidden);
        let (core, order, acts) = (&self.core, &self.scratch.order, &self.acts);
        let pieces = core.pieces(out, cols.len(), &groups, order, |group| &group.down)?;
        let failure = Failure::default();
        core.pool.run(pieces.len(), &|i| {
            let (group, mut patch) = (&groups[pieces[i].group], lock(&pieces[i].part));
            let rows = &order[group.calls.clone()];
            let acts = &acts[group.down.form as usize];
            failure.note(i, core.down(group, acts, rows, cols.start, &mut patch));
        });
        failure.result()
    }
}

impl Scratch {
    /// Puts the calls of each expert together, in their own order.
    fn sort(&mut self, calls: &[Call]) {
        self.order.clear();
        self.order.extend(0..calls.len() as u32);
        self.order.sort_unstable_by_key(|&c| (calls[c as usize].expert, c));
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|&c| calls[c as usize].row));
    }
}

impl Hidden {
    /// Puts the tiles of `n_rows` rows side by side.
    fn join<'a>(
        &mut self,
        n_rows: usize,
        n_ff: usize,
        parts: impl Iterator<Item = (Range<usize>, &'a Mutex<Tile>)>,
    ) {
        self.rows.resize(n_rows * n_ff, 0.0);
        for (cols, tile) in parts {
            let tile = lock(tile);
            let rows = self.rows.chunks_exact_mut(n_ff);
            for (row, part) in rows.zip(tile.hidden.chunks_exact(cols.len())) {
                row[cols.clone()].copy_from_slice(part);
            }
        }
    }

    fn quantize(&mut self, kernel: Kernel, form: Form, n_ff: usize) {
        if let Some(rows) = MatrixView::new(&self.rows, self.rows.len() / n_ff, n_ff) {
            self.acts.quantize(kernel, form, rows);
        }
    }
}

impl Core {
    fn bank(&self, layer: LayerId) -> Result<&ExpertBank, ExecutorError> {
        let last = self.weights.banks().last().map_or(0, |(layer, _)| layer.index());
        self.weights.bank(layer).ok_or(shape("number of a layer with experts", layer.index(), last))
    }

    fn sizes(&self, layer: LayerId) -> Result<Sizes, ExecutorError> {
        let gate = self.bank(layer)?.gate.first().ok_or(shape("experts of the layer", 0, 1))?;
        Ok(Sizes { n_embd: gate.n_in, n_ff: gate.n_out })
    }

    /// The groups of at most `most_rows` calls that the sorted `order` falls into.
    fn groups(
        &self,
        layer: LayerId,
        calls: &[Call],
        order: &[u32],
        most_rows: usize,
    ) -> Result<Vec<Group<'_>>, ExecutorError> {
        let bank = self.bank(layer)?;
        let expert = |c: &u32| calls[*c as usize].expert;
        let mut groups = Vec::new();
        let mut first = 0;
        for run in order.chunk_by(|a, b| expert(a) == expert(b)).flat_map(|run| run.chunks(most_rows)) {
            let expert = expert(&run[0]);
            let matrix = |projection| self.matrix(bank, expert, projection);
            groups.push(Group {
                calls: first..first + run.len(),
                bank,
                expert,
                gate: matrix(Projection::Gate)?,
                up: matrix(Projection::Up)?,
                down: matrix(Projection::Down)?,
            });
            first += run.len();
        }
        Ok(groups)
    }

    fn matrix(
        &self,
        bank: &ExpertBank,
        expert: ExpertId,
        projection: Projection,
    ) -> Result<Matrix<'_>, ExecutorError> {
        let missing = shape("number of an expert", expert.index(), bank.n_expert());
        let weight = bank.weight(expert, projection).ok_or(missing)?;
        Ok(Matrix { view: self.view(weight)?, form: self.mode.form(weight) })
    }

    /// Quantises `rows` once for each form that occurs.
    fn quantize_all(
        &self,
        acts: &mut [Activations; 3],
        forms: impl Iterator<Item = Form> + Clone,
        rows: MatrixView<'_, f32>,
    ) {
        for form in Form::ALL {
            if forms.clone().any(|used| used == form) {
                self.quantize(&mut acts[form as usize], form, rows);
            }
        }
    }

    /// Cuts `out`, `[calls, n_cols]`, into pieces for the groups, each of about the same bytes of weights.
    fn pieces<'a>(
        &self,
        out: &'a mut [f32],
        n_cols: usize,
        groups: &[Group<'_>],
        order: &'a [u32],
        matrix: impl for<'g> Fn(&'g Group<'_>) -> &'g Matrix<'g>,
    ) -> Result<Vec<Piece<Mutex<Patch<'a>>>>, ExecutorError> {
        let share = self.share(groups.iter().map(|group| matrix(group).view.row_bytes() * n_cols).sum());
        let cuts: Vec<_> = groups
            .iter()
            .map(|group| (&order[group.calls.clone()], width(share, &matrix(group).view)))
            .collect();
        let n_out = out.len();
        let patches = Patch::cut(out, n_cols, &cuts).ok_or(shape("outputs of the calls", n_out, n_cols))?;
        let per_group = cuts
            .iter()
            .enumerate()
            .flat_map(|(group, (_, width))| std::iter::repeat_n(group, n_cols.div_ceil(*width)));
        Ok(per_group.zip(patches).map(|(group, patch)| Piece { group, part: Mutex::new(patch) }).collect())
    }

    /// The three phases for some groups.
    fn run_batch(
        &self,
        sizes: Sizes,
        groups: &[Group<'_>],
        scratch: &mut Scratch,
        acts: &[Activations; 3],
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        let share = self.share(groups.iter().map(|group| group.gate.view.bytes().len()).sum());
        let mut first_tile = Vec::with_capacity(groups.len() + 1);
        let mut gate_up = Vec::new();
        for (group, g) in groups.iter().zip(0..) {
            first_tile.push(gate_up.len());
            let width = width(share, &group.gate.view);
            let ranges = (0..sizes.n_ff).step_by(width).map(|o| o..sizes.n_ff.min(o + width));
            gate_up.extend(ranges.map(|part| Piece { group: g, part }));
        }
        first_tile.push(gate_up.len());
        let Scratch { order, rows, every_row, tiles, hidden } = scratch;
        grow(tiles, gate_up.len());
        grow(hidden, groups.len());
        count_to(every_row, groups.iter().map(|group| group.calls.len()).max().unwrap_or(0));
        let (rows, every_row, tiles, hidden) = (&*rows, &*every_row, &*tiles, &*hidden);
        let down = self.pieces(out, sizes.n_embd, groups, order, |group| &group.down)?;

        let failure = Failure::default();
        let gate_up_piece = |i: usize| {
            let Piece { group, part } = &gate_up[i];
            let rows = &rows[groups[*group].calls.clone()];
            let mut tile = lock(&tiles[i]);
            failure.note(i, self.gate_up(&groups[*group], acts, rows, part.clone(), &mut tile));
        };
        let join_piece = |g: usize| {
            let mut hidden = hidden[g].write().unwrap_or_else(PoisonError::into_inner);
            let parts = (first_tile[g]..first_tile[g + 1]).map(|t| (gate_up[t].part.clone(), &tiles[t]));
            hidden.join(groups[g].calls.len(), sizes.n_ff, parts);
            hidden.quantize(self.kernel, groups[g].down.form, sizes.n_ff);
        };
        let down_piece = |i: usize| {
            let (g, mut patch) = (down[i].group, lock(&down[i].part));
            let hidden = hidden[g].read().unwrap_or_else(PoisonError::into_inner);
            let every_row = &every_row[..groups[g].calls.len()];
            let result = self.down(&groups[g], &hidden.acts, every_row, 0, &mut patch);
            failure.note(gate_up.len() + i, result);
        };
        self.pool.run_phases(&[
            (gate_up.len(), &gate_up_piece),
            (groups.len(), &join_piece),
            (down.len(), &down_piece),
        ]);
        failure.result()
    }

    /// Phase 1 for some outputs of a group; what came out is in `tile.hidden`.
    fn gate_up(
        &self,
        group: &Group<'_>,
        acts: &[Activations; 3],
        rows: &[u32],
        cols: Range<usize>,
        tile: &mut Tile,
    ) -> Result<(), BlockError> {
        let n = rows.len() * cols.len();
        tile.hidden.resize(n, 0.0);
        tile.up.resize(n, 0.0);
        let Group { bank, expert, gate, up, .. } = group;
        self.kernel.multiply(gate.view, cols.clone(), &acts[gate.form as usize], rows, &mut tile.hidden)?;
        self.kernel.multiply(up.view, cols.clone(), &acts[up.form as usize], rows, &mut tile.up)?;
        let width = cols.len();
        for (hidden, up) in tile.hidden.chunks_exact_mut(width).zip(tile.up.chunks_exact(width)) {
            self.kernel.widely(Activate { bank, expert: *expert, cols: cols.clone(), hidden, up });
        }
        Ok(())
    }

    /// Phase 3 for some outputs of a group: those of the patch, whose first column is output `first`.
    fn down(
        &self,
        group: &Group<'_>,
        acts: &Activations,
        rows: &[u32],
        first: usize,
        patch: &mut Patch<'_>,
    ) -> Result<(), BlockError> {
        self.fill_patch(group.down.view, acts, rows, first, patch)?;
        let cols = shifted(patch.cols(), first);
        for row in 0..rows.len() {
            let cols = cols.clone();
            group.bank.finish_down(group.expert, cols, patch.row(row));
        }
        Ok(())
    }
}

/// [`ExpertBank::activate`].
struct Activate<'a> {
    bank: &'a ExpertBank,
    expert: ExpertId,
    cols: Range<usize>,
    hidden: &'a mut [f32],
    up: &'a [f32],
}

impl Loops for Activate<'_> {
    #[inline(always)]
    fn run(self) {
        self.bank.activate(self.expert, self.cols, self.hidden, self.up);
    }
}

/// How many groups to take on at once: as many as stay within `most_rows` calls, at least one.
fn batch_len(groups: &[Group<'_>], most_rows: usize) -> usize {
    let mut rows = 0;
    let fits = |group: &&Group<'_>| {
        rows += group.calls.len();
        rows <= most_rows
    };
    groups.iter().take_while(fits).count().max(1)
}

fn check_calls(sizes: Sizes, rows: MatrixView<'_, f32>, calls: &[Call]) -> Result<(), ExecutorError> {
    expect("columns of the activations", rows.n_cols(), sizes.n_embd)?;
    match calls.iter().find(|call| call.row as usize >= rows.n_rows()) {
        Some(call) => Err(shape("row of a call", call.row as usize, rows.n_rows())),
        None => Ok(()),
    }
}

fn check_cols(cols: &Range<usize>, most: usize) -> Result<(), ExecutorError> {
    match cols.start < cols.end && cols.end <= most {
        true => Ok(()),
        false => Err(shape("last output of a range", cols.end, most)),
    }
}

fn grow<T: Default>(list: &mut Vec<T>, n: usize) {
    list.resize_with(list.len().max(n), T::default);
}

/// Makes `list` hold 0, 1, 2, … up to `n` at least.
pub(super) fn count_to(list: &mut Vec<u32>, n: usize) {
    list.extend((list.len()..n).map(|row| row as u32));
}
