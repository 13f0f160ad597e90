//! Turns: typed on a terminal, or a line of a pipe each.

use std::io::{IsTerminal, stdin};
use std::sync::atomic::Ordering;

use super::Run;
use super::answer::{Answer, End};
use super::input::{Input, Line};
use super::talk::Talk;
use crate::cli::Stop;
use crate::cli::output::{self, say};
use crate::error::{Error, Failure};
use crate::report::{RunDocument, TurnPart};
use crate::runtime::Session;

const HELP: &str = "\
/clear  forget what was said
/exit   end; Ctrl-D and a second Ctrl-C do too
/help   this
Ctrl-C stops an answer and keeps the conversation. Everything else is said to the model.";

/// How a turn went.
enum Outcome {
    Answered(Box<TurnPart>, End),
    /// Nothing was answered, and it was not said.
    Refused,
    Interrupted,
}

impl Run<'_> {
    /// Turns until `/exit` or the end of input.
    pub fn converse(&self, mut session: Session<'_>, mut talk: Talk) -> Result<RunDocument, Stop> {
        let is_typed = stdin().is_terminal();
        let mut input = Input::new(self.arguments.common.json)?;
        if is_typed {
            say(self.is_quiet(), "type a message; /help says what else there is");
        }
        let (mut turns, mut refused): (Vec<TurnPart>, u64) = (Vec::new(), 0);
        // Whether the last thing that was pressed is Ctrl-C.
        let mut stopped = false;
        loop {
            let line = match input.ask()? {
                Line::End => break,
                Line::Interrupt if stopped => return Err(Error::from(Failure::Interrupted).into()),
                Line::Interrupt => {
                    stopped = true;
                    say(false, "Ctrl-C again ends; so do Ctrl-D and /exit");
                    continue;
                }
                Line::Text(line) => line,
            };
            stopped = false;
            match line.as_str() {
                "" => continue,
                "/exit" => break,
                "/help" => say(false, HELP),
                "/clear" => talk.clear()?,
                _ => match self.exchange(&mut session, &mut talk, line)? {
                    Outcome::Answered(turn, end) => {
                        stopped = end == End::Interrupt;
                        turns.push(*turn);
                    }
                    Outcome::Refused => refused += 1,
                    Outcome::Interrupted => stopped = true,
                },
            }
            // A script is not asked twice.
            if stopped && !is_typed {
                return Err(Error::from(Failure::Interrupted).into());
            }
        }
        self.interrupted.store(false, Ordering::Relaxed);
        let mut document = RunDocument::of(self.runtime, &session);
        document.take_turns(turns);
        document.refused = refused;
        Ok(document)
    }

    /// One turn.
    fn exchange(&self, session: &mut Session<'_>, talk: &mut Talk, line: String) -> Result<Outcome, Stop> {
        self.interrupted.store(false, Ordering::Relaxed);
        let read = talk.dialogue.say(line).and_then(|turn| {
            let fits = self.check_length(turn.ids.len(), "the conversation", "/clear forgets it");
            let read = fits.and_then(|()| session.turn(&turn.ids, turn.border));
            read.inspect_err(|_| talk.dialogue.take_back())
        });
        let reading = match read {
            Ok(reading) => reading,
            Err(error) if matches!(*error.failure, Failure::Interrupted) => return Ok(Outcome::Interrupted),
            // A turn that does not fit ends the turn, not the conversation.
            Err(error) => {
                output::error(&error.or_at(self.runtime.path()));
                return Ok(Outcome::Refused);
            }
        };
        let answer = self.answer(session, &mut talk.sampler, Some(&talk.dialogue), None)?;
        let (turn, end) = (TurnPart::of(reading, answer.text.as_deref(), &answer.ids), answer.end);
        self.remark(&answer);
        talk.answered(answer)?;
        Ok(Outcome::Answered(Box::new(turn), end))
    }

    /// Why an answer ends where the model did not end it.
    fn remark(&self, answer: &Answer) {
        match answer.end {
            End::Turn | End::Interrupt => {}
            End::Length => say(self.is_quiet(), "the answer was cut: -n N allows more tokens"),
            End::Context => say(
                self.is_quiet(),
                &format!(
                    "the conversation fills the context of {} tokens: /clear forgets it, a larger -c holds more",
                    self.n_ctx()
                ),
            ),
        }
    }
}
