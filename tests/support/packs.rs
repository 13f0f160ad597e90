//! A small pack with one of everything, and ways to change a pack and make its digests right again.

use orkpack::gguf::Header as GgufHeader;
use orkpack::pack::layout::Header;
use orkpack::pack::{
    ChunkContents, Contents, Cut, Digest, FileContents, Finished, Index, Manifest, MatrixContents,
    MatrixName, ModelDims, Part, SubMatrix, Tier, Writer, digest, digest_parts,
};
use orkpack::tensor::{Dtype, MatrixId, Projection, Value};
use orkpack::units::{ExpertId, LayerId};

use super::gguf_builder::GgufBuilder;

pub const PAGE: usize = 4096;

/// A model of one layer with two experts, whose file has a gap that is not zero, and its plan.
///
/// Chunks 0 and 1 share a gate in two slices of outputs and a down projection in two slices of inputs; both begin in
/// chunk 0, behind a gate in one part, so chunk 1 has no scales.
pub struct Sample {
    pub gguf: Vec<u8>,
    pub header: GgufHeader,
}

impl Default for Sample {
    fn default() -> Self {
        Sample::new(true)
    }
}

impl Sample {
    /// `odd`: the padding behind a tensor is not zero, as no writer would leave it.
    pub fn new(odd: bool) -> Sample {
        let tensors = GgufBuilder::new()
            .text("general.architecture", "qwen3moe")
            .kv("qwen3moe.block_count", Value::U32(1))
            .tensor("output_norm.weight", Dtype::F32, &[5], numbers(20, 1))
            .tensor("token_embd.weight", Dtype::F16, &[40, 16], numbers(1280, 2))
            .tensor("blk.0.ffn_gate_exps.weight", Dtype::F16, &[40, 36, 2], numbers(5760, 3))
            .tensor("blk.0.ffn_down_exps.weight", Dtype::F16, &[36, 40, 2], numbers(5760, 4));
        Sample::from_builder(&tensors, odd)
    }

    fn from_builder(builder: &GgufBuilder, odd: bool) -> Sample {
        let mut gguf = builder.build();
        let header = GgufHeader::parse(&gguf, gguf.len() as u64, &Default::default()).expect("a right GGUF");
        if odd {
            gguf[header.data_offset as usize + 23] = 7;
        }
        Sample { gguf, header }
    }

    pub fn contents(&self) -> Contents<'_> {
        let file = FileContents::new(
            "model.gguf".as_ref(),
            &self.gguf,
            self.header.data_offset,
            &self.header.tensors,
            0,
        );
        Contents {
            manifest: manifest(),
            files: vec![file.expect("tensors inside the file")],
            tensors: &self.header.tensors,
            thin: false,
            profile: br#"{"name":"rk3588"}"#,
            statistics: Some(br#"{"version":1}"#),
            plan: br#"{"decode":"cpu"}"#,
            chunks: vec![
                ChunkContents { len: 12288, tier: Tier::Resident, domain: 0, order: 0 },
                ChunkContents { len: 8192, tier: Tier::Resident, domain: 0, order: 0 },
                ChunkContents { len: 4096, tier: Tier::Streamed, domain: 1, order: 3 },
            ],
            matrices: vec![
                matrix(expert(1, Projection::Gate), 40, 36, vec![part(sub(0, 40, 64, 0, 36, 64), 0, 0)]),
                matrix(MatrixName::Dense { tensor: 1 }, 40, 12, vec![part(sub(0, 40, 64, 0, 12, 32), 2, 0)]),
                matrix(
                    expert(1, Projection::Down),
                    36,
                    40,
                    vec![part(sub(0, 20, 32, 0, 40, 64), 0, 8192), part(sub(20, 16, 32, 0, 40, 64), 1, 4096)],
                ),
                matrix(
                    expert(0, Projection::Gate),
                    40,
                    36,
                    vec![part(sub(0, 40, 64, 0, 32, 32), 0, 4096), part(sub(0, 40, 64, 32, 4, 32), 1, 0)],
                ),
            ],
            cuts: vec![
                Cut { from_tokens: 1, experts: vec![1], dense: 0 },
                Cut { from_tokens: 32, experts: vec![2], dense: 1 },
            ],
        }
    }

