//! Hit rates on held-out text of plans, of hindsight, and of what needs no statistics: shares of expert calls.

use crate::support::hits::{
    KINDS, Lab, SLOTS, best, first_touch, first_touch_anywhere, in_any_order, least_recent, saved_ms, served,
    worth_moving,
};

pub fn bench() {
    let lab = Lab::new();
    println!("hit rates on held-out text of the bundled model (measured), {} experts:", lab.n_experts());
    println!(
        "| text | hot experts | hindsight | plan for it | plan for the mixture | first touch | LRU | uniform |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let all: Vec<_> = lab.traces.iter().collect();
    let at_once = lab.at_once();
    let mut moving = Vec::new();
    for slots in SLOTS {
        let uniform = percent(slots as f64 / lab.n_experts() as f64);
        let mixture = lab.planned(&lab.mix, slots);
        let mut sums = [0.0; 2];
        for (kind, trace) in lab.traces.iter().enumerate() {
            let own = served(trace, &lab.planned(&lab.one[kind], slots));
            let hindsight = served(trace, &best(&[trace], slots));
            let mixed = served(trace, &mixture);
            let (first, recent) = (first_touch_anywhere(trace, slots), least_recent(&[trace], slots)[0]);
            println!(
                "| {} | {slots} | {} | {} ({} of it) | {} | {} | {} | {uniform} |",
                KINDS[kind],
                percent(hindsight),
                percent(own),
                percent(own / hindsight),
                percent(mixed),
                percent(first),
                percent(recent)
            );
            let of_all = [served(trace, &best(&all, slots)), mixed];
            sums.iter_mut().zip(of_all).for_each(|(sum, share)| *sum += share / KINDS.len() as f64);
        }
        let [hindsight, mixed] = sums;
        let first = in_any_order(&all, |texts| first_touch(texts, slots));
        let recent = in_any_order(&all, |texts| least_recent(texts, slots));
        println!(
            "| all four in turn | {slots} | {} | | {} ({} of it) | {} | {} | {uniform} |",
            percent(hindsight),
            percent(mixed),
            percent(mixed / hindsight),
            percent(first),
            percent(recent)
        );
        moving.push([saved_ms(mixed, false), saved_ms(recent, true)]);
        println!(
            "| all four at once | {slots} | {} | | {} | {} | {} | {uniform} |",
            percent(served(&at_once, &best(&[&at_once], slots))),
            percent(served(&at_once, &mixture)),
            percent(first_touch_anywhere(&at_once, slots)),
            percent(least_recent(&[&at_once], slots)[0])
        );
    }
    println!(
        "all four in turn, milliseconds that a matrix of a call saves on the prior system (estimated): moving pays from \
         {:.0} % hits on",
        100.0 * worth_moving()
    );
    println!("| hot experts | plan for the mixture | LRU, with what it moves |");
    println!("|--:|--:|--:|");
    for (slots, [plan, recent]) in SLOTS.into_iter().zip(moving) {
        println!("| {slots} | {plan:.2} | {recent:.2} |");
    }
}
