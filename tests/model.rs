//! Descriptions of models: what is read, what is refused, and that running them gives what the equations say.

use std::ops::ControlFlow;

use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{self, Cut};
use orkpack::executor::{Executor, ExecutorError, Product, Routing, WeightId};
use orkpack::gguf::GgufFile;
use orkpack::model::evaluate::{Comparison, FIRST_SCORED, WINDOW, argmax, perplexity};
use orkpack::model::{CacheType, ForwardError, Model, ModelError, State, Wanted, forward, forward_traced};
use orkpack::tensor::{Dtype, MatrixView, TensorSource, Value};
use orkpack::units::LayerId;

use crate::support::fixture;
use crate::support::memory_source::{MemorySource, Random, SMALL, Sizes};
use crate::support::naive_executor::NaiveExecutor;
use crate::support::naive_forward::{self, Pairs};
use crate::support::recorder::Recorder;

const FAMILIES: [&str; 2] = ["olmoe", "qwen3moe"];

/// Families that are tested on their reference models.
const REFERENCES: [&str; 7] =
    ["deepseek2", "granitemoe", "lfm2moe", "llama", "qwen2moe", "qwen35moe", "qwen3next"];

/// A model of every family.
fn every_family() -> Vec<(&'static str, MemorySource)> {
    let random = FAMILIES.map(|family| (family, MemorySource::random(family, SMALL, 5)));
    let bundled = REFERENCES.map(|family| {
        let path = fixture(&format!("models/reference/tiny-{family}-f32.gguf"));
        let file = GgufFile::open(&path, Io::Map, &Limits::default()).unwrap();
        (family, MemorySource::copy(&file))
    });
    random.into_iter().chain(bundled).collect()
}

fn tokens(n: usize) -> Vec<u32> {
    let mut random = Random(7);
    (0..n).map(|_| (random.bits() % SMALL.n_vocab as u64) as u32).collect()
}

/// The logits of `tokens`, cut into calls of `micro_batch`.
fn logits_of(
    model: &Model,
    executor: &mut dyn Executor,
    tokens: &[u32],
    micro_batch: usize,
) -> Result<Vec<f32>, ForwardError> {
    let mut state = State::new(model, tokens.len());
    let (mut all, mut out) = (Vec::new(), Vec::new());
    for batch in tokens.chunks(micro_batch) {
        forward(model, executor, &mut state, batch, Wanted::All, &mut out)?;
        all.extend_from_slice(&out);
    }
    Ok(all)
}

#[test]
fn a_description_has_the_sizes_of_the_file() {
    for family in FAMILIES {
        let source = MemorySource::random(family, SMALL, 1);
        let model = Model::describe(&source).unwrap();
        let shape = model.shape();
        let Sizes { n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, n_expert, n_used, n_vocab } = SMALL;
        assert_eq!((shape.architecture.as_str(), shape.n_layer), (family, n_layer));
        assert_eq!((shape.n_embd, shape.n_vocab, model.n_ctx()), (n_embd, n_vocab, 512));
        assert_eq!(shape.moe_layers.len(), n_layer);
        for (at, layer) in shape.moe_layers.iter().enumerate() {
            assert_eq!((layer.layer.index(), layer.n_expert(), layer.n_used), (at, n_expert, n_used));
            for [gate, up, down] in &layer.experts {
                assert_eq!((gate.n_in, gate.n_out, gate.bytes), (n_embd, n_ff, 4 * gate.n_weights()));
                assert_eq!((up, (down.n_in, down.n_out)), (gate, (n_ff, n_embd)));
            }
        }
        let (q, kv) = (n_head * head_dim, n_head_kv * head_dim);
        let qk_norms = if family == "olmoe" { q + kv } else { 2 * head_dim };
        let layer = n_embd * (2 * q + 2 * kv + n_expert + 2) + qk_norms;
        let dense = n_layer * layer + n_embd + n_embd + n_embd * n_vocab;
        assert_eq!(shape.dense_weights, dense as u64, "{family}");
        assert_eq!(shape.dense_bytes, 4 * dense as u64);
        assert_eq!(shape.kv_bytes_per_token, (n_layer * 2 * kv * 2) as u64);
    }
}

