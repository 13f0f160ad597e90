//! Register programs: one int8 product as 112 words, and the task that points the driver at it.
//!
//! A word is a register, its value and the block that it belongs to:
//!
//! ```text
//!  63      48 47                             16 15       0
//! ┌──────────┬─────────────────────────────────┬──────────┐
//! │  block   │              value              │ register │   108 writes, then 4 words of trailer:
//! └──────────┴─────────────────────────────────┴──────────┘   next program, its length, 0, start
//! ```
//!
//! The product is a 1×1 convolution: input and output are cubes one wide and M high, K and N channels deep, kept as
//! dense rows. Addresses and legal shapes are the caller's business; this module only refuses what the on-chip
//! buffer or a register cannot hold.
//!
//! Source: docs/npu.md, "Register program" and "Tasks". Confidence: proven on boards.

use bytemuck::{Pod, Zeroable};

/// Words of one program.
pub const WORDS: usize = 112;

/// Register writes among them.
const WRITES: u32 = 108;

/// Banks of the on-chip buffer that data and weights share, and the bytes of one.
const BANKS: u32 = 12;
const BANK_BYTES: u32 = 32 << 10;

/// The writes in order: first and last register of each run, four apart.
const ORDER: [(u16, u16); 23] = [
    (0x1040, 0x1040),
    (0x1104, 0x1104),
    (0x1100, 0x1100),
    (0x100c, 0x100c),
    (0x4004, 0x4004),
    (0x100c, 0x1014),
    (0x1020, 0x1038),
    (0x1040, 0x1044),
    (0x104c, 0x1060),
    (0x1064, 0x1068),
    (0x1070, 0x1088),
    (0x1100, 0x1104),
    (0x1110, 0x1110),
    (0x1140, 0x1184),
    (0x3010, 0x301c),
    (0x3030, 0x3030),
    (0x400c, 0x4014),
    (0x4020, 0x4024),
    (0x4030, 0x403c),
    (0x4040, 0x4088),
    (0x4090, 0x40ac),
    (0x40c0, 0x40c4),
    (0x4100, 0x412c),
];

/// The writes as words, their values still 0.
const WRITES_OF_ZERO: [u64; WRITES as usize] = writes_of_zero();

const fn writes_of_zero() -> [u64; WRITES as usize] {
    let mut words = [0; WRITES as usize];
    let (mut at, mut run) = (0, 0);
    while run < ORDER.len() {
        let (mut register, last) = ORDER[run];
        while register <= last {
            let block = match register >> 12 {
                1 => 0x0201, // CNA, the convolution's inputs
                3 => 0x0801, // CORE, its sums
                _ => 0x1001, // DPU, its outputs
            };
            words[at] = write(block, register, 0);
            (at, register) = (at + 1, register + 4);
        }
        run += 1;
    }
    words
}

/// One product `[m, k]` × `[k, n]`, and where the device sees its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Rows.
    pub m: u32,
    /// Inputs, a multiple of 32.
    pub k: u32,
    /// Outputs, a multiple of 32.
    pub n: u32,
    /// Activations, int8 `[m, k]`.
    pub a: u32,
    /// Weights, tiles of `k` inputs and `n` outputs.
    pub weights: u32,
    /// Results, int32 `[m, n]`.
    pub c: u32,
}

impl Product {
    /// Writes the program that computes this and then goes on with the one at `next`, if there is one.
    ///
    /// `None` when no program can: a zero or misaligned shape, more than 8192 outputs, or more rows or inputs than
    /// the on-chip buffer holds.
    pub fn encode(&self, next: Option<u32>) -> Option<[u64; WORDS]> {
        let banks = self.banks()?;
        let mut words = [0; WORDS];
        for (word, write) in words.iter_mut().zip(WRITES_OF_ZERO) {
            *word = write | u64::from(self.value(write as u16, banks)) << 16;
        }
        let (address, length) = next.map_or((0, 0), |next| (write(0x0101, 0x0010, next), WRITES / 2 + 1));
        words[108] = address;
        words[109] = write(0x0101, 0x0014, length);
        words[110] = write(0x0041, 0x0000, 0);
        words[111] = write(0x0081, 0x0008, 0xd);
        Some(words)
    }

