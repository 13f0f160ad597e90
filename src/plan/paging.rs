//! A model that is larger than the memory: what each pass then reads from disk.
//!
//! Weights are mapped from their file, so what does not fit is read again when it is next used; copies for the NPU
//! are pinned and take that memory away. Which experts are still there is taken as for the least recently used of
//! independent choices (Che's approximation): a weight used with probability q in a pass is found with 1 − (1 − q)^t,
//! with the t at which everything found fills the memory. Equations: docs/planning.md.

use super::PlanRequest;
use super::document::MemoryAccount;
use super::forecast::{Case, Hot};

/// Kept free for the system and the program itself: an estimate, half of a headless Linux with its caches and the
/// runtime's own 150 MB.
pub(super) const KEPT_FREE: u64 = 512 << 20;

/// The memory that a plan leaves for the model's file, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    room: f64,
}

impl Paging {
    /// With copies of so many bytes, scratch included, beside what the account says of the rest.
    pub fn beside(account: &MemoryAccount, npu_bytes: u64) -> Paging {
        let taken = [npu_bytes, account.kv_bytes, account.state_bytes, KEPT_FREE];
        let taken = taken.into_iter().fold(0, u64::saturating_add);
        Paging { room: account.ram_bytes.saturating_sub(taken) as f64 }
    }

    /// Bytes that a pass of so many tokens reads from disk when these are hot; 0 where everything fits.
    pub fn bytes(&self, request: &PlanRequest<'_>, case: &Case, hot: &[Hot], tokens: u32) -> f64 {
        let dense = request.shape.dense_bytes as f64;
        // Of what the CPU reads: bytes, and the logarithm of the probability that a pass does not use it.
        let mut used: Vec<(f64, f64)> = Vec::new();
        // The same of all layers' experts at each place of the ranking, taken for one: bytes, and bytes times logarithm.
        let mut places: Vec<(f64, f64)> = Vec::new();
        for (model, hot) in case.models.iter().zip(hot) {
            places.resize(places.len().max(model.n_expert()), (0.0, 0.0));
            for (at, [gate, up, down]) in model.source_bytes().iter().enumerate() {
                let (cold_gate_up, cold_down) = model.cold_shares(hot.state, at);
                let bytes = cold_gate_up * (gate + up) + cold_down * down;
                if bytes > 0.0 {
                    let unused = f64::from(tokens) * model.log_unused[at];
                    used.push((bytes, unused));
                    places[at] = (places[at].0 + bytes, places[at].1 + bytes * unused);
                }
            }
        }
        let all: f64 = used.iter().map(|(bytes, _)| bytes).sum();
        if dense + all <= self.room {
            return 0.0;
        }
        let missed =
            |t: f64| used.iter().map(|&(bytes, a)| bytes * (1.0 - a.exp()) * (a * t).exp()).sum::<f64>();
        if dense >= self.room {
            return dense - self.room + missed(0.0);
        }
        // Less of what is used unevenly is found than of its mean: the solution for the means comes before the other.
        let places =
            places.iter().filter(|(bytes, _)| *bytes > 0.0).map(|&(bytes, sum)| (bytes, sum / bytes));
        let near = self.fill(dense, &places.collect::<Vec<_>>(), 0.0);
        missed(self.fill(dense, &used, near))
    }

    /// The t at which what is found fills the memory, by Newton's method: what is found grows with t, less and less, so
    /// that from any t before the solution on it never passes it.
    fn fill(&self, dense: f64, used: &[(f64, f64)], mut t: f64) -> f64 {
        for _ in 0..64 {
            let (found, slope) = used.iter().fold((dense, 0.0), |(found, slope), &(bytes, a)| {
                let not = bytes * (a * t).exp();
                (found + bytes - not, slope - a * not)
            });
            let step = (self.room - found) / slope;
            if step.is_nan() || step <= 1e-9 * t {
                break;
            }
            t += step;
        }
        t
    }
}
