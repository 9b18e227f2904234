"""Learn in verl, which hands a loss the packed logits of token ids, and no rows.

A row is what each model's own template renders, so it travels with the batch.  See
docs/trainers.md.

Shapes: B rows, S positions of the longest, T positions of all rows one after the other, V student
vocabulary.

Tests: tests/test_packed_trainers.py.
"""

import json
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from isogloss.integrations import Distillation


def unpacked(logits_TV, texts, batch, vocab):
    """Return (B, S, V) logits for `Distillation.loss`, zero behind the end of a row.

    Args:
        logits_TV: of the texts one after the other; behind them it may hold padding.
        texts: (tokens,) int64 ids of each row, as the student has read them.
        batch: what `Distillation` made of the rows.
        vocab: columns that the loss reads.
    Raises:
        ValueError: the logits are a shard, or the texts are other ones than the batch's.
    """
    sizes = [len(ids) for ids in texts]
    if logits_TV.shape[0] < sum(sizes) or logits_TV.shape[1] < vocab:
        raise ValueError(f"logits of {tuple(logits_TV.shape)}: expected {(sum(sizes), vocab)} or "
                         "more; shards of a sequence or of the vocabulary have no loss here, so "
                         "switch off tensor, sequence and context parallelism")
    student = batch["batch"].student
    width = student.ids.shape[1]
    rows = []
    for number, logits in enumerate(logits_TV[: sum(sizes)].split(sizes)):
        labels = student.labels[number]
        for last in (labels >= 0).nonzero()[-1:, 0].tolist():
            wanted = torch.cat([student.ids[number, : last + 1], labels[last : last + 1]])
            if not torch.equal(texts[number][: last + 2].cpu(), wanted):
                raise ValueError(f"row {number} of a batch: the trainer's token ids are not those "
                                 "of its text; give both the same chat template, its arguments "
                                 "and max_length")
        rows.append(F.pad(logits, (0, 0, 0, width - len(logits))))  # or cut
    return torch.stack(rows)


def distilled_in_verl(trainer_class, teacher, teacher_tokenizer=None, **flags):
    """Return a subclass of `verl.trainer.sft_trainer.SFTTrainer`, whose engine is fsdp.

    Args:
        teacher, teacher_tokenizer, flags: see `Distillation`; max_length and template_kwargs are
            those of verl's data unless given.
    """
    class Distilled(trainer_class):
        def _build_dataset(self):
            super()._build_dataset()
            self.train_dataset = _WithRows(self.train_dataset)
            if self.val_dataset is not None:
                self.val_dataset = _WithRows(self.val_dataset)

        def _build_engine(self):
            super()._build_engine()
            data = self.config.data
            told = json.dumps(dict(data.get("apply_chat_template_kwargs") or {}))
            # whose last token is a label here
            its_flags = {"max_length": data.max_length - 1, "template_kwargs": told} | flags
            distillation = Distillation(
                self.model_config.tokenizer, teacher, teacher_tokenizer, **its_flags)
            client = self.training_client
            client.set_loss_fn(partial(verl_loss, distillation))
            for name in ("train_batch", "infer_batch"):
                setattr(client, name, partial(_with_logits, getattr(client, name)))

    return Distilled


class _WithRows(Dataset):
    """Add to what verl makes of a chat the chat itself, as `rows` of its batches."""

    def __init__(self, chats):
        if not hasattr(chats, "messages"):
            raise ValueError("data.custom_cls: its data set has no `messages`; expected one like "
                             "verl's MultiTurnSFTDataset")
        self.chats = chats

    def __len__(self):
        return len(self.chats)

    def __getitem__(self, item):
        row = {"messages": self.chats.messages[item]}
        if self.chats.tools is not None:
            row["tools"] = self.chats.tools[item]
        return self.chats[item] | {"rows": row}


def _with_logits(run, data):
    data.set_non_tensor("distillation_use_topk", True)  # so that the engine hands logits out
    return run(data)


def verl_loss(distillation, model_output=None, data=None, dp_group=None, student_logits=None,
              data_format=None):
    """Return terms of the loss by token where logits arrive, then (their sum, no metrics).

    Cross-entropy and distillation loss are both divided by verl's number of learned tokens.
    """
    if data_format is not None:
        raise ValueError(f"data_format={data_format!r}: only verl's engine fsdp is known here")
    if student_logits is None:
        if "distilled" not in model_output:
            raise ValueError("verl handed no logits out; it does from 0.8 on, with "
                             "use_fused_kernels=False")
        return model_output["distilled"].values().sum(), {}
    batch = distillation.collate(data.get("rows").tolist())
    logits_TV = student_logits[0]
    logits = unpacked(logits_TV, data["input_ids"].unbind(), batch, len(distillation.student.table))
    terms = (data["batch_num_tokens"],) * 2
    loss, _ = distillation.loss(logits, batch, terms, data["dp_size"])
    # verl wants a number for each position: the first one is never padding
    return {"distilled": F.pad(loss[None], (0, len(logits_TV) - 1))[None]}
