//! Routing statistics: counted, written, read back, merged, refused; and imatrix files.

use orkpack::bytes::{Io, Limits};
use orkpack::calibrate::{
    BATCHES, Block, ImatrixError, MergeError, Origin, RoutedLayer, Statistics, StatisticsError, bin_edges,
    check_imatrix_magic, is_imatrix, merge, read_imatrix,
};
use orkpack::executor::Routing;
use orkpack::gguf::GgufFile;
use orkpack::tensor::{Dtype, Value};
use orkpack::units::{ExpertId, LayerId};

use crate::support::fixture;
use crate::support::gguf_builder::{GgufBuilder, text};
use crate::support::routed::{Rng, draw, shape, shares, statistics};
use crate::support::schema;

fn small() -> Statistics {
    statistics(&shape(2, 6, 2, 64, 64, Dtype::Q8_0), 700, 2.0, 1)
}

// ---------------------------------------------------------------------------------------------- counting

#[test]
fn rows_per_expert_are_counted_in_whole_batches() {
    let layers = [RoutedLayer { layer: 3, n_expert: 7, n_used: 2 }];
    let mut rng = Rng::new(1);
    let windows: Vec<Routing> =
        [512, 130, 1, 0].map(|tokens| draw(&mut rng, &shares(7, 2.0, 0), tokens, 2)).to_vec();
    let mut block = Block::empty(&layers);
    for window in &windows {
        block.record(LayerId(3), window).unwrap();
        block.end_window(window.n_rows() as u64);
    }
    assert_eq!((block.tokens, block.windows), (643, 4));
    let counts = block.layer(LayerId(3)).unwrap();
    let calls = |expert: u32, experts: &[ExpertId]| experts.iter().filter(|e| e.0 == expert).count();
    for expert in 0..7u32 {
        let all: usize = windows.iter().map(|window| calls(expert, &window.experts)).sum();
        assert_eq!(counts.calls[expert as usize], all as u64);
        // Each weight is one half.
        assert_eq!(counts.mass_millionths[expert as usize], all as u64 * 500_000);
        for (rows, batch) in counts.rows.iter().zip(BATCHES) {
            let batches = windows.iter().flat_map(|window| {
                (0..window.n_rows() / batch as usize).map(|i| {
                    calls(expert, &window.experts[i * batch as usize * 2..][..batch as usize * 2]) as u32
                })
            });
            let (edges, mut bins) = (bin_edges(batch), vec![0; bin_edges(batch).len()]);
            for hits in batches {
                bins[edges.iter().position(|&edge| hits <= edge).unwrap()] += 1;
            }
            assert_eq!(rows.batch, batch);
            assert_eq!(rows.experts[expert as usize], bins, "expert {expert}, batch {batch}");
            assert_eq!(rows.batches, bins.iter().sum::<u64>());
        }
    }
    assert_eq!(counts.rows_at(512).unwrap().batches, 1);
    assert!(counts.rows_at(7).is_none());
}

#[test]
fn bins_are_nothing_powers_of_two_and_the_batch() {
    assert_eq!(bin_edges(1), [0, 1]);
    assert_eq!(bin_edges(8), [0, 1, 2, 4, 8]);
    assert_eq!(bin_edges(12), [0, 1, 2, 4, 8, 12]);
}

#[test]
fn routing_that_cannot_be_is_refused_while_counting() {
    let layers = [RoutedLayer { layer: 3, n_expert: 4, n_used: 1 }];
    let routing = |expert: u32, weight: f32| Routing {
        n_used: 1,
        experts: vec![ExpertId(expert)],
        weights: vec![weight],
    };
    for (layer, routing, text) in [
        (2, routing(0, 1.0), "routing of layer 2: it has no experts"),
        (3, routing(4, 1.0), "routing of layer 3: expert 4 of 4"),
        (3, routing(1, f32::NAN), "routing of layer 3: expert 1 has weight NaN"),
        (3, routing(1, f32::INFINITY), "routing of layer 3: expert 1 has weight inf"),
    ] {
        let error = Block::empty(&layers).record(LayerId(layer), &routing).unwrap_err();
        assert_eq!(error.to_string(), text);
    }
}

// ---------------------------------------------------------------------------------------------- the document

