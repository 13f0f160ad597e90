//! Packs written and read: the bytes that result, and what a reader refuses.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use orkpack::bytes::{Io, Limits};
use orkpack::gguf::{GgufFile, GgufSet};
use orkpack::pack::{
    Contents, Existing, FileContents, Index, Kind, LayoutId, MatrixName, Pack, PackError, Part, Placement,
    SubMatrix, Tier, Writer, digest, digest_parts, verify,
};
use orkpack::source::{self, OpenError, Opened, PackedModel};
use orkpack::tensor::{Projection, TensorSource};
use orkpack::units::LayerId;

use super::support::packs::{
    PAGE, Sample, code, edit_header, edit_index, edit_sections, expert, index_bytes, index_of, matrix,
    numbers, part, replace_index, scale, some_digest, sub,
};

fn open(bytes: &[u8]) -> Result<Pack, PackError> {
    Pack::from_bytes("sample.orkpack", bytes.to_vec())
}

#[test]
fn what_was_written_is_read() {
    let sample = Sample::default();
    let contents = sample.contents();
    let written = sample.write(&contents);
    let pack = open(&written.done).unwrap();
    assert_eq!(pack.root(), written.root);
    assert_eq!(pack.file().len() as u64, written.file_len);
    assert_eq!(pack.manifest(), &contents.manifest);
    assert!(pack.is_fat());
    assert_eq!(pack.profile(), contents.profile);
    assert_eq!(pack.plan(), contents.plan);
    assert_eq!(pack.statistics(), contents.statistics);
    assert_eq!(pack.document_digest(Kind::Profile), Some(digest(contents.profile)));
    assert_eq!(pack.gguf_header(0), Some(contents.files[0].header));
    assert_eq!(pack.gguf_header(1), None);
    for tensor in &sample.header.tensors {
        let stored = pack.tensor(&tensor.name).unwrap();
        assert_eq!(pack.tensor_bytes(stored), Some(sample.tensor(&tensor.name)), "{}", tensor.name);
        let n_parts = tensor.n_stack() as usize;
        assert_eq!(Some(&stored.digests), digest_parts(sample.tensor(&tensor.name), n_parts).as_ref());
    }
    assert!(pack.tensor("nobody").is_none());
    for number in 0..pack.sections().len() as u32 {
        pack.check_section(number).unwrap();
    }
    assert!(pack.check_section(99).is_err());
}

#[test]
fn placements_and_cuts_lead_to_codes_and_scales() {
    let pack = open(&Sample::default().pack()).unwrap();
    let find = |matrix| pack.placements().iter().find(|p| p.matrix == matrix).unwrap();
    let down = find(expert(1, Projection::Down));
    let places = |p: &Placement| p.parts.iter().map(|part| (part.chunk, part.offset)).collect::<Vec<_>>();
    assert_eq!(places(down), [(0, 8192), (1, 4096)]);
    // Input 21 of output 33 is input 1 of the second slice: second block of outputs, second run, second code.
    assert_eq!(pack.part_bytes(&down.parts[1])[1024 + 32 + 1] as i8, code(21, 33));
    let gate = find(expert(0, Projection::Gate));
    assert_eq!(places(gate), [(0, 4096), (1, 0)]);
    // Input 39 of output 33 is output 1 of the second slice: second block of inputs.
    assert_eq!(pack.part_bytes(&gate.parts[1])[1024 + 32 + 7] as i8, code(39, 33));
    assert_eq!((gate.scales, down.scales), (36 * 4, 72 * 4), "as they begin in the chunk");
    for (placement, n_out) in [(down, 40), (gate, 36)] {
        assert_eq!(pack.scales(placement).collect::<Vec<_>>(), (0..n_out).map(scale).collect::<Vec<_>>());
    }
    let lens: Vec<usize> = pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).len()).collect();
    assert_eq!(lens, [12288, 8192, 4096], "whole pages: what the device maps");
    assert!(pack.section(pack.chunks()[1].scales).unwrap().len == 0, "no matrix begins in chunk 1");

    let names = |tokens: u32| -> Vec<MatrixName> {
        let cut = pack.cut(tokens).unwrap();
        pack.hot(cut, LayerId(0)).chain(pack.hot_dense(cut)).map(|p: &Placement| p.matrix).collect()
    };
    let (gate, down) = (expert(1, Projection::Gate), expert(1, Projection::Down));
    assert!(pack.cut(0).is_none());
    assert_eq!(names(1), [gate]);
    assert_eq!(names(31), [gate]);
    assert_eq!(names(512), [gate, down, MatrixName::Dense { tensor: 1 }]);
    assert_eq!(pack.hot(pack.cut(1).unwrap(), LayerId(7)).count(), 0);
}

#[test]
fn the_gguf_comes_back_byte_for_byte() {
    for odd in [false, true] {
        let sample = Sample::new(odd);
        let pack = open(&sample.pack()).unwrap();
        assert_eq!(pack.residue(0).is_some(), odd, "residue is kept only where it is not zero");
        let mut out = Vec::new();
        pack.write_gguf(0, &mut out).unwrap();
        assert!(out == sample.gguf, "odd: {odd}");
        assert!(pack.write_gguf(1, &mut out).is_err());
    }
}

