//! One token after the other, until something ends the answer.

use std::sync::atomic::Ordering;

use super::Run;
use super::stream::Stream;
use crate::cli::Stop;
use crate::model::evaluate::Comparison;
use crate::runtime::{Dialogue, Session};
use crate::sample::Sampler;

/// What was generated.
pub struct Answer {
    /// `None` where ids were asked for.
    pub text: Option<String>,
    pub ids: Vec<u32>,
    pub end: End,
}

/// Why an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model says so.
    Turn,
    /// There are as many tokens as were asked for.
    Length,
    /// No more fit.
    Context,
    /// Somebody pressed Ctrl-C.
    Interrupt,
}

/// The reference, which is given the same tokens.
pub struct Beside<'r> {
    pub session: Session<'r>,
    pub comparison: Comparison,
}

impl<'r> Beside<'r> {
    /// Nothing is compared yet.
    pub fn new(session: Session<'r>) -> Beside<'r> {
        Beside { session, comparison: Comparison::default() }
    }
}

impl Run<'_> {
    /// Generates after what `session` has read, and streams. Ids instead of text where there is no dialogue.
    pub fn answer(
        &self,
        session: &mut Session<'_>,
        sampler: &mut Sampler,
        dialogue: Option<&Dialogue>,
        mut beside: Option<&mut Beside<'_>>,
    ) -> Result<Answer, Stop> {
        let n_predict = self.arguments.n_predict;
        let mut stream = Stream::new(dialogue.map(Dialogue::tokenizer), self.arguments.common.json);
        let mut end = End::Length;
        if n_predict > 0 {
            let mut next = sampler.next(session.logits())?;
            for step in 1.. {
                if dialogue.is_some_and(|dialogue| dialogue.is_end(next)) {
                    end = End::Turn;
                    break;
                }
                if self.interrupted.load(Ordering::Relaxed) {
                    end = End::Interrupt;
                    break;
                }
                stream.push(next)?;
                if step == n_predict {
                    break;
                }
                if session.position() >= session.n_ctx() {
                    end = End::Context;
                    break;
                }
                let token = next;
                next = sampler.next(session.step(token)?)?;
                if let Some(Beside { session: reference, comparison }) = beside.as_deref_mut() {
                    comparison.push(reference.step(token)?, session.logits());
                }
            }
        }
        let (text, ids) = stream.end()?;
        Ok(Answer { text, ids, end })
    }
}
