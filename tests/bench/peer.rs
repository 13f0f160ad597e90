//! llama.cpp in a process of its own, started when a Python that has it is named.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;

pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// `None` where `ORKPACK_PEER_PYTHON` is not set.
    pub fn start() -> Option<Peer> {
        let python = std::env::var_os("ORKPACK_PEER_PYTHON")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/peer.py");
        let mut child = Command::new(python)
            .arg(script)
            .arg(if crate::BUSY.load(Ordering::Relaxed) { "busy" } else { "idle" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the Python of ORKPACK_PEER_PYTHON");
        let input = child.stdin.take().expect("its input");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Some(Peer { child, input, output })
    }

    /// Seconds that a task took; see `peer.py`.
    pub fn ask(&mut self, task: &[&str]) -> f64 {
        writeln!(self.input, "{}", task.join("\t")).expect("a peer that listens");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a peer that answers");
        line.trim().parse().unwrap_or_else(|_| panic!("llama.cpp could not {task:?}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
