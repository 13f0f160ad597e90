//! The binaries, as a user types them: the card's lines, exit codes, words on stderr and data on stdout.

use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use orkpack::tensor::Dtype;
use serde_json::Value;

use crate::support::gguf_builder::{MoeSpec, hollow_moe, tiny_moe};
use crate::support::models::{TOKENS, bundled_in, calibrate_beside, folder, model_in};
use crate::support::{fixture, schema};

fn run(binary: &str, folder: &Path, words: &[&str]) -> Output {
    let mut command = match binary {
        "orkpack" => Command::new(env!("CARGO_BIN_EXE_orkpack")),
        _ => Command::new(env!("CARGO_BIN_EXE_ork-run")),
    };
    command.current_dir(folder).args(words).write_stdin("").output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn done(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(output), stderr(output));
    stdout(output)
}

#[track_caller]
fn conforms(text: &str, name: &str) -> Value {
    let document: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    schema::check(&schema::load(name), &document).unwrap_or_else(|problem| panic!("{name}: {problem}"));
    document
}

#[test]
fn the_cards_lines_work_as_typed() {
    let folder = folder();
    let path = folder.path();
    model_in(path, &tiny_moe(&MoeSpec::default()));
    let convert = done(&run("orkpack", path, &["convert", "model.gguf"]));
    assert!(convert.starts_with("model.orkpack: ") && convert.contains("root "), "{convert}");
    let plan = done(&run("orkpack", path, &["plan", "--budget", "1.2GiB"]));
    assert!(
        plan.contains("decode") && plan.contains("estimated") && plan.contains("1.20 GiB budget"),
        "{plan}"
    );
    let verify = done(&run("orkpack", path, &["verify"]));
    assert!(verify.starts_with("model.orkpack: whole"), "{verify}");
    let root = convert.lines().find_map(|line| line.trim().strip_prefix("root ")).unwrap();
    assert!(verify.contains(root), "{verify} {root}");
    let spoken = run("ork-run", path, &["model.orkpack", "-p", "Hello", "-n", "8", "--temp", "0"]);
    let text = done(&spoken);
    assert!(text.ends_with('\n') && stderr(&spoken).contains("no NPU here"), "{text:?} {}", stderr(&spoken));
    let strict = run("ork-run", path, &["model.orkpack", "-p", "Hello", "--strict"]);
    assert!(strict.status.code() == Some(2) && stderr(&strict).contains("there is no NPU here"));
    let again =
        run("ork-run", path, &["model.orkpack", "-p", "Hello", "-n", "8", "--temp", "0", "--device", "sim"]);
    assert!(done(&again).ends_with('\n') && stderr(&again).contains("hot experts on `sim`"));
}

#[test]
fn json_conforms_to_the_schemas() {
    let folder = folder();
    let path = folder.path();
    bundled_in(path, "tiny-moe-q4_k_m.gguf");
    let model = "tiny-moe-q4_k_m.gguf";
    let json = |binary: &str, words: &[&str]| done(&run(binary, path, words));
    let dry = conforms(&json("orkpack", &["convert", model, "--json", "--dry-run"]), "convert.schema.json");
    assert_eq!((&dry["written"], &dry["mean_error"]), (&Value::Bool(false), &Value::Null));
    let convert = ["convert", model, "--json", "--objective", "hits", "--budget", "2400000"];
    let convert = conforms(&json("orkpack", &convert), "convert.schema.json");
    assert!(convert["hot_matrices"].as_u64().unwrap() > 0 && convert["mean_error"].as_f64().unwrap() > 0.0);
    conforms(&json("orkpack", &["plan", model, "--json"]), "plan.schema.json");
    let reported = ["plan", model, "--json", "--report", "plan.html"];
    assert!(conforms(&json("orkpack", &reported), "plan.schema.json")["times"].is_array());
    let page = fs::read_to_string(path.join("plan.html")).unwrap();
    assert!(page.contains("<title>Plan for tiny-moe-q4_k_m.gguf</title>"));
    let refused = run("orkpack", path, &reported);
    assert!(
        refused.status.code() == Some(2) && stderr(&refused).contains("plan.html: exists already; --force")
    );
    assert_eq!(json("orkpack", &[&reported[..], &["--force"]].concat()).lines().count(), 1);
    assert_eq!(fs::read_to_string(path.join("plan.html")).unwrap(), page);
    let own = run("orkpack", path, &["plan", model, "--report", model, "--force"]);
    assert!(own.status.code() == Some(2) && stderr(&own).contains("is the input itself"));
    let swept = ["plan", model, "--json", "--sweep", "0..8MiB"];
    let swept = conforms(&json("orkpack", &swept), "plan.schema.json");
    assert!((12..=16).contains(&swept["sweep"].as_array().unwrap().len()));
    let explained = ["plan", model, "--json", "--explain", "1:0,1:11", "--explain", "2:3"];
    let explained = conforms(&json("orkpack", &explained), "plan.schema.json");
    assert_eq!(explained["explanations"].as_array().unwrap().len(), 3);
    conforms(
        &fs::read_to_string(path.join("tiny-moe-q4_k_m.routing.json")).unwrap(),
        "statistics.schema.json",
    );
    let pack = "tiny-moe-q4_k_m.orkpack";
    let verify = conforms(&json("orkpack", &["verify", pack, "--json"]), "verify.schema.json");
    assert_eq!(verify["root"], convert["root"]);
    for file in [model, pack] {
        let inspect =
            conforms(&json("orkpack", &["inspect", file, "--json", "--tensors"]), "inspect.schema.json");
        assert_eq!((inspect["experts"].as_u64(), inspect["experts_used"].as_u64()), (Some(12), Some(3)));
    }
    let words =
        [pack, "-p", "Anne could not", "-n", "4", "--temp", "0", "--json", "--device", "sim", "--compare"];
    let run = conforms(&json("ork-run", &words), "run.schema.json");
    assert!(run["device"]["programs"].as_u64().unwrap() > 0);
    assert_eq!(run["tokens"].as_array().unwrap().len(), 4);
    assert!(run["comparison"]["positions"].as_u64().unwrap() > 4);
    let bench = [pack, "--json", "--bench", "--pp", "16", "--tg", "2", "--reps", "2"];
    let bench = conforms(&json("ork-run", &bench), "run.schema.json");
    assert_eq!(
        (bench["prefill"]["tokens"].as_u64(), bench["decode"]["tokens"].as_u64()),
        (Some(32), Some(4))
    );
}

