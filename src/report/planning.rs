//! A plan as text: the verdict first, then the speeds, the memory, the table.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use crate::calibrate::Origin;
use crate::convert::FoundStatistics;
use crate::plan::{
    Advice, Basis, Cut, Forecast, HitRate, LayerPlan, MatrixPlan, Objective, Plan, Range, Regime,
};
use crate::units::Bytes;

/// The plan for people; `source` says where its routing comes from.
pub fn plan(plan: &Plan, source: &str) -> String {
    let mut text = format!("{}\n\n", plan.verdict.sentence);
    text += &forecasts(plan);
    text += &residency(plan);
    text += &shapes(plan);
    for note in &plan.notes {
        text += &format!("note: {note}\n");
    }
    text += &format!("\nrouting: {source}\n");
    text += &layers(plan);
    text
}

/// Where a plan's routing comes from, in words.
pub fn routing(found: Option<&FoundStatistics>) -> String {
    let Some(found) = found else {
        return "assumed, estimated; `orkpack calibrate MODEL` measures it".to_owned();
    };
    let statistics = &found.statistics;
    let how = match statistics.origin {
        Origin::Calibration => "counted",
        Origin::Imatrix => "counted by an imatrix",
        Origin::Merged => "merged from several counts",
    };
    let held_out = statistics.held_out.as_ref().map_or(0, |block| block.tokens);
    let tokens = statistics.calibration.tokens;
    let file = match (&found.file, found.is_new) {
        (Some(file), true) => format!(", kept in {}", super::escape(&file.display().to_string())),
        (Some(file), false) => format!(", from {}", super::escape(&file.display().to_string())),
        (None, _) => String::new(),
    };
    format!("{how} over {tokens} tokens, {held_out} held out (measured){file}")
}

fn forecasts(plan: &Plan) -> String {
    let mut table = table(&["tokens/s", "CPU only", "planned", "all resident", "gain", ""]);
    for forecast in &plan.forecasts {
        let Forecast { regime, tokens, basis, cpu_only, planned, all_resident, gain } = forecast;
        let what = match regime {
            Regime::Decode => "decode".to_owned(),
            Regime::Prefill => format!("prefill of {tokens}"),
        };
        let speeds = [cpu_only, planned, all_resident].map(|range| spread(range, 1));
        let mut row = vec![what];
        row.extend(speeds);
        row.extend([format!("{}×", spread(gain, 2)), word(*basis).to_owned()]);
        table.add_row(row);
    }
    format!("{table}\n\n")
}

fn residency(plan: &Plan) -> String {
    let mut text = String::new();
    let footprint = &plan.footprint;
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "resident: {} in {}, {} of the {} budget{}; scratch beside it {}",
        super::counted(plan.matrices().count() as u64, "expert matrix", "expert matrices"),
        super::counted(footprint.n_chunks.into(), "chunk", "chunks"),
        Bytes(footprint.weight_bytes),
        Bytes(plan.budget_bytes),
        if plan.n_domains > 1 { format!(" in each of {} domains", plan.n_domains) } else { String::new() },
        Bytes(footprint.scratch_bytes)
    );
    if !plan.is_cold() {
        let rates = &plan.hit_rates;
        let _ = writeln!(text, "hit rate: {}, {}", hit_rate(&rates.overall), word(rates.basis));
    }
    let more = if plan.objective == Objective::Hits { "serves more calls" } else { "saves more" };
    let _ = match plan.gap {
        0.0 => writeln!(text, "choice: none within the budget {more}"),
        gap => writeln!(text, "choice: none within the budget {more}, but for {:.2} % at most", 100.0 * gap),
    };
    for cut in &plan.cuts {
        let hot = hot(plan, cut);
        let (regime, advice) = match cut.regime {
            Regime::Decode => ("decode", plan.verdict.decode),
            Regime::Prefill => ("prefill", plan.verdict.prefill),
        };
        let what = match (hot, advice) {
            (None, _) => "CPU only".to_owned(),
            (Some(hot), Advice::AsAsked) => {
                format!("{hot} hot, as asked, {:.1} % of calls", 100.0 * cut.hit_rate)
            }
            (Some(hot), _) => format!("{hot} hot, {:.1} % of calls", 100.0 * cut.hit_rate),
        };
        let _ = writeln!(
            text,
            "{regime} (from {}): {what}",
            super::counted(cut.from_tokens.into(), "token", "tokens")
        );
    }
    let memory = &plan.memory;
    let state = match memory.state_bytes {
        0 => String::new(),
        bytes => format!(" + states {}", Bytes(bytes)),
    };
    let _ = writeln!(
        text,
        "memory: model {} + NPU {} + scratch {} + KV cache at {} tokens {}{state} = {} of {}",
        Bytes(memory.source_bytes),
        Bytes(memory.npu_bytes),
        Bytes(memory.scratch_bytes),
        memory.context_tokens,
        Bytes(memory.kv_bytes),
        Bytes(memory.total_bytes),
        Bytes(memory.ram_bytes)
    );
    text
}

