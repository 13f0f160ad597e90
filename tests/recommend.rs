//! What the planner recommends for published models: docs/recommendations.md is computed here.

use std::fmt::Write;

use orkpack::calibrate::Statistics;
use orkpack::model::ModelShape;
use orkpack::plan::{
    Advice, Forecast, Note, PROMPT_TOKENS, Plan, PlanRequest, Planner, Routing, Skew, capacity,
};
use orkpack::profile::DeviceProfile;
use orkpack::units::Bytes;

use crate::support::docs;
use crate::support::published::{self, Mix, Published};
use crate::support::routed::statistics;

/// One token, and lengths of prompts.
const LENGTHS: [u32; 4] = [1, 32, 512, 4096];

/// Budget and domains.
const WINDOWS: [(&str, u64, u32); 4] = [
    ("1.2 GiB", 6 << 30, 1),
    ("3.5 GiB", 35 << 29, 1),
    ("8 × 1.2 GiB", 6 << 30, 8),
    ("8 × 3.5 GiB", 35 << 29, 8),
];

const GIB: f64 = (1u64 << 30) as f64;

fn rk3588() -> DeviceProfile {
    DeviceProfile::built_in("rk3588").unwrap()
}

/// Memory of the board: the profile's, or the most that there is where the weights alone do not fit it.
fn board(shape: &ModelShape, profile: &DeviceProfile) -> Bytes {
    let ram = &profile.memory.ram_bytes;
    let source = shape.dense_bytes + capacity(shape, profile, &[]).source_bytes;
    Bytes(if source > ram.value { ram.high() } else { ram.value })
}

fn routing(model: &Published) -> Statistics {
    statistics(&model.shape(Mix::Q4KM), 2048, Skew::RANGE.value, 1)
}

/// A recommendation for one model, file and window.
struct Advised {
    model: &'static str,
    mix: Mix,
    window: &'static str,
    plan: Plan,
    /// For each of [`LENGTHS`].
    forecasts: Vec<Forecast>,
    why: String,
}

impl Advised {
    /// "CPU" and its speed, or the planned speed and its gain.
    fn speed(&self, forecast: &Forecast) -> String {
        let digits = |speed: f64| if speed < 100.0 { 1 } else { 0 };
        let (planned, gain) = (forecast.planned.value, forecast.gain.value);
        let speed = format!("{planned:.*}", digits(planned));
        match self.is_on_npu(forecast.tokens) {
            true => format!("**{speed}** ({gain:.2}×)"),
            // Copies for prompts may take the memory of the weights that a token reads.
            false if gain < 0.995 => format!("CPU {speed} ({gain:.2}×)"),
            false => format!("CPU {speed}"),
        }
    }

    fn is_on_npu(&self, tokens: u32) -> bool {
        let uses = self.plan.cut(tokens).is_some_and(|cut| cut.layers.iter().any(|n| *n > 0));
        uses && !self.plan.is_cold()
    }

    fn gain(&self, tokens: u32) -> f64 {
        self.forecasts.iter().find(|forecast| forecast.tokens == tokens).unwrap().gain.value
    }

    fn is_over_ram(&self) -> bool {
        self.plan.memory.total_bytes > self.plan.memory.ram_bytes
    }

    fn line(&self) -> String {
        let Plan { footprint, hit_rates, memory, .. } = &self.plan;
        let resident = match footprint.weight_bytes {
            0 => "nothing".to_owned(),
            bytes => {
                let served = hit_rates.overall.held_out.unwrap_or(hit_rates.overall.calibration).value;
                format!("{:.1} GiB, {:.0} %", bytes as f64 / GIB, 100.0 * served)
            }
        };
        let [needed, ram] = [memory.total_bytes, memory.ram_bytes].map(|b| format!("{:.0}", b as f64 / GIB));
        let needed = if self.is_over_ram() { format!("**{needed}**") } else { needed };
        let speeds: Vec<String> = self.forecasts.iter().map(|forecast| self.speed(forecast)).collect();
        format!(
            "| {} | {} | {resident} | {} | {needed} of {ram} GiB | {} |\n",
            self.model,
            self.window,
            speeds.join(" | "),
            self.why
        )
    }
}

