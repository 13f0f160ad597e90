//! GGUF files that are right, or odd but readable: what is read from them.

use orkpack::bytes::{Io, Limits};
use orkpack::gguf::{GgufFile, Header, is_gguf};
use orkpack::tensor::{Dtype, Place, TensorSource, Value};

use crate::support::fixture;
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, TensorSpec, text, tiny_moe};

fn parse(file: &[u8]) -> Header {
    Header::parse(file, file.len() as u64, &Limits::default()).unwrap()
}

/// One key of each kind.
fn every_kind() -> Vec<(&'static str, Value)> {
    vec![
        ("a.u8", Value::U8(255)),
        ("a.i8", Value::I8(-128)),
        ("a.u16", Value::U16(65_535)),
        ("a.i16", Value::I16(-32_768)),
        ("a.u32", Value::U32(u32::MAX)),
        ("a.i32", Value::I32(i32::MIN)),
        ("a.u64", Value::U64(u64::MAX)),
        ("a.i64", Value::I64(i64::MIN)),
        ("a.f32", Value::F32(-0.5)),
        ("a.f64", Value::F64(1e300)),
        ("a.no", Value::Bool(false)),
        ("a.yes", Value::Bool(true)),
        ("a.text", text("Ġ")),
        ("a.texts", Value::Array(vec![text(""), text("b")])),
        ("a.numbers", Value::Array(vec![Value::I16(-1), Value::I16(2)])),
        ("a.bools", Value::Array(vec![Value::Bool(true), Value::Bool(false)])),
        ("a.none", Value::Array(vec![])),
    ]
}

#[test]
fn every_kind_of_value_is_read() {
    let kinds = every_kind();
    let file = kinds.iter().fold(GgufBuilder::new(), |file, (key, value)| file.kv(key, value.clone()));
    let header = parse(&file.build());
    assert_eq!(header.metadata.0.len(), kinds.len());
    for (key, value) in kinds {
        assert_eq!(header.metadata.get(key), Some(&value), "{key}");
    }
    assert!(header.warnings.is_empty());
}

#[test]
fn case_a13_and_a14_versions_2_and_3_are_read() {
    for version in [2, 3] {
        let file = GgufBuilder { version, ..GgufBuilder::new() }.text("general.architecture", "x").build();
        assert_eq!(parse(&file).version, version);
    }
}

#[test]
fn tensors_are_found_with_their_bytes() {
    let data: Vec<u8> = (0..=255).cycle().take(4 * 40).collect();
    let file = GgufBuilder { alignment: 64, ..GgufBuilder::new() }
        .kv("general.alignment", Value::U32(64))
        .tensor("z", Dtype::F32, &[5, 2, 4], data.clone())
        .tensor("a", Dtype::Q8_0, &[32, 2], vec![7; 68])
        .build();
    assert!(is_gguf(&file) && !is_gguf(b"GGU"));
    let file = GgufFile::from_bytes("x.gguf", file).unwrap();
    let header = file.parsed();
    assert_eq!((header.alignment, header.data_offset % 64), (64, 0));
    assert_eq!(file.header().len() as u64, header.data_offset);
    let names: Vec<&str> = file.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["z", "a"]);
    let z = file.find("z").unwrap();
    assert_eq!((z.n_in(), z.n_out(), z.n_stack(), z.n_elements()), (5, 2, 4, 40));
    assert_eq!(file.bytes(z.place).unwrap(), data);
    let a = file.find("a").unwrap();
    assert_eq!(
        (a.dtype, a.place),
        (Dtype::Q8_0, Place { file: 0, offset: header.data_offset + 192, len: 68 })
    );
    assert_eq!(file.bytes(a.place).unwrap(), [7; 68]);
    assert!(file.find("b").is_none());
    for wrong in
        [Place { file: 1, ..a.place }, Place { len: 69, ..a.place }, Place { offset: u64::MAX, ..a.place }]
    {
        let message = file.bytes(wrong).unwrap_err().to_string();
        assert!(message.contains("are not in file"), "{message}");
    }
}

#[test]
fn a_stored_header_reads_as_the_file_did() {
    let bytes = tiny_moe(&MoeSpec { n_layer: 1, ..MoeSpec::default() });
    let file = GgufFile::from_bytes("x.gguf", bytes.clone()).unwrap();
    let again = Header::parse(file.header(), bytes.len() as u64, &Limits::default()).unwrap();
    assert_eq!(again.tensors, file.tensors());
    assert_eq!(&again.metadata, file.metadata());
}

#[test]
fn every_type_of_the_table_is_carried() {
    for &dtype in Dtype::ALL {
        let (n_in, len) = (dtype.block_len() as u64, dtype.block_bytes());
        let file = GgufBuilder::new().tensor("x", dtype, &[n_in, 3], vec![0; 3 * len]).build();
        let tensor = &parse(&file).tensors[0];
        assert_eq!((tensor.dtype, tensor.place.len), (dtype, 3 * len as u64));
    }
}

