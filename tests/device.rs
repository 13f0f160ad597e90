//! Devices against products by hand: naive sums, board vectors, literal registers, hand-built programs, faults.

use std::sync::Arc;
use std::time::Duration;

use orkpack::bytes::FileBytes;
use orkpack::device::npu::program::{Product, Task, WORDS};
use orkpack::device::port::{Buffer, CoreTasks, Direction, Port, Submission};
use orkpack::device::{
    Account, ChunkId, CpuTiles, Device, DeviceError, DeviceMatrix, DomainAccount, Fault, Job, Npu,
    PlacedPart, PortError, Sim, VECTORS, multiply_tiles, probe, probe_matrix,
};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::{Int8Matrix, MatrixView};
use orkpack::threads::Pool;
use orkpack::tile::{Scratch, SubMatrix, cut, tile};

fn profile() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

fn sim(profile: &DeviceProfile) -> Npu<Sim> {
    Npu::new(Sim::new(profile), profile)
}

/// Codes −127 … 127 from a small generator.
fn codes(len: usize, seed: u32) -> Vec<i8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state % 255) as i32 - 127
    };
    (0..len).map(|_| draw() as i8).collect()
}

fn matrix(n_in: usize, n_out: usize, seed: u32) -> Int8Matrix {
    Int8Matrix { codes: codes(n_in * n_out, seed), scales: vec![1.0; n_out], n_in, n_out }
}

/// The product from row-major codes, as it is written on paper.
fn naive(rows: &[i8], weights: &Int8Matrix) -> Vec<i32> {
    let dot = |x: &[i8], w: &[i8]| x.iter().zip(w).map(|(&x, &w)| i32::from(x) * i32::from(w)).sum();
    rows.chunks(weights.n_in)
        .flat_map(|x| weights.codes.chunks(weights.n_in).map(move |w| dot(x, w)))
        .collect()
}

fn view(rows: &[i8], n_in: usize) -> MatrixView<'_, i8> {
    MatrixView::new(rows, rows.len() / n_in, n_in).unwrap()
}

/// Puts a matrix into one chunk of a domain, its parts 4 KiB apart at least.
fn load(device: &mut dyn Device, weights: &Int8Matrix, profile: &DeviceProfile, domain: u32) -> DeviceMatrix {
    let parts = cut(weights.n_in as u64, weights.n_out as u64, profile).unwrap();
    place(device, weights, &parts, domain)
}

fn place(device: &mut dyn Device, weights: &Int8Matrix, parts: &[SubMatrix], domain: u32) -> DeviceMatrix {
    let offsets = |end: &mut u64, part: &SubMatrix| {
        let offset = *end;
        *end = (offset + part.bytes()).next_multiple_of(4096);
        Some(offset)
    };
    let offsets: Vec<u64> = parts.iter().scan(0, offsets).collect();
    let bytes = parts.last().unwrap().bytes() + offsets.last().unwrap();
    let chunk = device.create_chunk(bytes, domain).unwrap();
    let fill = &mut |bytes: &mut [u8]| {
        for (part, offset) in parts.iter().zip(&offsets) {
            tile(weights, part, &mut bytes[*offset as usize..][..part.bytes() as usize]).unwrap();
        }
        Ok(())
    };
    device.fill_chunk(chunk, fill).unwrap();
    let place = |(&part, offset)| PlacedPart { part, chunk, offset };
    DeviceMatrix {
        n_in: weights.n_in as u32,
        n_out: weights.n_out as u32,
        parts: parts.iter().zip(offsets).map(place).collect(),
    }
}

fn prepare(device: &mut dyn Device, matrices: &[(u32, &DeviceMatrix)]) {
    let parts = matrices.iter().flat_map(|(domain, matrix)| {
        matrix.parts.iter().map(|placed| (*domain, placed.part)).collect::<Vec<_>>()
    });
    device.prepare(&parts.collect::<Vec<_>>()).unwrap();
}

fn multiply(device: &mut dyn Device, matrix: &DeviceMatrix, rows: &[i8]) -> Result<Vec<i32>, DeviceError> {
    let rows = view(rows, matrix.n_in as usize);
    // What was there before must not shine through.
    let mut out = vec![77; rows.n_rows() * matrix.n_out as usize];
    device.run(&mut [Job { matrix, rows, out: &mut out }])?;
    Ok(out)
}

#[test]
fn all_board_vectors_come_out_of_the_software_npu() {
    let profile = profile();
    let mut device = sim(&profile);
    for vector in VECTORS {
        vector.check(&mut device, &profile).unwrap();
    }
    let account = device.account();
    assert_eq!((account.weight_bytes, account.scratch_bytes, account.faults), (0, 0, 0));
}

#[test]
fn the_probe_passes_right_devices_and_catches_a_wrong_tile_order() {
    let profile = profile();
    probe(&mut CpuTiles::new(), &profile).unwrap();
    let mut device = sim(&profile);
    probe(&mut device, &profile).unwrap();
    device.port_mut().inject(Fault::WrongTileOrder);
    let error = probe(&mut device, &profile).unwrap_err();
    assert!(matches!(error, DeviceError::Untrusted { .. }), "{error}");
    assert_eq!(device.port().mapped(0), (0, 0), "a failed probe leaves nothing mapped");

    device.port_mut().heal();
    let weights = matrix(300, 70, 5);
    let placed = load(&mut device, &weights, &profile, 0);
    prepare(&mut device, &[(0, &placed)]);
    let part = placed.parts[0].part;
    let mut tiles = vec![0; part.bytes() as usize];
    tile(&weights, &part, &mut tiles).unwrap();
    probe_matrix(&mut device, &placed, &[&tiles]).unwrap();
    tiles[part.byte_of(299, 69)] ^= 1;
    let error = probe_matrix(&mut device, &placed, &[&tiles]).unwrap_err();
    assert!(matches!(&error, DeviceError::Untrusted { what, .. } if what.contains("output 69")), "{error}");
}

#[test]
fn operands_of_a_published_gate_are_exact() {
    let profile = profile();
    for (k, n) in [(2048, 256), (2048, 2048), (2048, 5632), (5632, 64), (5632, 2048)] {
        let rows: Vec<i8> = (0..k).map(|i| ((7 * i + 3) % 9) as i8 - 4).collect();
        let codes = (0..k * n).map(|i| ((5 * i + 1) % 11) as i8 - 5).collect();
        let weights = Int8Matrix { codes, scales: vec![1.0; n], n_in: k, n_out: n };
        let mut device = sim(&profile);
        let placed = load(&mut device, &weights, &profile, 0);
        prepare(&mut device, &[(0, &placed)]);
        assert_eq!(multiply(&mut device, &placed, &rows).unwrap(), naive(&rows, &weights), "{k} × {n}");
    }
}

