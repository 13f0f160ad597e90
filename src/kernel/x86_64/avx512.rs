//! x86-64 with AVX-512 and its byte dot product: two loops for every integer type.
//!
//! Codes are read as numbers that are not negative, too large by the type's `OFFSET`; what that adds is taken off
//! with the sums of the activations, in integers. With few activation rows weights are multiplied as they are
//! decoded, four weight rows at a time. With many, sixteen weight rows are decoded once and turned, so that a
//! register holds four weights of each, and every activation row passes by: no sum across lanes is left.

mod floats;
mod large;
mod small;
mod tiles;

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::{Avx2, Codes, load16};
use crate::kernel::activations::Activations;
use crate::kernel::tiles::StripDot;
use crate::kernel::wide;
use crate::kernel::{Output, TILE_ROWS};
use crate::tensor::{Dtype, WeightView};
use large::Large;
use small::Small;

/// A CPU that has AVX-512 (F, BW, DQ, VL, VBMI), VNNI and GFNI, and what [`Avx2`] asks for.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel) struct Avx512(Avx2);

/// Weight rows that are turned together: the 32-bit lanes of a register.
const TURNED: usize = 16;

/// How many bytes ahead each stream of weights is asked for: one core does not look far enough ahead by itself to keep
/// the memory busy. The best of a few distances that were tried.
const AHEAD: usize = 1 << 10;

