//! `orkpack demo`: the whole job on the bundled model, each step said and shown.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use super::args::{Common, DemoArgs};
use super::output::Output;
use super::{Done, Stop, n_threads, terminal};
use crate::bytes::{Io, Limits};
use crate::convert::{
    Choice, Prepared, Request, StatisticsFrom, Subject, Texts, beside, choose, count, prepare, write_beside,
};
use crate::error::{AtFile, Error};
use crate::model::evaluate::{Comparison, argmax};
use crate::model::{ModelShape, Outline};
use crate::pack::verify::{Mode, verify};
use crate::pack::{Existing, Pack};
use crate::plan::{Objective, Routing, Shares};
use crate::profile::DeviceProfile;
use crate::report::{self, ConvertDocument, PerplexityPart, RunDocument, VerifyDocument};
use crate::runtime::{DeviceChoice, Options, Runtime, Session};
use crate::source;
use crate::tile;
use crate::tokenizer::Special;
use crate::units::Bytes;

/// The bundled model: trained, so that its router has preferences. fixtures/README.md says how it was made.
const MODEL: &[u8] = include_bytes!("../../fixtures/models/tiny-moe-q4_k_m.gguf");
/// The four kinds of text that it was trained for.
const TEXTS: [&str; 4] = [
    include_str!("../../fixtures/corpora/prose.txt"),
    include_str!("../../fixtures/corpora/spanish.txt"),
    include_str!("../../fixtures/corpora/arithmetic.txt"),
    include_str!("../../fixtures/corpora/code.txt"),
];
/// Text that was neither trained nor calibrated on.
const HELD_OUT: &str = include_str!("../../fixtures/corpora/heldout-code.txt");
const PROMPT: &str = "Table of 7\n7 x 1 = 7\n7 x 2 =";
const N_GENERATED: usize = 48;
const N_CTX: usize = 512;

/// What the demo found, for programs (schema: `formats/demo.schema.json`).
#[derive(Serialize)]
struct DemoDocument {
    schema: &'static str,
    verdict: String,
    convert: ConvertDocument,
    verify: VerifyDocument,
    run: RunDocument,
}

pub fn demo(arguments: DemoArgs, interrupted: Arc<AtomicBool>) -> Done {
    let demo = Demo { folder: arguments.dir, common: arguments.common, interrupted };
    let model = demo.unpack()?;
    let (shape, verdict) = demo.calibrate_and_plan(&model)?;
    let (pack, convert) = demo.convert(&model, &shape)?;
    let verify = demo.verify(&pack)?;
    let run = demo.run(&pack)?;
    if demo.common.json {
        Output::new().json(&DemoDocument { schema: "orkpack-demo-1", verdict, convert, verify, run })?;
    } else {
        let file = pack.display();
        demo.say(&format!("\nNext: ork-run {file} --device sim -p 'Once upon a time'\n"))?;
    }
    Ok(0)
}

struct Demo {
    folder: PathBuf,
    common: Common,
    interrupted: Arc<AtomicBool>,
}

impl Demo {
    fn say(&self, text: &str) -> Result<(), Stop> {
        if self.common.json { Ok(()) } else { Output::new().text(text) }
    }

    fn unpack(&self) -> Result<PathBuf, Stop> {
        fs::create_dir_all(&self.folder).at(&self.folder)?;
        let model = self.folder.join("tiny-moe-q4_k_m.gguf");
        write_beside(&model, MODEL)?;
        let (file, size) = (model.display(), Bytes(MODEL.len() as u64));
        self.say(&format!(
            "1. The model: {file}, {size}. A small trained mixture of experts, 12 experts in each of 3 layers, 3 used.\n\n"
        ))?;
        Ok(model)
    }

    fn calibrate_and_plan(&self, path: &Path) -> Result<(ModelShape, String), Stop> {
        let source = source::open(path, Io::Map, &Limits::default()).at(path)?.source();
        let outline = Outline::of_runnable(source.as_ref()).at(path)?;
        let subject = Subject { path, source: &source, outline: &outline, pack: None };
        let mut progress = terminal(&self.common, Arc::clone(&self.interrupted));
        let statistics = count(subject, Texts::Plain(&TEXTS), n_threads(&self.common), &mut progress)?;
        let kept = beside(path);
        write_beside(&kept, &statistics.to_json()?)?;
        let (tokens, held_out) =
            (statistics.calibration.tokens, statistics.held_out.as_ref().map_or(0, |b| b.tokens));
        self.say(&format!(
            "2. Calibrated: {tokens} tokens of four kinds of text, {held_out} more held out to check the choice (measured).\n   \
             Kept in {}.\n\n",
            kept.display()
        ))?;
        let shape = outline.shape().clone();
        let plan = choose(&shape, Routing::Measured(&statistics), &choice(Objective::Auto, None)?)?;
        let text = report::plan(&plan, "counted just now (measured)");
        self.say(&format!(
            "3. Planned for the rk3588 profile, as for a real board. The honest answer:\n\n{}\n",
            indent(&text)
        ))?;
        Ok((shape, plan.verdict.sentence))
    }

