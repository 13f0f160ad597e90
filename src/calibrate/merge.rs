//! Several statistics of one model as one: counts added, each as often as its weight says.

use thiserror::Error;

use super::statistics::{
    Block, LayerCounts, Origin, RowsPerExpert, Source, Statistics, StatisticsError, check_layers,
};

/// Largest weight of a document in a merge.
pub const MAX_WEIGHT: u32 = 1000;

/// Why statistics could not be merged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MergeError {
    /// Nothing to merge.
    #[error("nothing to merge")]
    Empty,
    /// A weight out of range.
    #[error("weight {0} is not from 1 to {MAX_WEIGHT}")]
    Weight(u32),
    /// Documents of different models.
    #[error("document {number} does not fit the first: {error}")]
    Differs {
        /// Which, counted from 1.
        number: usize,
        /// Why.
        error: StatisticsError,
    },
    /// Sums beyond what a document may hold.
    #[error("the sums are larger than any count")]
    Overflow,
    /// The result is no document.
    #[error(transparent)]
    Statistics(#[from] StatisticsError),
}

/// Adds statistics of one model, each as if its text had been read `weight` times.
///
/// Mass and rows per expert are kept where every document has them. The held-out text is the sum of what the
/// documents set aside; documents without any add nothing to it.
///
/// # Errors
///
/// [`MergeError`] when the documents are of different models or the sums overflow.
pub fn merge(documents: &[(Statistics, u32)]) -> Result<Statistics, MergeError> {
    let ((first, _), _) = documents.split_first().ok_or(MergeError::Empty)?;
    let mut sources = Vec::new();
    for (i, (document, weight)) in documents.iter().enumerate() {
        let differs = |error| MergeError::Differs { number: i + 1, error };
        check_layers(&document.layers, &first.layers).map_err(differs)?;
        document.check_model(&first.layers, first.fingerprint.as_deref()).map_err(differs)?;
        if !(1..=MAX_WEIGHT).contains(weight) {
            return Err(MergeError::Weight(*weight));
        }
        sources.push(Source {
            digest: document.digest()?,
            weight: *weight,
            tokens: document.calibration.tokens,
            held_out_tokens: document.held_out.as_ref().map_or(0, |block| block.tokens),
        });
    }
    let calibration = documents.iter().map(|(document, weight)| (&document.calibration, *weight));
    let held_out: Vec<_> = documents
        .iter()
        .filter_map(|(document, weight)| Some((document.held_out.as_ref()?, *weight)))
        .collect();
    let same = |name: fn(&Statistics) -> &String| {
        let same = documents.iter().all(|(document, _)| name(document) == name(first));
        if same { name(first).clone() } else { "several".to_owned() }
    };
    let known = documents.iter().all(|(document, _)| document.fingerprint.is_some());
    let merged = Statistics {
        origin: Origin::Merged,
        fingerprint: first.fingerprint.clone().filter(|_| known),
        architecture: same(|document| &document.architecture),
        kernel: same(|document| &document.kernel),
        calibration: add(&calibration.collect::<Vec<_>>()).ok_or(MergeError::Overflow)?,
        held_out: match held_out.is_empty() {
            true => None,
            false => Some(add(&held_out).ok_or(MergeError::Overflow)?),
        },
        sources,
        ..first.clone()
    };
    // What was added is checked like what is read: a sum over 2^53 is refused here.
    Ok(Statistics::from_json(&merged.to_json()?)?)
}

/// The weighted sum of blocks of the same layers; `None` on overflow.
fn add(blocks: &[(&Block, u32)]) -> Option<Block> {
    let (first, _) = blocks.first()?;
    let sum =
        |count: fn(&Block) -> u64| weighted(&blocks.iter().map(|(b, w)| (count(b), *w)).collect::<Vec<_>>());
    let layers = (0..first.layers.len()).map(|i| {
        let layers: Vec<(&LayerCounts, u32)> =
            blocks.iter().filter_map(|(block, weight)| Some((block.layers.get(i)?, *weight))).collect();
        add_layers(&layers)
    });
    Some(Block {
        tokens: sum(|block| block.tokens)?,
        windows: sum(|block| block.windows)?,
        layers: layers.collect::<Option<_>>()?,
    })
}

fn add_layers(layers: &[(&LayerCounts, u32)]) -> Option<LayerCounts> {
    let (first, _) = layers.first()?;
    let has_mass = layers.iter().all(|(layer, _)| !layer.mass_millionths.is_empty());
    let has_rows = layers.iter().all(|(layer, _)| !layer.rows.is_empty());
    let lists = |list: fn(&LayerCounts) -> &Vec<u64>| {
        add_lists(&layers.iter().map(|(layer, weight)| (list(layer), *weight)).collect::<Vec<_>>())
    };
    let n_batches = if has_rows { first.rows.len() } else { 0 };
    let rows = (0..n_batches).map(|i| {
        let rows: Vec<(&RowsPerExpert, u32)> =
            layers.iter().filter_map(|(layer, weight)| Some((layer.rows.get(i)?, *weight))).collect();
        add_rows(&rows)
    });
    Some(LayerCounts {
        layer: first.layer,
        calls: lists(|layer| &layer.calls)?,
        mass_millionths: if has_mass { lists(|layer| &layer.mass_millionths)? } else { Vec::new() },
        rows: rows.collect::<Option<_>>()?,
    })
}

fn add_rows(rows: &[(&RowsPerExpert, u32)]) -> Option<RowsPerExpert> {
    let (first, _) = rows.first()?;
    let experts = (0..first.experts.len()).map(|expert| {
        let bins: Vec<_> =
            rows.iter().filter_map(|(rows, weight)| Some((rows.experts.get(expert)?, *weight))).collect();
        add_lists(&bins)
    });
    Some(RowsPerExpert {
        batch: first.batch,
        batches: weighted(&rows.iter().map(|(rows, weight)| (rows.batches, *weight)).collect::<Vec<_>>())?,
        experts: experts.collect::<Option<_>>()?,
    })
}

fn add_lists(lists: &[(&Vec<u64>, u32)]) -> Option<Vec<u64>> {
    let (first, _) = lists.first()?;
    let at = |i: usize| {
        weighted(&lists.iter().filter_map(|(list, w)| Some((*list.get(i)?, *w))).collect::<Vec<_>>())
    };
    (0..first.len()).map(at).collect()
}

fn weighted(counts: &[(u64, u32)]) -> Option<u64> {
    counts
        .iter()
        .try_fold(0u64, |sum, &(count, weight)| sum.checked_add(count.checked_mul(u64::from(weight))?))
}
