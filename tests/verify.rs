//! The check of a pack: every byte is covered, every fault is named, and one fault does not hide the next.

use std::sync::atomic::{AtomicU64, Ordering};

use orkpack::pack::verify::{Finding, Mode, Report, verify};
use orkpack::pack::{Index, Kind, Pack, PackError};
use rayon::prelude::*;

use super::support::packs::{PAGE, Sample, edit_sections, index_bytes, index_of, region};

fn check(bytes: Vec<u8>, mode: Mode) -> Report {
    verify(&Pack::from_bytes("sample.orkpack", bytes).unwrap(), mode, &|_| {})
}

fn lines(report: &Report) -> Vec<String> {
    report.findings().map(ToString::to_string).collect()
}

/// Place of a byte of the n-th section of a kind.
fn at(index: &Index, kind: Kind, n: usize, byte: u64) -> usize {
    let section = index.sections.iter().filter(|section| section.kind == kind).nth(n).unwrap();
    (section.offset + byte) as usize
}

#[test]
fn a_sound_pack_passes_and_says_what_was_read() {
    let pack = Pack::from_bytes("", Sample::default().pack()).unwrap();
    let done = AtomicU64::new(0);
    let report = verify(&pack, Mode::Full, &|bytes| {
        done.fetch_add(bytes, Ordering::Relaxed);
    });
    assert!(report.is_ok(), "{:?}", lines(&report));
    assert_eq!(report.root, pack.root());
    assert_eq!((report.n_checked(), report.n_bad()), (pack.sections().len(), 0));
    assert_eq!(report.bytes_checked(), pack.sections().iter().map(|s| s.len).sum::<u64>());
    assert_eq!(done.into_inner(), report.bytes_checked());
    let gate = report.sections.iter().find(|s| s.name == "blk.0.ffn_gate_exps.weight").unwrap();
    assert_eq!(gate.n_parts, 2, "one digest per expert");
}

/// Flips one bit of each byte in turn: found, and attributed to the place where it is.
#[test]
fn case_i4_every_byte_is_covered() {
    let sample = Sample::small();
    let pack = sample.write(&sample.small_contents()).done;
    let (index, index_len) = (index_of(&pack), index_bytes(&pack).len());
    (0..pack.len()).into_par_iter().for_each_init(
        || pack.clone(),
        |copy, at| {
            copy[at] ^= 1 << (at % 8);
            let place = region(&index, index_len, at);
            match Pack::from_bytes("", copy.clone()) {
                Err(PackError::Magic { .. } | PackError::HeaderDigest { .. }) => assert_eq!(place, "header"),
                Err(PackError::IndexDigest { .. }) => assert_eq!(place, "index"),
                Err(error) => panic!("byte {at}: {error}"),
                Ok(flipped) => {
                    let report = verify(&flipped, Mode::Full, &|_| {});
                    let bad: Vec<String> = report
                        .sections
                        .iter()
                        .zip(&index.sections)
                        .filter(|(section, _)| matches!(section.findings.first(), Some(Finding::Digest(_))))
                        .map(|(_, section)| section.label())
                        .collect();
                    match place.as_str() {
                        "padding" => {
                            assert!(bad.is_empty());
                            let offset = at as u64;
                            assert!(
                                matches!(report.padding[..], [Finding::Padding { offset: o, .. }] if o == offset)
                            );
                        }
                        section => {
                            assert_eq!(bad, [section], "byte {at}");
                            assert!(report.padding.is_empty());
                        }
                    }
                }
            }
            copy[at] = pack[at];
        },
    );
}

#[test]
fn case_b14_a_flip_names_the_expert() {
    let mut pack = Sample::default().pack();
    let index = index_of(&pack);
    // The second half of a stack of two, and the only tensor of its kind.
    pack[at(&index, Kind::Tensor, 2, 2880)] ^= 1;
    pack[at(&index, Kind::Tensor, 0, 0)] ^= 1;
    let report = check(pack, Mode::Full);
    let lines = lines(&report);
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("tensor `output_norm.weight` at byte"), "{}", lines[0]);
    let second = format!("expert 1, at byte {}", at(&index, Kind::Tensor, 2, 2880));
    assert!(
        lines[1].starts_with("tensor `blk.0.ffn_gate_exps.weight`,") && lines[1].contains(&second),
        "{}",
        lines[1]
    );
    assert_eq!(report.n_bad(), 2);
}