/// Every byte of a file is an expert's, or read by each token; but of the embedding as such one row is.
#[test]
fn a_token_reads_all_that_is_no_expert() {
    for (family, source) in every_family() {
        let shape = Model::describe(&source).unwrap().shape();
        let bytes = |name: &str| source.find(name).map_or(0, |tensor| tensor.place.len);
        let all: u64 = source.tensors.iter().map(|tensor| tensor.place.len).sum();
        let experts: u64 =
            shape.moe_layers.iter().flat_map(|layer| &layer.experts).flatten().map(|m| m.bytes).sum();
        let unread = if bytes("output.weight") > 0 { bytes("token_embd.weight") } else { 0 };
        let row = 4 * shape.n_embd as u64;
        assert_eq!(shape.dense_bytes + experts, all - unread + row, "{family}");
        assert_eq!(shape.dense_bytes, 4 * shape.dense_weights, "{family}");
    }
}

#[test]
fn a_token_reads_all_of_a_tied_embedding_and_one_row_again() {
    let mut source = MemorySource::random("qwen3moe", SMALL, 1);
    let own = Model::describe(&source).unwrap().shape();
    source.remove("output.weight");
    assert_eq!(Model::describe(&source).unwrap().shape(), own);
}

type Spoil = fn(&mut MemorySource);

/// One thing wrong with a model, and what the error must say.
struct Refusal {
    spoil: Spoil,
    says: &'static str,
}

