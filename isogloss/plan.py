"""Say what a run needs before it is started: memory of a rank, a layout that fits, hours.

    python -m isogloss.plan recipes/qwen3_4b_to_llama_3.2_1b.yaml --gpus 16 --gpu_gib 80

P weights of which Pt are trained, b bytes each (2 in bf16 and fp16, else 4), N ranks that share the
optimizer's state, n = samples x positions of a micro-batch on a rank, m micro-batches in a step.
Of a layer h is the hidden size, i the MLP's, q = heads x head size, kv = key-value heads x head
size.  In bytes of one rank:

    weights      b P               stage 3: b P / N, and 2 b x the widest layer or, if that is more,
                 b x half of stage3_max_reuse_distance, at most b P: the last layers stay gathered
                 until backward; with --quantize 9 / 16 of a byte for each of the layers' own
    optimizer    8 Pt (AdamW) + 4 Pt (float32 weights, not at stage 0 in float32); from 1 on / N
    gradients    b Pt              stages 2, 3: b Pt / N, and 2 b x bucket; at stage 3 they stay
    activations  n x layers x (8 h + 4 b h + b (3 q + 2 kv) + 4 b i)
                 with checkpointing n b h x layers and one layer as above
    loss         loss_memory_mib + 4 x head            the head's gradient, where it is trained
    teacher      b_t (layers / degree + embedding + head), its head / degree once more where it is
                 sharded, tables of 310 bytes a token of both vocabularies, and until the loss
                 m n_t h_t b_t (hidden states), m n_t W b_t (logits), 8 m n_t k (topk)
    terms        1,300 m n: what ids tell of the terms between two vocabularies
    step         (b + 12) Pt / N, at stage 3 12 Pt / N, at stage 0 (b + 8) Pt, on CPUs (b + 4) Pt:
                 gradients, in float32, clipped, square roots

The peak is what stays (weights, optimizer, teachers) and the largest of three: the teacher's
forward pass, the backward pass (gradients, activations, loss, teacher's outputs), the step.  A
GPU's own context, NCCL's buffers and fragmentation are taken as 2 GiB: a guess, as all here is
unmeasured on GPUs.  docs/LOG.md has the errors measured on CPU ranks.

A student's rank computes, in a step, 6 P n m operations (4 of a frozen weight; 2 more with
checkpointing), and 2 of each weight of a teacher for its positions; of experts, those that a token
passes.  Attention, losses and what a student writes are left out, so with --on_policy and with
servers no hours are said.  Teachers on ranks of their own work beside them.  A step takes as long
as the slower of the two, at a share of the peak (--mfu), if what is sent hides behind it.  A share
of 0.17 is what one H200 reached with a student of 1.2 B weights whose teacher had twelve of
Qwen3-4B's layers (docs/log/2026-11.md, "a GPU that waits for launches"); 989 TFLOP/s is an H100's
peak in bfloat16.

What distill.py refuses of a layout is refused here too, by the same checks.  Sizes of models come
from their config.json, or from isogloss/architectures.yaml where there is none.
Tests: tests/test_plan.py, tests/test_plan_memory.py.
"""

import itertools
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("plan"))

import torch
import yaml
from transformers import AutoConfig

from isogloss.config import Config, configs_by_teacher
from isogloss.flags.model_names import is_address, read_model_name
from isogloss.flags.parse import parse_flags
from isogloss.job.layout import teacher_groups
from isogloss.job.several.roles import Roles, check_teacher_ranks
from isogloss.models.pretrained import config_of_weights_here
from isogloss.models.quantized import BYTES
from isogloss.models.tied import empty_model, is_tied
from isogloss.student.ds_config import batch_sizes, read_ds_config, resolve_ds_config
from isogloss.student.stages import check_pipeline_layout, num_weights
from isogloss.student.ulysses import check_sequence_layout
from isogloss.teachers.model import checked_engine

