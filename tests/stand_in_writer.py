"""Write with transformers in vLLM's place: a process with the protocol of isogloss/vllm_writer.py.

    python tests/stand_in_writer.py [stale | dies | dies4 | stops | stops5 | asks]

stale: it says that it took over the weights, and does not.  dies: at the second request to write.
stops: at the fourth request to write it asks the job to end by SIGTERM, and never answers.
asks: it asks at the third one, and answers.  A digit names another request.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isogloss import rollout
from isogloss.job import ipc
from isogloss.writing.writer_process import serve

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Engine:
    requests = 0

    def load(self, model, dtype, max_length, weights, tied):
        self.shared = {}
        for name, plain in weights.items():
            self.shared[name] = ipc.attach(ipc.Handle.from_plain(plain))
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.fault = ""
        done = self.refresh()
        self.fault = FAULT
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
            os._exit(7)
        if self.requests == first:
            keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGTERM)
            time.sleep(1000 if name == "stops" else 0)
        starts = [rollout.Prompt(prompt["ids"], tuple(prompt["key"]), prompt["max_new_tokens"])
                  for prompt in prompts]
        found = rollout.write(self.model, starts, stop_ids, vocab, temperature=temperature,
                              top_p=top_p)
        return [{"ids": one.ids.tolist(), "logp": one.logp.tolist(), "ended": one.ended,
                 "temperature": one.temperature, "top_p": one.top_p} for one in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = Engine()
    serve(engine.load, engine.refresh, engine.write)