#[test]
fn a_model_with_one_thing_wrong_is_refused_by_name() {
    let cases = [
        Refusal {
            spoil: |s| s.set("general.architecture", Value::String("mamba".into())),
            says: "architecture `mamba` is not supported; supported are: deepseek2, gpt-oss, granitemoe, lfm2moe, llama, olmoe, qwen2moe, qwen35moe, qwen3moe, qwen3next",
        },
        Refusal {
            spoil: |s| {
                s.set("general.architecture", Value::String("llama".into()));
                s.tensors.retain(|tensor| !tensor.name.contains("_exps"));
            },
            says: "no expert tensors found; this is a dense model of architecture llama",
        },
        Refusal {
            spoil: |s| s.tensors.retain(|tensor| !tensor.name.contains("_exps")),
            says: "no expert tensors found; this is a dense model of architecture qwen3moe",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("general.architecture")),
            says: "metadata key `general.architecture` is missing",
        },
        Refusal {
            spoil: |s| drop(s.metadata.0.remove("qwen3moe.attention.layer_norm_rms_epsilon")),
            says: "metadata key `qwen3moe.attention.layer_norm_rms_epsilon` is missing",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.expert_used_count", Value::U32(7)),
            says: "metadata key `qwen3moe.expert_used_count` holds 7, expected 1 to 6",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.expert_used_count", Value::U32(0)),
            says: "metadata key `qwen3moe.expert_used_count` holds 0, expected 1 to 16777216",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.expert_count", Value::U32(65537)),
            says: "metadata key `qwen3moe.expert_count` holds 65537, expected 1 to 65536",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.attention.head_count_kv", Value::U32(3)),
            says: "metadata key `qwen3moe.attention.head_count_kv` holds 3, expected a divisor of 4",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.attention.value_length", Value::U32(8)),
            says: "metadata key `qwen3moe.attention.value_length` holds 8, expected 16, as the keys",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.rope.dimension_count", Value::U32(15)),
            says: "metadata key `qwen3moe.rope.dimension_count` holds 15, expected an even number up to 16",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.rope.scaling.type", Value::String("longrope".into())),
            says: "metadata key `qwen3moe.rope.scaling.type` holds longrope, expected none, linear or yarn",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.vocab_size", Value::U32(32_000)),
            says: "`qwen3moe.vocab_size` says 32000 tokens, but `token_embd.weight` has 80 rows",
        },
        Refusal {
            spoil: |s| s.set("tokenizer.ggml.tokens", Value::Array(vec![Value::String("a".into()); 79])),
            says: "`tokenizer.ggml.tokens` says 79 tokens, but `token_embd.weight` has 80 rows",
        },
        Refusal {
            spoil: |s| s.remove("blk.1.ffn_up_exps.weight"),
            says: "tensor `blk.1.ffn_up_exps.weight` is missing",
        },
        Refusal {
            spoil: |s| s.set("qwen3moe.block_count", Value::U32(1)),
            says: "tensor `blk.1.attn_norm.weight` is not part of architecture qwen3moe",
        },
        Refusal {
            spoil: |s| s.tensor("blk.1.ffn_down_exps.weight").dims = vec![24, 48, 5],
            says: "tensor `blk.1.ffn_down_exps.weight` has shape [24, 48, 5], expected [24, 48, 6]",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.attn_q_norm.weight").dims = vec![64],
            says: "tensor `blk.0.attn_q_norm.weight` has shape [64], expected [16]",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.attn_k.weight").dtype = Dtype::Q8_K,
            says: "tensor `blk.0.attn_k.weight` is of type Q8_K, which is not supported",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.ffn_gate_inp.weight").dtype = Dtype::F16,
            says: "tensor `blk.0.ffn_gate_inp.weight` of type F16 has 1152 bytes, which its shape [48, 6] does not fill",
        },
        Refusal {
            spoil: |s| {
                s.tensor("blk.0.ffn_norm.weight").dtype = Dtype::F16;
                s.tensor("blk.0.ffn_norm.weight").place.len = 96;
            },
            says: "tensor `blk.0.ffn_norm.weight` is of type F16, expected F32",
        },
        Refusal {
            spoil: |s| s.tensor("blk.0.attn_q.weight").dtype = Dtype::Q4_K,
            says: "tensor `blk.0.attn_q.weight` of type Q4_K has 12288 bytes, which its shape [48, 64] does not fill",
        },
        Refusal {
            spoil: |s| s.tensor("output_norm.weight").place.file = 99,
            says: "tensor `output_norm.weight`: bytes 0..0+192 are not in file 99 of the model",
        },
    ];
    for Refusal { spoil, says } in cases {
        let mut source = MemorySource::random("qwen3moe", SMALL, 1);
        spoil(&mut source);
        match Model::describe(&source) {
            Ok(_) => panic!("accepted: {says}"),
            Err(error) => assert_eq!(error.to_string(), says),
        }
    }
}

#[test]
fn olmoe_needs_a_head_of_its_own_and_qwen3moe_does_not() {
    let mut source = MemorySource::random("olmoe", SMALL, 1);
    source.remove("output.weight");
    let refused = Model::describe(&source).unwrap_err();
    assert!(matches!(refused, ModelError::MissingTensor(name) if name == "output.weight"));

    let mut tied = MemorySource::random("qwen3moe", SMALL, 1);
    let mut untied = tied.clone();
    tied.remove("output.weight");
    let embedding = untied.bytes_of("token_embd.weight").clone();
    *untied.bytes_of("output.weight") = embedding;
    let [tied, untied] = [tied, untied].map(|source| {
        let model = Model::describe(&source).unwrap();
        let mut executor = NaiveExecutor::new(&source, model.weights());
        logits_of(&model, &mut executor, &tokens(9), 9).unwrap()
    });
    assert_eq!(tied, untied);
}