#[test]
fn every_class_of_shape_is_exact_on_every_device() {
    struct Case {
        n_in: usize,
        n_out: usize,
        rows: &'static [usize],
    }
    let profile = profile();
    let pool = Arc::new(Pool::new(3));
    for Case { n_in, n_out, rows } in [
        Case { n_in: 256, n_out: 32, rows: &[1, 2, 127, 128, 129, 257] },
        Case { n_in: 512, n_out: 48, rows: &[1, 64, 65, 703, 704, 705] },
        Case { n_in: 100, n_out: 33, rows: &[1, 3] },
        Case { n_in: 768, n_out: 96, rows: &[1, 320, 321] },
        Case { n_in: 1500, n_out: 64, rows: &[1, 192, 193] },
        Case { n_in: 1792, n_out: 160, rows: &[1, 17, 128, 129] },
        Case { n_in: 2560, n_out: 64, rows: &[1, 64, 65] },
        Case { n_in: 2880, n_out: 32, rows: &[1, 65] },
        Case { n_in: 3584, n_out: 32, rows: &[1, 65] },
        Case { n_in: 4096, n_out: 4128, rows: &[1, 5] },
        Case { n_in: 4097, n_out: 40, rows: &[1, 4, 65] },
        Case { n_in: 14_336, n_out: 64, rows: &[1, 65] },
        Case { n_in: 256, n_out: 8192, rows: &[1, 3] },
        Case { n_in: 256, n_out: 8224, rows: &[1, 2] },
    ] {
        let weights = matrix(n_in, n_out, (n_in + n_out) as u32);
        let on_pool = Npu::new(Sim::new(&profile).on(Arc::clone(&pool)), &profile);
        let devices: [(&str, Box<dyn Device>); 4] = [
            ("cpu", Box::new(CpuTiles::new())),
            ("cpu, three threads", Box::new(CpuTiles::on(Arc::clone(&pool)))),
            ("sim", Box::new(sim(&profile))),
            ("sim, three threads", Box::new(on_pool)),
        ];
        let products: Vec<_> = rows.iter().map(|&m| codes(m * n_in, m as u32)).collect();
        let expected: Vec<_> = products.iter().map(|rows| naive(rows, &weights)).collect();
        for (name, mut device) in devices {
            let placed = load(device.as_mut(), &weights, &profile, 0);
            prepare(device.as_mut(), &[(0, &placed)]);
            for (rows, expected) in products.iter().zip(&expected) {
                let found = multiply(device.as_mut(), &placed, rows).unwrap();
                assert_eq!(&found, expected, "{name}: {} × {n_in} × {n_out}", rows.len() / n_in);
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    let profile = profile();
    let weights = Int8Matrix { codes: vec![-127; 4096 * 32], ..matrix(4096, 32, 0) };
    let mut device = sim(&profile);
    let placed = load(&mut device, &weights, &profile, 0);
    prepare(&mut device, &[(0, &placed)]);
    assert_eq!(multiply(&mut device, &placed, &[127; 4096]).unwrap(), [-127 * 127 * 4096; 32]);
}

#[test]
fn a_run_of_many_jobs_is_exact_and_takes_few_submissions() {
    let profile = profile();
    let mut device = sim(&profile);
    let weights: Vec<_> = (0..300).map(|i| matrix(256, 32 * (1 + i % 3), i as u32)).collect();
    let placed: Vec<_> = weights.iter().map(|weights| load(&mut device, weights, &profile, 0)).collect();
    prepare(&mut device, &placed.iter().map(|matrix| (0, matrix)).collect::<Vec<_>>());
    // Some rows of their own, some shared by several jobs, and none at all.
    let rows: Vec<_> = (0..7).map(|i| codes(256 * i, 99 + i as u32)).collect();
    let mut out: Vec<_> = (0..300).map(|i| vec![7; rows[i % 7].len() / 256 * weights[i].n_out]).collect();
    let job = |(i, out): (usize, _)| Job { matrix: &placed[i], rows: view(&rows[i % 7], 256), out };
    let mut jobs: Vec<_> = out.iter_mut().map(Vec::as_mut_slice).enumerate().map(job).collect();
    device.run(&mut jobs).unwrap();
    for (i, out) in out.iter().enumerate() {
        assert_eq!(*out, naive(&rows[i % 7], &weights[i]), "job {i}");
    }
    let account = device.account();
    // 257 jobs have rows; 256 programs are the most of one submission.
    assert_eq!((account.submissions, account.programs), (2, 257));
    assert_eq!(device.port().counters().programs, 257);
}

#[test]
fn jobs_on_the_same_rows_share_one_copy_of_them() {
    let profile = profile();
    let mut device = sim(&profile);
    let weights = [matrix(512, 32, 1), matrix(512, 32, 2), matrix(512, 64, 3)];
    let placed = weights.each_ref().map(|weights| load(&mut device, weights, &profile, 0));
    prepare(&mut device, &placed.each_ref().map(|matrix| (0, matrix)));
    // Scratch holds 768 rows of activations: 704 once, not twice.
    let (rows, copy) = (codes(512 * 704, 1), codes(512 * 704, 1));
    for (other, submissions) in [(&rows, 1), (&copy, 2)] {
        let before = device.account().submissions;
        let (mut first, mut second) = (vec![0; 704 * 32], vec![0; 704 * 32]);
        let job = |i: usize, rows, out| Job { matrix: &placed[i], rows: view(rows, 512), out };
        device.run(&mut [job(0, &rows, &mut first), job(1, other, &mut second)]).unwrap();
        assert_eq!(device.account().submissions - before, submissions);
        assert_eq!(first, naive(&rows, &weights[0]));
        assert_eq!(second, naive(&rows, &weights[1]));
    }
}

#[test]
fn fewer_long_one_row_programs_than_cores_are_cut_over_the_cores() {
    struct Case {
        /// Outputs of each matrix of 2048 inputs.
        n_out: &'static [usize],
        rows: usize,
        programs: u64,
    }
    let profile = profile();
    for Case { n_out, rows, programs } in [
        Case { n_out: &[544], rows: 1, programs: 3 },
        Case { n_out: &[544, 500], rows: 1, programs: 6 },
        Case { n_out: &[544, 480], rows: 1, programs: 2 },
        Case { n_out: &[544, 500], rows: 2, programs: 2 },
        Case { n_out: &[512, 512, 512], rows: 1, programs: 3 },
        Case { n_out: &[512, 512, 512, 512], rows: 1, programs: 4 },
    ] {
        let mut device = sim(&profile);
        let weights: Vec<_> = n_out.iter().map(|n_out| matrix(2048, *n_out, *n_out as u32)).collect();
        let placed: Vec<_> = weights.iter().map(|weights| load(&mut device, weights, &profile, 0)).collect();
        prepare(&mut device, &placed.iter().map(|matrix| (0, matrix)).collect::<Vec<_>>());
        let a = codes(2048 * rows, 3);
        let mut out: Vec<_> = n_out.iter().map(|n_out| vec![7; rows * n_out]).collect();
        let job = |(matrix, out)| Job { matrix, rows: view(&a, 2048), out };
        let mut jobs: Vec<_> = placed.iter().zip(out.iter_mut().map(Vec::as_mut_slice)).map(job).collect();
        device.run(&mut jobs).unwrap();
        for (out, weights) in out.iter().zip(&weights) {
            assert_eq!(*out, naive(&a, weights), "{n_out:?}");
        }
        let account = device.account();
        assert_eq!((account.submissions, account.programs), (1, programs), "{n_out:?}");
        // The clock: one submission, further programs, and the weights once at the NPU's rate.
        let columns: usize = n_out.iter().map(|n_out| n_out.next_multiple_of(32)).sum();
        let streaming = 2048.0 * columns as f64 / profile.rates.npu_bytes_per_s.value * 1e6;
        let micros = 60.0 + 7.0 * (programs - 1) as f64 + streaming;
        assert!((account.modelled_us - micros).abs() < 1e-6, "{n_out:?}: {} {micros}", account.modelled_us);
        assert_eq!(account.modelled_create_us, (n_out.len() + 4) as f64 * 170.0);
    }
}

#[test]
fn many_rows_cost_arithmetic_and_few_cost_streaming() {
    let profile = profile();
    let weights = matrix(512, 512, 1);
    let micros = |m: usize| {
        let mut device = sim(&profile);
        let placed = load(&mut device, &weights, &profile, 0);
        prepare(&mut device, &[(0, &placed)]);
        multiply(&mut device, &placed, &codes(512 * m, 1)).unwrap();
        device.account().modelled_us - 60.0
    };
    let bytes = 512.0 * 512.0;
    assert!((micros(2) - bytes / 24e9 * 1e6).abs() < 1e-6, "two rows");
    assert!((micros(704) - 704.0 * bytes / 600e9 * 1e6).abs() < 1e-6, "704 rows");
}

#[test]
fn jobs_that_are_not_possible_are_refused() {
    let profile = profile();
    let weights = matrix(512, 64, 1);
    let (mut cpu, mut npu) = (CpuTiles::new(), sim(&profile));
    let devices: [&mut dyn Device; 2] = [&mut cpu, &mut npu];
    for device in devices {
        let placed = load(device, &weights, &profile, 0);
        let rows = codes(512, 1);
        prepare(device, &[(0, &placed)]);
        let run = |device: &mut dyn Device, matrix: &DeviceMatrix, columns: usize, out: usize| {
            let rows = view(&rows[..columns], columns);
            device.run(&mut [Job { matrix, rows, out: &mut vec![0; out] }]).unwrap_err()
        };
        let with = |edit: fn(&mut DeviceMatrix)| {
            let mut matrix = placed.clone();
            edit(&mut matrix);
            matrix
        };
        let job = run(device, &placed, 256, 64);
        assert!(matches!(job, DeviceError::Job { columns: 256, n_in: 512, .. }), "{job}");
        let job = run(device, &placed, 512, 63);
        assert!(matches!(job, DeviceError::Job { out: 63, n_out: 64, .. }), "{job}");
        let edits: [fn(&mut DeviceMatrix); 5] = [
            |matrix| matrix.parts.clear(),
            |matrix| matrix.parts.extend(matrix.parts.clone()),
            |matrix| matrix.parts[0].part.n_len = 63,
            |matrix| matrix.parts[0].part.k0 = 1,
            |matrix| matrix.parts[0].part.k_len = 513,
        ];
        for edit in edits {
            let error = run(device, &with(edit), 512, 64);
            assert!(matches!(error, DeviceError::Parts { .. }), "{error}");
        }
        let error = run(device, &with(|matrix| matrix.parts[0].offset = 4096), 512, 64);
        assert!(matches!(error, DeviceError::Place { offset: 4096, bytes: 32_768, .. }), "{error}");
        let error = run(device, &with(|matrix| matrix.parts[0].chunk = ChunkId(9)), 512, 64);
        assert!(matches!(error, DeviceError::NoChunk(9)), "{error}");
        assert!(matches!(device.destroy_chunk(ChunkId(9)), Err(DeviceError::NoChunk(9))));
        assert_eq!(device.account().submissions, 0, "nothing was asked of the device");
    }
    assert!(matches!(npu.create_chunk(4096, 8), Err(DeviceError::NoDomain { domain: 8, domains: 8 })));
    let illegal = SubMatrix { k0: 0, k_len: 768, k_padded: 768, n0: 0, n_len: 64, n_padded: 64 };
    assert!(matches!(npu.prepare(&[(0, illegal)]), Err(DeviceError::Shape { k: 768, n: 64 })));
    let unaligned = DeviceMatrix {
        parts: vec![PlacedPart {
            part: SubMatrix { k_len: 256, k_padded: 256, ..illegal },
            chunk: ChunkId(0),
            offset: 1024,
        }],
        n_in: 256,
        n_out: 64,
    };
    let error = multiply(&mut npu, &unaligned, &codes(256, 1)).unwrap_err();
    assert!(matches!(error, DeviceError::Place { offset: 1024, .. }), "{error}");
}

#[test]
fn parts_of_one_matrix_share_a_domain_and_need_its_scratch() {
    let profile = profile();
    let weights = matrix(4608, 64, 1);
    let mut device = sim(&profile);
    let (first, second) =
        (load(&mut device, &weights, &profile, 0), load(&mut device, &weights, &profile, 1));
    let torn = DeviceMatrix { parts: vec![first.parts[0], second.parts[1]], ..first.clone() };
    let rows = codes(4608, 1);
    let error = multiply(&mut device, &torn, &rows).unwrap_err();
    assert!(matches!(error, DeviceError::Parts { .. }), "{error}");
    prepare(&mut device, &[(0, &first)]);
    let error = multiply(&mut device, &second, &rows).unwrap_err();
    assert!(matches!(error, DeviceError::Scratch { domain: 1, found: 0, .. }), "{error}");
    assert_eq!(multiply(&mut device, &first, &rows).unwrap(), naive(&rows, &weights));
}

#[test]
fn a_run_over_two_domains_switches_between_them_once() {
    let profile = profile();
    let weights = [matrix(512, 64, 1), matrix(256, 32, 2)];
    let mut device = sim(&profile);
    let placed = [0, 1].map(|i| load(&mut device, &weights[i], &profile, i as u32));
    prepare(&mut device, &[(0, &placed[0]), (1, &placed[1])]);
    let (a, b) = (codes(512, 1), codes(256, 2));
    let before = device.account().switches;
    let (mut out_a, mut out_b, mut out_c) = ([0; 64], [0; 32], [0; 64]);
    device
        .run(&mut [
            Job { matrix: &placed[0], rows: view(&a, 512), out: &mut out_a },
            Job { matrix: &placed[1], rows: view(&b, 256), out: &mut out_b },
            Job { matrix: &placed[0], rows: view(&a, 512), out: &mut out_c },
        ])
        .unwrap();
    assert_eq!(out_a[..], naive(&a, &weights[0]));
    assert_eq!(out_b[..], naive(&b, &weights[1]));
    assert_eq!(out_c, out_a);
    // To domain 0 and back: the scratch of domain 1 was mapped last.
    assert_eq!((device.account().switches - before, device.account().submissions), (2, 2));
}

#[test]
fn the_account_is_what_the_plan_would_count() {
    let profile = profile();
    let mut device = sim(&profile);
    let shapes = [(2048, 1792, 0), (1792, 2048, 0), (4096, 4128, 3)];
    let placed: Vec<_> = shapes
        .iter()
        .map(|&(k, n, domain)| (domain, load(&mut device, &matrix(k, n, 1), &profile, domain)))
        .collect();
    prepare(&mut device, &placed.iter().map(|(domain, matrix)| (*domain, matrix)).collect::<Vec<_>>());
    let scratch = |domain| {
        let parts = placed.iter().filter(|(of, _)| *of == domain).flat_map(|(_, matrix)| &matrix.parts);
        Scratch::for_parts(parts.map(|placed| &placed.part), &profile).total()
    };
    let domains = vec![
        DomainAccount {
            domain: 0,
            weight_bytes: 2048 * 1792 + 2048 * 2048,
            scratch_bytes: scratch(0),
            mappings: 6,
        },
        DomainAccount { domain: 3, weight_bytes: 4096 * 4128, scratch_bytes: scratch(3), mappings: 5 },
    ];
    for held in &domains {
        let mapped = (held.weight_bytes + held.scratch_bytes, held.mappings as usize);
        assert_eq!(device.port().mapped(held.domain), mapped, "domain {}", held.domain);
    }
    let account = device.account();
    let weight_bytes: u64 = domains.iter().map(|held| held.weight_bytes).sum();
    assert_eq!(account.weight_bytes, weight_bytes);
    assert_eq!(account.scratch_bytes, scratch(0) + scratch(3));
    assert_eq!((account.chunks, account.faults), (3, 0));
    assert_eq!(account.domains, domains);

    // Other parts, other scratch; and chunks that are no whole pages are counted as such.
    prepare(&mut device, &[(3, &placed[2].1)]);
    let odd = device.create_chunk(4097, 1).unwrap();
    let account = device.account();
    assert_eq!((account.weight_bytes, account.scratch_bytes), (weight_bytes + 8192, scratch(3)));
    device.destroy_chunk(odd).unwrap();
    assert_eq!(device.account().weight_bytes, weight_bytes);
}

#[test]
fn addresses_run_out_cleanly_and_come_back() {
    let mut profile = profile();
    // 64 pages, and a ceiling that does not speak first.
    profile.memory.domain_bytes.value = 64 * 4096;
    let mut device = sim(&profile);
    let chunks: Vec<_> = (0..6).map(|_| device.create_chunk(10 * 4096, 0).unwrap()).collect();
    let full = device.create_chunk(5 * 4096, 0).unwrap_err();
    let no_iova =
        |error: &DeviceError| matches!(error, DeviceError::Port(PortError::NoIova { domain: 0, .. }));
    assert!(no_iova(&full), "{full}");
    assert_eq!(device.port().mapped(0), (60 * 4096, 6), "a failure leaves nothing behind");
    device.create_chunk(60 * 4096, 1).unwrap();
    device.create_chunk(4 * 4096, 0).unwrap();

    // Scratch that finds no room is not left half mapped.
    let part = SubMatrix { k0: 0, k_len: 256, k_padded: 256, n0: 0, n_len: 32, n_padded: 32 };
    device.destroy_chunk(chunks[2]).unwrap();
    assert!(no_iova(&device.prepare(&[(0, part)]).unwrap_err()));
    assert_eq!((device.port().mapped(0), device.account().scratch_bytes), ((54 * 4096, 6), 0));

    // A hole is found again, and a fragmented domain refuses what would fit in sum.
    device.create_chunk(10 * 4096, 0).unwrap();
    device.destroy_chunk(chunks[0]).unwrap();
    device.destroy_chunk(chunks[4]).unwrap();
    assert!(no_iova(&device.create_chunk(20 * 4096, 0).unwrap_err()));
    device.destroy_chunk(chunks[3]).unwrap();
    device.create_chunk(20 * 4096, 0).unwrap();
    assert_eq!(device.account().faults, 3);
}

#[test]
fn what_a_domain_does_not_bear_never_reaches_the_driver() {
    let mut profile = profile();
    profile.memory.domain_ceiling_bytes.value = 40 * 4096;
    profile.memory.mappings_per_domain.value = 3;
    let mut device = sim(&profile);
    device.create_chunk(30 * 4096, 0).unwrap();
    let asked = device.port().counters().creates;
    let error = device.create_chunk(10 * 4096 + 1, 0).unwrap_err();
    assert!(matches!(error, DeviceError::Full { domain: 0, mapped: 122_880, mappings: 1, .. }), "{error}");
    device.create_chunk(4096, 0).unwrap();
    device.create_chunk(4096, 0).unwrap();
    let error = device.create_chunk(4096, 0).unwrap_err();
    assert!(matches!(error, DeviceError::Full { mappings: 3, most: 3, .. }), "{error}");
    assert_eq!(device.port().counters().creates, asked + 2);
    profile.memory.ram_bytes.value = 1 << 20;
    let mut device = sim(&profile);
    device.create_chunk(100 << 10, 0).unwrap();
    let error = (1..20).find_map(|domain| device.create_chunk(156 << 10, domain % 8).err()).unwrap();
    assert!(matches!(error, DeviceError::Port(PortError::NoMemory { .. })), "{error}");
}

#[test]
fn a_thousand_openings_leak_nothing() {
    let profile = profile();
    let mut device = sim(&profile);
    let weights = matrix(256, 32, 1);
    let rows = codes(256, 2);
    let expected = naive(&rows, &weights);
    for _ in 0..1000 {
        let placed = load(&mut device, &weights, &profile, 2);
        prepare(&mut device, &[(2, &placed)]);
        assert_eq!(multiply(&mut device, &placed, &rows).unwrap(), expected);
        device.prepare(&[]).unwrap();
        device.destroy_chunk(placed.parts[0].chunk).unwrap();
    }
    let account = device.account();
    assert_eq!((account.weight_bytes, account.scratch_bytes, account.chunks), (0, 0, 0));
    assert_eq!((account.domains, account.submissions), (vec![], 1000));
    assert_eq!(device.port().mapped(2), (0, 0));
    assert_eq!(device.port_mut().create(1, 2).unwrap().iova, 0xffff_f000, "the top is free again");
}

/// A small matrix on a software NPU, ready to run.
fn ready() -> (Npu<Sim>, DeviceMatrix, Vec<i8>, Vec<i32>) {
    let profile = profile();
    let mut device = sim(&profile);
    let weights = matrix(512, 96, 1);
    let placed = load(&mut device, &weights, &profile, 0);
    prepare(&mut device, &[(0, &placed)]);
    let rows = codes(512 * 3, 2);
    let expected = naive(&rows, &weights);
    (device, placed, rows, expected)
}

#[test]
fn each_fault_is_its_own_error() {
    struct Case {
        fault: Fault,
        error: fn(&DeviceError) -> bool,
        /// Repeated, and healthy again without healing.
        retries: u64,
        once: bool,
    }
    use DeviceError::{Port, Stale};
    for Case { fault, error, retries, once } in [
        Case {
            fault: Fault::NeverRuns(1),
            error: |error| matches!(error, Port(PortError::NeverRan { ticket: 2 })),
            retries: 1,
            once: false,
        },
        Case {
            fault: Fault::StaleOutput(1),
            error: |error| matches!(error, Stale { domain: 0, program: 0, programs: 1 }),
            retries: 1,
            once: false,
        },
        Case {
            fault: Fault::TimeOut(1),
            error: |error| matches!(error, Port(PortError::TimedOut { ticket: 1 })),
            retries: 0,
            once: true,
        },
    ] {
        let (mut device, placed, rows, expected) = ready();
        device.port_mut().inject(fault);
        let failed = multiply(&mut device, &placed, &rows).unwrap_err();
        assert!(error(&failed), "{fault:?}: {failed}");
        assert_eq!((device.account().retries, device.account().faults), (retries, 1), "{fault:?}");
        if !once {
            device.port_mut().heal();
        }
        assert_eq!(
            multiply(&mut device, &placed, &rows).unwrap(),
            expected,
            "{fault:?}: the device is reset"
        );
    }
}

#[test]
fn faults_begin_when_they_are_told_to() {
    let (mut device, placed, rows, expected) = ready();
    device.port_mut().inject(Fault::NeverRuns(3));
    for run in 1..=2 {
        assert_eq!(multiply(&mut device, &placed, &rows).unwrap(), expected, "run {run}");
    }
    assert!(multiply(&mut device, &placed, &rows).is_err());
    device.port_mut().heal();
    device.port_mut().inject(Fault::NoIovaAtCreate(2));
    device.create_chunk(4096, 0).unwrap();
    let error = device.create_chunk(4096, 0).unwrap_err();
    assert!(matches!(error, DeviceError::Port(PortError::NoIova { .. })), "{error}");
    device.create_chunk(4096, 0).unwrap();
}

#[test]
fn a_missed_submission_is_repeated_once_and_k_slices_are_not_added_twice() {
    let profile = profile();
    let mut device = sim(&profile);
    let weights = matrix(9000, 64, 1);
    let placed = load(&mut device, &weights, &profile, 0);
    prepare(&mut device, &[(0, &placed)]);
    let rows = codes(9000 * 2, 2);
    let expected = naive(&rows, &weights);
    device.port_mut().inject(Fault::Misses(1));
    assert_eq!(multiply(&mut device, &placed, &rows).unwrap(), expected);
    let Account { retries, submissions, faults, .. } = device.account();
    assert_eq!((retries, submissions, faults, device.port().counters().resets), (1, 2, 0, 1));
}

#[test]
fn a_wrong_tile_order_gives_wrong_sums() {
    let (mut device, placed, rows, expected) = ready();
    device.port_mut().inject(Fault::WrongTileOrder);
    assert_ne!(multiply(&mut device, &placed, &rows).unwrap(), expected);
}

#[test]
fn a_domain_that_cannot_be_had_is_busy() {
    let (mut device, placed, rows, expected) = ready();
    device.port_mut().inject(Fault::DomainBusy);
    let error = device.create_chunk(4096, 1).unwrap_err();
    assert!(matches!(error, DeviceError::Port(PortError::Busy { domain: 1, active: 0 })), "{error}");
    assert_eq!(multiply(&mut device, &placed, &rows).unwrap(), expected, "the active one still runs");
}

#[test]
fn weights_that_cannot_be_read_leave_a_chunk_that_can_be_filled_again() {
    let profile = profile();
    let (mut cpu, mut npu) = (CpuTiles::new(), sim(&profile));
    let devices: [&mut dyn Device; 2] = [&mut cpu, &mut npu];
    for device in devices {
        let chunk = device.create_chunk(8192, 0).unwrap();
        let broken = || std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "short");
        let error = device.fill_chunk(chunk, &mut |_| Err(broken())).unwrap_err();
        assert!(matches!(&error, DeviceError::Fill(error) if error.to_string() == "short"), "{error}");
        let fill = &mut |bytes: &mut [u8]| {
            assert_eq!(bytes.len(), 8192);
            bytes.fill(1);
            Ok(())
        };
        device.fill_chunk(chunk, fill).unwrap();
    }
}

#[test]
fn the_cpu_multiplies_in_place_from_a_file() {
    let profile = profile();
    let weights = matrix(300, 70, 4);
    let part = cut(300, 70, &profile).unwrap()[0];
    let mut bytes = vec![9; 4096 + part.bytes() as usize];
    tile(&weights, &part, &mut bytes[4096..]).unwrap();
    let rows = codes(300 * 5, 1);
    let mut out = vec![0; 70 * 5];
    multiply_tiles(&bytes[4096..], &part, view(&rows, 300), &mut out).unwrap();
    assert_eq!(out, naive(&rows, &weights));
    assert!(multiply_tiles(&bytes[4095..], &part, view(&rows, 300), &mut out).is_err());
    assert!(multiply_tiles(&bytes[4096..], &part, view(&rows[..299], 299), &mut out[..70]).is_err());

    let len = bytes.len();
    let file = Arc::new(FileBytes::from_vec("pack", bytes));
    let mut device = CpuTiles::new();
    assert_eq!(device.adopt_chunk(file.clone(), 0..len + 1, 0), None);
    let chunk = device.adopt_chunk(file, 4096..len, 0).unwrap();
    let parts = vec![PlacedPart { part, chunk, offset: 0 }];
    let matrix = DeviceMatrix { n_in: 300, n_out: 70, parts };
    assert_eq!(multiply(&mut device, &matrix, &rows).unwrap(), out);
    assert!(matches!(device.fill_chunk(chunk, &mut |_| Ok(())), Err(DeviceError::Fill(_))));
}

// Register programs.

/// The last value that a program writes to a register.
fn register(words: &[u64; WORDS], register: u64) -> u64 {
    let word = words.iter().rfind(|word| **word & 0xffff == register).unwrap();
    word >> 16 & 0xffff_ffff
}

fn product(m: u32, k: u32, n: u32) -> Product {
    Product { m, k, n, a: 0xffff_0000, weights: 0xfffe_0000, c: 0xfffd_0000 }
}

#[test]
fn the_program_of_a_known_product_is_this_one() {
    let words = product(4, 32, 32).encode(None).unwrap();
    // Every value that is not zero, in the order of the writes.
    let expected: &[(u64, u64, u64)] = &[
        (0x0201, 0x1040, 0xb1),
        (0x0201, 0x100c, 0x2000_0000),
        (0x1001, 0x4004, 0xe),
        (0x0201, 0x100c, 0x2000_0000),
        (0x0201, 0x1010, 0x50),
        (0x0201, 0x1014, 9),
        (0x0201, 0x1020, 0x1_0004),
        (0x0201, 0x1024, 0x1f_0020),
        (0x0201, 0x1028, 1),
        (0x0201, 0x102c, 4),
        (0x0201, 0x1030, 0x400),
        (0x0201, 0x1034, 0x20),
        (0x0201, 0x1038, 0x0101_0020),
        (0x0201, 0x1040, 0xb1),
        (0x0201, 0x1044, 1),
        (0x0201, 0x104c, 0xb),
        (0x0201, 0x1050, 0x1_0000),
        (0x0201, 0x1054, 0x1_0000),
        (0x0201, 0x1058, 0x1_0000),
        (0x0201, 0x105c, 0x1_0000),
        (0x0201, 0x1070, 0xffff_0000),
        (0x0201, 0x1078, 0x000f_000f),
        (0x0201, 0x107c, 2),
        (0x0201, 0x1084, 0x1_0004),
        (0x0201, 0x1088, 0x20),
        (0x0201, 0x1110, 0xfffe_0000),
        (0x0801, 0x3010, 1),
        (0x0801, 0x3014, 0x3_0000),
        (0x0801, 0x3018, 0x1f),
        (0x1001, 0x400c, 0x1e4),
        (0x1001, 0x4010, 0x8000_0000),
        (0x1001, 0x4020, 0xfffd_0000),
        (0x1001, 0x4024, 0x10),
        (0x1001, 0x4034, 3),
        (0x1001, 0x4038, 0x7_0007),
        (0x1001, 0x403c, 0x1f_001f),
        (0x1001, 0x4040, 0x53),
        (0x1001, 0x4050, 0x7fc),
        (0x1001, 0x4058, 0x1f),
        (0x1001, 0x405c, 0x3_0000),
        (0x1001, 0x4060, 0x53),
        (0x1001, 0x4070, 0x383),
        (0x1001, 0x4078, 1),
        (0x1001, 0x4084, 1),
        (0x1001, 0x40c0, 0x80),
    ];
    let writes = &words[..108];
    let fields = |word: &u64| (word >> 48, word & 0xffff, word >> 16 & 0xffff_ffff);
    let found: Vec<_> = writes.iter().map(fields).filter(|(_, _, value)| *value != 0).collect();
    assert_eq!(found, expected);
    assert_eq!(words[108..], [0, 0x0101_0000_0000_0014, 0x0041_0000_0000_0000, 0x0081_0000_000d_0008]);
    let linked = product(4, 32, 32).encode(Some(0x1234_5678)).unwrap();
    assert_eq!(linked[108..110], [0x0101_1234_5678_0010, 0x0101_0000_0037_0014]);
    assert_eq!((&linked[..108], &linked[110..]), (&words[..108], &words[110..]));
}

#[test]
fn banks_are_those_that_ran_on_boards() {
    // Rows of the full-K schedule in groups of 64, and what register 0x1040 holds for each group.
    for (k, groups) in [
        (512, &[0xb1, 0xa2, 0x93, 0x84, 0x75, 0x66, 0x57, 0x48, 0x39, 0x2a, 0x1b][..]),
        (1024, &[0xa2, 0x84, 0x66, 0x48, 0x2a]),
        (1536, &[0x93, 0x66, 0x39]),
        (2048, &[0x84, 0x48]),
        (2560, &[0x75]),
        (3072, &[0x66]),
        (3584, &[0x57]),
        (4096, &[0x48]),
    ] {
        for (group, banks) in (0..).zip(groups) {
            for m in [64 * group + 1, 64 * group + 64] {
                let words = product(m, k, 2048).encode(None).unwrap();
                assert_eq!(register(&words, 0x1040), *banks, "{m} rows of {k}");
                assert_eq!(words[0], words[15], "both writes of it");
            }
        }
        assert_eq!(product(64 * groups.len() as u32 + 1, k, 2048).encode(None), None, "{k}");
    }
    for m in [1, 64, 128] {
        assert_eq!(register(&product(m, 256, 32).encode(None).unwrap(), 0x1040), 0xb1);
    }
    // By the bank rule alone, for profiles that allow such lengths.
    for (m, k, banks) in
        [(1, 1792, 0xb1), (18, 1792, 0xb1), (19, 1792, 0xa2), (42, 768, 0xb1), (43, 768, 0xa2)]
    {
        assert_eq!(register(&product(m, k, 64).encode(None).unwrap(), 0x1040), banks, "{m} rows of {k}");
    }
    for (m, k, n) in [(0, 512, 32), (1, 500, 32), (1, 512, 40), (1, 512, 8224), (1, 11_296, 32), (1, 0, 32)] {
        assert_eq!(product(m, k, n).encode(None), None, "{m} × {k} × {n}");
    }
}

/// The software NPU with room for hand-built programs of one shape.
struct Bench {
    sim: Sim,
    programs: Buffer,
    tasks: Buffer,
    a: Buffer,
    weights: Buffer,
    c: Buffer,
    product: Product,
    rows: Vec<i8>,
    matrix: Int8Matrix,
}

impl Bench {
    /// `m_room` rows of activations and results are there, whatever `product` says.
    fn new(m: u32, k: u32, n: u32, m_room: u32) -> Bench {
        let mut sim = Sim::new(&profile());
        let bytes = [4096, 4096, m_room * k, k * n, 4 * m_room * n].map(u64::from);
        let [programs, tasks, a, weights, c] = bytes.map(|bytes| sim.create(bytes, 0).unwrap());
        let matrix = matrix(k as usize, n as usize, 3);
        let rows = codes((m_room * k) as usize, 4);
        let mut tiles = vec![0; (k * n) as usize];
        let part = SubMatrix { k0: 0, k_len: k, k_padded: k, n0: 0, n_len: n, n_padded: n };
        tile(&matrix, &part, &mut tiles).unwrap();
        let product = Product { m, k, n, a: a.iova, weights: weights.iova, c: c.iova };
        let mut bench = Bench { sim, programs, tasks, a, weights, c, product, rows, matrix };
        bench.put(a, &bench.rows.iter().map(|code| *code as u8).collect::<Vec<_>>());
        bench.put(weights, &tiles);
        bench
    }

    fn fill(&mut self, buffer: Buffer, content: &[u8]) {
        let write = &mut |bytes: &mut [u8]| {
            bytes.copy_from_slice(content);
            Ok(())
        };
        self.sim.fill(buffer.id, 0..content.len() as u64, write).unwrap();
    }

    fn put(&mut self, buffer: Buffer, content: &[u8]) {
        self.fill(buffer, content);
        self.sim.sync(buffer.id, 0..content.len() as u64, Direction::ToDevice).unwrap();
    }

    /// Runs a chain of programs on core 0 and returns all of C, which is zero before.
    fn run(&mut self, chain: &[[u64; WORDS]]) -> Result<Vec<i32>, PortError> {
        self.run_with(chain, &[CoreTasks { core: 0, first: 0, count: chain.len() as u32 }])
    }

    fn run_with(&mut self, chain: &[[u64; WORDS]], cores: &[CoreTasks]) -> Result<Vec<i32>, PortError> {
        self.put(self.c, &vec![0; self.c.bytes as usize]);
        let words: Vec<u8> = chain.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        self.put(self.programs, &words);
        let tasks: Vec<_> = (0..chain.len() as u32).map(|i| Task::new(self.address(i))).collect();
        self.put(self.tasks, bytemuck::cast_slice(&tasks));
        let ticket = self.sim.submit(&Submission {
            domain: 0,
            tasks: self.tasks.id,
            cores,
            inputs: &[self.programs.id, self.a.id, self.weights.id],
            outputs: &[self.c.id],
        })?;
        self.sim.wait(ticket, Duration::ZERO)?;
        self.sim.sync(self.c.id, 0..self.c.bytes, Direction::FromDevice)?;
        self.results()
    }

    fn results(&mut self) -> Result<Vec<i32>, PortError> {
        let mut out = Vec::new();
        self.sim.read(self.c.id, 0..self.c.bytes, &mut |bytes| {
            out = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        })?;
        Ok(out)
    }

    fn address(&self, program: u32) -> u32 {
        self.programs.iova + 896 * program
    }

    fn program(&self) -> [u64; WORDS] {
        self.product.encode(None).unwrap()
    }
}

#[test]
fn a_program_that_is_tampered_with_fails_or_computes_something_else() {
    let mut bench = Bench::new(3, 512, 64, 5);
    let first = bench.product.encode(Some(bench.address(1))).unwrap();
    let second = Product { c: bench.c.iova + 3 * 64 * 4, m: 2, ..bench.product }.encode(None).unwrap();
    let right = bench.run(&[first, second]).unwrap();
    let expected = naive(&bench.rows[..512 * 3], &bench.matrix);
    assert_eq!(right[..192], expected);
    assert_eq!(right[192..], expected[..128]);
    let mut refused = 0;
    for word in 0..WORDS {
        // A bit of each field, and several of the value.
        for bit in [2, 16, 17, 20, 21, 28, 31, 32, 33, 40, 47, 50] {
            let mut words = first;
            words[word] ^= 1 << bit;
            match bench.run(&[words, second]) {
                Err(PortError::Program { .. }) => refused += 1,
                Err(error) => panic!("word {word}, bit {bit}: {error}"),
                Ok(found) => assert_ne!(found, right, "word {word}, bit {bit}"),
            }
        }
    }
    // Only addresses can lead elsewhere without being refused.
    assert!(refused > (WORDS - 4) * 12, "{refused}");
    assert_eq!(bench.run(&[first, second]).unwrap(), right, "nothing is left of it");
}

#[test]
fn one_row_above_the_cap_reads_the_first_row_again() {
    for legal in profile().shapes.legal_k {
        let (m, k) = (legal.max_rows, legal.k);
        let mut bench = Bench::new(m, k, 32, m + 1);
        let words = bench.program();
        let at_cap = bench.run(&[words]).unwrap();
        let expected = naive(&bench.rows, &bench.matrix);
        let cap = m as usize * 32;
        assert_eq!(at_cap[..cap], expected[..cap], "K = {k}, {m} rows");
        assert_eq!(at_cap[cap..], [0; 32]);

        // The same program with one row more, its banks as they were.
        let mut above = words;
        for word in &mut above[..108] {
            let reach = 1 << (65_536 / k).ilog2();
            let value = match *word & 0xffff {
                0x1010 => 16 * (m + 2).min(reach),
                0x1020 | 0x1084 => 0x1_0000 | (m + 1),
                0x102c => m + 1,
                0x3014 | 0x405c => m << 16,
                0x4034 => m,
                _ => continue,
            };
            *word = *word & 0xffff_0000_0000_ffff | u64::from(value) << 16;
        }
        let found = bench.run(&[above]).unwrap();
        assert_eq!(found[..cap], expected[..cap], "K = {k}");
        assert_eq!(found[cap..], expected[..32], "K = {k}: row {m} is row 0 again");
        assert_ne!(found[cap..], expected[cap..]);
    }
}

#[test]
fn one_bank_of_data_wraps_as_it_did_on_silicon() {
    // 32 rows of 2048 with the banks of one: row 16 and on are the first rows again.
    let mut bench = Bench::new(32, 2048, 32, 32);
    let mut words = bench.program();
    for at in [0, 15] {
        words[at] = 0x0201_0000_00b1_1040;
    }
    let found = bench.run(&[words]).unwrap();
    let expected = naive(&bench.rows, &bench.matrix);
    assert_eq!(found[..512], expected[..512]);
    assert_eq!(found[512..], expected[..512]);
}

#[test]
fn chains_end_where_their_tasks_do() {
    let mut bench = Bench::new(1, 256, 32, 1);
    let last = bench.program();
    let linked = bench.product.encode(Some(bench.address(1))).unwrap();
    let elsewhere = bench.product.encode(Some(bench.address(0))).unwrap();
    for (chain, program) in
        [(vec![last, last], 0), (vec![linked, linked], 1), (vec![elsewhere, last], 1), (vec![linked], 0)]
    {
        let error = bench.run(&chain).unwrap_err();
        assert!(matches!(&error, PortError::Program { program: at, .. } if *at == program), "{error}");
    }
    // Two cores, a program each: nobody links.
    let cores = [0, 1].map(|core| CoreTasks { core: 2 * core, first: core, count: 1 });
    bench.run_with(&[last, last], &cores).unwrap();
}

#[test]
fn submissions_that_a_driver_refuses_are_refused() {
    let mut bench = Bench::new(1, 256, 32, 1);
    let program = [bench.program()];
    let one = CoreTasks { core: 0, first: 0, count: 1 };
    for cores in [
        &[][..],
        &[CoreTasks { core: 3, ..one }],
        &[CoreTasks { count: 0, ..one }],
        &[CoreTasks { count: 4096, ..one }],
        &[one, one],
    ] {
        let error = bench.run_with(&program, cores).unwrap_err();
        assert!(matches!(error, PortError::Refused(_)), "{cores:?}: {error}");
    }
    let past_the_end = [CoreTasks { first: 5000, ..one }];
    let error = bench.run_with(&program, &past_the_end).unwrap_err();
    assert!(matches!(error, PortError::Program { .. }), "{error}");
    let unlisted = Submission {
        domain: 0,
        tasks: bench.tasks.id,
        cores: &[one],
        inputs: &[bench.programs.id, bench.a.id],
        outputs: &[bench.c.id],
    };
    let ticket = bench.sim.submit(&unlisted).unwrap();
    let error = bench.sim.wait(ticket, Duration::ZERO).unwrap_err();
    assert!(matches!(&error, PortError::Program { reason, .. } if reason.contains("not listed")), "{error}");
    let elsewhere = bench.sim.create(4096, 1).unwrap();
    let error = bench.sim.submit(&Submission { outputs: &[elsewhere.id], ..unlisted }).unwrap_err();
    assert!(matches!(error, PortError::Refused(_)), "{error}");
}

#[test]
fn each_side_sees_what_the_other_wrote_only_after_a_sync() {
    let mut bench = Bench::new(1, 256, 32, 1);
    let program = bench.program();
    let right = bench.run(&[program]).unwrap();

    // Results stay where the device wrote them.
    bench.put(bench.c, &vec![1; bench.c.bytes as usize]);
    let submission = Submission {
        domain: 0,
        tasks: bench.tasks.id,
        cores: &[CoreTasks { core: 0, first: 0, count: 1 }],
        inputs: &[bench.programs.id, bench.a.id, bench.weights.id],
        outputs: &[bench.c.id],
    };
    let ticket = bench.sim.submit(&submission).unwrap();
    bench.sim.wait(ticket, Duration::ZERO).unwrap();
    assert_eq!(bench.results().unwrap(), [0x0101_0101; 32], "not yet");
    bench.sim.sync(bench.c.id, 0..64, Direction::FromDevice).unwrap();
    let half = bench.results().unwrap();
    assert_eq!((&half[..16], &half[16..]), (&right[..16], &[0x0101_0101; 16][..]), "as far as it was synced");

    // Activations that were not shown to the device are not computed with.
    bench.fill(bench.a, &[1; 256]);
    let ticket = bench.sim.submit(&submission).unwrap();
    let error = bench.sim.wait(ticket, Duration::ZERO).unwrap_err();
    assert!(
        matches!(&error, PortError::Program { reason, .. } if reason.contains("never synced")),
        "{error}"
    );
    bench.sim.sync(bench.a.id, 0..255, Direction::ToDevice).unwrap();
    let ticket = bench.sim.submit(&submission).unwrap();
    assert!(bench.sim.wait(ticket, Duration::ZERO).is_err(), "one byte is missing");
    bench.sim.sync(bench.a.id, 255..256, Direction::ToDevice).unwrap();
    let ticket = bench.sim.submit(&submission).unwrap();
    bench.sim.wait(ticket, Duration::ZERO).unwrap();
}

#[test]
fn nothing_is_touched_elsewhere_while_a_job_runs() {
    let mut bench = Bench::new(1, 256, 32, 1);
    let program = bench.program();
    bench.run(&[program]).unwrap();
    let other = bench.sim.create(4096, 1).unwrap();
    let same = bench.sim.create(4096, 0).unwrap();
    let submission = Submission {
        domain: 0,
        tasks: bench.tasks.id,
        cores: &[CoreTasks { core: 1, first: 0, count: 1 }],
        inputs: &[bench.programs.id, bench.a.id, bench.weights.id],
        outputs: &[bench.c.id],
    };
    let ticket = bench.sim.submit(&submission).unwrap();
    let busy = |result: Result<(), PortError>| {
        assert!(matches!(result, Err(PortError::Busy { active: 0, .. })), "{result:?}");
    };
    busy(bench.sim.create(4096, 1).map(drop));
    busy(bench.sim.fill(other.id, 0..4096, &mut |_| Ok(())));
    busy(bench.sim.sync(other.id, 0..4096, Direction::ToDevice));
    busy(bench.sim.destroy(other.id));
    for used in [bench.programs, bench.tasks, bench.a, bench.weights, bench.c] {
        busy(bench.sim.fill(used.id, 0..1, &mut |_| Ok(())));
        busy(bench.sim.destroy(used.id));
    }
    bench.sim.fill(same.id, 0..4096, &mut |_| Ok(())).unwrap();
    bench.sim.sync(same.id, 0..4096, Direction::ToDevice).unwrap();
    bench.sim.wait(ticket, Duration::ZERO).unwrap();
    bench.sim.sync(other.id, 0..4096, Direction::ToDevice).unwrap();
    bench.sim.destroy(other.id).unwrap();
    let error = bench.sim.destroy(other.id).unwrap_err();
    assert!(matches!(error, PortError::NoBuffer(_)), "{error}");
    let error = bench.sim.read(same.id, 4000..4097, &mut |_| ()).unwrap_err();
    assert!(matches!(error, PortError::OutOfBuffer { end: 4097, bytes: 4096, .. }), "{error}");
}

#[test]
fn addresses_come_top_down_in_whole_pages() {
    let mut sim = Sim::new(&profile());
    let iova = |sim: &mut Sim, bytes, domain| sim.create(bytes, domain).unwrap().iova;
    assert_eq!(iova(&mut sim, 4096, 0), 0xffff_f000);
    assert_eq!(iova(&mut sim, 4097, 0), 0xffff_d000, "two pages, not aligned to their size");
    assert_eq!(iova(&mut sim, 1, 0), 0xffff_c000);
    assert_eq!(iova(&mut sim, 1, 5), 0xffff_f000, "every domain has addresses of its own");
    assert!(matches!(sim.create(0, 0), Err(PortError::Refused(_))));
    assert!(matches!(sim.create(1, 8), Err(PortError::Refused(_))));
    assert!(matches!(sim.create(u64::MAX, 0), Err(PortError::Refused(_))));
}
