//! The table of GGUF element types: id, name, weights per block, bytes per block.
//!
//! Source: `GGML_QUANT_SIZES` of the Python package `gguf`. Q8_1 is left out: sources disagree on its size and
//! nobody stores it. A type in this table can be carried; one with a decoder in [`crate::blocks`] can be computed.

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $block:literal, $bytes:literal;)*) => {
        /// The element type of a tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types, missing_docs)]
        pub enum Dtype { $($variant),* }

        impl Dtype {
            /// Every type of the table, in order of its GGUF id.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant),*];

            /// The type with this GGUF id.
            pub fn from_gguf(id: u32) -> Option<Dtype> {
                match id { $($id => Some(Dtype::$variant),)* _ => None }
            }

            /// The id in a GGUF tensor directory.
            pub fn gguf_id(self) -> u32 {
                match self { $(Dtype::$variant => $id),* }
            }

            /// The name users know, as in `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name),* }
            }

            /// Weights per block; rows are whole blocks.
            pub fn block_len(self) -> usize {
                match self { $(Dtype::$variant => $block),* }
            }

            /// Bytes per block.
            pub fn block_bytes(self) -> usize {
                match self { $(Dtype::$variant => $bytes),* }
            }
        }
    };
}

dtypes! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q2_K = 10, "Q2_K", 256, 84;
    Q3_K = 11, "Q3_K", 256, 110;
    Q4_K = 12, "Q4_K", 256, 144;
    Q5_K = 13, "Q5_K", 256, 176;
    Q6_K = 14, "Q6_K", 256, 210;
    Q8_K = 15, "Q8_K", 256, 292;
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    IQ1_S = 19, "IQ1_S", 256, 50;
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    IQ3_S = 21, "IQ3_S", 256, 110;
    IQ2_S = 22, "IQ2_S", 256, 82;
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    IQ1_M = 29, "IQ1_M", 256, 56;
    BF16 = 30, "BF16", 1, 2;
    TQ1_0 = 34, "TQ1_0", 256, 54;
    TQ2_0 = 35, "TQ2_0", 256, 66;
    MXFP4 = 39, "MXFP4", 32, 17;
}

impl Dtype {
    /// Whether weights of it are floats themselves, nothing that must be unpacked.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// Bytes of a row of `n_in` weights; `None` when `n_in` is no whole number of blocks or the product overflows.
    pub fn row_bytes(self, n_in: u64) -> Option<u64> {
        let block = self.block_len() as u64;
        if !n_in.is_multiple_of(block) {
            return None;
        }
        (n_in / block).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