/// Whatever a header claims, describing it ends in a description that runs or in an error.
#[test]
fn no_metadata_and_no_tensor_table_makes_it_panic() {
    let odd = [
        Value::U32(0),
        Value::U32(1),
        Value::U32(3),
        Value::U32(u32::MAX),
        Value::U64(u64::MAX),
        Value::I32(-1),
        Value::F32(f32::NAN),
        Value::F32(-1.0),
        Value::F64(1e300),
        Value::Bool(true),
        Value::String(vec![0xff, 0]),
        Value::Array(vec![Value::U32(2), Value::U32(0)]),
    ];
    let mut extra: Vec<String> = ["rope.dimension_count", "rope.freq_base", "rope.scaling.factor"]
        .map(|key| format!("qwen3moe.{key}"))
        .into();
    extra.push("qwen3moe.expert_weights_scale".to_owned());
    extra
        .extend(["attention.recurrent_layers", "nextn_predict_layers"].map(|key| format!("qwen35moe.{key}")));
    extra.push("tokenizer.ggml.tokens".to_owned());
    let mut n_accepted = 0;
    let mut try_it = |source: &MemorySource| {
        if let Ok(model) = Model::describe(source) {
            n_accepted += 1;
            let mut executor = NaiveExecutor::new(source, model.weights());
            let _ = logits_of(&model, &mut executor, &[1, 2, 3], 2);
            let _ = (model.shape(), model.fingerprint(source).unwrap());
        }
    };
    // Of the families that hold most kinds of tensors between them.
    let families = ["deepseek2", "granitemoe", "lfm2moe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next"];
    for (_, whole) in every_family().iter().filter(|(family, _)| families.contains(family)) {
        let own = whole.metadata.0.keys().filter(|key| !key.starts_with("synthetic."));
        for key in own.chain(&extra) {
            let mut source = whole.clone();
            source.metadata.0.remove(key);
            try_it(&source);
            for value in &odd {
                source.set(key, value.clone());
                try_it(&source);
            }
        }
        spoil_tensors(whole, &mut try_it);
    }
    assert!(n_accepted > 20, "{n_accepted} odd models were accepted and run");
}

fn spoil_tensors(whole: &MemorySource, try_it: &mut dyn FnMut(&MemorySource)) {
    for at in 0..whole.tensors.len() {
        for dims in
            [vec![], vec![0], vec![1, 1, 1, 1], vec![u64::MAX; 3], vec![48, 0], vec![1 << 40, 1 << 40]]
        {
            let mut source = whole.clone();
            source.tensors[at].dims = dims;
            try_it(&source);
        }
        for dtype in Dtype::ALL {
            let mut source = whole.clone();
            source.tensors[at].dtype = *dtype;
            try_it(&source);
        }
        let mut source = whole.clone();
        source.tensors[at].place.len -= 1;
        try_it(&source);
    }
}

#[test]
fn a_fingerprint_names_the_routers_and_sizes_and_nothing_else() {
    let whole = MemorySource::random("qwen3moe", SMALL, 1);
    let fingerprint = |source: &MemorySource| Model::describe(source).unwrap().fingerprint(source).unwrap();
    let name = fingerprint(&whole);
    assert_eq!(name.len(), 64);
    let spoiling: [(Spoil, bool); 5] = [
        (|s| s.bytes_of("blk.0.ffn_up_exps.weight")[0] ^= 1, true),
        (|s| s.set("general.name", Value::String("other".into())), true),
        (|s| s.bytes_of("blk.1.ffn_gate_inp.weight")[0] ^= 1, false),
        (|s| s.set("qwen3moe.expert_used_count", Value::U32(3)), false),
        (
            |s| {
                let other = MemorySource::random("qwen3moe", Sizes { n_vocab: 81, ..SMALL }, 1);
                *s = other;
            },
            false,
        ),
    ];
    for (i, (spoil, same)) in spoiling.into_iter().enumerate() {
        let mut source = whole.clone();
        spoil(&mut source);
        assert_eq!(fingerprint(&source) == name, same, "case {i}");
    }
}

