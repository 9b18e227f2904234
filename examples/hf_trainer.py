"""Distill with the Trainer of transformers, beside the files that plain.py needs:
    python hf_trainer.py STUDENT TEACHER TEXTS.jsonl OUTPUT KD_WEIGHT LEARNING_RATE EPOCHS"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from isogloss.cross_tokenizer import CrossTokenizerKD

if len(sys.argv) != 8:
    raise SystemExit(__doc__)
student_name, teacher_name, texts, output, *numbers = sys.argv[1:]
kd_weight, learning_rate, epochs = map(float, numbers)
teacher = AutoModelForCausalLM.from_pretrained(teacher_name).eval()
tokenizer = AutoTokenizer.from_pretrained(student_name)
kd = CrossTokenizerKD(tokenizer, AutoTokenizer.from_pretrained(teacher_name), max_length=256)


class DistillationTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = inputs["batch"]
        out = model(**batch.student, labels=batch.labels)
        with torch.no_grad():
            teacher_logits = teacher.to(model.device)(**batch.teacher).logits
        loss = out.loss + kd_weight * kd(out.logits, teacher_logits, batch)
        return (loss, out) if return_outputs else loss


trainer = DistillationTrainer(
    AutoModelForCausalLM.from_pretrained(student_name),
    TrainingArguments(output, per_device_train_batch_size=8, num_train_epochs=epochs,
                      learning_rate=learning_rate, remove_unused_columns=False),
    data_collator=lambda rows: {"batch": kd.collate([row["text"] for row in rows])},
    train_dataset=load_dataset("json", data_files=texts, split="train"),
    processing_class=tokenizer)
trainer.train()
trainer.save_model()