#[test]
fn failures_are_one_line_with_the_right_code() {
    let folder = folder();
    let path = folder.path();
    let bytes = tiny_moe(&MoeSpec::default());
    model_in(path, &bytes);
    fs::write(path.join("cut.gguf"), &bytes[..bytes.len() / 2]).unwrap();
    fs::write(path.join("text.gguf"), "not a model").unwrap();
    fs::write(path.join("taken.orkpack"), "precious").unwrap();
    struct Case {
        words: &'static [&'static str],
        code: i32,
        says: &'static str,
    }
    let cases = [
        Case { words: &["convert", "gone.gguf"], code: 2, says: "gone.gguf" },
        Case { words: &["convert", "text.gguf"], code: 2, says: "neither a GGUF nor a pack" },
        Case { words: &["convert", "cut.gguf"], code: 2, says: "past the end of the file" },
        Case {
            words: &["convert", "model.gguf", "-o", "taken.orkpack"],
            code: 2,
            says: "--force replaces it",
        },
        Case {
            words: &["convert", "model.gguf", "-o", "model.gguf", "--force"],
            code: 2,
            says: "input itself",
        },
        Case { words: &["convert", "model.gguf", "-o", "no/such/folder.orkpack"], code: 2, says: "no/such" },
        Case { words: &["plan", "model.gguf", "--budget", "8GiB"], code: 1, says: "over the usable window" },
        Case { words: &["plan", "model.gguf", "--budget", "1,2GiB"], code: 2, says: "is not a size" },
        Case { words: &["plan", "model.gguf", "--budget", "-1"], code: 2, says: "-1" },
        Case { words: &["plan", "model.gguf", "--profile", "rk9999"], code: 2, says: "built in: rk3588" },
        Case { words: &["plan", "model.gguf", "--require-gain", "50"], code: 1, says: "below the required" },
        Case { words: &["plan", "model.gguf", "--force-hot", "0:99"], code: 2, says: "0:99" },
        Case { words: &["plan", "model.gguf", "--force-hot", "zero"], code: 2, says: "LAYER:EXPERT" },
        Case { words: &["plan", "model.gguf", "--explain", "0:99"], code: 2, says: "its experts are 0 to" },
        Case { words: &["plan", "model.gguf", "--explain", "9:0"], code: 2, says: "layer has no experts" },
        Case { words: &["plan", "model.gguf", "--sweep", "1GiB..0"], code: 2, says: "begins above its end" },
        Case { words: &["plan", "model.gguf", "--sweep", "1GiB"], code: 2, says: "is not A..B" },
        Case {
            words: &["plan", "model.gguf", "--sweep", "0..8GiB"],
            code: 1,
            says: "over the usable window",
        },
        Case { words: &["plan"], code: 2, says: "several models in this folder" },
        Case { words: &["verify", "gone.orkpack"], code: 2, says: "gone.orkpack" },
        Case { words: &["inspect", "text.gguf"], code: 2, says: "neither a GGUF nor a pack" },
    ];
    for case in cases {
        let output = run("orkpack", path, case.words);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(case.code), "{:?}: {said}", case.words);
        assert!(said.contains(case.says), "{:?}: {said}", case.words);
        assert!(stdout(&output).is_empty() || case.code == 1, "{:?}", case.words);
        assert!(!said.contains("panicked"), "{said}");
    }
    assert_eq!(fs::read(path.join("taken.orkpack")).unwrap(), b"precious");
    assert_eq!(fs::read(path.join("model.gguf")).unwrap(), bytes);
    let left: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.ends_with(".partial")), "{left:?}");
    assert!(!left.contains(&"model.orkpack".to_owned()), "{left:?}");
}

