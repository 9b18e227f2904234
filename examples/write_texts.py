"""Let a model write:  python write_texts.py MODEL TEXTS OUTPUT [--prompt_tokens 16] [--seed 0]

TEXTS and OUTPUT are files of JSON lines with a "text".  The model goes on from the first tokens of
each text, drawn at temperature 1, until its end of text or of a turn, or for --new_tokens 256.

Needs beside it: rollout.py.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isogloss.rollout import Prompt, write  # of a copied file: from rollout import ...

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("model", "texts", "output"):
    parser.add_argument(name)
for name, value in dict(prompt_tokens=16, new_tokens=256, seed=0).items():
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
tokenizer = AutoTokenizer.from_pretrained(args.model)
ends = model.generation_config.eos_token_id
ends = ends if isinstance(ends, list) else [ends]
bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]  # as in a job
prompts = []
with open(args.texts) as file:
    for number, line in enumerate(file):
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
        ids = [*bos, *ids[: args.prompt_tokens]]
        prompts.append(Prompt(ids, (args.seed, number, 0), args.new_tokens))
completions = write(model, prompts, ends, len(tokenizer))
with open(args.output, "w") as file:
    for prompt, completion in zip(prompts, completions):
        ids = [*prompt.ids, *completion.ids]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        file.write(json.dumps({"text": text}) + "\n")
