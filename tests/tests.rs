//! The one test binary: a module per concern.

mod blocks;
mod calibrate;
mod cli;
mod convert;
mod demo;
mod device;
mod every_family;
mod formats;
mod gguf;
mod hostile;
mod kernel;
mod layers;
mod model;
mod options;
mod pack;
mod plan;
mod quantize;
mod reference;
mod regression;
mod run;
mod support;
mod threads;
mod tile;
mod tokenizer;
mod verify;