#[test]
fn a_document_is_read_back_as_it_was() {
    let statistics = small();
    let json = statistics.to_json().unwrap();
    let read = Statistics::from_json(&json).unwrap();
    assert_eq!(read, statistics);
    assert_eq!(read.to_json().unwrap(), json);
    assert_eq!(read.digest().unwrap(), blake3::hash(&json).to_hex().to_string());
    schema::check(&schema::load("statistics.schema.json"), &serde_json::from_slice(&json).unwrap()).unwrap();
}

#[test]
fn case_d11_a_byte_order_mark_is_skipped_and_half_a_file_is_named_by_line() {
    let json = small().to_json().unwrap();
    let with_mark = [&b"\xef\xbb\xbf"[..], &json].concat();
    assert!(Statistics::from_json(&with_mark).is_ok());
    let text = String::from_utf8(json).unwrap().replace(",\"kernel\"", ",\r\n\"kernel\"");
    assert!(Statistics::from_json(text.as_bytes()).is_ok());
    let error = Statistics::from_json(&text.as_bytes()[..text.len() / 2]).unwrap_err().to_string();
    assert!(error.contains("line 2"), "{error}");
    assert!(Statistics::from_json(b"").is_err());
}

#[test]
fn broken_documents_are_refused_by_layer_and_expert() {
    type Change = fn(&mut Statistics);
    let cases: &[(&str, Change)] = &[
        ("schema is `2`, expected `orkpack-statistics-1`", |s| s.schema = "2".into()),
        ("fingerprint is 3 characters, expected 64 hex digits", |s| s.fingerprint = Some("abc".into())),
        ("architecture is", |s| s.architecture = "a\u{1b}[31m".into()),
        ("kernel is 129 bytes", |s| s.kernel = "k".repeat(129)),
        ("the number of layers is 0", |s| s.layers.clear()),
        ("layers[1].layer is 0, expected ascending layers", |s| s.layers[1].layer = 0),
        ("n_expert of layer 1 is 4000000000", |s| s.layers[1].n_expert = 4_000_000_000),
        ("n_used of layer 0 is 7", |s| s.layers[0].n_used = 7),
        ("n_used of layer 0 is 0", |s| s.layers[0].n_used = 0),
        ("calibration.tokens is 0", |s| s.calibration.tokens = 0),
        ("calibration.tokens is 18446744073709551615", |s| s.calibration.tokens = u64::MAX),
        ("calibration.windows is 0", |s| s.calibration.windows = 0),
        ("the number of layers in calibration is 1, expected 2", |s| drop(s.calibration.layers.pop())),
        ("calibration, layer is 5, expected 1", |s| s.calibration.layers[1].layer = 5),
        ("layer 1: number of experts is 5, expected 6", |s| {
            s.calibration.layers[1].calls.pop();
        }),
        ("layer 1, expert 3: calls is 701, expected at most one for each of 700 tokens", |s| {
            s.calibration.layers[1].calls[3] = 701
        }),
        ("layer 0: sum of calls is 1401, expected 1400, 2 for each of 700 tokens", |s| {
            s.calibration.layers[0].calls[5] += 1
        }),
        ("held_out, layer 0: sum of calls is", |s| s.held_out.as_mut().unwrap().layers[0].calls[5] += 1),
        ("layer 0: length of mass_millionths is 5", |s| {
            s.calibration.layers[0].mass_millionths.pop();
        }),
        ("layer 0, expert 2: mass_millionths is 18446744073709551615", |s| {
            s.calibration.layers[0].mass_millionths[2] = u64::MAX
        }),
        ("layer 0: batches of rows is [1, 8, 32, 64, 128]", |s| drop(s.calibration.layers[0].rows.pop())),
        ("layer 0, batch 8: batches is 88", |s| s.calibration.layers[0].rows[1].batches = 88),
        ("layer 0, batch 8: number of experts is 5", |s| drop(s.calibration.layers[0].rows[1].experts.pop())),
        ("layer 0, batch 8, expert 4: 5 bins with a sum of is", |s| {
            s.calibration.layers[0].rows[1].experts[4][0] += 1
        }),
        ("layer 0, batch 8, expert 4: 4 bins", |s| {
            s.calibration.layers[0].rows[1].experts[4].pop();
        }),
        ("layer 0, batch 512, expert 4: rows is 257, expected at most its", |s| {
            let bins = &mut s.calibration.layers[0].rows[5].experts[4];
            bins.fill(0);
            *bins.last_mut().unwrap() = 1;
        }),
        ("sources is 0, expected sources if, and only if", |s| s.origin = Origin::Merged),
    ];
    for (text, change) in cases {
        let mut broken = small();
        change(&mut broken);
        let error = Statistics::from_json(&broken.to_json().unwrap()).unwrap_err().to_string();
        assert!(error.contains(text), "{text}: {error}");
    }
    // Numbers that are none, and fields that are none.
    let json = String::from_utf8(small().to_json().unwrap()).unwrap();
    for (from, to) in [
        ("\"tokens\":700", "\"tokens\":-1"),
        ("\"tokens\":700", "\"tokens\":1e3"),
        ("\"tokens\":700", "\"tokens\":99999999999999999999"),
        ("\"tokens\":700", "\"tokens\":null"),
        ("\"tokens\":700", "\"tokens\":700,\"prompt\":\"secret\""),
    ] {
        let broken = json.replacen(from, to, 1);
        assert_ne!(broken, json);
        assert!(matches!(Statistics::from_json(broken.as_bytes()), Err(StatisticsError::Json(_))), "{to}");
    }
}