/// The forward pass against the equations written out in f64; a rotation of the wrong pairs would pass for
/// a few positions, so the comparison goes past position 100.
#[test]
fn logits_are_what_the_equations_say_at_every_position() {
    for (family, seed) in [("qwen3moe", 3), ("olmoe", 4)] {
        let source = MemorySource::random(family, SMALL, seed);
        let model = Model::describe(&source).unwrap();
        let mut executor = NaiveExecutor::new(&source, model.weights());
        let tokens = tokens(140);
        let ours = logits_of(&model, &mut executor, &tokens, 512).unwrap();
        let furthest = |pairs| {
            let theirs = naive_forward::logits(&source, pairs, &tokens);
            let rows = ours.chunks_exact(SMALL.n_vocab).zip(&theirs);
            let far = rows.map(|(ours, theirs)| {
                ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
            });
            far.collect::<Vec<f64>>()
        };
        let right = furthest(Pairs::Halves).into_iter().fold(0.0, f64::max);
        assert!(right < 1e-4, "{family}: {right}");
        let wrong = &furthest(Pairs::Neighbours)[100..];
        assert!(wrong.iter().all(|far| *far > 0.02), "{family}: {wrong:?}");
    }
}

#[test]
fn the_cut_into_calls_changes_no_bit() {
    for (family, source) in every_family() {
        let model = Model::describe(&source).unwrap();
        let mut executor = NaiveExecutor::new(&source, model.weights());
        let tokens = tokens(40);
        let whole = logits_of(&model, &mut executor, &tokens, 512).unwrap();
        let mut state = State::new(&model, tokens.len());
        for micro_batch in [1, 2, 7, 39] {
            // A state that was cleared is as good as a new one.
            state.clear();
            let (mut all, mut out) = (Vec::new(), Vec::new());
            for batch in tokens.chunks(micro_batch) {
                forward(&model, &mut executor, &mut state, batch, Wanted::All, &mut out).unwrap();
                all.extend_from_slice(&out);
            }
            assert!(all == whole, "{family}: {micro_batch} rows");
        }
    }
}

#[test]
fn only_the_wanted_rows_come_out() {
    let source = MemorySource::random("olmoe", SMALL, 6);
    let model = Model::describe(&source).unwrap();
    let mut executor = NaiveExecutor::new(&source, model.weights());
    let tokens = tokens(5);
    let all = logits_of(&model, &mut executor, &tokens, 5).unwrap();
    let row = |i: usize| &all[i * SMALL.n_vocab..(i + 1) * SMALL.n_vocab];
    let mut out = vec![1.0];
    for (wanted, expected) in [
        (Wanted::None, vec![]),
        (Wanted::Last, row(4).to_vec()),
        (Wanted::Rows(1..3), [row(1), row(2)].concat()),
        (Wanted::Rows(5..5), vec![]),
    ] {
        let mut state = State::new(&model, 5);
        let mut shown = Vec::new();
        let mut trace = |layer, rows: &[f32]| shown.push((layer, rows.len() / SMALL.n_embd));
        forward_traced(&model, &mut executor, &mut state, &tokens, wanted, &mut out, &mut trace).unwrap();
        assert_eq!(out, expected);
        let n_wanted = expected.len() / SMALL.n_vocab;
        let layers = [(0, 5), (1, 5), (2, n_wanted)];
        assert_eq!(shown, layers[..if n_wanted > 0 { 3 } else { 2 }]);
    }
}

/// An executor whose experts fail in layer 1, once.
struct Failing<'a>(NaiveExecutor<'a>, bool);

