//! Broken and malicious files: each is refused with its own words, none is believed, none panics.

use std::time::{Duration, Instant};

use orkpack::bytes::Limits;
use orkpack::gguf::{GgufError, GgufFile, Header};
use orkpack::tensor::{Dtype, Value};

use crate::support::gguf_builder::{GgufBuilder, TensorSpec, text};

// ---- GGUF ----

fn gguf(file: &[u8]) -> Result<Header, GgufError> {
    Header::parse(file, file.len() as u64, &Limits::default())
}

/// The one line that a user would read, after the file's name.
fn gguf_refusal(file: &[u8]) -> String {
    let started = Instant::now();
    let message = gguf(file).expect_err("refused").to_string();
    // Generous, as machines are busy: it is there for loops over a count that the file claims.
    assert!(started.elapsed() < Duration::from_secs(5), "slow: {message}");
    assert!(!message.chars().any(char::is_control), "{message:?}");
    message
}

fn gguf_assert_refused<'a>(cases: impl IntoIterator<Item = (Vec<u8>, &'a str)>) {
    for (file, expected) in cases {
        assert_eq!(gguf_refusal(&file), expected);
    }
}

fn f32_tensor(name: &str, dims: &[u64]) -> TensorSpec {
    TensorSpec::new(name, Dtype::F32, dims, vec![0; 32])
}

fn one_tensor(tensor: TensorSpec) -> Vec<u8> {
    GgufBuilder::new().raw_tensor(tensor).build()
}

#[test]
fn case_a1_counts_and_type_ids_are_not_believed() {
    let empty = GgufBuilder::new();
    gguf_assert_refused([
        (
            GgufBuilder { tensor_count: Some(u64::MAX), ..empty.clone() }.build(),
            "tensor_count is 18446744073709551615, but at most 262144 are read",
        ),
        (
            GgufBuilder { kv_count: Some(u64::MAX), ..empty.clone() }.build(),
            "metadata_kv_count is 18446744073709551615, but at most 65536 are read",
        ),
        (
            GgufBuilder { tensor_count: Some(200_000), ..empty.clone() }.build(),
            "the header ends inside the 200000 tensor entries: 6400000 bytes wanted at byte 24, 0 left",
        ),
        (
            GgufBuilder { kv_count: Some(60_000), ..empty.clone() }.build(),
            "the header ends inside the 60000 metadata entries: 780000 bytes wanted at byte 24, 0 left",
        ),
        (
            one_tensor(TensorSpec { n_dims: Some(5), ..f32_tensor("x", &[8]) }),
            "tensor `x` has 5 dimensions, expected 1 to 4",
        ),
        (
            one_tensor(TensorSpec { type_id: 99, ..f32_tensor("x", &[8]) }),
            "tensor `x` has element type 99, which is not supported",
        ),
        (
            // A type on which the second reader would panic.
            one_tensor(TensorSpec { type_id: 40, ..f32_tensor("x", &[8]) }),
            "tensor `x` has element type 40 (NVFP4), which is not supported",
        ),
        (
            one_tensor(TensorSpec { type_id: 9, ..f32_tensor("x", &[32]) }),
            "tensor `x` has element type 9 (Q8_1), which is not supported",
        ),
        (
            empty.clone().raw_kv(b"x.y", 77, &[0; 8]).build(),
            "metadata key `x.y` has value type 77, expected 0 to 12",
        ),
        (
            empty.raw_kv(b"x.y", 9, &[&13u32.to_le_bytes()[..], &[0; 8]].concat()).build(),
            "metadata key `x.y` has value type 13, expected 0 to 12",
        ),
    ]);
}

