//! What it would give to keep the first rows of every expert instead of whole experts: docs/recommendations.md.

use std::fmt::Write;

use orkpack::model::ModelShape;
use orkpack::plan::cost::{Bound, Load, Phase, Rates};
use orkpack::plan::{Objective, PlanRequest, Routing, Skew, choose};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::Projection;
use orkpack::tile;
use orkpack::units::Bytes;

use crate::support::docs;
use crate::support::published::{self, Mix};
use crate::support::routed::statistics;

const WINDOWS: [(&str, u64); 2] = [("1.2 GiB", (6 << 30) / 5), ("3.5 GiB", 7 << 29)];

/// Rows are shared in steps of so many parts.
const STEPS: u64 = 64;

/// Seconds of a token with `share` of [`STEPS`] of every expert's rows on the NPU, and the bytes of these.
fn with_rows(shape: &ModelShape, profile: &DeviceProfile, share: u64) -> (f64, u64) {
    let rates = Rates::of(profile, Bound::Likely);
    let (mut seconds, mut resident) = (rates.dense_seconds(shape, 1), 0);
    for layer in &shape.moe_layers {
        let calls = layer.n_used as f64;
        let mut n_in = layer.experts[0][0].n_in as f64;
        for projections in [&[Projection::Gate, Projection::Up][..], &[Projection::Down]] {
            let (mut npu, mut cpu, mut scaled) = (Load::default(), Load::default(), 0.0);
            for projection in projections {
                let matrix = &layer.experts[0][*projection as usize];
                let rows =
                    (matrix.n_out as u64 * share / STEPS).next_multiple_of(32).min(matrix.n_out as u64);
                let rows = if share == 0 { 0 } else { rows };
                if rows > 0 {
                    for part in tile::cut(matrix.n_in as u64, rows, profile).unwrap() {
                        let bytes = part.bytes() as f64;
                        npu = npu.plus(rates.npu(bytes, bytes, 1.0));
                        resident += part.bytes().next_multiple_of(4096) * layer.n_expert() as u64;
                    }
                }
                let cold = 1.0 - rows as f64 / matrix.n_out as f64;
                let (bytes, weights) = (cold * matrix.bytes as f64, cold * matrix.n_weights() as f64);
                cpu = cpu.plus(rates.cpu_matrix(matrix.dtype, bytes, weights, 1.0));
                scaled += calls * rows as f64;
            }
            let quantized = if scaled > 0.0 { n_in } else { 0.0 };
            seconds += rates.phase_seconds(&Phase {
                npu: npu.times(calls),
                submits: if scaled > 0.0 { 1.0 } else { 0.0 },
                cpu: cpu.times(calls).plus(rates.around(quantized, scaled)),
            });
            // Down has a row of activations for each call.
            n_in = calls * layer.experts[0][2].n_in as f64;
        }
    }
    (seconds, resident)
}

#[test]
fn row_shares_would_add_little_and_the_page_says_how_much() {
    let profile = DeviceProfile::built_in("rk3588").unwrap();
    let mut table =
        "| model | file | window | experts | rows | share of rows |\n|---|---|---|--:|--:|--:|\n".to_owned();
    let (mut most, mut where_most, mut q4) = (0.0f64, String::new(), 0.0f64);
    for model in published::ALL {
        for mix in Mix::ALL {
            let shape = model.shape(mix);
            let counts = statistics(&shape, 1024, Skew::RANGE.value, 1);
            for (window, budget) in WINDOWS {
                let mut request = PlanRequest::new(&shape, Routing::Measured(&counts), &profile);
                (request.budget, request.objective) = (Some(Bytes(budget)), Objective::Decode);
                // All fits: what is asked is the balance of the two sides.
                request.ram = Some(Bytes(1 << 40));
                let experts = choose(&request).unwrap().forecasts[0].gain.value;
                let cold = with_rows(&shape, &profile, 0).0;
                let fits = (0..=STEPS).map(|share| (share, with_rows(&shape, &profile, share)));
                let fits = fits.filter(|(_, (_, bytes))| *bytes <= budget);
                let (share, (seconds, _)) = fits.min_by(|a, b| a.1.0.total_cmp(&b.1.0)).unwrap();
                let rows = cold / seconds;
                assert!(rows >= 1.0 && experts >= 1.0);
                let _ = writeln!(
                    table,
                    "| {} | {} | {window} | {experts:.2}× | {rows:.2}× | {:.0} % |",
                    model.name,
                    mix.name(),
                    100.0 * share as f64 / STEPS as f64
                );
                if rows / experts > most {
                    (most, where_most) =
                        (rows / experts, format!("{} in {}, {window}", model.name, mix.name()));
                }
                if mix == Mix::Q4KM {
                    q4 = q4.max(rows / experts);
                }
            }
        }
    }
    let _ = writeln!(
        table,
        "\nRows add {:.1} % at most ({where_most}), {:.1} % for files in {}.",
        100.0 * (most - 1.0),
        100.0 * (q4 - 1.0),
        Mix::Q4KM.name()
    );
    docs::hold("recommendations.md", "row shares", &table);
    // Enough to be worth building would be more than this.
    assert!(most < 1.06, "{most}");
}
