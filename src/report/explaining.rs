//! What was asked beyond the plan itself: single experts explained, other budgets.

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::planning::{spread, table, word};
use crate::plan::{Advice, Calls, Explanation, Holds, LayerTime, Plan, SweepPoint, SweepSpeed};
use crate::units::Bytes;

/// The plan as `--json` gives it: its document (schema: `formats/plan.schema.json`), and beside it what was asked.
#[derive(Clone, Debug)]
pub struct PlanDocument<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Of `--explain`, in the order asked.
    pub explanations: Vec<Explanation>,
    /// Of `--sweep`, by budget.
    pub sweep: Vec<SweepPoint>,
    /// Of `--report`: where each layer's time goes.
    pub times: Vec<LayerTime>,
    /// What the speeds rest on, for people.
    pub assumptions: Vec<String>,
}

impl<'a> PlanDocument<'a> {
    /// A plan and nothing beside it.
    pub fn of(plan: &'a Plan) -> PlanDocument<'a> {
        PlanDocument {
            plan,
            explanations: Vec::new(),
            sweep: Vec::new(),
            times: Vec::new(),
            assumptions: Vec::new(),
        }
    }
}

/// The fields of the plan, then what was asked, as far as it was.
impl Serialize for PlanDocument<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        macro_rules! entries {
            ($($field:ident)*) => { $(map.serialize_entry(stringify!($field), &self.plan.$field)?;)* };
        }
        entries! { schema verdict forecasts notes profile statistics architecture objective budget_bytes window_bytes n_domains footprint hit_rates memory gap cuts layers chunks }
        if !self.explanations.is_empty() {
            map.serialize_entry("explanations", &self.explanations)?;
        }
        if !self.sweep.is_empty() {
            map.serialize_entry("sweep", &self.sweep)?;
        }
        if !self.times.is_empty() {
            map.serialize_entry("times", &self.times)?;
        }
        map.end()
    }
}

/// The plan for people, then what was asked beside it; `source` says where its routing comes from.
pub fn planned(document: &PlanDocument<'_>, source: &str) -> String {
    let mut text = super::plan(document.plan, source);
    if !document.assumptions.is_empty() {
        text += &format!("\nspeeds rest on: {}\n", document.assumptions.join("; "));
    }
    for explanation in &document.explanations {
        text += &explained(document.plan, explanation);
    }
    text += &swept(&document.sweep);
    text
}

/// Other budgets, a line each.
fn swept(sweep: &[SweepPoint]) -> String {
    let Some(first) = sweep.first() else { return String::new() };
    let head = [
        "budget",
        "matrices",
        "hit rate",
        "decode, tokens/s",
        "gain",
        "prefill of 512",
        "gain",
        "use the NPU for",
    ];
    let mut table = table(&head);
    for point in sweep {
        let SweepPoint { decode, prefill, hit_rate, .. } = point;
        let served = hit_rate.held_out.unwrap_or(hit_rate.calibration).value;
        let gain = |speed: &SweepSpeed| format!("{:.2}×", speed.gain.value);
        table.add_row([
            Bytes(point.budget_bytes).to_string(),
            point.n_matrices.to_string(),
            format!("{:.1} %", 100.0 * served),
            spread(&decode.planned, 1),
            gain(decode),
            spread(&prefill.planned, 1),
            gain(prefill),
            advised(decode.verdict, prefill.verdict).to_owned(),
        ]);
    }
    let text = match first.hit_rate.held_out {
        Some(_) => "held-out text",
        None => "the text planned from",
    };
    format!(
        "\n{table}\nhit rates: {text}, {}; speeds and gains: {}\n",
        word(first.hit_rate_basis),
        word(first.decode.basis)
    )
}

/// What both verdicts come to.
pub(super) fn advised(decode: Advice, prefill: Advice) -> &'static str {
    match (decode, prefill) {
        (Advice::AsAsked, _) | (_, Advice::AsAsked) => "as asked",
        (Advice::Npu, Advice::Npu) => "both",
        (Advice::Npu, Advice::CpuOnly) => "decode",
        (Advice::CpuOnly, Advice::Npu) => "prefill",
        (Advice::CpuOnly, Advice::CpuOnly) => "nothing",
    }
}

fn explained(plan: &Plan, why: &Explanation) -> String {
    let Explanation { layer, expert, reason, .. } = why;
    let held = match why.resident {
        Some(Holds::Whole) => "in, whole",
        Some(Holds::GateUp) => "in, gate and up only",
        Some(Holds::Down) => "in, down only",
        Some(Holds::Rows) => "in, its first rows",
        None => "out",
    };
    let used = match (why.resident, why.hot_in_decode, why.hot_in_prefill) {
        (None, ..) => "",
        (_, true, true) => "; used in decode and prefill",
        (_, true, false) => "; used in decode only",
        (_, false, true) => "; used in prefill only",
        (_, false, false) => "; used in neither decode nor prefill",
    };
    let counted = |what: &str, calls: &Calls| {
        format!(", {what} {:.2} % ({} of {})", 100.0 * calls.share, calls.calls, calls.of)
    };
    let calls = match (&why.calibration, &why.held_out) {
        (Some(calibration), Some(held_out)) => {
            counted("calibration", calibration) + &counted("held out", held_out)
        }
        (Some(calibration), None) => counted("calibration", calibration) + ", no held-out text",
        (None, _) => ", not counted: which expert it is, is not known".to_owned(),
    };
    let seconds = |seconds: f64| format!("{:.1} µs", 1e6 * seconds);
    let basis = word(why.seconds_basis);
    format!(
        "\nlayer {layer}, expert {expert}: {held}: {reason}{used}\n\
         \x20 calls: {:.2} % of its layer's, as planned with{calls}, {}; even use would be {:.2} %\n\
         \x20 rank: {} of {} in its layer\n\
         \x20 bytes: {}\n\
         \x20 saves: {} per decoded token, {} per prompt of 512 ({basis})\n\
         \x20 turns: {}\n",
        100.0 * why.share,
        word(why.share_basis),
        100.0 / f64::from(why.n_expert.max(1)),
        why.rank,
        why.n_expert,
        Bytes(why.bytes),
        seconds(why.decode_seconds),
        seconds(why.prefill_seconds),
        turns(plan, why)
    )
}

/// At which budget it turns.
fn turns(plan: &Plan, why: &Explanation) -> String {
    let Some(bytes) = why.flip_bytes else {
        return match why.resident {
            Some(_) => "at no budget that can be planned with".to_owned(),
            None => format!("at no budget up to the window, {}", Bytes(plan.window_bytes)),
        };
    };
    let exact = match why.flip_is_exact {
        true => "",
        false => " (not every budget on the way was planned)",
    };
    match why.resident {
        Some(_) => format!("in from {} ({bytes} bytes) on, out with a byte less{exact}", Bytes(bytes)),
        None => format!("in at {} ({bytes} bytes), not at any budget before{exact}", Bytes(bytes)),
    }
}
