//! The NPU's weight layout against its formula, published hashes and itself backwards; cuts; scratch.

use orkpack::profile::DeviceProfile;
use orkpack::tensor::Int8Matrix;
use orkpack::tile::{Scratch, SubMatrix, TileError, cut, tile, untile};
use proptest::prelude::*;

fn profile() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// A matrix of `[n, k]` codes, `code(k, n)` each.
fn matrix(k: usize, n: usize, code: impl Fn(usize, usize) -> i8) -> Int8Matrix {
    let codes = (0..n * k).map(|i| code(i % k, i / k)).collect();
    Int8Matrix { codes, scales: vec![1.0; n], n_in: k, n_out: n }
}

/// All of a matrix as one part, padded to these.
fn whole(k: u32, n: u32, k_padded: u32, n_padded: u32) -> SubMatrix {
    SubMatrix { k0: 0, k_len: k, k_padded, n0: 0, n_len: n, n_padded }
}

fn tiled(matrix: &Int8Matrix, part: &SubMatrix) -> Vec<u8> {
    // What was there before must not shine through.
    let mut out = vec![0x55; part.bytes() as usize];
    tile(matrix, part, &mut out).unwrap();
    out
}

/// Where a single non-zero weight lands.
fn lands(k: usize, n: usize, part: &SubMatrix) -> Vec<usize> {
    let matrix = matrix(part.k_len as usize, part.n_len as usize, |i, o| i8::from((i, o) == (k, n)));
    (0..).zip(tiled(&matrix, part)).filter_map(|(at, byte)| (byte != 0).then_some(at)).collect()
}

#[test]
fn known_elements_are_where_the_hardware_reads_them() {
    let small = whole(64, 64, 64, 64);
    let long = whole(2048, 64, 2048, 64);
    for (part, k, n, offset) in [
        (small, 0, 0, 0),
        (small, 1, 0, 1),
        (small, 31, 0, 31),
        (small, 32, 0, 1024),
        (small, 0, 1, 32),
        (small, 0, 31, 992),
        (small, 0, 32, 2048),
        (small, 63, 47, 3583),
        (small, 63, 63, 4095),
        (long, 0, 0, 0),
        (long, 0, 32, 65_536),
        (long, 1023, 31, 32_767),
        (long, 1024, 0, 32_768),
        (long, 1024, 32, 98_304),
        (long, 2047, 63, 131_071),
    ] {
        assert_eq!(lands(k, n, &part), [offset], "({k}, {n})");
        assert_eq!(part.byte_of(k, n), offset, "({k}, {n})");
    }
}

#[test]
fn whole_matrices_have_the_known_hashes() {
    // Of the full-K form, over whole 4 KiB pages; 32 × 8224 is two programs, and their pages follow each other.
    let known = [
        (32, 32, 0x0eb8_485e_4580_8e1c),
        (64, 64, 0xcc58_b131_2fdb_d8a4),
        (512, 2048, 0xad9d_69a5_1605_725f),
        (2048, 512, 0xc6cf_130b_fed6_ce7f),
        (768, 2048, 0xf339_fbaa_0d49_0a6f),
        (1792, 2048, 0x89cd_a2ad_aeb3_cd49),
        (2048, 1792, 0x045c_e464_1461_9794),
        (1056, 64, 0xde24_ba05_a18f_e222),
        (32, 8224, 0x6c9b_fa20_f8d7_fff8),
    ];
    for (k, n, hash) in known {
        let matrix = matrix(k, n, |k, n| (((31 * k + 17 * n + 5) % 255) as i32 - 127) as i8);
        let mut bytes = Vec::new();
        for n0 in (0..n as u32).step_by(8192) {
            let n_len = (n as u32 - n0).min(8192);
            let part = SubMatrix { n0, n_len, n_padded: n_len, ..whole(k as u32, 0, k as u32, 0) };
            bytes.extend(tiled(&matrix, &part));
            bytes.resize(bytes.len().next_multiple_of(4096), 0);
        }
        let fnv = bytes.iter().fold(1_469_598_103_934_665_603u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211)
        });
        assert_eq!(fnv, hash, "{k} × {n}");
        if (k, n) == (64, 64) {
            let codes: Vec<i8> = bytes.iter().map(|byte| *byte as i8).collect();
            assert_eq!(codes[..8], [-122, -91, -60, -29, 2, 33, 64, 95]);
            assert_eq!([32, 1024, 2048, 3583].map(|at| codes[at]), [-105, 105, -88, 80]);
        }
    }
}

