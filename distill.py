"""Distill a frozen teacher into a student that may have another tokenizer.

    deepspeed distill.py --student S --teacher T --data corpus.jsonl --learning_rate 1e-4 --steps 1000
    deepspeed distill.py --student S --teacher T --data org/name --streaming --learning_rate 1e-4 \\
        --ds_config ds_configs/zero3.json --eval_rows 200 --eval_every 500 --save_every 500 \\
        --output_dir runs/a --export runs/a/student
    deepspeed --num_gpus 2 distill.py --student S --data corpus.txt --learning_rate 1e-4 --kd_weight 0

Batch sizes, precision, optimizer, schedule and ZeRO live in the ds_config, everything else in the flags of
`config.py`. The step is `train_step`.  Works on CPU ranks as on GPUs.
"""

import math
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from align import TokenTable
from isogloss.checks import check_heads, check_packing, check_parts
from isogloss.checkpoint import (export_model, export_projection, find_checkpoint, needs_conversion,
                        load_checkpoint, save_checkpoint)
from isogloss.config import FREE_ON_RESUME, Config, of_each_teacher, routes_of_each_teacher
from isogloss.data import (CHUNKS, DROPPED, Collate, CollateAll, HeldOutBatches, MicroBatches, Reader, ShuffledRows,
                  TextEncoder, StreamedRows, check_templates, end_workers, holds_chats, load_rows, loader,
                  split_rows)
from isogloss.ds_config import BATCH_KEYS, FREE_KEYS, batch_sizes, read_ds_config, resolve_ds_config
from isogloss.evaluate import evaluate
from projection_tools.flags import parse_flags
from isogloss.launch import fail_together, fail, report_dead_ranks, silence_libraries, start_distributed
from isogloss.layout import node_size, split_ranks, teacher_groups
from isogloss.log import TIMED_STEPS, Log, time_collectives, utilization
from losses import teacher_importance
from teacher_mixing import dynamic_scale, teacher_weights, vocabulary_factors
from isogloss.objective import Distillation, build_loss, lesson_sums, sample_scores, weigh_samples
from projection_tools import fingerprint
from isogloss.sequence import (ATTENTION, SequenceGroup, check_layout, join_sequence_group, keep_on_host,
                      register_attention, tile_mlps)
from isogloss.teachers import EnsembleLogits, choose_engine, load_teacher, payload_bytes, weights_of
from isogloss.remote_teachers import ANSWER, Link, alike_on_node, serve
from tiles import CPU_SUB_TILES, GPU_SUB_TILES, HiddenLogits, StoredLogits, TeacherBlocks, head_of

# --- models, data, loss ---------------------------------------------------------------------------


def load_side(role, path, max_length):
    """(TextEncoder, AutoConfig) of the student or the teacher, checked against each other.

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
    return TextEncoder(tokenizer, table, max_length or context), config


@dataclass
class TeacherSetup:
    """A teacher, or the mean of several, and how the student learns from it.

    Attributes:
        name: of the teacher, for metrics.
        cfg: the flags as if it were the only teacher; its kd_weight is the lesson's.
        side: its tokenizer.
        distillation: the loss.
        members: Config of every teacher, its kd_weight being its share of the mean.
        teachers: `teacher.Teacher` or `teacher_ranks.Remote` of every member; empty: not loaded yet.
    """

    name: str
    cfg: Config
    side: TextEncoder
    distillation: Distillation
    members: list
    teachers: list = field(default_factory=list)

    @property
    def keeps_columns(self):
        """Does the loss compare the most important teacher columns only?"""
        return self.cfg.loss == "projection_kl" and len(self.side.table) > self.cfg.projection_topk

    @property
    def signals(self):
        """(what is kept of each teacher, of how many tokens)."""
        return [("logits" if own.exchange == "hidden" and not own.tiled else own.exchange, own.exchange_topk)
                for own in self.members]

    @staticmethod
    def asked(batch):
        """What the teachers read of a batch."""
        ids = batch["teacher_ids"]
        return torch.stack([ids, batch["teacher_positions"]]) if "teacher_positions" in batch else ids

    def ask(self, batch):
        """Start what `rows` will return; for teachers on ranks of their own."""
        for teacher, how in zip(self.teachers, self.signals):
            teacher.ask(self.asked(batch), *how)

    def rows(self, batch):
        """Logits of any positions of its side of a batch; its replica's ranks take part together."""
        ids = self.asked(batch)
        found = [teacher.rows(ids, *how) for teacher, how in zip(self.teachers, self.signals)]
        if len(found) == 1:
            return found[0]
        shares = torch.tensor([own.kd_weight for own in self.members], device=ids.device)
        return EnsembleLogits(tuple(found), shares / shares.sum(), self.cfg.teacher_weights.removeprefix("mean_"))


