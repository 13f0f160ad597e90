//! From a whole product to tiles of it: four weight rows by a few activation rows.

use super::level::{Level, Turning};
use super::{Call, Codes};
use crate::kernel::TILE_ROWS;
use crate::kernel::activations::Activations;

/// From how many activation rows on turning the weights pays: more than one group of [`few`].
pub(super) const MANY: usize = 5;

/// What is done for a kind of block.
pub(super) trait Loops {
    /// Bytes of a block.
    const BYTES: usize;
    /// Weights of a block.
    const LEN: usize;
    /// A block of four rows, turned.
    type Turned;

    /// Four weight rows of `n_blocks` times `A` activation rows.
    ///
    /// # Safety
    ///
    /// The rows and the activations are that long.
    unsafe fn few<L: Level, const A: usize>(
        cpu: L,
        rows: [*const u8; 4],
        n_blocks: usize,
        acts: &Codes<A>,
    ) -> [[f32; 4]; A];

    /// A block of each of four rows, decoded and turned.
    ///
    /// # Safety
    ///
    /// The blocks are there.
    unsafe fn turn<L: Turning>(cpu: L, blocks: [*const u8; 4]) -> Self::Turned;

    /// Four weight rows, turned, times `A` activation rows, an even number.
    ///
    /// # Safety
    ///
    /// The activations have as many blocks.
    unsafe fn many<L: Turning, const A: usize>(
        cpu: L,
        turned: &[Self::Turned],
        acts: &Codes<A>,
    ) -> [[f32; 4]; A];
}

/// One type, by fours of weight rows as they are and up to four activation rows. A few tens of KiB of weights stay in
/// the first cache while all activation rows pass by.
pub(super) fn few<T: Loops, L: Level>(cpu: L, mut call: Call<'_>) {
    let (fours, rest) = call.rows.as_chunks::<4>();
    let (twos, one) = rest.as_chunks::<2>();
    for first in call.o_range.clone().step_by(TILE_ROWS) {
        let mut m = 0;
        for &rows in fours {
            m = few_times::<T, L, 4>(cpu, rows, m, first, &mut call);
        }
        for &rows in twos {
            m = few_times::<T, L, 2>(cpu, rows, m, first, &mut call);
        }
        for &row in one {
            m = few_times::<T, L, 1>(cpu, [row], m, first, &mut call);
        }
    }
}

/// Weight rows `first` and on times activation rows `rows`, the `m`-th and on of the output; returns the next `m`.
fn few_times<T: Loops, L: Level, const A: usize>(
    cpu: L,
    rows: [u32; A],
    m: usize,
    first: usize,
    call: &mut Call<'_>,
) -> usize {
    let n_blocks = call.weight.row_bytes() / T::BYTES;
    let acts = codes::<T, A>(call.acts, rows, n_blocks);
    for four in call.tile(first).step_by(4) {
        // SAFETY: weights and activations have `n_blocks`, the latter having been held to it.
        let sums = unsafe { T::few(cpu, call.weights(four), n_blocks, &acts) };
        call.write(&sums, m, four);
    }
    m + A
}

/// One type, by fours of weight rows that are turned and up to eight activation rows, which come from the second cache
/// once for a few tens of KiB of weights.
pub(super) fn many<T: Loops, L: Turning>(cpu: L, mut call: Call<'_>) {
    let n_blocks = call.weight.row_bytes() / T::BYTES;
    let (eights, rest) = call.rows.as_chunks::<8>();
    let (fours, rest) = rest.as_chunks::<4>();
    let (twos, one) = rest.as_chunks::<2>();
    let mut turned = Vec::new();
    for first in call.o_range.clone().step_by(TILE_ROWS) {
        turned.clear();
        for four in call.tile(first).step_by(4) {
            let mut blocks = call.weights(four);
            for _ in 0..n_blocks {
                // SAFETY: weight rows have `n_blocks`.
                turned.push(unsafe { T::turn(cpu, blocks) });
                blocks = blocks.map(|block| block.wrapping_add(T::BYTES));
            }
        }
        let mut m = 0;
        for &rows in eights {
            m = many_times::<T, L, 8>(cpu, &turned, rows, m, 8, first, &mut call);
        }
        for &rows in fours {
            m = many_times::<T, L, 4>(cpu, &turned, rows, m, 4, first, &mut call);
        }
        for &rows in twos {
            m = many_times::<T, L, 2>(cpu, &turned, rows, m, 2, first, &mut call);
        }
        // They go in pairs: the last makes one with itself.
        for &row in one {
            m = many_times::<T, L, 2>(cpu, &turned, [row; 2], m, 1, first, &mut call);
        }
    }
}

/// Weight rows `first` and on, turned, times activation rows `rows`, of which the first `n` are the `m`-th and on of
/// the output; returns the next `m`.
fn many_times<T: Loops, L: Turning, const A: usize>(
    cpu: L,
    turned: &[T::Turned],
    rows: [u32; A],
    m: usize,
    n: usize,
    first: usize,
    call: &mut Call<'_>,
) -> usize {
    let n_blocks = call.weight.row_bytes() / T::BYTES;
    let acts = codes::<T, A>(call.acts, rows, n_blocks);
    for (i, four) in call.tile(first).step_by(4).enumerate() {
        // SAFETY: the activations have been held to `n_blocks`.
        let sums = unsafe { T::many(cpu, &turned[i * n_blocks..(i + 1) * n_blocks], &acts) };
        call.write(&sums[..n], m, four);
    }
    m + n
}

fn codes<T: Loops, const A: usize>(acts: &Activations, rows: [u32; A], n_blocks: usize) -> Codes<A> {
    Codes::of(rows.map(|row| acts.row(row)), n_blocks, T::LEN)
}