#[test]
fn case_d10_other_models_are_told_by_shape_or_by_fingerprint() {
    let statistics = small();
    let layers = statistics.layers.clone();
    statistics.check_model(&layers, None).unwrap();
    statistics.check_model(&layers, Some(&"ab".repeat(32))).unwrap();
    let error = statistics.check_model(&layers, Some(&"cd".repeat(32))).unwrap_err();
    assert!(matches!(error, StatisticsError::Foreign { .. }));
    assert!(error.to_string().contains("fingerprint abababababab, this model's is cdcdcdcdcdcd"), "{error}");
    let mut other = layers.clone();
    other[1].n_expert = 128;
    let error = statistics.check_model(&other, Some(&"ab".repeat(32))).unwrap_err();
    assert!(error.to_string().contains("layer 1 has 6 experts and uses 2, not 128 and 2"), "{error}");
    other.pop();
    let error = statistics.check_model(&other, None).unwrap_err().to_string();
    assert!(error.contains("2 layers with experts, not 1"), "{error}");
}

#[test]
fn shares_are_smoothed_and_add_up() {
    let statistics = small();
    for layer in 0..2 {
        let share = |expert| statistics.share(LayerId(layer), ExpertId(expert)).unwrap();
        let sum: f64 = (0..6).map(share).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        let calls = statistics.calibration.layer(LayerId(layer)).unwrap().calls[2] as f64;
        assert!((share(2) - (calls + 0.5) / 1403.0).abs() < 1e-12);
    }
    assert_eq!(statistics.share(LayerId(2), ExpertId(0)), None);
    assert_eq!(statistics.share(LayerId(0), ExpertId(6)), None);
}

#[test]
fn case_d7_coverage_is_a_number() {
    let shape = shape(2, 64, 2, 64, 64, Dtype::Q8_0);
    let short = statistics(&shape, 40, 4.0, 1).coverage();
    assert!(short.is_thin() && short.unseen_share() > 0.1, "{short:?}");
    assert_eq!((short.tokens, short.tokens_wanted, short.n_experts), (40, 640, 128));
    let long = statistics(&shape, 5000, 4.0, 1).coverage();
    assert!(!long.is_thin() && long.unseen_share() < 0.05);
}

// ---------------------------------------------------------------------------------------------- merging