@dataclass
class Inputs:
    """All that the flags name, read and checked; no lesson: the text alone."""

    student: TextEncoder
    lessons: list
    ds_config: dict
    train_rows: object
    held_out_rows: object
    checkpoint: Path | None
    convert: bool = False  # the checkpoint is of another layout


def check_inputs(cfg, device, roles=None):
    """Read everything but the weights.  Whatever can be wrong is found here, before the first step.

    Args:
        roles: `layout.Roles` where teachers have ranks of their own.
    Raises:
        ValueError: what arrived, what was expected, what to do.
    """
    raw = read_ds_config(cfg.ds_config)
    student, student_config = load_side("student", cfg.student, cfg.max_length)
    sides = {}
    for name, own in of_each_teacher(cfg).items() if cfg.kd_weight else ():
        sides[name], teacher_config = load_side("teacher", own.teacher, own.teacher_max_length)
        ranks, node = dist.get_world_size(), node_size()
        if roles:
            ranks, node = ranks // roles.students * roles.teachers, roles.teachers
        teacher_groups(ranks, node, own.teacher_tp)
        choose_engine(own.teacher_engine, own.teacher_tp, teacher_config, ranks)
    bf16 = device.type != "cpu" and get_accelerator().is_bf16_supported()
    if cfg.sequence_parallel > 1:
        check_layout(cfg.sequence_parallel, dist.get_world_size(), student_config)
    ds_config = resolve_ds_config(raw, cfg, dist.get_world_size(), student_config.hidden_size, bf16)
    rows = load_rows(cfg.data, cfg.text_key, cfg.split, cfg.streaming)
    if cfg.route_key:
        columns = rows.column_names or list(next(iter(rows.take(1))))
        if cfg.route_key not in columns:
            raise ValueError(f"--route_key {cfg.route_key}: no such column; it has {', '.join(columns)}")
    if holds_chats(rows, cfg.text_key):
        for name, side in {cfg.student: student, **sides}.items():
            if not side.tokenizer.chat_template:
                raise ValueError(f"{name}: its tokenizer has no chat template, and {cfg.text_key!r} holds "
                                 "chats; set chat_template in tokenizer_config.json")
        check_templates(rows, cfg.text_key, [student, *sides.values()])
    train_rows, held_out_rows = split_rows(rows, cfg.eval_rows, cfg.text_key)
    lessons = plan_lessons(cfg, student, sides, device)
    checkpoint = find_checkpoint(cfg.resume, checkpoint_folder(cfg), run_identity(cfg))
    convert = checkpoint is not None and needs_conversion(checkpoint, run_layout(cfg))
    if convert:
        ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}
    if cfg.export and Path(cfg.export).is_dir() and not (Path(cfg.export) / "config.json").exists():
        raise ValueError(f"--export {cfg.export}: holds something else than a model; name another directory")
    return Inputs(student, lessons, ds_config, train_rows, held_out_rows, checkpoint, convert)