#[test]
fn case_a8_empty_tensors_are_read() {
    for dims in [&[0, 64][..], &[64, 0, 8], &[0]] {
        let file = GgufBuilder::new()
            .tensor("empty", Dtype::Q8_0, dims, vec![])
            .tensor("x", Dtype::F32, &[1], vec![0; 4])
            .build();
        let header = parse(&file);
        assert_eq!(header.find("empty").map(|tensor| (tensor.n_elements(), tensor.place.len)), Some((0, 0)));
    }
}

#[test]
fn case_a11_an_equal_duplicate_key_is_a_warning() {
    let file = GgufBuilder::new().kv("x.y", Value::U32(1)).kv("x.y", Value::U32(1)).build();
    assert_eq!(parse(&file).warnings, ["metadata key `x.y` is there twice with the same value"]);
}

#[test]
fn case_j7_odd_strings_and_keys_are_kept() {
    let key = "k".repeat(65_535);
    let odd = Value::String(b"\xff\x1b[31m\0".to_vec());
    let file = GgufBuilder::new().kv("General.Name", odd.clone()).kv(&key, Value::U8(1)).kv("", Value::U8(2));
    let header = parse(&file.build());
    assert_eq!(header.metadata.get("General.Name"), Some(&odd));
    assert_eq!(header.metadata.get(&key), Some(&Value::U8(1)));
    assert_eq!(header.metadata.get(""), Some(&Value::U8(2)));
}

#[test]
fn tensors_may_lie_in_any_order_with_gaps_and_a_tail() {
    let late = TensorSpec { offset: Some(64), ..TensorSpec::new("late", Dtype::F32, &[8], vec![0; 32]) };
    let early = TensorSpec { offset: Some(0), ..TensorSpec::new("early", Dtype::F32, &[8], vec![0; 32]) };
    let mut file = GgufBuilder::new().raw_tensor(late).raw_tensor(early).build();
    file.extend([1; 100]);
    let header = parse(&file);
    let offset = |name| header.find(name).map(|tensor| tensor.place.offset - header.data_offset);
    assert_eq!((offset("late"), offset("early")), (Some(64), Some(0)));
}

#[test]
fn the_fixtures_are_read() {
    struct Case {
        file: &'static str,
        architecture: &'static str,
        n_tensors: usize,
        experts: Dtype,
    }
    for Case { file, architecture, n_tensors, experts } in [
        Case { file: "tiny-moe-q8_0.gguf", architecture: "qwen3moe", n_tensors: 38, experts: Dtype::Q8_0 },
        Case { file: "tiny-moe-q4_k_m.gguf", architecture: "qwen3moe", n_tensors: 38, experts: Dtype::Q4_K },
        Case {
            file: "reference/tiny-olmoe-f32.gguf",
            architecture: "olmoe",
            n_tensors: 27,
            experts: Dtype::F32,
        },
    ] {
        for io in [Io::Map, Io::Pread] {
            let gguf = GgufFile::open(&fixture("models").join(file), io, &Limits::default()).unwrap();
            assert_eq!(gguf.metadata().str("general.architecture"), Ok(architecture));
            assert_eq!(gguf.tensors().len(), n_tensors);
            assert_eq!(gguf.find("blk.0.ffn_gate_exps.weight").map(|tensor| tensor.dtype), Some(experts));
            assert!(gguf.parsed().warnings.is_empty());
        }
    }
}

#[test]
fn the_models_of_the_builder_are_read_in_every_type() {
    for dtype in
        [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4_K, Dtype::Q5_K, Dtype::Q6_K]
    {
        for arch in ["qwen3moe", "olmoe"] {
            let file = tiny_moe(&MoeSpec { arch, dtype, n_layer: 1, ..MoeSpec::default() });
            let file = GgufFile::from_bytes("x.gguf", file).unwrap();
            let experts = file.find("blk.0.ffn_down_exps.weight").unwrap();
            let mut weights = vec![0.0; experts.n_elements() as usize];
            orkpack::blocks::dequantize(dtype, file.bytes(experts.place).unwrap(), &mut weights).unwrap();
            let mean = weights.iter().sum::<f32>() / weights.len() as f32;
            let variance = weights.iter().map(|w| (w - mean).powi(2)).sum::<f32>() / weights.len() as f32;
            // Uniform within ± sqrt(3 / 256) has a variance of 1 / 256; K types are only about that.
            assert!(
                mean.abs() < 0.01 && (0.25..4.0).contains(&(variance * 256.0)),
                "{dtype} {mean} {variance}"
            );
        }
    }
}