#[test]
fn case_a2_products_and_sums_do_not_wrap() {
    let k = 1u64 << 42;
    gguf_assert_refused([
        (
            one_tensor(f32_tensor("x", &[k + 1, 1 << 22])),
            "tensor `x`: size overflow: [4398046511105, 4194304] weights of type F32 are more than 64 bits can count",
        ),
        (
            // The number of weights fits, the bytes do not.
            one_tensor(f32_tensor("blk.0.ffn_up_exps.weight", &[1 << 20, 1 << 20, 1 << 22])),
            "tensor `blk.0.ffn_up_exps.weight`: size overflow: [1048576, 1048576, 4194304] weights of type F32 are more than 64 bits can count",
        ),
        (
            // The bytes fit, the number of weights does not.
            one_tensor(TensorSpec {
                type_id: Dtype::Q4_0.gguf_id(),
                ..f32_tensor("x", &[32, 1 << 30, 1 << 29])
            }),
            "tensor `x`: size overflow: [32, 1073741824, 536870912] weights of type Q4_0 are more than 64 bits can count",
        ),
    ]);
    // Sums: each tensor alone is beyond the file, whatever the running sum would wrap to.
    let half = |name| TensorSpec { offset: Some(0), ..f32_tensor(name, &[1 << 61]) };
    let file = GgufBuilder::new().raw_tensor(half("a")).raw_tensor(half("b")).build();
    assert_eq!(
        gguf_refusal(&file),
        "tensor `a` ends at byte 9223372036854775904, past the end of the file: 160"
    );
}

#[test]
fn case_a4_lengths_beyond_the_file_allocate_nothing() {
    let long = (1u64 << 30).to_le_bytes();
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let file = |kind, payload: &[u8]| GgufBuilder::new().raw_kv(b"tokenizer.x", kind, payload).build();
    let nested = array(9, 1).repeat(10_000);
    gguf_assert_refused([
        (
            file(8, &long),
            "the header ends inside the value of metadata key `tokenizer.x`: 1073741824 bytes wanted at byte 55, 0 left",
        ),
        (
            file(9, &array(8, 1 << 28)),
            "the header ends inside the value of metadata key `tokenizer.x`: 2147483648 bytes wanted at byte 59, 0 left",
        ),
        (
            file(9, &array(0, u64::MAX)),
            "the header ends inside the value of metadata key `tokenizer.x`: 18446744073709551615 bytes wanted at byte 59, 0 left",
        ),
        (file(9, &nested), "metadata key `tokenizer.x` holds an array of arrays, which is not supported"),
        (
            [&GgufBuilder { kv_count: Some(1), ..GgufBuilder::new() }.build()[..], &long, &[0; 5]].concat(),
            "the header ends inside metadata key 0: 1073741824 bytes wanted at byte 32, 5 left",
        ),
    ]);
}

#[test]
fn case_a4_arrays_and_strings_have_limits_even_if_the_bytes_are_there() {
    let limits = Limits {
        header_bytes: 4096,
        string_bytes: 16,
        tokenizer_elements: 8,
        array_elements: 4,
        ..Limits::default()
    };
    let array = |n| Value::Array(vec![Value::U8(0); n]);
    let refusal = |file: &GgufBuilder| {
        let file = file.build();
        Header::parse(&file, file.len() as u64, &limits).map_err(|error| error.to_string()).err()
    };
    let file = GgufBuilder::new();
    for (file, expected) in [
        (file.clone().kv("a", array(4)).kv("tokenizer.a", array(8)).text("s", &"s".repeat(16)), None),
        (
            file.clone().kv("a", array(5)),
            Some("the number of elements of metadata key `a` is 5, but at most 4 are read"),
        ),
        (
            file.clone().kv("tokenizer.a", array(9)),
            Some("the number of elements of metadata key `tokenizer.a` is 9, but at most 8 are read"),
        ),
        (
            // All arrays together: twice the limit.
            ["a", "b", "c"].iter().fold(file.clone(), |file, key| {
                file.kv(&format!("tokenizer.{key}"), array(if *key == "c" { 2 } else { 8 - 1 }))
            }),
            None,
        ),
        (
            ["a", "b", "c"].iter().fold(file.clone(), |file, key| {
                file.kv(&format!("tokenizer.{key}"), array(if *key == "c" { 3 } else { 8 - 1 }))
            }),
            Some("the number of elements of metadata key `tokenizer.c` is 3, but at most 2 are read"),
        ),
        (
            file.clone().text("s", &"s".repeat(17)),
            Some("the length of the value of metadata key `s` is 17, but at most 16 are read"),
        ),
        (
            (0..300).fold(file, |file, i| file.kv(&format!("k{i}"), Value::U8(0))),
            Some("the header is longer than 4096 bytes"),
        ),
    ] {
        assert_eq!(refusal(&file).as_deref(), expected);
    }
}

