//! What of one layer is resident: some of its experts, or some rows of every one of them.

use super::document::{Holds, LayerPlan};
use super::layer::LayerModel;

/// How a layer's weights are shared between the two sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Split {
    /// By experts: the first of the ranking are on the NPU.
    #[default]
    Experts,
    /// By rows: the first rows of every expert are.
    Rows,
}

/// How far each phase's curve is gone along: experts, best first, or steps of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub split: Split,
    pub gate_up: usize,
    pub down: usize,
}

impl State {
    /// So many experts, best first, with gate and up resident, and so many with down.
    pub fn experts(gate_up: usize, down: usize) -> State {
        State { split: Split::Experts, gate_up, down }
    }

    /// So many steps of rows of every expert.
    pub fn rows(gate_up: usize, down: usize) -> State {
        State { split: Split::Rows, gate_up, down }
    }

    /// Whether nothing is resident.
    pub fn is_cold(self) -> bool {
        self.gate_up + self.down == 0
    }

    /// Items of the ranking of which anything is resident, of so many.
    pub fn n_items(self, n_expert: usize) -> usize {
        match self.split {
            Split::Experts => self.gate_up.max(self.down),
            Split::Rows if self.is_cold() => 0,
            Split::Rows => n_expert,
        }
    }

    /// What of it is hot when the first `n` items are. Rows are hot in every expert or in none.
    pub fn first(self, n: usize) -> State {
        match self.split {
            Split::Experts => State::experts(n.min(self.gate_up), n.min(self.down)),
            Split::Rows if n == 0 => State::default(),
            Split::Rows => self,
        }
    }

    /// What is hot of a layer of a plan when the first `n` items are.
    pub fn of_plan(plan: &LayerPlan, model: &LayerModel, n: usize) -> State {
        let items = plan.ranking.get(..n).unwrap_or_default();
        if !items.iter().any(|item| item.holds == Holds::Rows) {
            let of = |other: Holds| items.iter().filter(|item| item.holds != other).count();
            return State::experts(of(Holds::Down), of(Holds::GateUp));
        }
        let rows = |p: usize| plan.matrices.get(p).map_or(0, |matrix| matrix.n_rows());
        State::rows(model.rows.gate_up_at(rows(0)), model.rows.down_at(rows(2)))
    }
}