impl Avx512 {
    /// Asks the CPU.
    pub(in crate::kernel) fn detect() -> Option<Avx512> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("gfni");
        Avx2::detect().filter(|_| has).map(Avx512)
    }

    /// The same CPU, by what older ones have too.
    pub(in crate::kernel) fn avx2(self) -> Avx2 {
        self.0
    }

    /// See [`crate::kernel::Kernel::widely`].
    #[inline]
    pub(in crate::kernel) fn widely(self, work: impl wide::Loops) {
        #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
        fn inner(work: impl wide::Loops) {
            work.run();
        }
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { inner(work) }
    }

    /// See [`crate::kernel::Kernel::multiply`].
    pub(in crate::kernel) fn multiply(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        to: Output<'_>,
    ) {
        match weight.dtype() {
            Dtype::Q8_0 => self.run::<Small<small::Q8_0>>(weight, o_range, acts, rows, to),
            Dtype::Q4_0 => self.run::<Small<small::Q4_0>>(weight, o_range, acts, rows, to),
            Dtype::Q5_0 => self.run::<Small<small::Q5_0>>(weight, o_range, acts, rows, to),
            Dtype::IQ4_NL => self.run::<Small<small::Iq4Nl>>(weight, o_range, acts, rows, to),
            Dtype::MXFP4 => self.run::<Small<small::Mxfp4>>(weight, o_range, acts, rows, to),
            Dtype::Q2_K => self.run::<Large<large::Q2K>>(weight, o_range, acts, rows, to),
            Dtype::Q3_K => self.run::<Large<large::Q3K>>(weight, o_range, acts, rows, to),
            Dtype::IQ4_XS => self.run::<Large<large::Iq4Xs>>(weight, o_range, acts, rows, to),
            Dtype::Q4_K => self.run::<Large<large::Q4K>>(weight, o_range, acts, rows, to),
            Dtype::Q5_K => self.run::<Large<large::Q5K>>(weight, o_range, acts, rows, to),
            Dtype::Q6_K => self.run::<Large<large::Q6K>>(weight, o_range, acts, rows, to),
            Dtype::F16 => self.floats::<floats::F16>(weight, o_range, acts, rows, to),
            Dtype::BF16 => self.floats::<floats::Bf16>(weight, o_range, acts, rows, to),
            _ => self.floats::<floats::F32>(weight, o_range, acts, rows, to),
        }
    }

    /// A plain type. Where not all activation rows fit one pass, a few tens of KiB of weights stay in the first cache
    /// while they pass by.
    fn floats<T: floats::Float>(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        mut to: Output<'_>,
    ) {
        let (fours, rest) = rows.as_chunks::<4>();
        let (twos, one) = rest.as_chunks::<2>();
        let n_passes = fours.len() + twos.len() + one.len();
        let tile_rows = if n_passes == 1 { o_range.len().max(1) } else { TILE_ROWS };
        for first in o_range.clone().step_by(tile_rows) {
            let tile = first..o_range.end.min(first + tile_rows);
            let at = first - o_range.start;
            let mut m = 0;
            for rows in fours {
                m = self.float_tile::<T, 4>(weight, tile.clone(), acts, rows, m, at, &mut to);
            }
            for rows in twos {
                m = self.float_tile::<T, 2>(weight, tile.clone(), acts, rows, m, at, &mut to);
            }
            for &row in one {
                m = self.float_tile::<T, 1>(weight, tile.clone(), acts, &[row], m, at, &mut to);
            }
        }
    }

    /// Weight rows `tile` times the activation rows `rows`, the `m`-th and on, to columns `at` and on; returns the next
    /// `m`.
    #[allow(clippy::too_many_arguments)]
    fn float_tile<T: floats::Float, const A: usize>(
        self,
        weight: WeightView<'_>,
        tile: Range<usize>,
        acts: &Activations,
        rows: &[u32; A],
        m: usize,
        at: usize,
        to: &mut Output<'_>,
    ) -> usize {
        let plain = floats::Plain::<T, A>::of(weight.n_in(), rows.map(|row| acts.row(row)));
        self.by_fours(weight, tile, &plain, m, at, to)
    }

    /// One type: by fours of weight rows, or by sixteens that are turned.
    fn run<L: Loops>(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32],
        mut to: Output<'_>,
    ) {
        let n_blocks = weight.row_bytes() / L::BYTES;
        match *rows {
            [a] => return self.few::<L, 1>(weight, o_range, acts, &[a], n_blocks, to),
            [a, b] => return self.few::<L, 2>(weight, o_range, acts, &[a, b], n_blocks, to),
            [a, b, c] => return self.few::<L, 3>(weight, o_range, acts, &[a, b, c], n_blocks, to),
            [a, b, c, d] => return self.few::<L, 4>(weight, o_range, acts, &[a, b, c, d], n_blocks, to),
            _ => {}
        }
        let groups = Groups::of(acts, rows, n_blocks, L::LEN);
        let mut turned = Vec::new();
        for first in o_range.clone().step_by(TURNED) {
            let (at, n) = (first - o_range.start, TURNED.min(o_range.end - first));
            // SAFETY: `self` proves that the CPU has the features, and the rows are `n_blocks` long.
            unsafe { L::turn(&pointers(weight, first, 1, n), n_blocks, &mut turned) };
            groups.times::<L>(self, &turned, at, n, &mut to);
        }
    }

    /// Few activation rows: weights are multiplied as they are decoded.
    fn few<L: Loops, const A: usize>(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        acts: &Activations,
        rows: &[u32; A],
        n_blocks: usize,
        mut to: Output<'_>,
    ) {
        let acts = codes(acts, rows, n_blocks, L::LEN);
        self.by_fours(weight, o_range, &Few::<L, A> { n_blocks, acts, of: PhantomData }, 0, 0, &mut to);
    }

    /// The rows of `o_range` by fours, one from each quarter of the range, so that each of the four goes on where it
    /// stopped and the memory sees four long streams; then those that are left. Outputs go to columns `at` and on, of
    /// the `m`-th row and on; returns the next `m`.
    fn by_fours<const A: usize>(
        self,
        weight: WeightView<'_>,
        o_range: Range<usize>,
        product: &impl Fours<A>,
        m: usize,
        at: usize,
        to: &mut Output<'_>,
    ) -> usize {
        let (apart, rest) = (o_range.len() / 4, o_range.len() % 4);
        let whole = Columns { m, at, apart, n: 4 };
        let left = Columns { m, at: at + 4 * apart, apart: 1, n: rest };
        for (n_steps, columns) in [(apart, whole), (rest.min(1), left)] {
            if n_steps > 0 {
                let rows = pointers(weight, o_range.start + columns.at - at, columns.apart, columns.n);
                // SAFETY: `self` proves that the CPU has the features; so many rows follow each other from every pointer.
                unsafe { streams(product, rows, weight.row_bytes(), n_steps, columns, to) };
            }
        }
        m + A
    }
}

