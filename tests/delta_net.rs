//! Gated delta nets: what the equations say, in any number of calls and threads, after failures, in older files
//! and in files with more blocks than are run; and files that are refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::executor::cpu::{CpuExecutor, KernelMode};
use orkpack::executor::{Executor, ExecutorError, Product, Routing, WeightId};
use orkpack::gguf::GgufFile;
use orkpack::model::{ForwardError, Model, State, Wanted, forward};
use orkpack::pack::Pack;
use orkpack::runtime::{DeviceChoice, Session};
use orkpack::tensor::{Dtype, MatrixView, TensorInfo, TensorSource, Value};
use orkpack::threads::Pool;
use orkpack::units::LayerId;

use crate::support::fixture;
use crate::support::memory_source::{MemorySource, Random};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request, runtime};
use crate::support::naive_delta_net::{self, Reading};
use crate::support::naive_executor::NaiveExecutor;

const FAMILIES: [&str; 2] = ["qwen35moe", "qwen3next"];

fn open(path: &Path) -> MemorySource {
    MemorySource::copy(&GgufFile::open(path, Io::Map, &Limits::default()).unwrap())
}

fn tiny(family: &str, quantisation: &str) -> MemorySource {
    open(&fixture(&format!("models/reference/tiny-{family}-{quantisation}.gguf")))
}

fn tokens(n: usize) -> Vec<u32> {
    let mut random = Random(17);
    (0..n).map(|_| (random.bits() % 512) as u32).collect()
}

fn executor(source: &MemorySource, model: &Model, n_threads: usize, mode: KernelMode) -> CpuExecutor {
    let pool = Arc::new(Pool::new(n_threads));
    CpuExecutor::new(Arc::new(source.clone()), model.weights().clone(), pool, mode).unwrap()
}

/// The bits of all logits of `tokens` after what `state` holds, in calls of `micro_batch`.
fn run(
    model: &Model,
    executor: &mut dyn Executor,
    state: &mut State,
    tokens: &[u32],
    micro_batch: usize,
) -> Result<Vec<u32>, ForwardError> {
    let (mut all, mut out) = (Vec::new(), Vec::new());
    for batch in tokens.chunks(micro_batch) {
        forward(model, executor, state, batch, Wanted::All, &mut out)?;
        all.extend(out.iter().map(|logit| logit.to_bits()));
    }
    Ok(all)
}

/// All of a model's logits for some tokens, exactly.
fn bits(source: &MemorySource) -> Vec<u32> {
    let model = Model::describe(source).unwrap();
    let mut executor = executor(source, &model, 1, KernelMode::Exact);
    run(&model, &mut executor, &mut State::new(&model, 40), &tokens(40), 40).unwrap()
}

/// Wrong heads show at once; wrong pairs of a rotation only at some distance, so this goes past position 100.
#[test]
fn logits_are_what_the_equations_say_at_every_position() {
    for family in FAMILIES {
        let source = tiny(family, "f32");
        let model = Model::describe(&source).unwrap();
        let tokens = tokens(130);
        let mut state = State::new(&model, tokens.len());
        let mut executor = NaiveExecutor::new(&source, model.weights());
        let ours = run(&model, &mut executor, &mut state, &tokens, tokens.len()).unwrap();
        let furthest = |reading: Reading| {
            let theirs = naive_delta_net::logits(&source, reading, &tokens);
            let rows = ours.chunks_exact(model.n_vocab()).zip(&theirs);
            let far = rows.map(|(ours, theirs)| {
                let far = ours.iter().zip(theirs).map(|(a, b)| (f64::from(f32::from_bits(*a)) - b).abs());
                far.fold(0.0, f64::max)
            });
            far.collect::<Vec<f64>>()
        };
        let right = Reading::of(family);
        let mut far = furthest(right);
        far.sort_by(f64::total_cmp);
        // What rounding to f32 costs: 1e-5 at most positions, ten times that at some.
        assert!(far[65] < 3e-5 && far[129] < 1e-3, "{family}: {far:?}");
        for wrong in [
            Reading { in_turn: !right.in_turn, ..right },
            Reading { halves: false, ..right },
            Reading { gated: false, ..right },
        ] {
            let far = &furthest(wrong)[100..];
            assert!(far.iter().all(|far| *far > 0.02), "{family} {wrong:?}: {far:?}");
        }
    }
}