    /// A model of two small tensors with all kinds of sections in few pages; its one matrix spans two chunks.
    pub fn small() -> Sample {
        let tensors = GgufBuilder::new()
            .text("general.architecture", "qwen3moe")
            .tensor("output_norm.weight", Dtype::F32, &[5], numbers(20, 1))
            .tensor("blk.0.ffn_down_exps.weight", Dtype::F16, &[36, 4, 2], numbers(576, 4));
        Sample::from_builder(&tensors, true)
    }

    /// What [`Sample::small`] is packed as.
    pub fn small_contents(&self) -> Contents<'_> {
        let chunk = ChunkContents { len: 4096, tier: Tier::Resident, domain: 0, order: 0 };
        let parts = vec![part(sub(0, 20, 32, 0, 40, 64), 0, 0), part(sub(20, 16, 32, 0, 40, 64), 1, 0)];
        Contents {
            chunks: vec![chunk; 2],
            matrices: vec![matrix(expert(1, Projection::Down), 36, 40, parts)],
            cuts: Vec::new(),
            ..self.contents()
        }
    }

    /// Pushes all there is into a writer of `contents`.
    pub fn push<S: orkpack::pack::Sink>(&self, writer: &mut Writer<S>) {
        for tensor in &self.header.tensors {
            writer.push_tensor(self.tensor(&tensor.name)).expect("as announced");
        }
        self.push_chunks(writer);
    }

    /// Pushes all chunks into a writer that has all tensors.
    pub fn push_chunks<S: orkpack::pack::Sink>(&self, writer: &mut Writer<S>) {
        for chunk in 0..writer.layout().index.chunks.len() as u32 {
            let (tiles, scales) = chunk_bytes(&writer.layout().index, chunk);
            writer.push_chunk(&tiles, &scales).expect("as announced");
        }
    }

    pub fn tensor(&self, name: &str) -> &[u8] {
        let place = self.header.find(name).expect("a tensor of the sample").place;
        &self.gguf[place.offset as usize..(place.offset + place.len) as usize]
    }

    pub fn write(&self, contents: &Contents<'_>) -> Finished<Vec<u8>> {
        let mut writer = Writer::in_memory(contents).expect("sound contents");
        self.push(&mut writer);
        writer.finish().expect("everything pushed")
    }

    /// The pack of the whole sample.
    pub fn pack(&self) -> Vec<u8> {
        self.write(&self.contents()).done
    }
}

fn manifest() -> Manifest {
    Manifest {
        tool: "orkpack 0.1.0".to_owned(),
        architecture: "qwen3moe".to_owned(),
        dims: ModelDims { n_layer: 1, n_embd: 40, n_ff: 36, n_expert: 2, n_expert_used: 1, n_vocab: 16 },
        contract: "w8a8-row-1".to_owned(),
        device: "rk3588".to_owned(),
        tokenizer: digest(b"tokenizer"),
        fingerprint: digest(b"fingerprint"),
    }
}

pub fn expert(expert: u32, projection: Projection) -> MatrixName {
    MatrixId { layer: LayerId(0), expert: ExpertId(expert), projection }.into()
}

pub fn sub(k0: u32, k_len: u32, k_padded: u32, n0: u32, n_len: u32, n_padded: u32) -> SubMatrix {
    SubMatrix { k0, k_len, k_padded, n0, n_len, n_padded }
}

pub fn part(sub: SubMatrix, chunk: u32, offset: u64) -> Part {
    Part { sub, chunk, offset }
}

pub fn matrix(matrix: MatrixName, n_in: u32, n_out: u32, parts: Vec<Part>) -> MatrixContents {
    MatrixContents { matrix, n_in, n_out, parts }
}

/// Bytes that differ from place to place and from seed to seed.
pub fn numbers(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + seed * 17 + i / 256) % 251) as u8).collect()
}

/// The code of a matrix at (k, n): row 3 is zero, no other row is.
pub fn code(k: usize, n: usize) -> i8 {
    if n == 3 { 0 } else { ((31 * k + 17 * n + 5) % 255) as i32 as u8 as i8 ^ -128i8 }
}

pub fn scale(n: usize) -> f32 {
    if n == 3 { 0.0 } else { (n + 1) as f32 / 64.0 }
}

