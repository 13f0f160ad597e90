//! How many of a token's experts are hot: not an average but a distribution.
//!
//! At top-4 a layer has 0 to 4 hits, and the slower side decides each time, so an average inside a maximum would be
//! too kind. Counts say only how often each expert is chosen, not which are chosen together; the distribution is the
//! least assuming one with these marginals and exactly k experts per token: independent choices, on the condition
//! that k were made, the odds of the hot ones scaled so that their mean is the counted one (docs/planning.md).
//! With even routing it is the hypergeometric distribution.

/// The distribution of hits for each number of hot experts: `[n_expert + 1][n_used + 1]`, entry `j` when the first
/// `j` of the experts are hot.
///
/// `inclusion` holds the probability that a token uses each expert; it adds up to `n_used`.
pub fn prefix_hits(inclusion: &[f64], n_used: usize) -> Vec<Vec<f64>> {
    let mut cold = vec![unit(n_used)];
    for &p in inclusion.iter().rev() {
        let mut dist = cold[cold.len() - 1].clone();
        add(&mut dist, p);
        cold.push(dist);
    }
    let (mut hot, mut mean) = (unit(n_used), 0.0);
    let mut hits = vec![combine(&hot, &cold[inclusion.len()], mean)];
    for (j, &p) in inclusion.iter().enumerate() {
        add(&mut hot, p);
        mean += p;
        hits.push(combine(&hot, &cold[inclusion.len() - j - 1], mean));
    }
    hits
}

/// How likely a token uses each expert, from shares of calls: `n_used` × share, at most 1, adding up to `n_used`.
pub(super) fn inclusion(shares: &[f64], n_used: usize) -> Vec<f64> {
    let n_used = n_used.min(shares.len());
    let mut inclusion = vec![0.0; shares.len()];
    let mut full = vec![false; shares.len()];
    loop {
        let n_full = full.iter().filter(|&&full| full).count();
        let rest: f64 = shares.iter().zip(&full).filter(|&(_, &full)| !full).map(|(share, _)| share).sum();
        let scale = if rest > 0.0 { (n_used - n_full.min(n_used)) as f64 / rest } else { 0.0 };
        let mut again = false;
        for ((p, &share), full) in inclusion.iter_mut().zip(shares).zip(&mut full) {
            *p = if *full { 1.0 } else { share * scale };
            if !*full && *p >= 1.0 {
                (*p, *full, again) = (1.0, true, true);
            }
        }
        if !again {
            return inclusion;
        }
    }
}

/// The number of successes before any expert: none, for certain.
fn unit(n_used: usize) -> Vec<f64> {
    let mut dist = vec![0.0; n_used + 1];
    dist[0] = 1.0;
    dist
}

/// One more expert, used with probability `p`, chosen independently. More than `n_used` is of no interest.
fn add(dist: &mut [f64], p: f64) {
    for h in (1..dist.len()).rev() {
        dist[h] = dist[h] * (1.0 - p) + dist[h - 1] * p;
    }
    dist[0] *= 1.0 - p;
}

/// Hits on the condition that hot and cold make `n_used`, tilted to the mean.
fn combine(hot: &[f64], cold: &[f64], mean: f64) -> Vec<f64> {
    let n_used = hot.len() - 1;
    let joint: Vec<f64> = (0..=n_used).map(|h| hot[h] * cold[n_used - h]).collect();
    let possible = |h: &usize| joint[*h] > 0.0;
    let (low, high) = ((0..=n_used).find(possible), (0..=n_used).rev().find(possible));
    let (Some(low), Some(high)) = (low, high) else { return two_points(mean, n_used) };
    if low == high || mean <= low as f64 || mean >= high as f64 {
        return two_points(mean.clamp(low as f64, high as f64), n_used);
    }
    tilt(&joint, mean, low, high)
}

/// `joint[h] · θ^h`, normalised, with θ such that the mean is `mean`. Newton's steps, kept inside a bracket.
fn tilt(joint: &[f64], mean: f64, low: usize, high: usize) -> Vec<f64> {
    let (mut below, mut above, mut log) = (-60.0f64, 60.0f64, 0.0f64);
    let mut dist = vec![0.0; joint.len()];
    for _ in 0..80 {
        // Powers counted from the end that they grow towards: nothing overflows.
        let end = if log > 0.0 { high } else { low } as f64;
        for (h, (d, j)) in dist.iter_mut().zip(joint).enumerate() {
            *d = j * (log * (h as f64 - end)).exp();
        }
        let sum: f64 = dist.iter().sum();
        dist.iter_mut().for_each(|d| *d /= sum);
        let found: f64 = dist.iter().enumerate().map(|(h, d)| h as f64 * d).sum();
        let variance: f64 = dist.iter().enumerate().map(|(h, d)| (h as f64 - found).powi(2) * d).sum();
        if (found - mean).abs() < 1e-10 {
            break;
        }
        if found < mean {
            below = log
        } else {
            above = log
        }
        let step = log + (mean - found) / variance.max(1e-300);
        log = if step > below && step < above { step } else { 0.5 * (below + above) };
    }
    dist
}

/// All weight on the two whole numbers around the mean.
fn two_points(mean: f64, n_used: usize) -> Vec<f64> {
    let mean = mean.clamp(0.0, n_used as f64);
    let low = (mean.floor() as usize).min(n_used);
    let mut dist = vec![0.0; n_used + 1];
    dist[low] = 1.0 - (mean - low as f64);
    if low < n_used {
        dist[low + 1] = mean - low as f64;
    }
    dist
}