/// Three value heads to a key head and a prompt of 208 tokens, where the folder of further models is at hand.
fn long() -> Option<PathBuf> {
    let path = Path::new(&std::env::var_os("ORKPACK_REFERENCE")?).join("long-qwen35moe-f32.gguf");
    path.exists().then_some(path)
}

#[test]
fn neither_the_cut_into_calls_nor_the_threads_change_a_bit() {
    let tiny = FAMILIES.iter().flat_map(|family| ["f32", "q8_0"].map(|quantised| tiny(family, quantised)));
    for source in tiny.chain(long().map(|path| open(&path))) {
        let model = Model::describe(&source).unwrap();
        let tokens = tokens(208);
        for mode in [KernelMode::Exact, KernelMode::Fast] {
            let mut whole = Vec::new();
            for n_threads in [1, 3] {
                let mut executor = executor(&source, &model, n_threads, mode);
                let mut state = State::new(&model, tokens.len());
                for micro_batch in [208, 64, 7, 1] {
                    let all = run(&model, &mut executor, &mut state, &tokens, micro_batch).unwrap();
                    if whole.is_empty() {
                        whole.clone_from(&all);
                    }
                    assert!(all == whole, "{} {mode:?}: {n_threads}, {micro_batch}", model.architecture());
                    // A state that was cleared is as good as a new one.
                    state.clear();
                }
            }
        }
    }
}

/// An executor that fails at the product, or at the experts of a layer, that it is told to.
struct Failing<'a> {
    inner: &'a mut CpuExecutor,
    n_products: usize,
    fails_at_product: Option<usize>,
    fails_in_layer: Option<LayerId>,
}

impl Failing<'_> {
    fn gone() -> ExecutorError {
        ExecutorError::Device("gone".to_owned())
    }
}

impl Executor for Failing<'_> {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        self.n_products += 1;
        if self.fails_at_product == Some(self.n_products) {
            Err(Failing::gone())
        } else {
            self.inner.linear(rows, products)
        }
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        if self.fails_in_layer == Some(layer) {
            Err(Failing::gone())
        } else {
            self.inner.experts(layer, rows, routing, out)
        }
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        self.inner.gather(weight, ids, out)
    }
}

#[test]
fn a_call_that_fails_anywhere_leaves_the_state_as_it_was() {
    for family in FAMILIES {
        let source = tiny(family, "f32");
        let model = Model::describe(&source).unwrap();
        let mut executor = executor(&source, &model, 1, KernelMode::Exact);
        let (tokens, mut state) = (tokens(30), State::new(&model, 30));
        run(&model, &mut executor, &mut state, &tokens[..10], 10).unwrap();
        let expected = run(&model, &mut executor, &mut state.clone(), &tokens[10..], 20).unwrap();

        let mut attempt = |fails_at_product, fails_in_layer| {
            let (inner, n_products) = (&mut executor, 0);
            let mut failing = Failing { inner, n_products, fails_at_product, fails_in_layer };
            // Another continuation than the one that counts.
            let failed = run(&model, &mut failing, &mut state, &[3; 12], 12).unwrap_err();
            assert!(matches!(failed, ForwardError::Executor(ExecutorError::Device(_))), "{failed}");
            assert_eq!(state.position(), 10);
            let all = run(&model, &mut executor, &mut state.clone(), &tokens[10..], 7).unwrap();
            assert!(all == expected, "{family}: {fails_at_product:?} {fails_in_layer:?}");
        };
        // Two of the mixer, the router's and two of the shared expert in each of four layers, and the head.
        (1..=21).for_each(|product| attempt(Some(product), None));
        (0..4).for_each(|layer| attempt(None, Some(LayerId(layer))));
    }
}

/// The bytes of a matrix's rows.
fn rows_of(source: &mut MemorySource, name: &str) -> Vec<Vec<u8>> {
    let n_rows = source.tensor(name).n_out() as usize;
    let bytes = source.bytes_of(name);
    bytes.chunks_exact(bytes.len() / n_rows).map(<[u8]>::to_vec).collect()
}

/// Adds a matrix of these rows, of the type and width of the one called `like`.
fn add_rows(source: &mut MemorySource, name: &str, like: &str, rows: &[Vec<u8>]) {
    let mut tensor = source.tensor(like).clone();
    tensor.name = name.to_owned();
    tensor.dims[1] = rows.len() as u64;
    source.add(tensor, rows.concat());
}