#[test]
fn case_a6_alignment_is_a_u32_power_of_two() {
    let must = "general.alignment must be a u32 and a power of two from 8 to 65536, found";
    for (value, found) in [
        (Value::U32(0), "0"),
        (Value::U32(4), "4"),
        (Value::U32(24), "24"),
        (Value::U32(131_072), "131072"),
        (Value::U32(1 << 31), "2147483648"),
        (Value::I32(-32), "a negative number of another type"),
        (Value::U64(32), "32 of another type"),
        (text("32"), "a string of 2 bytes of another type"),
        (Value::F32(32.0), "32 of another type"),
    ] {
        let file = GgufBuilder::new().kv("general.alignment", value).raw_tensor(f32_tensor("x", &[8]));
        assert_eq!(gguf_refusal(&file.build()), format!("{must} {found}"));
    }
}

#[test]
fn case_a9_dimensions_are_one_to_four() {
    for n_dims in [0, 5, 9, 255, u32::MAX] {
        let file = one_tensor(TensorSpec { n_dims: Some(n_dims), ..f32_tensor("x", &[8]) });
        assert_eq!(gguf_refusal(&file), format!("tensor `x` has {n_dims} dimensions, expected 1 to 4"));
    }
}

#[test]
fn case_a10_offsets_do_not_wrap() {
    let at = |offset| TensorSpec { offset: Some(offset), ..f32_tensor("x", &[8]) };
    gguf_assert_refused([
        (
            one_tensor(at(u64::MAX - 15)),
            "tensor `x`: offset + size overflow: 32 bytes at 18446744073709551600 of the data",
        ),
        (
            one_tensor(at(u64::MAX - 95)),
            "tensor `x`: offset + size overflow: 32 bytes at 18446744073709551520 of the data",
        ),
        (one_tensor(at(16)), "tensor `x` begins at 16 of the data, expected a multiple of 32"),
        (one_tensor(at(1 << 40)), "tensor `x` ends at byte 1099511627872, past the end of the file: 96"),
    ]);
}

#[test]
fn case_a11_names_and_keys_are_there_once() {
    let twice =
        |name| GgufBuilder::new().raw_tensor(f32_tensor(name, &[8])).raw_tensor(f32_tensor(name, &[8]));
    let keys = GgufBuilder::new().kv("general.alignment", Value::U32(32));
    gguf_assert_refused([
        (twice("blk.0.ffn_up_exps.weight").build(), "tensor `blk.0.ffn_up_exps.weight` is there twice"),
        (
            keys.clone().kv("general.alignment", Value::U32(64)).build(),
            "metadata key `general.alignment` is there twice with different values",
        ),
        (
            keys.kv("general.alignment", Value::U64(32)).build(),
            "metadata key `general.alignment` is there twice with different values",
        ),
    ]);
}

#[test]
fn case_a13_big_endian_is_named() {
    for file in [
        GgufBuilder { version: 3u32.swap_bytes(), ..GgufBuilder::new() },
        GgufBuilder { version: 2u32.swap_bytes(), ..GgufBuilder::new() },
        GgufBuilder { magic: *b"FUGG", version: 3u32.swap_bytes(), ..GgufBuilder::new() },
    ] {
        let error = gguf(&file.build()).unwrap_err();
        assert_eq!(error.to_string(), "big-endian GGUF is not supported");
        assert!(error.hint().unwrap().starts_with("convert it with "));
    }
}