#[test]
fn the_length_is_known_before_and_equal_contents_give_equal_bytes() {
    let sample = Sample::default();
    for thin in [false, true] {
        let contents = Contents { thin, ..sample.contents() };
        let layout = contents.layout().unwrap();
        let first = sample.write(&contents);
        assert_eq!(layout.file_len, first.done.len() as u64);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert!(pool.install(|| sample.write(&contents)) == first);
    }
}

/// Sections larger than one piece, hashed beside the writing and by several threads, get plain digests.
#[test]
fn large_sections_have_the_digests_of_their_bytes() {
    let sample = Sample::default();
    let profile = numbers(5 << 20, 9);
    let contents = Contents { profile: &profile, ..sample.contents() };
    let pack = open(&sample.write(&contents).done).unwrap();
    let plain = blake3::derive_key("orkpack format 1: section", &profile);
    assert_eq!(pack.document_digest(Kind::Profile).unwrap().0, plain);
    assert!(pack.profile() == profile);
}

#[test]
fn a_thin_pack_knows_the_tensors_by_digest_alone() {
    let sample = Sample::default();
    let fat = open(&sample.pack()).unwrap();
    let written = sample.write(&Contents { thin: true, ..sample.contents() });
    let thin = open(&written.done).unwrap();
    assert!(!thin.is_fat());
    assert_eq!(thin.gguf_header(0), fat.gguf_header(0), "its metadata is the model's");
    assert!(thin.sections().iter().all(|s| !matches!(s.kind, Kind::Tensor | Kind::Residue)));
    for (thin, fat) in thin.tensors().iter().zip(fat.tensors()) {
        assert_eq!(thin.digests, fat.digests);
    }
    assert!(thin.write_gguf(0, &mut Vec::new()).is_err());
    assert!(verify::verify(&thin, verify::Mode::Full, &|_| {}).is_ok());
    assert!(matches!(PackedModel::new(thin, &Limits::default()), Err(OpenError::Thin { .. })));
}

#[test]
fn contents_that_no_reader_takes_are_refused_before_the_work() {
    let sample = Sample::default();
    let contents = |edit: fn(&mut Contents<'_>)| {
        let mut contents = sample.contents();
        edit(&mut contents);
        contents.layout().err()
    };
    let twice = contents(|c| {
        let one = part(sub(0, 32, 32, 0, 32, 32), 2, 4096);
        c.matrices.push(matrix(expert(1, Projection::Gate), 32, 32, vec![one]));
        c.chunks[2].len = 8192;
    });
    assert_refused(twice, "blk.0.ffn_gate_exps expert 1: placement is given twice");
    assert_refused(
        contents(|c| c.matrices[0].parts[0].chunk = 3),
        "chunk is 3, expected a chunk of the pack",
    );
    assert_refused(contents(|c| c.matrices[0].parts.clear()), "expert 1: number of parts is 0");
    assert_refused(contents(|c| c.chunks.push(c.chunks[0])), "chunk 3: content is nothing");
    assert_refused(
        contents(|c| c.chunks[2].len = 2048),
        "chunk `2`: length is 2048, expected 4096 by its parts",
    );
    assert_refused(contents(|c| c.chunks[1].len = 12288), "chunk `1`: length is 12288, expected 8192");
    assert!(FileContents::new("a".as_ref(), &sample.gguf[..9000], 300, &sample.header.tensors, 0).is_none());
}

fn assert_refused(error: Option<PackError>, words: &str) {
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    assert!(text.contains(words), "`{text}` does not say `{words}`");
}

#[test]
fn only_what_was_announced_can_be_pushed() {
    let sample = Sample::default();
    let writer = || Writer::in_memory(&sample.contents()).unwrap();
    let mut short = writer();
    assert_refused(
        short.push_tensor(&[0; 19]).err(),
        "tensor `output_norm.weight`: got 19 bytes, announced were 20",
    );
    assert_refused(short.finish().err(), "number of tensors: got 0 bytes, announced were 4");
    let mut chunks = writer();
    sample.header.tensors.iter().for_each(|t| chunks.push_tensor(sample.tensor(&t.name)).unwrap());
    assert_refused(chunks.push_tensor(&[]).err(), "a tensor more");
    assert_refused(chunks.push_chunk(&[0; 4], &[]).err(), "chunk `0`: got 4 bytes");
    let mut thin = Writer::in_memory(&Contents { thin: true, ..sample.contents() }).unwrap();
    assert_refused(thin.push_tensor(&[0; 19]).err(), "got 19 bytes");
}

// ---- files ----

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn write_file(sample: &Sample, path: &Path, existing: Existing) -> Result<(), PackError> {
    let mut writer = Writer::create(path, &sample.contents(), existing)?;
    sample.push(&mut writer);
    writer.finish().map(drop)
}