/// The older layout of `qwen3next`: q, k, v and z of a key head, then those of the next.
#[test]
fn queries_keys_values_and_z_may_lie_together_key_head_by_key_head() {
    for quantisation in ["f32", "q8_0"] {
        let apart = tiny("qwen3next", quantisation);
        let mut together = apart.clone();
        let (n_key, s, group) = (2, 16, 2);
        for layer in 0..3 {
            let [qkv, z, both] =
                ["attn_qkv", "attn_gate", "ssm_in"].map(|part| format!("blk.{layer}.{part}.weight"));
            let (qkv_rows, z_rows) = (rows_of(&mut together, &qkv), rows_of(&mut together, &z));
            let mut rows = Vec::new();
            for head in 0..n_key {
                rows.extend_from_slice(&qkv_rows[head * s..][..s]);
                rows.extend_from_slice(&qkv_rows[(n_key + head) * s..][..s]);
                rows.extend_from_slice(&qkv_rows[(2 * n_key + head * group) * s..][..group * s]);
                rows.extend_from_slice(&z_rows[head * group * s..][..group * s]);
            }
            add_rows(&mut together, &both, &qkv, &rows);
            together.remove(&qkv);
            together.remove(&z);
        }
        assert!(bits(&together) == bits(&apart), "{quantisation}");
    }
}

/// The two families are one model with its value heads in another order: a file of the one is made a file of the
/// other.
#[test]
fn a_file_of_one_family_can_be_written_as_the_other() {
    let next = tiny("qwen3next", "f32");
    let mut other = next.clone();
    let keys: Vec<String> =
        next.metadata.0.keys().filter(|key| key.starts_with("qwen3next.")).cloned().collect();
    for key in keys {
        let value = other.metadata.0.remove(&key).unwrap();
        other.set(&key.replace("qwen3next.", "qwen35moe."), value);
    }
    other.set("general.architecture", Value::String("qwen35moe".into()));
    other.set("qwen35moe.rope.dimension_sections", Value::Array([2, 1, 1, 0].map(Value::I32).into()));
    // Of four value heads to two key heads, in runs 0 0 1 1: in turn the key heads are 0 1 0 1.
    let order = [0, 2, 1, 3];
    for layer in 0..3 {
        let name = |part: &str| format!("blk.{layer}.{part}");
        for (part, first, width) in
            [("attn_qkv.weight", 64, 16), ("attn_gate.weight", 0, 16), ("ssm_conv1d.weight", 64, 16)]
        {
            let rows = rows_of(&mut other, &name(part));
            let moved = order.iter().flat_map(|head| &rows[first + head * width..][..width]);
            *other.bytes_of(&name(part)) = rows[..first].iter().chain(moved).flatten().copied().collect();
        }
        for part in ["ssm_a", "ssm_dt.bias"] {
            let values: Vec<[u8; 4]> = other.bytes_of(&name(part)).as_chunks().0.to_vec();
            *other.bytes_of(&name(part)) = order.map(|head| values[head]).concat();
        }
        // A row of the output matrix has a run of 16 columns for each head.
        for row in other.bytes_of(&name("ssm_out.weight")).chunks_exact_mut(4 * 64) {
            let heads: Vec<Vec<u8>> = row.chunks(4 * 16).map(<[u8]>::to_vec).collect();
            row.copy_from_slice(&order.map(|head| heads[head].clone()).concat());
        }
        // Beta of the value heads of a key head, then alpha of these.
        let rows = rows_of(&mut other, &name("ssm_ba.weight"));
        for (part, at) in [("ssm_beta.weight", [0, 1, 4, 5]), ("ssm_alpha.weight", [2, 3, 6, 7])] {
            add_rows(
                &mut other,
                &name(part),
                &name("ssm_ba.weight"),
                &order.map(|head| rows[at[head]].clone()),
            );
        }
        other.remove(&name("ssm_ba.weight"));
    }
    let [next, other] = [next, other].map(|source| bits(&source));
    // Only the output matrix sums in another order.
    let far = next.iter().zip(&other).map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
    let far = far.fold(0.0, f32::max);
    assert!(far < 1e-4, "{far}");
}

