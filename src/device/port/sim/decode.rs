//! Reads a register program back, trusting none of it.
//!
//! Written from docs/npu.md alone and sharing nothing with the encoder: registers are listed one by one, and K, N and
//! M stand in six places each that must agree. What silicon would take silently is refused here, but for one thing:
//! more rows than the data banks hold is executed as silicon does it, wrongly.

/// What a program computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    pub(super) m: u64,
    pub(super) k: u64,
    pub(super) n: u64,
    pub(super) a: u32,
    pub(super) weights: u32,
    pub(super) c: u32,
    /// Rows that the data banks hold; row `r` beyond them is read as row `r % rows_held`.
    pub(super) rows_held: u64,
    /// The program that follows.
    pub(super) next: Option<u32>,
}

/// Bytes of a program.
pub(super) const PROGRAM_LEN: u64 = 896;

const N_WRITES: usize = 108;

/// The registers in the order in which a program writes them.
#[rustfmt::skip]
const SEQUENCE: [u16; N_WRITES] = [
    0x1040, 0x1104, 0x1100, 0x100c, 0x4004, 0x100c, 0x1010, 0x1014, 0x1020, 0x1024, 0x1028, 0x102c,
    0x1030, 0x1034, 0x1038, 0x1040, 0x1044, 0x104c, 0x1050, 0x1054, 0x1058, 0x105c, 0x1060, 0x1064,
    0x1068, 0x1070, 0x1074, 0x1078, 0x107c, 0x1080, 0x1084, 0x1088, 0x1100, 0x1104, 0x1110, 0x1140,
    0x1144, 0x1148, 0x114c, 0x1150, 0x1154, 0x1158, 0x115c, 0x1160, 0x1164, 0x1168, 0x116c, 0x1170,
    0x1174, 0x1178, 0x117c, 0x1180, 0x1184, 0x3010, 0x3014, 0x3018, 0x301c, 0x3030, 0x400c, 0x4010,
    0x4014, 0x4020, 0x4024, 0x4030, 0x4034, 0x4038, 0x403c, 0x4040, 0x4044, 0x4048, 0x404c, 0x4050,
    0x4054, 0x4058, 0x405c, 0x4060, 0x4064, 0x4068, 0x406c, 0x4070, 0x4074, 0x4078, 0x407c, 0x4080,
    0x4084, 0x4088, 0x4090, 0x4094, 0x4098, 0x409c, 0x40a0, 0x40a4, 0x40a8, 0x40ac, 0x40c0, 0x40c4,
    0x4100, 0x4104, 0x4108, 0x410c, 0x4110, 0x4114, 0x4118, 0x411c, 0x4120, 0x4124, 0x4128, 0x412c,
];

/// Registers whose value depends on the product.
#[rustfmt::skip]
const VARIABLE: [u16; 22] = [
    0x1010, 0x1020, 0x1024, 0x102c, 0x1030, 0x1034, 0x1038, 0x1040, 0x1044, 0x1070, 0x107c, 0x1084,
    0x1088, 0x1110, 0x3014, 0x3018, 0x4020, 0x4034, 0x4038, 0x403c, 0x4058, 0x405c,
];

/// Registers with a fixed value that is not 0.
#[rustfmt::skip]
const FIXED: [(u16, u32); 21] = [
    (0x100c, 1 << 29), (0x1014, 0x09), (0x1028, 0x01), (0x104c, 0x0b),
    (0x1050, 1 << 16), (0x1054, 1 << 16), (0x1058, 1 << 16), (0x105c, 1 << 16),
    (0x1078, 0xf_000f), (0x3010, 0x01), (0x4004, 0x0e), (0x400c, 0x1e4),
    (0x4010, 1 << 31), (0x4024, 0x10), (0x4040, 0x53), (0x4050, 0x7fc),
    (0x4060, 0x53), (0x4070, 0x383), (0x4078, 0x01), (0x4084, 0x01),
    (0x40c0, 0x80),
];

/// What each write must be: block and register, and the value where it is fixed.
const EXPECTED: [(u16, u16, Option<u32>); N_WRITES] = expected();

const fn expected() -> [(u16, u16, Option<u32>); N_WRITES] {
    let mut table = [(0, 0, Some(0)); N_WRITES];
    let mut i = 0;
    while i < N_WRITES {
        let register = SEQUENCE[i];
        let block = match register >> 8 {
            0x10 | 0x11 => 0x0201,
            0x30 => 0x0801,
            _ => 0x1001,
        };
        table[i] = (block, register, fixed(register));
        i += 1;
    }
    table
}

const fn fixed(register: u16) -> Option<u32> {
    let mut i = 0;
    while i < VARIABLE.len() {
        if VARIABLE[i] == register {
            return None;
        }
        i += 1;
    }
    let mut i = 0;
    while i < FIXED.len() {
        if FIXED[i].0 == register {
            return Some(FIXED[i].1);
        }
        i += 1;
    }
    Some(0)
}

/// Where a register is written last: that write is in force.
const fn position(register: u16) -> usize {
    let mut i = N_WRITES;
    loop {
        assert!(i > 0, "no such register");
        i -= 1;
        if SEQUENCE[i] == register {
            return i;
        }
    }
}