#[test]
fn a_file_gets_its_name_when_it_is_whole() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a b – ä.orkpack");
    let mut writer = Writer::create(&path, &sample.contents(), Existing::Keep).unwrap();
    assert_eq!(names(folder.path()), ["a b – ä.orkpack.partial"]);
    sample.push(&mut writer);
    let finished = writer.finish().unwrap();
    assert_eq!(names(folder.path()), ["a b – ä.orkpack"]);
    assert!(fs::read(&path).unwrap() == sample.pack());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o700, 0o600);
    for io in [Io::Map, Io::Pread] {
        assert_eq!(Pack::open(&path, io).unwrap().root(), finished.root);
    }
    assert!(matches!(Pack::open(folder.path(), Io::Map), Err(PackError::Io { .. })), "a folder is no pack");
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a.orkpack");
    drop(Writer::create(&path, &sample.contents(), Existing::Keep).unwrap());
    assert!(names(folder.path()).is_empty());
    let mut unfinished = Writer::create(&path, &sample.contents(), Existing::Keep).unwrap();
    unfinished.push_tensor(sample.tensor("output_norm.weight")).unwrap();
    assert!(unfinished.finish().is_err());
    assert!(names(folder.path()).is_empty());
}

#[test]
fn an_output_is_replaced_only_on_demand_and_never_shrunk_in_place() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a.orkpack");
    fs::write(&path, b"precious").unwrap();
    let mapped = orkpack::bytes::FileBytes::open(&path, Io::Map).unwrap();
    let kept = write_file(&sample, &path, Existing::Keep).unwrap_err();
    assert!(matches!(kept, PackError::Exists { .. }));
    assert!(kept.hint().unwrap().contains("--force"));
    assert_eq!(names(folder.path()), ["a.orkpack"]);
    write_file(&sample, &path, Existing::Replace).unwrap();
    assert_eq!(&mapped[..], b"precious", "who had it mapped keeps it");
    assert!(fs::read(&path).unwrap() == sample.pack());
}

