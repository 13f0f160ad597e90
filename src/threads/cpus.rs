//! Which CPUs are worth a thread: those that this process may use, and of those the fastest.
//!
//! On big.LITTLE chips a matrix product split over fast and slow cores ends when the slow ones do, and four
//! cores already fill the memory bus of an RK3588; so the slow ones are left to the system.

use std::fs;
use std::num::NonZero;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPUs a pool of this process should use.
pub(super) struct Cpus {
    /// The fastest allowed CPUs, when the allowed ones differ.
    fastest: Option<Vec<usize>>,
    /// How many threads pay.
    pub(super) n_threads: usize,
}

impl Cpus {
    /// Asks the system: affinity, cgroup quota (both known to the standard library) and `cpu_capacity`.
    pub(super) fn detect() -> Cpus {
        let allowed = thread::available_parallelism().map_or(1, NonZero::get);
        let capacities: Vec<(usize, u32)> = sched_getaffinity(None).map_or_else(
            |_| Vec::new(),
            |set| {
                (0..CpuSet::MAX_CPU)
                    .filter(|&cpu| set.is_set(cpu))
                    .filter_map(|cpu| Some((cpu, capacity(cpu)?)))
                    .collect()
            },
        );
        let fastest = fastest(&capacities);
        let n_threads = fastest.as_ref().map_or(allowed, |list| allowed.min(list.len()));
        Cpus { fastest, n_threads }
    }

    /// Keeps the calling thread on the fastest CPUs, where CPUs differ. Only a wish: refusal changes nothing.
    pub(super) fn pin_this_thread(&self) {
        if let Some(list) = &self.fastest {
            let mut set = CpuSet::new();
            list.iter().for_each(|&cpu| set.set(cpu));
            let _ = sched_setaffinity(None, &set);
        }
    }
}

/// What the kernel says of a CPU's speed, 1024 for the fastest; `None` on systems where all are alike.
fn capacity(cpu: usize) -> Option<u32> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/cpu_capacity")).ok()?.trim().parse().ok()
}

/// The CPUs of the highest capacity; `None` when all are alike or nothing is known.
fn fastest(capacities: &[(usize, u32)]) -> Option<Vec<usize>> {
    let top = capacities.iter().map(|&(_, capacity)| capacity).max()?;
    let list: Vec<usize> =
        capacities.iter().filter(|&&(_, capacity)| capacity == top).map(|&(cpu, _)| cpu).collect();
    (list.len() < capacities.len()).then_some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_fastest_cpus_are_chosen() {
        let rk3588: Vec<_> = (0..8).map(|cpu| (cpu, if cpu < 4 { 414 } else { 1024 })).collect();
        assert_eq!(fastest(&rk3588), Some(vec![4, 5, 6, 7]));
        assert_eq!(fastest(&rk3588[..4]), None, "all alike");
        assert_eq!(fastest(&rk3588[3..5]), Some(vec![4]));
        assert_eq!(fastest(&[]), None);
    }

    #[test]
    fn at_least_one_thread_pays() {
        assert!(Cpus::detect().n_threads >= 1);
    }
}
