//! Files that change while they are read, and file systems that do not give what was asked.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::Stdio;

use orkpack::bytes::{FileBytes, Io};
use orkpack::convert::prepare;
use orkpack::progress::Silent;
use orkpack::tensor::Dtype;

use crate::support::gguf_builder::{MoeSpec, hollow_moe, tiny_moe};
use crate::support::models::{TOKENS, calibrate_beside, folder, hits, model_in, request};
use crate::support::program::{ORK_RUN, ORKPACK, command, done, names, run, wait_until};

fn cut(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

/// Two turns, and the model cut to nothing between them: how it ends, and what is said.
fn cut_between_turns(words: &[&str]) -> (Option<i32>, String) {
    let folder = folder();
    let model = model_in(folder.path(), &tiny_moe(&MoeSpec { dtype: Dtype::Q8_0, ..MoeSpec::default() }));
    let words = [&["model.gguf", "--turns", "-n", "2", "--temp", "0", "--quiet"], words].concat();
    let mut command = command(ORK_RUN, folder.path(), &words);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let (mut turns, mut answers) =
        (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    writeln!(turns, "the first").unwrap();
    assert!(answers.read_until(b'\n', &mut Vec::new()).unwrap() > 0);
    cut(&model, 0);
    writeln!(turns, "and the second").unwrap();
    drop(turns);
    answers.read_to_end(&mut Vec::new()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_mapped_file_that_is_cut_ends_a_run_in_one_line() {
    let (code, said) = cut_between_turns(&[]);
    assert_eq!(code, Some(2), "{said}");
    let line = "error: model.gguf: was cut, or its disk failed, while it was read\n";
    assert!(said.starts_with(line) && said.matches("error").count() == 1, "{said}");
}

#[test]
fn a_file_in_memory_does_not_mind_being_cut() {
    let (code, said) = cut_between_turns(&["--io", "pread"]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
}

#[test]
fn a_model_cut_while_it_is_converted_gives_no_pack() {
    let folder = folder();
    let path = folder.path();
    let spec = MoeSpec { n_layer: 4, n_embd: 1024, n_ff: 1024, n_expert: 24, ..MoeSpec::default() };
    let model = path.join("model.gguf");
    let len = hollow_moe(&MoeSpec { dtype: Dtype::F16, ..spec }, &model);
    calibrate_beside(&model, &TOKENS[..4]);
    let words = ["convert", "model.gguf", "--objective", "hits", "--quiet"];
    let mut command = command(ORKPACK, path, &words);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let partial = path.join("model.orkpack.partial");
    wait_until(|| fs::metadata(&partial).is_ok_and(|partial| partial.len() > 0));
    cut(&model, len / 2);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: model.gguf: ") && said.contains("while it was read"), "{said}");
    assert!(!path.join("model.orkpack").exists());
    hollow_moe(
        &MoeSpec { dtype: Dtype::F16, n_layer: 1, n_embd: 64, n_ff: 64, ..MoeSpec::default() },
        &model,
    );
    fs::remove_file(path.join("model.routing.json")).unwrap();
    calibrate_beside(&model, &TOKENS[..4]);
    done(&run(ORKPACK, path, &words));
    assert_eq!(names(path), ["model.gguf", "model.orkpack", "model.routing.json"]);
}

/// What was read last may be of another file than what was read first.
#[test]
fn a_source_that_changed_is_noticed_before_the_pack_gets_its_name() {
    let bytes = tiny_moe(&MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() });
    type Change = fn(&Path, &[u8]);
    let changes: [(&str, Change); 4] = [
        ("it is", |model, _| {
            fs::OpenOptions::new().append(true).open(model).unwrap().write_all(b"x").unwrap()
        }),
        ("it was written to", |model, bytes| {
            let file = fs::OpenOptions::new().write(true).open(model).unwrap();
            (&file).write_all(&bytes[..4]).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }),
        ("another file has its name now", |model, bytes| {
            let other = model.with_extension("other");
            fs::write(&other, bytes).unwrap();
            fs::rename(other, model).unwrap();
        }),
        ("No such file", |model, _| fs::remove_file(model).unwrap()),
    ];
    for (says, change) in changes {
        let folder = folder();
        let model = model_in(folder.path(), &bytes);
        calibrate_beside(&model, &TOKENS);
        let prepared = prepare(request(&model, hits(1 << 20)), &mut Silent).unwrap();
        change(&model, &bytes);
        let error = prepared.write(&mut Silent).unwrap_err();
        let line = error.to_string();
        assert!(line.starts_with(model.to_str().unwrap()) && line.contains(says), "{line}");
        assert_eq!(error.exit_code(), 2);
        assert!(!names(folder.path()).iter().any(|name| name.contains("orkpack")), "{says}");
    }
    // A pack that is packed anew, and the GGUF of a thin one, are sources too.
    for thin in [false, true] {
        let folder = folder();
        let model = model_in(folder.path(), &bytes);
        calibrate_beside(&model, &TOKENS);
        let mut first = request(&model, hits(1 << 20));
        first.thin = thin;
        let (_, outcome) = crate::support::models::convert(first).unwrap();
        let mut again = request(&outcome.output, hits(0));
        (again.output, again.thin) = (folder.path().join("again.orkpack"), thin);
        let prepared = prepare(again, &mut Silent).unwrap();
        let changed = if thin { &model } else { &outcome.output };
        let file = fs::OpenOptions::new().append(true).open(changed).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let line = prepared.write(&mut Silent).unwrap_err().to_string();
        assert!(line.starts_with(changed.to_str().unwrap()) && line.contains("it was written to"), "{line}");
    }
}

/// Files of sysfs have a length and cannot be mapped, and they are shorter than they say: what network and FUSE mounts do.
#[test]
fn case_g10_what_cannot_be_mapped_is_read_and_said_to_be() {
    let files = [
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/devices/system/cpu/online",
        "/sys/devices/system/cpu/possible",
        "/sys/kernel/uevent_seqnum",
    ];
    let file = files.iter().map(Path::new).find(|file| file.exists()).expect("a sysfs");
    let read = FileBytes::open(file, Io::Map).unwrap();
    assert!(!read.is_mapped() && read[..] == fs::read(file).unwrap());
    assert!((read.len() as u64) < fs::metadata(file).unwrap().len(), "a short read is no end");
    let note = read.note().unwrap();
    let start = format!("note: {} cannot be mapped (", file.display());
    assert!(note.starts_with(&start) && note.ends_with("are read into memory"), "{note}");
    assert!(FileBytes::open(file, Io::Pread).unwrap().note().is_none(), "nobody asked for a map");
    let folder = folder();
    let ordinary = folder.path().join("ordinary");
    fs::write(&ordinary, "mapped").unwrap();
    let mapped = FileBytes::open(&ordinary, Io::Map).unwrap();
    assert!(mapped.is_mapped() && mapped.note().is_none());
}
