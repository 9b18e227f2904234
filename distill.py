"""Distil a frozen teacher into a student that may have another tokenizer.

    deepspeed distill.py --student S --teacher T --data corpus.jsonl --learning_rate 1e-4 --steps 1000
    deepspeed distill.py --student S --teacher T --data org/name --streaming --learning_rate 1e-4 \\
        --ds_config ds_configs/zero3.json --eval_rows 200 --eval_every 500 --save_every 500 \\
        --output_dir runs/a --export runs/a/student
    deepspeed --num_gpus 2 distill.py --student S --data corpus.txt --learning_rate 1e-4 --kd_weight 0

Batch sizes, precision, optimiser, schedule and ZeRO live in the ds_config, everything else in the flags
below. The step is `train_step`.  Works on CPU ranks as on GPUs.
"""

import hashlib
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from align import TokenTable
from checkpoint import (export_model, export_projection, find_checkpoint, load_checkpoint, save_checkpoint,
                        write_atomically)
from data import (CHUNKS, DROPPED, Collate, HeldOutBatches, MicroBatches, ShuffledRows, Side, StreamedRows,
                  holds_chats, load_rows, loader, split_rows)
from ds_config import read_ds_config, resolve_ds_config
from evaluate import evaluate
from flags import check_types, parse_flags
from layout import node_size, teacher_groups
from losses import teacher_importance
from objective import ALM_MODES, ANY_TOKENIZERS, ONE_TOKENIZER, Distillation, build_loss, weighted_sums
from teacher import ENGINES, SIGNALS, choose_engine, hidden_head_is_right, load_teacher, payload_bytes
from tiles import HiddenRows, LogitRows, head_of

