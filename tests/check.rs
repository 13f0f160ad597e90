//! A pack held to a model (`verify --against`), a damaged one made whole again (`repair`), and what is no pack.

use std::fs;
use std::path::{Path, PathBuf};

use orkpack::bytes::{Io, Limits};
use orkpack::check::{self, Against, Repaired};
use orkpack::interop::{PriorError, PriorPack};
use orkpack::pack::verify::{Mode, verify};
use orkpack::pack::{Existing, Index, Kind, Pack};
use orkpack::progress::Silent;
use orkpack::tensor::{Dtype, Value};
use serde_json::Value as Json;

use super::verify::prior_container;
use crate::support::gguf_builder::{GgufBuilder, MoeSpec, text, tiny_moe, tiny_moe_builder};
use crate::support::models::{TOKENS, calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::packs::{edit_index, edit_sections, index_of};
use crate::support::schema;

/// Less than all experts of the model, in more than one chunk's worth of matrices.
const SOME: u64 = 3 << 20;

fn spec() -> MoeSpec {
    MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() }
}

/// A model and its pack, fat or thin.
fn packed(folder: &Path, thin: bool) -> (PathBuf, PathBuf) {
    let model = model_in(folder, &tiny_moe(&spec()));
    calibrate_beside(&model, &TOKENS);
    let mut request = request(&model, hits(SOME));
    request.thin = thin;
    (model, convert(request).unwrap().1.output)
}

fn against(pack: &Path, model: &Path) -> Against {
    let pack = Pack::open(pack, Io::Map).unwrap();
    let opened = orkpack::source::open(model, Io::Map, &Limits::default()).unwrap();
    check::against(&pack, opened.source().as_ref(), &|_| ()).unwrap()
}

