//! AArch64: NEON, which every such CPU has, and its byte products where they are there (dot product, i8mm).
//!
//! What the CPUs differ in is a [`Level`], and a loop is written once for all of them. With few activation rows
//! weights are multiplied as they are decoded, four weight rows at a time. With many, four weight rows are decoded
//! once and turned into the order in which the level multiplies, and every activation row passes by.
//!
//! NEON itself belongs to the target, so that functions need no feature of their own and are simply inlined; the
//! instructions that go beyond it are written out ([`level`]).

#![allow(unsafe_code)]
// Several arrays are walked by one number, and registers are made in a loop.
#![allow(clippy::needless_range_loop)]

mod floats;
mod large;
mod level;
mod neon;
mod small;
mod tiles;
mod vectors;
mod walk;

use std::arch::aarch64::int8x16_t;
use std::ops::Range;

use super::activations::{Activations, Row};
use super::tiles::StripDot;
use super::{Output, Path, TILE_ROWS};
use crate::tensor::{Dtype, WeightView};
use large::Large;
use level::{DotProduct, I8mm, Neon};
use small::Small;

/// A CPU that has been asked what it has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cpu {
    Neon(Neon),
    DotProduct(DotProduct),
    I8mm(I8mm),
}

impl Cpu {
    /// This path, if the CPU has it.
    pub(super) fn with_path(path: Path) -> Option<Cpu> {
        match path {
            Path::Neon => Neon::detect().map(Cpu::Neon),
            Path::NeonDot => DotProduct::detect().map(Cpu::DotProduct),
            Path::NeonI8mm => I8mm::detect().map(Cpu::I8mm),
            _ => None,
        }
    }

    /// The path that runs.
    pub(super) fn path(self) -> Path {
        match self {
            Cpu::Neon(_) => Path::Neon,
            Cpu::DotProduct(_) => Path::NeonDot,
            Cpu::I8mm(_) => Path::NeonI8mm,
        }
    }

    /// See [`super::Kernel::multiply`].
    pub(super) fn multiply(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        to: Output<'_>,
    ) {
        let call = Call { weight, o_range, acts, rows, to };
        match weight.dtype() {
            Dtype::Q8_0 => self.blocks::<Small<small::Q8_0>>(call),
            Dtype::Q4_0 => self.blocks::<Small<small::Q4_0>>(call),
            Dtype::Q5_0 => self.blocks::<Small<small::Q5_0>>(call),
            Dtype::IQ4_NL => self.blocks::<Small<small::Iq4Nl>>(call),
            Dtype::MXFP4 => self.blocks::<Small<small::Mxfp4>>(call),
            Dtype::Q2_K => self.blocks::<Large<large::Q2K>>(call),
            Dtype::Q3_K => self.blocks::<Large<large::Q3K>>(call),
            Dtype::IQ4_XS => self.blocks::<Large<large::Iq4Xs>>(call),
            Dtype::Q4_K => self.blocks::<Large<large::Q4K>>(call),
            Dtype::Q5_K => self.blocks::<Large<large::Q5K>>(call),
            Dtype::Q6_K => self.blocks::<Large<large::Q6K>>(call),
            Dtype::F16 => floats::multiply::<floats::F16>(call),
            Dtype::BF16 => floats::multiply::<floats::Bf16>(call),
            _ => floats::multiply::<floats::F32>(call),
        }
    }

    fn blocks<T: walk::Loops>(self, call: Call<'_>) {
        let many = call.rows.len() >= walk::MANY;
        match self {
            Cpu::DotProduct(cpu) if many => walk::many::<T, _>(cpu, call),
            Cpu::I8mm(cpu) if many => walk::many::<T, _>(cpu, call),
            // Without the dot product a sum across lanes is cheap beside the products.
            Cpu::Neon(cpu) => walk::few::<T, _>(cpu, call),
            Cpu::DotProduct(cpu) => walk::few::<T, _>(cpu, call),
            // Few rows would leave half of a matrix product empty.
            Cpu::I8mm(cpu) => walk::few::<T, _>(cpu.dot_product(), call),
        }
    }
}

