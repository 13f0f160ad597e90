//! The one test binary: a module per concern.

mod blocks;
mod gguf;
mod hostile;
mod kernel;
mod support;
mod threads;
mod tokenizer;
