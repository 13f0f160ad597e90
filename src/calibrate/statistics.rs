//! The routing statistics document, version 1 (`*.routing.json`, schema: `formats/statistics.schema.json`).
//!
//! Everything is an integer, so that sums neither depend on their order nor on how a float is printed. A file is a
//! stranger's: [`Statistics::from_json`] checks every length and every sum before anything is believed.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::executor::Routing;
use crate::units::{ExpertId, LayerId};

/// The name of this version of the document.
const SCHEMA: &str = "orkpack-statistics-1";

/// Batches at which the rows per expert are counted: decode, speculative decode, and prefill of growing prompts.
pub const BATCHES: [u32; 6] = [1, 8, 32, 64, 128, 512];

/// More of anything is no count: JSON numbers of other programs are exact up to here.
const MAX_COUNT: u64 = 1 << 53;

/// More experts in a layer, or layers, than any model has.
const MAX_EXPERTS: u32 = 1 << 16;
const MAX_LAYERS: usize = 1 << 12;

/// Where counts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A counting forward pass of this program.
    #[serde(rename = "calibration")]
    Calibration,
    /// The per-expert counts of an importance matrix file.
    #[serde(rename = "imatrix")]
    Imatrix,
    /// Several documents, added up.
    #[serde(rename = "merged")]
    Merged,
}

/// A layer with experts, as far as its routing goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoutedLayer {
    /// The block number, as in `blk.<layer>.`.
    pub layer: u32,
    /// Experts of the layer.
    pub n_expert: u32,
    /// Experts chosen for each token.
    pub n_used: u32,
}

/// One of the documents that a merged one was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// blake3 of the document, hex.
    pub digest: String,
    /// How often its counts were added.
    pub weight: u32,
    /// Its calibration tokens, before weighting.
    pub tokens: u64,
    /// Its held-out tokens, before weighting.
    pub held_out_tokens: u64,
}

/// In how many batches an expert got how many rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowsPerExpert {
    /// Tokens per batch; a window's last, shorter batch is left out.
    pub batch: u32,
    /// Batches seen.
    pub batches: u64,
    /// `[n_expert][bins]`, bins as [`bin_edges`] gives them; each expert's bins add up to `batches`.
    pub experts: Vec<Vec<u64>>,
}

/// The counts of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCounts {
    /// The block number.
    pub layer: u32,
    /// `[n_expert]`: how often each expert was chosen. Adds up to `n_used` × tokens.
    pub calls: Vec<u64>,
    /// `[n_expert]`: sum of the router weights of these calls, in millionths; empty where unknown.
    pub mass_millionths: Vec<u64>,
    /// Rows per expert at each of [`BATCHES`]; empty where unknown.
    pub rows: Vec<RowsPerExpert>,
}

/// The counts of one text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Tokens read.
    pub tokens: u64,
    /// Windows they were read in.
    pub windows: u64,
    /// One entry per layer with experts, in order.
    pub layers: Vec<LayerCounts>,
}

/// Routing statistics, version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statistics {
    /// `orkpack-statistics-1`.
    pub schema: String,
    /// Where the counts come from.
    pub origin: Origin,
    /// Digest of the model's shapes and router tensors, hex: the same for every quantisation of one model, another
    /// one after fine-tuning. `None` where only the shapes are known to fit.
    pub fingerprint: Option<String>,
    /// `general.architecture` of the model.
    pub architecture: String,
    /// Which arithmetic counted: counts come from float sums, which may differ between instruction sets.
    pub kernel: String,
    /// The layers with experts, in order.
    pub layers: Vec<RoutedLayer>,
    /// The text that plans are made from.
    pub calibration: Block,
    /// Text that was set aside (every k-th window) and is never used to choose, only to check.
    pub held_out: Option<Block>,
    /// What a merged document was made of; empty otherwise.
    pub sources: Vec<Source>,
}