/// Where the outputs of four weight rows go: to rows `m` and on, `n` columns from `at` on, so far `apart`.
#[derive(Clone, Copy)]
struct Columns {
    m: usize,
    at: usize,
    apart: usize,
    n: usize,
}

/// `n_steps` times four weight rows, each behind the one before it in its stream.
///
/// # Safety
///
/// So many rows of `row_bytes` are there; the CPU has the features.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn streams<const A: usize>(
    product: &impl Fours<A>,
    mut rows: [*const u8; 4],
    row_bytes: usize,
    n_steps: usize,
    columns: Columns,
    to: &mut Output<'_>,
) {
    let Columns { m, at, apart, n } = columns;
    ask(&rows, 0, AHEAD.min(n_steps * row_bytes));
    for step in 0..n_steps {
        // SAFETY: the caller vouches for the rows.
        let sums = unsafe { product.times(&rows) };
        for a in 0..A {
            for r in 0..n {
                to.out[(m + a) * to.stride + to.first + at + r * apart + step] = sums[a][r];
            }
        }
        for row in &mut rows {
            *row = row.wrapping_add(row_bytes);
        }
    }
}

/// Where the weight row `first` begins, and `n - 1` others that are so far `apart`; the last of them stands in for those
/// that are not there.
fn pointers<const R: usize>(weight: WeightView<'_>, first: usize, apart: usize, n: usize) -> [*const u8; R] {
    let mut rows = [weight.row(first).as_ptr(); R];
    for r in 1..R {
        rows[r] = if r < n { weight.row(first + r * apart).as_ptr() } else { rows[r - 1] };
    }
    rows
}

impl StripDot for Avx512 {
    fn dot<const A: usize>(self, strip: &[i8], rows: [&[i8]; A], sums: [i32; A]) -> [[i32; 32]; A] {
        // SAFETY: `self` proves that the CPU has the features.
        unsafe { tiles::dot(strip, rows, sums) }
    }
}

/// What is done for a kind of block. Every function needs the CPU to be an [`Avx512`].
trait Loops {
    /// Bytes of a block.
    const BYTES: usize;
    /// Weights of a block.
    const LEN: usize;
    /// Sixteen blocks, turned.
    type Turned;

    /// Four weight rows of `n_blocks` times `A` activation rows.
    ///
    /// # Safety
    ///
    /// The rows and the activations are that long.
    unsafe fn few<const A: usize>(rows: &[*const u8; 4], n_blocks: usize, acts: &Codes<A>) -> [[f32; 4]; A];

    /// Decodes sixteen weight rows of `n_blocks` into `turned`, in place of what it holds.
    ///
    /// # Safety
    ///
    /// The rows are that long.
    unsafe fn turn(rows: &[*const u8; TURNED], n_blocks: usize, turned: &mut Vec<Self::Turned>);

    /// Sixteen weight rows, turned, times `A` activation rows.
    ///
    /// # Safety
    ///
    /// The activations have as many blocks.
    unsafe fn many<const A: usize>(turned: &[Self::Turned], acts: &Codes<A>) -> [[f32; TURNED]; A];
}

/// What four weight rows are multiplied by: `A` activation rows.
trait Fours<const A: usize> {
    /// Four weight rows times them.
    ///
    /// # Safety
    ///
    /// The weight rows are as long; the CPU is an [`Avx512`].
    unsafe fn times(&self, rows: &[*const u8; 4]) -> [[f32; 4]; A];
}

