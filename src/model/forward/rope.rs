//! Rotary position embedding, from angles that are computed once for all layers of a call.

use crate::model::parts::{Pairing, Rope};

/// Cosine and sine of every pair at every position of a call.
#[derive(Debug)]
pub(super) struct Angles {
    rope: Rope,
    /// `[m, n_rot / 2]`: cosine, sine.
    turns: Vec<(f32, f32)>,
}

impl Angles {
    /// For positions `first..first + m`. Pair `p` turns by `position · base^(−2p / n_rot)`, in f64: at
    /// position 100,000 an angle in f32 is off by a hundredth.
    pub fn new(rope: &Rope, first: usize, m: usize) -> Angles {
        let n = rope.n_rot as f64;
        let speeds: Vec<f64> =
            (0..rope.n_rot / 2).map(|p| f64::from(rope.base).powf(-2.0 * p as f64 / n)).collect();
        let turn = |position: f64, speed: &f64| {
            let (sine, cosine) = (position * speed).sin_cos();
            (cosine as f32, sine as f32)
        };
        let turns = (first..first + m).flat_map(|position| {
            let position = position as f64 * f64::from(rope.position_scale);
            speeds.iter().map(move |speed| turn(position, speed))
        });
        Angles { turns: turns.collect(), rope: rope.clone() }
    }

    /// Whether another layer's rotation is the same.
    pub fn belong_to(&self, rope: &Rope) -> bool {
        self.rope == *rope
    }

    /// Rotates every head of row `row` of the call; what is beyond `n_rot` stays.
    pub fn rotate(&self, row: usize, heads: &mut [f32], head_dim: usize) {
        let half = self.rope.n_rot / 2;
        let turns = &self.turns[row * half..(row + 1) * half];
        for head in heads.chunks_exact_mut(head_dim) {
            match self.rope.pairing {
                Pairing::Halves => {
                    let (low, high) = head[..2 * half].split_at_mut(half);
                    for ((a, b), (cosine, sine)) in low.iter_mut().zip(high).zip(turns) {
                        (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
                    }
                }
                Pairing::Neighbours => {
                    for ([a, b], (cosine, sine)) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                        (*a, *b) = (*a * cosine - *b * sine, *a * sine + *b * cosine);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turned(pairing: Pairing, position_scale: f32, position: usize) -> Vec<f32> {
        let rope = Rope { pairing, n_rot: 4, base: 100.0, position_scale };
        let mut head = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        Angles::new(&rope, position - 1, 2).rotate(1, &mut head, 6);
        head
    }

    #[test]
    fn pairs_turn_by_position_and_speed_and_the_rest_stays() {
        // Pair 0 is (1, 3) and turns by the position, pair 1 is (2, 4) and turns ten times slower.
        let (fast, slow) = (3f32.sin_cos(), 0.3f32.sin_cos());
        let expected = [
            1.0 * fast.1 - 3.0 * fast.0,
            2.0 * slow.1 - 4.0 * slow.0,
            1.0 * fast.0 + 3.0 * fast.1,
            2.0 * slow.0 + 4.0 * slow.1,
            5.0,
            6.0,
        ];
        for (ours, expected) in turned(Pairing::Halves, 1.0, 3).iter().zip(expected) {
            assert!((ours - expected).abs() < 1e-6, "{ours} {expected}");
        }
        // Neighbours turn as halves do, from other places.
        let neighbours = turned(Pairing::Neighbours, 1.0, 3);
        let expected = [
            1.0 * fast.1 - 2.0 * fast.0,
            1.0 * fast.0 + 2.0 * fast.1,
            3.0 * slow.1 - 4.0 * slow.0,
            3.0 * slow.0 + 4.0 * slow.1,
            5.0,
            6.0,
        ];
        for (ours, expected) in neighbours.iter().zip(expected) {
            assert!((ours - expected).abs() < 1e-6, "{ours} {expected}");
        }
    }

    #[test]
    fn a_scaled_position_is_a_smaller_position() {
        for pairing in [Pairing::Halves, Pairing::Neighbours] {
            assert_eq!(turned(pairing, 0.25, 12), turned(pairing, 1.0, 3));
            assert_ne!(turned(pairing, 0.25, 12), turned(pairing, 1.0, 12));
        }
    }
}
