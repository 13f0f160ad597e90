//! Prompt lookup: text that repeats itself is guessed from where it stood before.
//!
//! Only what comes next is guessed here. Whether a guess is right says the sampler, which is asked for every token as
//! if there were none.

/// Tokens at the end that must have stood before. Fewer say too little: a wrong guess brings experts of its own, and costs
/// nearly what a token does.
const LEAST: usize = 3;

/// What guessing did. Counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Times that guessed tokens went through the model with the one before them.
    pub batches: u64,
    /// Tokens guessed.
    pub drafted: u64,
    /// Of these, the tokens that were chosen.
    pub accepted: u64,
}

/// What followed the longest end of `tokens` that stood there before, where it last stood; an occurrence that overlaps
/// the end goes on with what it gives. At most `n` tokens, and as many as the end has: the longer two places have
/// been alike, the longer they will be.
pub fn guess(tokens: &[u32], n: usize) -> Vec<u32> {
    let most = n.max(LEAST);
    let (mut longest, mut next) = (0, 0);
    for end in (1..tokens.len()).rev() {
        let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
        let alike = pairs.take(most).take_while(|(then, now)| then == now).count();
        if alike > longest {
            (longest, next) = (alike, end);
        }
        if alike == most {
            break;
        }
    }
    if longest < LEAST {
        return Vec::new();
    }
    tokens[next..].iter().copied().cycle().take(n.min(longest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_longest_end_the_last_time_is_guessed() {
        for (tokens, n, expected) in [
            (&[][..], 5, &[][..]),
            (&[1], 5, &[]),
            (&[5, 5, 5], 5, &[]),
            (&[1, 2, 9, 1, 2], 5, &[]),
            // As many as are alike, and no more than are asked for.
            (&[1, 2, 3, 9, 1, 2, 3], 5, &[9, 1, 2]),
            (&[1, 2, 3, 9, 1, 2, 3], 1, &[9]),
            (&[1, 2, 3, 9, 1, 2, 3], 0, &[]),
            // The later of two, unless a longer end is before both.
            (&[1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 5, &[9, 1, 2]),
            (&[7, 1, 2, 3, 8, 1, 2, 3, 9, 7, 1, 2, 3], 5, &[8, 1, 2, 3]),
            // Overlaps.
            (&[5, 5, 5, 5], 5, &[5, 5, 5]),
            (&[5; 9], 5, &[5; 5]),
            (&[4, 6, 4, 6, 4], 5, &[6, 4, 6]),
        ] {
            assert_eq!(guess(tokens, n), expected, "{tokens:?}, {n}");
        }
    }
}
