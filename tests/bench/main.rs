//! Measurements, as ratios or beside a limit of the same run: `cargo bench`. Nothing here asserts.
//!
//! Machines are noisy: everything is run several times and the median is printed.

#![allow(clippy::print_stdout)]

mod hits;
mod load;
mod plan;
#[path = "../support"]
#[allow(dead_code)]
mod support {
    pub mod gguf_builder;
    pub mod hits;
    pub mod recorder;
    pub mod routed;
}

fn main() {
    // `cargo bench -- hits` runs one of them.
    let named: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let benches: [(&str, fn()); 3] = [("hits", hits::bench), ("load", load::bench), ("plan", plan::bench)];
    for (_, bench) in benches.iter().filter(|(name, _)| named.is_empty() || named.iter().any(|n| n == name)) {
        bench();
    }
}

/// The middle of several values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