/// Tiles and scales of a chunk, element by element by the formula.
fn chunk_bytes(index: &Index, chunk: u32) -> (Vec<u8>, Vec<f32>) {
    let len = index.sections[index.chunks[chunk as usize].section as usize].len;
    let mut tiles = vec![0; len as usize];
    for part in index.placements.iter().flat_map(|placement| &placement.parts) {
        if part.chunk == chunk {
            fill(&part.sub, &mut tiles[part.offset as usize..]);
        }
    }
    let mut beginning: Vec<_> = index.placements.iter().filter(|p| p.parts[0].chunk == chunk).collect();
    beginning.sort_by_key(|placement| placement.parts[0].offset);
    (tiles, beginning.iter().flat_map(|placement| (0..placement.n_out as usize).map(scale)).collect())
}

fn fill(sub: &SubMatrix, tiles: &mut [u8]) {
    for k in 0..sub.k_len as usize {
        for n in 0..sub.n_len as usize {
            let offset = n / 32 * 32 * sub.k_padded as usize + k / 32 * 1024 + n % 32 * 32 + k % 32;
            let value = code(sub.k0 as usize + k, sub.n0 as usize + n);
            tiles[offset] = if value == -128 { 1 } else { value } as u8;
        }
    }
}

/// The index of a pack, read without any check.
pub fn index_of(pack: &[u8]) -> Index {
    Index::decode(index_bytes(pack)).expect("an index")
}

pub fn index_bytes(pack: &[u8]) -> &[u8] {
    let len = u64::from_le_bytes(pack[40..48].try_into().unwrap()) as usize;
    &pack[PAGE..PAGE + len]
}

/// Changes the index and makes header and index digests right again. It must not outgrow its pages.
pub fn edit_index(pack: &[u8], edit: impl FnOnce(&mut Index)) -> Vec<u8> {
    let mut index = index_of(pack);
    edit(&mut index);
    let encoded = index.encode().expect("a small index");
    replace_index(pack, &encoded)
}

/// Puts other index bytes in and makes header and index digests right again.
pub fn replace_index(pack: &[u8], encoded: &[u8]) -> Vec<u8> {
    let room = index_bytes(pack).len().next_multiple_of(PAGE);
    assert!(encoded.len() <= room, "the index outgrew its pages");
    let mut out = pack.to_vec();
    out[PAGE..PAGE + room].fill(0);
    out[PAGE..PAGE + encoded.len()].copy_from_slice(encoded);
    let header = Header::new(encoded, pack.len() as u64).encode();
    out[..PAGE].copy_from_slice(&header);
    out
}

/// Changes bytes of the header and makes its digest right again.
pub fn edit_header(pack: &[u8], edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut out = pack.to_vec();
    edit(&mut out[..PAGE - 32]);
    let root = blake3::derive_key("orkpack format 1: header", &out[..PAGE - 32]);
    out[PAGE - 32..PAGE].copy_from_slice(&root);
    out
}

/// Changes bytes of sections and makes all digests right again, as a faulty tool would have written it.
pub fn edit_sections(pack: &[u8], edit: impl FnOnce(&mut [u8], &Index)) -> Vec<u8> {
    let mut out = pack.to_vec();
    edit(&mut out, &index_of(pack));
    let bytes = out.clone();
    edit_index(&out, |index| {
        for section in &mut index.sections {
            let content = &bytes[section.offset as usize..(section.offset + section.len) as usize];
            section.digests = digest_parts(content, section.digests.len()).expect("equal parts");
        }
        for tensor in &mut index.tensors {
            tensor.digests = index.sections[tensor.section.expect("fat") as usize].digests.clone();
        }
    })
}

/// Where a byte lies: `header`, `index`, `padding`, or the label of its section.
pub fn region(index: &Index, index_len: usize, at: usize) -> String {
    if at < PAGE {
        return "header".to_owned();
    }
    if at < PAGE + index_len {
        return "index".to_owned();
    }
    let at = at as u64;
    let section = index.sections.iter().find(|section| (section.offset..section.end()).contains(&at));
    section.map_or("padding".to_owned(), |section| section.label())
}

/// Any digest.
pub fn some_digest() -> Digest {
    digest(b"some")
}