#[test]
fn case_a14_other_versions_are_refused_by_number() {
    for (version, hint) in [
        (0, "this layout is from before 2024"),
        (1, "this layout is from before 2024"),
        (4, "the file may need a newer orkpack"),
        (u32::MAX, "the file may need a newer orkpack"),
    ] {
        let error = gguf(&GgufBuilder { version, ..GgufBuilder::new() }.build()).unwrap_err();
        assert_eq!(error.to_string(), format!("GGUF version {version} is not supported, expected 2 or 3"));
        assert!(error.hint().unwrap().starts_with(hint));
    }
}

#[test]
fn case_b1_a_cut_file_is_said_to_be_cut() {
    let file = GgufBuilder::new()
        .text("general.architecture", "x")
        .raw_tensor(f32_tensor("a", &[8]))
        .raw_tensor(f32_tensor("b", &[8]));
    let (header_len, whole) = (file.header().len(), file.build());
    assert_eq!((header_len, whole.len()), (131, 224));
    for (len, expected) in [
        (223, "tensor `b` ends at byte 224, past the end of the file: 223"),
        (192, "tensor `b` ends at byte 224, past the end of the file: 192"),
        (160, "tensor `a` ends at byte 192, past the end of the file: 160"),
        (131, "tensor `a` ends at byte 192, past the end of the file: 131"),
        (130, "the header ends inside the entry of tensor `b`: 8 bytes wanted at byte 123, 7 left"),
        (70, "the header ends inside the 2 tensor entries: 64 bytes wanted at byte 65, 5 left"),
        (3, "the header ends inside the magic: 4 bytes wanted at byte 0, 3 left"),
    ] {
        let error = gguf(&whole[..len]).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.hint().unwrap().starts_with("the download may be incomplete"));
    }
}

#[test]
fn case_b5_an_empty_or_foreign_file_is_said_to_be_so() {
    gguf_assert_refused([
        (vec![], "the file is empty"),
        (b"PK\x03\x04zip".to_vec(), r"is not a GGUF file: it begins with `PK\x03\x04`, expected `GGUF`"),
        (b"lmgg    ".to_vec(), "is not a GGUF file: it begins with `lmgg`, expected `GGUF`"),
    ]);
}

#[test]
fn case_j7_odd_metadata_is_refused_in_clean_words() {
    let key = |key: &[u8]| GgufBuilder::new().raw_kv(key, 0, &[0]).build();
    let name = |name: &[u8]| one_tensor(TensorSpec { name: name.to_vec(), ..f32_tensor("", &[8]) });
    let bools = [&7u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[1, 255]].concat();
    gguf_assert_refused([
        (key(&[b'k'; 65_536]), "the length of metadata key 0 is 65536, but at most 65535 are read"),
        (key(b"a\0b"), "metadata key 0 holds a control character"),
        (key(b"\x1b[2J"), "metadata key 0 holds a control character"),
        (key(b"a\xffb"), "metadata key 0 is not UTF-8"),
        (name(b"\xc3("), "the name of tensor 0 is not UTF-8"),
        (name("a\u{85}".as_bytes()), "the name of tensor 0 holds a control character"),
        (
            GgufBuilder::new().raw_kv(b"x.y", 7, &[2]).build(),
            "metadata key `x.y` holds a bool of 2, expected 0 or 1",
        ),
        (
            GgufBuilder::new().raw_kv(b"x.y", 9, &bools).build(),
            "metadata key `x.y` holds a bool of 255, expected 0 or 1",
        ),
    ]);
    // A long name does not fill the screen.
    let long = TensorSpec { n_dims: Some(9), ..f32_tensor(&"é".repeat(30_000), &[8]) };
    assert!(gguf_refusal(&one_tensor(long)).len() < 300);
}