# --- flags ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Config:
    """Distil a frozen teacher into a student.

    Args:
        student: hub id or directory of the model to train; its tokenizer needs an eos token.
        teacher: hub id or directory of the frozen teacher; not needed with kd_weight 0.
        data: hub id (org/name or org/name:config), file, directory or glob: .txt .jsonl .json .parquet
            .arrow .csv.
        text_key: column that holds the text, or chats: lists of {"role", "content"}.
        train_on: what to learn of a chat: assistant (what it says, and to end its turn) or all.
        split: split of a hub data set.
        streaming: read the data as a stream instead of preparing it on disk first.
        eval_rows: rows held out of training, the first ones of the data; 0: none.
        steps: optimiser steps in all, 1 or more.
        max_length: student positions per sample, 2 or more; longer texts are cut, both sides at the same
            byte.
        teacher_max_length: teacher positions per sample; 0: the teacher's context.
        loss: piece_kl, projection_kl, gold, h_kl, uld or alm for any two tokenizers; for equal ones also
            forward_kl, reverse_kl, generalised_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl,
            total_variation; see docs/losses.md.
        kd_weight: weight of the distillation loss, >= 0; 0 loads no teacher.
        ce_weight: weight of the student's next-token cross-entropy, >= 0; 0 computes none in training.
        tiled: compute logits and loss tile by tile from hidden states; false: all logits of a micro-batch.
        loss_memory_mib: MiB for the logits of a tile and what the loss makes of them.
        temperature: softens both models in the distillation loss, > 0.
        projection: file of projection_tools.build for projection_kl, gold and h_kl; empty: built in flight
            and cached.
        learn_projection: train the weights of projection_kl's projection too; written to
            output_dir/projection.pt after the last step.
        projection_learning_rate: of a learned projection; 0: the student's.
        projection_topk: teacher columns that projection_kl keeps, the most likely ones of the step's batch.
        uncommon_topk: tokens that gold and h_kl compare by rank, outside the common ones.
        reverse: KL(student || teacher) in projection_kl, gold and h_kl.
        alm_mode: binary_kl, binary_kl_reverse, binary_ce, temperature_limit, squared or absolute.
        beta: of generalised_jsd, 0 (forward KL) to 1 (reverse KL).
        skew: of skew_forward_kl and skew_reverse_kl, 0 to 1.
        alpha: of adaptive_kl, 0 to 1.
        top_k: tokens that the losses for equal tokenizers compare, the teacher's likeliest, and one bucket
            for the rest; 0: all tokens.
        teacher_dtype: auto (as in the checkpoint), float32, bfloat16 or float16.
        teacher_tp: ranks that hold one teacher together, neighbours on a node; divides the ranks of a node.
        teacher_engine: replicated (a whole copy per rank), tensor_parallel (DeepSpeed's inference engine),
            zero3 (partitioned over all ranks, for any architecture), or auto: the first for teacher_tp 1,
            else the second where it knows the architecture, else the third.
        exchange: what is kept of the teacher until a loss reads it: hidden (final hidden states), logits or
            topk (the likeliest tokens; the rest of the probability is spread evenly).
        exchange_topk: tokens of exchange topk.
        activation_checkpointing: recompute the student's activations in backward instead of keeping them.
        ds_config: DeepSpeed JSON; see ds_configs/README.md.
        learning_rate: fills "lr": "auto" of the ds_config; 0: the ds_config states it.
        seed: of data order and of dropout.
        output_dir: metrics.jsonl, run.json and checkpoints go here.
        eval_every: steps between held-out evaluations; 0: only before the first and after the last step.
        save_every: steps between checkpoints; 0: only on SIGTERM.
        keep_checkpoints: how many of them to keep, 1 or more.
        resume: auto (newest complete checkpoint of output_dir, if any), never, or the path of a checkpoint.
        export: directory for the trained student in Hugging Face format; empty: none.
        wandb_project: log to this Weights & Biases project; empty: do not.
        num_workers: processes per rank that tokenise and align; 0: the training process does it.
        local_rank: set by the launcher.
    """

    student: str = ""
    teacher: str = ""
    data: str = ""
    text_key: str = "text"
    train_on: str = "assistant"
    split: str = "train"
    streaming: bool = False
    eval_rows: int = 0
    steps: int = 1000
    max_length: int = 512
    teacher_max_length: int = 0
    loss: str = "piece_kl"
    kd_weight: float = 1.0
    ce_weight: float = 1.0
    tiled: bool = True
    loss_memory_mib: int = 512
    temperature: float = 1.0
    projection: str = ""
    learn_projection: bool = False
    projection_learning_rate: float = 0.0
    projection_topk: int = 8192
    uncommon_topk: int = 8192
    reverse: bool = False
    alm_mode: str = "binary_kl"
    beta: float = 0.5
    skew: float = 0.1
    alpha: float = 0.5
    top_k: int = 0
    teacher_dtype: str = "auto"
    teacher_tp: int = 1
    teacher_engine: str = "auto"
    exchange: str = "hidden"
    exchange_topk: int = 256
    activation_checkpointing: bool = False
    ds_config: str = "ds_configs/zero2.json"
    learning_rate: float = 0.0
    seed: int = 0
    output_dir: str = "runs/default"
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    resume: str = "auto"
    export: str = ""
    wandb_project: str = ""
    num_workers: int = 1
    local_rank: int = -1

    def __post_init__(self):
        check_types(self)
        for name, low in LOWEST.items():
            if getattr(self, name) < low:
                raise ValueError(f"--{name} {getattr(self, name)}: expected {low} or more")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: expected one of {', '.join(known)}")
        for name in ("beta", "skew", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected 0 to 1")
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature}: expected more than 0")
        if self.kd_weight == self.ce_weight == 0:
            raise ValueError("--kd_weight 0 and --ce_weight 0: nothing would be learned; raise one of them")
        for name in ("student", "data") + ("teacher",) * (self.kd_weight > 0):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: give a hub id or a local path")
        if self.learn_projection and (self.loss != "projection_kl" or not self.kd_weight):
            raise ValueError(f"--learn_projection: only --loss projection_kl trains one, this is {self.loss} "
                             f"with --kd_weight {self.kd_weight}; leave it out or change the loss")
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ValueError(f"--resume={self.resume}: expected auto, never or the directory of a checkpoint")


LOWEST = dict(eval_rows=0, steps=1, max_length=2, teacher_max_length=0, kd_weight=0, ce_weight=0,
              projection_topk=1, uncommon_topk=1, top_k=0, learning_rate=0, seed=0, eval_every=0,
              save_every=0, keep_checkpoints=1, num_workers=0, loss_memory_mib=1, projection_learning_rate=0,
              teacher_tp=1, exchange_topk=1)