struct Few<L, const A: usize> {
    n_blocks: usize,
    acts: Codes<A>,
    of: PhantomData<L>,
}

impl<L: Loops, const A: usize> Fours<A> for Few<L, A> {
    #[inline]
    #[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
    unsafe fn times(&self, rows: &[*const u8; 4]) -> [[f32; 4]; A] {
        // SAFETY: the caller vouches for rows of `n_blocks`.
        unsafe { L::few(rows, self.n_blocks, &self.acts) }
    }
}

/// The activation rows that turned weights are multiplied by, in order: by eights, then four, two and one of the rest.
struct Groups {
    eights: Vec<Codes<8>>,
    four: Option<Codes<4>>,
    two: Option<Codes<2>>,
    one: Option<Codes<1>>,
}

impl Groups {
    fn of(acts: &Activations, rows: &[u32], n_blocks: usize, block_len: usize) -> Groups {
        let (eights, rest) = rows.as_chunks::<8>();
        let (fours, rest) = rest.as_chunks::<4>();
        let (twos, one) = rest.as_chunks::<2>();
        Groups {
            eights: eights.iter().map(|rows| codes(acts, rows, n_blocks, block_len)).collect(),
            four: fours.first().map(|rows| codes(acts, rows, n_blocks, block_len)),
            two: twos.first().map(|rows| codes(acts, rows, n_blocks, block_len)),
            one: one.first().map(|&row| codes(acts, &[row], n_blocks, block_len)),
        }
    }

    /// All of them times sixteen weight rows, of which `n` make the outputs `at` and on.
    fn times<L: Loops>(&self, _: Avx512, turned: &[L::Turned], at: usize, n: usize, to: &mut Output<'_>) {
        let mut m = 0;
        // SAFETY: there is a CPU that has the features, and all rows have as many blocks.
        unsafe {
            for eight in &self.eights {
                m = write(L::many(turned, eight), m, at, n, to);
            }
            if let Some(four) = &self.four {
                m = write(L::many(turned, four), m, at, n, to);
            }
            if let Some(two) = &self.two {
                m = write(L::many(turned, two), m, at, n, to);
            }
            if let Some(one) = &self.one {
                write(L::many(turned, one), m, at, n, to);
            }
        }
    }
}

fn codes<const A: usize>(acts: &Activations, rows: &[u32; A], n_blocks: usize, block_len: usize) -> Codes<A> {
    Codes::of(&rows.map(|row| acts.row(row)), n_blocks, block_len)
}

/// The first `n` sums of each activation row, the `m`-th and on, to columns `at` and on; returns the next `m`.
fn write<const R: usize, const A: usize>(
    sums: [[f32; R]; A],
    m: usize,
    at: usize,
    n: usize,
    to: &mut Output<'_>,
) -> usize {
    for (a, sums) in sums.iter().enumerate() {
        let first = (m + a) * to.stride + to.first + at;
        let out = &mut to.out[first..first + n];
        match out.as_mut_array() {
            // Nearly always, and no call to copy a few bytes.
            Some(out) => *out = *sums,
            None => out.copy_from_slice(&sums[..n]),
        }
    }
    m + A
}

/// 64 bytes from anywhere.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn load64<T>(bytes: *const T) -> __m512i {
    // SAFETY: the caller vouches for 64 bytes; no alignment is needed.
    unsafe { _mm512_loadu_si512(bytes.cast()) }
}

/// The 16 bytes `at` of each of four blocks, a quarter each.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn quarter_each(blocks: [*const u8; 4], at: usize) -> __m512i {
    // SAFETY: the caller vouches for the bytes.
    let [a, b, c, d] = unsafe { blocks.map(|block| &*block.add(at).cast::<[u8; 16]>()) };
    // A broadcast that is masked takes no shuffle, of which there are few at a time.
    let bytes = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(load16(a)), 0x00f0, load16(b));
    let bytes = _mm512_mask_broadcast_i32x4(bytes, 0x0f00, load16(c));
    _mm512_mask_broadcast_i32x4(bytes, 0xf000, load16(d))
}

