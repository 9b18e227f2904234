"""List the distillation losses in one table, from which flags, checks, help and docs follow.

A loss is a function of losses.py, or yours, and one entry in `LOSSES`; see docs/architecture.md.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from isogloss import losses
from isogloss.doors import door
from isogloss.flags.parse import keywords_of
from isogloss.loss_bounds import CHOICES, NUMBERS, Bounds, check_value
from isogloss.nodes import Tables, with_rest
from isogloss.projection_tools.files import cached_translation
from isogloss.projection_tools.tokenizers import Pair
from isogloss.teachers.protocol import FLAGS_OF_MODELS
from isogloss.tile_plan import GPU_SUB_TILES
from isogloss.translation import (
    CHOICE_WEIGHT,
    CellColumns,
    cell_coverage,
    root_values,
    translated_sub_tile,
)

DEFAULT_COPIES = GPU_SUB_TILES.live_copies
AUTO_WEIGHT = -1.0  # matched_weight: as large as the common part of the teacher's vocabulary
# of options that only the job has
OF_JOB = {
    "matched_weight": Bounds(0, 1),
    "projection_topk": Bounds(1, 2**20, is_whole=True),
    "projection_learning_rate": Bounds(0, 1e3),
}
BOUNDS = NUMBERS | OF_JOB


@dataclass
class DistillationLoss:
    """Hold a distillation loss, ready for the sub-tiles of `batch.Collator`.

    Attributes:
        loss_fn: (student logits (n, V), teacher logits (m, W), `tile_plan.SubTile`) -> (), the sum
            over the terms, in nats; with an option max_divergence it takes a `bound`, too.
        write_gradient: (student logits, teacher logits, SubTile, factors (2 or more,) of
            cross-entropy and this loss, whether there is a text) -> `fused.WrittenSums`; writes the
            gradient of both over the student's logits.  None: autograd computes it.
        spelling: tables from which the data workers list the nodes of a translation, or None.
        for_columns: sorted teacher columns (K,) -> (loss_fn, write_gradient) for teacher logits
            (m, K) of these alone, truncated ones whole; None: it needs all columns.
        coverage: (teacher logits, SubTile) -> {metric: (sum, count)}, what the loss covers, or
            None.
        coverage_names: the metrics of `coverage` that an evaluation logs.
        indices_VK: the projection's teacher tokens, -1 in unused slots; None: it uses none.
        learned_projection: `projected.LearnedProjection` whose scores are trained, or None.
        is_observed: loss_fn takes a fourth argument, a `losses.Observer` of what it compares.
        live_copies: see `LossSpec.live_copies`.
    """

    loss_fn: Callable
    write_gradient: Callable | None = None
    spelling: Tables | None = None
    for_columns: Callable | None = None
    coverage: Callable | None = None
    coverage_names: tuple = ()
    indices_VK: torch.Tensor | None = None
    learned_projection: object | None = None
    is_observed: bool = False
    live_copies: float = DEFAULT_COPIES


# --- build: (cfg, pair, device, has_rest) -> DistillationLoss -------------------------------------


def projected(name, **options):
    """Return the build of a loss that has a projection: a function of projected.py."""
    def build(cfg, pair, device, has_rest=False):
        from isogloss.objective import projected

        return getattr(projected, name)(cfg, pair, device, has_rest, **options)

    return build


def build_per_chunk(cfg, pair, device, has_rest=False, *, loss):
    """Build a loss that compares whole chunks and needs nothing but their ids.

    Args:
        loss: such as `losses.uld`.
    """
    parameters = {"temperature": cfg.temperature} | cfg.options_of_loss
    parameters.pop("max_divergence", None)  # see build_loss

    def loss_fn(student_logits, teacher_logits, sub_tile, **bound):
        ids = batch_of_one(sub_tile)
        return loss(
            student_logits[None], teacher_logits[None], ids.student_labels, ids.teacher_labels,
            ids.student_chunk, ids.teacher_chunk, chunks=sub_tile.terms, weight_BS=ids.weight,
            **parameters, **bound)[0]

    gradient = None
    compiler = compiler_of(cfg, device)
    if compiler is not plain:
        from isogloss.objective import fused_chunks

        written = {losses.alm: fused_chunks.AlmGradient, losses.uld: fused_chunks.UldGradient}
        gradient = written[loss](cfg.temperature, compiler) if loss in written else None
    return DistillationLoss(loss_fn, gradient)


def build_divergence(cfg, pair, device, has_rest=False, *, divergence):
    """Build a divergence: of positions where the tokenizers are equal, else of translated nodes."""
    parameters = dict(temperature=cfg.temperature, top_k=cfg.loss_topk) | cfg.options_of_loss
    parameters["support"] = parameters.pop("topk_of")
    parameters.pop("max_divergence", None)  # see build_loss
    choice_weight = parameters.pop("choice_weight")
    compiler = compiler_of(cfg, device)
    are_equal = pair.fingerprints[0] == pair.fingerprints[1]
    if has_rest and cfg.follows_student:
        raise ValueError("--loss_options: topk_of student: of this teacher the tokens that it "
                         "finds likely are kept; keep hidden states, or leave it out")
    if are_equal:
        return build_per_position(divergence, parameters, has_rest, compiler)
    unbounded = divergence in (losses.reverse_kl, losses.adaptive_kl)
    if has_rest and (unbounded or parameters.get("beta") == 1):
        raise ValueError(f"--loss {cfg.loss} between two tokenizers: it needs what the teacher "
                         "says of every token that the student may write, and of this teacher the "
                         "most likely ones are kept; keep hidden states, or use another loss")
    return build_translated(pair, device, divergence, parameters, has_rest, compiler,
                            has_text=cfg.ce_weight > 0, choice_weight=choice_weight)


def plain(function):
    return function


def compiler_of(cfg, device):
    """Return what makes a formula of a loss faster: (function) -> one that computes the same."""
    device_type = torch.device(device).type
    if cfg.loss_backend == "plain" or (cfg.loss_backend == "auto" and device_type != "cuda"):
        return plain
    from isogloss.models.compiler import loss_compiler

    return loss_compiler(cfg.loss_backend, device_type) or plain


def build_per_position(divergence, parameters, has_rest=False, compiler=plain):
    """Build a divergence for equal tokenizers: every chunk is one position on either side."""
    written = written_out(divergence, parameters, compiler, has_rest)
    compiled = compiler(divergence)

    def loss_fn(student_logits, teacher_logits, sub_tile, **bound):
        chunks = sub_tile.terms
        weight = sub_tile.weight
        if weight is not None:  # of all positions in the sub-tile; the loss wants one a chunk
            weight = weight.index_select(0, chunks.first_S)[None]
        student = _chosen(student_logits, chunks.first_S, chunks.whole_S)[None]
        teacher = _chosen(teacher_logits, chunks.first_T, chunks.whole_T)[None]
        if has_rest:
            student = losses.merge_unkept(student, teacher, parameters["temperature"])
        compare = divergence if bound else compiled  # what counts is not compiled
        return compare(student, teacher, None, weight_BS=weight, **parameters, **bound)[0]

    if not written:
        return DistillationLoss(loss_fn)
    from isogloss.objective.fused import PositionGradient

    return DistillationLoss(
        loss_fn, PositionGradient(*written, parameters["temperature"], compiler))


def written_out(divergence, parameters, compiler, has_rest):
    """Return (name, coefficient) of a divergence whose gradient is written out here, or None.

    It is where the loss is compiled, of all tokens; see fused.py.
    """
    if compiler is plain or has_rest or parameters["top_k"]:
        return None
    from isogloss.objective.fused import DERIVED

    coefficients = [parameters[key] for key in ("beta", "skew", "alpha") if key in parameters]
    name = divergence.__name__
    return (name, sum(coefficients)) if name in DERIVED else None


def _chosen(logits, rows, in_order):
    """Return some rows, without a copy where they are all of them, as they mostly are."""
    is_all = in_order and len(rows) == len(logits)
    return logits if is_all else logits.index_select(0, rows)


def build_translated(pair, device, divergence, parameters, has_rest=False, compiler=plain, *,
                     has_text=True, choice_weight=CHOICE_WEIGHT):
    """Build a divergence between any two tokenizers, see `translation.translated_sub_tile`."""
    of_roots = compiler(root_values)
    tables = as_tables(cached_translation(pair))
    of_rows = with_rest(tables) if has_rest else tables
    cells = CellColumns(*[columns.to(device) for columns in CellColumns.of(of_rows)])
    of_rows = Tables(*[value.to(device) if isinstance(value, torch.Tensor) else value
                       for value in of_rows])

    loss_fn = partial(
        translated_sub_tile, tables=of_rows, divergence=divergence, has_text=has_text,
        has_rest=has_rest, of_roots=of_roots, cells=cells, choice_weight=choice_weight,
        **parameters)

    def coverage(teacher_logits, sub_tile):
        return cell_coverage(teacher_logits[None], sub_tile.terms, of_rows)

    gradient = None
    written = written_out(divergence, parameters, compiler, has_rest)
    if written:
        from isogloss.objective.fused_nodes import Divergence, TranslationGradient

        compared = Divergence(*written, parameters["temperature"], choice_weight)
        gradient = TranslationGradient(compared, of_rows, cells, has_text, compiler)
    return DistillationLoss(loss_fn, gradient, tables, coverage=coverage,
                            coverage_names=("cell_coverage", "joined_mass"))


def as_tables(fields):
    """Return `nodes.Tables` of their fields, int64, which indexes tensors; files hold int32."""
    values = [fields[name] for name in Tables._fields]
    return Tables(*[value.long() if torch.is_tensor(value) else value for value in values])


def batch_of_one(sub_tile):
    """Return the sub-tile with a first axis of size 1 on ids, chunks and weight."""
    return sub_tile._replace(
        student_labels=sub_tile.student_labels[None],
        teacher_labels=sub_tile.teacher_labels[None],
        student_chunk=sub_tile.student_chunk[None],
        teacher_chunk=sub_tile.teacher_chunk[None],
        weight=None if sub_tile.weight is None else sub_tile.weight[None])


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossSpec:
    """State what a run has to know of a loss.

    Attributes:
        build: (cfg, `tokenizers.Pair`, device, has_rest) -> DistillationLoss; has_rest: the
            teacher's rows are truncated, as those of `tiles.TopKLogits`.
        needs: what it works on: "spellings", "projection" or "chunks".
        flags: flags of config.py that it reads; they may differ for each of several teachers.
        options: {keyword of --loss_options: its default}.  `loss_bounds` bounds the names that it
            knows.
        columns: it compares only the most important teacher columns, as many as its option
            projection_topk says.
        truncated: how it reads truncated rows: "softened" by --temperature, of the "text" the
            probabilities alone, or "": it is not defined on them.
        linear_unless: a flag or an option; where neither it nor a limit is set, the gradient is
            linear in the teacher's probabilities, so that estimates of these without bias will do.
            "": it never is.
        live_copies: how often the logits of a sub-tile are in a GPU's memory at the peak of the
            loss and the cross-entropy, in float32, at temperature 1 with all columns, and a tenth
            more (docs/losses.md, "On a GPU", names what counted them).
    """

    build: Callable
    needs: str
    flags: tuple = ("temperature",)
    options: dict = field(default_factory=dict)
    columns: bool = False
    truncated: str = ""
    linear_unless: str = ""
    live_copies: float = DEFAULT_COPIES

    def reads_draws(self, cfg):
        """Tell whether it takes tokens that were drawn for all others."""
        settings = vars(cfg) | cfg.options_of_loss
        unless = self.linear_unless, "max_divergence"
        return bool(self.linear_unless) and not any(map(settings.get, unless))

    def check_options(self, **options):
        """Raise a ValueError for an option beyond its bounds."""
        for name, value in options.items():
            # a default may stand for a rule, as of matched_weight
            if name in BOUNDS | CHOICES and value != self.options[name]:
                check_value(name, value, BOUNDS)


def options_of(loss):
    """Return {option: default} of a loss that --loss_options may set."""
    takes_bound = {"bound", "options"} & inspect.signature(loss).parameters.keys()
    return keywords_of(loss, leave_out=GIVEN) | (BOUNDED if takes_bound else {})


def per_chunk(loss, truncated="", live_copies=DEFAULT_COPIES):
    """Return the entry of a loss with the parameters of `losses.uld`, and options of its own.

    Args:
        truncated, live_copies: see LossSpec.
    """
    return LossSpec(partial(build_per_chunk, loss=loss), "chunks", options=options_of(loss),
                    truncated=truncated, live_copies=live_copies)


def divergence_loss(divergence, live_copies=DEFAULT_COPIES):
    """Return the entry of a divergence between two models, likewise."""
    linear_unless = "loss_topk" if divergence is losses.forward_kl else ""
    return LossSpec(
        partial(build_divergence, divergence=divergence), "spellings",
        ("temperature", "loss_topk"), options_of(divergence) | OF_TRANSLATION,
        truncated="softened", linear_unless=linear_unless, live_copies=live_copies)


# keywords of losses that are flags, or that the job sets itself
GIVEN = ("temperature", "teacher_temperature", "top_k", "support", "tail", "reduction", "has_rest")
BOUNDED = {"max_divergence": 0.0}  # of losses that take a bound
OF_TRANSLATION = {"topk_of": "teacher", "choice_weight": CHOICE_WEIGHT}
OF_PROJECTION = {"projection_topk": 8192, "learn_projection": False,
                 "projection_learning_rate": 0.0}
PROJECTED = "temperature", "projection"  # flags of the losses that have a projection
OF_GOLD = options_of(losses.gold)

LOSSES: dict[str, LossSpec] = {
    "piece_kl": divergence_loss(losses.forward_kl, 6.3),
    "projection_kl": LossSpec(
        projected("build_projection_kl"), "projection", PROJECTED,
        options_of(losses.projection_kl) | OF_PROJECTION, columns=True, truncated="softened",
        linear_unless="reverse", live_copies=4.2),
    "gold": LossSpec(projected("build_gold"), "projection", PROJECTED, OF_GOLD, live_copies=6.4),
    "h_kl": LossSpec(
        projected("build_gold", relaxed=True), "projection", PROJECTED, OF_GOLD, live_copies=6.4),
    "uld": per_chunk(losses.uld, live_copies=5.8),
    "hybrid_uld": LossSpec(projected("build_hybrid_uld"), "projection", PROJECTED,
                           {"matched_weight": AUTO_WEIGHT} | BOUNDED),
    "alm": per_chunk(losses.alm, "text", live_copies=2.2),
    "forward_kl": divergence_loss(losses.forward_kl, 6.3),
    "reverse_kl": divergence_loss(losses.reverse_kl, 6.7),
    "generalized_jsd": divergence_loss(losses.generalized_jsd, 7.4),
    "skew_forward_kl": divergence_loss(losses.skew_forward_kl, 7.3),
    "skew_reverse_kl": divergence_loss(losses.skew_reverse_kl, 7.0),
    "adaptive_kl": divergence_loss(losses.adaptive_kl, 7.8),
    "total_variation": divergence_loss(losses.total_variation, 6.3),
}


def flags_of_teacher(cfg):
    """Return the flags that the only teacher of a run and its loss read, of those of teachers."""
    kind = cfg.teacher_kind
    flags = {"loss_options", *LOSSES[cfg.loss].flags}
    if kind.has_weights:
        flags.update(FLAGS_OF_MODELS)
    if not cfg.teacher_cache:
        flags.add("teacher_output")
    if "topk" in (kind.only_output, cfg.teacher_output):
        flags.add("teacher_output_topk")
    return flags


def build_loss(cfg, student, teacher, device, has_rest=False):
    """Build the distillation loss of a run, or of one of its teachers.

    Args:
        cfg: with loss, its parameters, and projection.
        student, teacher: `sample.TextEncoder`.
        has_rest: see `LossSpec.build`.
    Returns:
        DistillationLoss.
    Raises:
        ValueError: tokenizers that have nothing in common; weights of which too little is kept.
    """
    names = cfg.student, cfg.teacher_path
    tables = student.table, teacher.table
    pair = Pair.of(student.tokenizer, teacher.tokenizer, names, tables)
    spec = LOSSES[cfg.loss]
    loss = spec.build(cfg, pair, device, has_rest)
    if cfg.options_of_loss.get("max_divergence"):
        loss = door("bounded").limited(loss, cfg.options_of_loss["max_divergence"])
    if cfg.temperature == 1 and not has_rest:
        is_written = loss.write_gradient and not cfg.dump_losses
        loss.live_copies = loss.write_gradient.live_copies if is_written else spec.live_copies
    return loss