/// One more block that predicts the token after the next: known, carried, never run.
fn with_next_token_block(source: &MemorySource, family: &str) -> MemorySource {
    let mut more = source.clone();
    let last = source.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.3."));
    for tensor in last {
        let bytes = source.bytes(tensor.place).unwrap().to_vec();
        more.add(TensorInfo { name: tensor.name.replace("blk.3.", "blk.4."), ..tensor.clone() }, bytes);
    }
    for (part, dims) in [("eh_proj", vec![128, 64]), ("enorm", vec![64]), ("hnorm", vec![64])] {
        let place = source.find("output_norm.weight").unwrap().place;
        let name = format!("blk.4.nextn.{part}.weight");
        let n: u64 = dims.iter().product();
        more.add(TensorInfo { name, dtype: Dtype::F32, dims, place }, vec![0; 4 * n as usize]);
    }
    more.set(&format!("{family}.block_count"), Value::U32(5));
    more.set(&format!("{family}.nextn_predict_layers"), Value::U32(1));
    more
}

#[test]
fn blocks_that_predict_further_tokens_are_neither_run_nor_counted() {
    for family in FAMILIES {
        let source = tiny(family, "f32");
        let more = with_next_token_block(&source, family);
        assert!(bits(&more) == bits(&source), "{family}");
        let [model, same] = [&more, &source].map(|source| Model::describe(source).unwrap());
        assert_eq!((model.n_layer(), model.shape()), (4, same.shape()));
        // Key and value of two heads of 32, in the one layer that has them.
        assert_eq!(model.shape().kv_bytes_per_token, 2 * 2 * 32 * 2);

        let mut stranger = more.clone();
        stranger.tensor("blk.4.nextn.enorm.weight").name = "blk.5.nextn.enorm.weight".to_owned();
        let says = format!("tensor `blk.5.nextn.enorm.weight` is not part of architecture {family}");
        assert_eq!(Model::describe(&stranger).unwrap_err().to_string(), says);
    }
}

/// Their tensors are in the pack as they are in the file, and none of their experts is placed.
#[test]
fn blocks_that_predict_further_tokens_are_packed_and_not_placed() {
    let source = tiny("qwen35moe", "q8_0");
    let logits = [with_next_token_block(&source, "qwen35moe"), source].map(|source| {
        let folder = folder();
        let model = model_in(folder.path(), &source.to_gguf());
        let tokens: Vec<u32> = (20..40).collect();
        calibrate_beside(&model, &tokens);
        let path = convert(request(&model, hits(1 << 30))).unwrap().1.output;
        let pack = Pack::open(&path, Default::default()).unwrap();
        assert_eq!(pack.tensors().len(), source.tensors.len());
        let placed = pack.placements().iter().filter_map(|placed| placed.matrix.expert());
        assert_eq!(placed.map(|id| id.layer.0).max(), Some(3));
        let runtime = runtime(&path, DeviceChoice::Sim, 1);
        let mut session = Session::new(&runtime, runtime.engine().unwrap(), 64, 8);
        session.prompt(&tokens).unwrap().to_vec()
    });
    assert!(logits[0] == logits[1]);
}

#[test]
fn recurrent_layers_may_be_listed() {
    let source = tiny("qwen35moe", "f32");
    let [yes, no] = [true, false].map(Value::Bool);
    let [one, zero] = [1, 0].map(Value::U32);
    for (list, more) in [([&yes, &yes, &yes, &no], None), ([&one, &one, &one, &zero], Some(&no))] {
        let mut listed =
            if more.is_some() { with_next_token_block(&source, "qwen35moe") } else { source.clone() };
        let list = list.into_iter().chain(more).cloned().collect();
        listed.set("qwen35moe.attention.recurrent_layers", Value::Array(list));
        // The list counts, not the interval.
        listed.set("qwen35moe.full_attention_interval", Value::U32(2));
        assert!(bits(&listed) == bits(&source));
    }
}

/// One thing wrong with a model, and what the error must say.
struct Refusal {
    spoil: fn(&mut MemorySource),
    says: &'static str,
}

