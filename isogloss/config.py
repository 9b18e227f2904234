"""The flags of distill.py: what they mean, what they may be, and the same for each of several teachers."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from projection_tools.flags import check_types
from isogloss.objective import ALM_MODES, ANY_TOKENIZERS, ONE_TOKENIZER
from isogloss.teachers import ENGINES, SIGNALS


@dataclass(kw_only=True)
class Config:
    """Distill a frozen teacher into a student.

    Args:
        student: hub id or directory of the model to train; its tokenizer needs an eos token.
        teacher: hub id or directory of the frozen teacher; not needed with kd_weight 0.
        teachers: several of them instead, a JSON list: [{"model": "A", "weight": 2, "loss": "gold"},
            {"model": "B", "tp": 2}].  Beside model: name (for its metrics), weight (times kd_weight), tp,
            engine, dtype, max_length, offload, and these flags in place of the run's own: loss, temperature,
            projection, projection_topk, uncommon_topk, reverse, alm_mode, beta, skew, alpha, top_k, exchange,
            exchange_topk.
        teacher_weights: fixed, or for each sample shares by how sure the teachers are of it: ce (nats per
            byte of its text), entropy, max_prob; or select: the teacher with the lowest ce alone; or mean_p,
            mean_logits: one loss, that of the first, against the mean of teachers with one tokenizer.
        teacher_alpha: shares are softmax(teacher_alpha * score); 0: equal ones.
        route_key: column whose value says which teachers a row is for: those with it in their "routes", a
            list, as in {"model": "A", "routes": ["maths"]}; teachers without routes take the other rows.
        normalize_by_vocab: divide the weight of each of several teachers by log W / log of the smallest W.
        data: hub id (org/name or org/name:config), file, directory or glob: .txt .jsonl .json .parquet
            .arrow .csv.
        text_key: column that holds the text, or chats: lists of {"role", "content"}.
        train_on: what to learn of a chat: assistant (what it says, and to end its turn) or all.
        split: split of a hub data set.
        streaming: read the data as a stream instead of preparing it on disk first.
        eval_rows: rows held out of training, the first ones of the data; 0: none.
        steps: optimizer steps in all, 1 or more.
        pack: put several texts of a micro-batch into one row where they fit into max_length (and the
            teacher's); attention stays inside each, and the loss is the same.
        max_length: student positions per sample, 2 or more; longer texts are cut, both sides at the same
            byte.
        teacher_max_length: teacher positions per sample; 0: the teacher's context.
        loss: piece_kl, projection_kl, gold, h_kl, uld or alm for any two tokenizers; for equal ones also
            forward_kl, reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl,
            total_variation; see docs/losses.md.
        kd_weight: weight of the distillation loss, >= 0; 0 loads no teacher.
        ce_weight: weight of the student's next-token cross-entropy, >= 0; 0 computes none in training.
        dynamic_scale: multiply the distillation loss by cross-entropy / distillation loss of the step before,
            for each teacher, so that kd_weight says how much it counts beside the text; needs ce_weight.
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
        beta: of generalized_jsd, 0 (forward KL) to 1 (reverse KL).
        skew: of skew_forward_kl and skew_reverse_kl, 0 or more and below 1.
        alpha: of adaptive_kl, 0 to 1.
        top_k: tokens that the losses for equal tokenizers compare, the teacher's likeliest, and one bucket
            for the rest; 0: all tokens.
        teacher_dtype: auto (as in the checkpoint), float32, bfloat16 or float16.
        teacher_tp: ranks that hold one teacher together, neighbors on a node; divides the ranks of a node.
        teacher_ranks: ranks of every node, the last ones, that hold the teachers and nothing else, and work
            on the next step while the others train; 0: the student's ranks hold them.
        teacher_engine: replicated (a whole copy per rank), tensor_parallel (DeepSpeed's inference engine),
            transformers (its own tensor parallelism, over all ranks with teachers), zero3 (partitioned over
            these, for any architecture), or auto: the first of them that can hold it in teacher_tp parts.
        teacher_offload: keep the teacher's weights in the host's memory but for its forward passes.
        exchange: what is kept of the teacher until a loss reads it: hidden (final hidden states), logits or
            topk (the likeliest tokens; the rest of the probability is spread evenly).
        exchange_topk: tokens of exchange topk.
        sequence_parallel: neighboring ranks that hold a part of every sequence each (Ulysses); divides the
            student's attention heads.
        activation_checkpointing: recompute the student's activations in backward instead of keeping them.
        activation_offload: what activation_checkpointing keeps waits in the host's memory until backward.
        mlp_tiles: parts of the positions that a student's MLP takes one after the other, computed again in
            backward; for long sequences. 1: all at once.
        ds_config: DeepSpeed JSON; see ds_configs/README.md.
        learning_rate: fills "lr": "auto" of the ds_config; 0: the ds_config states it.
        seed: of data order and of dropout.
        output_dir: metrics.jsonl, run.json and checkpoints go here.
        eval_every: steps between held-out evaluations; 0: only before the first and after the last step.
        save_every: steps between checkpoints; 0: only on SIGTERM.
        keep_checkpoints: how many of them to keep, 1 or more.
        resume: auto (newest complete checkpoint of output_dir, if any), never, or the path of a checkpoint.
        export: directory for the trained student in Hugging Face format; empty: none.
        log_comms: time every collective of the engine and of attention in parts for 100 steps, which slows
            them down, and print a summary.
        wandb_project: log to this Weights & Biases project; empty: do not.
        num_workers: processes per rank that tokenize and align; 0: the training process does it.
        local_rank: set by the launcher.
    """

    student: str = ""
    teacher: str = ""
    teachers: str = ""
    teacher_weights: str = "fixed"
    teacher_alpha: float = 1.0
    route_key: str = ""
    normalize_by_vocab: bool = False
    data: str = ""
    text_key: str = "text"
    train_on: str = "assistant"
    split: str = "train"
    streaming: bool = False
    eval_rows: int = 0
    steps: int = 1000
    pack: bool = False
    max_length: int = 512
    teacher_max_length: int = 0
    loss: str = "piece_kl"
    kd_weight: float = 1.0
    ce_weight: float = 1.0
    dynamic_scale: bool = False
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
    teacher_ranks: int = 0
    teacher_engine: str = "auto"
    teacher_offload: bool = False
    exchange: str = "hidden"
    exchange_topk: int = 256
    sequence_parallel: int = 1
    activation_checkpointing: bool = False
    activation_offload: bool = False
    mlp_tiles: int = 1
    ds_config: str = "ds_configs/zero2.json"
    learning_rate: float = 0.0
    seed: int = 0
    output_dir: str = "runs/default"
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    resume: str = "auto"
    export: str = ""
    log_comms: bool = False
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
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name} {value}: expected a number")
        for name in ("beta", "skew", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected 0 to 1")
        if self.skew == 1:
            raise ValueError("--skew 1.0: compares the teacher with itself; expected less than 1")
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature}: expected more than 0")
        if self.kd_weight == self.ce_weight == 0:
            raise ValueError("--kd_weight 0 and --ce_weight 0: nothing would be learned; raise one of them")
        if self.dynamic_scale and not (self.kd_weight and self.ce_weight):
            raise ValueError("--dynamic_scale: scales distillation by cross-entropy; with --kd_weight 0 or "
                             "--ce_weight 0 there is but one of them, so leave it out")
        if self.teachers:
            of_each_teacher(self)
        elif self.route_key:
            raise ValueError("--route_key: chooses among several teachers; name them by --teachers")
        one = "teacher" if self.kd_weight and not self.teachers else "data"
        for name in ("student", "data", one):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: give a hub id or a local path")
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError("--activation_offload: moves what --activation_checkpointing keeps; add that")
        if self.learn_projection and (self.loss != "projection_kl" or not self.kd_weight):
            raise ValueError(f"--learn_projection: only --loss projection_kl trains one, this is {self.loss} "
                             f"with --kd_weight {self.kd_weight}; leave it out or change the loss")
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ValueError(f"--resume={self.resume}: expected auto, never or the directory of a checkpoint")


def routes_of_each_teacher(cfg):
    """{name: list of values of route_key, or None for all that no other teacher names}."""
    entries = json.loads(cfg.teachers) if cfg.teachers and cfg.route_key else []
    return {name_of(entry): entry.get("routes") for entry in entries}


def name_of(entry):
    """What metrics call the teacher of an entry of --teachers."""
    return entry.get("name", Path(str(entry.get("model", ""))).name)


def of_each_teacher(cfg):
    """{name: Config} of a run with one teacher, for every entry of --teachers.

    Raises:
        ValueError: no such list, or an entry that is wrong.
    """
    if not cfg.teachers:
        return {cfg.teacher: cfg}
    try:
        entries = json.loads(cfg.teachers)
    except json.JSONDecodeError as error:
        raise ValueError(f"--teachers: no JSON ({error}); expected a list of objects") from None
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError("--teachers: expected a list of objects, one for each teacher")
    if cfg.teacher or cfg.learn_projection:
        raise ValueError("--teachers: goes neither with --teacher nor with --learn_projection; drop one")
    if cfg.route_key and cfg.teacher_weights != "fixed":
        raise ValueError(f"--route_key with --teacher_weights {cfg.teacher_weights}: the one or the other "
                         "chooses among teachers; drop one")
    known = {key: f"teacher_{key}" for key in ("tp", "engine", "dtype", "max_length", "offload")}
    known |= {"model": "teacher"} | {key: key for key in OF_A_TEACHER}
    found = {}
    for entry in entries:
        name, weight, routes = name_of(entry), entry.get("weight", 1.0), entry.get("routes")
        entry = {key: value for key, value in entry.items() if key not in ("name", "weight", "routes")}
        wrong = [key for key in entry if key not in known]
        if wrong or "model" not in entry:
            what = f"{wrong[0]!r} is no key of a teacher" if wrong else "a teacher has no model"
            raise ValueError(f"--teachers: {what}; its keys are name, weight, routes, {', '.join(known)}")
        if routes is not None and not (isinstance(routes, list) and cfg.route_key):
            raise ValueError(f"--teachers: routes {routes!r} of {name}: expected a list of values of a "
                             "column that --route_key names")
        if not isinstance(weight, (int, float)) or weight <= 0:
            raise ValueError(f"--teachers: weight {weight!r} of {name}: expected a number above 0")
        if name in found:
            raise ValueError(f"--teachers: two are called {name}; give them names")
        how = {known[key]: value for key, value in entry.items()}
        found[name] = replace(cfg, teachers="", route_key="", kd_weight=cfg.kd_weight * weight, **how)
    return found


OF_A_TEACHER = ("loss", "temperature", "projection", "projection_topk", "uncommon_topk", "reverse",
                "alm_mode", "beta", "skew", "alpha", "top_k", "exchange", "exchange_topk")
LOWEST = dict(eval_rows=0, steps=1, max_length=2, teacher_max_length=0, kd_weight=0, ce_weight=0,
              projection_topk=1, uncommon_topk=1, top_k=0, learning_rate=0, seed=0, eval_every=0,
              save_every=0, keep_checkpoints=1, num_workers=0, loss_memory_mib=1, projection_learning_rate=0,
              teacher_tp=1, teacher_ranks=0, sequence_parallel=1, mlp_tiles=1, exchange_topk=1,
              teacher_alpha=0)
CHOICES = dict(loss=(*ANY_TOKENIZERS, *ONE_TOKENIZER), train_on=("assistant", "all"), alm_mode=ALM_MODES,
               teacher_dtype=("auto", "float32", "bfloat16", "float16"), teacher_engine=ENGINES,
               exchange=SIGNALS, teacher_weights=("fixed", "ce", "entropy", "max_prob", "select", "mean_p",
                                                  "mean_logits"))
# flags that may change when a run goes on; all others decide what is learned
FREE_ON_RESUME = {"steps", "output_dir", "eval_every", "save_every", "keep_checkpoints", "resume", "export",
                  "log_comms", "wandb_project", "num_workers", "local_rank", "ds_config", "sequence_parallel",
                  "teacher_tp", "teacher_ranks", "teacher_engine", "teacher_offload",
                  "activation_checkpointing", "activation_offload", "mlp_tiles"}