GIB = 2**30
ARCHITECTURES = Path(__file__).with_name("architectures.yaml")
OF_THE_GPU = 2 * GIB  # context, NCCL, fragmentation: not measured
TABLES = 310  # bytes a token, of piece_kl's tables; measured with vocabularies of 512 and 14,019
# Bytes a position, of piece_kl: 330 for Qwen 2 <- Llama 3, 1,280 the other way round, 1,360 for
# Llama 2 <- Qwen 2.
TERMS = 1300
AUTO_MIB = 4096  # --loss_memory_mib auto: an eighth of what is free, so that it always fits
USABLE = 0.95  # of a GPU's memory, so that a longer text than most still fits; chosen
# The comment of a recipe that says what it is for.
GPUS = re.compile(r"^# GPUs: (\d+) of ([\d.]+) GiB(?:, (\d+) on a node)?$", re.MULTILINE)


# --- models ---------------------------------------------------------------------------------------


@dataclass
class Shape:
    """Hold the sizes of a model.

    Attributes:
        weights: in all; layer: of the widest layer; head: of the lm_head, embedding included.
        tied: head and embedding are one.
        hidden, inner, heads, kv_heads: widths; the latter two are heads x head size.
        layers: their number.
        vocab: rows of the head.
        names: {name of a linear layer: [(out, in)]}, for adapters.
        active: fraction of the weights that a token passes, fewer than all where it has experts.
        config: of the whole model.
    """

    weights: int
    layer: int
    head: int
    tied: bool
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    names: dict
    active: float
    config: object


