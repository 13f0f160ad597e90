//! The built-in device profiles: whole, by their schema, and good for a plan and a run; and what is odd about a profile.

use std::path::Path;

use assert_cmd::Command;
use orkpack::pack::Pack;
use orkpack::plan::cost::{Bound, Rates};
use orkpack::plan::{Advice, Objective, PlanRequest, Regime, Routing, Shares, Skew, choose};
use orkpack::profile::{Confidence, DeviceProfile, Warning};
use orkpack::tile::{Scratch, SubMatrix};
use orkpack::units::Bytes;
use serde_json::Value;

use crate::support::models::{bundled_in, calibrate_beside, folder};
use crate::support::routed::{lfm, statistics};
use crate::support::schema;

fn built_in(name: &str) -> DeviceProfile {
    DeviceProfile::built_in(name).unwrap()
}

/// Every figure of a profile, by its path.
fn figures<'a>(value: &'a Value, at: &str, found: &mut Vec<(String, &'a Value)>) {
    match value {
        Value::Object(object) if object.contains_key("confidence") => found.push((at.to_owned(), value)),
        Value::Object(object) => {
            object.iter().for_each(|(key, value)| figures(value, &format!("{at}.{key}"), found));
        }
        Value::Array(items) => items.iter().for_each(|value| figures(value, at, found)),
        _ => {}
    }
}

#[test]
fn built_in_profiles_conform_and_name_their_sources() {
    assert_eq!(DeviceProfile::names().collect::<Vec<_>>(), ["rk3588", "rk3576"]);
    let law = schema::load("profile.schema.json");
    let facts = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/npu.md")).unwrap();
    let headings: Vec<String> = facts
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches(['#', ' ']).to_lowercase())
        .collect();
    for name in DeviceProfile::names() {
        let file = format!("devices/{name}.json");
        let json = schema::load(&file);
        schema::check(&law, &json).unwrap();
        assert_eq!(
            json,
            serde_json::to_value(built_in(name)).unwrap(),
            "{file} says nothing that is not read"
        );
        let mut found = Vec::new();
        figures(&json, name, &mut found);
        assert!(found.len() > 45, "{}", found.len());
        for (at, figure) in found {
            let source = figure["source"].as_str().unwrap();
            // Where a figure points into docs/npu.md, the section is there.
            if let Some(rest) = source.strip_prefix("docs/npu.md, ") {
                let section = rest.split([',', ':']).next().unwrap().to_lowercase();
                let is_there = headings.iter().any(|heading| heading.contains(&section));
                assert!(is_there, "{at}: docs/npu.md has no section `{section}`");
            }
            let is_guess = figure["confidence"] == "estimated" && figure["value"].is_number();
            let is_rate = at.contains(".rates.") || at.contains(".latency_us.") || at.contains(".cost_ns.");
            assert!(!(is_guess && is_rate) || figure["low"].is_number(), "{at}: a guess without a range");
        }
    }
}

#[test]
fn rk3576_claims_nothing_that_nobody_measured() {
    let profile = built_in("rk3576");
    let mut json = serde_json::to_value(&profile).unwrap();
    let mut found = Vec::new();
    figures(&json, "", &mut found);
    let trusted = |figure: &Value| {
        figure["confidence"] == "measured by others" || figure["confidence"] == "proven on boards"
    };
    assert!(!found.iter().any(|(_, figure)| trusted(figure)));
    assert_eq!(profile.warnings(), [Warning::NothingMeasured { name: "rk3576".to_owned() }]);
    assert!(built_in("rk3588").warnings().is_empty());
    // One measurement is enough to be no mere guess.
    json["rates"]["npu_bytes_per_s"]["confidence"] = "measured by others".into();
    let measured = DeviceProfile::from_json(&serde_json::to_vec(&json).unwrap()).unwrap();
    assert!(measured.warnings().is_empty());
}

