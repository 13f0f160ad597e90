//! orkpack converts mixture-of-experts models for Rockchip NPUs and runs them.
//!
//! The walk on one page is [`convert`]; the table of modules, and what each may import, is in
//! `docs/architecture.md`. The library never prints and never exits.

pub mod blocks;
pub mod bytes;
pub mod calibrate;
pub mod chat;
pub mod check;
pub mod cli;
pub mod convert;
pub mod device;
pub mod error;
pub mod executor;
pub mod gguf;
pub mod interop;
pub mod kernel;
pub mod model;
pub mod pack;
pub mod plan;
pub mod profile;
pub mod progress;
pub mod quantize;
pub mod report;
pub mod runtime;
pub mod sample;
pub mod source;
pub mod tensor;
pub mod threads;
pub mod tile;
pub mod tokenizer;
pub mod units;
