//! How byte products are summed: what plain NEON, the dot product and i8mm differ in.
//!
//! To hold one of the types is the proof that the CPU has its instructions. They are written
//! out, each in one function: the compiler's own are open only to functions that carry the feature themselves, and
//! these loops are inlined into one another from anywhere.
//!
//! Weights are signed and at least −128, activations at least −127: a product of two fits 15 bits, two of them 16.

use std::arch::aarch64::{int8x16_t, int16x8_t, int32x4_t};
use std::arch::asm;

use super::neon::*;
use super::vectors::{transpose, zip64};

/// Codes whose magnitude is no larger are small: four products of them still fit 16 bits.
pub(super) const SMALL: i16 = 64;

/// A way to multiply bytes and sum the products in 32 bits.
pub(super) trait Level: Copy {
    /// `sums` and the products of `w` and `x`, each in one lane or another; `small` says that all of `w` are.
    fn dot<const N: usize>(
        self,
        sums: int32x4_t,
        w: [int8x16_t; N],
        x: [int8x16_t; N],
        small: bool,
    ) -> int32x4_t;
}

/// A level at which turning weights pays.
pub(super) trait Turning: Level {
    /// Sixteen neighbouring weights of four rows in the order of [`Turning::sixteen`].
    fn turn(self, rows: [int8x16_t; 4]) -> [int8x16_t; 4];

    /// Sixteen weights of four rows, turned, times those of `A` activation rows, `A` being even: added to sums whose
    /// order is the level's own.
    fn sixteen<const A: usize>(self, sums: &mut [int32x4_t; A], w: &[int8x16_t; 4], x: [int8x16_t; A]);

    /// A number for each of four weight rows in the order of such sums: of those with an even number, and the others.
    fn spread(self, rows: int32x4_t) -> [int32x4_t; 2];

    /// Sums in that order as those of four weight rows for each activation row.
    fn settle<const A: usize>(self, sums: [int32x4_t; A]) -> [int32x4_t; A];
}

/// NEON alone.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct Neon(());

/// NEON with `sdot`: four neighbouring products to a lane.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct DotProduct(());

/// NEON with `smmla` as well: two rows of eight bytes times two.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct I8mm(DotProduct);

impl Neon {
    /// Asks the CPU. The order of the bytes is asked for too: registers are read as they lie.
    pub(super) fn detect() -> Option<Neon> {
        let has = cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon");
        has.then_some(Neon(()))
    }
}

impl DotProduct {
    /// Asks the CPU.
    pub(super) fn detect() -> Option<DotProduct> {
        let has = Neon::detect().is_some() && std::arch::is_aarch64_feature_detected!("dotprod");
        has.then_some(DotProduct(()))
    }
}

impl I8mm {
    /// Asks the CPU.
    pub(super) fn detect() -> Option<I8mm> {
        DotProduct::detect().filter(|_| std::arch::is_aarch64_feature_detected!("i8mm")).map(I8mm)
    }

    /// The same CPU, by what others have too.
    pub(super) fn dot_product(self) -> DotProduct {
        self.0
    }
}

impl Level for Neon {
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        sums: int32x4_t,
        w: [int8x16_t; N],
        x: [int8x16_t; N],
        small: bool,
    ) -> int32x4_t {
        let mut sums = sums;
        let mut pairs = self.pairs(w[0], x[0]);
        for i in 1..N {
            if small && i % 2 != 0 {
                pairs = self.add_pairs(pairs, w[i], x[i]);
            } else {
                sums = vpadalq_s16(sums, pairs);
                pairs = self.pairs(w[i], x[i]);
            }
        }
        vpadalq_s16(sums, pairs)
    }
}

impl Level for DotProduct {
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        sums: int32x4_t,
        w: [int8x16_t; N],
        x: [int8x16_t; N],
        _: bool,
    ) -> int32x4_t {
        let mut sums = sums;
        for i in 0..N {
            sums = self.sdot(sums, w[i], x[i]);
        }
        sums
    }
}

impl Turning for DotProduct {
    /// Four neighbouring weights of each row.
    #[inline(always)]
    fn turn(self, rows: [int8x16_t; 4]) -> [int8x16_t; 4] {
        transpose(rows)
    }

    #[inline(always)]
    fn sixteen<const A: usize>(self, sums: &mut [int32x4_t; A], w: &[int8x16_t; 4], x: [int8x16_t; A]) {
        for a in 0..A {
            sums[a] = self.sdot_four::<0>(sums[a], w[0], x[a]);
            sums[a] = self.sdot_four::<1>(sums[a], w[1], x[a]);
            sums[a] = self.sdot_four::<2>(sums[a], w[2], x[a]);
            sums[a] = self.sdot_four::<3>(sums[a], w[3], x[a]);
        }
    }

