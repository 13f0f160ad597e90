//! The first rows of every expert instead of whole experts: what they cost, and what they add. docs/recommendations.md.

use std::fmt::Write;

use orkpack::model::ModelShape;
use orkpack::plan::cost::{Bound, Load, Phase, Rates};
use orkpack::plan::{LayerPlan, Objective, Plan, PlanRequest, Routing, Shares, Skew, choose};
use orkpack::profile::DeviceProfile;
use orkpack::tensor::{Dtype, Projection};
use orkpack::tile;
use orkpack::units::Bytes;

use crate::support::docs;
use crate::support::published::{self, Mix};
use crate::support::routed::{shape, statistics};

const WINDOWS: [(&str, u64); 2] = [("1.2 GiB", (6 << 30) / 5), ("3.5 GiB", 7 << 29)];

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Seconds of `tokens` tokens with the planned rows hot, by the equations of docs/planning.md and nothing else. Every expert
/// that is used gets `rows` rows, and `n_called` are.
fn by_hand(
    shape: &ModelShape,
    profile: &DeviceProfile,
    plan: &Plan,
    tokens: u32,
    rows: f64,
    n_called: f64,
) -> f64 {
    let rates = Rates::of(profile, Bound::Likely);
    let mut seconds = rates.dense_seconds(shape, tokens);
    for (layer, planned) in shape.moe_layers.iter().zip(&plan.layers) {
        for projections in [&[Projection::Gate, Projection::Up][..], &[Projection::Down]] {
            let (mut npu, mut cpu, mut scaled) = (Load::default(), Load::default(), 0.0);
            for projection in projections {
                let matrix = &layer.experts[0][*projection as usize];
                let hot = planned.matrices[*projection as usize].rows.unwrap_or(0);
                for part in
                    if hot > 0 { tile::cut(matrix.n_in as u64, hot, profile).unwrap() } else { Vec::new() }
                {
                    let (bytes, most) =
                        (part.bytes() as f64, f64::from(profile.max_rows(part.k_padded).unwrap()));
                    let passes = (rows / most).ceil();
                    npu = npu.plus(rates.npu(bytes * passes, bytes * rows, passes));
                }
                let cold = 1.0 - hot as f64 / matrix.n_out as f64;
                let (bytes, weights) = (cold * matrix.bytes as f64, cold * matrix.n_weights() as f64);
                cpu = cpu.plus(rates.cpu_matrix(matrix.dtype, bytes, weights, rows));
                scaled += n_called * rows * hot as f64;
            }
            // Gate and up share the layer's rows, down has one for each call.
            let n_rows = if projections.len() == 2 { f64::from(tokens) } else { n_called * rows };
            let quantized = n_rows * layer.experts[0][projections[0] as usize].n_in as f64;
            seconds += rates.phase_seconds(&Phase {
                npu: npu.times(n_called),
                submits: if scaled > 0.0 { 1.0 } else { 0.0 },
                cpu: cpu
                    .times(n_called)
                    .plus(rates.around(if scaled > 0.0 { quantized } else { 0.0 }, scaled)),
            });
        }
    }
    seconds
}

fn planned(request: &PlanRequest<'_>, objective: Objective, shares: Shares, budget: u64) -> Plan {
    choose(&PlanRequest { objective, shares, budget: Some(Bytes(budget)), ..request.clone() }).unwrap()
}

/// Seconds of a token, and of a prompt of 512.
fn seconds(plan: &Plan) -> [f64; 2] {
    [0, 1]
        .map(|regime: usize| f64::from(plan.forecasts[regime].tokens) / plan.forecasts[regime].planned.value)
}

fn close(found: f64, expected: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < 1e-7, "{what}: {found}, expected {expected}");
}

#[test]
fn rows_cost_what_the_equations_say() {
    let profile = rk3588();
    // A shape of one program, one that is cut along both sides, one without an integer kernel.
    for (n_embd, n_ff, dtype) in
        [(2048, 1792, Dtype::Q8_0), (1024, 14336, Dtype::Q4_0), (512, 768, Dtype::Q4_1)]
    {
        // Every expert is used by every token: then rows are no matter of chance.
        let shape = shape(3, 6, 6, n_embd, n_ff, dtype);
        let mut request = PlanRequest::new(&shape, Routing::Assumed(Skew::RANGE), &profile);
        request.ram = Some(Bytes(1 << 40));
        let most = planned(&request, Objective::Hits, Shares::Rows, 3 << 30).footprint.weight_bytes;
        for part in 1..8 {
            let plan = planned(&request, Objective::Hits, Shares::Rows, most * part / 8);
            assert!(plan.layers.iter().any(LayerPlan::is_by_rows));
            let [token, prompt] = seconds(&plan);
            let what = format!("{n_embd} × {n_ff} {dtype}, {part}/8");
            close(token, by_hand(&shape, &profile, &plan, 1, 1.0, 6.0), &what);
            close(prompt, by_hand(&shape, &profile, &plan, 512, 512.0, 6.0), &what);
        }
    }
}

