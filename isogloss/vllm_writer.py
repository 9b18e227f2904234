"""Write with vLLM for distill.py: a process with an interpreter and packages of its own.

    deepspeed distill.py ... --writer vllm
    deepspeed distill.py ... --writer "/env/bin/python -m isogloss.vllm_writer"

The first takes the vLLM of this environment.  /env of the second holds vLLM and this project
without its requirements (`/env/bin/pip install --no-deps .`, or the checkout as the folder in which
the job starts): what this file imports needs torch and vLLM alone.  One such process runs on every
node, on the GPU of its first rank, so leave it memory there:

    --memory 0.3             of that GPU, for its weights and what it keeps of texts
    --tensor_parallel 1      GPUs that share a copy, from that one on
    --sleep                  give the memory back after each answer; the weights wait on the host

The job's weights arrive in shared memory; each worker of vLLM maps it and copies what it needs.
The job compares log-probabilities (`rollout/logp_gap`).  vLLM draws by itself: other batches may
give other texts, where the student's own writing does not depend on the layout.

Tests: tests/test_vllm.py (`make test-vllm`); of the protocol tests/test_writer_process.py.
"""

import argparse
import os
import sys

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from isogloss.job import ipc
from isogloss.rollout import hash_counters
from isogloss.writing.writer_process import serve


class SharedWeights:
    """Let a worker of vLLM take over the job's weights: what vLLM calls an extension."""

    def attach_shared(self, plain, other_names):
        """Map the shared memory.

        Args:
            plain: {name: handle of a weight, as the job sends it}.
            other_names: {name: other names of the same weight}.
        """
        self.shared_weights = []
        for name, handle in plain.items():
            tensor = ipc.attach(ipc.Handle.from_plain(handle))
            # an engine that loads a tied head under one of its names would keep the other stale
            for each in (name, *other_names.get(name, [])):
                self.shared_weights.append((each, tensor))

    def take_over_shared(self):
        """Copy the weights into the model as it runs."""
        self.reload_weights(weights_iterator=iter(self.shared_weights))


class Engine:
    """Hold vLLM's model and the shared weights of the job."""

    def __init__(self, args):
        self.args = args
        self.is_asleep = False

    def load(self, model, dtype, max_length, weights, tied):
        self.num_weights = len(weights)
        self.llm = LLM(
            model=model, dtype=dtype, max_model_len=max_length, skip_tokenizer_init=True,
            load_format="dummy", generation_config="vllm", seed=0,
            logprobs_mode="processed_logprobs",  # of the draws
            gpu_memory_utilization=self.args.memory,
            tensor_parallel_size=self.args.tensor_parallel,
            enforce_eager=not torch.cuda.is_available(),
            enable_sleep_mode=self.args.sleep and torch.cuda.is_available(),
            worker_extension_cls="isogloss.vllm_writer.SharedWeights")
        other_names = {names[0]: names[1:] for names in tied}
        self.llm.collective_rpc("attach_shared", args=(weights, other_names))
        return self.refresh()

    def refresh(self):
        self._wake()
        self.llm.collective_rpc("take_over_shared")
        self.llm.reset_prefix_cache()
        return self.num_weights

    def _wake(self):
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        self._wake()
        texts = []
        options = []
        for prompt in prompts:
            texts.append(TokensPrompt(prompt_token_ids=prompt["ids"]))
            options.append(SamplingParams(
                temperature=temperature, top_p=top_p, max_tokens=prompt["max_new_tokens"],
                seed=hash_counters(*prompt["key"]) >> 1, stop_token_ids=stop_ids, ignore_eos=True,
                detokenize=False, logprobs=0))
        completions = []
        for output in self.llm.generate(texts, options, use_tqdm=False):
            written = output.outputs[0]
            ids = list(written.token_ids)
            logp = [min(entry[token].logprob, 0.0) for token, entry in zip(ids, written.logprobs)]
            ended = bool(ids) and ids[-1] in stop_ids
            completions.append({"ids": ids, "logp": logp, "ended": ended,
                                "temperature": temperature, "top_p": top_p})
        if self.args.sleep:  # with the weights: another answer may follow before new ones come
            self.llm.sleep(level=1)
            self.is_asleep = True
        return completions


def main():
    parser = argparse.ArgumentParser(description="Write for distill.py with vLLM.")
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--sleep", action="store_true")
    # vLLM prints to standard output, which belongs to the responses
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(parser.parse_args())
    serve(engine.load, engine.refresh, engine.write, sys.stdin, responses)


if __name__ == "__main__":
    main()