/// Bytes of int8 copies over those of the source, of what one token is sent to.
fn bytes_ratio(model: &Published, mix: Mix) -> f64 {
    let capacity = capacity(&model.shape(mix), &rk3588(), &[]);
    capacity.copy_bytes as f64 / capacity.source_bytes as f64
}

/// Why, in computed facts: what decides at one token, and what at a prompt of 512.
fn why(model: &Published, mix: Mix, plan: &Plan) -> String {
    let profile = rk3588();
    let both = profile.rates.both_bytes_per_s.value / profile.rates.cpu_bytes_per_s.value;
    let (ratio, switch) = (bytes_ratio(model, mix), profile.latency_us.domain_switch.value / 1e3);
    let Plan { memory, n_domains, .. } = plan;
    let token = match plan.verdict.decode {
        Advice::CpuOnly if ratio <= both && plan.is_cold() => None,
        Advice::CpuOnly if ratio <= both && *n_domains > 1 => {
            Some(format!("{n_domains} domains cost a token {:.0} ms", switch * f64::from(*n_domains)))
        }
        Advice::CpuOnly if ratio <= both => {
            Some(format!("{:.0} % of the calls served", 100.0 * plan.hit_rates.overall.calibration.value))
        }
        _ => Some(format!("int8 is {ratio:.2} × the bytes, {both:.2} × come")),
    };
    let from_disk = (memory.source_bytes > memory.ram_bytes)
        .then(|| format!("{:.0} GiB of weights come from disk", memory.source_bytes as f64 / GIB));
    let all = capacity(&model.shape(mix), &profile, &[]).copy_bytes;
    let held = 100.0 * plan.footprint.weight_bytes as f64 / all as f64;
    let rows = f64::from(PROMPT_TOKENS) * model.n_used as f64 / model.n_expert as f64;
    let prompt = (!plan.is_cold()).then(|| format!("{held:.0} % of the experts, {rows:.0} rows each"));
    let is_kept = plan.notes.iter().any(|note| matches!(note, Note::KeptForModel { .. }));
    let kept = is_kept.then(|| "more copies would push weights out of memory".to_owned());
    let reasons: Vec<String> = [token, from_disk, prompt, kept].into_iter().flatten().collect();
    assert!(!reasons.is_empty(), "{} in {} domains says nothing", model.name, n_domains);
    reasons.join("; ")
}

fn advise(model: &'static Published, counts: &Statistics, profile: &DeviceProfile) -> Vec<Advised> {
    let mut advised = Vec::new();
    for mix in Mix::ALL {
        let shape = model.shape(mix);
        for domains in [1, 8] {
            let mut request = PlanRequest::new(&shape, Routing::Measured(counts), profile);
            (request.domains, request.ram) = (domains, Some(board(&shape, profile)));
            let planner = Planner::new(&request).unwrap();
            for (window, fifths, _) in WINDOWS.into_iter().filter(|window| window.2 == domains) {
                let plan = planner.plan_at(Bytes(fifths / 5)).unwrap();
                plan.check(&shape, profile).unwrap();
                let (why, model) = (why(model, mix, &plan), model.name);
                let forecasts = LENGTHS.map(|tokens| planner.forecast_at(&plan, tokens)).to_vec();
                advised.push(Advised { model, mix, window, plan, forecasts, why });
            }
        }
    }
    advised
}