#[test]
fn merging_adds_counts_as_often_as_the_weights_say() {
    let shape = shape(2, 6, 2, 64, 64, Dtype::Q8_0);
    let (a, mut b) = (statistics(&shape, 700, 2.0, 1), statistics(&shape, 100, 0.0, 2));
    let merged = merge(&[(a.clone(), 2), (b.clone(), 1)]).unwrap();
    assert_eq!(merged.origin, Origin::Merged);
    assert_eq!(merged.calibration.tokens, 1500);
    let calls = |s: &Statistics| s.calibration.layers[1].calls.clone();
    let expected: Vec<u64> = calls(&a).iter().zip(calls(&b)).map(|(a, b)| 2 * a + b).collect();
    assert_eq!(calls(&merged), expected);
    assert_eq!(merged.held_out.as_ref().unwrap().tokens, 2 * 140 + 20);
    let bins = |s: &Statistics| s.calibration.layers[0].rows[1].experts[4][1];
    assert_eq!(bins(&merged), 2 * bins(&a) + bins(&b));
    assert_eq!(merged.sources[0].digest, a.digest().unwrap());
    assert_eq!(merged.fingerprint, a.fingerprint);
    // Repeating a text is no evidence: 1500 tokens count as (2·700 + 100)² / (4·700 + 100).
    assert!((merged.effective_tokens(false) - 1500f64.powi(2) / 2900.0).abs() < 1e-9);
    assert_eq!(a.effective_tokens(true), 140.0);
    let json = merged.to_json().unwrap();
    assert_eq!(Statistics::from_json(&json).unwrap(), merged);
    schema::check(&schema::load("statistics.schema.json"), &serde_json::from_slice(&json).unwrap()).unwrap();
    // A merge of merges is a document too.
    merge(&[(merged, 3), (a.clone(), 1)]).unwrap();

    // What only one document has is left out.
    b.held_out = None;
    b.calibration.layers[0].rows.clear();
    b.calibration.layers[0].mass_millionths.clear();
    let merged = merge(&[(a.clone(), 1), (b, 1)]).unwrap();
    assert_eq!(merged.held_out.unwrap().tokens, 140);
    assert!(merged.calibration.layers[0].rows.is_empty());
    assert!(!merged.calibration.layers[1].rows.is_empty());
}

#[test]
fn what_does_not_belong_together_is_not_merged() {
    let shape = |n| shape(2, n, 2, 64, 64, Dtype::Q8_0);
    let a = statistics(&shape(6), 100, 2.0, 1);
    let mut foreign = a.clone();
    foreign.fingerprint = Some("cd".repeat(32));
    let mut huge = a.clone();
    huge.calibration.tokens = u64::MAX / 2;
    assert!(matches!(merge(&[]), Err(MergeError::Empty)));
    assert!(matches!(merge(&[(a.clone(), 0)]), Err(MergeError::Weight(0))));
    assert!(matches!(merge(&[(a.clone(), 1001)]), Err(MergeError::Weight(1001))));
    assert!(matches!(merge(&[(a.clone(), 1), (foreign, 1)]), Err(MergeError::Differs { number: 2, .. })));
    let other = statistics(&shape(7), 100, 2.0, 1);
    let error = merge(&[(a.clone(), 1), (other, 1)]).unwrap_err().to_string();
    assert!(error.starts_with("document 2 does not fit the first: "), "{error}");
    assert!(matches!(merge(&[(huge, 900), (a, 1)]), Err(MergeError::Overflow)));
}

// ---------------------------------------------------------------------------------------------- imatrix

fn qwen3moe() -> Vec<RoutedLayer> {
    (0..2).map(|layer| RoutedLayer { layer, n_expert: 12, n_used: 4 }).collect()
}

#[test]
fn an_imatrix_gives_the_counts_it_holds() {
    let path = fixture("models/reference/tiny-qwen3moe.imatrix.gguf");
    let file = GgufFile::open(&path, Io::Map, &Limits::default()).unwrap();
    assert!(is_imatrix(&file));
    let statistics = read_imatrix(&file, "qwen3moe", &qwen3moe()).unwrap();
    assert_eq!(
        statistics.calibration.layers[1].calls,
        [853, 970, 649, 1565, 831, 683, 780, 659, 1051, 788, 1229, 1206]
    );
    assert_eq!((statistics.calibration.tokens, statistics.calibration.windows), (2816, 22));
    assert_eq!((statistics.origin, &statistics.fingerprint), (Origin::Imatrix, &None));
    assert!(statistics.held_out.is_none(), "nothing was set aside");
    let json = String::from_utf8(statistics.to_json().unwrap()).unwrap();
    assert_eq!(Statistics::from_json(json.as_bytes()).unwrap(), statistics);
    assert!(!json.contains("calibration.txt"), "names of texts are not kept");
    schema::check(&schema::load("statistics.schema.json"), &serde_json::from_str(&json).unwrap()).unwrap();
    // Another number of experts, of experts used, of layers.
    let change = |change: fn(&mut Vec<RoutedLayer>)| {
        let mut layers = qwen3moe();
        change(&mut layers);
        read_imatrix(&file, "qwen3moe", &layers).unwrap_err().to_string()
    };
    assert!(change(|l| l[0].n_expert = 16).contains("has 12 counts, expected one for each of 16 experts"));
    assert!(
        change(|l| l[0].n_used = 3).contains("is 1072, expected at most")
            || change(|l| l[0].n_used = 3).contains("not")
    );
    assert!(
        change(|l| l.push(RoutedLayer { layer: 2, n_expert: 12, n_used: 4 }))
            .contains("blk.2.ffn_gate_exps.weight.counts` is missing")
    );
    assert!(matches!(read_imatrix(&file, "llama", &[]), Err(ImatrixError::NoExperts)));
    // The merged document of a calibration and an imatrix knows no model for sure.
    let mut counted = statistics.clone();
    (counted.origin, counted.fingerprint) = (Origin::Calibration, Some("ab".repeat(32)));
    assert_eq!(merge(&[(counted, 1), (statistics, 1)]).unwrap().fingerprint, None);
}