fn run(folder: &Path, words: &[&str]) -> (i32, String, String) {
    let output = assert_cmd::Command::new(env!("CARGO_BIN_EXE_orkpack"))
        .current_dir(folder)
        .args(words)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn first(index: &Index, kind: Kind) -> usize {
    index.sections.iter().find(|section| section.kind == kind && section.len > 0).unwrap().offset as usize
}

#[test]
fn case_i1_a_pack_is_what_its_model_gives_whatever_became_of_the_metadata() {
    let folder = folder();
    for thin in [false, true] {
        let (model, pack) = packed(folder.path(), thin);
        let n = Pack::open(&pack, Io::Map).unwrap().placements().len() as u64;
        let same = against(&pack, &model);
        assert!(n > 0 && same.notes.is_empty() && same.findings.is_empty());
        assert_eq!((same.n_matrices, same.n_tensors), (n, 27));
        // The same weights under other metadata: said, and no fault.
        let other = tiny_moe_builder(&spec()).text("general.license", "none");
        let edited = folder.path().join("edited.gguf");
        fs::write(&edited, rename(other).build()).unwrap();
        let same = against(&pack, &edited);
        assert_eq!(
            same.notes,
            [
                "metadata key `general.license` was not there when the pack was made",
                "metadata key `general.name` has another value than when the pack was made"
            ]
        );
        assert!(same.findings.is_empty() && same.n_matrices == n);
        let (code, out, _) = run(folder.path(), &["verify", "model.orkpack", "--against", "edited.gguf"]);
        assert_eq!(code, 0, "{out}");
        let says = format!(
            "against edited.gguf: every tensor is its own, and {n} int8 matrices are what its weights give"
        );
        assert!(out.contains(&says) && out.contains("note: metadata key `general.name`"), "{out}");
        fs::remove_file(pack).unwrap();
    }
}

fn rename(mut builder: GgufBuilder) -> GgufBuilder {
    let place = builder.entries.iter().position(|entry| entry[8..].starts_with(b"general.name")).unwrap();
    let named = GgufBuilder::new().kv("general.name", text("another"));
    builder.entries[place] = named.entries[0].clone();
    builder
}

#[test]
fn a_pack_with_right_digests_and_other_numbers_is_found_out() {
    let folder = folder();
    let (model, pack) = packed(folder.path(), false);
    let whole = fs::read(&pack).unwrap();
    let index = index_of(&whole);
    let name = index.placements[0].matrix;
    let write = |bytes: &[u8]| fs::write(&pack, bytes).unwrap();

    // Codes: one more or less, still a code.
    let forged = edit_sections(&whole, |bytes, index| {
        let byte = &mut bytes[first(index, Kind::Chunk) + 33];
        *byte = if *byte == 1 { 2 } else { 1 };
    });
    write(&forged);
    assert!(
        verify(&Pack::open(&pack, Io::Map).unwrap(), Mode::Full, &|_| ()).is_ok(),
        "by its digests it is sound"
    );
    let findings = against(&pack, &model).findings;
    assert_eq!(findings.len(), 1);
    assert!(findings[0].starts_with(&format!("{name}: code at row 1, column 1 is ")), "{findings:?}");
    let (code, out, _) = run(folder.path(), &["verify", "model.orkpack", "--against", "model.gguf"]);
    assert!(
        code == 1 && out.contains("code at row 1, column 1") && out.contains("the model's weights give"),
        "{out}"
    );

    // A scale.
    let forged = edit_sections(&whole, |bytes, index| {
        let at = first(index, Kind::Scales) + 8;
        bytes[at..at + 4].copy_from_slice(&0.5f32.to_le_bytes());
    });
    write(&forged);
    let findings = against(&pack, &model).findings;
    assert!(
        matches!(&findings[..], [line] if line.starts_with(&format!("{name}: scale of row 2 is 0.5, "))),
        "{findings:?}"
    );

    // Another expert's codes under this one's name.
    let swapped = edit_index(&whole, |index| {
        let (a, b) = (index.placements[0].matrix, index.placements[3].matrix);
        (index.placements[0].matrix, index.placements[3].matrix) = (b, a);
    });
    write(&swapped);
    assert_eq!(against(&pack, &model).findings.len(), 4, "codes and scales of both");
}

#[test]
fn another_model_is_named_by_tensor_and_expert() {
    let folder = folder();
    let (_, pack) = packed(folder.path(), false);
    let other = |edit: &dyn Fn(&mut GgufBuilder)| {
        let mut builder = tiny_moe_builder(&spec());
        edit(&mut builder);
        let path = folder.path().join("other.gguf");
        fs::write(&path, builder.build()).unwrap();
        against(&pack, &path)
    };
    let find = |builder: &mut GgufBuilder, name: &str| {
        builder.tensors.iter().position(|tensor| tensor.name == name.as_bytes()).unwrap()
    };
    let flipped = other(&|builder| {
        let at = find(builder, "blk.1.ffn_up_exps.weight");
        let data = &mut builder.tensors[at].data;
        let n = data.len();
        data[n / 8 * 5 + 9] ^= 1;
    });
    assert!(
        matches!(&flipped.findings[..], [line] if line.starts_with("tensor `blk.1.ffn_up_exps.weight`, expert 5, is another in the model")),
        "{:?}",
        flipped.findings
    );
    assert_eq!(flipped.n_matrices, 0, "what follows from other weights is not listed again");
    let gone = other(&|builder| {
        let at = find(builder, "output.weight");
        builder.tensors.remove(at);
    });
    assert_eq!(gone.findings, ["tensor `output.weight` is not in the model"]);
    let more = other(&|builder| *builder = builder.clone().tensor("x.more", Dtype::F32, &[1], vec![0; 4]));
    assert_eq!(more.findings, ["tensor `x.more` of the model is not in the pack"]);
    let narrow = other(&|builder| {
        let at = find(builder, "output_norm.weight");
        builder.tensors[at].dims = vec![128];
        builder.tensors[at].data.truncate(512);
    });
    assert_eq!(
        narrow.findings,
        ["tensor `output_norm.weight` is F32 [128] in the model, expected F32 [256]"]
    );
}

#[test]
fn case_i6_name_place_and_date_do_not_matter() {
    let folder = folder();
    let (model, pack) = packed(folder.path(), false);
    let far = folder.path().join("other folder");
    fs::create_dir(&far).unwrap();
    let (moved, renamed) = (far.join("b.bin"), far.join("m.gguf"));
    fs::rename(pack, &moved).unwrap();
    fs::rename(model, &renamed).unwrap();
    let file = fs::File::options().write(true).open(&moved).unwrap();
    // Even seconds, long ago, as a FAT file system would have it.
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(315_532_800)).unwrap();
    let (code, out, err) = run(&far, &["verify", "b.bin", "--against", "m.gguf"]);
    assert_eq!(code, 0, "{out}{err}");
}

// ---- repair

fn repair(pack: &Path, output: &Path) -> Repaired {
    let existing = if pack == output { Existing::Replace } else { Existing::Keep };
    check::repair(pack, None, output, existing, &mut Silent).unwrap()
}

