//! Packs for another device, and packs of a later orkpack.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use orkpack::runtime::{DeviceChoice, Here, Options, Runtime};

use crate::support::gguf_builder::{MoeSpec, tiny_moe};
use crate::support::models::{calibrate_beside, convert, folder, hits, model_in, request};
use crate::support::packs::edit_header;

fn run(binary: &str, folder: &Path, words: &[&str]) -> (i32, String, String) {
    let mut command = match binary {
        "orkpack" => Command::new(env!("CARGO_BIN_EXE_orkpack")),
        _ => Command::new(env!("CARGO_BIN_EXE_ork-run")),
    };
    let output = command.current_dir(folder).args(words).write_stdin("").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// `model.gguf` and `model.orkpack`, and the pack of a device called rk3576, `other.orkpack`.
fn packs(folder: &Path) {
    let spec = MoeSpec { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, ..MoeSpec::default() };
    let model = model_in(folder, &tiny_moe(&spec));
    calibrate_beside(&model, &[1, 2, 3, 4]);
    convert(request(&model, hits(1 << 18))).unwrap();
    let mut other = request(&model, hits(1 << 18));
    other.choice.profile.name = "rk3576".to_owned();
    other.output = folder.join("other.orkpack");
    fs::write(folder.join("rk3576.json"), other.choice.profile.to_json().unwrap()).unwrap();
    convert(other).unwrap();
}

#[test]
fn case_b5_a_pack_for_another_device_is_refused_where_one_was_named() {
    let folder = folder();
    let path = folder.path();
    packs(path);
    let words = ["other.orkpack", "--tokens", "72", "-n", "2", "--temp", "0", "--device", "sim"];
    let (code, text, said) = run("ork-run", path, &[&words[..], &["--profile", "rk3588"]].concat());
    assert!(code == 2 && text.is_empty(), "{said}");
    assert!(said.contains("other.orkpack: the pack is for rk3576, this is rk3588"), "{said}");
    for more in [&[][..], &["--profile", "rk3576.json"]] {
        let (code, _, said) = run("ork-run", path, &[&words[..], more].concat());
        assert!(code == 0 && said.contains("hot experts on `sim`"), "{said}");
    }
    fs::write(path.join("empty.gguf"), b"").unwrap();
    fs::write(path.join("empty.orkpack"), b"").unwrap();
    for file in ["empty.gguf", "empty.orkpack"] {
        for (binary, words) in [("orkpack", &["inspect", file][..]), ("ork-run", &[file, "-p", "x"])] {
            let (code, _, said) = run(binary, path, words);
            assert!(code == 2 && said.contains("file is empty"), "{said}");
        }
    }
}

/// What the board says of itself is no wish: the run goes on, on the CPU.
#[test]
fn a_pack_for_another_device_runs_on_the_cpu() {
    let folder = folder();
    packs(folder.path());
    let open = |strict: bool, device: &str| {
        let here = Some(Here { device: device.to_owned(), is_named: false });
        let options = Options { device: DeviceChoice::Sim, strict, here, ..Options::default() };
        Runtime::open(&folder.path().join("other.orkpack"), options).unwrap()
    };
    let engine = open(false, "rk3588").engine().unwrap();
    assert_eq!((engine.device(), engine.distrust()), (None, Some("the pack is for rk3576, this is rk3588")));
    assert_eq!(open(true, "rk3588").engine().err().map(|error| error.exit_code()), Some(2));
    assert_eq!(open(true, "rk3576").engine().unwrap().device(), Some("sim"));
}

#[test]
fn a_pack_of_a_later_orkpack_says_what_it_needs() {
    let folder = folder();
    let path = folder.path();
    packs(path);
    let pack = fs::read(path.join("model.orkpack")).unwrap();
    fs::write(path.join("feature.orkpack"), edit_header(&pack, |header| header[17] = 0b10)).unwrap();
    fs::write(path.join("version.orkpack"), edit_header(&pack, |header| header[8] = 2)).unwrap();
    for (file, says) in [
        ("feature.orkpack", "needs a newer orkpack for feature bit 9"),
        ("version.orkpack", "pack version 2, this orkpack reads version 1"),
    ] {
        for (binary, words) in [
            ("orkpack", &["verify", file][..]),
            ("orkpack", &["inspect", file]),
            ("orkpack", &["convert", file, "-o", "x.orkpack"]),
            ("orkpack", &["export", file, "--to", "gguf", "-o", "x.gguf"]),
            ("ork-run", &[file, "-p", "x"]),
        ] {
            let (code, _, said) = run(binary, path, words);
            assert!(
                code == 2 && said.contains(says) && said.contains("hint: update orkpack"),
                "{words:?}: {said}"
            );
        }
    }
}
