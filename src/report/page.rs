//! A plan as one page for a browser: no scripts, nothing from elsewhere, well-formed as XML too.
//!
//! Every number is the document's; this lays them out. Text from files is escaped.

use std::fmt::Write;

use super::PlanDocument;
use super::explaining::advised;
use super::planning::{spread, word};
use crate::plan::{HitRate, LayerPlan, Parts, Plan, Range, SweepPoint, SweepSpeed};
use crate::units::Bytes;

const STYLE: &str = "
:root{color-scheme:light dark;--paper:#fff;--ink:#1c1f24;--soft:#5b6470;--line:#d5dae0;--heat:#c2410c;--hot:#1d4ed8;
--cpu:#64748b;--both:#0f766e;--npu:#1d4ed8;--start:#d97706}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e6e9ed;--soft:#9aa4b0;--line:#343b44;--heat:#fb923c;
--hot:#7db2ff;--cpu:#94a3b8;--both:#2dd4bf;--npu:#7db2ff;--start:#fbbf24}}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;
padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.4rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem}.verdict{font-size:1.1rem;border-left:4px solid var(--hot);
padding-left:.8rem}.soft,figcaption{color:var(--soft);font-size:.875rem}.scroll{overflow-x:auto}figure{margin:1rem 0}
table{border-collapse:collapse;white-space:nowrap}td,th{padding:.2rem .7rem .2rem 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid var(--line)}
svg{display:block}svg.wide{width:100%;max-width:34rem;height:auto}text{fill:var(--soft);font:11px system-ui,sans-serif}
.call{fill:var(--heat)}.hot{fill:none;stroke:var(--hot);stroke-width:2}.part{fill:none;stroke:var(--hot);stroke-dasharray:2 2}.axis{stroke:var(--line);fill:none}
.band{fill:var(--hot);fill-opacity:.15}.curve{stroke:var(--hot);fill:none;stroke-width:2}
.mark{stroke:var(--heat);stroke-dasharray:4 3}.cpu{fill:var(--cpu);background:var(--cpu)}
.both{fill:var(--both);background:var(--both)}.npu{fill:var(--npu);background:var(--npu)}
.start{fill:var(--start);background:var(--start)}.key i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
.whisker{stroke:var(--ink)}
";

/// The page; `name` is the model's, `source` says where the routing comes from.
pub fn page(document: &PlanDocument<'_>, name: &str, source: &str) -> String {
    let (plan, name) = (document.plan, html(name));
    let mut notes: String =
        plan.notes.iter().map(|note| format!("<li>{}</li>", html(&note.to_string()))).collect();
    if !notes.is_empty() {
        notes = format!("<h2>Notes</h2><ul>{notes}</ul>");
    }
    let sections = [
        speeds(plan),
        heat_map(plan),
        budget_curves(plan, &document.sweep),
        times(document),
        texts(plan),
        notes,
    ];
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>Plan for {name}</title>\
         <style>{STYLE}</style></head>\n<body><h1>Plan for {name}</h1>\n<p class=\"verdict\">{}</p>\n\
         <p class=\"soft\">Device {}, architecture {}; routing: {}.</p>\n{}\n</body></html>\n",
        html(&plan.verdict.sentence),
        html(&plan.profile.name),
        html(&plan.architecture),
        html(source),
        sections.join("\n")
    )
}

