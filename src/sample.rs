//! The next token from the logits: greedy, or a draw that a seed repeats exactly.
//!
//! The order is llama.cpp's: top-k, top-p, min-p, then temperature; the cuts see the probabilities at
//! temperature 1. Ties go to the lower id everywhere. Nothing here knows about models.

use std::cmp::Ordering;

use thiserror::Error;

/// How to choose.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOptions {
    /// Divides the logits; 0 takes the largest logit and looks at nothing else.
    pub temp: f32,
    /// Keep this many of the largest logits; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest tokens whose probabilities reach this sum; 1 or more keeps all.
    pub top_p: f32,
    /// Drop tokens less probable than this share of the most probable; 0 keeps all.
    pub min_p: f32,
    /// Two samplers with one seed make the same choices.
    pub seed: u64,
}

impl Default for SampleOptions {
    /// Greedy; where a temperature is set, llama.cpp's cuts.
    fn default() -> Self {
        SampleOptions { temp: 0.0, top_k: 40, top_p: 0.95, min_p: 0.05, seed: 0 }
    }
}

/// Why there is no next token.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SampleError {
    /// An option that is no such number.
    #[error("{name} is {found}, expected a finite number of at least 0")]
    Option {
        /// `temp`, `top-p` or `min-p`.
        name: &'static str,
        /// What was given.
        found: f32,
    },
    /// No logits.
    #[error("there are no logits to choose from")]
    Empty,
    /// A logit that orders nothing.
    #[error("the logit of token {token} is NaN")]
    Nan {
        /// The first such token.
        token: u32,
    },
    /// A logit that leaves no share to the others, or none that leaves any.
    #[error("the logits are not finite: the largest is {largest}")]
    NotFinite {
        /// The largest logit.
        largest: f32,
    },
}

/// Chooses tokens one after the other.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SampleOptions,
    random: SplitMix64,
}

/// A token that may still be chosen.
#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
}

impl Sampler {
    /// A sampler at the start of its seed's sequence.
    ///
    /// # Errors
    ///
    /// [`SampleError::Option`] for a negative or non-finite option.
    pub fn new(options: SampleOptions) -> Result<Sampler, SampleError> {
        for (name, found) in [("temp", options.temp), ("top-p", options.top_p), ("min-p", options.min_p)] {
            if !found.is_finite() || found < 0.0 {
                return Err(SampleError::Option { name, found });
            }
        }
        let random = SplitMix64(options.seed);
        Ok(Sampler { options, random })
    }

    /// Where in its seed's sequence it stands.
    pub fn state(&self) -> u64 {
        self.random.0
    }

    /// Goes on from where another sampler stood.
    pub fn resume(&mut self, state: u64) {
        self.random = SplitMix64(state);
    }

    /// The next token for `logits`, `[n_vocab]`. −∞ bars a token.
    ///
    /// # Errors
    ///
    /// [`SampleError`] for no logits, a NaN, or a largest logit that is not finite.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let largest = largest(logits)?;
        if self.options.temp == 0.0 {
            return Ok(largest.token);
        }
        let mut candidates: Vec<Candidate> =
            (0..).zip(logits).map(|(token, &logit)| Candidate { token, logit }).collect();
        top_k(&mut candidates, self.options.top_k);
        top_p(&mut candidates, self.options.top_p);
        min_p(&mut candidates, self.options.min_p);
        Ok(self.draw(&candidates))
    }

    /// Draws by the probabilities at the temperature; `candidates` begin with the largest logit.
    fn draw(&mut self, candidates: &[Candidate]) -> u32 {
        let shares = shares(candidates, self.options.temp);
        let mut left = self.random.unit() * shares.iter().sum::<f64>();
        for (candidate, share) in candidates.iter().zip(&shares) {
            left -= share;
            if left < 0.0 {
                return candidate.token;
            }
        }
        // Rounding ate the last share.
        candidates.first().map_or(0, |candidate| candidate.token)
    }
}

