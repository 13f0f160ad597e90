//! Known answers, to be given before a device is trusted.
//!
//! The vectors are products that a board computed; only a hash of the results was kept. Operands come from a small
//! generator, so nothing is read. A device that misreads one tile, one row or one K-slice fails them.
//!
//! Source: docs/npu.md, "Known answers". Confidence: proven on boards, and recomputed in plain integers.

use super::{Device, DeviceError, DeviceMatrix, Job, PlacedPart, multiply_tiles};
use crate::profile::DeviceProfile;
use crate::tensor::{Int8Matrix, MatrixView};
use crate::tile::{SubMatrix, TileError, cut, tile};

/// Products of one `[m, k]` by one `[k, n]` matrix, and the hash of their results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Rows of each product in turn: the first so many of A. A has as many as the last.
    pub rows: &'static [usize],
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// The generator's state before A, then B, is drawn.
    pub state: u32,
    /// Of the results of all products, one after the other, little-endian.
    pub hash: u64,
}

const fn vector(rows: &'static [usize], k: usize, n: usize, state: u32, hash: u64) -> Vector {
    Vector { rows, k, n, state, hash }
}

/// What a board computed. The last three are small.
pub const VECTORS: [Vector; 10] = [
    vector(&[256], 18_944, 3584, 2_737_451_065, 0xb4d3_25e5_73e7_037c),
    vector(&[256], 3584, 3584, 2_225_352_761, 0x6084_624f_ae4e_a1cd),
    vector(&[256], 2048, 2048, 851_587_129, 0x1fc8_a456_2824_1e4b),
    vector(&[128], 512, 1536, 3_325_702_201, 0xa752_ea81_00ba_7d54),
    vector(&[200], 1024, 2048, 2_340_761_657, 0x21dc_86be_a3c1_015f),
    vector(&[128], 2048, 16_384, 371_265_593, 0x5b98_ab74_d6e8_947a),
    vector(&[96], 3584, 18_944, 922_554_425, 0x3fcd_5ced_1fed_0f53),
    vector(&[1, 1, 4, 512], 2048, 256, 2_072_807_481, 0xda6b_68f1_9045_3353),
    vector(&[1, 1, 4, 256], 3584, 256, 2_897_512_505, 0x4548_60dd_91b4_6165),
    vector(&[1, 1, 4, 256], 256, 32, 280_528_953, 0xf23e_bd14_9849_d390),
];

/// The two that every device is held to at start: cheap, and between them they use long and short K and row tiles.
const AT_START: [Vector; 2] = [VECTORS[9], VECTORS[7]];

impl Vector {
    /// A `[m, k]`, row-major, and B as `[n, k]`, the way weights are kept.
    pub fn operands(&self) -> (Vec<i8>, Int8Matrix) {
        let mut state = self.state;
        let mut draw = || {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            (state >> 16 & 3) as i8 - 1
        };
        let m = self.rows.last().copied().unwrap_or(0);
        let a = (0..m * self.k).map(|_| draw()).collect();
        // B is drawn input by input; 32 of them are turned at a time, or every write would miss the cache.
        let (mut codes, mut strip) = (vec![0; self.k * self.n], vec![0; 32 * self.n]);
        for k0 in (0..self.k).step_by(32) {
            let len = 32.min(self.k - k0);
            strip[..len * self.n].fill_with(&mut draw);
            for (n, codes) in codes.chunks_exact_mut(self.k).enumerate() {
                let column = strip.iter().skip(n).step_by(self.n);
                codes[k0..k0 + len].iter_mut().zip(column).for_each(|(code, drawn)| *code = *drawn);
            }
        }
        (a, Int8Matrix { codes, scales: vec![1.0; self.n], n_in: self.k, n_out: self.n })
    }

    /// Has a device compute this in its domain 0 and compares the hash. Leaves no chunk and no scratch behind.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Untrusted`] when the results differ, or whatever the device says.
    pub fn check(&self, device: &mut dyn Device, profile: &DeviceProfile) -> Result<(), DeviceError> {
        let (a, b) = self.operands();
        let loaded = load(device, profile, &b);
        let hash = loaded.and_then(|matrix| {
            let hash = self.run(device, &matrix, &a);
            unload(device, &matrix)?;
            hash
        })?;
        if hash == self.hash { Ok(()) } else { Err(self.untrusted(hash)) }
    }

