//! What a run counts: calls and hits, waits, fallbacks, and the device's own account.

use std::time::Duration;

use super::worker::Reply;
use crate::device::Account;

/// Expert calls of one regime, by projection where that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calls {
    /// All expert calls: one expert chosen for one token in one layer.
    pub all: u64,
    /// Of these, gate and up computed by the int8 contract, all of their rows or the first ones.
    pub hot_gate_up: u64,
    /// Of these, down computed by the int8 contract, all of its rows or the first ones.
    pub hot_down: u64,
    /// Matrices of calls computed by the int8 contract, three to a call; of rows that are shared, their share.
    pub hot_matrices: f64,
}

impl Calls {
    /// Share of the experts' multiplications that were hot, 0 to 1: gate and up count twice, down once, and of rows that
    /// are shared those that are hot.
    pub fn hit_rate(&self) -> f64 {
        self.hot_matrices / (3 * self.all).max(1) as f64
    }

    fn add(&mut self, other: Calls) {
        self.all += other.all;
        self.hot_gate_up += other.hot_gate_up;
        self.hot_down += other.hot_down;
        self.hot_matrices += other.hot_matrices;
    }
}

/// Everything counted since the engine was made.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Calls while prompts were read.
    pub prefill: Calls,
    /// Calls while tokens were generated.
    pub decode: Calls,
    /// Time that the CPU waited for the device, measured on this host.
    pub waited: Duration,
    /// Time that the device thread worked, measured on this host.
    pub device_busy: Duration,
    /// Products that the CPU did in the device's place.
    pub fallbacks: u64,
    /// Why the first of them.
    pub failure: Option<String>,
    /// What the device holds and has done.
    pub account: Account,
}

impl Counters {
    /// Counts one layer's calls.
    pub fn called(&mut self, decode: bool, calls: Calls) {
        if decode { self.decode.add(calls) } else { self.prefill.add(calls) }
    }

    /// Counts what the device thread did.
    pub fn replied(&mut self, reply: &Reply, waited: Duration) {
        self.waited += waited;
        self.device_busy += reply.busy;
        self.fallbacks += reply.fallbacks;
        if self.failure.is_none() {
            self.failure.clone_from(&reply.failure);
        }
        self.account = reply.account.clone();
    }
}