/// The pack with these bytes of it changed.
fn damage(pack: &Path, whole: &[u8], at: &[usize]) {
    let mut bytes = whole.to_vec();
    at.iter().for_each(|at| bytes[*at] ^= 0x55);
    fs::write(pack, bytes).unwrap();
}

#[test]
fn what_a_disk_took_of_the_npu_area_is_made_again_byte_for_byte() {
    for thin in [false, true] {
        let folder = folder();
        let (_, pack) = packed(folder.path(), thin);
        let whole = fs::read(&pack).unwrap();
        let index = index_of(&whole);
        let (chunk, scales) = (first(&index, Kind::Chunk), first(&index, Kind::Scales));
        assert_eq!(repair(&pack, &pack).rebuilt, [""; 0], "nothing is wrong yet");

        let out = folder.path().join("whole.orkpack");
        damage(&pack, &whole, &[chunk, chunk + 5000, scales + 1]);
        let repaired = repair(&pack, &out);
        assert_eq!(repaired.rebuilt, ["chunk `0`", "scales `0`"]);
        assert!(repaired.refused.is_empty() && fs::read(&out).unwrap() == whole);
        assert!(fs::read(&pack).unwrap() != whole, "the damaged one is left as it was");
        // And in its own place, padding between sections too.
        let gap = index.sections.iter().find(|section| section.len % 4096 != 0).unwrap();
        damage(&pack, &whole, &[scales, gap.end() as usize]);
        let (code, text, _) = run(folder.path(), &["repair", "model.orkpack"]);
        assert!(
            code == 0 && text.contains("scales `0` was made again") && text.contains("1 run of padding"),
            "{text}"
        );
        assert!(fs::read(&pack).unwrap() == whole);
        assert!(!folder.path().join("model.orkpack.partial").exists());
    }
}

#[test]
fn a_pack_that_cannot_be_made_whole_stays_as_it_is() {
    let folder = folder();
    let (_, pack) = packed(folder.path(), false);
    let whole = fs::read(&pack).unwrap();
    let index = index_of(&whole);
    let out = folder.path().join("out.orkpack");
    // Its source rows are damaged too, or anything else that cannot be derived.
    for kind in [Kind::Tensor, Kind::Header, Kind::Plan, Kind::Profile, Kind::Statistics] {
        damage(&pack, &whole, &[first(&index, Kind::Chunk), first(&index, kind)]);
        let before = fs::read(&pack).unwrap();
        let repaired = repair(&pack, &out);
        assert!(
            matches!(&repaired.refused[..], [line] if line.starts_with(&format!("{kind} `"))),
            "{:?}",
            repaired.refused
        );
        assert!(!out.exists() && fs::read(&pack).unwrap() == before);
        let (code, text, _) = run(folder.path(), &["repair", "model.orkpack", "--json"]);
        let document: Json = serde_json::from_str(&text).unwrap();
        schema::check(&schema::load("repair.schema.json"), &document).unwrap();
        assert!(code == 1 && document["output"].is_null() && document["ok"] == false);
    }
    // Its header.
    damage(&pack, &whole, &[100]);
    let (code, _, err) = run(folder.path(), &["repair", "model.orkpack"]);
    assert!(code == 2 && err.contains("header at byte 0: digest is"), "{err}");
    // Codes that never came from these rows: their digest is not what the rows give.
    let forged = edit_sections(&whole, |bytes, index| bytes[first(index, Kind::Chunk)] ^= 1);
    damage(&pack, &forged, &[first(&index, Kind::Chunk) + 1]);
    let repaired = repair(&pack, &out);
    assert!(
        matches!(&repaired.refused[..], [line] if line.contains("is not what was written")),
        "{:?}",
        repaired.refused
    );
    assert!(!out.exists() && !folder.path().join("out.orkpack.partial").exists());
}

#[test]
fn repair_overwrites_nothing_unasked() {
    let folder = folder();
    let (model, pack) = packed(folder.path(), true);
    let whole = fs::read(&pack).unwrap();
    damage(&pack, &whole, &[first(&index_of(&whole), Kind::Chunk)]);
    let source = fs::read(&model).unwrap();
    let (code, _, err) = run(
        folder.path(),
        &["repair", "model.orkpack", "--model", "model.gguf", "-o", "./model.gguf", "--force"],
    );
    assert!(code == 2 && err.contains("is the input itself"), "{err}");
    fs::write(folder.path().join("there"), "x").unwrap();
    let (code, _, err) = run(folder.path(), &["repair", "model.orkpack", "-o", "there"]);
    assert!(code == 2 && err.contains("exists already"), "{err}");
    assert!(fs::read(&model).unwrap() == source && fs::read(folder.path().join("there")).unwrap() == b"x");
    // A thin pack whose GGUF is elsewhere.
    fs::rename(&model, folder.path().join("elsewhere.gguf")).unwrap();
    let (code, _, err) = run(folder.path(), &["repair", "model.orkpack"]);
    assert!(code == 2 && err.contains("model.gguf"), "{err}");
    let (code, ..) = run(folder.path(), &["repair", "model.orkpack", "--model", "elsewhere.gguf"]);
    assert!(code == 0 && fs::read(&pack).unwrap() == whole);
}