#[test]
fn rk3576_gives_a_sound_plan_with_wider_ranges() {
    let (shape, slow, fast) = (lfm(), built_in("rk3576"), built_in("rk3588"));
    let counts = statistics(&shape, 2000, 3.0, 7);
    let plan = |profile| {
        let mut request = PlanRequest::new(&shape, Routing::Measured(&counts), profile);
        (request.objective, request.budget) = (Objective::Auto, Some(Bytes(1 << 30)));
        request.shares = Shares::Experts;
        choose(&request).unwrap()
    };
    let (ours, theirs) = (plan(&slow), plan(&fast));
    ours.check(&shape, &slow).unwrap();
    assert_eq!(ours.profile.name, "rk3576");
    assert!(ours.footprint.weight_bytes <= 1 << 30);
    for (ours, theirs) in ours.forecasts.iter().zip(&theirs.forecasts) {
        assert!(ours.cpu_only.value < theirs.cpu_only.value && ours.planned.value < theirs.planned.value);
        let width = |range: orkpack::plan::Range| range.high / range.low;
        assert!(width(ours.cpu_only) > width(theirs.cpu_only), "{ours:?}");
    }
    // One side nearly fills its memory: a token has nothing to gain from whole experts, a prompt has.
    assert_eq!((ours.verdict.decode, ours.verdict.prefill), (Advice::CpuOnly, Advice::Npu));
    assert_eq!(Rates::of(&slow, Bound::Likely).cpu_bytes, 10e9);
}

/// The whole job on the bundled model, by both binaries.
#[test]
fn rk3576_plans_packs_and_runs_on_the_software_npu() {
    let folder = folder();
    let path = folder.path();
    let model = bundled_in(path, "tiny-moe-q8_0.gguf");
    calibrate_beside(&model, &(40..140).collect::<Vec<_>>());
    let run = |binary: &str, words: &[&str]| {
        let mut command = match binary {
            "orkpack" => Command::new(env!("CARGO_BIN_EXE_orkpack")),
            _ => Command::new(env!("CARGO_BIN_EXE_ork-run")),
        };
        let output = command.current_dir(path).args(words).write_stdin("").output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let choice = ["--profile", "rk3576", "--objective", "hits", "--budget", "1MiB"];
    let (code, text, said) =
        run("orkpack", &[&["plan", "tiny-moe-q8_0.gguf", "--json"], &choice[..]].concat());
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["profile"]["name"], "rk3576");
    let (code, _, said) =
        run("orkpack", &[&["convert", "tiny-moe-q8_0.gguf", "-o", "x.orkpack"], &choice[..]].concat());
    assert_eq!(code, Some(0), "{said}");
    let pack = Pack::open(&path.join("x.orkpack"), Default::default()).unwrap();
    assert_eq!(DeviceProfile::from_json(pack.profile()).unwrap(), built_in("rk3576"));
    let words = ["x.orkpack", "--tokens", "72,73", "-n", "4", "--temp", "0", "--strict"];
    let (code, sim, said) =
        run("ork-run", &[&words[..], &["--device", "sim", "--profile", "rk3576"]].concat());
    assert!(code == Some(0) && said.contains("hot experts on `sim`"), "{said}");
    let (code, cpu, said) = run("ork-run", &[&words[..], &["--device", "cpu"]].concat());
    assert!(code == Some(0) && cpu == sim && !sim.is_empty(), "{said}");
    // A pack of this device is refused where another was named.
    let (code, _, said) = run("ork-run", &[&words[..], &["--device", "sim", "--profile", "rk3588"]].concat());
    assert!(code == Some(2) && said.contains("the pack is for rk3576, this is rk3588"), "{said}");
    for words in [&["plan", "--help"][..], &["completions", "bash"]] {
        let (_, text, _) = run("orkpack", words);
        assert!(text.contains("rk3588") && text.contains("rk3576"), "{words:?}");
    }
}

#[test]
fn case_h6_without_an_iommu_almost_nothing_can_be_mapped() {
    let mut profile = built_in("rk3588");
    profile.memory.iommu.value = false;
    let profile = DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap();
    assert_eq!((profile.window(), profile.domains()), (Bytes(0), 1));
    let [warning] = &profile.warnings()[..] else { panic!("{:?}", profile.warnings()) };
    assert!(matches!(warning, Warning::IommuOff { mappable: Bytes(12_000_000), .. }));
    let text = warning.to_string();
    assert!(
        text.contains("the IOMMU is off") && text.contains("11.44 MiB") && text.contains("enable"),
        "{text}"
    );
    // By default everything stays on the CPU; what was asked for is too much.
    let shape = lfm();
    let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
    request.objective = Objective::Hits;
    assert!(choose(&request).unwrap().is_cold());
    request.budget = Some(Bytes(1 << 20));
    assert!(choose(&request).is_err());
    // With a smaller reserve a part of the 12 MB is left.
    let mut small = profile.clone();
    small.memory.scratch_reserve_bytes.value = 8_000_000;
    assert_eq!(small.window(), Bytes(4_000_000));
}

