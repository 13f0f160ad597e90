//! From a GGUF to a pack: whole, exact, refused with one line, the same bytes every time.

use std::fs;
use std::path::Path;

use orkpack::convert::{Request, prepare};
use orkpack::pack::verify::{Mode, verify};
use orkpack::pack::{Existing, Pack};
use orkpack::progress::{Progress, Silent, Unit};
use orkpack::quantize;
use orkpack::tensor::{Dtype, MatrixView, TensorSource};
use orkpack::tile::cut;

use crate::support::gguf_builder::{MoeSpec, hollow_moe, shards, tiny_moe, tiny_moe_builder};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, profile, request};
use crate::support::program;
use crate::support::watch::peak_anonymous;

const ALL: u64 = 1 << 30;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_pack_holds_every_source_byte_and_verifies() {
    for (arch, dtype) in [("qwen3moe", Dtype::F32), ("olmoe", Dtype::Q8_0), ("qwen3moe", Dtype::Q4_K)] {
        let folder = folder();
        let bytes = tiny_moe(&MoeSpec { arch, dtype, ..MoeSpec::default() });
        let model = model_in(folder.path(), &bytes);
        let (prepared, outcome) = convert(request(&model, hits(ALL))).unwrap();
        assert_eq!(names(folder.path()), ["model.gguf", "model.orkpack", "model.routing.json"]);
        let pack = Pack::open(&outcome.output, Default::default()).unwrap();
        assert_eq!(pack.root(), outcome.root);
        assert!(verify(&pack, Mode::Full, &|_| ()).is_ok());
        assert_eq!(pack.placements().len(), 2 * 8 * 3);
        let mut back = Vec::new();
        pack.write_gguf(0, &mut back).unwrap();
        assert!(back == bytes, "the GGUF made again from the pack");
        let sections: u64 = pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).len() as u64).sum();
        assert_eq!(sections, prepared.plan.footprint.weight_bytes, "planned bytes and the chunks' bytes");
    }
}

