//! Every reader of strangers' files as a function of bytes, followed by all that is done with what it read before a
//! weight is computed with. The fuzz targets call these; the module `corpus` of the tests replays what they found.
//!
//! The outcome is a value or an error, never a panic; each function says whether it was a value to the end.

use std::path::Path;
use std::sync::OnceLock;

use orkpack::blocks;
use orkpack::bytes::Limits;
use orkpack::calibrate::{Statistics, check_imatrix_magic, merge, read_imatrix};
use orkpack::chat::{ChatTemplate, Message};
use orkpack::convert::count_texts;
use orkpack::gguf::{GgufFile, GgufSet};
use orkpack::interop::PriorPack;
use orkpack::model::Outline;
use orkpack::pack::layout::{Header, PAGE};
use orkpack::pack::verify::{Mode, verify};
use orkpack::pack::{Index, Pack, digest_parts};
use orkpack::plan::{Plan, PlanRequest, Routing, Skew, choose, routed_layers};
use orkpack::profile::DeviceProfile;
use orkpack::runtime::Record;
use orkpack::source::{PackedModel, check_packed};
use orkpack::tensor::TensorSource;
use orkpack::tile;
use orkpack::tokenizer::{Special, Tokenizer};

/// A sound model for what is read beside one.
fn model() -> &'static (GgufSet, Outline) {
    static MODEL: OnceLock<(GgufSet, Outline)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let bytes = include_bytes!("../../fixtures/models/reference/tiny-qwen3moe-q4_0.gguf");
        let file = GgufFile::from_bytes("sound.gguf", bytes.to_vec()).expect("a sound model");
        let set = GgufSet::single(file).expect("one file");
        let outline = Outline::of(&set).expect("a known family");
        (set, outline)
    })
}

/// A GGUF as a model: header, family, vocabulary, template, every block.
pub fn gguf(data: &[u8]) -> bool {
    let Ok(file) = GgufFile::from_bytes("fuzz.gguf", data.to_vec()) else { return false };
    GgufSet::single(file).is_ok_and(|set| source(&set))
}

fn source(source: &dyn TensorSource) -> bool {
    for tensor in source.tensors() {
        let bytes = source.bytes(tensor.place).expect("a place in the file");
        if blocks::is_supported(tensor.dtype) && tensor.n_elements() < 1 << 16 {
            let mut row = vec![0.0; tensor.n_elements() as usize];
            blocks::dequantize(tensor.dtype, bytes, &mut row).expect("whole blocks");
        }
    }
    let metadata = source.metadata();
    if let Ok(tokenizer) = Tokenizer::from_metadata(metadata) {
        let ids = tokenizer.encode("A word, <s>42</s>\n", Special::Parse).unwrap_or_default();
        tokenizer.decode(&ids);
    }
    if let Ok(Some(template)) = ChatTemplate::from_metadata(metadata) {
        render(&template);
    }
    match Outline::of(source) {
        Ok(outline) => {
            choose(&PlanRequest::new(outline.shape(), Routing::Assumed(Skew::RANGE), rk3588())).is_ok()
        }
        Err(_) => false,
    }
}

fn rk3588() -> &'static DeviceProfile {
    static PROFILE: OnceLock<DeviceProfile> = OnceLock::new();
    PROFILE.get_or_init(|| DeviceProfile::built_in("rk3588").expect("built in"))
}

/// A pack as it is.
pub fn raw_pack(data: &[u8]) -> bool {
    opened(data.to_vec())
}

/// A pack in short: the index's length as a u32, the index, what the sections hold one after the other. Offsets,
/// header and digests are made right, so that what lies behind the digests is reached. Anything else is a pack as it is.
pub fn pack(data: &[u8]) -> bool {
    raw_pack(data) | expand(data).is_some_and(opened)
}

fn opened(bytes: Vec<u8>) -> bool {
    let Ok(pack) = Pack::from_bytes("fuzz.orkpack", bytes) else { return false };
    let report = verify(&pack, Mode::Full, &|_| {});
    report.findings().for_each(|finding| drop(finding.to_string()));
    for cut in pack.cuts() {
        pack.hot_dense(cut).for_each(|placement| pack.scales(placement).for_each(drop));
    }
    drop(Plan::from_json(pack.plan()));
    drop(DeviceProfile::from_json(pack.profile()));
    drop(pack.statistics().map(Statistics::from_json));
    let is_model = check_packed(&pack, &Limits::default()).is_ok();
    if let Ok(model) = PackedModel::new(pack, &Limits::default()) {
        source(&model);
    }
    is_model
}

/// The longest pack that is made of a short form.
const LONGEST: u64 = 1 << 20;