/// Statistics that are broken or belong to another model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StatisticsError {
    /// Not JSON, or not such a document.
    #[error("routing statistics: {0}")]
    Json(#[from] serde_json::Error),
    /// A document of another kind or version.
    #[error("routing statistics: schema is `{found}`, expected `{SCHEMA}`")]
    Schema {
        /// What it says.
        found: String,
    },
    /// A document without layers, tokens, or with a value that nothing has.
    #[error("routing statistics: {field} is {found}, expected {expected}")]
    Value {
        /// Which value.
        field: String,
        /// What it holds.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Routing that cannot have happened.
    #[error("routing of layer {layer}: {what}")]
    Routing {
        /// The layer.
        layer: u32,
        /// What is wrong.
        what: String,
    },
    /// Statistics of a model with other layers or experts.
    #[error(
        "routing statistics are of another model: {what}; calibrate this model, or name its own statistics"
    )]
    OtherShape {
        /// What differs.
        what: String,
    },
    /// Statistics of a model of the same shape with other routers.
    #[error(
        "routing statistics are of another model of the same shape: fingerprint {found}, this model's is {expected}; \
         calibrate this model, or use --accept-foreign-statistics"
    )]
    Foreign {
        /// The document's.
        found: String,
        /// The model's.
        expected: String,
    },
}

/// How much of a model its statistics have seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Coverage {
    /// Calibration tokens.
    pub tokens: u64,
    /// Tokens at which an expert is chosen 20 times where routing is even.
    pub tokens_wanted: u64,
    /// Experts of all layers.
    pub n_experts: u64,
    /// The experts that were never chosen.
    pub never_seen: Vec<(LayerId, ExpertId)>,
}

impl Coverage {
    /// Share of experts never chosen.
    pub fn unseen_share(&self) -> f64 {
        self.never_seen.len() as f64 / (self.n_experts as f64).max(1.0)
    }

    /// Whether the text was too short to rank all experts.
    pub fn is_thin(&self) -> bool {
        self.tokens < self.tokens_wanted
    }
}

/// Upper edges of the bins of rows at a batch: 0, then powers of two, then the batch itself.
///
/// Bin `i` holds the batches in which the expert got more than `edges[i - 1]` and at most `edges[i]` rows.
pub fn bin_edges(batch: u32) -> Vec<u32> {
    let powers = (0..32).map(|i| 1u32 << i).take_while(|&edge| edge < batch);
    std::iter::once(0).chain(powers).chain([batch]).collect()
}

impl Block {
    /// A block that has seen nothing.
    pub fn empty(layers: &[RoutedLayer]) -> Block {
        let counts = |layer: &RoutedLayer| {
            let n_expert = layer.n_expert as usize;
            let rows = |&batch: &u32| RowsPerExpert {
                batch,
                batches: 0,
                experts: vec![vec![0; bin_edges(batch).len()]; n_expert],
            };
            LayerCounts {
                layer: layer.layer,
                calls: vec![0; n_expert],
                mass_millionths: vec![0; n_expert],
                rows: BATCHES.iter().map(rows).collect(),
            }
        };
        Block { tokens: 0, windows: 0, layers: layers.iter().map(counts).collect() }
    }

    /// Counts one layer's routing of one window, all of its rows in order.
    ///
    /// # Errors
    ///
    /// [`StatisticsError::Routing`] for a layer or expert that is not there, or a weight that is no number.
    pub fn record(&mut self, layer: LayerId, routing: &Routing) -> Result<(), StatisticsError> {
        let refuse = |what: String| StatisticsError::Routing { layer: layer.0, what };
        let at = self
            .layers
            .binary_search_by_key(&layer.0, |counts| counts.layer)
            .map_err(|_| refuse("it has no experts".to_owned()))?;
        let counts = &mut self.layers[at];
        let n_expert = counts.calls.len();
        for (expert, &weight) in routing.experts.iter().zip(&routing.weights) {
            if expert.index() >= n_expert {
                return Err(refuse(format!("expert {expert} of {n_expert}")));
            }
            if !weight.is_finite() || !(0.0..1e6).contains(&weight.abs()) {
                return Err(refuse(format!("expert {expert} has weight {weight}")));
            }
            counts.calls[expert.index()] += 1;
            counts.mass_millionths[expert.index()] += (f64::from(weight.abs()) * 1e6).round() as u64;
        }
        for rows in &mut counts.rows {
            count_batches(rows, routing, n_expert);
        }
        Ok(())
    }