#[test]
fn padding_is_zero() {
    // 48 of 64 columns: the last 16 of the second block, in each block of inputs.
    let bytes = tiled(&matrix(64, 48, |_, _| 1), &whole(64, 48, 64, 64));
    for (at, byte) in bytes.iter().enumerate() {
        let padding = at >= 2048 && at % 1024 >= 512;
        assert_eq!(*byte, u8::from(!padding), "{at}");
    }
    // 40 of 96 inputs and 33 of 96 outputs: a whole block of each is padding.
    let part = whole(40, 33, 96, 96);
    let bytes = tiled(&matrix(40, 33, |_, _| -1), &part);
    for (k, n) in (0..96).flat_map(|k| (0..96).map(move |n| (k, n))) {
        let code = bytes[part.byte_of(k, n)] as i8;
        assert_eq!(code, if k < 40 && n < 33 { -1 } else { 0 }, "({k}, {n})");
    }
}

#[test]
fn tiles_that_do_not_fit_are_refused() {
    let matrix = matrix(64, 32, |_, _| 1);
    let good = whole(64, 32, 64, 32);
    for (part, len) in [
        (good, 2047),
        (good, 2049),
        (whole(65, 32, 96, 32), 3072),
        (whole(64, 33, 64, 64), 4096),
        (SubMatrix { k0: 1, ..good }, 2048),
        (SubMatrix { n0: u32::MAX, ..good }, 2048),
        (SubMatrix { k_padded: 40, k_len: 40, ..good }, 40 * 32),
        (SubMatrix { k_padded: 32, ..good }, 1024),
        (SubMatrix { k_padded: 0, k_len: 0, ..good }, 0),
    ] {
        let refused = Err(TileError::Buffer { needed: part.bytes(), found: len as u64 });
        assert_eq!(tile(&matrix, &part, &mut vec![0; len]), refused, "{part:?}");
        assert_eq!(untile(&vec![0; len], &part, &mut matrix.clone()), refused, "{part:?}");
    }
}

#[test]
fn matrices_are_cut_into_the_fewest_programs() {
    struct Case {
        n_in: u64,
        n_out: u64,
        /// Shape of each part, `(k_len, k_padded, n_len, n_padded)`.
        parts: Vec<(u32, u32, u32, u32)>,
    }
    let case = |n_in, n_out, parts: &[(u32, u32, u32, u32)]| Case { n_in, n_out, parts: parts.to_vec() };
    for Case { n_in, n_out, parts } in [
        case(2048, 1792, &[(2048, 2048, 1792, 1792)]),
        case(1792, 2048, &[(1792, 2048, 2048, 2048)]),
        case(768, 2048, &[(768, 1024, 2048, 2048)]),
        case(2880, 2880, &[(2880, 3072, 2880, 2880)]),
        case(1, 1, &[(1, 256, 1, 32)]),
        case(2048, 32, &[(2048, 2048, 32, 32)]),
        case(2048, 48, &[(2048, 2048, 48, 64)]),
        case(2048, 8192, &[(2048, 2048, 8192, 8192)]),
        case(2048, 8224, &[(2048, 2048, 4128, 4128), (2048, 2048, 4096, 4096)]),
        case(4096, 14_336, &[(4096, 4096, 3584, 3584); 4]),
        case(14_336, 4096, &[(3584, 3584, 4096, 4096); 4]),
        case(5632, 2048, &[(4096, 4096, 2048, 2048), (1536, 1536, 2048, 2048)]),
        case(2048, 49_155, &[[(2048, 2048, 7040, 7040); 6].as_slice(), &[(2048, 2048, 6915, 6944)]].concat()),
    ] {
        let found = cut(n_in, n_out, &profile()).unwrap();
        let shapes: Vec<_> =
            found.iter().map(|part| (part.k_len, part.k_padded, part.n_len, part.n_padded)).collect();
        assert_eq!(shapes, parts, "{n_in} × {n_out}");
    }
}