def plan_lessons(cfg, student, sides, device):
    """[TeacherSetup] of every teacher.

    Args:
        sides: {name: TextEncoder} of the teachers.
    """
    factors = dict.fromkeys(sides, 1.0)
    if cfg.normalize_by_vocab and sides:
        factors = dict(zip(sides, vocabulary_factors([len(side.table) for side in sides.values()]).tolist()))
    owns = {name: replace(own, kd_weight=own.kd_weight / factors[name])
            for name, own in of_each_teacher(cfg).items()} if sides else {}
    if cfg.teacher_weights.startswith("mean_") and len(owns) > 1:
        first, *others = owns
        for name in others:
            if fingerprint(sides[name].tokenizer) != fingerprint(sides[first].tokenizer):
                raise ValueError(f"--teacher_weights {cfg.teacher_weights}: the tokenizers of {first} and "
                                 f"{name} differ, so there is no mean of their predictions; use fixed")
        side = replace(sides[first], max_length=min(side.max_length for side in sides.values()))
        one = replace(owns[first], kd_weight=cfg.kd_weight)
        return [TeacherSetup("mean", one, side, build_loss(one, student, side, device), list(owns.values()))]
    return [TeacherSetup(name, own, sides[name], build_loss(own, student, sides[name], device), [own])
            for name, own in owns.items()]


def load_student(cfg, ds_config, attention=None):
    """The student in float32 (DeepSpeed casts it); under ZeRO-3 every rank loads just its own part.

    Args:
        attention: name of its attention implementation; None: the usual one.
    """
    partitioned = ds_config.get("zero_optimization", {}).get("stage") == 3
    keep_alive = HfDeepSpeedConfig(ds_config) if partitioned else None
    how = {"attn_implementation": attention} if attention else {}
    with weights_of("student", cfg.student):
        model = AutoModelForCausalLM.from_pretrained(cfg.student, dtype=torch.float32, **how)
    if keep_alive:
        unset_hf_deepspeed_config()  # on every rank, or the teacher would be partitioned too
    model.config.use_cache = False
    model.train()  # it comes in evaluation mode, without dropout
    if cfg.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cfg.mlp_tiles > 1:
        tile_mlps(model, cfg.mlp_tiles)
    return model


def run_inside_forward(model, vocab, tiled, offload=False):
    """Give the model a forward(input_ids, run, ...) that returns run(rows), rows: logits of any positions.

    The loss is computed in there because that is where ZeRO-3 gathers the head.  Without `run` it is the
    model's own forward.

    Args:
        offload: checkpointed activations wait in the host's memory.
    """
    own, hidden_size = model.forward, model.config.get_text_config().hidden_size
    for p in model.get_output_embeddings().parameters():
        if hasattr(p, "ds_id"):  # else it is gone again before its gradient arrives
            deepspeed.zero.register_external_parameter(model, p)

    def forward(input_ids=None, run=None, **how):
        if run is None:
            return own(input_ids=input_ids, **how)
        with keep_on_host((*input_ids.shape, hidden_size), on=offload):
            if tiled:
                hidden = model.base_model(input_ids=input_ids, use_cache=False, **how)[0]
            else:
                logits = own(input_ids=input_ids, **how).logits[..., :vocab]
        return run(HiddenLogits(hidden.flatten(0, 1), head_of(model, vocab)) if tiled else
                   StoredLogits(logits.flatten(0, 1)))

    model.forward = forward


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

COUNTS = ("ce", "kd", "text_bytes", "aligned_bytes", "aligned_tokens", "skipped_chats", "source_bytes",
          *DROPPED, *CHUNKS)


@dataclass
class Job:
    """What a step needs: the engine, the student as a function of a batch, the teachers."""

    cfg: Config
    engine: object
    student: object  # (batch, run) -> run(rows), see `run_inside_forward`
    lessons: list  # TeacherSetup; none: the text alone
    vocab: int  # tokens of the student
    params: list  # what the loss trains beside the student
    device: torch.device
    link: Link | None = None  # to teachers on ranks of their own
    sequence: SequenceGroup | None = None  # the ranks that share this one's sequences
    scales: dict = field(default_factory=dict)  # of --dynamic_scale: the factor of each lesson's next step