#[test]
fn files_without_routing_are_refused() {
    struct Case {
        counts: [Vec<f32>; 2],
        error: &'static str,
    }
    let one = |counts: &[f32]| [counts.to_vec(), vec![5.0, 3.0, 2.0, 2.0]];
    for case in [
        Case {
            counts: one(&[12.0]),
            error: "holds no routing: tensor `blk.0.ffn_gate_exps.weight.counts` has a single count",
        },
        Case {
            counts: [vec![6.0; 4], vec![6.0; 4]],
            error: "holds no routing: tensor `blk.0.ffn_gate_exps.weight.counts` has the same count",
        },
        Case { counts: one(&[5.0, 3.0, 2.0]), error: "has 3 counts, expected one for each of 4" },
        Case { counts: one(&[5.0, 3.0, 2.0, 3.0]), error: "add up to 13" },
        Case { counts: one(&[6.0, 4.0, 2.0, 2.0]), error: "add up to 12, which is not 2 times 7 tokens" },
        Case { counts: one(&[5.5, 2.5, 2.0, 2.0]), error: "expert 0: 5.5 is no count" },
        Case { counts: one(&[5.0, 3.0, f32::NAN, 4.0]), error: "expert 2: NaN is no count" },
        Case { counts: one(&[5.0, 3.0, -1.0, 5.0]), error: "expert 2: -1 is no count" },
        Case { counts: one(&[5.0, 3.0, f32::INFINITY, 5.0]), error: "expert 2: inf is no count" },
        Case {
            counts: one(&[9.0, 1.0, 1.0, 1.0]),
            error: "layer 0, expert 0: calls is 9, expected at most one for each of 6 tokens",
        },
    ] {
        let layers: Vec<_> = (0..2).map(|layer| RoutedLayer { layer, n_expert: 4, n_used: 2 }).collect();
        let mut file =
            GgufBuilder::new().kv("general.type", text("imatrix")).kv("imatrix.chunk_count", Value::U32(1));
        for (layer, counts) in case.counts.iter().enumerate() {
            let bytes = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
            let name = format!("blk.{layer}.ffn_gate_exps.weight.counts");
            file = file.tensor(&name, Dtype::F32, &[1, counts.len() as u64], bytes);
        }
        let file = GgufFile::from_bytes("test", file.build()).unwrap();
        let error = read_imatrix(&file, "test", &layers).unwrap_err().to_string();
        assert!(error.contains(case.error), "{}: {error}", case.error);
    }
    let model = GgufBuilder::new().kv("general.type", text("model")).build();
    let model = GgufFile::from_bytes("test", model).unwrap();
    assert!(matches!(read_imatrix(&model, "test", &qwen3moe()), Err(ImatrixError::NotImatrix)));
}