    /// Closes a window in which every layer was recorded.
    pub fn end_window(&mut self, tokens: u64) {
        self.tokens += tokens;
        self.windows += 1;
    }

    /// The counts of a layer.
    pub fn layer(&self, layer: LayerId) -> Option<&LayerCounts> {
        let at = self.layers.binary_search_by_key(&layer.0, |counts| counts.layer).ok()?;
        self.layers.get(at)
    }
}

/// Adds a window's whole batches to the histogram.
fn count_batches(rows: &mut RowsPerExpert, routing: &Routing, n_expert: usize) {
    let edges = bin_edges(rows.batch);
    let mut hits = vec![0u32; n_expert];
    for batch in routing.experts.chunks_exact(rows.batch as usize * routing.n_used.max(1)) {
        hits.fill(0);
        for expert in batch {
            hits[expert.index()] += 1;
        }
        for (bins, &hits) in rows.experts.iter_mut().zip(&hits) {
            bins[edges.partition_point(|&edge| edge < hits).min(edges.len() - 1)] += 1;
        }
        rows.batches += 1;
    }
}

impl LayerCounts {
    /// All calls of the layer.
    pub fn total(&self) -> u64 {
        self.calls.iter().sum()
    }

    /// The rows per expert at a batch; `None` where no whole batch of that length was seen.
    pub fn rows_at(&self, batch: u32) -> Option<&RowsPerExpert> {
        self.rows.iter().find(|rows| rows.batch == batch && rows.batches > 0)
    }
}

impl Statistics {
    /// A document from the counts of a calibration.
    ///
    /// # Errors
    ///
    /// [`StatisticsError`] when the counts are not of these layers, or empty.
    pub fn new(
        fingerprint: String,
        architecture: String,
        kernel: String,
        layers: Vec<RoutedLayer>,
        calibration: Block,
        held_out: Option<Block>,
    ) -> Result<Statistics, StatisticsError> {
        let held_out = held_out.filter(|block| block.tokens > 0);
        let fingerprint = Some(fingerprint);
        let (schema, origin, sources) = (SCHEMA.to_owned(), Origin::Calibration, Vec::new());
        let statistics = Statistics {
            schema,
            origin,
            fingerprint,
            architecture,
            kernel,
            layers,
            calibration,
            held_out,
            sources,
        };
        statistics.check()?;
        Ok(statistics)
    }

    /// Counts without rows per expert, mass, held-out text or fingerprint: what an imatrix file has.
    pub(super) fn from_counts(
        architecture: String,
        layers: Vec<RoutedLayer>,
        calls: Vec<Vec<u64>>,
        tokens: u64,
        windows: u64,
    ) -> Result<Statistics, StatisticsError> {
        let counts = |(layer, calls): (&RoutedLayer, Vec<u64>)| LayerCounts {
            layer: layer.layer,
            calls,
            mass_millionths: Vec::new(),
            rows: Vec::new(),
        };
        let calibration = Block { tokens, windows, layers: layers.iter().zip(calls).map(counts).collect() };
        let statistics = Statistics {
            schema: SCHEMA.to_owned(),
            origin: Origin::Imatrix,
            fingerprint: None,
            architecture,
            kernel: "imatrix".to_owned(),
            layers,
            calibration,
            held_out: None,
            sources: Vec::new(),
        };
        statistics.check()?;
        Ok(statistics)
    }