#[test]
fn all_rows_cost_what_all_experts_cost_and_none_what_none_do() {
    let (profile, shape) = (rk3588(), shape(3, 16, 4, 1024, 896, Dtype::Q8_0));
    let counted = statistics(&shape, 1024, 2.2, 1);
    let request = PlanRequest::new(&shape, Routing::Measured(&counted), &profile);
    for budget in [0, 3 << 30] {
        let [rows, experts] =
            [Shares::Rows, Shares::Experts].map(|shares| planned(&request, Objective::Hits, shares, budget));
        assert_eq!(rows.footprint.weight_bytes, experts.footprint.weight_bytes);
        assert_eq!(rows.layers.iter().all(LayerPlan::is_by_rows), budget > 0);
        for (rows, experts) in seconds(&rows).into_iter().zip(seconds(&experts)) {
            close(rows, experts, &format!("{budget} bytes"));
        }
        close(1.0 + rows.hit_rates.overall.uniform, 1.0 + f64::from(u8::from(budget > 0)), "hits");
    }
}

#[test]
fn experts_that_are_named_keep_their_layer_and_rows_share_the_others() {
    let (profile, shape) = (rk3588(), shape(3, 8, 2, 1024, 512, Dtype::Q8_0));
    let counted = statistics(&shape, 512, 2.2, 1);
    let mut request = PlanRequest::new(&shape, Routing::Measured(&counted), &profile);
    request.force_hot = vec![(shape.moe_layers[1].layer, orkpack::units::ExpertId(5))];
    let plan = planned(&request, Objective::Hits, Shares::Rows, 20 << 20);
    let by_rows: Vec<bool> = plan.layers.iter().map(LayerPlan::is_by_rows).collect();
    assert_eq!(by_rows, [true, false, true]);
    assert!(plan.layers[1].ranking[0].forced && plan.layers[1].ranking[0].expert == 5);
    plan.check(&shape, &profile).unwrap();
}

#[test]
fn what_row_shares_add_is_what_the_page_says() {
    let profile = rk3588();
    let mut table =
        "| model | file | window | experts | rows | either | layers by rows |\n|---|---|---|--:|--:|--:|--:|\n".to_owned();
    let (mut most, mut where_most, mut q4) = (0.0f64, String::new(), 0.0f64);
    for model in published::ALL {
        for mix in Mix::ALL {
            let shape = model.shape(mix);
            let counts = statistics(&shape, 1024, Skew::RANGE.value, 1);
            let mut request = PlanRequest::new(&shape, Routing::Measured(&counts), &profile);
            // All fits: what is asked is the balance of the two sides.
            request.ram = Some(Bytes(1 << 40));
            for (window, budget) in WINDOWS {
                let plans = [Shares::Experts, Shares::Rows, Shares::Auto]
                    .map(|shares| planned(&request, Objective::Decode, shares, budget));
                let [experts, rows, either] = [0, 1, 2].map(|i: usize| plans[i].forecasts[0].gain.value);
                // Every layer has either: together they are never worse than one of them.
                assert!(rows >= 1.0 && experts >= 1.0, "{} {window}", model.name);
                assert!(
                    either >= rows * (1.0 - 1e-9) && either >= experts * (1.0 - 1e-9),
                    "{} {window}",
                    model.name
                );
                let by_rows = plans[2].layers.iter().filter(|layer| layer.is_by_rows()).count();
                let _ = writeln!(
                    table,
                    "| {} | {} | {window} | {experts:.2}× | {rows:.2}× | {either:.2}× | {by_rows} of {} |",
                    model.name,
                    mix.name(),
                    plans[2].layers.len()
                );
                if either / experts > most {
                    (most, where_most) =
                        (either / experts, format!("{} in {}, {window}", model.name, mix.name()));
                }
                if mix == Mix::Q4KM {
                    q4 = q4.max(either / experts);
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
}