def build_job(cfg, inputs, device, roles=None):
    """Load the models that these ranks hold and start the engine; all of them take part.

    Raises:
        ValueError: a teacher that cannot be loaded.
    """
    sequence, attention = None, None
    if cfg.sequence_parallel > 1:
        sequence, attention = join_sequence_group(cfg.sequence_parallel), ATTENTION
        config = AutoConfig.from_pretrained(cfg.student).get_text_config()
        register_attention(config, sequence)
    model, V, params = load_student(cfg, inputs.ds_config, attention), len(inputs.student.table), []
    run_inside_forward(model, V, cfg.tiled, cfg.activation_offload)
    for lesson in inputs.lessons:
        if lesson.distillation.projection:
            lesson.distillation.projection.attach(model)
            params = [model.projection_scores]
    engine = start_engine(model, inputs.ds_config, cfg.projection_learning_rate)
    for lesson in () if roles else inputs.lessons:
        lesson.teachers = [load_teacher(*how, alike=cfg.sequence_parallel)
                           for how in what_to_load(lesson, device)]

    def student(batch, run):
        where = {"position_ids": batch["student_positions"]} if "student_positions" in batch else {}
        return engine(input_ids=batch["student_ids"], run=run, **where)

    return Job(cfg, engine, student, inputs.lessons, V, params, device, sequence=sequence)


def what_to_load(lesson, device):
    """Arguments of `load_teacher` for every member."""
    return [(own.teacher, len(lesson.side.table), own.teacher_dtype, device, own.teacher_engine,
             own.teacher_tp, own.teacher_offload) for own in lesson.members]


def connect(job, roles):
    """Reach the teachers on ranks of their own."""
    under_way = 2 * job.engine.gradient_accumulation_steps()  # this window and the next one
    members = sum(len(lesson.members) for lesson in job.lessons)
    alike = alike_on_node(roles, job.cfg.sequence_parallel)
    of_answer = max(ANSWER[signal] for lesson in job.lessons for signal, _ in lesson.signals)
    job.link = Link(roles, under_way * members, job.device, alike, of_answer)
    teachers = iter(job.link.teachers)
    for lesson in job.lessons:
        lesson.teachers = [next(teachers) for _ in lesson.members]


def train_step(job, window, stop=False):
    """One optimizer step over a window of micro-batches.

    Args:
        window: this rank's micro-batches, one per accumulation step; each a list of batches, one per teacher.
        stop: whether this rank was told to end.
    Returns:
        dict of global means, equal on every rank (see docs/metrics.md), and `stop`: was any rank told to end?
    """
    cfg, ranks = job.cfg, dist.get_world_size()
    mine = [sum(batch[i]["counts"][key] for batch in window) for i in range(len(window[0])) for key in COUNTS]
    *totals, stops = global_sums([*mine, stop], job.device).tolist()
    counts = [dict(zip(COUNTS, totals[i : i + len(COUNTS)])) for i in range(0, len(totals), len(COUNTS))]
    # the engine divides by micro-steps and averages over ranks; this makes it a mean over the whole window
    scale = ranks * len(window)
    kd_weights = [lesson.cfg.kd_weight * job.scales.get(lesson.name, 1.0) for lesson in job.lessons]
    weights = [[0.0, weight * scale / max(count["kd"], 1)]
               for weight, count in zip(kd_weights, counts)] or [[0.0, 0.0]]
    weights[0][0] = cfg.ce_weight * scale / max(counts[0]["ce"], 1)  # the text is learned once
    window = [to_device(batch, job.device) for batch in window]
    signals = [teacher_signals(lesson, [batch[i] for batch in window])
               for i, lesson in enumerate(job.lessons)]
    if len(job.lessons) > 1 and cfg.teacher_weights != "fixed":
        window = [weigh_teachers(cfg, batch, [scores[m] for _, _, scores, _ in signals])
                  for m, batch in enumerate(window)]
    lr, sums = job.engine.get_lr()[-1], torch.zeros(len(weights), 2, device=job.device)
    for m, batch in enumerate(window):
        how = [dict(tiles=b["tiles"], weights=w, params=job.params, teacher_rows=None, kd_loss=None,
                    travels=b.get("travels"), sequence=job.sequence) for b, w in zip(batch, weights)]
        for own, (rows, kd_loss, *_) in zip(how, signals):
            own |= dict(teacher_rows=rows[m], kd_loss=kd_loss)
        loss, found = job.student(batch[0], partial(lesson_sums, lessons=how))
        sums += found
        job.engine.backward(loss)
        grad_norm = gradient_norm(job.engine)
        job.engine.step()
    give_back(job)
    sums = global_sums(sums.flatten(), job.device).view(-1, 2).tolist()
    ce = sums[0][0] / max(counts[0]["ce"], 1)
    metrics = {"loss": cfg.ce_weight * ce, "lr": lr}
    metrics["grad_norm"] = float(job.engine.get_global_grad_norm() or grad_norm)
    metrics |= {"ce": ce} if cfg.ce_weight else {}
    for lesson, weight, count, (_, kd), (*_, payload) in zip(job.lessons, kd_weights, counts, sums, signals):
        kd /= max(count["kd"], 1)
        metrics["loss"] += weight * kd
        own = {"kd": kd, "aligned_bytes": count["aligned_bytes"] / max(count["text_bytes"], 1),
               "aligned_tokens": count["aligned_tokens"] / max(count["ce"], 1)}
        own |= {key: count[key] / max(count["source_bytes"], 1) for key in DROPPED}
        own |= {key: count[key] / max(count["chunks"], 1) for key in CHUNKS[1:]}
        own |= {"skipped_chats": int(count["skipped_chats"]), "teacher_bytes_per_token": payload}
        own |= {"kd_weight": weight} if len(job.lessons) > 1 or cfg.dynamic_scale else {}
        if cfg.dynamic_scale and kd > 0:
            job.scales[lesson.name] = float(dynamic_scale(torch.tensor(ce), torch.tensor(kd)))
        metrics |= of_lesson(job, lesson, own)
    return metrics | {"tokens": int(counts[0]["ce"]), "stop": stops > 0}