CHOICES = dict(loss=(*ANY_TOKENIZERS, *ONE_TOKENIZER), train_on=("assistant", "all"), alm_mode=ALM_MODES,
               teacher_dtype=("auto", "float32", "bfloat16", "float16"), teacher_engine=ENGINES,
               exchange=SIGNALS)
# flags that may change when a run goes on; all others decide what is learned
FREE_ON_RESUME = {"steps", "output_dir", "eval_every", "save_every", "keep_checkpoints", "resume", "export",
                  "wandb_project", "num_workers", "local_rank", "ds_config", "teacher_tp", "teacher_engine"}


# --- models, data, loss ---------------------------------------------------------------------------


def load_side(role, path, max_length):
    """(Side, AutoConfig) of the student or the teacher, checked against each other.

    Args:
        max_length: positions per sample; 0: the model's context.
    Raises:
        ValueError: missing, without eos, context too short, lm_head smaller than the tokenizer.
    """
    local = Path(path).expanduser()
    if not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"--{role} {path}: no such directory; expected a hub id or a local model directory")
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path)
        table = TokenTable.from_tokenizer(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--{role} {path}: cannot be loaded ({reason})") from None
    if role == "student" and table.eos < 0:
        raise ValueError(f"--student {path}: its tokenizer has no eos token, so the student could not "
                         "learn to end; set eos_token in tokenizer_config.json")
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if max_length > context:
        flag = "max_length" if role == "student" else "teacher_max_length"
        raise ValueError(f"--{flag} {max_length}: {path} has a context of {context} positions; use no more")
    if config.vocab_size < len(table):
        raise ValueError(f"--{role} {path}: its lm_head has {config.vocab_size} rows, but its tokenizer "
                         f"{len(table)} ids; use the tokenizer that the model was trained with")
    return Side(tokenizer, table, max_length or context), config


@dataclass
class Inputs:
    """All that the flags name, read and checked; the teacher's part is None where none takes part."""

    student: Side
    teacher: Side | None
    ds_config: dict
    train_rows: object
    held_out_rows: object
    distillation: Distillation | None
    checkpoint: Path | None


def check_inputs(cfg, device):
    """Read everything but the weights.  Whatever can be wrong is found here, before the first step.

    Raises:
        ValueError: what arrived, what was expected, what to do.
    """
    raw = read_ds_config(cfg.ds_config)
    student, student_config = load_side("student", cfg.student, cfg.max_length)
    teacher = None
    if cfg.kd_weight:
        teacher, teacher_config = load_side("teacher", cfg.teacher, cfg.teacher_max_length)
        choose_engine(cfg.teacher_engine, cfg.teacher_tp, teacher_config.model_type)
        teacher_groups(dist.get_world_size(), node_size(), cfg.teacher_tp)
    bf16 = device.type != "cpu" and get_accelerator().is_bf16_supported()
    ds_config = resolve_ds_config(raw, cfg, dist.get_world_size(), student_config.hidden_size, bf16)
    rows = load_rows(cfg.data, cfg.text_key, cfg.split, cfg.streaming)
    if holds_chats(rows, cfg.text_key):
        for role, side in (("student", student), ("teacher", teacher)):
            if side and not side.tokenizer.chat_template:
                raise ValueError(f"--{role} {getattr(cfg, role)}: its tokenizer has no chat template, and "
                                 f"{cfg.text_key!r} holds chats; set chat_template in tokenizer_config.json")
    train_rows, held_out_rows = split_rows(rows, cfg.eval_rows)
    distillation = build_loss(cfg, student, teacher, device) if teacher else None
    checkpoint = find_checkpoint(cfg.resume, checkpoint_folder(cfg), run_identity(cfg))
    if cfg.export and Path(cfg.export).is_dir() and not (Path(cfg.export) / "config.json").exists():
        raise ValueError(f"--export {cfg.export}: holds something else than a model; name another directory")
    return Inputs(student, teacher, ds_config, train_rows, held_out_rows, distillation, checkpoint)


def load_student(cfg, ds_config):
    """The student in float32 (DeepSpeed casts it); under ZeRO-3 every rank loads just its own part."""
    partitioned = ds_config.get("zero_optimization", {}).get("stage") == 3
    keep_alive = HfDeepSpeedConfig(ds_config) if partitioned else None
    model = AutoModelForCausalLM.from_pretrained(cfg.student, dtype=torch.float32)
    if keep_alive:
        unset_hf_deepspeed_config()  # on every rank, or the teacher would be partitioned too
    model.config.use_cache = False
    model.train()  # it comes in evaluation mode, without dropout
    if cfg.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def run_inside_forward(model, vocab, tiled):
    """Give the model a forward(input_ids, run) that returns run(rows), rows being logits of any positions.

    The loss is computed in there because that is where ZeRO-3 gathers the head.  Without `run` it is the
    model's own forward.
    """
    own = model.forward
    for p in model.get_output_embeddings().parameters():
        if hasattr(p, "ds_id"):  # else it is gone again before its gradient arrives
            deepspeed.zero.register_external_parameter(model, p)

    def forward(input_ids=None, run=None, **how):
        if run is None:
            return own(input_ids=input_ids, **how)
        if tiled:
            hidden = model.base_model(input_ids=input_ids, use_cache=False)[0]
            return run(HiddenRows(hidden.flatten(0, 1), head_of(model, vocab)))
        return run(LogitRows(own(input_ids=input_ids).logits[..., :vocab].flatten(0, 1)))

    model.forward = forward


def check_heads(job, student_ids, teacher):
    """A ValueError where `head_of` does not give a model's own logits; all ranks take part."""
    cfg = job.cfg
    ids = torch.tensor([student_ids], device=job.device)
    job.engine.eval()
    with torch.no_grad():
        logits = job.engine(input_ids=ids).logits[..., : job.vocabs[0]]
        right = {"student": job.engine(input_ids=ids, run=lambda rows: hidden_head_is_right(rows, logits))}
        if teacher is not None:
            ids = ids.clamp(max=job.vocabs[1] - 1)
            logits = teacher.logits(ids)[..., : job.vocabs[1]]
            right["teacher"] = hidden_head_is_right(teacher.rows(ids), logits)
    job.engine.train()
    for role, good in right.items():
        if not good:
            raise ValueError(f"--{role} {getattr(cfg, role)}: its logits are not those of its output "
                             "embeddings, so its loss cannot be tiled; use --tiled=false")


def start_engine(model, ds_config, projection_learning_rate=0.0):
    """DeepSpeed engine; weight decay spares vectors (norms and biases), as is the custom."""
    def is_matrix(p):
        return len(getattr(p, "ds_shape", p.shape)) > 1

    scores = getattr(model, "projection_scores", None)
    trained = [p for p in model.parameters() if p.requires_grad and p is not scores]
    own = {"lr": projection_learning_rate} if projection_learning_rate else {}
    groups = [{"params": [] if scores is None else [scores], "weight_decay": 0.0, **own},
              {"params": [p for p in trained if is_matrix(p)]},
              {"params": [p for p in trained if not is_matrix(p)], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)[0]


def to_device(value, device):
    """Tensors in dicts and named tuples, moved; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [to_device(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


# --- one step -------------------------------------------------------------------------------------

COUNTS = "ce", "kd", "text_bytes", "aligned_bytes", "aligned_tokens", "source_bytes", *DROPPED, *CHUNKS


@dataclass
class Job:
    """What a step needs: the engine, both models as functions of a batch, the loss."""

    cfg: Config
    engine: object
    student: object  # (batch, run) -> run(rows), see `run_inside_forward`
    teacher: object  # batch -> rows; None: there is none
    distillation: Distillation | None
    keeps_columns: bool  # does the loss compare the most important teacher columns only?
    vocabs: tuple  # tokens of both sides
    params: list  # what the loss trains beside the student
    device: torch.device


def build_job(cfg, inputs, device):
    """Load both models and start the engine; all ranks take part.

    Raises:
        ValueError: a model whose loss cannot be tiled.
    """
    model, teacher = load_student(cfg, inputs.ds_config), None
    V, W = len(inputs.student.table), len(inputs.teacher.table) if inputs.teacher else 0
    run_inside_forward(model, V, cfg.tiled)
    learned = inputs.distillation and inputs.distillation.projection
    if learned:
        learned.attach(model)
    engine = start_engine(model, inputs.ds_config, cfg.projection_learning_rate)
    if inputs.teacher:
        how = cfg.teacher_dtype, device, cfg.teacher_engine, cfg.teacher_tp
        teacher = load_teacher(cfg.teacher, W, *how)
    signal = "logits" if cfg.exchange == "hidden" and not cfg.tiled else cfg.exchange
    job = Job(
        cfg, engine, device=device, distillation=inputs.distillation, vocabs=(V, W),
        params=[model.projection_scores] if learned else [],
        student=lambda batch, run: engine(input_ids=batch["student_ids"], run=run),
        teacher=teacher and (lambda batch: teacher.rows(batch["teacher_ids"], signal, cfg.exchange_topk)),
        keeps_columns=cfg.loss == "projection_kl" and W > cfg.projection_topk,
    )
    if cfg.tiled:
        check_heads(job, list(range(min(8, V))), teacher)
    return job


def train_step(job, window, stop=False):
    """One optimiser step over a window of micro-batches.

    Args:
        window: this rank's micro-batches, one per accumulation step.
        stop: whether this rank was told to end.
    Returns:
        dict of global means, equal on every rank (see docs/metrics.md), and `stop`: was any rank told to end?
    """
    cfg, ranks = job.cfg, dist.get_world_size()
    mine = [sum(batch["counts"][key] for batch in window) for key in COUNTS]
    counts = dict(zip((*COUNTS, "stop"), global_sums([*mine, stop], job.device).tolist()))
    # the engine divides by micro-steps and averages over ranks; this makes it a mean over the whole window
    share = {term: ranks * len(window) / max(counts[term], 1) for term in ("ce", "kd")}
    weights = cfg.ce_weight * share["ce"], cfg.kd_weight * share["kd"]
    window = [to_device(batch, job.device) for batch in window]
    teachers, kd_loss, payload = [None] * len(window), None, 0
    if job.teacher:
        teachers, kd_loss, payload = teacher_signals(job, window)
    lr, sums = job.engine.get_lr()[-1], torch.zeros(2, device=job.device)
    for batch, teacher in zip(window, teachers):
        how = dict(teacher_rows=teacher, kd_loss=kd_loss, tiles=batch["tiles"], weights=weights,
                   params=job.params)
        loss, found = job.student(batch, partial(weighted_sums, **how))
        sums += found
        job.engine.backward(loss)
        grad_norm = gradient_norm(job.engine)
        job.engine.step()
    ce, kd = global_sums(sums, job.device).tolist()
    ce, kd = ce / max(counts["ce"], 1), kd / max(counts["kd"], 1)
    metrics = {"loss": cfg.ce_weight * ce + cfg.kd_weight * kd, "lr": lr}
    metrics["grad_norm"] = float(job.engine.get_global_grad_norm() or grad_norm)
    metrics |= {"ce": ce} if cfg.ce_weight else {}
    if cfg.kd_weight:
        metrics |= {"kd": kd, "aligned_bytes": counts["aligned_bytes"] / max(counts["text_bytes"], 1),
                    "aligned_tokens": counts["aligned_tokens"] / max(counts["ce"], 1)}
        metrics |= {key: counts[key] / max(counts["source_bytes"], 1) for key in DROPPED}
        metrics |= {key: counts[key] / max(counts["chunks"], 1) for key in CHUNKS[1:]}
        metrics["teacher_bytes_per_token"] = payload
    return metrics | {"tokens": int(counts["ce"]), "stop": counts["stop"] > 0}


def teacher_signals(job, window):
    """(rows of teacher logits of every micro-batch, the loss that reads them, bytes a position)."""
    teachers = [job.teacher(batch) for batch in window]
    payload = payload_bytes(teachers[0]) / window[0]["teacher_ids"].numel()
    if not job.keeps_columns:
        return teachers, job.distillation.loss, payload
    kept_K = kept_columns(job, window, teachers)
    return [rows.columns(kept_K) for rows in teachers], job.distillation.keep(kept_K), payload


def global_sums(values, device):
    """(n,) float64 on the CPU: the sum over all ranks, equal on every rank."""
    total = torch.as_tensor(values, dtype=torch.float64).to(device, copy=True)
    dist.all_reduce(total)
    return total.cpu()


def kept_columns(job, window, teachers):
    """Sorted teacher columns that projection_kl compares in this step, the same on every rank."""
    importance = torch.full((job.vocabs[1],), -torch.inf, device=job.device)
    for batch, rows in zip(window, teachers):
        for tile in batch["tiles"]:
            y = rows(tile.teacher_rows)
            for part in tile.parts:
                found = teacher_importance(y[None, part.teacher], part.teacher_chunk[None])
                importance = torch.maximum(importance, found)
    dist.all_reduce(importance, op=dist.ReduceOp.MAX)
    return importance.topk(job.cfg.projection_topk).indices.sort().values


def gradient_norm(engine):
    """Norm of the averaged gradient where the engine does not report it (ZeRO stage 0 in float32), else 0."""
    if engine.zero_optimization() or not engine.is_gradient_accumulation_boundary():
        return 0.0
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


# --- once in a while: evaluate, save --------------------------------------------------------------


def run_evaluation(job, batches):
    """Held-out metrics; all ranks take part."""
    job.engine.eval()
    batches = (to_device(batch, job.device) for batch in batches)
    result = evaluate(batches, job.student, job.teacher, job.distillation)
    job.engine.train()
    return {f"eval/{key}": value for key, value in result.items()}


def save(job, step):
    """All ranks take part."""
    cfg = job.cfg
    save_checkpoint(job.engine, checkpoint_folder(cfg), step, run_identity(cfg), cfg.keep_checkpoints)


def checkpoint_folder(cfg):
    return Path(cfg.output_dir) / "checkpoints"


def run_identity(cfg):
    """What has to be the same when a run goes on, else its next loss would be another."""
    flags = {key: value for key, value in asdict(cfg).items() if key not in FREE_ON_RESUME}
    return flags | {"ranks": dist.get_world_size(), "ds_config": read_ds_config(cfg.ds_config)}


# --- logs -----------------------------------------------------------------------------------------


class Log:
    """metrics.jsonl, the progress bar and wandb; everything but rank 0 is silent."""

    def __init__(self, cfg, start, resolved):
        self.on = dist.get_rank() == 0
        if not self.on:
            return
        folder = Path(cfg.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        lines = self.path.read_text().splitlines() if start and self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= start]
        write_atomically(self.path, "".join(line + "\n" for line in kept))
        record = folder / (f"run_{start:07d}.json" if start else "run.json")  # one more for every resume
        write_atomically(record, run_record(cfg, start, resolved))
        self.bar = tqdm(total=cfg.steps, initial=start, desc=cfg.loss if cfg.kd_weight else "text only",
                        unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
        self.wandb = None
        if cfg.wandb_project:
            import wandb  # a second to import, and rarely wanted

            name = folder.name
            self.wandb = wandb.init(project=cfg.wandb_project, name=name, dir=folder, config=asdict(cfg),
                                    id=f"{name}-{cfg.seed}", resume="allow")

    def write(self, step, metrics):
        if not self.on:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")
        if self.wandb:
            self.wandb.log(metrics, step=step)

    def advance(self, metrics):
        if self.on:
            shown = {"loss": metrics["loss"], "kd": metrics.get("kd"), "tok/s": metrics["tokens_per_second"]}
            self.bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None}, refresh=False)
            self.bar.update()

    def close(self):
        if self.on:
            self.bar.close()
            if self.wandb:
                self.wandb.finish()


def run_record(cfg, start, resolved):
    """JSON text of all that is needed to run this again."""
    def git(*words):
        here = Path(__file__).parent
        found = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else None

    record = {
        "argv": sys.argv, "config": asdict(cfg), "start_step": start, "ranks": dist.get_world_size(),
        "ds_config_text": Path(cfg.ds_config).read_text(), "ds_config": resolved, "seed": cfg.seed,
        "commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD"),
        "versions": {m.__name__: m.__version__ for m in (torch, deepspeed, transformers, datasets)},
        "python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "projection_sha256": cfg.projection and hashlib.sha256(Path(cfg.projection).read_bytes()).hexdigest(),
    }
    return json.dumps(record, indent=1)


# --- main -----------------------------------------------------------------------------------------


def start_distributed():
    """Join the job's process group (a group of one without a launcher); returns the device of this rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for key, value in alone.items():
        os.environ.setdefault(key, str(value))
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's shared-memory all-reduce takes every group for the world, and is compiled on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:  # else every rank would start a thread per core
            torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_SIZE", 1))))
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    return torch.device(get_accelerator().current_device_name())


@contextmanager
def agree():
    """A ValueError on any rank ends all ranks with its one line, before anything was trained or written."""
    message = None
    try:
        yield
    except ValueError as error:
        message = str(error)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for found in messages:
        if found:
            fail(found)


def fail(message):
    if int(os.environ.get("RANK", 0)) == 0:
        print("distill.py: " + " ".join(message.split()), file=sys.stderr, flush=True)
    raise SystemExit(2)


def quieten():
    """Warnings and errors of the libraries, not their progress reports."""
    deepspeed.utils.logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it raises is reported once, by us
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked


def main(cfg):
    quieten()
    device = start_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with agree():
        inputs = check_inputs(cfg, device)
    transformers.set_seed(cfg.seed + rank)
    with agree():
        job = build_job(cfg, inputs, device)
    start = load_checkpoint(job.engine, inputs.checkpoint) if inputs.checkpoint else 0

    spelling = inputs.distillation and inputs.distillation.spelling
    memory = cfg.loss_memory_mib if cfg.tiled else math.inf
    part_share = 0.125 if device.type == "cpu" else 0.5  # a CPU wants large tiles, a GPU few calls
    collate = Collate(inputs.student, inputs.teacher, spelling, cfg.train_on, memory, part_share)
    micro = job.engine.train_micro_batch_size_per_gpu()
    stream = (StreamedRows if cfg.streaming else ShuffledRows)(inputs.train_rows, cfg.text_key, cfg.seed)
    micro_steps = job.engine.gradient_accumulation_steps()
    batches = MicroBatches(stream, collate, micro, micro_steps, rank, ranks, start)
    held_out = HeldOutBatches(inputs.held_out_rows, cfg.text_key, collate, micro, rank, ranks)
    train(job, iter(loader(batches, cfg.num_workers)), loader(held_out, 0), start, inputs.ds_config)
    if cfg.learn_projection:
        export_projection(job.engine, inputs.distillation.projection, Path(cfg.output_dir) / "projection.pt")
    if cfg.export:
        export_model(job.engine, inputs.student.tokenizer, cfg.export)


def train(job, batches, held_out, start, ds_config):
    """From step `start` to the last one; ends early, with a checkpoint, when a rank gets SIGTERM.

    Args:
        batches: iterator over this rank's micro-batches, from `start` on.
        held_out: iterable over its held-out batches.
    """
    cfg, told = job.cfg, []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    log = Log(cfg, start, ds_config)
    if cfg.eval_rows and start == 0:
        log.write(0, run_evaluation(job, held_out))
    for step in range(start + 1, cfg.steps + 1):
        begin = time.perf_counter()
        window = [next(batches) for _ in range(job.engine.gradient_accumulation_steps())]
        metrics = train_step(job, window, stop=bool(told))
        stop, seconds = metrics.pop("stop"), time.perf_counter() - begin
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}
        log.write(step, metrics)
        log.advance(metrics)
        if cfg.eval_rows and (step == cfg.steps or (cfg.eval_every and step % cfg.eval_every == 0)):
            log.write(step, run_evaluation(job, held_out))
        if stop or (cfg.save_every and step % cfg.save_every == 0):
            save(job, step)
        if stop:
            log.close()
            raise SystemExit(128 + signal.SIGTERM)
    log.close()


def cli(argv=None):
    """Command line: wrong input ends with one line and exit code 2."""
    try:
        cfg = parse_flags(Config, sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        fail(str(error))
    main(cfg)


if __name__ == "__main__":
    cli()
    dist.destroy_process_group()
