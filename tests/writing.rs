//! Outputs that appear whole or not at all: full disks, killed processes, odd names, two at a time.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use orkpack::calibrate::Statistics;
use orkpack::tensor::Dtype;
use rustix::process::{Pid, Signal};

use crate::support::gguf_builder::{MoeSpec, hollow_moe, tiny_moe};
use crate::support::models::{TOKENS, calibrate_beside, folder, model_in};
use crate::support::program::{
    ORK_RUN, ORKPACK, behind, command, done, names, refused, run, stderr, wait_until,
};

fn small() -> MoeSpec {
    MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() }
}

/// `model.gguf`, and its routing beside it.
fn model(folder: &Path) {
    calibrate_beside(&model_in(folder, &tiny_moe(&small())), &TOKENS);
}

/// A model whose conversion takes a while, and its routing.
fn slow_model(folder: &Path) {
    let spec = MoeSpec { n_layer: 4, n_embd: 1024, n_ff: 1024, n_expert: 24, ..MoeSpec::default() };
    let path = folder.join("model.gguf");
    hollow_moe(&MoeSpec { dtype: Dtype::F16, ..spec }, &path);
    calibrate_beside(&path, &TOKENS[..4]);
}

fn signal(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).unwrap();
}

/// Sizes that a dry run announces: fat and thin.
fn announced(folder: &Path, model: &str) -> [u64; 2] {
    let text = done(&run(ORKPACK, folder, &["convert", model, "--dry-run", "--objective", "hits"]));
    let number = |text: &str| text.split_whitespace().last().unwrap().parse::<u64>().unwrap();
    let mut parts = text.split(" bytes (");
    [number(parts.next().unwrap()), number(parts.next().unwrap())]
}

#[test]
fn case_g1_a_full_disk_is_said_with_both_numbers_and_leaves_nothing() {
    let folder = folder();
    let path = folder.path();
    model(path);
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    let before = names(path);
    let [fat, _] = announced(path, "model.gguf");
    // A limit instead of a disk: between the length of what is small and that of the pack.
    let words = ["convert", "model.gguf", "--objective", "hits"];
    let said = refused(&behind("ulimit -f 100", ORKPACK, path, &words).output().unwrap());
    assert!(said.contains("no space: needs") && said.contains(&format!("({fat} bytes), free")), "{said}");
    assert_eq!(names(path), before);
    // Documents and logits know it too, where the limit would otherwise be a signal.
    for (binary, words) in [
        (ORKPACK, &["calibrate", "model.gguf", "-o", "x.routing.json", "--prompts", "prompt.txt"][..]),
        (ORKPACK, &["plan", "model.gguf", "-o", "x.plan.json"]),
        (ORK_RUN, &["model.gguf", "--tokens", "1", "-n", "1", "--dump-logits", "x.f32"]),
    ] {
        let said = refused(&behind("ulimit -f 1", binary, path, words).output().unwrap());
        assert!(said.contains("no space: needs"), "{words:?}: {said}");
        assert_eq!(names(path), before, "{words:?}");
    }
}