    fn run(&self, device: &mut dyn Device, matrix: &DeviceMatrix, a: &[i8]) -> Result<u64, DeviceError> {
        let mut hash = FNV_OFFSET;
        for &m in self.rows {
            let mut out = vec![0; m * self.n];
            let rows = MatrixView::new(&a[..m * self.k], m, self.k).unwrap_or_default();
            device.run(&mut [Job { matrix, rows, out: &mut out }])?;
            hash = out.iter().fold(hash, |hash, sum| fnv(hash, &sum.to_le_bytes()));
        }
        Ok(hash)
    }

    fn untrusted(&self, hash: u64) -> DeviceError {
        DeviceError::Untrusted {
            what: format!("the known product of {} by {}", self.k, self.n),
            found: format!("{hash:016x}"),
            expected: format!("{:016x}", self.hash),
        }
    }
}

/// The offset that the published hashes were made with; it is not the usual one.
const FNV_OFFSET: u64 = 1_469_598_103_934_665_603;

/// FNV-1a, 64 bits.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(1_099_511_628_211))
}

/// Puts a matrix into chunks of its own and prepares for it.
fn load(
    device: &mut dyn Device,
    profile: &DeviceProfile,
    b: &Int8Matrix,
) -> Result<DeviceMatrix, DeviceError> {
    let parts = cut(b.n_in as u64, b.n_out as u64, profile)?;
    let mut matrix = DeviceMatrix { n_in: b.n_in as u32, n_out: b.n_out as u32, parts: Vec::new() };
    let loaded = load_parts(device, b, &parts, &mut matrix);
    loaded.inspect_err(|_| drop(unload(device, &matrix)))?;
    Ok(matrix)
}

fn load_parts(
    device: &mut dyn Device,
    b: &Int8Matrix,
    parts: &[SubMatrix],
    matrix: &mut DeviceMatrix,
) -> Result<(), DeviceError> {
    device.prepare(&parts.iter().map(|part| (0, *part)).collect::<Vec<_>>())?;
    for &part in parts {
        let chunk = device.create_chunk(part.bytes(), 0)?;
        matrix.parts.push(PlacedPart { part, chunk, offset: 0 });
        let mut tiled: Result<(), TileError> = Ok(());
        device.fill_chunk(chunk, &mut |bytes| {
            tiled = tile(b, &part, bytes);
            Ok(())
        })?;
        tiled?;
    }
    Ok(())
}

fn unload(device: &mut dyn Device, matrix: &DeviceMatrix) -> Result<(), DeviceError> {
    for placed in &matrix.parts {
        device.destroy_chunk(placed.chunk)?;
    }
    device.prepare(&[])
}

/// Has a device give the known answers that are asked of every one at start. Replaces its scratch, leaves none.
///
/// # Errors
///
/// [`DeviceError::Untrusted`] when an answer is wrong, or whatever the device says.
pub fn probe(device: &mut dyn Device, profile: &DeviceProfile) -> Result<(), DeviceError> {
    AT_START.iter().try_for_each(|vector| vector.check(device, profile))
}

/// Has a device multiply a matrix that it holds, and compares with the same tiles on the CPU, at one row and at three.
///
/// `tiles` are those of each part, in order.
///
/// # Errors
///
/// [`DeviceError::Untrusted`] when the results differ, or whatever the device says.
pub fn probe_matrix(
    device: &mut dyn Device,
    matrix: &DeviceMatrix,
    tiles: &[&[u8]],
) -> Result<(), DeviceError> {
    let (n_in, n_out) = (matrix.n_in as usize, matrix.n_out as usize);
    for m in [1, 3] {
        let code = |i: usize| (i * 31 % 255) as i32 - 127;
        let rows: Vec<i8> = (0..m * n_in).map(|i| code(i) as i8).collect();
        let rows = MatrixView::new(&rows, m, n_in).unwrap_or_default();
        let (mut found, mut expected) = (vec![0; m * n_out], vec![0; m * n_out]);
        device.run(&mut [Job { matrix, rows, out: &mut found }])?;
        for (placed, tiles) in matrix.parts.iter().zip(tiles) {
            multiply_tiles(tiles, &placed.part, rows, &mut expected)?;
        }
        if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            return Err(DeviceError::Untrusted {
                what: format!("output {} of row {} of a {n_in} by {n_out} matrix", at % n_out, at / n_out),
                found: found[at].to_string(),
                expected: expected[at].to_string(),
            });
        }
    }
    Ok(())
}
