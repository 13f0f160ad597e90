//! Somebody at a terminal: a pseudo-terminal whose other side a test reads and types.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// How long a word may take to appear. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the editor writes when it takes keys, and when no more: bracketed paste goes on and off. No answer has these.
const LISTENS: &str = "\x1b[?2004h";
const LISTENED: &str = "\x1b[?2004l";

/// A program on a terminal.
pub struct Typist {
    child: Child,
    keys: File,
    screen: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
    /// What was on the screen when something was last waited for or typed.
    looked: usize,
}

impl Typist {
    /// Starts a program with a terminal as stdin, stdout and stderr.
    pub fn start(binary: &str, folder: &Path, words: &[&str]) -> Typist {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let theirs = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let side = || Stdio::from(theirs.try_clone().unwrap());
        let mut command = Command::new(binary);
        command.current_dir(folder).args(words).env("TERM", "xterm");
        let child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (File::from(ours.try_clone().unwrap()), Arc::clone(&screen));
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // The last of the other side to be closed ends this with an error.
            while let Ok(n @ 1..) = from.read(&mut piece) {
                to.lock().unwrap().extend_from_slice(&piece[..n]);
            }
        });
        Typist { child, keys: File::from(ours), screen, reader, looked: 0 }
    }

    /// Waits until the screen shows `text` after what was looked at last.
    #[track_caller]
    pub fn await_text(&mut self, text: &str) {
        let began = Instant::now();
        loop {
            let screen = self.screen.lock().unwrap().clone();
            let new = &screen[self.looked..];
            if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                self.looked += at + text.len();
                return;
            }
            let is_late = began.elapsed() > PATIENCE;
            assert!(!is_late, "no `{text}` after: {}", String::from_utf8_lossy(new));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the screen shows that many bytes more.
    #[track_caller]
    pub fn await_bytes(&mut self, n: usize) {
        let began = Instant::now();
        while self.screen.lock().unwrap().len() < self.looked + n {
            assert!(began.elapsed() < PATIENCE, "no {n} bytes more");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the prompt, types keys as they are, and waits until the editor has taken them as one input.
    #[track_caller]
    pub fn keys(&mut self, keys: &str) {
        self.await_text(LISTENS);
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.await_text(LISTENED);
    }

    /// Types a line.
    #[track_caller]
    pub fn line(&mut self, line: &str) {
        self.keys(&format!("{line}\r"));
    }

    /// What a terminal does on Ctrl-C while nobody reads keys.
    pub fn interrupt(&self) {
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
    }

    /// Waits for the end: the exit code, and what was on the screen without what moves the cursor.
    pub fn end(self) -> (Option<i32>, String) {
        let (code, screen) = self.end_raw();
        (code, plain(&screen))
    }

    /// Waits for the end: the exit code, and everything that was written.
    pub fn end_raw(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if began.elapsed() > PATIENCE {
                self.child.kill().unwrap();
                let screen = self.screen.lock().unwrap();
                panic!("it does not end: {}", String::from_utf8_lossy(&screen));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let code = self.child.wait().unwrap().code();
        self.reader.join().unwrap();
        let screen = String::from_utf8_lossy(&self.screen.lock().unwrap()).replace("\r\n", "\n");
        (code, screen)
    }
}

/// Text without escape sequences.
fn plain(screen: &str) -> String {
    let mut text = String::new();
    let mut chars = screen.chars();
    while let Some(c) = chars.next() {
        match c {
            // The sequence `ESC [ … letter`.
            '\x1b' => drop(chars.find(|c| c.is_ascii_alphabetic())),
            c => text.push(c),
        }
    }
    text
}