#[test]
fn case_g1_a_device_is_no_output_and_a_full_stdout_is_an_error() {
    let folder = folder();
    let path = folder.path();
    model(path);
    for force in [&[][..], &["--force"]] {
        let words = [&["convert", "model.gguf", "-o", "/dev/full"][..], force].concat();
        let said = refused(&run(ORKPACK, path, &words));
        assert!(said.contains("/dev/full"), "{said}");
    }
    assert!(fs::metadata("/dev/full").unwrap().file_type().is_char_device());
    let full = || Stdio::from(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    for (binary, words) in [
        (ORKPACK, &["inspect", "model.gguf"][..]),
        (ORKPACK, &["plan", "model.gguf", "--json"]),
        (ORKPACK, &["convert", "model.gguf", "--dry-run"]),
        (ORK_RUN, &["model.gguf", "--tokens", "1", "-n", "1"]),
    ] {
        let output = command(binary, path, words).stdout(full()).output().unwrap();
        assert!(refused(&output).contains("No space left"), "{words:?}");
    }
}

/// Numbers that look random and are the same in every run.
struct Moments(u64);

impl Moments {
    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[test]
fn case_g2_a_conversion_killed_at_any_moment_leaves_nothing_that_looks_finished() {
    let folder = folder();
    let path = folder.path();
    model_in(path, &tiny_moe(&MoeSpec { n_layer: 3, ..MoeSpec::default() }));
    fs::write(path.join("prompt.txt"), "The model is converted once, and run many times.\n".repeat(20))
        .unwrap();
    let words = ["convert", "model.gguf", "--prompts", "prompt.txt", "--objective", "hits"];
    let (pack, statistics) = (path.join("model.orkpack"), path.join("model.routing.json"));
    let began = Instant::now();
    done(&run(ORKPACK, path, &words));
    // Only to spread the moments over the work; nothing is asserted about time.
    let took = began.elapsed();
    let expected = (fs::read(&pack).unwrap(), fs::read(&statistics).unwrap());
    let whole = ["model.gguf", "model.orkpack", "model.routing.json", "prompt.txt"];
    assert_eq!(names(path), whole);
    let (mut moments, mut partials, mut finished) = (Moments(7), 0, 0);
    for moment in 0..100 {
        let _ = fs::remove_file(&pack);
        // Every other time the long part is done already.
        if moment % 2 == 0 {
            let _ = fs::remove_file(&statistics);
        }
        let mut child =
            command(ORKPACK, path, &words).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(took.mul_f64(1.1 * moments.next()));
        signal(&child, Signal::KILL);
        child.wait().unwrap();
        // Whatever bears a name is whole.
        match fs::read(&pack) {
            Ok(found) => {
                assert!(found == expected.0, "moment {moment}: a pack that is not whole");
                finished += 1;
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
        }
        if let Ok(found) = fs::read(&statistics) {
            assert!(found == expected.1, "moment {moment}: statistics that are not whole");
        }
        let left = names(path);
        let strangers: Vec<_> = left.iter().filter(|name| !whole.contains(&name.as_str())).collect();
        assert!(strangers.iter().all(|name| name.ends_with(".partial")), "{strangers:?}");
        partials += usize::from(!strangers.is_empty());
    }
    assert!(
        partials > 0 && finished < 100,
        "{partials} partial files, {finished} packs: the moments mean nothing"
    );
    let _ = fs::remove_file(&pack);
    done(&run(ORKPACK, path, &words));
    assert!((fs::read(&pack).unwrap(), fs::read(&statistics).unwrap()) == expected);
    assert_eq!(names(path), whole, "and what the dead left is gone");
}

#[test]
fn case_g2_what_was_counted_is_not_lost_with_the_conversion() {
    let folder = folder();
    let path = folder.path();
    slow_model(path);
    let words =
        ["convert", "model.gguf", "--objective", "hits", "-o", "out.orkpack", "--prompts", "prompt.txt"];
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    fs::remove_file(path.join("model.routing.json")).unwrap();
    let mut child = command(ORKPACK, path, &words).stderr(Stdio::null()).spawn().unwrap();
    let partial = path.join("out.orkpack.partial");
    wait_until(|| fs::metadata(&partial).is_ok_and(|partial| partial.len() > 0));
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    let kept = fs::read(path.join("out.routing.json")).unwrap();
    assert!(Statistics::from_json(&kept).unwrap().calibration.tokens > 0);
    assert_eq!(names(path), ["model.gguf", "out.orkpack.partial", "out.routing.json", "prompt.txt"]);
    let again = run(ORKPACK, path, &["convert", "model.gguf", "-o", "out.orkpack"]);
    done(&again);
    assert!(!stderr(&again).contains("calibrating on"), "{}", stderr(&again));
    assert!(stderr(&again).contains("from out.routing.json"), "{}", stderr(&again));
    assert_eq!(names(path), ["model.gguf", "out.orkpack", "out.routing.json", "prompt.txt"]);
}

#[test]
fn case_g3_no_command_writes_over_what_it_reads() {
    let folder = folder();
    let path = folder.path();
    model(path);
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    done(&run(ORKPACK, path, &["convert", "model.gguf"]));
    let routing = "model.routing.json";
    for name in ["model.gguf", routing, "prompt.txt", "model.orkpack"] {
        fs::hard_link(path.join(name), path.join(format!("hard-{name}"))).unwrap();
        std::os::unix::fs::symlink(name, path.join(format!("soft-{name}"))).unwrap();
    }
    let before: Vec<_> =
        names(path).into_iter().map(|name| (fs::read(path.join(&name)).unwrap(), name)).collect();
    let commands: [(&str, &str, &[&str]); 9] = [
        (ORKPACK, "model.gguf", &["convert", "model.gguf", "--force", "-o"]),
        (ORKPACK, routing, &["convert", "model.gguf", "--routing", routing, "--force", "-o"]),
        (ORKPACK, "prompt.txt", &["convert", "model.gguf", "--prompts", "prompt.txt", "--force", "-o"]),
        (ORKPACK, "model.gguf", &["plan", "model.gguf", "--force", "-o"]),
        (ORKPACK, "model.gguf", &["calibrate", "model.gguf", "--prompts", "prompt.txt", "--force", "-o"]),
        (ORKPACK, "prompt.txt", &["calibrate", "model.gguf", "--prompts", "prompt.txt", "--force", "-o"]),
        (ORKPACK, routing, &["merge", routing, routing, "--force", "-o"]),
        (ORKPACK, "model.orkpack", &["export", "model.orkpack", "--to", "gguf", "--force", "-o"]),
        (ORK_RUN, "model.gguf", &["model.gguf", "--tokens", "1", "-n", "1", "--dump-logits"]),
    ];
    for (binary, input, words) in commands {
        for output in
            [input.to_owned(), format!("./{input}"), format!("hard-{input}"), format!("soft-{input}")]
        {
            let said = refused(&run(binary, path, &[words, &[&output]].concat()));
            assert!(
                said.contains("input itself") || said.contains("pack itself"),
                "{words:?} {output}: {said}"
            );
        }
    }
    for (bytes, name) in before {
        assert!(fs::read(path.join(&name)).unwrap() == bytes, "{name}");
    }
}

#[test]
fn existing_outputs_stay_without_force() {
    let folder = folder();
    let path = folder.path();
    model(path);
    fs::write(path.join("taken"), "precious").unwrap();
    let routing = "model.routing.json";
    let commands: [&[&str]; 5] = [
        &["convert", "model.gguf", "-o", "taken"],
        &["plan", "model.gguf", "-o", "taken"],
        &["plan", "model.gguf", "--report", "taken"],
        &["calibrate", "model.gguf", "-o", "taken"],
        &["merge", routing, routing, "-o", "taken"],
    ];
    for words in commands {
        let said = refused(&run(ORKPACK, path, words));
        assert!(said.contains("taken: exists already; --force replaces it"), "{words:?}: {said}");
        assert_eq!(fs::read(path.join("taken")).unwrap(), b"precious");
    }
}

#[test]
fn case_g5_nothing_but_the_output_is_written_anywhere() {
    let folder = folder();
    let path = folder.path();
    let [input, output, here] = ["in", "out", "here"].map(|name| path.join(name));
    for folder in [&input, &output, &here] {
        fs::create_dir(folder).unwrap();
    }
    model(&input);
    for folder in [&input, &here] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o555)).unwrap();
    }
    let bare = |binary: &str, words: &[&str]| {
        let mut command = command(binary, &here, words);
        command.env_clear().env("TMPDIR", "/no/such/folder").output().unwrap()
    };
    done(&bare(
        ORKPACK,
        &["convert", "../in/model.gguf", "-o", "../out/model.orkpack", "--objective", "hits"],
    ));
    done(&bare(ORKPACK, &["verify", "../out/model.orkpack"]));
    done(&bare(ORKPACK, &["convert", "../out/model.orkpack", "-o", "../out/again.orkpack"]));
    done(&bare(ORKPACK, &["plan", "../in/model.gguf"]));
    done(&bare(ORK_RUN, &["../out/model.orkpack", "--tokens", "1,2", "-n", "2", "--device", "sim"]));
    assert_eq!(names(&input), ["model.gguf", "model.routing.json"]);
    assert_eq!(names(&output), ["again.orkpack", "model.orkpack"]);
    assert!(names(&here).is_empty());
    // Nobody, whatever rights he has, can create a file here.
    let said = refused(&bare(ORKPACK, &["convert", "../in/model.gguf", "-o", "/proc/model.orkpack"]));
    assert!(said.contains("cannot create /proc/model.orkpack.partial"), "{said}");
    if !rustix::process::geteuid().is_root() {
        let said = refused(&bare(ORKPACK, &["convert", "../in/model.gguf"]));
        assert!(said.contains("../in/model.orkpack.partial: Permission denied"), "{said}");
    }
    // So that the folder can be removed.
    for folder in [&input, &here] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn case_g6_any_name_will_do() {
    let folder = folder();
    let path = folder.path();
    let bytes = tiny_moe(&small());
    model(path);
    // Names of 255 bytes: the longest that there are.
    let long = ["ä".repeat(125) + ".gguf", "ä".repeat(123) + "x.orkpack"];
    assert_eq!(long.each_ref().map(String::len), [255, 255]);
    let name = |text: &str| [format!("{text}.gguf"), format!("{text}.orkpack")];
    let mut cases: Vec<[OsString; 2]> = [
        name("модель"),
        name("模型"),
        name("🐻 and 🐼"),
        name("-dash"),
        name("two\nlines"),
        name("esc\u{1b}[31m"),
        long,
    ]
    .map(|names| names.map(OsString::from))
    .to_vec();
    cases.push([b"\xff\xfe.gguf".to_vec(), b"\xff\xfe.orkpack".to_vec()].map(OsString::from_vec));
    for [model, pack] in cases {
        let context = model.to_string_lossy().into_owned();
        fs::write(path.join(&model), &bytes).unwrap();
        let words = |words: &[&str], last: &[&OsString]| -> Vec<OsString> {
            let words = words.iter().map(OsString::from);
            words.chain(last.iter().map(OsString::from)).collect()
        };
        let joined = |option: &str, value: &OsString| {
            let mut word = OsString::from(option);
            word.push(value);
            word
        };
        let output = joined("--output=", &pack);
        let convert = words(
            &["convert", "--objective", "hits", "--routing", "model.routing.json"],
            &[&output, &"--".into(), &model],
        );
        let converted = run(ORKPACK, path, &convert);
        done(&converted);
        let verify = done(&run(ORKPACK, path, &words(&["verify", "--"], &[&pack])));
        let json = done(&run(ORKPACK, path, &words(&["inspect", "--json", "--"], &[&model])));
        serde_json::from_str::<serde_json::Value>(&json).unwrap();
        let inspect = done(&run(ORKPACK, path, &words(&["inspect", "--"], &[&pack])));
        let spoken = run(
            ORK_RUN,
            path,
            &words(&["--tokens", "1,2", "-n", "2", "--temp", "0", "--device", "sim", "--"], &[&pack]),
        );
        done(&spoken);
        let taken = refused(&run(ORKPACK, path, &convert));
        assert!(taken.contains("exists already"), "{context:?}: {taken}");
        for text in [stderr(&converted), verify, inspect, stderr(&spoken), taken] {
            assert!(!text.contains('\u{1b}'), "{context:?}: {text:?}");
        }
        // Where the pack goes by default, and where the routing would be kept, the name may be too long.
        fs::remove_file(path.join(&pack)).unwrap();
        let by_default = run(
            ORKPACK,
            path,
            &words(&["convert", "--objective", "hits", "--routing", "model.routing.json", "--"], &[&model]),
        );
        match model.as_bytes().len() {
            255 => assert!(refused(&by_default).contains("File name too long"), "{context:?}"),
            _ => drop(done(&by_default)),
        }
        assert!(names(path).iter().all(|name| !name.ends_with(".partial")));
    }
}

#[test]
fn case_g8_the_second_of_two_conversions_is_refused_at_once() {
    let folder = folder();
    let path = folder.path();
    slow_model(path);
    let words = ["convert", "model.gguf", "--objective", "hits"];
    let mut first =
        command(ORKPACK, path, &words).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_until(|| path.join("model.orkpack.partial").exists());
    signal(&first, Signal::STOP);
    for force in [&[][..], &["--force"]] {
        let said = refused(&run(ORKPACK, path, &[&words[..], force].concat()));
        assert!(said.contains("another conversion is writing model.orkpack.partial"), "{said}");
    }
    signal(&first, Signal::CONT);
    assert_eq!(first.wait().unwrap().code(), Some(0));
    done(&run(ORKPACK, path, &["verify", "model.orkpack"]));
    assert_eq!(names(path), ["model.gguf", "model.orkpack", "model.routing.json"]);
}

#[test]
fn case_h7_a_dry_run_is_right_to_the_byte_and_writes_nothing() {
    let folder = folder();
    let path = folder.path();
    model(path);
    fs::set_permissions(path, fs::Permissions::from_mode(0o555)).unwrap();
    let before = names(path);
    let [fat, thin] = announced(path, "model.gguf");
    assert_eq!(names(path), before);
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let words = ["convert", "model.gguf", "--objective", "hits", "-o"];
    done(&run(ORKPACK, path, &[&words[..], &["fat.orkpack"]].concat()));
    done(&run(ORKPACK, path, &[&words[..], &["thin.orkpack", "--thin"]].concat()));
    let len = |name: &str| fs::metadata(path.join(name)).unwrap().len();
    assert_eq!([len("fat.orkpack"), len("thin.orkpack")], [fat, thin]);
    // Without routing it is counted for the size, and not kept.
    fs::remove_file(path.join("model.routing.json")).unwrap();
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    let before = names(path);
    done(&run(ORKPACK, path, &["convert", "model.gguf", "--dry-run", "--prompts", "prompt.txt"]));
    assert_eq!(names(path), before);
}