@cache
def shape_of(role, path, trust_remote_code=False):
    """Return the Shape of a model.

    Raises:
        ValueError: its config is neither in a directory, nor on the hub, nor in the table.
    """
    model = _empty_model(role, path, trust_remote_code)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = 0
    kv_heads = 0
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    for layer in layers:
        head_size = max(head_size, getattr(layer, "head_dim", None) or config.hidden_size // heads)
        kv_heads = max(kv_heads, getattr(layer, "num_key_value_heads", None) or heads)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    head = model.get_output_embeddings()
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            names.setdefault(name.rpartition(".")[2], []).append(tuple(module.weight.shape))
    return Shape(
        weights=num_weights(model), layer=_widest_layer(model, config.num_hidden_layers),
        head=head.weight.numel(), tied=is_tied(model),
        hidden=config.hidden_size, inner=inner, heads=heads * head_size,
        kv_heads=kv_heads * head_size, layers=config.num_hidden_layers,
        vocab=head.weight.shape[0], names=names, active=_active_fraction(model),
        config=model.config)


def _active_fraction(model):
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    idle = 0
    for name, parameter in model.named_parameters():
        if chosen and ".experts." in name:
            idle += parameter.numel() * (1 - chosen / len(parameter))
    return 1 - idle / num_weights(model)


def _empty_model(role, path, trust_remote_code):
    table = yaml.safe_load(ARCHITECTURES.read_text()) if ARCHITECTURES.exists() else {}
    base = read_model_name(role, path).base
    if not Path(base).is_dir() and base in table:
        values = {key: table[base][key] for key in table[base].keys() - {"source", "published"}}
        config = AutoConfig.for_model(**values)
    else:
        try:
            config = config_of_weights_here(role, path, trust_remote_code)
        except ValueError as error:
            raise ValueError(f"{error}; {ARCHITECTURES.name} has the sizes of "
                             f"{', '.join(table)}") from None
    return empty_model(config, trust_remote_code)


def _widest_layer(model, num_layers):
    lists = [module for module in model.modules()
             if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers]
    return max(map(num_weights, itertools.chain(*lists)), default=0)


def adapter_weights(shape, cfg):
    """Return how many weights an adapter has, r x (in + out) for each of its layers."""
    targets = [target.strip() for target in cfg.lora_targets.split(",") if target.strip()]
    total = 0
    for name in targets or shape.names:
        for sizes in shape.names.get(name, []):
            total += cfg.lora_r * sum(sizes)
    return total


def ends_of(shape):
    """Return how many weights embedding and head have."""
    return shape.head * (1 if shape.tied else 2)


def trained_weights(cfg, weights, adapter, shape):
    """Return how many weights are trained, of some later than of others.

    Args:
        weights: of the student; adapter: those of its adapter, or 0.
    """
    if cfg.lora_r:
        return adapter + (ends_of(shape) if cfg.lora_embeddings else 0)
    return ends_of(shape) if cfg.train_only and not cfg.freeze_until else weights


# --- what a rank needs ----------------------------------------------------------------------------


@dataclass
class PlannedLayout:
    """Hold what the flags and the ds_config say of a run.

    Attributes:
        cfg: Config; stage: of ZeRO; bytes: of a weight in training.
        ranks: of the student; teachers have ranks of their own where cfg says so.
        per_node: ranks of the student on a node.
        micro_batch, micro_batches: samples of one, and how many a step has.
        bucket: elements that are reduced at a time.
        reuse: weights that stage 3 may use before it needs some again, which then stay gathered.
        on_gpu: the ranks are GPUs.
    """

    cfg: Config
    stage: int
    bytes: int
    ranks: int
    per_node: int
    micro_batch: int
    micro_batches: int
    bucket: int
    reuse: int
    on_gpu: bool

    @property
    def sharers(self):
        return self.ranks // self.cfg.pipeline_parallel

    @property
    def positions(self):
        return self.micro_batch * self.cfg.max_length // self.cfg.sequence_parallel

    @property
    def teacher_ranks(self):
        """(ranks that hold teachers, those of them on a node)."""
        per_node = self.cfg.teacher_ranks or self.per_node
        return self.ranks // self.per_node * per_node, per_node


def layout_of(cfg, num_ranks, hidden_size, on_gpu=True, stage=None, per_node=0):
    """Return the PlannedLayout of a run.

    Args:
        num_ranks: of the job; stage: another one than the ds_config says, or None.
        per_node: ranks of a node; 0: all.
    Raises:
        ValueError: see `read_ds_config`, `resolve_ds_config`.
    """
    per_node = per_node or num_ranks
    check_teacher_ranks(cfg.teacher_ranks, per_node)
    teacher_groups(num_ranks, per_node, 1)  # nodes are alike
    ranks = num_ranks // per_node * (per_node - cfg.teacher_ranks)
    raw = read_ds_config(cfg.ds_config)
    config = resolve_ds_config(raw, cfg, ranks, hidden_size, on_gpu)
    sizes = batch_sizes(raw, ranks // cfg.ranks_per_reader, cfg.ds_config)
    zero = config.get("zero_optimization", {})
    half = any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    return PlannedLayout(
        cfg, zero.get("stage", 0) if stage is None else stage, 2 if half else 4, ranks,
        per_node - cfg.teacher_ranks, sizes.micro_batch_size, sizes.grad_accum_steps,
        int(zero.get("reduce_bucket_size", 5e8)),
        int(zero.get("stage3_max_reuse_distance", 1e9)), on_gpu)


@dataclass
class Need:
    """Hold the bytes of a rank: what stays, what comes and goes.

    Attributes:
        operations: that a rank computes in a step; beside: those of a rank of teachers.
        tokens: positions of a step on all ranks.
    """

    stays: dict
    backward: dict
    teacher_pass: int
    step: int
    operations: float = 0.0
    beside: float = 0.0
    tokens: int = 0

    @property
    def state(self):
        return sum(self.stays.values())

    @property
    def peak(self):
        return self.state + max(sum(self.backward.values()), self.teacher_pass, self.step)

    def fits(self, gpu_gib):
        return self.peak <= USABLE * gpu_gib * GIB


def plan(cfg, num_ranks, on_gpu=True, stage=None, per_node=0):
    """Return the Need of a rank of a run.

    Args:
        cfg: Config; num_ranks: of the job; on_gpu: false as on CPU ranks.
        stage: of ZeRO, if another one than the ds_config says.
        per_node: ranks of a node; 0: all.
    Raises:
        ValueError: what distill.py refuses of the layout too.
    """
    student = shape_of("student", cfg.student, cfg.trust_remote_code)
    layout = layout_of(cfg, num_ranks, student.hidden, on_gpu, stage, per_node)
    check_student_layout(layout, student)
    teachers = []
    if cfg.kd_weight:
        for teacher_cfg in configs_by_teacher(cfg).values():
            shape = shape_of("teacher", teacher_cfg.teacher_path, cfg.trust_remote_code)
            has_weights = teacher_cfg.teacher_kind.has_weights
            engine = ""
            if has_weights:
                engine = checked_engine(teacher_cfg, shape.config, *layout.teacher_ranks)
            teachers.append((teacher_cfg, shape, engine))
    return need_of(layout, student, teachers)


def check_student_layout(layout, shape):
    """Refuse what distill.py refuses of the student's layout."""
    cfg = layout.cfg
    config = shape.config.get_text_config()
    if cfg.sequence_parallel > 1:
        check_sequence_layout(cfg.sequence_parallel, layout.ranks, config)
    if cfg.pipeline_parallel > 1:
        roles = None
        if cfg.teacher_ranks:
            roles = Roles("student", 0, 0, layout.per_node, cfg.teacher_ranks, None)
        raw = read_ds_config(cfg.ds_config)
        raw["zero_optimization"] = raw.get("zero_optimization", {}) | {"stage": layout.stage}
        check_pipeline_layout(cfg, config, raw, layout.ranks, roles)


def need_of(layout, student, teachers):
    """Return the Need of a rank.

    Args:
        teachers: list of (Config of its values, Shape, engine).
    """
    need = Need(Counter(), {}, 0, 0)
    _add_student(need, layout, student)
    for teacher_cfg, shape, engine in teachers:
        _add_teacher(need, layout, teacher_cfg, shape=shape, engine=engine)
        need.stays["vocabulary tables"] += TABLES * (student.vocab + shape.vocab)
        need.stays["terms"] += TERMS * layout.micro_batches * layout.positions
    if layout.on_gpu:
        need.stays["context, buffers, fragments"] = OF_THE_GPU
    return need


def _add_student(need, layout, shape):
    cfg = layout.cfg
    b = layout.bytes
    sharers = layout.sharers
    weights = shape.weights // cfg.pipeline_parallel
    adapter = adapter_weights(shape, cfg) if cfg.lora_r else 0
    weights += adapter
    trained = trained_weights(cfg, weights, adapter, shape)
    is_sharded = layout.stage >= 1
    optimizer = 8 * trained
    if is_sharded or b < 4:
        optimizer += 4 * trained
    need.stays["weights"] = b * weights
    if cfg.quantize:  # all but embedding, head and adapter
        outer = ends_of(shape) + adapter
        need.stays["weights"] = int(b * outer + BYTES * (weights - outer))
    if layout.stage == 3:
        need.stays["weights"] = b * weights // sharers
        # DeepSpeed keeps its buffer of gradients
        need.stays["gradients"] = b * trained // sharers
        need.backward["gathered weights"] = b * max(
            2 * max(shape.layer, shape.head), min(weights, layout.reuse // 2))
    need.stays["optimizer"] = optimizer // (sharers if is_sharded else 1)
    gradients = b * trained
    if layout.stage >= 2:
        need.backward["buckets"] = 2 * b * min(layout.bucket, trained)
        gradients = b * trained // sharers if layout.stage == 2 else 0
    need.backward["gradients"] = gradients
    need.backward["activations"] = activation_bytes(layout, shape)
    head = 0 if cfg.lora_r and not cfg.lora_embeddings else 4 * shape.head
    need.backward["loss"] = (cfg.loss_memory_mib or AUTO_MIB) * 2**20 + head
    need.step = b * trained + 4 * trained * (2 if layout.on_gpu else 1)
    if is_sharded:
        need.step = (b * (layout.stage < 3) + 12) * trained // sharers
    frozen = weights - trained
    recomputed = 2 * weights * cfg.activation_checkpointing
    of_position = (6 * trained + 4 * frozen + recomputed) * shape.active
    need.operations += of_position * layout.positions * layout.micro_batches
    readers = layout.ranks // cfg.ranks_per_reader
    need.tokens = readers * layout.micro_batches * layout.micro_batch * cfg.max_length
    has_replica = layout.stage == 3 and cfg.rollout_replica
    if cfg.on_policy and (has_replica or cfg.pipeline_parallel > 1):
        need.stays["replica that writes"] = b * shape.weights


def activation_bytes(layout, shape):
    """Return the bytes that autograd keeps of the student's layers for backward."""
    cfg = layout.cfg
    b = layout.bytes
    # two norms that compute in float32, attention, the MLP's four products
    layer = 2 * (4 + 2 * b) * shape.hidden
    layer += b * (3 * shape.heads + 2 * shape.kv_heads)
    layer += 4 * b * shape.inner // cfg.mlp_tiles
    layers = shape.layers // cfg.pipeline_parallel
    if not cfg.activation_checkpointing:
        return layout.positions * layer * layers
    kept = 0 if cfg.activation_offload else b * shape.hidden * layers
    return layout.positions * (layer + kept)


def _add_teacher(need, layout, cfg, *, shape, engine):
    b = 4 if cfg.teacher_dtype == "float32" else 2
    positions = layout.micro_batch * (cfg.teacher_max_length or cfg.max_length)
    # of all micro-batches, because teachers are asked before the step
    kept = {"hidden": b * shape.hidden, "logits": b * shape.vocab,
            "topk": 8 * min(cfg.teacher_output_topk, shape.vocab)}
    output = cfg.teacher_kind.only_output or cfg.teacher_output
    need.backward[f"outputs of {cfg.teacher}"] = layout.micro_batches * positions * kept[output]
    if not cfg.teacher_kind.has_weights:
        return
    operations = 2 * positions * layout.micro_batches * shape.weights * shape.active
    if layout.cfg.teacher_ranks:  # which run the samples of all readers
        teacher_ranks, _ = layout.teacher_ranks
        readers = layout.ranks // layout.cfg.ranks_per_reader
        need.beside += operations * readers / teacher_ranks
    else:
        need.operations += operations / layout.cfg.ranks_per_reader
    weights = b * shape.weights
    if engine != "replicated":  # the head is sharded, and whole beside that for the loss
        weights = int(weights * _fraction_of_rank(layout, cfg, engine, shape)) + b * shape.head
    if cfg.teacher_offload:
        need.backward[f"head of {cfg.teacher}"] = b * shape.head
    elif not layout.cfg.teacher_ranks:
        need.stays[f"weights of {cfg.teacher}"] = weights
    widest = b * positions * (4 * shape.hidden + 3 * shape.inner) + 4 * b * positions * shape.heads
    offloaded = weights if cfg.teacher_offload else 0
    need.teacher_pass = max(need.teacher_pass, widest + offloaded)


def _fraction_of_rank(layout, cfg, engine, shape):
    """Return the fraction of a sharded teacher's weights that a rank holds."""
    if engine == "zero3":
        return 1 / layout.ranks
    if engine == "vllm":
        return 1 / cfg.teacher_tp
    from isogloss.teachers.engines.plans import plan_of

    whole = plan_of(shape.config, cfg.teacher_tp, cfg.trust_remote_code).whole_fraction
    return whole + (1 - whole) / cfg.teacher_tp


# --- what to choose -------------------------------------------------------------------------------


def words_of(cfg, stage):
    """Say of a layout what there is to choose."""
    words = [f"ZeRO {stage}"]
    words += ["--activation_checkpointing"] * cfg.activation_checkpointing
    words += ["--activation_offload"] * cfg.activation_offload
    words += [f"--teacher_tp {cfg.teacher_tp}"] * (cfg.teacher_tp > 1)
    return ", ".join(words)


def choices(cfg, num_ranks, per_node):
    """List (words, Need) of layouts to choose from, none of which distill.py refuses."""
    needs = []
    stages = (1, 2, 3)  # stage 0 sends as much as 1, and takes more
    if cfg.pipeline_parallel > 1:
        stages = (1,)
    elif num_ranks == 1:
        stages = (0,)
    degrees = [1]
    if cfg.kd_weight and cfg.teacher_kind.has_weights and not cfg.teachers:
        degrees = [degree for degree in (1, 2, 4, 8) if per_node % degree == 0]
    for stage, degree, checkpointing in itertools.product(stages, degrees, (False, True)):
        other = replace(cfg, activation_checkpointing=checkpointing, activation_offload=False,
                        teacher_tp=cfg.teacher_tp if cfg.teachers else degree)
        with suppress(ValueError):
            need = plan(other, num_ranks, stage=stage, per_node=per_node)
            needs.append((words_of(other, stage), need))
    return needs


def advice(needs, gpu_gib):
    """Return the words and the Need of the first choice that fits, or None.

    Args:
        needs: list of (words, Need); the first ones shard and recompute least.
    """
    return next((entry for entry in needs if entry[1].fits(gpu_gib)), None)


# --- command line ---------------------------------------------------------------------------------


def gpus_of(args):
    """Return (GPUs, GPUs of a node, GiB of one), where flags win over the recipe's comment."""
    stated = GPUS.search(Path(args.recipe).read_text())
    gpus, gib, per_node = stated.groups() if stated else (8, 80, None)
    num_gpus = args.gpus or int(gpus)
    per_node = args.per_node or min(num_gpus, int(per_node or 8))
    return num_gpus, per_node, args.gpu_gib or float(gib)


def lines_of(need, gpu_gib):
    """Return the lines of a table of a Need."""
    def line(name, value):
        return f"  {value / GIB:8.2f}  {name}"

    verdict = "fits" if need.fits(gpu_gib) else "DOES NOT FIT"
    return ["GiB of a rank that stay:",
            *[line(name, value) for name, value in need.stays.items() if value],
            "while the gradient is computed:",
            *[line(name, value) for name, value in need.backward.items() if value],
            "or, if that is more:", line("a teacher's forward pass", need.teacher_pass),
            line("the optimizer's step", need.step),
            line(f"at most; {verdict} {USABLE:.0%} of {gpu_gib:g} GiB", need.peak)]


def time_of(need, cfg, args):
    """Return (seconds of a step, tokens a second, hours of the run)."""
    seconds = max(need.operations, need.beside) / (args.mfu * args.tflops * 1e12)
    return seconds, need.tokens / seconds, seconds * cfg.steps / 3600


def time_line(need, cfg, args):
    """Return the line about time, or why there is none: some work is not counted."""
    teachers = configs_by_teacher(cfg).values() if cfg.kd_weight else ()
    if cfg.on_policy:
        return "no hours are said: how fast the student writes is not known"
    if any(is_address(its.teacher) for its in teachers):
        return "no hours are said: what a server's GPUs compute is not counted"
    if cfg.epochs:
        return "no hours are said: how many rows --epochs reads is not known"
    seconds, speed, hours = time_of(need, cfg, args)
    return (f"{cfg.steps:,} steps of {seconds:.3g} s ({speed:,.0f} tokens a second): {hours:.3g} "
            f"hours without evaluations, if GPUs reach {args.mfu:.0%} of {args.tflops:g} TFLOP/s "
            "and sending hides behind that")


def gain_of(need, stated):
    """Say how much less a choice computes than what a recipe states; "" where it is not less."""
    computed = [max(each.operations, each.beside) for each in (need, stated)]
    saved = 1 - computed[0] / computed[1]
    return f"; the choice trains by {saved:.0%} fewer operations" if saved > 0.005 else ""


def main(args):
    """Print what a recipe needs and what to choose."""
    cfg = parse_flags(Config, [f"--config={args.recipe}"], file_flag="config")
    num_gpus, per_node, gpu_gib = gpus_of(args)
    print(f"{args.recipe} on {num_gpus} GPUs of {gpu_gib:g} GiB, {per_node} on a node")
    stated = plan(cfg, num_gpus, per_node=per_node)
    print(*lines_of(stated, gpu_gib), time_line(stated, cfg, args), sep="\n")
    best = advice(choices(cfg, num_gpus, per_node), gpu_gib)
    if best is None:
        print("choose: nothing here fits; more GPUs, --teacher_offload, --sequence_parallel, a "
              "smaller micro-batch or an adapter (--lora_r) would need less")
        return
    words, need = best
    print(f"choose: {words} ({need.peak / GIB:.1f} GiB at most); of the layouts that fit it shards "
          "and recomputes least")
    stage = read_ds_config(cfg.ds_config).get("zero_optimization", {}).get("stage", 0)
    if words != words_of(cfg, stage):
        print(f"the recipe has {words_of(cfg, stage)} ({stated.peak / GIB:.1f} GiB at most)"
              f"{gain_of(need, stated)}")
