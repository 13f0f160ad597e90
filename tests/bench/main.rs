//! Measurements, as ratios or beside a limit of the same run: `cargo bench`. Nothing here asserts.
//!
//! Machines are noisy: everything is run several times and the median is printed.

#![allow(clippy::print_stdout)]

mod load;
mod plan;
#[path = "../support"]
#[allow(dead_code)]
mod support {
    pub mod gguf_builder;
    pub mod routed;
}

fn main() {
    load::bench();
    plan::bench();
}

/// The middle of several values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