// ---- what is no pack

#[test]
fn case_b14_a_file_that_is_no_pack_is_told_from_one_that_is_damaged() {
    let folder = folder();
    let (_, pack) = packed(folder.path(), false);
    let whole = fs::read(&pack).unwrap();
    let magic = {
        let mut bytes = whole.clone();
        bytes[3] ^= 1;
        bytes
    };
    let expert = {
        let mut bytes = whole.clone();
        let index = index_of(&whole);
        let tensor = index.sections.iter().find(|s| s.name == "blk.1.ffn_down_exps.weight").unwrap();
        bytes[(tensor.offset + tensor.part_len() * 6 + 1) as usize] ^= 1;
        bytes
    };
    for (bytes, code, says) in [
        (Vec::new(), 2, "file is empty"),
        (b"PK\x03\x04 some archive".to_vec(), 2, "not a pack"),
        ([b"junk", &whole[..]].concat(), 2, "not a pack"),
        (whole[..5000].to_vec(), 1, "it was cut"),
        (whole[..100].to_vec(), 1, "it was cut"),
        ([&whole[..], b"x"].concat(), 1, "1 foreign bytes follow"),
        ([&whole[..], &whole[..]].concat(), 1, "foreign bytes follow"),
        (magic, 1, "header at byte 0: magic is"),
        (expert, 1, "tensor `blk.1.ffn_down_exps.weight`, expert 6, at byte"),
    ] {
        fs::write(&pack, &bytes).unwrap();
        let (found, out, err) = run(folder.path(), &["verify", "model.orkpack"]);
        assert!(found == code && (out.clone() + &err).contains(says), "{says}: {found} {out}{err}");
        assert!(fs::read(&pack).unwrap() == bytes, "the file stays");
    }
    // One of them does not keep the others from being checked.
    fs::write(&pack, &whole).unwrap();
    fs::write(folder.path().join("a.orkpack"), "text").unwrap();
    let (code, out, err) = run(folder.path(), &["verify"]);
    assert!(
        code == 2 && out.starts_with("model.orkpack: whole") && err.contains("a.orkpack: not a pack"),
        "{out}{err}"
    );
}

#[test]
fn containers_of_the_prior_system_are_walked_and_what_they_lack_is_said() {
    for version in 1..=6 {
        let folder = folder();
        fs::write(folder.path().join("old.orkpack"), prior_container(version)).unwrap();
        let (code, out, _) = run(folder.path(), &["verify", "old.orkpack"]);
        assert_eq!(code, 2, "{out}");
        let says = format!("version {version}, 2 matrices");
        for says in [&says, "ORKPK01", "no checksum", "no identity of the model", "no source tensors"] {
            assert!(out.contains(says), "{says}: {out}");
        }
        let read = PriorPack::read(&prior_container(version)).unwrap();
        assert_eq!(read.entries.len(), if version < 6 { 2 } else { 0 });
        assert!(read.findings.is_empty(), "{:?}", read.findings);
        if version < 6 {
            let (name, second) = (&read.entries[0].name, read.entries[1].second_len);
            assert_eq!(
                (name.as_str(), second),
                ("blk.0.ffn_up_exps.weight#0", if version < 4 { 0 } else { 1024 })
            );
        }
        let (_, out, _) = run(folder.path(), &["verify", "old.orkpack", "--json"]);
        let document: Json = serde_json::from_str(&out).unwrap();
        schema::check(&schema::load("verify.schema.json"), &document).unwrap();
        assert_eq!(document["ok"], false);
    }
}

