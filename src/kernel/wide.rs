//! Plain float loops for the widest registers of the CPU at hand, and an exponential that such loops can hold.
//!
//! Nothing is fused and nothing reordered: a loop gives the bits that it gives anywhere.

use super::{Chosen, Kernel};

/// Loops for [`Kernel::widely`].
pub trait Loops {
    /// Does it. To be marked `#[inline(always)]`, as what it calls: only what is inlined is compiled anew.
    fn run(self);
}

impl Kernel {
    /// Runs `work`, compiled for the registers of this path.
    #[inline]
    pub fn widely(self, work: impl Loops) {
        match self.0 {
            Chosen::Naive | Chosen::Portable => work.run(),
            // NEON belongs to the target: every loop is compiled for it.
            #[cfg(target_arch = "aarch64")]
            Chosen::Neon(_) => work.run(),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx2(cpu) => cpu.widely(work),
            #[cfg(target_arch = "x86_64")]
            Chosen::Avx512(cpu) => cpu.widely(work),
        }
    }
}

/// The half-precision number in `bits`, which is finite.
#[inline(always)]
pub fn half(bits: u16) -> f32 {
    /// What exponents of 5 bits lack when they are taken for such of 8.
    const LACK: f32 = f32::from_bits((127 + 112) << 23);
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    f32::from_bits((f32::from_bits(rest) * LACK).to_bits() | sign)
}

/// e^x, within 2 units in the last place; below 2⁻¹²⁶ it is 0. The same bits on every machine.
///
/// Source: the polynomial of Cephes' `expf`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LARGEST: f32 = 88.722_83;
    const LEAST: f32 = -87.336_54;
    /// 1.5 · 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons and not `clamp`, which compilers turn into branches; a NaN goes through.
    let y = if x > LARGEST { LARGEST } else { x };
    let y = if y < LEAST { LEAST } else { y };
    let shifted = y * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first so short that n times it is exact.
    let r = y - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let fraction = p * (r * r) + r + 1.0;
    // 2^n in two factors, for n = 128 has no float of its own.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23).cast_unsigned());
    let half = n >> 1;
    let scaled = fraction * power(half) * power(n.wrapping_sub(half));
    let scaled = if x > LARGEST { f32::INFINITY } else { scaled };
    if x < LEAST { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn the_exponential_is_the_rounded_one_but_for_two_units() {
        for i in -8800..=8880 {
            let x = i as f32 / 100.0 + 0.003;
            let expected = f64::from(x).exp() as f32;
            let units = (exp(x).to_bits().cast_signed() - expected.to_bits().cast_signed()).abs();
            assert!(units <= 2 || expected < f32::MIN_POSITIVE, "{x}: {} for {expected}", exp(x));
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn every_finite_half_is_widened() {
        let finite = (0..=u16::MAX).filter(|bits| half::f16::from_bits(*bits).is_finite());
        let expected = |bits: u16| half::f16::from_bits(bits).to_f32().to_bits();
        finite.for_each(|bits| assert_eq!(super::half(bits).to_bits(), expected(bits), "{bits:#06x}"));
    }

    #[test]
    fn every_path_has_the_same_exponential() {
        let x: Vec<f32> = (0..1000).map(|i| i as f32 / 5.0 - 100.0).collect();
        struct Each<'a>(&'a mut [f32]);
        impl super::Loops for Each<'_> {
            #[inline(always)]
            fn run(self) {
                for x in self.0 {
                    *x = exp(*x);
                }
            }
        }
        let all = |kernel: super::Kernel| {
            let mut x = x.clone();
            kernel.widely(Each(&mut x));
            x
        };
        let kernels = crate::kernel::Path::ALL.into_iter().filter_map(super::Kernel::with_path);
        kernels.for_each(|kernel| assert_eq!(all(kernel), all(super::Kernel(super::Chosen::Naive))));
    }
}
