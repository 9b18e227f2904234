"""Distill with plain transformers:  python plain.py STUDENT TEACHER TEXTS OUTPUT [--kd_weight 1]

Needs beside it: align.py, loss_bounds.py, losses.py, nodes.py, translation.py, spelling.py,
cross_tokenizer.py.
"""

import argparse
import json

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from isogloss import CrossTokenizerKD  # of copied files: from cross_tokenizer import ...

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("student", "teacher", "texts", "output"):
    parser.add_argument(name)
for name, value in dict(kd_weight=1.0, learning_rate=1e-4, epochs=1, batch_size=8).items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
student = AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32).to(device)
teacher = AutoModelForCausalLM.from_pretrained(args.teacher).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(args.student)
kd = CrossTokenizerKD(tokenizer, AutoTokenizer.from_pretrained(args.teacher), max_length=256)
with open(args.texts) as file:
    texts = [json.loads(line)["text"] for line in file]
torch.manual_seed(0)
loader = DataLoader(texts, args.batch_size, shuffle=True, collate_fn=kd.collate)
optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate)
num_steps = args.epochs * len(loader)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, num_steps)
for _ in range(args.epochs):
    for batch in loader:
        batch = batch.to(device)
        out = student(**batch.student, labels=batch.labels)
        with torch.no_grad():
            teacher_logits = teacher(**batch.teacher).logits
        loss = out.loss + args.kd_weight * kd(out.logits, teacher_logits, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"text {out.loss.item():.3f}, with the teacher {loss.item():.3f}")
student.save_pretrained(args.output)
tokenizer.save_pretrained(args.output)