#[test]
fn the_old_form_of_imatrix_is_named() {
    // A count of entries, then a name.
    let old = [&3u32.to_le_bytes()[..], &4u32.to_le_bytes(), b"blk."].concat();
    let error = check_imatrix_magic(&old).unwrap_err().to_string();
    for words in ["`.dat`", "one number of calls for all experts", "`-o imatrix.gguf`", "calibrate"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    check_imatrix_magic(b"GGUF\x03").unwrap();
    let cut = |len: usize| check_imatrix_magic(&old[..len]).unwrap_err();
    assert!(matches!(cut(9), ImatrixError::OldFormat));
    let none = [&0u32.to_le_bytes()[..], &old[4..]].concat();
    let others = [&b""[..], b"GGU", &old[..8], b"{\"schema\": 1}", &none];
    for other in others {
        assert!(matches!(check_imatrix_magic(other), Err(ImatrixError::NeitherForm)), "{other:?}");
    }
}

/// An imatrix with these tensors of counts.
fn imatrix(tensors: &[(&str, &[f32])]) -> GgufFile {
    let file =
        GgufBuilder::new().kv("general.type", text("imatrix")).kv("imatrix.chunk_count", Value::U32(1));
    let file = tensors.iter().fold(file, |file, (name, counts)| {
        let bytes = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        file.tensor(name, Dtype::F32, &[1, counts.len() as u64], bytes)
    });
    GgufFile::from_bytes("test", file.build()).unwrap()
}

#[test]
fn case_d2_experts_that_are_tensors_of_their_own_count_for_themselves_and_silent_ones_as_never_called() {
    let layers = [RoutedLayer { layer: 1, n_expert: 8, n_used: 2 }];
    let name = |expert: u32| format!("blk.1.ffn_up.{expert}.weight.counts");
    let names: Vec<String> = (0..8).map(name).collect();
    let counts = [[7.0f32], [3.0], [5.0], [4.0], [1.0]];
    let tensors: Vec<(&str, &[f32])> =
        [0, 2, 3, 5, 7].iter().zip(&counts).map(|(e, count)| (names[*e].as_str(), &count[..])).collect();
    let statistics = read_imatrix(&imatrix(&tensors), "llama", &layers).unwrap();
    assert_eq!(statistics.calibration.layers[0].calls, [7, 0, 3, 5, 0, 4, 0, 1]);
    assert_eq!(statistics.calibration.tokens, 10);
    let coverage = statistics.coverage();
    assert_eq!(coverage.never_seen.len(), 3);
    assert!((coverage.unseen_share() - 0.375).abs() < 1e-12);

    let refused = |tensors: &[(&str, &[f32])]| {
        read_imatrix(&imatrix(tensors), "llama", &layers).unwrap_err().to_string()
    };
    // An expert whose call is missing leaves a sum that no number of tokens gives.
    assert!(refused(&tensors[..4]).contains("`blk.1.ffn_up.*.weight.counts` add up to 19"));
    let broken = [(names[0].as_str(), &[7.0f32, 1.0][..])];
    assert!(refused(&broken).contains("`blk.1.ffn_up.0.weight.counts` has 2 counts"));
    let broken = [(names[0].as_str(), &[7.0f32][..]), (names[6].as_str(), &[f32::NAN][..])];
    assert!(refused(&broken).contains("`blk.1.ffn_up.6.weight.counts`, expert 6: NaN is no count"));
}

#[test]
fn counts_that_nothing_can_have_counted_are_refused_by_tensor_and_expert() {
    let layers = [RoutedLayer { layer: 0, n_expert: 3, n_used: 1 }];
    for (bad, said) in [
        (f32::NEG_INFINITY, "-inf is no count"),
        (-0.5, "-0.5 is no count"),
        (1e17, "100000000000000000 is no count"),
        (f32::MAX, "340282350000000000000000000000000000000 is no count"),
        (0.25, "0.25 is no count"),
    ] {
        let file = imatrix(&[("blk.0.ffn_gate_exps.weight.counts", &[4.0, bad, 3.0])]);
        let error = read_imatrix(&file, "test", &layers).unwrap_err().to_string();
        let expected = format!("imatrix: tensor `blk.0.ffn_gate_exps.weight.counts`, expert 1: {said}");
        assert_eq!(error, expected);
    }
    // The largest counts there are, in as many experts as a layer may have: refused, whatever their sum.
    let counts = vec![9_007_199_254_740_992.0; 1 << 12];
    let layers = [RoutedLayer { layer: 0, n_expert: 1 << 12, n_used: 1 }];
    let file = imatrix(&[("blk.0.ffn_gate_exps.weight.counts", &counts)]);
    assert!(read_imatrix(&file, "test", &layers).is_err());
}