#[test]
fn all_faults_are_listed_whatever_the_threads() {
    let mut pack = Sample::default().pack();
    let index = index_of(&pack);
    for section in index.sections.iter().filter(|section| section.len > 0) {
        pack[section.offset as usize] ^= 1;
        let end = section.end() as usize;
        if end < pack.len() && !end.is_multiple_of(PAGE) {
            pack[end] = 1;
        }
    }
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let pack = pack.clone();
        pool.install(|| lines(&check(pack, Mode::Full)))
    };
    let one = on(1);
    // A digest each, that of the empty section excepted; a section that ends on a page has no padding behind it.
    let padded = index.sections.iter().rev().skip(1).filter(|s| s.end() % PAGE as u64 != 0).count();
    assert_eq!(one.iter().filter(|line| line.contains("digest is")).count(), index.sections.len() - 1);
    assert_eq!(one.iter().filter(|line| line.starts_with("padding behind")).count(), padded);
    assert_eq!(one, on(4));
}

/// Right digests over wrong numbers: what a faulty tool would have written.
#[test]
fn case_f4_numbers_that_cannot_be_are_found_under_right_digests() {
    struct Case {
        edit: fn(&mut [u8], &Index),
        says: &'static str,
    }
    fn set_scale(bytes: &mut [u8], index: &Index, row: u64, scale: f32) {
        let at = at(index, Kind::Scales, 0, row * 4);
        bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
    }
    // Chunk 0: the gate of expert 1, 64 x 64 for 40 inputs and 36 outputs; at 4096 outputs 0 to 31 of that of expert 0;
    // at 8192 inputs 0 to 19 of the down projection, 32 x 64 for 40 outputs. Chunk 1: the other outputs and inputs.
    let cases = [
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 32 + 5)] = 0x80,
            says: "blk.0.ffn_gate_exps expert 1: code at row 1, column 5",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 1, 4096 + 1024 + 2 * 32 + 1)] = 0x80,
            says: "blk.0.ffn_down_exps expert 1: code at row 34, column 21",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 1, 1024 + 2 * 32 + 7)] = 0x80,
            says: "blk.0.ffn_gate_exps expert 0: code at row 34, column 39",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 1024 + 8)] = 1,
            says: "expert 1: padding at row 0, column 40",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 2048 + 4 * 32)] = 1,
            says: "expert 1: padding at row 36, column 0",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 4095)] = 1,
            says: "expert 1: padding at row 63, column 63",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 8192 + 20)] = 1,
            says: "blk.0.ffn_down_exps expert 1: padding at row 0, column 20",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 1, 4096 + 16)] = 1,
            says: "blk.0.ffn_down_exps expert 1: padding at row 0, column 36",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 1, 4 * 32)] = 1,
            says: "blk.0.ffn_gate_exps expert 0: padding at row 36, column 0",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 2, 12 * 32)] = 0xff,
            says: "dense tensor 1: padding at row 12, column 0",
        },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 0, 4096 + 2048)] = 1,
            says: "padding behind a part of chunk `0`",
        },
        Case { edit: |b, i| b[at(i, Kind::Chunk, 1, 8191)] = 1, says: "padding behind a part of chunk `1`" },
        Case { edit: |b, i| set_scale(b, i, 5, f32::NAN), says: "expert 1: scale of row 5 is NaN" },
        Case { edit: |b, i| set_scale(b, i, 5, f32::INFINITY), says: "scale of row 5 is inf" },
        Case { edit: |b, i| set_scale(b, i, 5, -1.0), says: "scale of row 5 is -1" },
        Case { edit: |b, i| set_scale(b, i, 35, 0.0), says: "ffn_gate_exps expert 1: scale of row 35 is 0" },
        Case {
            edit: |b, i| set_scale(b, i, 36 + 35, 0.0),
            says: "ffn_gate_exps expert 0: scale of row 35 is 0",
        },
        // Row 3 has scale 0 by right; one code makes it wrong.
        Case { edit: |b, i| b[at(i, Kind::Chunk, 0, 3 * 32)] = 1, says: "scale of row 3 is 0, but" },
        Case {
            edit: |b, i| b[at(i, Kind::Chunk, 1, 4096 + 3 * 32 + 2)] = 1,
            says: "ffn_down_exps expert 1: scale of row 3 is 0, but",
        },
    ];
    let pack = Sample::default().pack();
    for Case { edit, says } in cases {
        let bytes = edit_sections(&pack, edit);
        for mode in [Mode::Full, Mode::Npu] {
            let found = lines(&check(bytes.clone(), mode));
            assert!(matches!(&found[..], [line] if line.contains(says)), "{found:?} does not say `{says}`");
        }
    }
    // A row without scale is wrong in every slice of its inputs.
    let bytes = edit_sections(&pack, |bytes, index| set_scale(bytes, index, 36 + 36 + 39, 0.0));
    let report = check(bytes, Mode::Npu);
    let says = "blk.0.ffn_down_exps expert 1: scale of row 39 is 0, but the row has codes that are not";
    assert_eq!(lines(&report), [says, says]);
}

