"""What answers in vLLM's place, see stand_in_writer.py, by itself or as the fork of a process."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isogloss import rollout
from isogloss.job import ipc
from isogloss.job.commands.engine_process import answer
from isogloss.writing.writer_process import serve


class Engine:
    """Answer the messages of a job.

    Args:
        words: the fault, if there is one.
        keeper: process id of the parent of the command, whose parent is the job's rank.
        command: connection to the command where this process is not itself the command.
    """

    requests = 0
    fault = ""

    def __init__(self, words, keeper, command=None):
        self.later_fault = "".join(words[:1])
        self.keeper = keeper
        self.command = command

    def answer(self):
        torch.set_num_threads(1)
        serve(self.load, self.refresh, self.write, os.fdopen(0), os.fdopen(1, "w"))

    def load(self, model, dtype, max_length, weights, tied):
        self.shared = {}
        for name, plain in weights.items():
            self.shared[name] = ipc.attach(ipc.Handle.from_plain(plain))
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        done = self.refresh()
        self.fault = self.later_fault
        return done

    def refresh(self):
        if self.fault != "stale":
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in self.shared.items():
                    own[name].copy_(tensor)
        return len(self.shared)

    def write(self, prompts, stop_ids, vocab, temperature, top_p):
        self.requests += 1
        name = self.fault.rstrip("0123456789")
        usual = {"dies": 2, "stops": 4, "asks": 3}.get(name, 0)
        first = int(self.fault.removeprefix(name) or usual)
        if self.requests == first and name == "dies":
            self.die()
        if self.requests == first:
            status = Path(f"/proc/{self.keeper}/stat").read_text()
            os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGTERM)
            if name == "stops":
                self.hang()
        starts = [rollout.Prompt(prompt["ids"], tuple(prompt["key"]), prompt["max_new_tokens"])
                  for prompt in prompts]
        found = rollout.write(self.model, starts, stop_ids, vocab, temperature=temperature,
                              top_p=top_p)
        return [{"ids": one.ids.tolist(), "logp": one.logp.tolist(), "ended": one.ended,
                 "temperature": one.temperature, "top_p": one.top_p} for one in found]

    def die(self):
        if self.command:
            self.command.send(b"7")
        os._exit(7)

    def hang(self):
        if not self.command:
            time.sleep(1000)
        self.command.recv(1)  # until the command is killed
        os._exit(0)


class TeacherEngine(Engine):
    """Answer in the place of isogloss/vllm_teacher.py: the model runs text by text."""

    def answer(self):
        torch.set_num_threads(1)
        answer({"load": self.load, "read": self.read}, os.fdopen(0), os.fdopen(1, "w"))

    def load(self, model, dtype, **others):
        self.fault = self.later_fault
        dtype = getattr(torch, dtype, torch.float32)
        config = AutoConfig.from_pretrained(model)
        if hasattr(config, "quantization_config"):  # as an engine does that knows the method
            del config.quantization_config
        self.model = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=dtype).eval()
        if self.fault == "other":
            for weight in self.model.parameters():
                weight.data *= 1.1
        return {"width": self.model.config.hidden_size, "dtype": str(dtype).split(".")[1]}

    @torch.no_grad()
    def read(self, texts, rows, into):
        self.requests += 1
        if self.fault == f"dies{self.requests}":
            self.die()
        if self.fault == f"hangs{self.requests}":
            self.hang()
        hidden = ipc.attach(ipc.Handle.from_plain(into))
        for row, ids in zip(rows, texts):
            states = self.model.base_model(input_ids=torch.tensor([ids]))[0][0]
            hidden[row : row + len(ids)] = states
        return {"done": sum(map(len, texts))}


def engine_of(words, keeper, command=None):
    if words[:1] == ["teacher"]:
        return TeacherEngine(words[1:], keeper, command)
    return Engine(words, keeper, command)


def fork_for_all(address):
    """Answer every command that connects, each by a fork of this process, until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who waits for no fork leaves none behind
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}+")
        listener.listen()
        os.rename(f"{address}+", address)
        while True:
            command, _ = listener.accept()
            if not os.fork():
                break
            command.close()
    about, streams, *_ = socket.recv_fds(command, 2**16, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    *words, keeper = json.loads(about)
    engine_of(words, keeper, command).answer()
    os._exit(0)