def give_back(job):
    """What teachers on ranks of their own have said is not needed any more."""
    if job.link:
        job.link.give_back()


def of_lesson(job, lesson, metrics):
    """With several teachers the names of their metrics end in theirs."""
    return {f"{key}/{lesson.name}" if len(job.lessons) > 1 else key: value for key, value in metrics.items()}


def teacher_signals(lesson, window):
    """(rows of teacher logits of every micro-batch, the loss that reads them, scores, bytes a position)."""
    with ExitStack() as stack:
        for teacher in lesson.teachers:
            stack.enter_context(teacher.awake())
        teachers, kind = [lesson.rows(batch) for batch in window], lesson.cfg.teacher_weights
    payload = payload_bytes(teachers[0]) / window[0]["teacher_ids"].numel()
    scores = [None] * len(window)
    if kind in ("ce", "entropy", "max_prob", "select"):
        kind = "ce" if kind == "select" else kind
        scores = [sample_scores(rows, batch, kind) for rows, batch in zip(teachers, window)]
    if not lesson.keeps_columns:
        return teachers, lesson.distillation.loss, scores, payload
    kept_K = kept_columns(lesson, window, teachers)
    return [rows.columns(kept_K) for rows in teachers], lesson.distillation.keep(kept_K), scores, payload


def weigh_teachers(cfg, batch, scores_M):
    """The micro-batch of every teacher, each sample weighing as much as the teacher's score says."""
    weights_MB = teacher_weights(torch.stack(scores_M), cfg.teacher_alpha, cfg.teacher_weights == "select")
    return [own | {"tiles": weigh_samples(own["tiles"], own["sample_of_row"], weight_B)}
            for own, weight_B in zip(batch, weights_MB)]


def global_sums(values, device):
    """(n,) float64 on the CPU: the sum over all ranks, equal on every rank."""
    total = torch.as_tensor(values, dtype=torch.float64).to(device, copy=True)
    dist.all_reduce(total)
    return total.cpu()


def kept_columns(lesson, window, teachers):
    """Sorted teacher columns that projection_kl compares in this step, the same on every rank."""
    device = window[0]["teacher_ids"].device
    importance = torch.full((len(lesson.side.table),), -torch.inf, device=device)
    for batch, rows in zip(window, teachers):
        teacher = TeacherBlocks(rows, batch["tiles"])
        for fetched in teacher.fetches:
            importance = torch.maximum(importance, teacher_importance(teacher.fetch(fetched)[None]))
    dist.all_reduce(importance, op=dist.ReduceOp.MAX)
    return importance.topk(lesson.cfg.projection_topk).indices.sort().values


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
    lessons = [(lesson.rows, lesson.distillation) for lesson in job.lessons]
    bits, found = evaluate(on_device(job, batches), job.student, lessons, job.sequence)
    job.engine.train()
    result = {"student_bits_per_byte": bits}
    for lesson, own in zip(job.lessons, found):
        result |= of_lesson(job, lesson, own)
    return {f"eval/{key}": value for key, value in result.items()}