fn expand(data: &[u8]) -> Option<Vec<u8>> {
    let (len, rest) = data.split_first_chunk()?;
    let (encoded, content) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let Ok(mut index) = Index::decode(encoded) else {
        let mut file = Header::new(encoded, PAGE + encoded.len() as u64).encode();
        file.extend_from_slice(encoded);
        return Some(file);
    };
    let mut end = PAGE + encoded.len() as u64;
    for section in &mut index.sections {
        section.offset = end.next_multiple_of(PAGE);
        end = section.offset.checked_add(section.len).filter(|end| *end <= LONGEST)?;
    }
    let mut file = vec![0; end as usize];
    let mut content = content.iter();
    for section in &mut index.sections {
        let here = &mut file[section.offset as usize..section.end() as usize];
        here.iter_mut().zip(&mut content).for_each(|(to, from)| *to = *from);
        if let Some(digests) = digest_parts(here, section.digests.len()) {
            section.digests = digests;
        }
    }
    for tensor in &mut index.tensors {
        let section = tensor.section.and_then(|section| index.sections.get(section as usize));
        if let Some(section) = section.filter(|section| section.digests.len() == tensor.digests.len()) {
            tensor.digests.clone_from(&section.digests);
        }
    }
    let encoded = index.encode().ok()?;
    file[PAGE as usize..][..encoded.len()].copy_from_slice(&encoded);
    file[..PAGE as usize].copy_from_slice(&Header::new(&encoded, end).encode());
    Some(file)
}

/// The short form of a pack, for the corpus.
pub fn shorten(pack: &[u8]) -> Option<Vec<u8>> {
    let len = u32::try_from(u64::from_le_bytes(*pack.get(40..)?.first_chunk()?)).ok()?;
    let encoded = pack.get(PAGE as usize..)?.get(..len as usize)?;
    let index = Index::decode(encoded).ok()?;
    let mut short = len.to_le_bytes().to_vec();
    short.extend_from_slice(encoded);
    for section in &index.sections {
        short.extend_from_slice(pack.get(section.offset as usize..section.end() as usize)?);
    }
    Some(short)
}

/// Routing statistics, planned with and merged.
pub fn statistics(data: &[u8]) -> bool {
    let Ok(statistics) = Statistics::from_json(data) else { return false };
    let shape = model().1.shape();
    statistics.coverage();
    statistics.effective_tokens(true);
    drop(statistics.digest());
    drop(merge(&[(statistics.clone(), 3), (statistics.clone(), 1)]).map(|merged| merged.to_json()));
    choose(&PlanRequest::new(shape, Routing::Measured(&statistics), rk3588())).is_ok()
}

/// A plan, held to a model and a device.
pub fn plan(data: &[u8]) -> bool {
    let Ok(plan) = Plan::from_json(data) else { return false };
    drop(plan.digest());
    drop(orkpack::report::json(&plan));
    plan.matrices().for_each(drop);
    plan.check(model().1.shape(), rk3588()).is_ok()
}

/// A device profile, planned for.
pub fn profile(data: &[u8]) -> bool {
    let Ok(profile) = DeviceProfile::from_json(data) else { return false };
    profile.warnings().iter().for_each(|warning| drop(warning.to_string()));
    profile.assumptions();
    for (n_in, n_out) in [(32, 32), (1792, 48), (14336, 4096), (1 << 24, 32)] {
        drop(tile::cut(n_in, n_out, &profile).map(|parts| parts.len()));
    }
    let shape = model().1.shape();
    choose(&PlanRequest::new(shape, Routing::Assumed(Skew::RANGE), &profile)).is_ok()
}

/// An importance matrix.
pub fn imatrix(data: &[u8]) -> bool {
    if check_imatrix_magic(data).is_err() {
        return false;
    }
    let Ok(file) = GgufFile::from_bytes("fuzz.imatrix.gguf", data.to_vec()) else { return false };
    read_imatrix(&file, "qwen3moe", &routed_layers(model().1.shape())).is_ok()
}

/// Calibration text as lines of JSON, and as what its content says.
pub fn prompts(data: &[u8]) -> bool {
    ["a.jsonl", "a.txt"].iter().any(|name| count_texts(Path::new(name), data).is_ok())
}

/// A conversation between two runs.
pub fn session(data: &[u8]) -> bool {
    Record::from_json(data).is_ok_and(|record| record.to_json().is_ok())
}

/// A chat template.
pub fn chat(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    ChatTemplate::new(&text, model().0.metadata()).is_ok_and(|template| render(&template))
}

fn render(template: &ChatTemplate) -> bool {
    template.after_answer();
    let message = |role: &str, content: &str| Message { role: role.to_owned(), content: content.to_owned() };
    let messages = [
        message("system", "Be kind."),
        message("user", "Hi"),
        message("assistant", "<x>"),
        message("user", "?"),
    ];
    template.render(&messages, true).is_ok()
}

/// Text in the words of a vocabulary, and back.
pub fn text(data: &[u8]) -> bool {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer =
        TOKENIZER.get_or_init(|| Tokenizer::from_metadata(model().0.metadata()).expect("a sound vocabulary"));
    let text = String::from_utf8_lossy(data);
    for special in [Special::Plain, Special::Parse] {
        let Ok(ids) = tokenizer.encode(&text, special) else { return false };
        let mut stream = tokenizer.detokenizer();
        drop(tokenizer.decode(&ids));
        ids.iter().for_each(|id| drop(stream.push(*id)));
    }
    let ids: Vec<u32> = data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    drop(tokenizer.decode(&ids));
    true
}

/// A container of the prior system.
pub fn foreign(data: &[u8]) -> bool {
    PriorPack::read(data).is_ok()
}
