"""Run a teacher with vLLM for distill.py: a process with an interpreter and packages of its own.

    deepspeed distill.py ... --teacher_engine vllm
    deepspeed distill.py ... --teacher_engine "/env/bin/python -m isogloss.vllm_teacher"

The first takes the vLLM of this environment.  /env of the second holds vLLM and this project
without its requirements, see vllm_writer.py.  Options of the command:

    --memory 0.3             of each GPU; else 0.9 on ranks of the teacher's own, 0.3 beside a
                             student
    --sleep                  give the memory back after each answer; the weights wait on the host
    --options '{"enable_expert_parallel": true}'     arguments of vllm.LLM

It hands over final hidden states by vLLM's pooling runner, task token_embed: every token of a
prompt, after the last norm, as they are.  Prefixes are not cached, because vLLM would leave out the
hidden states of tokens that it has seen.

Tests: tests/test_vllm.py (`make test-vllm`); of the protocol tests/test_teacher_engine.py.
"""

import argparse
import json
import os
import sys

import torch
from vllm import LLM, PoolingParams, TokensPrompt
from vllm.config import PoolerConfig

from isogloss.job import ipc
from isogloss.job.commands.engine_process import answer

MOST_TOKENS = 16_384  # of a forward pass, where a text is not longer; not tuned


class TeacherModel:
    """Hold vLLM's model."""

    def __init__(self, args):
        self.args = args
        self.is_asleep = False
        self.handle = None

    def load(self, *, ranks, memory, max_length, **same_names):
        options = same_names | dict(
            runner="pooling", convert="embed", pooler_config=PoolerConfig(task="token_embed"),
            max_model_len=max_length, max_num_batched_tokens=max(max_length, MOST_TOKENS),
            enable_prefix_caching=False, enable_chunked_prefill=False, seed=0,
            tensor_parallel_size=ranks if torch.cuda.is_available() else 1,
            gpu_memory_utilization=self.args.memory or memory,
            enable_sleep_mode=self.args.sleep and torch.cuda.is_available(),
            enforce_eager=not torch.cuda.is_available())
        self.llm = LLM(**options | json.loads(self.args.options))
        config = self.llm.llm_engine.model_config
        self.dtype = config.dtype
        return {"width": config.get_hidden_size(), "dtype": str(self.dtype).removeprefix("torch.")}

    def read(self, texts, rows, into):
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False
        if into != self.handle:
            self.hidden = ipc.attach(ipc.Handle.from_plain(into))
            self.handle = into
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in texts]
        outputs = self.llm.encode(prompts, PoolingParams(use_activation=False),
                                  pooling_task="token_embed", use_tqdm=False)
        done = 0
        for first, ids, output in zip(rows, texts, outputs):
            states = output.outputs.data
            self.hidden[first : first + len(ids)] = states
            done += len(states)
        if self.args.sleep:
            self.llm.sleep(level=1)
            self.is_asleep = True
        return {"done": done}


def main():
    parser = argparse.ArgumentParser(description="Run a teacher for distill.py with vLLM.")
    parser.add_argument("--memory", type=float, default=0.0)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--options", default="{}")
    # in this process: else all hidden states would be sent from one to the other
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # vLLM prints to standard output, which belongs to the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = TeacherModel(parser.parse_args())
    answer({"load": engine.load, "read": engine.read}, sys.stdin, answers)


if __name__ == "__main__":
    main()