/// The largest logit, the lower token of equal ones.
fn largest(logits: &[f32]) -> Result<Candidate, SampleError> {
    let mut best: Option<Candidate> = None;
    for (token, &logit) in (0..).zip(logits) {
        if logit.is_nan() {
            return Err(SampleError::Nan { token });
        }
        if best.is_none_or(|best| logit > best.logit) {
            best = Some(Candidate { token, logit });
        }
    }
    let best = best.ok_or(SampleError::Empty)?;
    if best.logit.is_finite() { Ok(best) } else { Err(SampleError::NotFinite { largest: best.logit }) }
}

fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Sorts by rank and keeps the first `k`.
fn top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if (1..candidates.len()).contains(&k) {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(by_rank);
}

/// Keeps the fewest of the first whose probabilities reach `p`, at least one.
fn top_p(candidates: &mut Vec<Candidate>, p: f32) {
    if p >= 1.0 {
        return;
    }
    let shares = shares(candidates, 1.0);
    let enough = f64::from(p) * shares.iter().sum::<f64>();
    let mut sum = 0.0;
    let reached = shares.iter().position(|share| {
        sum += share;
        sum >= enough
    });
    candidates.truncate(reached.map_or(usize::MAX, |last| last + 1));
}

/// Drops those less probable than `p` times the first.
fn min_p(candidates: &mut Vec<Candidate>, p: f32) {
    let shares = shares(candidates, 1.0);
    // Sorted, and the first has a share of 1: it stays, even if p is above 1.
    let kept = shares.iter().take_while(|&&share| share >= f64::from(p)).count();
    candidates.truncate(kept.max(1));
}

/// `exp((logit − largest) / temp)` of each: probabilities but for their sum. The first is the largest.
fn shares(candidates: &[Candidate], temp: f32) -> Vec<f64> {
    let largest = candidates.first().map_or(0.0, |first| first.logit);
    let share = |candidate: &Candidate| (f64::from(candidate.logit - largest) / f64::from(temp)).exp();
    candidates.iter().map(share).collect()
}