    fn convert(&self, model: &Path, shape: &ModelShape) -> Result<(PathBuf, ConvertDocument), Stop> {
        let profile = DeviceProfile::built_in(DeviceProfile::DEFAULT)?;
        let third = Bytes(expert_bytes(shape, &profile)? / 3);
        let output = model.with_extension("orkpack");
        let request = Request {
            model: model.to_owned(),
            output: output.clone(),
            existing: Existing::Replace,
            choice: choice(Objective::Hits, Some(third))?,
            plan: None,
            thin: false,
            allow_nonfinite: false,
            n_threads: n_threads(&self.common),
            keep_statistics: false,
        };
        let mut progress = terminal(&self.common, Arc::clone(&self.interrupted));
        let prepared: Prepared = prepare(request, &mut progress)?;
        let outcome = prepared.write(&mut progress)?;
        let document = ConvertDocument::written(&prepared, &outcome, prepared.sizes()?);
        self.say(&format!(
            "4. Converted all the same, with --objective hits and a budget for a third of the experts ({third}), to show \
             the partition:\n\n{}\n",
            indent(&document.text())
        ))?;
        Ok((output, document))
    }

    fn verify(&self, path: &Path) -> Result<VerifyDocument, Stop> {
        let pack = Pack::open(path, Io::Map).at(path)?;
        let document = VerifyDocument::of(path, &verify(&pack, Mode::Full, &|_| ()));
        self.say(&format!("5. Verified, every byte:\n\n{}\n", indent(&report::verification(&document))))?;
        if !document.ok {
            return Err(Error::usage("the pack just written is damaged").or_at(path).into());
        }
        Ok(document)
    }

    fn run(&self, path: &Path) -> Result<RunDocument, Stop> {
        let options = Options {
            device: DeviceChoice::Sim,
            threads: Some(n_threads(&self.common)),
            ..Options::default()
        };
        let runtime = Runtime::open(path, options)?;
        let tokenizer = runtime.tokenizer().at(path)?;
        let encode = |text| tokenizer.encode(text, Special::Plain).at(path);
        let (prompt, text) = (encode(PROMPT)?, encode(HELD_OUT)?);
        let mut session = Session::new(&runtime, runtime.engine()?, N_CTX, N_CTX);
        let mut reference = Session::new(&runtime, runtime.reference()?, N_CTX, N_CTX);
        let mut comparison = Comparison::default();
        let mut next = argmax(session.compare_prompt(&mut reference, &prompt, &mut comparison)?);
        let mut generated = Vec::new();
        for _ in 0..N_GENERATED {
            generated.push(next);
            let followed = argmax(session.step(next)?);
            comparison.push(reference.step(next)?, session.logits());
            next = followed;
        }
        let answer = tokenizer.decode(&generated);
        self.say(&format!(
            "6. Decoded on the software NPU, which executes the register programs that a board would. The prompt, and \
             what came:\n\n{}\n",
            indent(&format!("{PROMPT}⟩⟩{answer}\n"))
        ))?;
        let mut progress = terminal(&self.common, Arc::clone(&self.interrupted));
        let split = session.perplexity(&text, &mut progress)?;
        let cpu = reference.perplexity(&text, &mut progress)?;
        let document = RunDocument {
            text: Some(answer),
            tokens: generated,
            perplexity: Some(PerplexityPart::of(split, Some(cpu))),
            comparison: Some((&comparison).into()),
            ..RunDocument::of(&runtime, &session)
        };
        self.say(&format!(
            "7. Compared with the CPU alone, prompts (batches of {N_CTX}) and decoding:\n\n{}",
            indent(&report::run(&document))
        ))?;
        Ok(document)
    }
}

fn choice(objective: Objective, budget: Option<Bytes>) -> Result<Choice, Error> {
    Ok(Choice {
        profile: DeviceProfile::built_in(DeviceProfile::DEFAULT)?,
        budget,
        domains: 1,
        objective,
        shares: Shares::Auto,
        force_hot: Vec::new(),
        statistics: StatisticsFrom::Found,
        ram: None,
        accept_foreign: false,
    })
}

/// Bytes that all experts' matrices would take on the device.
fn expert_bytes(shape: &ModelShape, profile: &DeviceProfile) -> Result<u64, Error> {
    let mut bytes = 0;
    for matrix in shape.moe_layers.iter().flat_map(|layer| &layer.experts).flatten() {
        let parts = tile::cut(matrix.n_in as u64, matrix.n_out as u64, profile)?;
        bytes += parts.iter().map(|part| part.bytes().next_multiple_of(4096)).sum::<u64>();
    }
    Ok(bytes)
}

fn indent(text: &str) -> String {
    text.lines().map(|line| if line.is_empty() { "\n".to_owned() } else { format!("   {line}\n") }).collect()
}