/// What a cut makes hot: experts, and rows of all experts; `None` for nothing.
fn hot(plan: &Plan, cut: &Cut) -> Option<String> {
    let (mut experts, mut by_rows) = (0u64, 0u64);
    for (layer, &items) in plan.layers.iter().zip(&cut.layers) {
        match layer.is_by_rows() {
            true => by_rows += u64::from(items > 0),
            false => experts += u64::from(items),
        }
    }
    let rows = || format!("rows of every expert in {}", super::counted(by_rows, "layer", "layers"));
    match (experts, by_rows) {
        (0, 0) => None,
        (_, 0) => Some(format!("{experts} experts")),
        (0, _) => Some(rows()),
        _ => Some(format!("{experts} experts and {}", rows())),
    }
}

fn hit_rate(rate: &HitRate) -> String {
    let percent = |range: &Range| {
        format!("{:.1} % ({:.1} to {:.1})", 100.0 * range.value, 100.0 * range.low, 100.0 * range.high)
    };
    let held_out =
        rate.held_out.as_ref().map_or("no held-out text".to_owned(), |r| format!("held out {}", percent(r)));
    let uniform = 100.0 * rate.uniform;
    format!(
        "calibration {}, {held_out}, uniform {uniform:.1} %, lift {:.2}×",
        percent(&rate.calibration),
        rate.lift
    )
}

/// How each shape of expert matrix fits the device, and what that costs.
fn shapes(plan: &Plan) -> String {
    let mut groups: Vec<(&MatrixPlan, usize)> = Vec::new();
    for matrix in plan.layers.iter().flat_map(|layer| &layer.matrices) {
        match groups.iter_mut().find(|(known, _)| *known == matrix) {
            Some((_, n_layers)) => *n_layers += 1,
            None => groups.push((matrix, 1)),
        }
    }
    let mut text = String::new();
    for (matrix, n_layers) in groups {
        let MatrixPlan { projection, n_in, n_out, rows, programs, tile_bytes } = matrix;
        let layers = super::counted(n_layers as u64, "layer", "layers");
        let padding = 1.0 - (*n_in as f64 * matrix.n_rows() as f64) / (*tile_bytes).max(1) as f64;
        let share =
            rows.filter(|rows| *rows > 0).map_or(String::new(), |rows| format!("the first {rows} in "));
        let fit = match programs {
            0 if rows.is_some() => "CPU only".to_owned(),
            0 => "CPU only: no program can hold it".to_owned(),
            1 => "one program".to_owned(),
            n if rows.is_some() => format!("{n} programs"),
            n => format!("cut into {n} programs"),
        };
        let _ =
            write!(text, "{projection} of {layers}, row length K = {n_in}, N = {n_out} rows: {share}{fit}");
        if *programs > 0 {
            let _ = write!(text, ", {} per expert", Bytes(*tile_bytes));
        }
        if *programs > 0 && padding > 0.0 {
            let _ = write!(text, ", {:.1} % of it padding", 100.0 * padding);
        }
        text.push('\n');
    }
    text
}

fn layers(plan: &Plan) -> String {
    let mut table = table(&["layer", "domain", "experts", "used", "resident", "hottest (share of calls)"]);
    for layer in &plan.layers {
        // Assumed routing says how much the hottest would serve, not which they are.
        let known = if plan.statistics.is_some() { 6 } else { 0 };
        let hottest = layer
            .ranking
            .iter()
            .take(known)
            .map(|item| format!("{} {:.1} %", item.expert, 100.0 * item.share));
        let hottest: Vec<String> = hottest.collect();
        table.add_row([
            layer.layer.to_string(),
            layer.domain.to_string(),
            layer.n_expert.to_string(),
            layer.n_used.to_string(),
            resident(layer),
            hottest.join(", "),
        ]);
    }
    format!("\n{table}\n")
}

/// How many experts of a layer are resident, or what share of the rows of all.
fn resident(layer: &LayerPlan) -> String {
    if !layer.is_by_rows() {
        return layer.resident.to_string();
    }
    let weights = |rows: fn(&MatrixPlan) -> u64| -> f64 {
        layer.matrices.iter().map(|matrix| matrix.n_in as f64 * rows(matrix) as f64).sum()
    };
    format!("{:.0} % of rows", 100.0 * weights(MatrixPlan::n_rows) / weights(|matrix| matrix.n_out))
}

/// A plain table: numbers to the right, no lines between rows.
pub(super) fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(head);
    for column in table.column_iter_mut().skip(1).take(head.len().saturating_sub(2)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

pub(super) fn spread(range: &Range, digits: usize) -> String {
    let Range { low, value, high } = range;
    format!("{value:.digits$} ({low:.digits$}–{high:.digits$})")
}

pub(super) fn word(basis: Basis) -> &'static str {
    match basis {
        Basis::Measured => "measured",
        Basis::Simulated => "simulated",
        Basis::Estimated => "estimated",
    }
}