impl Executor for Failing<'_> {
    fn linear(
        &mut self,
        rows: MatrixView<'_, f32>,
        products: &mut [Product<'_>],
    ) -> Result<(), ExecutorError> {
        self.0.linear(rows, products)
    }

    fn experts(
        &mut self,
        layer: LayerId,
        rows: MatrixView<'_, f32>,
        routing: &Routing,
        out: &mut [f32],
    ) -> Result<(), ExecutorError> {
        if layer.index() == 1 && std::mem::take(&mut self.1) {
            return Err(ExecutorError::Device("gone".to_owned()));
        }
        self.0.experts(layer, rows, routing, out)
    }

    fn gather(&mut self, weight: WeightId, ids: &[u32], out: &mut [f32]) -> Result<(), ExecutorError> {
        self.0.gather(weight, ids, out)
    }
}

#[test]
fn a_call_that_fails_leaves_the_state_as_it_was() {
    every_family().iter().for_each(|(_, source)| check_failures(source));

    let [source, other] =
        [2, 4].map(|n_head_kv| MemorySource::random("qwen3moe", Sizes { n_head_kv, ..SMALL }, 8));
    let model = Model::describe(&source).unwrap();
    let mut foreign = State::new(&Model::describe(&other).unwrap(), 12);
    let mut executor = NaiveExecutor::new(&source, model.weights());
    let refused = forward(&model, &mut executor, &mut foreign, &tokens(2), Wanted::All, &mut Vec::new());
    assert!(matches!(refused, Err(ForwardError::OtherModel)));
}

fn check_failures(source: &MemorySource) {
    let model = Model::describe(source).unwrap();
    let (tokens, n_vocab) = (tokens(12), model.n_vocab());
    let expected = logits_of(&model, &mut NaiveExecutor::new(source, model.weights()), &tokens, 12).unwrap();
    let expected = &expected[4 * n_vocab..];

    let mut executor = Failing(NaiveExecutor::new(source, model.weights()), false);
    let (mut state, mut out) = (State::new(&model, 12), Vec::new());
    let mut go = |executor: &mut Failing<'_>, tokens: &[u32], wanted| {
        let done = forward(&model, executor, &mut state, tokens, wanted, &mut out);
        (done, state.position(), out.clone())
    };
    assert_eq!(go(&mut executor, &tokens[..4], Wanted::None).1, 4);
    executor.1 = true;
    let (failed, position, _) = go(&mut executor, &tokens[4..], Wanted::All);
    assert!(matches!(failed, Err(ForwardError::Executor(ExecutorError::Device(_)))));
    assert_eq!(position, 4);
    let unknown = format!("token 512 is not in the vocabulary of {n_vocab}");
    for (bad, wanted, says) in [
        (&[][..], Wanted::All, "there are no tokens to run"),
        (&[512][..], Wanted::All, unknown.as_str()),
        (&[0; 9][..], Wanted::All, "9 tokens after position 4 do not fit a context of 12"),
        (&[0; 2][..], Wanted::Rows(1..3), "rows 1..3 are wanted of a call of 2 tokens"),
    ] {
        assert_eq!(go(&mut executor, bad, wanted).0.unwrap_err().to_string(), says);
    }
    assert_eq!(go(&mut executor, &tokens[4..], Wanted::All).2, expected);
}

