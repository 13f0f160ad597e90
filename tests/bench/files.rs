//! Conversion beside reading the model and writing as much; verification beside blake3 of the same file.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use orkpack::bytes::{FileBytes, Io, Limits};
use orkpack::convert::{Choice, Request, StatisticsFrom, prepare};
use orkpack::pack::Existing;
use orkpack::pack::verify::{Mode, verify};
use orkpack::plan::Objective;
use orkpack::profile::DeviceProfile;
use orkpack::progress::Silent;
use orkpack::source;
use orkpack::threads::Pool;

use crate::{median, seconds, spread};

const RUNS: usize = 3;

pub fn bench(model: &Path) {
    // Beside the model, so that the disk is the one it is on.
    let folder = tempfile::tempdir_in(model.parent().expect("a folder")).expect("room beside the model");
    let (prompts, pack) = (folder.path().join("prompts.txt"), folder.path().join("model.orkpack"));
    std::fs::write(&prompts, "Any text will do: the plan fills the window. ".repeat(40)).expect("room");
    let request = Request {
        model: model.to_owned(),
        output: pack.clone(),
        existing: Existing::Replace,
        choice: Choice {
            profile: DeviceProfile::built_in(DeviceProfile::DEFAULT).expect("a profile"),
            budget: None,
            domains: 1,
            objective: Objective::Hits,
            shares: orkpack::plan::Shares::Auto,
            force_hot: Vec::new(),
            statistics: StatisticsFrom::Prompts(vec![prompts]),
            ram: None,
            accept_foreign: false,
        },
        plan: None,
        thin: false,
        allow_nonfinite: false,
        n_threads: Pool::default_threads(),
        keep_statistics: false,
    };
    let prepared = prepare(request, &mut Silent).expect("a plan");
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        ours.push(seconds(|| prepared.write(&mut Silent).expect("a pack").file_len));
        let len = std::fs::metadata(&pack).expect("the pack").len();
        plain.push(seconds(|| copy(model, &folder.path().join("plain"), len)));
    }
    let ratio = median(plain.clone()) / median(ours.clone());
    println!(
        "  pack: {} s; reading the model and writing as many bytes: {} s; {ratio:.2} of that speed",
        spread(&ours),
        spread(&plain)
    );
    for cold in [true, false] {
        let (mut ours, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..RUNS {
            let forget = || {
                if cold {
                    forget(&pack)
                }
            };
            forget();
            ours.push(
                1e3 * seconds(|| {
                    let opened = source::open(&pack, Io::Map, &Limits::default()).expect("the pack");
                    assert!(verify(opened.pack().expect("a pack"), Mode::Full, &|_| ()).is_ok());
                }),
            );
            forget();
            plain.push(1e3 * seconds(|| blake3_of(&pack)));
        }
        let ratio = median(plain.clone()) / median(ours.clone());
        println!(
            "  verify, {}: {} ms; blake3 on all threads: {} ms; {ratio:.2} of that speed",
            if cold { "from disk" } else { "in memory" },
            spread(&ours),
            spread(&plain)
        );
    }
}

/// Takes a file out of the page cache, so that it is read from disk next.
fn forget(path: &Path) {
    let file = File::open(path).expect("the pack");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a file system that forgets");
}

/// Reads all of `from` and writes `len` bytes of it, over and over, durably.
fn copy(from: &Path, to: &Path, len: u64) {
    let (mut from, mut to) = (File::open(from).expect("the model"), File::create(to).expect("room"));
    let (mut buffer, mut left) = (vec![0; 1 << 22], len);
    loop {
        let n = from.read(&mut buffer).expect("the model");
        let put = left.min(n as u64);
        to.write_all(&buffer[..put as usize]).expect("room");
        left -= put;
        if n == 0 {
            break;
        }
    }
    while left > 0 {
        let put = left.min(buffer.len() as u64);
        to.write_all(&buffer[..put as usize]).expect("room");
        left -= put;
    }
    to.sync_all().expect("a disk");
}

/// What `b3sum` does: the file mapped, all threads.
fn blake3_of(path: &Path) -> blake3::Hash {
    let file = FileBytes::open(path, Io::Map).expect("the pack");
    blake3::Hasher::new().update_rayon(&file).finalize()
}