/// A bit flipped in any chunk, in a part or behind it: the digest of that chunk says so, and no other.
#[test]
fn every_chunk_of_a_matrix_is_covered() {
    let mut pack = Sample::default().pack();
    let index = index_of(&pack);
    for (chunk, n) in index.sections.iter().filter(|section| section.kind == Kind::Chunk).zip(0..) {
        for byte in (0..chunk.len).step_by(61) {
            let at = (chunk.offset + byte) as usize;
            pack[at] ^= 1;
            let report = check(pack.clone(), Mode::Npu);
            let bad: Vec<_> = report.sections.iter().filter(|s| !s.findings.is_empty()).collect();
            assert!(matches!(&bad[..], [bad] if bad.kind == Kind::Chunk && bad.name == n.to_string()));
            pack[at] ^= 1;
        }
    }
}

/// `Npu` reads what a device is given and nothing else; `Quick` reads no section at all.
#[test]
fn modes_read_what_they_say() {
    let mut pack = Sample::default().pack();
    let index = index_of(&pack);
    for kind in [Kind::Header, Kind::Plan, Kind::Tensor, Kind::Chunk, Kind::Scales] {
        pack[at(&index, kind, 0, 1)] ^= 4;
    }
    let bad = |mode| -> Vec<Kind> {
        let report = check(pack.clone(), mode);
        report.sections.iter().filter(|s| !s.findings.is_empty()).map(|s| s.kind).collect()
    };
    assert_eq!(bad(Mode::Full), [Kind::Header, Kind::Plan, Kind::Tensor, Kind::Chunk, Kind::Scales]);
    assert_eq!(bad(Mode::Npu), [Kind::Chunk, Kind::Scales]);
    assert!(bad(Mode::Quick).is_empty());
    assert_eq!(check(pack.clone(), Mode::Quick).bytes_checked(), 0);
}

/// The runtime checks one section or one expert at a time.
#[test]
fn one_section_or_expert_can_be_checked_alone() {
    let mut bytes = Sample::default().pack();
    let index = index_of(&bytes);
    bytes[at(&index, Kind::Tensor, 3, 0)] ^= 1;
    let pack = Pack::from_bytes("", bytes).unwrap();
    let number = pack.tensor("blk.0.ffn_down_exps.weight").unwrap().section.unwrap();
    let section = pack.section(number).unwrap();
    assert!(matches!(pack.check_part(section, 0), Err(PackError::SectionDigest { part: Some(0), .. })));
    pack.check_part(section, 1).unwrap();
    assert!(pack.check_part(section, 2).is_err());
    let bad: Vec<u32> =
        (0..pack.sections().len() as u32).filter(|n| pack.check_section(*n).is_err()).collect();
    assert_eq!(bad, [number]);
}

// ---- the prior system's container

/// A container of the prior system with two matrices, one of which has a second layout from version 4 on.
pub fn prior_container(version: u32) -> Vec<u8> {
    let mut out = vec![1u8; 2 * (1024 + 128) + 1024];
    let index = out.len() as u64;
    let second = if version >= 4 { 1024u64 } else { 0 };
    for (name, blob, scales, second) in [
        ("blk.0.ffn_up_exps.weight#0", 0u64, 1024u64, 0),
        ("output.weight", 1152, 1152 + 1024 + second, second),
    ] {
        out.extend((name.len() as u32).to_le_bytes());
        out.extend(name.as_bytes());
        [32u32, 32, 1, 32].iter().for_each(|n| out.extend(n.to_le_bytes()));
        [blob, 1024, scales].iter().for_each(|n| out.extend(n.to_le_bytes()));
        if version >= 4 {
            out.extend(second.to_le_bytes());
        }
    }
    out.extend(index.to_le_bytes());
    [2, version].iter().for_each(|n: &u32| out.extend(n.to_le_bytes()));
    match version {
        1 | 2 => out.extend(b"ORKPK01\0"),
        3 | 4 => [&7u32.to_le_bytes()[..], b"ORKPK01\0", &[0; 4]].iter().for_each(|part| out.extend(*part)),
        _ => [&7u32.to_le_bytes()[..], &9u32.to_le_bytes(), b"ORKPK01\0"]
            .iter()
            .for_each(|part| out.extend(*part)),
    }
    out
}