#[test]
fn case_h10_a_parked_memory_clock_is_warned_of() {
    let mut profile = built_in("rk3588");
    profile.conditions.ddr_mhz.value = 528;
    let profile = DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap();
    assert_eq!(profile.memory_share(), 0.25);
    assert_eq!(built_in("rk3588").memory_share(), 1.0);
    let [warning] = &profile.warnings()[..] else { panic!("{:?}", profile.warnings()) };
    assert_eq!(warning, &Warning::SlowMemory { mhz: 528, rated_mhz: 2112 });
    let text = warning.to_string();
    assert!(text.contains("528 MHz") && text.contains("2112") && text.contains("4.0 times slower"), "{text}");
    // What a speed rests on is said in ranges, with how far each is to be trusted.
    let assumptions = profile.assumptions();
    assert_eq!(assumptions.len(), 4);
    assert!(assumptions[0].contains("4 CPU threads") && assumptions[0].contains("memory at 528 MHz"));
    assert_eq!(assumptions[3], "both together stream 28.0 GB/s (24.0 to 33.0), derived");
    for (figure, line) in
        [(&profile.rates.cpu_bytes_per_s, &assumptions[1]), (&profile.rates.npu_bytes_per_s, &assumptions[2])]
    {
        let range = format!("({:.1} to {:.1})", figure.low() / 1e9, figure.high() / 1e9);
        assert!(line.contains(&range) && figure.confidence == Confidence::Measured, "{line}");
    }
    // A plan made for it is still one: its speeds are ranges.
    let shape = lfm();
    let plan = choose(&PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile)).unwrap();
    let decode = plan.forecasts.iter().find(|forecast| forecast.regime == Regime::Decode).unwrap();
    assert!(decode.cpu_only.low < decode.cpu_only.value && decode.cpu_only.value < decode.cpu_only.high);
}

#[test]
fn contended_rates_come_in_pairs() {
    let mut profile = built_in("rk3588");
    let half = |figure: &orkpack::profile::Figure<f64>| {
        let mut half = figure.clone();
        (half.value, half.low, half.high) = (figure.value / 2.0, None, None);
        Some(half)
    };
    profile.rates.cpu_shared_bytes_per_s = half(&profile.rates.cpu_bytes_per_s);
    let error = DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap_err().to_string();
    assert!(error.contains("rates.cpu_shared_bytes_per_s") && error.contains("given alone"), "{error}");
    profile.rates.npu_shared_bytes_per_s = half(&profile.rates.npu_bytes_per_s);
    let json = profile.to_json().unwrap();
    let read = DeviceProfile::from_json(&json).unwrap();
    assert_eq!(read, profile);
    let (cpu, npu) = read.rates.shared().unwrap();
    assert_eq!((cpu.value, npu.value), (12e9, 12e9));
    assert_eq!(built_in("rk3588").rates.shared(), None);
    schema::check(&schema::load("profile.schema.json"), &serde_json::from_slice(&json).unwrap()).unwrap();
    profile.rates.npu_shared_bytes_per_s =
        Some(orkpack::profile::Figure { value: 30e9, high: None, ..profile.rates.npu_bytes_per_s.clone() });
    let error = DeviceProfile::from_json(&profile.to_json().unwrap()).unwrap_err().to_string();
    assert!(error.contains("`rates.npu_shared_bytes_per_s` is 30000000000"), "{error}");
}

/// No scratch that the shapes of a built-in profile can ask for is longer than a buffer may be, or than the reserve.
#[test]
fn scratch_fits_buffers_and_reserve() {
    for name in DeviceProfile::names() {
        let profile = built_in(name);
        let n = profile.shapes.n_max.value;
        let part = |k: u32| SubMatrix { k0: 0, k_len: k, k_padded: k, n0: 0, n_len: n, n_padded: n };
        let parts: Vec<SubMatrix> = profile.shapes.legal_k.iter().map(|legal| part(legal.k)).collect();
        let scratch = Scratch::for_parts(&parts, &profile);
        let longest = scratch.a_bytes.max(scratch.c_bytes).max(scratch.programs_bytes);
        assert!(longest <= profile.memory.buffer_bytes.value, "{name}: {scratch:?}");
        assert!(scratch.total() <= profile.memory.scratch_reserve_bytes.value, "{name}: {scratch:?}");
    }
}