/// Reads every placed code with the layout's formula, straight from the pack's bytes, and holds it to the source.
#[test]
fn every_code_of_the_npu_area_is_that_of_the_source_row() {
    let folder = folder();
    let spec = MoeSpec { n_embd: 256, n_ff: 320, dtype: Dtype::F32, ..MoeSpec::default() };
    let model = model_in(folder.path(), &tiny_moe(&spec));
    let (_, outcome) = convert(request(&model, hits(ALL))).unwrap();
    let pack = Pack::open(&outcome.output, Default::default()).unwrap();
    let source = orkpack::gguf::GgufFile::open(&model, Default::default(), &Default::default()).unwrap();
    let mut seen = 0;
    for placement in pack.placements() {
        let id = placement.matrix.expert().unwrap();
        let name = format!("blk.{}.ffn_{}_exps.weight", id.layer, id.projection.name());
        let tensor = source.find(&name).unwrap();
        let (n_in, n_out) = (tensor.n_in() as usize, tensor.n_out() as usize);
        let bytes = source.bytes(tensor.place).unwrap();
        let expert = &bytes[id.expert.index() * n_in * n_out * 4..][..n_in * n_out * 4];
        let rows: Vec<f32> =
            expert.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let int8 = quantize::per_channel(MatrixView::new(&rows, n_out, n_in).unwrap()).unwrap();
        assert_eq!(pack.scales(placement).collect::<Vec<_>>(), int8.scales);
        let expected_parts = cut(n_in as u64, n_out as u64, &profile()).unwrap();
        assert_eq!(placement.parts.len(), expected_parts.len());
        for part in &placement.parts {
            let tiles = pack.part_bytes(part);
            let sub = &part.sub;
            for n in 0..sub.n_padded as usize {
                for k in 0..sub.k_padded as usize {
                    let at = n / 32 * 32 * sub.k_padded as usize + k / 32 * 1024 + n % 32 * 32 + k % 32;
                    let inside = k < sub.k_len as usize && n < sub.n_len as usize;
                    let row = sub.n0 as usize + n;
                    let expected = if inside { int8.codes[row * n_in + sub.k0 as usize + k] } else { 0 };
                    assert_eq!(tiles[at] as i8, expected, "{id} k {k} n {n}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen >= 2 * 8 * 3 * 256 * 320, "{seen} codes compared");
}

#[test]
fn equal_inputs_give_equal_packs_at_any_thread_count() {
    let bytes = tiny_moe(&MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() });
    let mut packs = Vec::new();
    for n_threads in [1, 2, 8] {
        let folder = folder();
        let model = model_in(folder.path(), &bytes);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        let mut request = request(&model, hits(2 << 20));
        request.n_threads = n_threads;
        let outcome = pool.install(|| convert(request)).unwrap().1;
        packs.push((outcome.root, fs::read(outcome.output).unwrap()));
    }
    assert!(packs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_pack_is_a_source_like_its_gguf() {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    let (_, first) = convert(request(&model, hits(1 << 20))).unwrap();
    let mut again = request(&first.output, hits(1 << 20));
    again.output = folder.path().join("again.orkpack");
    let (_, second) = convert(again).unwrap();
    assert_eq!(fs::read(first.output).unwrap(), fs::read(second.output).unwrap());
}

#[test]
fn a_dry_run_knows_the_size_to_the_byte_and_writes_nothing() {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    let mut dry = request(&model, hits(1 << 20));
    dry.keep_statistics = false;
    let size = prepare(dry, &mut Silent).unwrap().layout().unwrap().file_len;
    assert_eq!(names(folder.path()), ["model.gguf"]);
    let (_, outcome) = convert(request(&model, hits(1 << 20))).unwrap();
    assert_eq!(fs::metadata(outcome.output).unwrap().len(), size);
}

#[test]
fn a_plan_file_decides_what_is_packed() {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    let (prepared, first) = convert(request(&model, hits(1 << 20))).unwrap();
    let plan = folder.path().join("made.plan.json");
    fs::write(&plan, prepared.plan.to_json().unwrap()).unwrap();
    let mut by_plan = request(&model, hits(0));
    by_plan.plan = Some(plan.clone());
    by_plan.output = folder.path().join("by-plan.orkpack");
    let (_, second) = convert(by_plan.clone()).unwrap();
    let placed = |path: &Path| Pack::open(path, Default::default()).unwrap().placements().to_vec();
    assert_eq!(placed(&first.output), placed(&second.output));
    let text = fs::read_to_string(&plan).unwrap().replacen("\"offset\":65536", "\"offset\":65540", 1);
    fs::write(&plan, text).unwrap();
    by_plan.existing = Existing::Replace;
    let refused = prepare(by_plan, &mut Silent).err().unwrap().to_string();
    assert!(refused.starts_with(plan.to_str().unwrap()), "{refused}");
}

/// Asks to stop once the named stage has advanced.
struct StopIn {
    stage: &'static str,
    stop: bool,
}

impl Progress for StopIn {
    fn begin(&mut self, what: &str, _: u64, _: Unit) {
        self.stop |= what == self.stage;
    }
    fn advance(&mut self, _: u64) {}
    fn end(&mut self) {}
    fn note(&mut self, _: &str) {}
    fn is_interrupted(&self) -> bool {
        self.stop
    }
}

#[test]
fn an_interrupted_conversion_leaves_no_pack() {
    for (stage, left) in
        [("calibrating", vec!["model.gguf"]), ("packing", vec!["model.gguf", "model.routing.json"])]
    {
        let folder = folder();
        let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
        let mut stop = StopIn { stage, stop: false };
        let result =
            prepare(request(&model, hits(ALL)), &mut stop).and_then(|p| p.write(&mut stop).map(|_| ()));
        assert_eq!(result.unwrap_err().exit_code(), 130, "{stage}");
        assert_eq!(names(folder.path()), left, "{stage}");
    }
}

#[test]
fn bad_input_is_one_line_and_leaves_nothing() {
    struct Case {
        what: &'static str,
        bytes: Vec<u8>,
        says: &'static str,
    }
    let whole = tiny_moe(&MoeSpec::default());
    let dense = tiny_moe_builder(&MoeSpec::default());
    let dense = {
        let mut dense = dense;
        dense.tensors.retain(|tensor| !String::from_utf8_lossy(&tensor.name).contains("_exps"));
        dense.build()
    };
    let nan = {
        let mut nan = tiny_moe_builder(&MoeSpec::default());
        let tensor =
            nan.tensors.iter_mut().find(|tensor| tensor.name == b"blk.1.ffn_up_exps.weight").unwrap();
        tensor.data[4 * (5 * 256 * 256 + 2 * 256 + 9)..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        nan.build()
    };
    let unknown = whole.clone();
    let unknown = {
        let at = unknown.windows(8).position(|window| window == b"qwen3moe").unwrap();
        let mut unknown = unknown;
        unknown[at..at + 8].copy_from_slice(b"qwen9moe");
        unknown
    };
    let cases = [
        Case { what: "empty", bytes: Vec::new(), says: "file is empty" },
        Case { what: "not a GGUF", bytes: b"hello, world".to_vec(), says: "neither a GGUF nor a pack" },
        Case {
            what: "truncated",
            bytes: whole[..whole.len() - 1].to_vec(),
            says: "past the end of the file",
        },
        Case { what: "dense", bytes: dense, says: "this is a dense model of architecture qwen3moe" },
        Case { what: "unknown", bytes: unknown, says: "architecture `qwen9moe` is not supported" },
        Case { what: "NaN", bytes: nan, says: "is NaN or infinite" },
    ];
    for case in cases {
        let folder = folder();
        let model = model_in(folder.path(), &case.bytes);
        let error =
            convert(request(&model, hits(ALL))).err().unwrap_or_else(|| panic!("{} was accepted", case.what));
        let line = error.to_string();
        assert!(line.contains(case.says) && line.lines().count() == 1, "{}: {line}", case.what);
        assert!(line.starts_with(model.to_str().unwrap()), "{}: {line}", case.what);
        assert_eq!(error.exit_code(), 2, "{}", case.what);
        assert!(!names(folder.path()).iter().any(|name| name.contains("orkpack")), "{}", case.what);
        assert_eq!(fs::read(&model).unwrap(), case.bytes, "{}: the input", case.what);
    }
}

#[test]
fn nonfinite_weights_become_zero_only_when_asked() {
    let mut builder = tiny_moe_builder(&MoeSpec::default());
    // In the last rows of an expert that is then never called less: only the weights matter here.
    let tensor =
        builder.tensors.iter_mut().find(|tensor| tensor.name == b"blk.0.ffn_down_exps.weight").unwrap();
    let at = tensor.data.len() - 4;
    tensor.data[at..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let folder = folder();
    let model = model_in(folder.path(), &builder.build());
    let statistics = folder.path().join("model.routing.json");
    // Counted on the sound twin: a forward pass over the broken one may meet the infinity.
    let twin = crate::support::models::folder();
    let sound = model_in(twin.path(), &tiny_moe(&MoeSpec::default()));
    convert(request(&sound, hits(0))).unwrap();
    fs::copy(twin.path().join("model.routing.json"), &statistics).unwrap();
    let refused = convert(request(&model, hits(ALL))).err().unwrap().to_string();
    assert!(
        refused.ends_with("tensor `blk.0.ffn_down_exps.weight`, expert 7: weight 65535 is NaN or infinite"),
        "{refused}"
    );
    let mut allowed = request(&model, hits(ALL));
    allowed.allow_nonfinite = true;
    assert_eq!(convert(allowed).unwrap().1.n_clamped, 1);
}

#[test]
fn the_output_is_refused_where_it_would_cost_something() {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec::default()));
    let before = fs::read(&model).unwrap();
    let link = folder.path().join("link.gguf");
    fs::hard_link(&model, &link).unwrap();
    let soft = folder.path().join("soft.gguf");
    std::os::unix::fs::symlink(&model, &soft).unwrap();
    for output in [model.clone(), folder.path().join("./model.gguf"), link, soft] {
        let mut same = request(&model, hits(0));
        same.output = output;
        same.existing = Existing::Replace;
        let error = prepare(same, &mut Silent).err().unwrap();
        assert!(error.to_string().contains("is the input itself"), "{error}");
    }
    let taken = folder.path().join("model.orkpack");
    fs::write(&taken, b"precious").unwrap();
    let error = prepare(request(&model, hits(0)), &mut Silent).err().unwrap();
    assert!(error.to_string().contains("exists already; --force replaces it"), "{error}");
    assert_eq!((fs::read(&taken).unwrap(), fs::read(&model).unwrap()), (b"precious".to_vec(), before));
    let mut over = request(&model, hits(1 << 42));
    over.existing = Existing::Replace;
    let error = prepare(over, &mut Silent).err().unwrap();
    assert_eq!(error.exit_code(), 1, "{error}");
}

#[test]
fn a_gigabyte_is_converted_in_little_memory() {
    let folder = folder();
    let path = folder.path();
    let spec = MoeSpec {
        n_layer: 2,
        n_embd: 2048,
        n_ff: 1792,
        n_expert: 24,
        n_used: 2,
        n_head: 16,
        n_head_kv: 4,
        dtype: Dtype::F16,
        ..MoeSpec::default()
    };
    let len = hollow_moe(&spec, &path.join("model.gguf"));
    assert!(len > 1_000_000_000, "{len}");
    fs::write(path.join("prompt.txt"), "The model is converted once, and then it is run many times.")
        .unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_orkpack"));
    command.current_dir(path).args([
        "convert",
        "model.gguf",
        "--prompts",
        "prompt.txt",
        "--objective",
        "hits",
        "--quiet",
    ]);
    let (peak, code) = peak_anonymous(&mut command);
    assert_eq!(code, Some(0));
    let pack = Pack::open(&path.join("model.orkpack"), Default::default()).unwrap();
    let npu: u64 = pack.chunks().iter().map(|chunk| pack.chunk_bytes(chunk).len() as u64).sum();
    assert_eq!(npu, (2 * 24 * 11) << 20, "every expert has its copy, down padded to 2048");
    assert!(peak > 1 << 20 && peak < 300_000_000, "{peak} bytes of anonymous memory at the peak");
}

/// Keeps what is said.
#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn begin(&mut self, _: &str, _: u64, _: Unit) {}
    fn advance(&mut self, _: u64) {}
    fn end(&mut self) {}
    fn note(&mut self, line: &str) {
        self.0.push(line.to_owned());
    }
}

/// A pack planned again is the pack that its GGUF makes of the plan; where tensors had to be copied it is said.
#[test]
fn a_pack_is_planned_again_without_its_gguf() {
    let folder = folder();
    let path = folder.path();
    let model = model_in(path, &tiny_moe(&MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() }));
    calibrate_beside(&model, &[1, 2, 3, 4]);
    let (prepared, first) = convert(request(&model, hits(1 << 19))).unwrap();
    let plan = path.join("small.plan.json");
    fs::write(&plan, prepared.plan.to_json().unwrap()).unwrap();
    let (_, big) =
        convert(Request { output: path.join("big.orkpack"), ..request(&model, hits(ALL)) }).unwrap();
    let by_plan = |model: &Path, name: &str| Request {
        plan: Some(plan.clone()),
        output: path.join(name),
        ..request(model, hits(0))
    };
    let (_, from_gguf) = convert(by_plan(&model, "gguf.orkpack")).unwrap();
    fs::remove_file(&model).unwrap();
    fs::remove_file(path.join("model.routing.json")).unwrap();
    let mut notes = Notes::default();
    let again = prepare(by_plan(&big.output, "pack.orkpack"), &mut notes).unwrap();
    let from_pack = again.write(&mut notes).unwrap();
    assert!(fs::read(&from_pack.output).unwrap() == fs::read(&from_gguf.output).unwrap());
    // Asked in another way: a whole file can be shared with another where a part of one can.
    let (one, other) = (fs::File::create(path.join("one")).unwrap(), fs::File::open(&big.output).unwrap());
    let shares = rustix::fs::ioctl_ficlone(&one, &other).is_ok();
    let said = notes.0.iter().filter(|line| line.contains("cannot share extents")).count();
    assert_eq!(said, usize::from(!shares), "{:?}", notes.0);
    // Without a plan the statistics are those of the pack: nothing is counted again.
    let small = Request { output: path.join("small.orkpack"), ..request(&big.output, hits(1 << 19)) };
    let (_, small) = convert(small).unwrap();
    assert!(fs::read(small.output).unwrap() == fs::read(first.output).unwrap());
}

#[test]
fn a_damaged_pack_is_not_handed_on() {
    let folder = folder();
    let path = folder.path();
    let model = model_in(path, &tiny_moe(&MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() }));
    calibrate_beside(&model, &[1, 2, 3, 4]);
    let (_, whole) = convert(request(&model, hits(0))).unwrap();
    let pack = Pack::open(&whole.output, Default::default()).unwrap();
    let section = pack.sections().iter().find(|section| section.name == "blk.1.ffn_up_exps.weight").unwrap();
    let mut bytes = fs::read(&whole.output).unwrap();
    bytes[section.end() as usize - 1] ^= 4;
    let broken = path.join("broken.orkpack");
    fs::write(&broken, bytes).unwrap();
    for thin in [false, true] {
        let again = Request { thin, output: path.join("again.orkpack"), ..request(&broken, hits(0)) };
        let error = convert(again).err().unwrap().to_string();
        assert!(error.contains("tensor `blk.1.ffn_up_exps.weight`, expert 7,"), "{error}");
        assert!(!names(path).iter().any(|name| name.starts_with("again")));
    }
}

/// Cut where the conversion would not have looked for long: behind the experts, and in the last file of a set.
#[test]
fn case_b2_a_cut_source_is_refused_before_anything_is_written() {
    let builder =
        tiny_moe_builder(&MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() });
    let whole = builder.build();
    let files: Vec<Vec<u8>> = shards(&builder, 2).iter().map(|file| file.build()).collect();
    let last = builder.tensors.last().unwrap().data.len();
    for cut in [1, last, last + 1000] {
        let folder = folder();
        let path = folder.path();
        let single = model_in(path, &whole[..whole.len() - cut]);
        fs::write(path.join("set-00001-of-00002.gguf"), &files[0]).unwrap();
        fs::write(path.join("set-00002-of-00002.gguf"), &files[1][..files[1].len() - cut]).unwrap();
        let before = names(path);
        for model in [single, path.join("set-00001-of-00002.gguf")] {
            let error = convert(request(&model, hits(0))).err().unwrap();
            assert!(error.to_string().contains("past the end of the file"), "{error}");
            assert_eq!((error.exit_code(), names(path)), (2, before.clone()));
        }
    }
}

/// A layout that is known is planned and packed with routing from elsewhere; nothing is guessed about how it would run.
#[test]
fn case_h13_an_unknown_architecture_is_told_what_is_supported() {
    let folder = folder();
    let path = folder.path();
    let spec = MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() };
    let known = tiny_moe(&spec);
    calibrate_beside(&model_in(path, &known), &[1, 2, 3, 4]);
    let renamed = |name: &[u8]| {
        let mut bytes = known.clone();
        while let Some(at) = bytes.windows(8).position(|window| window == b"qwen3moe") {
            bytes[at..at + 8].copy_from_slice(name);
        }
        bytes
    };
    let model = path.join("unknown.gguf");
    fs::write(&model, renamed(b"qwen9moe")).unwrap();
    let convert = |more: &[&str]| {
        let words = [&["convert", "unknown.gguf", "--objective", "hits"], more].concat();
        program::run(program::ORKPACK, path, &words)
    };
    let said = program::refused(&convert(&[]));
    assert!(said.contains("unknown.gguf: architecture `qwen9moe` is not supported"), "{said}");
    for family in ["deepseek2", "gpt-oss", "lfm2moe", "qwen3moe", "qwen3next"] {
        assert!(said.contains(family), "{said}");
    }
    let packed = convert(&["--routing", "model.routing.json", "--accept-foreign-statistics"]);
    program::done(&packed);
    let said = program::stderr(&packed);
    assert!(said.contains("architecture qwen9moe is not one that ork-run can run"), "{said}");
    program::done(&program::run(program::ORKPACK, path, &["verify", "unknown.orkpack"]));
    let run = program::run(program::ORK_RUN, path, &["unknown.orkpack", "--tokens", "1"]);
    assert!(program::refused(&run).contains("`qwen9moe` is not supported"));
    // A name may hold anything; a terminal gets none of it.
    fs::write(&model, renamed(b"a\x1b[31m\r\n")).unwrap();
    let refused = convert(&[]);
    assert!(!program::stderr(&refused).contains(['\u{1b}', '\r']), "{:?}", program::stderr(&refused));
    program::refused(&refused);
}