#[test]
fn gguf_rows_are_whole_blocks_and_tensors_do_not_overlap() {
    let at = |name, offset| TensorSpec { offset: Some(offset), ..f32_tensor(name, &[16]) };
    let pair = |first, second| {
        let mut file = GgufBuilder::new().raw_tensor(at("a", first)).raw_tensor(at("b", second)).build();
        file.resize(file.len() + 256, 0);
        file
    };
    let rows = |dtype: Dtype, n_in| TensorSpec { type_id: dtype.gguf_id(), ..f32_tensor("x", &[n_in, 2]) };
    gguf_assert_refused([
        (pair(0, 0), "tensors `a` and `b` overlap at byte 96"),
        (pair(0, 32), "tensors `a` and `b` overlap at byte 128"),
        (pair(32, 0), "tensors `b` and `a` overlap at byte 128"),
        (
            one_tensor(rows(Dtype::Q8_0, 33)),
            "tensor `x` has rows of 33 weights, expected whole Q8_0 blocks of 32",
        ),
        (
            one_tensor(rows(Dtype::Q4_K, 128)),
            "tensor `x` has rows of 128 weights, expected whole Q4_K blocks of 256",
        ),
    ]);
    assert!(gguf(&pair(0, 64)).is_ok());
}

/// A small file with something of everything, in which every byte matters.
fn small_file() -> GgufBuilder {
    GgufBuilder { alignment: 64, ..GgufBuilder::new() }
        .text("general.architecture", "qwen3moe")
        .kv("general.alignment", Value::U32(64))
        .kv("x.count", Value::U64(3))
        .kv("x.flag", Value::Bool(true))
        .kv("x.scale", Value::F32(0.5))
        .kv("x.heads", Value::Array([1, 0, 4].map(Value::I32).to_vec()))
        .kv("tokenizer.ggml.tokens", Value::Array(["a", "", "é"].map(text).to_vec()))
        .tensor("token_embd.weight", Dtype::Q8_0, &[32, 2], vec![1; 68])
        .tensor("blk.0.ffn_up_exps.weight", Dtype::F16, &[4, 2, 3], vec![2; 48])
        .tensor("blk.0.ffn_gate_inp.weight", Dtype::F32, &[4, 3], vec![3; 48])
}

#[test]
fn gguf_every_cut_is_an_error() {
    let (header_len, file) = (small_file().header().len(), small_file().build());
    assert!(file.len() <= 4096 && gguf(&file).is_ok());
    for len in 0..file.len() {
        assert!(gguf(&file[..len]).is_err(), "cut to {len}");
        // With the length of the whole file, the bytes of the header are enough, and no fewer.
        let stored = Header::parse(&file[..len], file.len() as u64, &Limits::default());
        assert_eq!(stored.is_ok(), len >= header_len, "stored {len}");
    }
}

#[test]
fn gguf_no_flipped_bit_panics_and_all_that_is_read_lies_in_the_file() {
    let mut file = small_file().build();
    let len = file.len() as u64;
    for bit in 0..file.len() * 8 {
        file[bit / 8] ^= 1 << (bit % 8);
        if let Ok(header) = gguf(&file) {
            for tensor in &header.tensors {
                assert!(tensor.place.offset + tensor.place.len <= len, "bit {bit}: {tensor:?}");
            }
        }
        file[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(gguf(&file).is_ok());
}

#[test]
fn gguf_folders_and_missing_files_are_refused() {
    let open = |path: &str| GgufFile::open(path.as_ref(), Default::default(), &Limits::default());
    assert_eq!(open("/").unwrap_err().to_string(), "cannot be read: is not a regular file");
    assert!(matches!(open("/nonexistent"), Err(GgufError::Io(_))));
}