impl StripDot for Cpu {
    fn dot<const A: usize>(self, strip: &[i8], rows: [&[i8]; A], _: [i32; A]) -> [[i32; 32]; A] {
        match self {
            Cpu::Neon(cpu) => tiles::dot(cpu, strip, rows),
            Cpu::DotProduct(cpu) => tiles::dot(cpu, strip, rows),
            Cpu::I8mm(cpu) => tiles::dot(cpu.dot_product(), strip, rows),
        }
    }
}

/// What is to be multiplied: see [`super::Kernel::multiply`].
struct Call<'a> {
    weight: WeightView<'a>,
    o_range: Range<usize>,
    acts: &'a Activations,
    rows: &'a [u32],
    to: Output<'a>,
}

impl Call<'_> {
    /// The outputs that are computed together, from `first` on.
    fn tile(&self, first: usize) -> Range<usize> {
        first..self.o_range.end.min(first + TILE_ROWS)
    }

    /// Where the `N` weight rows from `first` begin; the last of `o_range` stands in for those behind it.
    fn weights<const N: usize>(&self, first: usize) -> [*const u8; N] {
        std::array::from_fn(|r| self.weight.row((first + r).min(self.o_range.end - 1)).as_ptr())
    }

    /// The sums of each activation row, the `m`-th and on, with the `N` weight rows from `first`: those of them that
    /// were asked for.
    fn write<const N: usize>(&mut self, sums: &[[f32; N]], m: usize, first: usize) {
        let n = N.min(self.o_range.end - first);
        for (a, sums) in sums.iter().enumerate() {
            let at = (m + a) * self.to.stride + self.to.first + (first - self.o_range.start);
            self.to.out[at..at + n].copy_from_slice(&sums[..n]);
        }
    }
}

/// Where the activations of `A` rows are, their lengths having been checked once and not in every step.
struct Codes<const A: usize> {
    codes: [*const i8; A],
    scales: [*const f32; A],
    sums: [*const i16; A],
}

impl<const A: usize> Codes<A> {
    /// # Panics
    ///
    /// When a row has less than `n` blocks of `len`: a bug of the caller.
    fn of(acts: [Row<'_>; A], n: usize, len: usize) -> Codes<A> {
        for act in &acts {
            assert!(act.codes.len() >= n * len && act.scales.len() >= n, "too few activations");
            assert!(act.sums.len() >= n * len / 16, "too few sums");
        }
        Codes {
            codes: acts.map(|act| act.codes.as_ptr()),
            scales: acts.map(|act| act.scales.as_ptr()),
            sums: acts.map(|act| act.sums.as_ptr()),
        }
    }

    /// Block `b`, of `LEN` codes, of row `a`.
    ///
    /// # Safety
    ///
    /// It is there.
    #[inline(always)]
    unsafe fn codes<const LEN: usize>(&self, a: usize, b: usize) -> *const i8 {
        // SAFETY: the caller vouches for the block.
        unsafe { self.codes[a].cast::<[i8; LEN]>().add(b).cast() }
    }

    /// The sums of block `b`, `N` to a block, of row `a`.
    ///
    /// # Safety
    ///
    /// They are there.
    #[inline(always)]
    unsafe fn sums<const N: usize>(&self, a: usize, b: usize) -> *const i16 {
        // SAFETY: the caller vouches for the block.
        unsafe { self.sums[a].cast::<[i16; N]>().add(b).cast() }
    }

    /// The scale of block `b` of row `a`.
    ///
    /// # Safety
    ///
    /// It is there.
    #[inline(always)]
    unsafe fn scale(&self, a: usize, b: usize) -> f32 {
        // SAFETY: the caller vouches for the block.
        unsafe { *self.scales[a].add(b) }
    }
}

/// Sixteen codes of block `b` of every row, `16 * i` and on.
///
/// # Safety
///
/// The block is there.
#[inline(always)]
unsafe fn sixteen_of<const LEN: usize, const A: usize>(
    acts: &Codes<A>,
    b: usize,
    i: usize,
) -> [int8x16_t; A] {
    let mut out = [neon::vdupq_n_s8(0); A];
    for a in 0..A {
        // SAFETY: the caller vouches for the block.
        out[a] = unsafe { vectors::load(acts.codes::<LEN>(a, b).add(16 * i)) };
    }
    out
}
