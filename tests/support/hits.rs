//! How well hot sets serve text that they were not chosen on: the bundled model, its planner, and other ways to choose
//! the same number of experts, replayed from the calls of the held-out texts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{self, Cut, Statistics};
use orkpack::convert::{Subject, Texts, count};
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::model::{ModelShape, Outline};
use orkpack::plan::{Objective, PlanRequest, Routing, choose};
use orkpack::profile::DeviceProfile;
use orkpack::progress::Silent;
use orkpack::threads::Pool;
use orkpack::tokenizer::{Special, Tokenizer};
use orkpack::units::{Bytes, LayerId};

use super::recorder::Recorder;

/// What the bundled model was trained for.
pub const KINDS: [&str; 4] = ["prose", "spanish", "arithmetic", "code"];

/// Hot experts of the 36: a twelfth to a half.
pub const SLOTS: [usize; 5] = [3, 6, 9, 12, 18];

/// Places of a text at which reading begins, for what stays by being called first.
const BEGINNINGS: usize = 16;

/// Milliseconds of one matrix of LFM2.5 on the prior system (docs/planning.md): its product on the CPU and moving it to the
/// NPU, both measured by others; its product there in a stream, by the cost model: 7.3 ms for 44.4 of them.
const COLD_MS: f64 = 0.688;
const HOT_MS: f64 = 0.164;
const LOAD_MS: f64 = 5.9;

/// An expert: layer and number.
pub type Expert = (u32, u32);

/// Calls in the order of decoding: token after token, layer after layer.
pub type Trace = Vec<Expert>;

/// The bundled model with its statistics of each kind and of all four, and the calls of the held-out texts.
pub struct Lab {
    shape: ModelShape,
    profile: DeviceProfile,
    /// By kind, counted over `corpora/<kind>.txt`.
    pub one: Vec<Statistics>,
    /// Counted over all four.
    pub mix: Statistics,
    /// By kind, over `corpora/heldout-<kind>.txt`.
    pub traces: Vec<Trace>,
}

fn corpus(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/corpora").join(format!("{name}.txt"))
}

impl Lab {
    /// Runs the model over everything: some seconds.
    pub fn new() -> Lab {
        let path = corpus("../models/tiny-moe-q4_k_m").with_extension("gguf");
        let source = orkpack::source::open(&path, Io::Map, &Limits::default()).expect("the model").source();
        let outline = Outline::of_runnable(source.as_ref()).expect("an outline");
        let subject = Subject { path: &path, source: &source, outline: &outline, pack: None };
        let counted =
            |files: &[PathBuf]| count(subject, Texts::Files(files), 2, &mut Silent).expect("statistics");
        let tokenizer = Tokenizer::from_metadata(source.metadata()).expect("a tokenizer");
        let model = outline.runnable().expect("a model that runs");
        let trace = |kind: &str| {
            let text = std::fs::read_to_string(corpus(&format!("heldout-{kind}"))).expect("a text");
            let tokens = tokenizer.encode(&text, Special::Plain).expect("tokens");
            let (pool, weights) = (Arc::new(Pool::new(2)), model.weights().clone());
            let mut cpu =
                CpuExecutor::new(source.clone(), weights, pool, KernelMode::Fast).expect("an executor");
            let mut recorder = Recorder::new(&mut cpu);
            // Groups of a window: one window after the other, each through all layers.
            let cut = Cut { group: 1, ..Cut::default() };
            calibrate::run(model, &mut recorder, &[tokens], cut, &mut |_, _| ControlFlow::Continue(()))
                .expect("a pass");
            by_token(&recorder, outline.shape().moe_layers.len())
        };
        Lab {
            shape: outline.shape().clone(),
            profile: DeviceProfile::built_in(DeviceProfile::DEFAULT).expect("a profile"),
            one: KINDS.iter().map(|kind| counted(&[corpus(kind)])).collect(),
            mix: counted(&KINDS.map(corpus)),
            traces: KINDS.iter().map(|kind| trace(kind)).collect(),
        }
    }

    /// The texts at once, a token of each in turn, as long as the shortest: what conversations beside each other call.
    pub fn at_once(&self) -> Trace {
        let per_token: usize = self.shape.moe_layers.iter().map(|layer| layer.n_used).sum();
        let n_tokens = self.traces.iter().map(|trace| trace.len() / per_token).min().unwrap_or(0);
        let tokens = (0..n_tokens).map(|token| token * per_token);
        tokens
            .flat_map(|at| self.traces.iter().flat_map(move |trace| trace[at..at + per_token].to_vec()))
            .collect()
    }

    /// Experts of all layers.
    pub fn n_experts(&self) -> usize {
        self.shape.moe_layers.iter().map(|layer| layer.n_expert()).sum()
    }