    /// A document from a file's bytes, every length and sum checked. A byte order mark is skipped.
    ///
    /// # Errors
    ///
    /// [`StatisticsError`] naming line, layer or expert.
    pub fn from_json(json: &[u8]) -> Result<Statistics, StatisticsError> {
        let statistics: Statistics =
            serde_json::from_slice(json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json))?;
        statistics.check()?;
        Ok(statistics)
    }

    /// The document as JSON, with a line feed at its end: equal statistics give equal bytes.
    ///
    /// # Errors
    ///
    /// [`StatisticsError::Json`], which no well-formed document meets.
    pub fn to_json(&self) -> Result<Vec<u8>, StatisticsError> {
        let mut json = serde_json::to_vec(self)?;
        json.push(b'\n');
        Ok(json)
    }

    /// blake3 of [`Statistics::to_json`], hex.
    ///
    /// # Errors
    ///
    /// As [`Statistics::to_json`].
    pub fn digest(&self) -> Result<String, StatisticsError> {
        Ok(blake3::hash(&self.to_json()?).to_hex().to_string())
    }

    /// An expert's share of its layer's calls, as planned with: half a call is added to every expert, so that one
    /// call more or less of a rare expert changes nothing and no share is zero. `None` for an expert not there.
    pub fn share(&self, layer: LayerId, expert: ExpertId) -> Option<f64> {
        let counts = self.calibration.layer(layer)?;
        let calls = *counts.calls.get(expert.index())?;
        let total = counts.total() as f64 + 0.5 * counts.calls.len() as f64;
        Some((calls as f64 + 0.5) / total)
    }

    /// How much of the model the calibration text reached.
    pub fn coverage(&self) -> Coverage {
        let never_seen = self.calibration.layers.iter().flat_map(|counts| {
            let unseen = counts.calls.iter().enumerate().filter(|&(_, &calls)| calls == 0);
            unseen.map(|(expert, _)| (LayerId(counts.layer), ExpertId(expert as u32)))
        });
        let wanted =
            |layer: &RoutedLayer| (20 * u64::from(layer.n_expert)).div_ceil(u64::from(layer.n_used.max(1)));
        Coverage {
            tokens: self.calibration.tokens,
            tokens_wanted: self.layers.iter().map(wanted).max().unwrap_or(0),
            n_experts: self.layers.iter().map(|layer| u64::from(layer.n_expert)).sum(),
            never_seen: never_seen.collect(),
        }
    }

    /// Tokens as independent observations: weighting in a merge repeats tokens, which adds no evidence.
    pub fn effective_tokens(&self, held_out: bool) -> f64 {
        let block = if held_out { self.held_out.as_ref() } else { Some(&self.calibration) };
        let Some(block) = block else { return 0.0 };
        let tokens = |source: &Source| if held_out { source.held_out_tokens } else { source.tokens } as f64;
        let sum: f64 = self.sources.iter().map(|s| f64::from(s.weight) * tokens(s)).sum();
        let squares: f64 = self.sources.iter().map(|s| f64::from(s.weight).powi(2) * tokens(s)).sum();
        if squares > 0.0 { sum * sum / squares } else { block.tokens as f64 }
    }

    /// Whether these are the statistics of a model with these layers and this fingerprint.
    ///
    /// Without a fingerprint on either side only the shapes are compared.
    ///
    /// # Errors
    ///
    /// [`StatisticsError::OtherShape`], or [`StatisticsError::Foreign`], which the user may overrule.
    pub fn check_model(
        &self,
        layers: &[RoutedLayer],
        fingerprint: Option<&str>,
    ) -> Result<(), StatisticsError> {
        check_layers(&self.layers, layers)?;
        match (self.fingerprint.as_deref(), fingerprint) {
            (Some(found), Some(expected)) if found != expected => Err(StatisticsError::Foreign {
                found: abbreviate(found).to_owned(),
                expected: abbreviate(expected).to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<(), StatisticsError> {
        if self.schema != SCHEMA {
            return Err(StatisticsError::Schema { found: self.schema.clone() });
        }
        if let Some(digest) = &self.fingerprint {
            check_digest("fingerprint", digest)?;
        }
        check_words("architecture", &self.architecture)?;
        check_words("kernel", &self.kernel)?;
        let n_layer = self.layers.len();
        if n_layer == 0 || n_layer > MAX_LAYERS {
            return refuse("the number of layers", n_layer, format!("1 to {MAX_LAYERS}"));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 && self.layers[i - 1].layer >= layer.layer {
                return refuse(format!("layers[{i}].layer"), layer.layer, "ascending layers");
            }
            if !(1..=MAX_EXPERTS).contains(&layer.n_expert) {
                return refuse(
                    format!("n_expert of layer {}", layer.layer),
                    layer.n_expert,
                    format!("1 to {MAX_EXPERTS}"),
                );
            }
            if !(1..=layer.n_expert).contains(&layer.n_used) {
                return refuse(
                    format!("n_used of layer {}", layer.layer),
                    layer.n_used,
                    "1 to the number of experts",
                );
            }
        }
        self.check_block("calibration", &self.calibration)?;
        if let Some(block) = &self.held_out {
            self.check_block("held_out", block)?;
        }
        self.check_sources()
    }

    fn check_sources(&self) -> Result<(), StatisticsError> {
        if (self.origin == Origin::Merged) == self.sources.is_empty() {
            return refuse("sources", self.sources.len(), "sources if, and only if, the document is merged");
        }
        for (i, source) in self.sources.iter().enumerate() {
            check_digest(&format!("sources[{i}].digest"), &source.digest)?;
            if !(1..=super::merge::MAX_WEIGHT).contains(&source.weight) {
                return refuse(format!("sources[{i}].weight"), source.weight, "a small positive number");
            }
        }
        let sum = |tokens: fn(&Source) -> u64| {
            self.sources.iter().map(|s| u128::from(s.weight) * u128::from(tokens(s))).sum::<u128>()
        };
        let held_out = self.held_out.as_ref().map_or(0, |block| block.tokens);
        for (field, tokens, found) in [
            ("sources[].tokens", self.calibration.tokens, sum(|s| s.tokens)),
            ("sources[].held_out_tokens", held_out, sum(|s| s.held_out_tokens)),
        ] {
            if !self.sources.is_empty() && found != u128::from(tokens) {
                return refuse(field, found, format!("a weighted sum of {tokens}"));
            }
        }
        Ok(())
    }

    fn check_block(&self, name: &str, block: &Block) -> Result<(), StatisticsError> {
        if block.tokens == 0 || block.tokens > MAX_COUNT {
            return refuse(format!("{name}.tokens"), block.tokens, "1 to 2^53");
        }
        if block.windows == 0 || block.windows > block.tokens {
            return refuse(format!("{name}.windows"), block.windows, "1 to the number of tokens");
        }
        if block.layers.len() != self.layers.len() {
            return refuse(
                format!("the number of layers in {name}"),
                block.layers.len(),
                self.layers.len().to_string(),
            );
        }
        for (layer, counts) in self.layers.iter().zip(&block.layers) {
            if counts.layer != layer.layer {
                return refuse(format!("{name}, layer"), counts.layer, layer.layer.to_string());
            }
            check_counts(name, block.tokens, layer, counts)?;
        }
        Ok(())
    }
}

fn check_counts(
    name: &str,
    tokens: u64,
    layer: &RoutedLayer,
    counts: &LayerCounts,
) -> Result<(), StatisticsError> {
    let (n_expert, number) = (layer.n_expert as usize, layer.layer);
    if counts.calls.len() != n_expert {
        return refuse(
            format!("{name}, layer {number}: number of experts"),
            counts.calls.len(),
            n_expert.to_string(),
        );
    }
    for (expert, &calls) in counts.calls.iter().enumerate() {
        if calls > tokens {
            return refuse(
                format!("{name}, layer {number}, expert {expert}: calls"),
                calls,
                format!("at most one for each of {tokens} tokens"),
            );
        }
    }
    let (found, expected) = (counts.total(), u128::from(tokens) * u128::from(layer.n_used));
    if u128::from(found) != expected {
        return refuse(
            format!("{name}, layer {number}: sum of calls"),
            found,
            format!("{expected}, {} for each of {tokens} tokens", layer.n_used),
        );
    }
    if !counts.mass_millionths.is_empty() && counts.mass_millionths.len() != n_expert {
        return refuse(
            format!("{name}, layer {number}: length of mass_millionths"),
            counts.mass_millionths.len(),
            format!("{n_expert} or none"),
        );
    }
    for (expert, (&mass, &calls)) in counts.mass_millionths.iter().zip(&counts.calls).enumerate() {
        if mass > MAX_COUNT || (mass > 0 && calls == 0) {
            return refuse(
                format!("{name}, layer {number}, expert {expert}: mass_millionths"),
                mass,
                format!("the mass of {calls} calls"),
            );
        }
    }
    check_rows(name, tokens, layer, counts)
}

fn check_rows(
    name: &str,
    tokens: u64,
    layer: &RoutedLayer,
    counts: &LayerCounts,
) -> Result<(), StatisticsError> {
    let number = layer.layer;
    let batches: Vec<u32> = counts.rows.iter().map(|rows| rows.batch).collect();
    if !batches.is_empty() && batches != BATCHES {
        return refuse(
            format!("{name}, layer {number}: batches of rows"),
            format!("{batches:?}"),
            format!("{BATCHES:?}, or none"),
        );
    }
    for rows in &counts.rows {
        let at = format!("{name}, layer {number}, batch {}", rows.batch);
        if u128::from(rows.batches) * u128::from(rows.batch) > u128::from(tokens) {
            return refuse(format!("{at}: batches"), rows.batches, format!("what {tokens} tokens hold"));
        }
        if rows.experts.len() != layer.n_expert as usize {
            return refuse(
                format!("{at}: number of experts"),
                rows.experts.len(),
                layer.n_expert.to_string(),
            );
        }
        let edges = bin_edges(rows.batch);
        for (expert, (bins, &calls)) in rows.experts.iter().zip(&counts.calls).enumerate() {
            let sum: u128 = bins.iter().map(|&n| u128::from(n)).sum();
            if bins.len() != edges.len() || sum != u128::from(rows.batches) {
                return refuse(
                    format!("{at}, expert {expert}: {} bins with a sum of", bins.len()),
                    sum,
                    format!("{} bins with a sum of {}", edges.len(), rows.batches),
                );
            }
            // The least rows that such bins can mean: one above the edge below.
            let least: u128 = bins
                .iter()
                .zip(&edges)
                .enumerate()
                .map(|(i, (&n, _))| u128::from(n) * if i == 0 { 0 } else { u128::from(edges[i - 1]) + 1 })
                .sum();
            if least > u128::from(calls) {
                return refuse(
                    format!("{at}, expert {expert}: rows"),
                    least,
                    format!("at most its {calls} calls"),
                );
            }
        }
    }
    Ok(())
}

/// Whether two models have the same layers of experts.
pub(super) fn check_layers(found: &[RoutedLayer], expected: &[RoutedLayer]) -> Result<(), StatisticsError> {
    let other = |what: String| Err(StatisticsError::OtherShape { what });
    if found.len() != expected.len() {
        return other(format!("{} layers with experts, not {}", found.len(), expected.len()));
    }
    for (f, e) in found.iter().zip(expected) {
        if f.layer != e.layer {
            return other(format!("experts in layer {}, not in layer {}", f.layer, e.layer));
        }
        if f.n_expert != e.n_expert || f.n_used != e.n_used {
            return other(format!(
                "layer {} has {} experts and uses {}, not {} and {}",
                f.layer, f.n_expert, f.n_used, e.n_expert, e.n_used
            ));
        }
    }
    Ok(())
}

/// A digest is 64 hex digits, as blake3 prints them.
fn check_digest(field: &str, digest: &str) -> Result<(), StatisticsError> {
    if digest.len() == 64 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Ok(());
    }
    refuse(field, format!("{} characters", digest.chars().count()), "64 hex digits")
}

/// Short names are printed later: no control characters, no novels.
fn check_words(field: &str, words: &str) -> Result<(), StatisticsError> {
    if words.len() <= 128 && words.chars().all(|c| !c.is_control()) {
        return Ok(());
    }
    refuse(field, format!("{} bytes", words.len()), "at most 128 bytes without control characters")
}

fn abbreviate(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

fn refuse<T>(
    field: impl Into<String>,
    found: impl ToString,
    expected: impl Into<String>,
) -> Result<T, StatisticsError> {
    Err(StatisticsError::Value { field: field.into(), found: found.to_string(), expected: expected.into() })
}