/// The value of a register, its position found at compile time.
macro_rules! value {
    ($values:ident, $register:literal) => {
        $values[const { position($register) }]
    };
}

/// Reads a program of [`PROGRAM_LEN`] bytes.
pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, String> {
    let (words, rest) = bytes.as_chunks::<8>();
    if words.len() as u64 * 8 != PROGRAM_LEN || !rest.is_empty() {
        return Err(format!("a program of {} bytes", bytes.len()));
    }
    let mut values = [0; N_WRITES];
    for (i, (word, (block, register, fixed))) in words.iter().zip(EXPECTED).enumerate() {
        let (found_block, found_register, found) = fields(*word);
        if (found_block, found_register) != (block, register) {
            return Err(format!(
                "word {i} writes {found_block:04x}:{found_register:04x}, not {block:04x}:{register:04x}"
            ));
        }
        if fixed.is_some_and(|fixed| fixed != found) {
            return Err(format!("register {register:04x} is {found:#x}"));
        }
        values[i] = found;
    }
    if values[0] != value!(values, 0x1040) {
        return Err(format!(
            "register 1040 is {:#x} first and {:#x} then",
            values[0],
            value!(values, 0x1040)
        ));
    }
    let next = trailer(&words[N_WRITES..])?;
    let (m, k, n) = shape(&values)?;
    let rows_held = rows_held(value!(values, 0x1040), k)?;
    let (a, weights, c) = (value!(values, 0x1070), value!(values, 0x1110), value!(values, 0x4020));
    Ok(Decoded { m, k, n, a, weights, c, rows_held, next })
}

/// Block, register and value of a word.
fn fields(word: [u8; 8]) -> (u16, u16, u32) {
    let [r0, r1, v0, v1, v2, v3, b0, b1] = word;
    (u16::from_le_bytes([b0, b1]), u16::from_le_bytes([r0, r1]), u32::from_le_bytes([v0, v1, v2, v3]))
}

/// The next program's address, if the trailer names one.
fn trailer(words: &[[u8; 8]]) -> Result<Option<u32>, String> {
    let &[next, length, nothing, start] = words else { return Err("no trailer".to_owned()) };
    if fields(nothing) != (0x0041, 0, 0) || fields(start) != (0x0081, 8, 0xd) {
        return Err("the trailer does not start the operation".to_owned());
    }
    match (fields(next), fields(length)) {
        ((0, 0, 0), (0x0101, 0x14, 0)) => Ok(None),
        ((0x0101, 0x10, address), (0x0101, 0x14, 0x37)) => Ok(Some(address)),
        (next, length) => Err(format!("the trailer links {next:x?} with length {length:x?}")),
    }
}

/// M, K and N, when all places where they stand agree and a program may have them.
fn shape(values: &[u32; N_WRITES]) -> Result<(u64, u64, u64), String> {
    let (m, k) = (u64::from(value!(values, 0x102c)), u64::from(value!(values, 0x1034)));
    let n = u64::from(value!(values, 0x4058)) + 1;
    let possible = (1..=65_536).contains(&m)
        && (32..=65_504).contains(&k)
        && k % 32 == 0
        && (32..=8192).contains(&n)
        && n % 32 == 0;
    if !possible {
        return Err(format!("a product of {m} rows, {k} inputs and {n} outputs"));
    }
    let mut reach = 65_536;
    while reach > 65_536 / k {
        reach /= 2;
    }
    let places = [
        (0x1010, value!(values, 0x1010), 16 * reach.min(m + 1)),
        (0x1020, value!(values, 0x1020), (1 << 16) + m),
        (0x1084, value!(values, 0x1084), (1 << 16) + m),
        (0x4034, value!(values, 0x4034), m - 1),
        (0x405c, value!(values, 0x405c), (m - 1) * 65_536),
        (0x3014, value!(values, 0x3014), (m - 1) * 65_536),
        (0x1024, value!(values, 0x1024), (k - 1) * 65_536 + k),
        (0x1088, value!(values, 0x1088), k),
        (0x1044, value!(values, 0x1044), k.div_ceil(64)),
        (0x107c, value!(values, 0x107c), k / 16),
        (0x1030, value!(values, 0x1030), k * n),
        (0x1038, value!(values, 0x1038), 0x0101_0000 + n),
        (0x3018, value!(values, 0x3018), n - 1),
        (0x403c, value!(values, 0x403c), (n - 1) * 65_537),
        (0x4038, value!(values, 0x4038), (n / 4 - 1) * 65_537),
    ];
    for (register, found, expected) in places {
        if u64::from(found) != expected {
            return Err(format!(
                "register {register:04x} is {found:#x}, and {m} x {k} x {n} needs {expected:#x}"
            ));
        }
    }
    Ok((m, k, n))
}

/// Rows of `k` bytes that the data banks of register 0x1040 hold.
fn rows_held(banks: u32, k: u64) -> Result<u64, String> {
    let (data, weights) = (u64::from(banks & 15), u64::from(banks >> 4));
    let bank = 32_768;
    if data == 0 || data + weights > 12 || weights * bank < 32 * k || data * bank < k {
        return Err(format!(
            "register 1040 is {banks:#x}: {data} data banks, {weights} weight banks, K = {k}"
        ));
    }
    Ok(data * bank / k)
}