#[test]
fn what_cannot_be_cut_is_refused() {
    for (n_in, n_out) in [(0, 32), (32, 0)] {
        assert_eq!(cut(n_in, n_out, &profile()), Err(TileError::Empty { n_in, n_out }));
    }
    for (n_in, n_out) in [((1 << 24) + 1, 32), (32, u64::MAX)] {
        assert_eq!(cut(n_in, n_out, &profile()), Err(TileError::TooLarge { n_in, n_out }));
    }
}

#[test]
fn scratch_holds_the_largest_program_and_a_step_of_small_ones() {
    let mut profile = profile();
    assert_eq!(Scratch::for_parts([], &profile).total(), 0);
    let parts = [whole(2048, 1792, 2048, 1792), whole(1792, 2048, 2048, 2048), whole(512, 2048, 512, 2048)];
    let scratch = Scratch::for_parts(&parts, &profile);
    // 256 programs; 6 of 128 rows at K = 2048, and 6 of 128 at N = 2048 (more than one of 704).
    let (programs_bytes, tasks_bytes) = (256 * 896, 3 * 4096);
    assert_eq!(
        scratch,
        Scratch { programs_bytes, tasks_bytes, a_bytes: 768 * 2048, c_bytes: 768 * 2048 * 4 }
    );
    assert_eq!(Scratch::for_parts(parts.iter().chain(&parts), &profile), scratch, "shapes count, not parts");
    // However the profile's shapes combine, a domain's reserve is enough.
    for legal in profile.shapes.legal_k.clone() {
        let most = whole(legal.k, 8192, legal.k, (16 << 20) / legal.k.max(2048));
        assert!(Scratch::for_parts([&most], &profile).total() <= profile.memory.scratch_reserve_bytes.value);
    }
    // Where few rows are allowed, one-row programs set the size.
    profile.shapes.legal_k[4].max_rows = 8;
    let scratch = Scratch::for_parts(&parts[..1], &profile);
    assert_eq!((scratch.a_bytes, scratch.c_bytes), (256 * 2048, 256 * 1792 * 4));
}

proptest! {
    #[test]
    fn tiles_go_back_to_the_matrix_that_they_came_from(
        k in 1usize..200, n in 1usize..100, k_more in 0u32..3, n_more in 0u32..3, seed in any::<u32>(),
    ) {
        let code = |i, o| (seed.wrapping_mul((i * 131 + o * 7 + 1) as u32) >> 24) as i8;
        let matrix = matrix(k, n, code);
        let pad = |len: usize, more| (len as u32).next_multiple_of(32) + 32 * more;
        let part = whole(k as u32, n as u32, pad(k, k_more), pad(n, n_more));
        let bytes = tiled(&matrix, &part);
        for (i, o) in (0..k).flat_map(|i| (0..n).map(move |o| (i, o))) {
            prop_assert_eq!(bytes[part.byte_of(i, o)] as i8, code(i, o));
        }
        let mut back = Int8Matrix { codes: vec![0; n * k], ..matrix.clone() };
        untile(&bytes, &part, &mut back).unwrap();
        prop_assert_eq!(back, matrix);
    }

    #[test]
    fn parts_cover_every_matrix_once_and_fit_chunks(
        n_in in 1u64..20_000, n_out in 1u64..60_000, chunk_kib in 128u64..32_768,
    ) {
        let mut profile = profile();
        profile.memory.chunk_bytes.value = chunk_kib / 4 * 4096;
        let parts = cut(n_in, n_out, &profile).unwrap();
        let (mut k0, mut n0) = (0, 0);
        for part in &parts {
            prop_assert_eq!((part.k0, part.n0), (k0, n0), "K-slices of one range follow each other");
            prop_assert!(part.k_len > 0 && part.n_len > 0);
            prop_assert!(part.k_len <= part.k_padded && part.n_padded - part.n_len < 32);
            prop_assert!(profile.max_rows(part.k_padded).is_some());
            prop_assert!(part.n_padded <= profile.shapes.n_max.value && part.n_padded % 32 == 0);
            prop_assert!(part.bytes() <= profile.memory.chunk_bytes.value);
            k0 += part.k_len;
            if u64::from(k0) == n_in {
                (k0, n0) = (0, n0 + part.n_len);
            }
        }
        prop_assert_eq!((k0, u64::from(n0)), (0, n_out));
    }
}