/// An output that appears while the pack is written is not run over.
#[test]
fn an_output_that_appears_meanwhile_stays() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a.orkpack");
    let mut writer = Writer::create(&path, &sample.contents(), Existing::Keep).unwrap();
    sample.push(&mut writer);
    fs::write(&path, b"precious").unwrap();
    assert!(matches!(writer.finish(), Err(PackError::Exists { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    assert_eq!(names(folder.path()), ["a.orkpack"]);
}

#[test]
fn two_conversions_cannot_meet_in_one_file() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a.orkpack");
    let mut first = Writer::create(&path, &sample.contents(), Existing::Keep).unwrap();
    let second = Writer::create(&path, &sample.contents(), Existing::Keep).map(drop).unwrap_err();
    assert!(matches!(second, PackError::Busy { .. }), "{second}");
    assert!(second.to_string().starts_with("another conversion is writing"));
    sample.push(&mut first);
    first.finish().unwrap();
    assert!(fs::read(&path).unwrap() == sample.pack(), "the second did no harm");
}

#[test]
fn what_a_dead_conversion_left_is_cleared() {
    let (sample, folder) = (Sample::default(), folder());
    let path = folder.path().join("a.orkpack");
    let partial = folder.path().join("a.orkpack.partial");
    fs::write(&partial, numbers(300_000, 5)).unwrap();
    let mapped = orkpack::bytes::FileBytes::open(&partial, Io::Map).unwrap();
    write_file(&sample, &path, Existing::Keep).unwrap();
    assert_eq!(names(folder.path()), ["a.orkpack"]);
    assert!(fs::read(&path).unwrap() == sample.pack(), "nothing of the old bytes is left");
    assert!(mapped[..] == numbers(300_000, 5), "and they were not cut under anybody");

    fs::hard_link(&path, folder.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &partial).unwrap();
    let refused = write_file(&sample, &path, Existing::Replace).unwrap_err();
    assert!(refused.to_string().contains("symbolic link"), "{refused}");
    assert!(fs::read(&path).unwrap() == sample.pack());
}

#[test]
fn a_full_disk_is_known_at_the_start() {
    let (sample, folder) = (Sample::default(), folder());
    let mut tensors = sample.header.tensors.clone();
    let last = tensors.last_mut().unwrap();
    last.dims = vec![1 << 58];
    last.place.len = 1 << 59;
    let mut contents = Contents { tensors: &tensors, ..sample.contents() };
    contents.files[0].len = 1 << 60;
    contents.files[0].residue.clear();
    let path = folder.path().join("a.orkpack");
    let error = Writer::create(&path, &contents, Existing::Keep).map(drop).unwrap_err();
    let PackError::NoSpace { needed, free, .. } = error else { panic!("{error}") };
    assert_eq!(needed.0, contents.layout().unwrap().file_len);
    assert!(free < needed);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn an_output_that_cannot_be_is_named() {
    let sample = Sample::default();
    let path = folder().path().join("gone/a.orkpack");
    let error = write_file(&sample, &path, Existing::Keep).unwrap_err();
    assert!(error.to_string().contains("gone/a.orkpack.partial"), "{error}");
    assert!(!error.is_damage());
    let folder = folder();
    let error = write_file(&sample, folder.path(), Existing::Replace).unwrap_err();
    assert!(error.to_string().contains("directory"), "known before the work: {error}");
}

// ---- strangers' bytes ----

#[test]
fn a_pack_cut_anywhere_is_refused() {
    let pack = Sample::default().pack();
    for len in 0..pack.len() {
        let error = open(&pack[..len]).unwrap_err();
        let right = match len {
            0 => matches!(error, PackError::Empty),
            1..8 => matches!(error, PackError::NotAPack { .. }),
            8..PAGE => matches!(error, PackError::Truncated { expected: 4096, .. }),
            _ => matches!(error, PackError::Truncated { expected, .. } if expected == pack.len() as u64),
        };
        assert!(right, "cut at {len}: {error}");
    }
}

#[test]
fn case_i4_bytes_before_or_behind_are_refused() {
    let pack = Sample::default().pack();
    assert_refused(open(&[&[0], &pack[..]].concat()).err(), "not a pack: begins with `\\x00\\x89ORKPAC`");
    assert_refused(open(&[&pack[..], &[0]].concat()).err(), "1 foreign bytes follow");
    assert_refused(open(&[&pack[..], &pack[..]].concat()).err(), "foreign bytes follow");
}

#[test]
fn other_files_are_told_by_their_content() {
    let gguf = Sample::default().gguf;
    let foreign = [&numbers(9000, 1)[..], b"ORKPK01\0"].concat();
    assert!(matches!(open(&foreign), Err(PackError::Foreign)));
    assert!(matches!(open(&[&foreign[..], &[1, 2, 3, 4]].concat()), Err(PackError::Foreign)));
    assert!(matches!(open(b"ORKPK01\0"), Err(PackError::Foreign)));
    assert_refused(open(&gguf).err(), "not a pack: begins with `GGUF");
    assert_refused(open(&[0; 8192]).err(), "not a pack");
    assert_refused(open(&[]).err(), "file is empty");
}

#[test]
fn every_bit_of_header_and_index_is_guarded() {
    let pack = Sample::default().pack();
    let index_len = index_bytes(&pack).len();
    let mut flipped = pack.clone();
    for bit in 0..(PAGE + index_len) * 8 {
        flipped[bit / 8] ^= 1 << (bit % 8);
        let error = match Pack::from_bytes("", flipped.clone()) {
            Err(error) => error,
            Ok(_) => panic!("bit {bit} is not guarded"),
        };
        let right = match bit / 8 {
            0..8 => matches!(error, PackError::Magic { .. }),
            8..PAGE => matches!(error, PackError::HeaderDigest { .. }),
            _ => matches!(error, PackError::IndexDigest { .. }),
        };
        assert!(right, "bit {bit}: {error}");
        flipped[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn headers_of_other_makers_are_refused_by_name() {
    struct Case {
        at: usize,
        bytes: &'static [u8],
        says: &'static str,
    }
    let cases = [
        Case { at: 8, bytes: &[2], says: "pack version 2, this orkpack reads version 1" },
        Case { at: 12, bytes: &[1], says: "header: a reserved byte is 1, expected 0" },
        Case { at: 16, bytes: &[0x20], says: "needs a newer orkpack for feature bit 5" },
        Case { at: 23, bytes: &[0x80], says: "needs a newer orkpack for feature bit 63" },
        Case { at: 31, bytes: &[0xff], says: "it was cut" },
        Case { at: 32, bytes: &[1], says: "header: index offset is 4097, expected 4096" },
        Case { at: 40, bytes: &[0xff; 8], says: "header: index length is 18446744073709551615" },
        Case { at: 42, bytes: &[0xff], says: "to the file's end" },
        Case { at: 48, bytes: &[0; 32], says: "index at byte 4096: digest is" },
        Case { at: 80, bytes: &[9], says: "header: a reserved byte is 9" },
        Case { at: 4063, bytes: &[9], says: "header: a reserved byte is 9" },
    ];
    let pack = Sample::default().pack();
    for Case { at, bytes, says } in cases {
        let edited = edit_header(&pack, |header| header[at..at + bytes.len()].copy_from_slice(bytes));
        assert_refused(open(&edited).err(), says);
    }
}

#[test]
fn case_i2_values_that_cannot_be_are_refused_by_name() {
    struct Case {
        edit: fn(&mut Index),
        says: &'static str,
    }
    fn at(index: &mut Index, kind: Kind) -> &mut orkpack::pack::Section {
        index.sections.iter_mut().find(|s| s.kind == kind).unwrap()
    }
    let cases = [
        Case {
            edit: |i| i.sections[0].offset += 4096,
            says: "header `file 0`: offset is 12288, expected 8192",
        },
        Case { edit: |i| i.sections[0].offset = u64::MAX, says: "header `file 0`: offset" },
        Case { edit: |i| i.sections[0].len = u64::MAX, says: "to the file's end" },
        Case { edit: |i| i.sections[2].len += 4096, says: "offset is" },
        Case { edit: |i| i.sections.last_mut().unwrap().len -= 1, says: "header: file length" },
        Case { edit: |i| i.sections.swap(3, 4), says: "offset is" },
        Case { edit: |i| i.sections.truncate(12), says: "header: file length" },
        Case { edit: |i| i.sections[1].digests.clear(), says: "number of parts is 0" },
        Case { edit: |i| i.sections[1].digests.extend([some_digest(); 12]), says: "number of parts is 13" },
        Case { edit: |i| at(i, Kind::Tensor).layout = LayoutId::Interleaved, says: "layout is Interleaved" },
        Case { edit: |i| at(i, Kind::Chunk).layout = LayoutId::Rows, says: "chunk `0`: layout is Rows" },
        Case { edit: |i| at(i, Kind::Chunk).name = "1".into(), says: "name is used twice" },
        Case { edit: |i| at(i, Kind::Plan).kind = Kind::Statistics, says: "number of documents of one kind" },
        Case { edit: |i| at(i, Kind::Plan).kind = Kind::Residue, says: "number of documents of one kind" },
        Case { edit: |i| at(i, Kind::Statistics).kind = Kind::Residue, says: "use is none" },
        Case { edit: |i| i.files.clear(), says: "file is 0" },
        Case { edit: |i| i.files[0].header = 77, says: "section is 77" },
        Case { edit: |i| i.tensors[1].section = None, says: "section is there without the others" },
        Case { edit: |i| i.files[0].residue = Some(i.files[0].header), says: "source file 0: section is" },
        Case {
            edit: |i| i.tensors.iter_mut().for_each(|tensor| tensor.section = None),
            says: "residue is there without tensors",
        },
        Case { edit: |i| i.files[0].len += 1, says: "residue `file 0`: length" },
        Case { edit: |i| i.files[0].len = 5, says: "overlapping or outside" },
        Case { edit: |i| i.files.push(i.files[0].clone()), says: "expected a name of its own" },
        Case {
            edit: |i| {
                i.files.push(i.files[0].clone());
                i.files[1].name = "b.gguf".into();
            },
            says: "taken already",
        },
        Case { edit: |i| i.files[0].name = "../a.gguf".into(), says: "expected a plain file name" },
        Case { edit: |i| i.files[0].name = "..".into(), says: "expected a plain file name" },
        Case { edit: |i| i.files[0].name.clear(), says: "expected a plain file name" },
        Case { edit: |i| i.files[0].name = "a\u{1b}.gguf".into(), says: "name is a\\u{1b}.gguf" },
        Case { edit: |i| i.tensors[0].offset += 64, says: "overlapping or outside" },
        Case { edit: |i| i.tensors[3].offset = u64::MAX, says: "overlapping or outside" },
        Case { edit: |i| i.tensors[1].dims[1] = 15, says: "length is 1280, expected 1200 by its shape" },
        Case { edit: |i| i.tensors[1].dims[1] = u64::MAX, says: "shape is type 1" },
        Case { edit: |i| i.tensors[1].dims.clear(), says: "number of dimensions is 0" },
        Case { edit: |i| i.tensors[1].dims = vec![1; 5], says: "number of dimensions is 5" },
        Case { edit: |i| i.tensors[1].dtype = 4, says: "shape is type 4" },
        Case { edit: |i| i.tensors[1].dtype = 12, says: "in whole blocks" },
        Case { edit: |i| i.tensors[1].file = 1, says: "file is 1" },
        Case { edit: |i| i.tensors[1].section = None, says: "section is there without the others" },
        Case { edit: |i| i.tensors[1].section = i.tensors[0].section, says: "taken already" },
        Case {
            edit: |i| i.tensors[1].name = "x".into(),
            says: "tensor `token_embd.weight`: name is another, expected tensor `x`",
        },
        Case { edit: |i| i.tensors[1].name = "\u{1b}[2J".into(), says: "tensor `\\u{1b}[2J`" },
        Case { edit: |i| i.tensors[2].digests[1] = some_digest(), says: "list of digests" },
        Case { edit: |i| i.tensors[2].digests.clear(), says: "number of digests is 0" },
        Case { edit: |i| i.chunks[0].section = i.chunks[0].scales, says: "chunk 0: section is" },
        Case { edit: |i| i.chunks[0].scales = i.chunks[2].scales, says: "scales `2`: length" },
        Case { edit: |i| i.chunks.truncate(2), says: "chunk is 2, expected a chunk of the pack" },
        Case {
            edit: |i| i.chunks[1].domain = 1,
            says: "domain of a part is 1, expected 0, that of its first",
        },
        Case {
            edit: |i| i.chunks[1].tier = Tier::Streamed,
            says: "tier of a part is Streamed, expected Resident",
        },
        Case { edit: |i| i.placements[0].parts[0].chunk = 2, says: "offset of a part is 4096, expected 0" },
        Case {
            edit: |i| i.placements[0].parts[0].chunk = u32::MAX,
            says: "chunk is 4294967295, expected a chunk",
        },
        Case { edit: |i| i.placements[2].parts[1].chunk = 2, says: "domain of a part is 1" },
        Case { edit: |i| i.placements[0].parts[0].offset = 4096, says: "offset of a part is" },
        Case {
            edit: |i| i.placements[2].parts[0].offset = 4096,
            says: "offset of a part is 4096, expected 8192",
        },
        Case {
            edit: |i| i.placements[2].parts[1].offset = 2048,
            says: "offset of a part is 2048, expected 4096",
        },
        Case {
            edit: |i| i.placements[2].parts[1].offset = 8192,
            says: "offset of a part is 8192, expected 4096",
        },
        Case { edit: |i| i.placements[2].parts[1].offset = u64::MAX - 4095, says: "expected 4096" },
        Case {
            edit: |i| i.placements[1].parts[0].sub.n_padded = 96,
            says: "chunk `2`: length is 4096, expected 8192",
        },
        Case { edit: |i| i.placements[2].scales += 4, says: "offset of its scales is 292, expected 288" },
        Case {
            edit: |i| {
                (i.placements[2].scales, i.placements[3].scales) = (36 * 4, 76 * 4);
            },
            says: "ffn_gate_exps expert 0: offset of its scales is 304, expected 144",
        },
        Case {
            edit: |i| i.placements.truncate(3),
            says: "expert 1: offset of a part is 8192, expected 4096",
        },
        Case { edit: |i| drop(i.placements.remove(1)), says: "chunk 2: content is nothing" },
        Case { edit: |i| i.placements[0].n_in = 41, says: "a grid that covers the matrix" },
        Case { edit: |i| i.placements[0].n_out = 37, says: "a grid that covers the matrix" },
        Case { edit: |i| i.placements[0].n_out = 35, says: "N of a part is 36" },
        Case { edit: |i| i.placements[0].n_in = 0, says: "K of a part" },
        Case { edit: |i| i.placements[0].parts.clear(), says: "number of parts is 0" },
        Case { edit: |i| i.placements[2].parts[1].sub.k0 = 16, says: "first input of a part is 16" },
        Case { edit: |i| i.placements[2].parts[1].sub.n0 = 32, says: "first output of a part is 32" },
        Case { edit: |i| i.placements[2].parts[1].sub.n_len = 39, says: "other K-slices" },
        Case { edit: |i| i.placements[2].parts.swap(0, 1), says: "first input of a part is 20" },
        Case { edit: |i| i.placements[2].parts.truncate(1), says: "a grid that covers the matrix" },
        Case { edit: |i| i.placements[3].parts.truncate(1), says: "a grid that covers the matrix" },
        Case { edit: |i| i.placements[3].parts.swap(0, 1), says: "first output of a part is 32" },
        Case { edit: |i| i.placements[0].parts[0].sub.k_padded = 0, says: "padded K is 0" },
        Case { edit: |i| i.placements[0].parts[0].sub.k_padded = 48, says: "padded K is 48" },
        Case { edit: |i| i.placements[0].parts[0].sub.k_padded = 8192, says: "padded K is 8192" },
        Case { edit: |i| i.placements[0].parts[0].sub.k_padded = 32, says: "K of a part is 40" },
        Case { edit: |i| i.placements[0].parts[0].sub.n_padded = 8224, says: "padded N is 8224" },
        Case {
            edit: |i| i.placements[0].parts[0].sub.n_padded = 96,
            says: "offset of a part is 4096, expected 8192",
        },
        Case { edit: |i| i.placements[0].matrix = i.placements[2].matrix, says: "given twice" },
        Case { edit: |i| i.placements[0].matrix = expert(2, Projection::Up), says: "1 layers of 2 experts" },
        // As up of the expert whose gate is in two slices, a down projection has four outputs too many.
        Case {
            edit: |i| i.placements[2].matrix = expert(0, Projection::Up),
            says: "outputs with a copy is 36",
        },
        Case { edit: |i| i.manifest.dims.n_layer = 0, says: "0 layers of 2 experts" },
        Case { edit: |i| i.placements[1].matrix = MatrixName::Dense { tensor: 9 }, says: "tensor is 9" },
        Case { edit: |i| i.placements[1].matrix = MatrixName::Dense { tensor: 2 }, says: "tensor is 2" },
        Case { edit: |i| i.cuts[0].from_tokens = 0, says: "first batch is 0" },
        Case { edit: |i| i.cuts[1].from_tokens = 1, says: "first batch is 1, expected more than 1" },
        Case { edit: |i| i.cuts[1].experts.push(0), says: "number of layers is 2, expected 1" },
        Case { edit: |i| i.cuts[1].experts[0] = 4, says: "4 in layer 0, expected at most 3" },
        Case { edit: |i| i.cuts[1].dense = 2, says: "depth among plain matrices is 2" },
    ];
    let pack = Sample::default().pack();
    assert_eq!(index_of(&pack).sections[0].kind, Kind::Header, "the table counts on the order of sections");
    let mut unlike = Vec::new();
    for Case { edit, says } in cases {
        let error = open(&edit_index(&pack, edit)).unwrap_err();
        let text = error.to_string();
        assert!(error.is_damage() && error.hint().is_some(), "{text}");
        assert!(!text.contains('\u{1b}'), "control characters are escaped");
        if !text.contains(says) {
            unlike.push(format!("`{text}` does not say `{says}`"));
        }
    }
    assert!(unlike.is_empty(), "{unlike:#?}");
}

/// Bits of the index flipped under right digests: refused, or another pack, never a panic.
#[test]
fn a_lying_index_never_panics() {
    let pack = Sample::default().pack();
    let encoded = index_bytes(&pack).to_vec();
    let mut refused = 0;
    for bit in 0..encoded.len() * 8 {
        let mut flipped = encoded.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        match Pack::from_bytes("", replace_index(&pack, &flipped)) {
            Err(_) => refused += 1,
            Ok(other) => {
                verify::verify(&other, verify::Mode::Full, &|_| {});
                let _ = PackedModel::new(other, &Limits::default());
            }
        }
    }
    assert!(refused > encoded.len(), "{refused}");
    for len in 0..encoded.len() {
        assert!(open(&replace_index(&pack, &encoded[..len])).is_err(), "index cut at {len}");
    }
}

/// A count that the file could never hold is refused before anything is allocated for it.
#[test]
fn counts_of_the_index_are_bounded() {
    let pack = Sample::default().pack();
    let encoded = index_bytes(&pack).to_vec();
    for count in [1u64 << 20, 1 << 32, 1 << 61, u64::MAX] {
        for at in [0, encoded.len() - 4 - 8 - 4] {
            let mut lying = encoded.clone();
            lying[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let error = open(&replace_index(&pack, &lying)).unwrap_err();
            assert!(matches!(error, PackError::Index { .. }), "{count} at {at}: {error}");
            // Not for want of bytes, which is found out when the memory has been taken.
            assert!(error.to_string().contains("LimitExceeded"), "{count} at {at}: {error}");
        }
    }
    let trailing = [&encoded[..], &[0]].concat();
    assert_refused(open(&replace_index(&pack, &trailing)).err(), "index at byte 4096: ends after");
}

// ---- as a model ----

#[test]
fn a_fat_pack_stands_in_for_its_gguf() {
    let (sample, folder) = (Sample::default(), folder());
    let (gguf_path, pack_path) = (folder.path().join("a"), folder.path().join("b"));
    fs::write(&gguf_path, &sample.gguf).unwrap();
    fs::write(&pack_path, sample.pack()).unwrap();
    let open = |path: &Path| source::open(path, Io::Map, &Limits::default()).unwrap();
    let (gguf, packed) = (open(&gguf_path), open(&pack_path));
    assert!(matches!(gguf, Opened::Gguf(_)) && gguf.pack().is_none());
    assert_eq!(packed.pack().unwrap().placements().len(), 4);
    let (gguf, packed) = (gguf.source(), packed.source());
    assert_eq!(gguf.header(), packed.header());
    assert_eq!(gguf.metadata(), packed.metadata());
    assert_eq!(gguf.tensors().len(), packed.tensors().len());
    for (left, right) in gguf.tensors().iter().zip(packed.tensors()) {
        assert_eq!((&left.name, left.dtype, &left.dims), (&right.name, right.dtype, &right.dims));
        assert_eq!(gguf.bytes(left.place).unwrap(), packed.bytes(right.place).unwrap());
        assert_eq!(packed.find(&left.name), Some(right));
    }
    let outside = orkpack::tensor::Place { file: 0, offset: u64::MAX, len: 2 };
    assert!(packed.bytes(outside).is_err());
    assert!(packed.bytes(orkpack::tensor::Place { file: 1, offset: 0, len: 1 }).is_err());
}

/// What is packed from a pack is what is packed from its GGUF, so a pack can be planned again without the GGUF.
#[test]
fn a_pack_of_a_pack_is_that_of_its_gguf() {
    let repack = |opened: &Opened, files: Vec<FileContents<'_>>, sample: &Sample| {
        let tensors = opened.original_tensors();
        let contents = Contents { files, tensors: &tensors, ..sample.contents() };
        let mut writer = Writer::in_memory(&contents).unwrap();
        let source = opened.source();
        source.tensors().iter().for_each(|t| writer.push_tensor(source.bytes(t.place).unwrap()).unwrap());
        sample.push_chunks(&mut writer);
        writer.finish().unwrap().done
    };
    for odd in [false, true] {
        let sample = Sample::new(odd);
        let file = GgufFile::from_bytes("a.gguf", sample.gguf.clone()).unwrap();
        let gguf = Opened::Gguf(Arc::new(GgufSet::single(file).unwrap()));
        let from_gguf = repack(&gguf, sample.contents().files, &sample);
        assert!(from_gguf == sample.pack(), "odd: {odd}");
        let pack = open(&from_gguf).unwrap();
        let model = Arc::new(PackedModel::new(pack, &Limits::default()).unwrap());
        let from_pack = repack(&Opened::Pack(model.clone()), model.files(false).unwrap(), &sample);
        assert!(from_pack == from_gguf, "odd: {odd}");
        assert_eq!(model.original_tensors(), sample.header.tensors);
    }
}

/// The tiler's parts are the format's, and back.
#[test]
fn parts_are_those_of_the_tiler() {
    let tiles = orkpack::tile::SubMatrix { k0: 1, k_len: 2, k_padded: 32, n0: 3, n_len: 4, n_padded: 64 };
    let part = Part::new(tiles, 5, 8192);
    assert_eq!(part, Part { sub: sub(1, 2, 32, 3, 4, 64), chunk: 5, offset: 8192 });
    assert_eq!((part.sub.len(), part.end()), (tiles.bytes(), 8192 + 2048));
    assert_eq!(orkpack::tile::SubMatrix::from(SubMatrix::from(tiles)), tiles);
}

#[test]
fn what_is_no_model_is_refused_clearly() {
    let (sample, folder) = (Sample::default(), folder());
    let thin = sample.write(&Contents { thin: true, ..sample.contents() }).done;
    let foreign = [&numbers(100, 1)[..], b"ORKPK01\0"].concat();
    let mut cut = sample.pack();
    cut.pop();
    let cases: [(&[u8], &str); 5] = [
        (b"", "file is empty"),
        (b"\x7fELF", "neither a GGUF nor a pack: begins with `\\x7fELF`"),
        (&thin, "a thin pack"),
        (&foreign, "ends with `ORKPK01`"),
        (&cut, "it was cut"),
    ];
    for (bytes, says) in cases {
        let path = folder.path().join("model");
        fs::write(&path, bytes).unwrap();
        let error = source::open(&path, Io::Map, &Limits::default()).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert!(error.hint().is_some(), "{error}");
    }
    assert!(matches!(source::open(folder.path(), Io::Map, &Limits::default()), Err(OpenError::NoModel)));
}

#[test]
fn a_table_that_differs_from_its_header_is_refused() {
    let pack = Sample::default().pack();
    let model = |bytes: Vec<u8>| PackedModel::new(Pack::from_bytes("", bytes).unwrap(), &Limits::default());
    let check = |bytes: &[u8]| source::check_packed(&open(bytes).unwrap(), &Limits::default());
    check(&pack).unwrap();
    let turned = edit_index(&pack, |index| index.tensors[2].dims = vec![36, 40, 2]);
    assert!(matches!(check(&turned), Err(OpenError::Table { number: 2, .. })));
    let error = model(turned).unwrap_err().to_string();
    assert!(error.contains("tensor 2 is `blk.0.ffn_gate_exps.weight` of type 1, [36, 40, 2]"), "{error}");
    let renamed = edit_index(&pack, |index| {
        let section = index.tensors[0].section.unwrap() as usize;
        index.tensors[0].name = "other".into();
        index.sections[section].name = "other".into();
    });
    assert!(matches!(model(renamed), Err(OpenError::Table { number: 0, .. })));
    let garbled = edit_sections(&pack, |bytes, index| bytes[index.sections[0].offset as usize + 8] ^= 0xff);
    assert!(matches!(model(garbled), Err(OpenError::Gguf(_))), "a header in a pack is as hostile as any");
}

/// A real file's directory and gaps go through as well as the small one's.
#[test]
fn a_reference_model_comes_back_byte_for_byte() {
    let path = super::support::fixture("models/reference/tiny-qwen3moe-q4_0.gguf");
    let file = GgufFile::open(&path, Io::Map, &Limits::default()).unwrap();
    let header_len = file.header().len() as u64;
    let sample = Sample::default();
    let contents = Contents {
        files: vec![FileContents::new(&path, file.file(), header_len, file.tensors(), 0).unwrap()],
        tensors: file.tensors(),
        chunks: Vec::new(),
        matrices: Vec::new(),
        cuts: Vec::new(),
        ..sample.contents()
    };
    let mut writer = Writer::in_memory(&contents).unwrap();
    for tensor in file.tensors() {
        writer.push_tensor(file.bytes(tensor.place).unwrap()).unwrap();
    }
    let pack = Pack::from_bytes("", writer.finish().unwrap().done).unwrap();
    assert!(verify::verify(&pack, verify::Mode::Full, &|_| {}).is_ok());
    let mut out = Vec::new();
    pack.write_gguf(0, &mut out).unwrap();
    assert!(out == file.file()[..]);
    PackedModel::new(pack, &Limits::default()).unwrap();
}

/// What a pack calls a file can be written in any folder and shown on any terminal.
#[test]
fn names_of_files_are_kept_as_plain_text() {
    use std::os::unix::ffi::OsStrExt;
    let sample = Sample::default();
    let long = "x".repeat(300);
    let cases: [(&[u8], &str); 6] = [
        (b"a/b/model.gguf", "model.gguf"),
        (b"a\n\x1b[31m.gguf", "a__[31m.gguf"),
        (b"\xffa.gguf", "\u{fffd}a.gguf"),
        ("Ж 模型.gguf".as_bytes(), "Ж 模型.gguf"),
        (b"a/..", "model.gguf"),
        (long.as_bytes(), &long[..255]),
    ];
    for (path, name) in cases {
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        let (header, tensors) = (sample.header.data_offset, &sample.header.tensors);
        let file = FileContents::new(path, &sample.gguf, header, tensors, 0).unwrap();
        assert_eq!(file.name, name);
        let contents = Contents { files: vec![file], ..sample.contents() };
        assert_eq!(open(&sample.write(&contents).done).unwrap().files()[0].name, name);
    }
}