/// 32 bytes from anywhere, twice.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
unsafe fn twice32(bytes: *const u8) -> __m512i {
    // SAFETY: the caller vouches for 32 bytes; no alignment is needed.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(bytes.cast()) })
}

/// Sums of two neighbouring 32-bit lanes: in each quarter two of `x`, then two of `y`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn neighbours(x: __m512i, y: __m512i) -> __m512i {
    let (x, y) = (_mm512_castsi512_ps(x), _mm512_castsi512_ps(y));
    let even = _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(x, y));
    let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(x, y));
    _mm512_add_epi32(even, odd)
}

/// The sums of the quarters of four registers: lane r of quarter q is the sum of quarter q of `rows[r]`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn quarters(rows: [__m512i; 4]) -> __m512i {
    neighbours(neighbours(rows[0], rows[1]), neighbours(rows[2], rows[3]))
}

/// Rows of 32-bit lanes to columns: lane r of `out[i]` is lane i of `rows[r]`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    let mut fours = pairs;
    for i in 0..4 {
        for half in 0..2 {
            let (low, high) = (pairs[4 * i + half], pairs[4 * i + half + 2]);
            fours[4 * i + 2 * half] = _mm512_unpacklo_epi64(low, high);
            fours[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(low, high);
        }
    }
    // `fours[4 i + j]` holds columns j, j + 4, j + 8, j + 12 of rows 4 i to 4 i + 3, a quarter each.
    let mut out = rows;
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let (ab_low, ab_high) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (cd_low, cd_high) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        out[j] = _mm512_shuffle_i32x4::<0x88>(ab_low, cd_low);
        out[j + 4] = _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high);
        out[j + 8] = _mm512_shuffle_i32x4::<0xdd>(ab_low, cd_low);
        out[j + 12] = _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high);
    }
    out
}

/// Asks for the weights that come some way after `bytes` of each of four rows, which lie `done` bytes behind their
/// beginnings. The next rows of their quarters follow them.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn prefetch(rows: &[*const u8; 4], done: usize, bytes: usize) {
    ask(rows, done + AHEAD, bytes);
}

/// Asks for `bytes` of each of four rows, `from` on: into the second cache, which was faster than into the first for
/// every type that was tried (docs/performance.md).
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn ask(rows: &[*const u8; 4], from: usize, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        for row in rows {
            _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(from + line).cast());
        }
    }
}

/// Adds products of 16-bit numbers to 32-bit sums, two neighbouring ones each, as `_mm512_dpwssd_epi32` does: the
/// compiler would make two instructions of it, a product and a sum, which takes longer where many blocks are under way.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn dpwssd(mut sums: __m512i, x: __m512i, y: __m512i) -> __m512i {
    // SAFETY: the instruction is of the features above, and reads and writes these registers alone.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, {2}",
            inout(zmm_reg) sums, in(zmm_reg) x, in(zmm_reg) y,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Takes the bits `matrix` names out of each byte: one instruction, where a shift and a mask are two.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")]
fn bits(bytes: __m512i, matrix: i64) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, _mm512_set1_epi64(matrix))
}

/// The matrix of so many bits of a byte, `first` and on, of which the byte's lowest are made: a row of eight bits for each,
/// from the uppermost byte down.
const fn taken(first: u32, n: u32) -> i64 {
    let (mut matrix, mut i) = (0, 0);
    while i < n {
        matrix |= 1 << (first + i) << (56 - 8 * i);
        i += 1;
    }
    matrix
}

/// The lower halves of bytes, and the upper ones.
const LOWER: i64 = taken(0, 4);
const UPPER: i64 = taken(4, 4);