/// Steele, Lea and Flood's generator: 64 bits of state, equidistributed, the same on every machine.
#[derive(Clone, Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, 1 excluded, in steps of 2^-53.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: SampleOptions = SampleOptions { temp: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 };

    /// Which tokens come up in many draws, and how often.
    fn draws(options: SampleOptions, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(options).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[sampler.next(logits).unwrap() as usize] += 1;
        }
        counts
    }

    /// Logits whose probabilities at temperature 1 are `shares`.
    fn logits(shares: &[f32]) -> Vec<f32> {
        shares.iter().map(|share| share.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_largest_and_the_lower_of_equals() {
        let mut greedy = Sampler::new(SampleOptions::default()).unwrap();
        assert_eq!(greedy.next(&[1.0, 3.0, 3.0, -9.0]), Ok(1));
        assert_eq!(greedy.next(&[-0.0, 0.0]), Ok(0));
        assert_eq!(greedy.next(&[f32::NEG_INFINITY, -1e30]), Ok(1));
    }

    #[test]
    fn logits_that_order_nothing_are_errors() {
        for temp in [0.0, 1.0] {
            let mut sampler = Sampler::new(SampleOptions { temp, ..ALL }).unwrap();
            let infinite = Err(SampleError::NotFinite { largest: f32::INFINITY });
            assert_eq!(sampler.next(&[1.0, f32::NAN, f32::NAN]), Err(SampleError::Nan { token: 1 }));
            assert_eq!(sampler.next(&[]), Err(SampleError::Empty));
            assert_eq!(sampler.next(&[1.0, f32::INFINITY]), infinite);
            assert!(matches!(sampler.next(&[f32::NEG_INFINITY; 2]), Err(SampleError::NotFinite { .. })));
        }
        for options in [
            SampleOptions { temp: -1.0, ..ALL },
            SampleOptions { top_p: f32::NAN, ..ALL },
            SampleOptions { min_p: f32::INFINITY, ..ALL },
        ] {
            assert!(matches!(Sampler::new(options), Err(SampleError::Option { .. })));
        }
    }

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.next(), random.next(), random.next()], first);
    }

    #[test]
    fn a_seed_repeats_and_another_does_not() {
        let logits = logits(&[0.25; 4]);
        let run = |seed| {
            let mut sampler = Sampler::new(SampleOptions { seed, ..ALL }).unwrap();
            (0..32).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn a_sampler_goes_on_where_another_stood() {
        let logits = logits(&[0.25; 4]);
        let draw =
            |sampler: &mut Sampler| (0..16).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<_>>();
        let mut first = Sampler::new(SampleOptions { seed: 5, ..ALL }).unwrap();
        draw(&mut first);
        let mut second = Sampler::new(SampleOptions { seed: 6, ..ALL }).unwrap();
        second.resume(first.state());
        assert_eq!(draw(&mut second), draw(&mut first));
    }

    #[test]
    fn draws_follow_the_probabilities() {
        for (temp, expected) in [(1.0, [0.1, 0.2, 0.7]), (0.5, [1.0 / 54.0, 4.0 / 54.0, 49.0 / 54.0])] {
            let n = 20_000;
            let counts = draws(SampleOptions { temp, ..ALL }, &logits(&[0.1, 0.2, 0.7]), n);
            for (count, share) in counts.iter().zip(expected) {
                // Five standard deviations.
                let (count, n) = (*count as f64, n as f64);
                assert!((count - n * share).abs() < 5.0 * (n * share * (1.0 - share)).sqrt(), "{counts:?}");
            }
        }
    }

    #[test]
    fn each_cut_keeps_what_it_should() {
        let probabilities = logits(&[0.1, 0.4, 0.1, 0.25, 0.15]);
        let barred = [0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0];
        for (options, logits, kept) in [
            (ALL, &probabilities[..], &[0, 1, 2, 3, 4][..]),
            (SampleOptions { top_k: 1, ..ALL }, &probabilities, &[1]),
            (SampleOptions { top_k: 3, ..ALL }, &probabilities, &[1, 3, 4]),
            // Of the two equals the lower id is the fourth.
            (SampleOptions { top_k: 4, ..ALL }, &probabilities, &[0, 1, 3, 4]),
            (SampleOptions { top_k: 9, ..ALL }, &probabilities, &[0, 1, 2, 3, 4]),
            (SampleOptions { top_p: 0.0, ..ALL }, &probabilities, &[1]),
            (SampleOptions { top_p: 0.39, ..ALL }, &probabilities, &[1]),
            (SampleOptions { top_p: 0.41, ..ALL }, &probabilities, &[1, 3]),
            (SampleOptions { top_p: 0.66, ..ALL }, &probabilities, &[1, 3, 4]),
            (SampleOptions { min_p: 0.26, ..ALL }, &probabilities, &[1, 3, 4]),
            (SampleOptions { min_p: 0.5, ..ALL }, &probabilities, &[1, 3]),
            (SampleOptions { min_p: 2.0, ..ALL }, &probabilities, &[1]),
            // top-k goes first: of its two, 0.4 is 62 % of the sum.
            (SampleOptions { top_k: 2, top_p: 0.6, ..ALL }, &probabilities, &[1]),
            // The cuts do not see the temperature.
            (SampleOptions { temp: 50.0, min_p: 0.5, ..ALL }, &probabilities, &[1, 3]),
            (ALL, &barred, &[0, 2, 3, 4]),
        ] {
            let counts = draws(options.clone(), logits, 2000);
            let seen: Vec<usize> = (0..logits.len()).filter(|&token| counts[token] > 0).collect();
            assert_eq!(seen, kept, "{options:?}");
        }
    }
}
