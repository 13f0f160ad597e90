//! The line that somebody types: edited, and with those before at hand, on a terminal; taken as it comes elsewhere.

use std::io::{self, BufRead, IsTerminal, Write, stderr, stdin, stdout};

use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};

use crate::error::Error;

const PROMPT: &str = "> ";

/// Where turns come from.
pub enum Input {
    /// A terminal. What was typed is remembered until the program ends.
    Editor(Box<Editor<(), MemHistory>>),
    /// A pipe, or a terminal of which only one side is here.
    Lines,
}

/// What was typed.
pub enum Line {
    /// A line, without its end.
    Text(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D, or the end of the pipe.
    End,
}

impl Input {
    /// The editor needs a terminal to read from and one to write to, which data do not share.
    pub fn new(json: bool) -> Result<Input, Error> {
        if json || !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(Input::Lines);
        }
        let config = Config::builder().auto_add_history(true).build();
        let history = MemHistory::with_config(&config);
        let editor = Editor::with_history(config, history).map_err(failed)?;
        Ok(Input::Editor(Box::new(editor)))
    }

    /// The next line, white space at its ends left out.
    pub fn ask(&mut self) -> Result<Line, Error> {
        match self {
            Input::Editor(editor) => match editor.readline(PROMPT) {
                Ok(line) => Ok(Line::Text(line.trim().to_owned())),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupt),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(failed(error)),
            },
            Input::Lines => {
                if stdin().is_terminal() {
                    let mut err = stderr().lock();
                    // A terminal that takes no prompt still takes the line.
                    let _ = write!(err, "{PROMPT}").and_then(|()| err.flush());
                }
                let mut line = Vec::new();
                let n = stdin().lock().read_until(b'\n', &mut line)?;
                let text = || String::from_utf8_lossy(&line).trim().to_owned();
                Ok(if n > 0 { Line::Text(text()) } else { Line::End })
            }
        }
    }
}

fn failed(error: ReadlineError) -> Error {
    match error {
        ReadlineError::Io(error) => error.into(),
        other => io::Error::other(other).into(),
    }
}
