//! orkpack: convert, plan, verify.

use std::process::ExitCode;

fn main() -> ExitCode {
    orkpack::cli::orkpack(std::env::args_os())
}