    /// The value of one register.
    fn value(&self, register: u16, banks: u32) -> u32 {
        let &Product { m, k, n, a, weights, c } = self;
        match register {
            // Shape: M, K, N as counts, as counts less one, and as strides.
            0x1010 => 16 * (m + 1).min(largest_power_of_two(65_536 / k)),
            0x1020 | 0x1084 => 0x10000 | m,
            0x1024 => ((k - 1) << 16) | k,
            0x102c => m,
            0x1030 => k * n,
            0x1034 | 0x1088 => k,
            0x1038 => 0x0101_0000 | n,
            0x1040 => banks,
            0x1044 => k.div_ceil(64),
            0x107c => k / 16,
            0x3014 | 0x405c => (m - 1) << 16,
            0x3018 | 0x4058 => n - 1,
            0x4034 => m - 1,
            0x4038 => ((n / 4 - 1) << 16) | (n / 4 - 1),
            0x403c => ((n - 1) << 16) | (n - 1),
            // Operands.
            0x1070 => a,
            0x1110 => weights,
            0x4020 => c,
            // The same in every program.
            0x100c => 0x2000_0000,
            0x1014 => 9,
            0x1028 | 0x3010 | 0x4078 | 0x4084 => 1,
            0x104c => 0xb,
            0x1050 | 0x1054 | 0x1058 | 0x105c => 0x10000,
            0x1078 => 0x000f_000f,
            0x4004 => 0xe,
            0x400c => 0x1e4,
            0x4010 => 0x8000_0000, // results leave as int32
            0x4024 => 0x10,
            0x4040 | 0x4060 => 0x53,
            0x4050 => 0x7fc,
            0x4070 => 0x383,
            0x40c0 => 0x80,
            _ => 0,
        }
    }

    /// Register 0x1040: banks of the on-chip buffer for weights (high nibble) and for data (low nibble).
    ///
    /// Data gets whole groups of 64 rows where K is a multiple of 512, as every program that ran on boards had it,
    /// else the banks that its bytes need. One block of 32 outputs must fit what is left.
    fn banks(&self) -> Option<u32> {
        let &Product { m, k, n, .. } = self;
        let shaped = |value: u32, most| value > 0 && value <= most && value.is_multiple_of(32);
        if m == 0 || m > 4096 || !shaped(k, 11_264) || !shaped(n, 8192) {
            return None;
        }
        let data =
            if k.is_multiple_of(512) { k / 512 * m.div_ceil(64) } else { (m * k).div_ceil(BANK_BYTES) };
        let weights = BANKS.checked_sub(data)?;
        (32 * k <= weights * BANK_BYTES).then_some(weights << 4 | data)
    }
}

/// A word that writes `value` to a register of a block.
const fn write(block: u64, register: u16, value: u32) -> u64 {
    block << 48 | (value as u64) << 16 | register as u64
}

/// The largest power of two that is not above `value` (at least 1).
fn largest_power_of_two(value: u32) -> u32 {
    1 << value.max(1).ilog2()
}

/// What the driver is told of one program: 40 bytes, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Task {
    flags: u32,
    op_index: u32,
    enable_mask: u32,
    int_mask: u32,
    int_clear: u32,
    int_status: u32,
    regcfg_amount: u32,
    regcfg_offset: u32,
    regcmd_addr: u64,
}

impl Task {
    /// The task of the product whose program the device sees at `program`.
    pub fn new(program: u32) -> Task {
        Task {
            flags: 0,
            op_index: 0,
            enable_mask: 0xd,
            int_mask: 0x300,
            int_clear: 0x1_ffff,
            int_status: 0,
            regcfg_amount: WRITES,
            regcfg_offset: 0,
            regcmd_addr: u64::from(program),
        }
    }
}