    /// The experts that a plan for most hits keeps hot as a whole, with a budget for so many of them.
    pub fn planned(&self, statistics: &Statistics, slots: usize) -> BTreeSet<Expert> {
        let plan = |budget: Option<u64>| {
            let mut request = PlanRequest::new(&self.shape, Routing::Measured(statistics), &self.profile);
            (request.objective, request.budget) = (Objective::Hits, budget.map(Bytes));
            choose(&request).expect("a plan")
        };
        let all = plan(None);
        let bytes = all.layers[0].ranking.iter().map(|item| item.bytes).max().expect("an expert");
        let plan = plan(Some(bytes * slots as u64));
        let mut hot = BTreeSet::new();
        for layer in &plan.layers {
            hot.extend(plan.hot(LayerId(layer.layer), 1).iter().map(|item| (layer.layer, item.expert)));
        }
        hot
    }
}

/// The calls that an executor saw, window after window and layer after layer, in the order of decoding.
fn by_token(recorder: &Recorder<'_>, n_layers: usize) -> Trace {
    let mut trace = Vec::new();
    for window in recorder.seen.chunks(n_layers) {
        for row in 0..window[0].1.n_rows() {
            for (layer, routing) in window {
                let chosen = &routing.experts[row * routing.n_used..][..routing.n_used];
                trace.extend(chosen.iter().map(|expert| (layer.0, expert.0)));
            }
        }
    }
    trace
}

/// Share of calls that a set serves.
pub fn served(trace: &[Expert], hot: &BTreeSet<Expert>) -> f64 {
    trace.iter().filter(|call| hot.contains(call)).count() as f64 / trace.len() as f64
}

/// The set of so many experts that serves most, each text counting alike: what only hindsight can choose.
pub fn best(traces: &[&Trace], slots: usize) -> BTreeSet<Expert> {
    let mut shares: BTreeMap<Expert, f64> = BTreeMap::new();
    for trace in traces {
        trace.iter().for_each(|call| *shares.entry(*call).or_default() += 1.0 / trace.len() as f64);
    }
    let mut order: Vec<(Expert, f64)> = shares.into_iter().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.into_iter().take(slots).map(|(expert, _)| expert).collect()
}

/// Shares of calls served in texts that are read one after the other, where the first so many experts that are called
/// stay.
pub fn first_touch(texts: &[&Trace], slots: usize) -> Vec<f64> {
    let mut hot = BTreeSet::new();
    replay(texts, |call| {
        let hit = hot.contains(&call);
        if !hit && hot.len() < slots {
            hot.insert(call);
        }
        hit
    })
}

/// The mean of that for one text wherever reading begins, in so many places: where it does decides what stays. From its
/// end the text goes on at its beginning.
pub fn first_touch_anywhere(trace: &Trace, slots: usize) -> f64 {
    let shares = (0..BEGINNINGS).map(|i| {
        let mut text = trace.clone();
        text.rotate_left(i * trace.len() / BEGINNINGS);
        first_touch(&[&text], slots)[0]
    });
    shares.sum::<f64>() / BEGINNINGS as f64
}

/// The same where an expert that is called takes the place of the one of its layer that was called longest ago; each
/// layer has as many of the slots. (One pool for all layers would be emptied by every token until it holds a token's
/// calls.)
pub fn least_recent(texts: &[&Trace], slots: usize) -> Vec<f64> {
    let mut layers: BTreeMap<u32, Vec<u32>> =
        texts.iter().flat_map(|trace| trace.iter()).map(|call| (call.0, Vec::new())).collect();
    let slots = slots / layers.len().max(1);
    replay(texts, |(layer, call)| {
        let recent = layers.entry(layer).or_default();
        let at = recent.iter().position(|expert| *expert == call);
        match at {
            Some(at) => drop(recent.remove(at)),
            None if recent.len() == slots => drop(recent.remove(0)),
            None => {}
        }
        recent.push(call);
        at.is_some()
    })
}

fn replay(texts: &[&Trace], mut is_hit: impl FnMut(Expert) -> bool) -> Vec<f64> {
    let share = |trace: &&Trace| {
        let hits = trace.iter().filter(|call| is_hit(**call)).count();
        hits as f64 / trace.len() as f64
    };
    texts.iter().map(share).collect()
}

/// Milliseconds that a matrix of a call saves, in the mean, when this share of calls finds its expert, and the others move theirs
/// if there is moving.
pub fn saved_ms(share: f64, moving: bool) -> f64 {
    share * (COLD_MS - HOT_MS) - if moving { (1.0 - share) * LOAD_MS } else { 0.0 }
}

/// The share from which on hits save what moving takes.
pub fn worth_moving() -> f64 {
    LOAD_MS / (LOAD_MS + COLD_MS - HOT_MS)
}

/// The mean share over all texts read one after the other, whichever comes first.
pub fn in_any_order(texts: &[&Trace], replayed: impl Fn(&[&Trace]) -> Vec<f64>) -> f64 {
    let mut order = texts.to_vec();
    let mut sum = 0.0;
    for _ in texts {
        sum += replayed(&order).iter().sum::<f64>();
        order.rotate_left(1);
    }
    sum / (texts.len() * texts.len()) as f64
}