/// Text as it stands in a page: nothing in it is markup, and nothing that turns or moves text is left.
fn html(text: &str) -> String {
    let mut out = String::new();
    for c in super::escape(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // No characters of XML.
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn speeds(plan: &Plan) -> String {
    let mut rows = String::new();
    for forecast in &plan.forecasts {
        let what = if forecast.tokens == 1 {
            "decode".to_owned()
        } else {
            format!("prefill of {}", forecast.tokens)
        };
        let cells =
            [&forecast.cpu_only, &forecast.planned, &forecast.all_resident].map(|range| spread(range, 1));
        // Writing to a string cannot fail.
        let _ = write!(
            rows,
            "<tr><td>{what}</td><td>{}</td><td>{}×</td><td>{}</td></tr>",
            cells.join("</td><td>"),
            spread(&forecast.gain, 2),
            word(forecast.basis)
        );
    }
    let memory = &plan.memory;
    format!(
        "<h2>Speed, tokens per second</h2><div class=\"scroll\"><table><tr><th></th><th>CPU only</th><th>planned</th>\
         <th>all resident</th><th>gain</th><th></th></tr>{rows}</table></div>\
         <p>Resident: {} in {}, {} of the {} budget. Memory: model {} + NPU {} + scratch {} + key-value cache {} \
         + states {} = {} of {}.</p>",
        super::counted(plan.matrices().count() as u64, "expert matrix", "expert matrices"),
        super::counted(plan.footprint.n_chunks.into(), "chunk", "chunks"),
        Bytes(plan.footprint.weight_bytes),
        Bytes(plan.budget_bytes),
        Bytes(memory.source_bytes),
        Bytes(memory.npu_bytes),
        Bytes(memory.scratch_bytes),
        Bytes(memory.kv_bytes),
        Bytes(memory.state_bytes),
        Bytes(memory.total_bytes),
        Bytes(memory.ram_bytes)
    )
}

/// Calls by layer and expert, as dark as the share is near the layer's largest; what is resident is outlined.
fn heat_map(plan: &Plan) -> String {
    const CELL: usize = 12;
    let n_expert = plan.layers.iter().map(|layer| layer.n_expert as usize).max().unwrap_or(0);
    let (width, height) = (40 + n_expert * CELL, 20 + plan.layers.len() * CELL);
    let mut cells = String::new();
    for expert in (0..n_expert).step_by(8) {
        let _ = write!(cells, "<text x=\"{}\" y=\"12\">{expert}</text>", 40 + expert * CELL);
    }
    let mut outlines = String::new();
    for (row, layer) in plan.layers.iter().enumerate() {
        let y = 18 + row * CELL;
        let _ = write!(cells, "<text x=\"0\" y=\"{}\">{}</text>", y + 10, layer.layer);
        let most = layer.ranking.iter().map(|item| item.share).fold(f64::MIN_POSITIVE, f64::max);
        for (rank, item) in layer.ranking.iter().enumerate() {
            let x = 40 + item.expert as usize * CELL;
            let _ = write!(
                cells,
                "<rect class=\"call\" x=\"{x}\" y=\"{y}\" width=\"11\" height=\"11\" fill-opacity=\"{:.2}\"/>",
                0.04 + 0.96 * item.share / most
            );
            if rank < layer.resident as usize {
                let class = if layer.is_by_rows() { "part" } else { "hot" };
                let _ = write!(
                    outlines,
                    "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"11\" height=\"11\"/>"
                );
            }
        }
    }
    let known = match plan.statistics {
        Some(_) => "",
        None => " Routing was assumed: experts stand in order of their rank, not by number.",
    };
    let by_rows = match plan.layers.iter().any(LayerPlan::is_by_rows) {
        true => "; dashed: the first rows of every expert",
        false => "",
    };
    format!(
        "<h2>Calls by layer and expert</h2><figure><div class=\"scroll\"><svg role=\"img\" \
         aria-label=\"Calls by layer and expert\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" \
         height=\"{height}\" viewBox=\"0 0 {width} {height}\">{cells}{outlines}</svg></div><figcaption>Rows are layers, \
         columns experts. The stronger the colour, the nearer to the most called expert of the layer; outlined: \
         resident{by_rows}.{known}</figcaption></figure>"
    )
}

fn budget_curves(plan: &Plan, sweep: &[SweepPoint]) -> String {
    if sweep.len() < 2 {
        return String::new();
    }
    let curve = |title: &str, cpu: &Range, of: fn(&SweepPoint) -> &SweepSpeed| {
        let svg = curve(plan.budget_bytes, sweep, cpu.value, &|point| of(point).planned);
        format!("<h3>{title}, tokens per second</h3>{svg}")
    };
    let cpu =
        |regime: usize| plan.forecasts.get(regime).map(|forecast| forecast.cpu_only).unwrap_or_default();
    let mut rows = String::new();
    for point in sweep {
        let _ = write!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{:.2}×</td><td>{:.2}×</td><td>{}</td></tr>",
            Bytes(point.budget_bytes),
            point.n_matrices,
            point.decode.gain.value,
            point.prefill.gain.value,
            advised(point.decode.verdict, point.prefill.verdict)
        );
    }
    format!(
        "<h2>Other budgets</h2><figure>{}{}<figcaption>Line: likely; band: slowest to fastest case; dashed: this \
         plan's budget; grey: the CPU alone. All {}.</figcaption></figure><div class=\"scroll\"><table><tr>\
         <th>budget</th><th>matrices</th><th>decode gain</th><th>prefill gain</th><th>use the NPU for</th></tr>{rows}</table></div>",
        curve("Decode", &cpu(0), |point| &point.decode),
        curve("Prefill of 512", &cpu(1), |point| &point.prefill),
        word(plan.forecasts.first().map_or(crate::plan::Basis::Estimated, |forecast| forecast.basis))
    )
}

fn curve(budget: u64, sweep: &[SweepPoint], cpu: f64, of: &dyn Fn(&SweepPoint) -> Range) -> String {
    let ends = [sweep.first(), sweep.last()].map(|point| point.map_or(0, |point| point.budget_bytes));
    let most = sweep.iter().map(|point| of(point).high).fold(cpu, f64::max).max(f64::MIN_POSITIVE);
    let x = |bytes: u64| 40.0 + 315.0 * (bytes as f64 - ends[0] as f64) / (ends[1] - ends[0]).max(1) as f64;
    let y = |speed: f64| 170.0 - 155.0 * speed / most;
    let point = |p: &SweepPoint, speed: f64| format!("{:.1},{:.1} ", x(p.budget_bytes), y(speed));
    let line: String = sweep.iter().map(|p| point(p, of(p).value)).collect();
    let mut band: String = sweep.iter().map(|p| point(p, of(p).high)).collect();
    band.extend(sweep.iter().rev().map(|p| point(p, of(p).low)));
    let mark = match (ends[0]..=ends[1]).contains(&budget) {
        true => format!("<path class=\"mark\" d=\"M{0:.1} 15V170\"/>", x(budget)),
        false => String::new(),
    };
    format!(
        "<svg class=\"wide\" role=\"img\" aria-label=\"Speed by budget\" xmlns=\"http://www.w3.org/2000/svg\" \
         viewBox=\"0 0 360 195\"><path class=\"axis\" d=\"M40 15V170H355M40 {cpu:.1}H355\"/><polygon class=\"band\" \
         points=\"{band}\"/><polyline class=\"curve\" points=\"{line}\"/>{mark}<text x=\"0\" y=\"20\">{most:.0}</text>\
         <text x=\"0\" y=\"174\">0</text><text x=\"40\" y=\"190\">{}</text>\
         <text x=\"355\" y=\"190\" text-anchor=\"end\">{}</text></svg>",
        Bytes(ends[0]),
        Bytes(ends[1]),
        cpu = y(cpu)
    )
}

fn times(document: &PlanDocument<'_>) -> String {
    let bars = |title: &str, of: &dyn Fn(&crate::plan::LayerTime) -> Parts| {
        let most = document.times.iter().map(|time| of(time).seconds()).fold(f64::MIN_POSITIVE, f64::max);
        let mut bars = String::new();
        for (row, time) in document.times.iter().enumerate() {
            let (parts, y, mut x) = (of(time), 14 * row, 24.0);
            let _ = write!(bars, "<text x=\"0\" y=\"{}\">{}</text>", y + 10, time.layer);
            let named =
                [("cpu", parts.cpu), ("both", parts.both), ("npu", parts.npu), ("start", parts.start)];
            for (class, seconds) in named {
                let width = 275.0 * seconds / most;
                let _ = write!(
                    bars,
                    "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"12\"/>"
                );
                x += width;
            }
            let _ = write!(
                bars,
                "<text x=\"{:.1}\" y=\"{}\">{:.2} ms</text>",
                x + 5.0,
                y + 10,
                1e3 * parts.seconds()
            );
        }
        format!(
            "<h3>{title}</h3><svg class=\"wide\" role=\"img\" aria-label=\"Time by layer\" \
             xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 360 {}\">{bars}</svg>",
            14 * document.times.len()
        )
    };
    if document.times.is_empty() {
        return String::new();
    }
    format!(
        "<h2>Time of each layer's experts</h2><figure><p class=\"key\"><i class=\"cpu\"></i>CPU alone\
         <i class=\"both\"></i>CPU and NPU<i class=\"npu\"></i>NPU alone, the CPU waits<i class=\"start\"></i>both wait: \
         starting</p>{}{}<figcaption>Estimated, likely case. Attention and the rest of the model are not in it.\
         </figcaption></figure>",
        bars("Decode, one token", &|time| time.decode),
        bars("Prefill of 512", &|time| time.prefill)
    )
}

/// Calls served in the text chosen from and in text set aside, with their intervals.
fn texts(plan: &Plan) -> String {
    let rates = &plan.hit_rates;
    let mut rows = String::new();
    let mut y = 0;
    for (name, rate) in [("overall", &rates.overall), ("gate, up", &rates.gate), ("down", &rates.down)] {
        let HitRate { calibration, held_out, uniform, .. } = rate;
        let _ = write!(rows, "<text x=\"0\" y=\"{}\">{name}</text>", y + 12);
        let even = Range { low: *uniform, value: *uniform, high: *uniform };
        for (class, range) in [("cpu", Some(calibration)), ("npu", held_out.as_ref()), ("start", Some(&even))]
        {
            let Some(range) = range else { continue };
            let x = |rate: f64| 55.0 + 255.0 * rate;
            let middle = y + 6;
            let _ = write!(
                rows,
                "<rect class=\"{class}\" x=\"55\" y=\"{y}\" width=\"{:.2}\" height=\"12\"/><path class=\"whisker\" \
                 d=\"M{:.2} {middle}H{:.2}\"/><text x=\"{:.1}\" y=\"{}\">{:.1} %</text>",
                255.0 * range.value,
                x(range.low),
                x(range.high),
                x(range.high) + 5.0,
                y + 10,
                100.0 * range.value
            );
            y += 15;
        }
        y += 8;
    }
    let held_out = match rates.overall.held_out {
        Some(_) => "<i class=\"npu\"></i>text set aside",
        None => " (no text was set aside)",
    };
    format!(
        "<h2>Calls served: calibration against held-out text</h2><figure><p class=\"key\"><i class=\"cpu\"></i>text \
         planned from{held_out}<i class=\"start\"></i>with even use</p><svg class=\"wide\" role=\"img\" \
         aria-label=\"Hit rates\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 360 {y}\">{rows}</svg><figcaption>\
         With everything resident in use; lines are 95 % intervals; {}.</figcaption></figure>",
        word(rates.basis)
    )
}