/// All plans of one mix in two sentences.
fn summary(advised: &[&Advised]) -> String {
    let n = |tokens: u32| advised.iter().filter(|advised| advised.is_on_npu(tokens)).count();
    let gains = |tokens: u32| {
        let gains = advised.iter().map(|advised| advised.gain(tokens));
        let (least, most) = gains.fold((f64::INFINITY, 0.0f64), |(a, b), gain| (a.min(gain), b.max(gain)));
        format!("{least:.2} to {most:.2} times")
    };
    format!(
        "{} of {} plans use the NPU for a token ({}), {} for a prompt of 512 ({}). In {} the RAM is not enough.",
        n(1),
        advised.len(),
        gains(1),
        n(512),
        gains(512),
        advised.iter().filter(|advised| advised.is_over_ram()).count()
    )
}

/// What each model is, before anything is planned.
fn facts() -> String {
    let mut text = "\n| model | experts, used | int8 expert | int8 / Q4_K_M | int8 / Q8_0 | all int8 | in 1.2 GiB | in 3.5 GiB | \
                    rows at 32 · 512 · 4096 |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for model in published::ALL {
        let capacity = capacity(&model.shape(Mix::Q4KM), &rk3588(), &[]);
        let share = |budget: f64| 100.0 * (budget * GIB / capacity.copy_bytes as f64).min(1.0);
        let n_experts = (model.n_moe() * model.n_expert) as f64;
        let rows = [32, 512, 4096].map(|m: u32| f64::from(m) * model.n_used as f64 / model.n_expert as f64);
        writeln!(
            text,
            "| {} | {} × {}, {} | {:.1} MiB | {:.2} | {:.2} | {:.1} GiB | {:.0} % | {:.0} % | {:.0} · {:.0} · {:.0} |",
            model.name,
            model.n_moe(),
            model.n_expert,
            model.n_used,
            capacity.copy_bytes as f64 / n_experts / 1048576.0,
            bytes_ratio(model, Mix::Q4KM),
            bytes_ratio(model, Mix::Q8),
            capacity.copy_bytes as f64 / GIB,
            share(1.2),
            share(3.5),
            rows[0],
            rows[1],
            rows[2]
        )
        .unwrap();
    }
    text + "\n"
}

#[test]
fn recommendations_are_what_the_page_says() {
    let profile = rk3588();
    let advised: Vec<Advised> =
        published::ALL.iter().flat_map(|model| advise(model, &routing(model), &profile)).collect();
    docs::hold("recommendations.md", "models", &facts());
    for mix in Mix::ALL {
        let of: Vec<&Advised> = advised.iter().filter(|advised| advised.mix == mix).collect();
        let rows = of.iter().map(|advised| advised.line());
        let head = format!(
            "\n### {}\n\n{}\n\n| model | window | resident | decode | at 32 | at 512 | at 4096 | RAM | why |\n\
             |---|---|---|---|---|---|---|--:|---|\n",
            mix.name(),
            summary(&of)
        );
        docs::hold("recommendations.md", mix.name(), &(rows.fold(head, |text, row| text + &row) + "\n"));
    }
    for advised in &advised {
        let Advised { model, window, plan, .. } = advised;
        // What a plan is made for, a prompt of 512 tokens answered in 256, is never slower for it.
        let seconds = |speed: fn(&Forecast) -> f64| {
            plan.forecasts.iter().zip([256.0, 512.0]).map(|(forecast, n)| n / speed(forecast)).sum::<f64>()
        };
        let (planned, cpu) = (seconds(|f| f.planned.value), seconds(|f| f.cpu_only.value));
        assert!(planned <= 1.001 * cpu, "{model} {window}: {planned} s, {cpu} s on the CPU");
        assert!(plan.footprint.domains.iter().all(|domain| domain.weight_bytes <= plan.budget_bytes));
        let uses = |advice| advice != Advice::CpuOnly;
        assert_eq!(advised.is_on_npu(512), uses(plan.verdict.prefill), "{model} {window}");
        assert_eq!(advised.is_on_npu(1), uses(plan.verdict.decode), "{model} {window}");
    }
    // A larger window never makes a prompt slower.
    for pair in advised.chunks(2) {
        let (small, large) = (&pair[0], &pair[1]);
        assert!(large.gain(512) >= small.gain(512) - 1e-9, "{} {}", large.model, large.window);
    }
}