    #[inline(always)]
    fn spread(self, rows: int32x4_t) -> [int32x4_t; 2] {
        [rows; 2]
    }

    #[inline(always)]
    fn settle<const A: usize>(self, sums: [int32x4_t; A]) -> [int32x4_t; A] {
        sums
    }
}

impl Level for I8mm {
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        sums: int32x4_t,
        w: [int8x16_t; N],
        x: [int8x16_t; N],
        small: bool,
    ) -> int32x4_t {
        self.0.dot(sums, w, x, small)
    }
}

impl Turning for I8mm {
    /// The first eight weights of rows 0 and 1, those of rows 2 and 3; then the other eight.
    #[inline(always)]
    fn turn(self, rows: [int8x16_t; 4]) -> [int8x16_t; 4] {
        let ([first, third], [second, fourth]) = (zip64(rows[0], rows[1]), zip64(rows[2], rows[3]));
        [first, second, third, fourth]
    }

    /// Sums `2 j` are of weight rows 0 and 1 times activation rows `2 j` and `2 j + 1`, the next of weight rows 2 and 3.
    #[inline(always)]
    fn sixteen<const A: usize>(self, sums: &mut [int32x4_t; A], w: &[int8x16_t; 4], x: [int8x16_t; A]) {
        const { assert!(A.is_multiple_of(2), "activation rows go in pairs") };
        for a in (0..A).step_by(2) {
            let [first, second] = zip64(x[a], x[a + 1]);
            sums[a] = self.smmla(self.smmla(sums[a], w[0], first), w[2], second);
            sums[a + 1] = self.smmla(self.smmla(sums[a + 1], w[1], first), w[3], second);
        }
    }

    #[inline(always)]
    fn spread(self, rows: int32x4_t) -> [int32x4_t; 2] {
        [vzip1q_s32(rows, rows), vzip2q_s32(rows, rows)]
    }

    #[inline(always)]
    fn settle<const A: usize>(self, sums: [int32x4_t; A]) -> [int32x4_t; A] {
        let mut out = sums;
        for a in (0..A).step_by(2) {
            out[a] = vuzp1q_s32(sums[a], sums[a + 1]);
            out[a + 1] = vuzp2q_s32(sums[a], sums[a + 1]);
        }
        out
    }
}

impl DotProduct {
    /// `sums[l] + Σ w[4 l + i] · x[4 l + i]`, i < 4.
    #[inline(always)]
    fn sdot(self, sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        let mut out = sums;
        // SAFETY: `self` proves that the CPU has `sdot`, which touches nothing but the registers named.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {out:v}.4s, {w:v}.16b, {x:v}.16b",
                out = inout(vreg) out, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    }

    /// `sums[l] + Σ w[4 l + i] · x[4 Q + i]`, i < 4.
    #[inline(always)]
    fn sdot_four<const Q: usize>(self, sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        let mut out = sums;
        // SAFETY: `self` proves that the CPU has `sdot`, which touches nothing but the registers named.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {out:v}.4s, {w:v}.16b, {x:v}.4b[{q}]",
                out = inout(vreg) out, w = in(vreg) w, x = in(vreg) x, q = const Q,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    }
}

impl I8mm {
    /// `sums[2 r + a] + Σ w[8 r + i] · x[8 a + i]`, i < 8; r and a are 0 and 1.
    #[inline(always)]
    fn smmla(self, sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        let mut out = sums;
        // SAFETY: `self` proves that the CPU has `smmla`, which touches nothing but the registers named.
        unsafe {
            asm!(
                ".arch_extension i8mm",
                "smmla {out:v}.4s, {w:v}.16b, {x:v}.16b",
                out = inout(vreg) out, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    }
}

impl Neon {
    /// Sums of two products each: of bytes l and l + 8. Written out because the compiler, which knows that some codes
    /// are not negative, would extend both sides first.
    #[inline(always)]
    fn pairs(self, w: int8x16_t, x: int8x16_t) -> int16x8_t {
        let out;
        // SAFETY: both instructions are NEON's and touch nothing but the registers named.
        unsafe {
            asm!(
                "smull {out:v}.8h, {w:v}.8b, {x:v}.8b",
                "smlal2 {out:v}.8h, {w:v}.16b, {x:v}.16b",
                out = out(vreg) out, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    }

    /// The same added to other sums.
    #[inline(always)]
    fn add_pairs(self, sums: int16x8_t, w: int8x16_t, x: int8x16_t) -> int16x8_t {
        let mut out = sums;
        // SAFETY: both instructions are NEON's and touch nothing but the registers named.
        unsafe {
            asm!(
                "smlal {out:v}.8h, {w:v}.8b, {x:v}.8b",
                "smlal2 {out:v}.8h, {w:v}.16b, {x:v}.16b",
                out = inout(vreg) out, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        out
    }
}