#[test]
fn verify_says_no_with_1_and_goes_on() {
    let folder = folder();
    let path = folder.path();
    calibrate_beside(&model_in(path, &tiny_moe(&MoeSpec::default())), &TOKENS);
    done(&run("orkpack", path, &["convert", "model.gguf", "--objective", "hits"]));
    let whole = fs::read(path.join("model.orkpack")).unwrap();
    let mut broken = whole.clone();
    let at = broken.len() - 5000;
    broken[at] ^= 0x10;
    fs::write(path.join("broken.orkpack"), broken).unwrap();
    fs::write(path.join("short.orkpack"), &whole[..whole.len() - 1]).unwrap();
    let output = run("orkpack", path, &["verify"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("broken.orkpack: DAMAGED") && text.contains("model.orkpack: whole"), "{text}");
    assert!(text.contains("short.orkpack: DAMAGED"), "{text}");
    fs::write(path.join("text.orkpack"), "precious").unwrap();
    let text = run("orkpack", path, &["verify", "text.orkpack"]);
    assert!(text.status.code() == Some(2) && stderr(&text).contains("not a pack: begins with `precious`"));
    let expect = run("orkpack", path, &["verify", "model.orkpack", "--expect", &"0".repeat(64)]);
    assert_eq!(expect.status.code(), Some(1), "{}", stdout(&expect));
}

#[test]
fn tokens_logits_and_pipes_serve_other_programs() {
    let folder = folder();
    let path = folder.path();
    bundled_in(path, "tiny-moe-q8_0.gguf");
    let expected: Value =
        serde_json::from_slice(&fs::read(fixture("vectors/tiny-moe.json")).unwrap()).unwrap();
    let case = &expected["generation"][0];
    let ids = |value: &Value| -> Vec<u64> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let prompt: Vec<String> = ids(&case["prompt_ids"]).iter().map(u64::to_string).collect();
    let words = [
        "tiny-moe-q8_0.gguf",
        "--tokens",
        &prompt.join(","),
        "-n",
        "16",
        "--temp",
        "0",
        "--dump-logits",
        "l",
    ];
    let text = done(&run("ork-run", path, &words));
    let generated: Vec<u64> = text.trim().split(',').map(|id| id.parse().unwrap()).collect();
    assert_eq!(generated, ids(&case["q8_0"]["llama.cpp"]["greedy_ids"])[..16]);
    let logits = fs::read(path.join("l")).unwrap();
    assert_eq!(logits.len(), 2048 * 4);
    let top = &case["q8_0"]["llama.cpp"]["top20"][0];
    let at = top[0].as_u64().unwrap() as usize * 4;
    let found = f32::from_le_bytes(logits[at..at + 4].try_into().unwrap());
    assert!((f64::from(found) - top[1].as_f64().unwrap()).abs() < 0.1, "{found} {top}");
    let mut piped = Command::new(env!("CARGO_BIN_EXE_ork-run"));
    let piped = piped.current_dir(path).args(["tiny-moe-q8_0.gguf", "-n", "8", "--temp", "0", "--raw"]);
    let piped = piped.write_stdin(case["prompt"].as_str().unwrap()).output().unwrap();
    let direct =
        run("ork-run", path, &["tiny-moe-q8_0.gguf", "-n", "8", "--temp", "0", "-p", "Anne could not"]);
    assert_eq!(done(&piped), done(&direct));
}

#[test]
fn statistics_are_counted_merged_and_bound_to_their_model() {
    let folder = folder();
    let path = folder.path();
    model_in(path, &tiny_moe(&MoeSpec::default()));
    fs::write(path.join("other.gguf"), tiny_moe(&MoeSpec { seed: 9, ..MoeSpec::default() })).unwrap();
    let prose = fixture("corpora/prose.txt");
    let words = ["calibrate", "model.gguf", "--prompts", prose.to_str().unwrap(), "-o", "a.routing.json"];
    done(&run("orkpack", path, &words));
    assert_eq!(run("orkpack", path, &words).status.code(), Some(2));
    let prompts = fixture("corpora/code.txt");
    let words = ["calibrate", "model.gguf", "--prompts", prompts.to_str().unwrap(), "-o", "b.routing.json"];
    done(&run("orkpack", path, &words));
    done(&run(
        "orkpack",
        path,
        &["merge", "a.routing.json", "b.routing.json", "-o", "c.routing.json", "--weights", "2,1"],
    ));
    for name in ["a", "b", "c"] {
        let text = fs::read_to_string(path.join(format!("{name}.routing.json"))).unwrap();
        conforms(&text, "statistics.schema.json");
        assert!(!text.contains("def "), "no prompt text");
        done(&run("orkpack", path, &["plan", "model.gguf", "--routing", &format!("{name}.routing.json")]));
    }
    let foreign = run("orkpack", path, &["plan", "other.gguf", "--routing", "a.routing.json"]);
    assert_eq!(foreign.status.code(), Some(2));
    assert!(stderr(&foreign).contains("another model"), "{}", stderr(&foreign));
    let accepted = ["plan", "other.gguf", "--routing", "a.routing.json", "--accept-foreign-statistics"];
    done(&run("orkpack", path, &accepted));
    let reference = fixture("models/reference/tiny-qwen3moe-f32.gguf");
    let imatrix = fixture("models/reference/tiny-qwen3moe.imatrix.gguf");
    let words = ["plan", reference.to_str().unwrap(), "--imatrix", imatrix.to_str().unwrap()];
    assert!(done(&run("orkpack", path, &words)).contains("counted by an imatrix"));
}

#[test]
fn help_teaches_and_completions_and_man_pages_come() {
    let folder = folder();
    let path = folder.path();
    for words in [&["--help"][..], &["convert", "--help"], &["plan", "--help"], &["verify", "--help"]] {
        let help = done(&run("orkpack", path, words));
        assert!(help.contains("Usage: orkpack"), "{help}");
    }
    assert!(done(&run("orkpack", path, &["--help"])).contains("Exit codes: 0 done; 1 the check says no"));
    assert!(done(&run("ork-run", path, &["--help"])).contains("software NPU"));
    for shell in ["bash", "zsh", "fish"] {
        let completions = done(&run("orkpack", path, &["completions", shell]));
        assert!(completions.contains("calibrate") && completions.contains("ork-run"), "{shell}");
    }
    done(&run("orkpack", path, &["man", "pages"]));
    for page in ["orkpack.1", "orkpack-convert.1", "orkpack-plan.1", "orkpack-verify.1", "ork-run.1"] {
        let text = fs::read_to_string(path.join("pages").join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
}

#[test]
fn ctrl_c_ends_a_conversion_with_130_and_leaves_nothing() {
    let folder = folder();
    let path = folder.path();
    let spec = MoeSpec { n_layer: 4, n_embd: 1024, n_ff: 1024, n_expert: 24, ..MoeSpec::default() };
    hollow_moe(&MoeSpec { dtype: Dtype::F16, ..spec }, &path.join("model.gguf"));
    fs::write(path.join("prompt.txt"), "The model is converted once.").unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_orkpack"))
        .current_dir(path)
        .args(["convert", "model.gguf", "--prompts", "prompt.txt", "--objective", "hits", "--quiet"])
        .spawn()
        .unwrap();
    let partial = path.join("model.orkpack.partial");
    // It is locked from the start, and has its length when the routing is known.
    while !fs::metadata(&partial).is_ok_and(|partial| partial.len() > 0) {
        assert!(child.try_wait().unwrap().is_none(), "the conversion ended before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mut left: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["model.gguf", "model.routing.json", "prompt.txt"]);
}

/// Hashing, quantising and checking have a pool of their own, beside that of the arithmetic.
#[test]
fn a_command_works_with_the_threads_it_was_given() {
    let folder = folder();
    let model = bundled_in(folder.path(), "tiny-moe-q4_k_m.gguf");
    for n_threads in [1, 3] {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_orkpack"))
            .current_dir(folder.path())
            .args(["convert", "--force", "--quiet", "--threads", &n_threads.to_string()])
            .arg(&model)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut most = 0;
        while child.try_wait().unwrap().is_none() {
            let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).into_iter().flatten().flatten();
            let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
            most = most.max(names.filter(|name| name.starts_with("work-")).count());
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(most, n_threads);
    }
}

/// Memory for the stacks of so many threads is more than the process may have; an emulator needs more by itself.
#[test]
#[cfg(target_arch = "x86_64")]
fn threads_that_cannot_be_started_are_one_line() {
    let folder = folder();
    bundled_in(folder.path(), "tiny-moe-q4_k_m.gguf");
    let line = "ulimit -v 200000; exec \"$0\" inspect --threads 256 tiny-moe-q4_k_m.gguf";
    let output = std::process::Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", line, env!("CARGO_BIN_EXE_orkpack")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}{}", stdout(&output), stderr(&output));
    assert!(stderr(&output).starts_with("error: 256 threads cannot be started: "), "{}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1);
}
