"""Let a process of each node write for its ranks, with the student's weights.

It writes while the ranks go on: `begin` returns at once, `finish` waits.  What the process is, and
what is said to it, is in writer_process.py.

Tests: tests/test_writer_process.py.
"""

import copy
import importlib.util
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import deepspeed
import torch
import torch.distributed as dist

from isogloss.config import Config
from isogloss.data.ends import stop_ids
from isogloss.data.sample import TextEncoder
from isogloss.job.commands.engine_process import PERIOD
from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.several.others import node_name
from isogloss.job.several.together import together
from isogloss.models.adapter_parts import plain_name
from isogloss.models.parts import is_adapter
from isogloss.student.whole_student import refresh_plain
from isogloss.writing.writer_process import (
    WriterProcess,
    check_command,
    completion_of_plain,
    prompt_as_plain,
)


@dataclass
class NodeWriter:
    """Ask the process of this node, one request at a time.

    Attributes:
        engine: DeepSpeed engine around a StudentWithLoss.
        device: of this rank.
        process: WriterProcess of this node, on its first rank, or None.
        shared: {name: weight} in the memory of the process.
        asked: the answer that is waited for, on the first rank of a node, or None.
        seconds: that the answers since the latest `begin` took.
    """

    cfg: Config
    engine: deepspeed.DeepSpeedEngine
    encoder: TextEncoder
    device: torch.device
    process: WriterProcess | None = None
    shared: dict = field(default_factory=dict)
    asked: Future | None = None
    seconds: float = 0.0

    def __post_init__(self):
        command = self.cfg.writer_command
        if self.cfg.writer == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "--writer vllm: there is no vllm here; install it, or name a Python that has it: "
                '--writer "/env/bin/python -m isogloss.vllm_writer"')
        check_command(command)
        if os.environ["LOCAL_RANK"] == "0":
            self.process = WriterProcess(command)
            self.thread = ThreadPoolExecutor(1)

    def begin(self, starts, patience=0.0):
        """Ask for completions of this rank's Prompts, by today's weights; all ranks take part.

        Args:
            patience: seconds that a job which is asked to end waits for them.
        """
        self._share_weights()
        self._submit(starts, patience, is_new=True)

    def more(self, starts):
        """Return Completions of this rank's Prompts, by the weights of the latest `begin`.

        All ranks take part.  Raises: see `finish`.
        """
        before = self.seconds
        self._submit(starts, 0.0, is_new=False)
        completions = self.finish()
        self.seconds += before
        return completions

    def _submit(self, starts, patience, is_new):
        plain = [prompt_as_plain(prompt) for prompt in starts]
        prompts_of_ranks = values_of_ranks([node_name(), plain])
        if self.process:
            self.process.patience = patience
            self.asked = self.thread.submit(self._ask, prompts_of_ranks, is_new)

    def finish(self):
        """Return the Completions that `begin` asked for; all ranks take part.

        Raises:
            EngineError, EngineStopped: see writer_process.py; on every rank.
        """
        completions = []
        answers = values_of_ranks(together(self._asked_completions))
        for of_leader, _ in answers:
            completions += of_leader.get(str(dist.get_rank()), [])  # JSON has no other keys
        self.seconds = max(seconds for _, seconds in answers)
        return [completion_of_plain(plain) for plain in completions]

    def _asked_completions(self):
        """Return ({rank: its completions}, seconds) of the process, if this rank has it."""
        if not self.process:
            return {}, 0.0
        while not self.asked.done():
            # a signal may come to another thread, and wakes nobody who waits without an end
            wait([self.asked], PERIOD)
        return self.asked.result()

    def end_when(self, asked_to_end):
        """Wait for the process only until asked_to_end() is true."""
        if self.process:
            self.process.asked_to_end = asked_to_end

    def close(self):
        """End the process."""
        if self.process:
            self.process.close(is_busy=self.asked is not None and not self.asked.done())
            self.thread.shutdown()

    def _ask(self, prompts_of_ranks, is_new):
        """Return ({rank: completions} of the ranks of this node, as they are sent; seconds).

        Args:
            is_new: its weights are not those that it has.
        """
        begin = time.perf_counter()
        if not self.process.is_loaded:
            self._load()
        elif is_new:
            self.process.refresh()
        of_node = []
        for rank, (node, prompts) in enumerate(prompts_of_ranks):
            if node == node_name():
                of_node += [(rank, prompt) for prompt in prompts]
        completions = self.process.write(
            [prompt for _, prompt in of_node], stop_ids(self.encoder), len(self.encoder.table),
            self.cfg.rollout_temperature, self.cfg.rollout_top_p)
        by_rank = {}
        for (rank, _), completion in zip(of_node, completions):
            by_rank.setdefault(rank, []).append(completion)
        return by_rank, time.perf_counter() - begin

    def _load(self):
        """Let the process load the student, without the rows behind its vocabulary."""
        model = self.engine.module.model
        config = copy.deepcopy(model.config)
        text_config = config.get_text_config()
        text_config.vocab_size = min(len(self.encoder.table), text_config.vocab_size)
        config.architectures = [type(model).__name__]
        modules = model.get_input_embeddings(), model.get_output_embeddings()
        with_rows = {id(parameter) for module in modules for parameter in module.parameters()}
        num_rows = {}
        for name, parameter in model.named_parameters():
            if id(parameter) in with_rows:
                num_rows[plain_name(name)] = text_config.vocab_size
        dtype = next(model.parameters()).dtype
        self.process.load(config, dtype, self.encoder.max_length, num_rows)

    def _share_weights(self):
        """Write the current weights to the memory of the process; all ranks take part."""
        model = self.engine.module.model
        if self.process and not self.shared:
            of_parameter = {}
            weights = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if is_adapter(name):
                    continue
                if id(parameter) not in of_parameter:
                    # partitioned parameters have their own shape only while they are gathered
                    shape = getattr(parameter, "ds_shape", parameter.shape)
                    of_parameter[id(parameter)] = torch.empty(
                        shape, dtype=parameter.dtype, device=self.device)
                weights[plain_name(name)] = of_parameter[id(parameter)]
            self.shared = self.process.share(weights)
        refresh_plain(self.shared, model)