def on_device(job, batches):
    """Held-out batches of every teacher, one after the other."""
    for own in batches:
        yield [to_device(batch, job.device) for batch in own]
        give_back(job)


def save(job, step):
    """All ranks take part."""
    cfg = job.cfg
    save_checkpoint(job.engine, checkpoint_folder(cfg), step, run_identity(cfg), run_layout(cfg),
                    cfg.keep_checkpoints, {"scales": job.scales})


def checkpoint_folder(cfg):
    return Path(cfg.output_dir) / "checkpoints"


def run_identity(cfg):
    """What has to be the same when a run goes on, else its next loss would be another."""
    flags = {key: value for key, value in asdict(cfg).items() if key not in FREE_ON_RESUME}
    ds_config = read_ds_config(cfg.ds_config)
    total = batch_sizes(ds_config, dist.get_world_size() // cfg.sequence_parallel, cfg.ds_config)[0]
    kept = {key: value for key, value in ds_config.items() if key not in (*BATCH_KEYS, *FREE_KEYS)}
    return flags | {"samples_per_step": total, "ds_config": kept}


def run_layout(cfg):
    """What a checkpoint depends on beside the run's identity."""
    ds_config = read_ds_config(cfg.ds_config)
    sizes = batch_sizes(ds_config, dist.get_world_size() // cfg.sequence_parallel, cfg.ds_config)
    return {"ranks": dist.get_world_size(), "sequence_parallel": cfg.sequence_parallel,
            "zero_stage": ds_config.get("zero_optimization", {}).get("stage", 0), "micro_batch": sizes[1]}


# --- main -----------------------------------------------------------------------------------------


def main(cfg):
    silence_libraries()
    try:
        roles = split_ranks(cfg.teacher_ranks) if cfg.teacher_ranks and cfg.kd_weight else None
    except ValueError as error:
        fail(str(error))
    device = start_distributed()
    if roles and roles.role == "teacher":
        return serve_teachers(cfg, roles, device)
    with fail_together(roles, "inputs"):
        inputs = check_inputs(cfg, device, roles)
    if roles and roles.local == 0:
        lists = [what_to_load(lesson, None) for lesson in inputs.lessons]
        roles.publish("what to load", sum(lists, []))
    transformers.set_seed(cfg.seed + dist.get_rank())
    with fail_together(roles, "models"):
        job = build_job(cfg, inputs, device, roles)
    with report_dead_ranks(roles), ExitStack() as stack:
        stack.callback(end_workers)
        if roles:
            connect(job, roles)
            stack.push(partial(leave, job.link))
        with fail_together():
            if cfg.tiled:
                check_heads(job, list(range(min(8, job.vocab))))
            if cfg.sequence_parallel > 1:
                check_parts(job)
            if cfg.pack:
                check_packing(job)
        start = 0
        if inputs.checkpoint:
            start, state = load_checkpoint(job.engine, inputs.checkpoint, inputs.convert)
            job.scales = state.get("scales", {})
        train(job, *batches_of(cfg, inputs, job, start), start, inputs.ds_config)
    if cfg.learn_projection:
        learned = inputs.lessons[0].distillation.projection
        export_projection(job.engine, learned, Path(cfg.output_dir) / "projection.pt")
    if cfg.export:
        export_model(job.engine, inputs.student.tokenizer, cfg.export)


def leave(link, kind, *_):
    """At a clean end tell the teachers; after an error no one waits for them to listen."""
    if kind is None or issubclass(kind, SystemExit):
        link.leave()


def serve_teachers(cfg, roles, device):
    """What a rank that is for teachers alone does, until the student's ranks leave."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the student takes a checkpoint first
    with fail_together(roles, "inputs"):
        pass  # the student's ranks read them
    with fail_together(roles, "models"):
        teachers = [load_teacher(path, vocab, dtype, device, *how, shared=True)
                    for path, vocab, dtype, _, *how in roles.read("what to load")]
    with report_dead_ranks(roles):
        serve(roles, teachers, alike_on_node(roles, cfg.sequence_parallel), cfg.tiled)


def batches_of(cfg, inputs, job, start):
    """(iterator over this rank's micro-batches from step `start` on, iterable over its held-out ones)."""
    parts = cfg.sequence_parallel  # ranks of a sequence group read the same samples
    rank, ranks = dist.get_rank() // parts, dist.get_world_size() // parts
    memory = cfg.loss_memory_mib if cfg.tiled else math.inf
    collate = collate_all(cfg, inputs, memory, CPU_SUB_TILES if job.device.type == "cpu" else GPU_SUB_TILES)
    micro = job.engine.train_micro_batch_size_per_gpu()
    read = Reader(cfg.text_key, cfg.route_key)
    stream = (StreamedRows if cfg.streaming else ShuffledRows)(inputs.train_rows, read, cfg.seed)
    micro_steps = job.engine.gradient_accumulation_steps()
    batches = MicroBatches(stream, collate, micro, micro_steps, rank, ranks, start)
    held_out = HeldOutBatches(inputs.held_out_rows, read, collate, micro, rank, ranks)
    return iter(loader(batches, cfg.num_workers)), loader(held_out, 0)


def collate_all(cfg, inputs, tile_mib, parts=CPU_SUB_TILES):
    """Texts -> a batch for every teacher; one of the text alone where there is none."""
    sides = [(lesson.side, lesson.distillation.spelling) for lesson in inputs.lessons] or [(None, None)]
    routes = [routes_of_each_teacher(cfg).get(lesson.name) for lesson in inputs.lessons]
    how = cfg.train_on, tile_mib, parts, dist.get_rank() % cfg.sequence_parallel, cfg.sequence_parallel
    return CollateAll([Collate(inputs.student, *pair, *how) for pair in sides], routes, cfg.pack)


def train(job, batches, held_out, start, ds_config):
    """From step `start` to the last one; ends early, with a checkpoint, when a rank gets SIGTERM.

    Args:
        batches: iterator over this rank's micro-batches, from `start` on.
        held_out: iterable over its held-out batches.
    """
    cfg, told = job.cfg, []
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in job.engine.module.parameters())
    device_name = torch.cuda.get_device_name() if job.device.type == "cuda" else "cpu"
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    log = Log(cfg, start, ds_config)
    times_collectives = ds_config.get("comms_logger", {}).get("enabled")
    if times_collectives:
        time_collectives()
    if cfg.eval_rows and start == 0:
        log.write(0, run_evaluation(job, held_out))
    upcoming = None
    for step in range(start + 1, cfg.steps + 1):
        begin = time.perf_counter()
        evaluates = cfg.eval_rows and (step == cfg.steps or (cfg.eval_every and step % cfg.eval_every == 0))
        window = upcoming or next_window(job, batches)
        ahead = job.link and step < cfg.steps and not evaluates  # for which teachers are asked in its turn
        upcoming = next_window(job, batches) if ahead else None
        metrics = train_step(job, window, stop=bool(told))
        stop, seconds = metrics.pop("stop"), time.perf_counter() - begin
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}
        metrics |= utilization(device_name, parameters, metrics["tokens"], seconds, dist.get_world_size())
        log.write(step, metrics)
        log.advance(metrics)
        if times_collectives and step == min(start + TIMED_STEPS, cfg.steps):
            deepspeed.comm.log_summary()
            deepspeed.comm.comm.comms_logger.enabled = False
        if evaluates:
            log.write(step, run_evaluation(job, held_out))
        if stop or (cfg.save_every and step % cfg.save_every == 0):
            save(job, step)
        if stop:
            log.close()
            raise SystemExit(128 + signal.SIGTERM)
    log.close()


def next_window(job, batches):
    """Micro-batches of a step; teachers on ranks of their own start on them at once."""
    window = [next(batches) for _ in range(job.engine.gradient_accumulation_steps())]
    for i, lesson in enumerate(job.lessons if job.link else ()):
        for batch in window:
            lesson.ask(batch[i])
    return window


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