#[test]
fn what_a_prior_container_claims_is_not_believed() {
    let with = |version: u32, back: usize, bytes: &[u8]| {
        let mut file = prior_container(version);
        let at = file.len() - back;
        file[at..at + bytes.len()].copy_from_slice(bytes);
        PriorPack::read(&file)
    };
    let refused = |result: Result<PriorPack, PriorError>| result.unwrap_err().to_string();
    assert_eq!(
        refused(with(2, 24, &[0xff; 8])),
        "the footer at byte 3455 names 2 entries at byte 18446744073709551615, which is no place for them"
    );
    assert!(refused(with(2, 16, &[0xff; 4])).contains("names 4294967295 entries at byte 3328"));
    assert!(
        refused(with(2, 16, &[1, 0, 0, 0]))
            .contains("the index ends at byte 3398, but the footer begins at byte 3455")
    );
    assert!(refused(with(2, 12, &[9])).contains("has version 9, expected 1, 2, 5 or 6"));
    assert!(
        refused(with(4, 16 + 4, &[9])).contains("has version 9, expected 3 or 4")
            || refused(with(4, 20, &[9])).contains("no place")
    );
    assert_eq!(PriorPack::read(b"ORKPK01\0"), Err(PriorError::NoMagic));
    assert_eq!(PriorPack::read(&[]), Err(PriorError::NoMagic));
    // An entry whose name is longer than the index.
    let mut file = prior_container(3);
    file[3328..3332].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(
        refused(PriorPack::read(&file))
            .contains("the index ends inside entry 0: 4294967295 bytes wanted at byte 3332")
    );
    // Ranges, shapes and types are findings: the walk goes on.
    let mut file = prior_container(3);
    let entry = 3328 + 4 + "blk.0.ffn_up_exps.weight#0".len();
    file[entry + 16..entry + 24].copy_from_slice(&u64::MAX.to_le_bytes());
    file[entry..entry + 4].copy_from_slice(&4096u32.to_le_bytes());
    let findings = PriorPack::read(&file).unwrap().findings;
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(
        findings[0].contains("are not before the index at 3328")
            && findings[1].contains("4096 inputs and 32 outputs need 131072")
    );
}

/// Kilobytes of the file that this process has mapped in memory.
fn resident_kib(file: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut of_file = false;
    let mut kib = 0;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if !first.ends_with(':') {
            of_file = line.ends_with(file.to_str().unwrap());
        } else if of_file && first == "Rss:" {
            kib += words.next().unwrap().parse::<u64>().unwrap();
        }
    }
    kib
}

#[test]
fn case_b15_quick_reads_header_and_index_of_20_gigabytes() {
    use orkpack::gguf::Header as GgufHeader;
    use orkpack::pack::layout::Header;
    use orkpack::pack::{Contents, FileContents};
    use std::os::unix::fs::FileExt;

    // A tensor of 20 GB that is nothing but holes.
    let n_expert = 4096u64;
    let gguf = GgufBuilder::new().kv("x", Value::U8(1)).tensor("a", Dtype::F32, &[1, 1], vec![0; 4]).build();
    let header = GgufHeader::parse(&gguf, gguf.len() as u64, &Limits::default()).unwrap();
    let mut tensors = header.tensors.clone();
    tensors[0].dims = vec![1 << 10, 1220, n_expert];
    tensors[0].place.len = 4 * tensors[0].n_elements();
    let len = header.data_offset + tensors[0].place.len;
    let sample = crate::support::packs::Sample::small();
    let contents = Contents {
        files: vec![FileContents {
            name: "m.gguf".into(),
            len,
            header: &gguf[..header.data_offset as usize],
            residue: Vec::new(),
        }],
        tensors: &tensors,
        chunks: Vec::new(),
        matrices: Vec::new(),
        ..sample.small_contents()
    };
    let layout = contents.layout().unwrap();
    assert!(layout.file_len > 20_000_000_000);
    let index = layout.index.encode().unwrap();
    let folder = folder();
    let path = folder.path().join("huge.orkpack");
    let file = fs::File::create(&path).unwrap();
    file.write_all_at(&Header::new(&index, layout.file_len).encode(), 0).unwrap();
    file.write_all_at(&index, 4096).unwrap();
    file.set_len(layout.file_len).unwrap();
    let pack = Pack::open(&path, Io::Map).unwrap();
    let report = verify(&pack, Mode::Quick, &|_| ());
    assert!(report.is_ok() && report.bytes_checked() == 0);
    // Header and index are 260 KiB; the system maps some pages around what is touched.
    let kib = resident_kib(&path);
    let most = (4096 + index.len() as u64) / 1024 + 128;
    assert!(kib > 0 && kib <= most, "{kib} KiB of the pack were touched, at most {most} expected");
    let (code, out, _) = run(folder.path(), &["verify", "--quick", "huge.orkpack"]);
    assert!(code == 0 && out.contains("header and index are whole"), "{out}");
}
