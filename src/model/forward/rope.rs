//! Rotary position embedding, from angles that are computed once for all layers of a call.

use crate::model::parts::{Pairing, Rope};

/// Cosine and sine of every pair at every position of a call.
#[derive(Debug)]
pub(super) struct Angles {
    rope: Rope,
    /// `[m, n_pairs]`: cosine, sine.
    turns: Vec<(f32, f32)>,
}

impl Angles {
    /// For positions `first..first + m`, in f64: at position 100,000 an angle in f32 is off by a hundredth.
    pub fn new(rope: &Rope, first: usize, m: usize) -> Angles {
        let magnitude = f64::from(rope.magnitude);
        let turn = |position: usize, speed: &f64| {
            let (sine, cosine) = (position as f64 * speed).sin_cos();
            ((cosine * magnitude) as f32, (sine * magnitude) as f32)
        };
        let turns = (first..first + m)
            .flat_map(|position| rope.speeds.iter().map(move |speed| turn(position, speed)));
        Angles { turns: turns.collect(), rope: rope.clone() }
    }

    /// Whether another layer's rotation is the same.
    pub fn belong_to(&self, rope: &Rope) -> bool {
        self.rope == *rope
    }

    /// Rotates every head of row `row` of the call; what is beyond the pairs stays.
    pub fn rotate(&self, row: usize, heads: &mut [f32], head_dim: usize) {
        let half = self.rope.speeds.len();
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

    fn turned(pairing: Pairing, magnitude: f32, position: usize) -> Vec<f32> {
        let rope = Rope { pairing, speeds: vec![1.0, 0.1], magnitude };
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
    fn a_magnitude_is_that_of_what_turns_and_of_nothing_else() {
        for pairing in [Pairing::Halves, Pairing::Neighbours] {
            let (plain, longer) = (turned(pairing, 1.0, 3), turned(pairing, 1.5, 3));
            let expected = plain.iter().enumerate().map(|(i, x)| if i < 4 { x * 1.5 } else { *x });
            for (ours, expected) in longer.iter().zip(expected) {
                assert!((ours - expected).abs() < 1e-5, "{ours} {expected}");
            }
        }
    }
}
