"""llama.cpp's side of `flashgap.peer`: one prompt and some tokens at batch 1, times as JSON on standard output.

The one idea: this file runs in llama.cpp's own environment, so it imports nothing of the project.
Usage: python peer_llama_cpp.py MODEL.gguf PROMPT_TOKENS GENERATED_TOKENS THREADS
"""

from __future__ import annotations

import json
import random
import sys
import time


def main(path: str, prompt_tokens: int, generated_tokens: int, threads: int) -> dict[str, object]:
    """`ttft_s` of the prompt and `itl_s` of each token after, the first pass discarded."""
    import llama_cpp

    model = llama_cpp.Llama(
        path,
        n_ctx=prompt_tokens + generated_tokens,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    for _ in range(2):
        model.reset()
        prompt = [random.randrange(model.n_vocab()) for _ in range(prompt_tokens)]
        start_s = time.perf_counter()
        model.eval(prompt)
        token = model.sample(temp=0.0)
        ttft_s, steps_s = time.perf_counter() - start_s, []
        for _ in range(generated_tokens - 1):
            start_s = time.perf_counter()
            model.eval([token])
            token = model.sample(temp=0.0)
            steps_s.append(time.perf_counter() - start_s)
    system = llama_cpp.llama_print_system_info().decode()
    return {"ttft_s": ttft_s, "itl_s": steps_s, "system": system, "version": llama_cpp.__version__}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *(int(word) for word in sys.argv[2:]))))
