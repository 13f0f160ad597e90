//! Routing statistics: how often each expert is chosen, from a counting forward pass or an imatrix file.
//!
//! A plan needs them to know which experts are hot. They hold counts only: no prompt text, no path, no host name.
//! Nothing here decides what becomes resident; that is [`crate::plan`].

mod imatrix;
mod merge;
mod run;
mod statistics;

pub use imatrix::{ImatrixError, check_imatrix_magic, is_imatrix, read_imatrix};
pub use merge::{MAX_WEIGHT, MergeError, merge};
pub use run::{CalibrateError, CountingExecutor, Counts, Cut, n_groups, run};
pub use statistics::{
    BATCHES, Block, Coverage, LayerCounts, Origin, RoutedLayer, RowsPerExpert, Source, Statistics,
    StatisticsError, bin_edges,
};
