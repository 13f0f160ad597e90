//! The pool: every piece once, phases in order, panics heard, no thread left behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use orkpack::threads::{Patch, Pool};

const THREADS: [usize; 5] = [0, 1, 2, 3, 8];

#[test]
fn every_piece_runs_exactly_once() {
    for n_threads in THREADS {
        let pool = Pool::new(n_threads);
        assert_eq!(pool.n_threads(), n_threads.max(1));
        for n in [0, 1, 2, 3, 7, 8, 9, 64, 1000] {
            let counts: Vec<_> = (0..n).map(|_| AtomicU32::new(0)).collect();
            pool.run(n, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{n} pieces, {n_threads} threads");
        }
    }
}

#[test]
fn many_small_jobs_are_neither_lost_nor_doubled() {
    let pool = Pool::new(2);
    let sum = AtomicUsize::new(0);
    for round in 0..20_000 {
        pool.run(3, &|i| {
            sum.fetch_add(i + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), (round + 1) * 6);
    }
}

#[test]
fn a_pool_that_slept_wakes() {
    let pool = Pool::new(3);
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(2));
        // Two pieces that wait for each other end only if a second thread comes.
        let both = Barrier::new(2);
        pool.run(2, &|_| {
            both.wait();
        });
    }
}

#[test]
fn a_phase_begins_when_the_one_before_has_ended() {
    for n_threads in THREADS {
        let pool = Pool::new(n_threads);
        for sizes in [[1, 1, 1], [5, 0, 9], [16, 3, 40], [0, 7, 1]] {
            let done: [AtomicUsize; 3] = Default::default();
            let phase = |p: usize| {
                let done = &done;
                move |_: usize| {
                    for earlier in 0..p {
                        assert_eq!(done[earlier].load(Ordering::Relaxed), sizes[earlier]);
                    }
                    for later in &done[p + 1..] {
                        assert_eq!(later.load(Ordering::Relaxed), 0);
                    }
                    done[p].fetch_add(1, Ordering::Relaxed);
                }
            };
            for _ in 0..50 {
                done.iter().for_each(|d| d.store(0, Ordering::Relaxed));
                pool.run_phases(&[(sizes[0], &phase(0)), (sizes[1], &phase(1)), (sizes[2], &phase(2))]);
                assert_eq!(done.each_ref().map(|d| d.load(Ordering::Relaxed)), sizes);
            }
        }
    }
}

#[test]
fn a_job_inside_a_piece_runs_there() {
    let pool = Pool::new(4);
    let count = AtomicUsize::new(0);
    pool.run(8, &|_| {
        let outer = thread::current().id();
        pool.run(10, &|_| {
            assert_eq!(thread::current().id(), outer);
            count.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(count.into_inner(), 80);
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = Pool::new(3);
    let count = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(5, &|_| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(count.into_inner(), 4 * 200 * 5);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    for n_threads in THREADS {
        let pool = Pool::new(n_threads);
        for bad in [0, 5, 19] {
            let after = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run_phases(&[
                    (20, &|i| assert_ne!(i, bad, "piece is bad")),
                    (4, &|_| {
                        after.fetch_add(1, Ordering::Relaxed);
                    }),
                ]);
            }));
            let payload = result.expect_err("the panic is heard");
            assert!(payload.downcast_ref::<String>().is_some_and(|text| text.contains("piece is bad")));
            assert_eq!(after.into_inner(), 0, "the next phase must not see half a phase");
            let count = AtomicUsize::new(0);
            pool.run(6, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 6);
        }
    }
}

#[test]
fn dropping_a_pool_ends_its_threads() {
    let alive = Arc::new(());
    thread_local!(static KEPT: std::cell::RefCell<Option<Arc<()>>> = const { std::cell::RefCell::new(None) });
    let pool = Pool::new(3);
    let all = Barrier::new(3);
    pool.run(3, &|_| {
        KEPT.set(Some(Arc::clone(&alive)));
        all.wait();
    });
    assert_eq!(Arc::strong_count(&alive), 4);
    drop(pool);
    assert_eq!(Arc::strong_count(&alive), 2, "only this thread's own is left");
    KEPT.set(None);
}

#[test]
fn patches_cover_a_matrix_without_overlap() {
    let mut matrix = vec![0.0; 5 * 7];
    let (front, back) = ([3, 0], [4, 1]);
    let mut patches = Patch::cut(&mut matrix, 7, &[(&front, 3), (&back, 7)]).unwrap();
    assert_eq!(patches.iter().map(Patch::cols).collect::<Vec<_>>(), [0..3, 3..6, 6..7, 0..7]);
    for (p, patch) in patches.iter_mut().enumerate() {
        for i in 0..patch.n_rows() {
            patch.row(i).fill((10 * (p + 1) + i) as f32);
        }
    }
    let row = |r: usize| matrix[7 * r..7 * r + 7].to_vec();
    assert_eq!(row(3), [10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 30.0]);
    assert_eq!(row(0), [11.0, 11.0, 11.0, 21.0, 21.0, 21.0, 31.0]);
    assert_eq!((row(4), row(1), row(2)), (vec![40.0; 7], vec![41.0; 7], vec![0.0; 7]));
}

#[test]
fn patches_that_would_overlap_or_leave_the_matrix_are_refused() {
    let mut matrix = vec![0.0; 4 * 3];
    for groups in [[&[0u32, 1][..], &[1, 2]], [&[0, 0], &[]], [&[4], &[]]] {
        assert!(Patch::cut(&mut matrix, 3, &groups.map(|rows| (rows, 2))).is_none(), "{groups:?}");
    }
    assert!(Patch::cut(&mut matrix, 5, &[]).is_none());
    assert!(Patch::cut(&mut matrix, 0, &[]).is_none());
}

#[test]
fn the_default_is_at_least_one_thread() {
    let most = thread::available_parallelism().unwrap().get();
    assert!((1..=most).contains(&Pool::default_threads()));
}