#[test]
fn a_router_that_yields_nan_is_named() {
    let mut source = MemorySource::random("qwen3moe", SMALL, 9);
    source.bytes_of("blk.1.ffn_norm.weight")[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let model = Model::describe(&source).unwrap();
    let mut executor = NaiveExecutor::new(&source, model.weights());
    let error = logits_of(&model, &mut executor, &tokens(3), 3).unwrap_err();
    assert_eq!(error.to_string(), "router produced NaN at layer 1 (position 0)");
}

#[test]
fn weights_of_the_chosen_follow_the_family() {
    for family in FAMILIES {
        let mut source = MemorySource::random(family, SMALL, 10);
        source.set(&format!("{family}.expert_weights_scale"), Value::F32(2.5));
        // Two experts alike in layer 0: a tie for every token, which the lower number wins.
        let router = source.bytes_of("blk.0.ffn_gate_inp.weight");
        let row = 4 * SMALL.n_embd;
        router.copy_within(2 * row..3 * row, 5 * row);
        let model = Model::describe(&source).unwrap();
        let mut naive = NaiveExecutor::new(&source, model.weights());
        let mut executor = Recorder::new(&mut naive);
        logits_of(&model, &mut executor, &tokens(40), 40).unwrap();
        let mut n_tied = 0;
        for (layer, routing) in &executor.seen {
            let rows = routing.experts.chunks(2).zip(routing.weights.chunks(2));
            for (experts, weights) in rows {
                let sum = (weights[0] + weights[1]) / 2.5;
                assert!(if family == "qwen3moe" { (sum - 1.0).abs() < 1e-6 } else { sum < 0.9999 });
                assert!(weights[0] >= weights[1]);
                if layer.index() == 0 && experts.iter().any(|expert| expert.0 == 5) {
                    n_tied += 1;
                    assert_eq!((experts[0].0, experts[1].0), (2, 5));
                }
            }
        }
        assert!(n_tied > 0);
    }
}

#[test]
fn perplexity_is_the_mean_over_the_scored_half_of_each_window() {
    let source = MemorySource::random("olmoe", Sizes { n_layer: 1, ..SMALL }, 11);
    let model = Model::describe(&source).unwrap();
    let mut executor = NaiveExecutor::new(&source, model.weights());
    let tokens = tokens(2 * WINDOW + 100);
    let mut told = Vec::new();
    let mut progress = |done, all| told.push((done, all));
    let ours = perplexity(&model, &mut executor, CacheType::F32, &tokens, WINDOW, &mut progress).unwrap();
    assert_eq!((ours.n_scored, ours.n_windows), (2 * 255, 2));

    let mut nll = 0.0;
    for window in tokens.chunks_exact(WINDOW) {
        let logits = logits_of(&model, &mut executor, window, WINDOW).unwrap();
        for place in FIRST_SCORED..WINDOW {
            let row: Vec<f64> = logits[(place - 1) * SMALL.n_vocab..][..SMALL.n_vocab]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            nll += row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[window[place] as usize];
        }
    }
    assert!((ours.nll - nll / 510.0).abs() < 1e-6, "{} {}", ours.nll, nll / 510.0);
    for micro_batch in [100, 300] {
        assert_eq!(
            perplexity(&model, &mut executor, CacheType::F32, &tokens, micro_batch, &mut progress).unwrap(),
            ours
        );
    }
    assert_eq!(told[..3], [(1, 2), (2, 2), (1, 2)]);
    let short =
        perplexity(&model, &mut executor, CacheType::F32, &tokens[..511], 64, &mut |_, _| {}).unwrap_err();
    assert_eq!(short.to_string(), "the text has 511 tokens; perplexity needs at least 512");
}

#[test]
fn a_comparison_says_how_far_two_streams_are_apart() {
    let mut comparison = Comparison::default();
    assert_eq!((comparison.top1_agreement(), comparison.mean_kl()), (1.0, 0.0));
    // Softmaxes of (1/2, 1/4, 1/4), and of the same in another order: half of ln 2 in one term less half in another.
    let (a, b) = ([2f32.ln(), 0.0, 0.0], [0.0, 2f32.ln(), 0.0]);
    comparison.push(&a, &a);
    comparison.push(&a, &b);
    comparison.push(&b, &a);
    comparison.push(&b, &b.map(|x| x + 3.0));
    let quarter_ln2 = 2f64.ln() / 4.0;
    assert!((comparison.mean_kl() - quarter_ln2 / 2.0).abs() < 1e-7);
    assert!((comparison.max_kl() - quarter_ln2).abs() < 1e-7);
    assert_eq!((comparison.n_positions(), comparison.top1_agreement()), (4, 0.5));
    let first = comparison.first_difference().unwrap();
    assert_eq!((first.position, first.reference, first.other), (1, 0, 1));
    assert_eq!(argmax(&[1.0, 2.0, 2.0]), 1);
}

#[test]
fn calibration_counts_every_choice_once() {
    let source = MemorySource::random("qwen3moe", SMALL, 12);
    let model = Model::describe(&source).unwrap();
    let mut naive = NaiveExecutor::new(&source, model.weights());
    let mut executor = Recorder::new(&mut naive);
    let texts = [tokens(130), tokens(70), tokens(20)];
    let cut = Cut { window: 64, held_out_every: 3, group: 150 };
    let mut told = Vec::new();
    let mut progress = |done, all| {
        told.push((done, all));
        ControlFlow::Continue(())
    };
    let counts = calibrate::run(&model, &mut executor, &texts, cut, &mut progress).unwrap();
    // Four windows go through both layers before the other two do.
    let done = [32, 64, 65, 97, 129, 161, 162, 194, 197, 207, 210, 220];
    assert_eq!(told, done.map(|done| (done, 220)));
    // Windows: 64, 64, 2 (held out), 64, 6, 20 (held out).
    assert_eq!((counts.calibration.tokens, counts.calibration.windows), (198, 4));
    assert_eq!((counts.held_out.tokens, counts.held_out.windows), (22, 2));

    // What went to each expert, from what the executor saw.
    for layer in 0..SMALL.n_layer {
        let mut calls = [vec![0u64; SMALL.n_expert], vec![0u64; SMALL.n_expert]];
        for (_, routing) in executor.seen.iter().filter(|(at, _)| at.index() == layer) {
            let block = usize::from([2, 20].contains(&routing.n_rows()));
            routing.experts.iter().for_each(|expert| calls[block][expert.index()] += 1);
        }
        assert_eq!(counts.calibration.layers[layer].calls, calls[0]);
        assert_eq!(counts.held_out.layers[layer].calls, calls[1]);
    }
    let mass: u64 = counts.held_out.layers[0].mass_millionths.iter().sum();
    assert!(mass.abs_diff(22_000_000) < 50, "{mass}");
    let n_batches: Vec<u64> = counts.calibration.layers[1].rows.iter().map(|rows| rows.batches).collect();
    assert_eq!(n_batches, [198, 24, 6, 3, 0, 0]);

    let fingerprint = model.fingerprint(&source).unwrap();
    let statistics = counts.into_statistics(fingerprint, model.architecture(), "naive").unwrap();
    assert_eq!(statistics.held_out.unwrap().tokens, 22);
}

#[test]
fn short_texts_are_held_out_by_halves_and_the_shortest_not_at_all() {
    let source = MemorySource::random("olmoe", SMALL, 12);
    let model = Model::describe(&source).unwrap();
    let mut executor = NaiveExecutor::new(&source, model.weights());
    for (n, expected) in [(63, (63, 0)), (64, (32, 32)), (101, (51, 50))] {
        let counts = calibrate::run(&model, &mut executor, &[tokens(n)], Cut::default(), &mut |_, _| {
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!((counts.calibration.tokens, counts.held_out.tokens), expected);
        let calls = |block: &calibrate::Block| block.layers[0].calls.iter().sum::<u64>();
        assert_eq!((calls(&counts.calibration), calls(&counts.held_out)), (expected.0 * 2, expected.1 * 2));
    }
}

#[test]
fn routing_that_cannot_be_counted_stops_the_calibration() {
    let mut source = MemorySource::random("olmoe", SMALL, 12);
    source.set("olmoe.expert_weights_scale", Value::F32(1e8));
    let model = Model::describe(&source).unwrap();
    let mut executor = NaiveExecutor::new(&source, model.weights());
    let refused = calibrate::run(&model, &mut executor, &[tokens(70)], Cut::default(), &mut |_, _| {
        ControlFlow::Continue(())
    });
    assert!(refused.unwrap_err().to_string().starts_with("routing of layer 0: expert "));
}
