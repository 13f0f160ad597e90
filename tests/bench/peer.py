"""The other side of `cargo bench -- --model`: llama.cpp through the Python package llama-cpp-python.

Reads a line, does what it says, answers with seconds: `load MODEL N_CTX`, `prefill N_TOKENS THREADS`,
`decode N_TOKENS THREADS` (after a prompt of one token), `at POSITION N_TOKENS THREADS` (after a longer prompt,
which is not timed). Weight repacking and flash attention are as the package sets them.
"""

import ctypes
import sys
import time

import llama_cpp as llama

# On a busy machine what counts is the time on a processor.
clock = time.process_time if sys.argv[1:] == ["busy"] else time.perf_counter


class Peer:
    def load(self, path, n_ctx):
        llama.llama_backend_init()
        self.quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self.quiet, ctypes.c_void_p(0))
        began = clock()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        self.context = llama.llama_init_from_model(self.model, params)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        return clock() - began

    def run(self, n_tokens):
        tokens = (llama.llama_token * n_tokens)(*((7 + 31 * i) % self.n_vocab for i in range(n_tokens)))
        if llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, n_tokens)) != 0:
            raise RuntimeError("llama_decode failed")

    def clear(self, n_threads):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        llama.llama_set_n_threads(self.context, n_threads, n_threads)

    def prefill(self, n_tokens, n_threads):
        self.clear(n_threads)
        began = clock()
        self.fill(n_tokens)
        return clock() - began

    def decode(self, n_tokens, n_threads):
        return self.at(1, n_tokens, n_threads)

    def at(self, position, n_tokens, n_threads):
        self.clear(n_threads)
        self.fill(position)
        self.run(1)
        began = clock()
        for _ in range(n_tokens):
            self.run(1)
        return clock() - began

    def fill(self, n_tokens):
        for first in range(0, n_tokens, 512):
            self.run(min(512, n_tokens - first))


peer = Peer()
for line in sys.stdin:
    task, *arguments = line.rstrip("\n").split("\t")
    arguments = [int(a) if a.isdigit() else a for a in arguments]
    print(getattr(peer, task)(*arguments), flush=True)
