//! ork-run: decode with the partition.

use std::process::ExitCode;

fn main() -> ExitCode {
    orkpack::cli::ork_run(std::env::args_os())
}
