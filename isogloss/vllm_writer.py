"""Write with vLLM for distill.py: a process with an interpreter and packages of its own.

    deepspeed distill.py ... --rollout_command "/env/bin/python -m isogloss.vllm_writer"

/env holds vLLM and none of this project's requirements; what this file imports beside it needs
torch alone.  One such process runs on every node, on the GPU of its first
rank, so leave it memory there (VLLM_MEMORY, default 0.3 of the GPU).

Weights arrive in shared memory and are copied into the running model; a head that is tied to the
embedding is loaded under both names, because an engine that knows one of them keeps the other
stale.  The job compares log-probabilities after every refresh (`rollout/logp_gap`).

This script has not been run: no GPU was at hand.  Its protocol is tested with transformers in
vLLM's place (tests/stand_in_writer.py).
"""

import os
import sys

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from isogloss.job import ipc
from isogloss.rollout import hash_counters
from isogloss.writing.writer_process import serve


class Engine:
    """Hold vLLM's model and the shared weights of the job."""

    def load(self, model, dtype, max_length, weights, tied):
        self.shared = {}
        for name, plain in weights.items():
            self.shared[name] = ipc.attach(ipc.Handle.from_plain(plain))
        self.other_names = {names[0]: names[1:] for names in tied}
        self.llm = LLM(
            model=model, dtype=dtype, max_model_len=max_length + 1, enforce_eager=False,
            gpu_memory_utilization=float(os.environ.get("VLLM_MEMORY", "0.3")))
        return self.refresh()

    def refresh(self):
        weights = []
        for name, tensor in self.shared.items():
            for each in (name, *self.other_names.get(name, [])):
                weights.append((each, tensor))

        def take_over(worker):
            worker.model_runner.model.load_weights(weights)
            torch.cuda.synchronize()

        self.llm.collective_rpc(take_over)
        self.llm.reset_prefix_cache()
        return len(self.shared)

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        texts = []
        options = []
        for prompt in prompts:
            texts.append(TokensPrompt(prompt_token_ids=prompt["ids"]))
            options.append(SamplingParams(
                temperature=temperature, top_p=top_p, max_tokens=prompt["max_new_tokens"],
                seed=hash_counters(*prompt["key"]) >> 1, stop_token_ids=stop_ids, ignore_eos=True,
                detokenize=False, logprobs=0, allowed_token_ids=None))
        completions = []
        for output in self.llm.generate(texts, options, use_tqdm=False):
            written = output.outputs[0]
            ids = list(written.token_ids)
            logp = [entry[token].logprob for token, entry in zip(ids, written.logprobs)]
            ended = bool(ids) and ids[-1] in stop_ids
            completions.append({"ids": ids, "logp": logp, "ended": ended})
        return completions


if __name__ == "__main__":
    # vLLM prints to standard output, which belongs to the responses
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine()
    serve(engine.load, engine.refresh, engine.write, sys.stdin, responses)
