//! The demo, the way a stranger runs it.

use assert_cmd::Command;
use serde_json::Value;

use crate::support::models::folder;
use crate::support::schema;

#[test]
fn the_demo_goes_the_whole_way() {
    let folder = folder();
    let demo = |json: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orkpack"));
        command.current_dir(folder.path()).args(["demo", "--quiet"]).args(json.then_some("--json"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = demo(false);
    for step in [
        "1. The model",
        "2. Calibrated",
        "3. Planned",
        "4. Converted",
        "5. Verified",
        "6. Decoded",
        "7. Compared",
    ] {
        assert!(text.contains(step), "{step}: {text}");
    }
    assert!(text.contains("register programs") && text.contains("target/demo"), "{text}");
    // The model has learned its tables.
    assert!(text.contains("14\n"), "{text}");
    let document: Value = serde_json::from_str(&demo(true)).unwrap();
    schema::check(&schema::load("demo.schema.json"), &document).unwrap();
    assert!(document["run"]["device"]["programs"].as_u64().unwrap() > 1000);
    let hot = document["run"]["device"]["prefill_hit_rate"].as_f64().unwrap();
    assert!((0.2..0.7).contains(&hot), "about a third of the experts serve {hot}");
    let perplexity = document["run"]["perplexity"]["perplexity"].as_f64().unwrap();
    let reference = document["run"]["perplexity"]["reference_perplexity"].as_f64().unwrap();
    assert!((perplexity / reference - 1.0).abs() < 0.003, "{perplexity} {reference}");
    assert!(folder.path().join("target/demo/tiny-moe-q4_k_m.orkpack").is_file());
}