#[test]
fn a_model_with_one_thing_wrong_is_refused_by_name() {
    let cases = [
        Refusal {
            spoil: |s| s.set("qwen35moe.ssm.group_count", Value::U32(3)),
            says: "metadata key `qwen35moe.ssm.time_step_rank` holds 4, expected a multiple of 3",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.ssm.group_count", Value::U32(0)),
            says: "metadata key `qwen35moe.ssm.group_count` holds 0, expected 1 to 16777216",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.ssm.inner_size", Value::U32(63)),
            says: "metadata key `qwen35moe.ssm.inner_size` holds 63, expected 64: 4 heads of 16",
        },
        Refusal {
            spoil: |s| {
                s.set("qwen35moe.ssm.state_size", Value::U32(1 << 20));
                s.set("qwen35moe.ssm.inner_size", Value::U32(1 << 22));
            },
            says: "metadata key `qwen35moe.ssm.state_size` holds 1048576, expected 1 to 4",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.ssm.inner_size")),
            says: "metadata key `qwen35moe.ssm.inner_size` is missing",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.ssm.state_size")),
            says: "metadata key `qwen35moe.ssm.state_size` is missing",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.ssm.time_step_rank")),
            says: "metadata key `qwen35moe.ssm.time_step_rank` is missing",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.ssm.conv_kernel")),
            says: "metadata key `qwen35moe.ssm.conv_kernel` is missing",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.ssm.conv_kernel", Value::U32(0)),
            says: "metadata key `qwen35moe.ssm.conv_kernel` holds 0, expected 1 to 16777216",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.ssm.conv_kernel", Value::U32(5)),
            says: "tensor `blk.0.ssm_conv1d.weight` has shape [4, 128], expected [5, 128]",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.rope.dimension_sections")),
            says: "metadata key `qwen35moe.rope.dimension_sections` is missing",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.rope.dimension_sections", Value::Array(vec![Value::I32(8); 3])),
            says: "metadata key `qwen35moe.rope.dimension_sections` holds 3 values, expected 4 numbers",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.rope.dimension_sections", Value::U32(8)),
            says: "metadata key `qwen35moe.rope.dimension_sections` holds no list, expected 4 numbers",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.rope.dimension_sections", Value::Array(vec![Value::I32(-1); 4])),
            says: "metadata key `qwen35moe.rope.dimension_sections` holds other values, expected 4 numbers",
        },
        Refusal {
            spoil: |s| {
                s.set("qwen35moe.attention.recurrent_layers", Value::Array(vec![Value::Bool(true); 3]));
            },
            says: "metadata key `qwen35moe.attention.recurrent_layers` holds 3 values, expected 4 times yes or no",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.attention.recurrent_layers", Value::Array(vec![Value::U32(2); 4])),
            says: "metadata key `qwen35moe.attention.recurrent_layers` holds other values, expected 4 times yes or no",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.attention.recurrent_layers", Value::Bool(true)),
            says: "metadata key `qwen35moe.attention.recurrent_layers` holds no list, expected 4 times yes or no",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.full_attention_interval", Value::U32(0)),
            says: "metadata key `qwen35moe.full_attention_interval` holds 0, expected 1 to 16777216",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.full_attention_interval", Value::U32(2)),
            says: "tensor `blk.1.attn_q_norm.weight` is missing",
        },
        Refusal {
            spoil: |s| s.set("qwen35moe.nextn_predict_layers", Value::U32(4)),
            says: "metadata key `qwen35moe.nextn_predict_layers` holds 4, expected 0 to 3",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen35moe.expert_feed_forward_length")),
            says: "metadata key `qwen35moe.expert_feed_forward_length` is missing",
        },
        Refusal { spoil: |s| s.remove("blk.2.ssm_a"), says: "tensor `blk.2.ssm_a` is missing" },
        Refusal {
            spoil: |s| s.remove("blk.2.ssm_beta.weight"),
            says: "tensor `blk.2.ssm_beta.weight` is missing",
        },
        Refusal {
            spoil: |s| s.tensor("blk.3.attn_q.weight").dims = vec![64, 128],
            says: "tensor `blk.3.attn_q.weight` has shape [64, 128], expected [64, 256]",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.ssm_dt.bias").dims = vec![2],
            says: "tensor `blk.0.ssm_dt.bias` has shape [2], expected [4]",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.post_attention_norm.weight").name = "blk.0.ffn_norm.weight".to_owned(),
            says: "tensor `blk.0.post_attention_norm.weight` is missing",
        },
    ];
    let whole = tiny("qwen35moe", "f32");
    for Refusal { spoil, says } in cases {
        let mut source = whole.clone();
        spoil(&mut source);
        match Model::describe(&source) {
            Ok(_) => panic!("accepted: {says}"),
            Err(error) => assert_eq!(error.to_string(), says),
        }
    }
}
