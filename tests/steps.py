"""One training step in any layout, on real ranks, and the same by torch alone."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

import ranks
from isogloss import distill
from isogloss.config import configs_by_teacher
from isogloss.data.batch import Collator, PairOptions
from isogloss.inputs import build_collator, load_text_encoder, plan_teachers
from isogloss.job.launch import start_distributed
from isogloss.losses import next_token_cross_entropy, teacher_importance
from isogloss.objective.loss_table import build_loss
from isogloss.teachers.mixing import token_scores
from isogloss.tile_plan import SubTileBudget
from jobs import ds_config, job_for, write_corpus

# So little that every micro-batch takes several tiles, of several sub-tiles each: a CPU's own
# budget has thirty in a tile, and ten times the calls find no more.
SMALL_TILE_MIB = 0.25
SMALL_SUB_TILES = SubTileBudget(memory_fraction=0.3, live_copies=1)


class Layout(NamedTuple):
    """How a step is spread over ranks; `flags` are those that differ from the test's."""

    zero_stage: int
    micro_batch_size: int
    grad_accum_steps: int
    flags: dict = {}  # noqa: RUF012, nothing writes to it


class Case(NamedTuple):
    """What a step learns from: a loss by name, "cross_entropy" alone, or as the flags say."""

    loss: str
    packed: bool = False


AS_FLAGS_SAY = Case("as the flags say")


class StepResult(NamedTuple):
    """What one step gave; gradients are those of the parameters by name, None but on rank 0."""

    layout: Layout
    case: Case
    metrics: dict
    gradients: dict | None


class Reference(NamedTuple):
    loss: float
    gradients: dict


def uneven_samples(texts):
    """Return eight samples of very uneven length, one of them without a single token."""
    return [texts[0] * 2, None, texts[1][:9], texts[2], "", texts[3][:60], texts[4], texts[5][:30]]


def cut_flags(models):
    """Return flags with which the limit cuts three of `uneven_samples`, in words that may go on.

    The student's tokens are the longer ones: what comes behind a cut is a choice of the teacher's
    next row, which padding must not answer.
    """
    return {"student": str(models[1]), "teacher": str(models[0]), "max_length": 61}


def several_teachers(models, untied, sharded=True):
    """Return entries of --teachers: two tokenizers, four losses, one that sees less of a text."""
    entries = [
        {"name": "pieces", "model": str(models[1]), "tp": 2, "weight": 2.0, "max_length": 150},
        {"name": "equal", "model": str(untied), "loss": "forward_kl", "weight": 0.5,
         "temperature": 2.0},
        {"name": "projected", "model": str(models[1]), "loss": "projection_kl",
         "loss_options": FEW_COLUMNS, "engine": "zero3"},
        {"name": "gold", "model": str(models[1]), "loss": "gold", "tp": 4,
         "teacher_output": "logits"},
    ]
    if not sharded:
        for entry in entries:
            entry.pop("tp", None)
    return entries


FEW_COLUMNS = {"projection_topk": 100}


def flags_of(loss):
    if loss == AS_FLAGS_SAY.loss:
        return {}
    if loss == "cross_entropy":
        return {"loss": "piece_kl", "kd_weight": 0.0}
    return {"loss": loss, "loss_options": FEW_COLUMNS if loss == "projection_kl" else ""}


def packed_and_not(losses):
    """Return two cases of each loss; every other case has each loss once, half of them packed."""
    cases = []
    for number, loss in enumerate(losses):
        pair = [Case(loss), Case(loss, packed=True)]
        if number % 2:
            pair.reverse()
        cases += pair
    return cases


# --- one step on the ranks ------------------------------------------------------------------------


def layout_results(flags, samples, layouts, cases, tile_mib, alternate=False):
    """Return the StepResult of one train_step per layout and case; runs on every rank.

    Args:
        alternate: take every other case, odd ZeRO stages those that even ones leave out.
    """
    results = []
    for layout in layouts:
        state, inputs = start_layout(flags, layout)
        gradients = keep_gradients(state.engine)
        for case in cases[layout.zero_stage % 2 :: 2] if alternate else cases:
            set_loss(state, inputs, case.loss)
            collator = collator_of(state, inputs, case, samples, tile_mib)
            micro_batches = [collator(texts) for texts in texts_of_rank(samples, layout)]
            check_tiles(micro_batches[0], layout, tile_mib)
            metrics = distill.train_step(state, micro_batches).metrics()
            kept = dict(gradients) if os.environ["RANK"] == "0" else None
            results.append(StepResult(layout, case, metrics, kept))
        state.engine.destroy()
    return results


# weights that stay where they are: the next step finds them unmoved
AT_REST = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}


def start_layout(flags, layout, **ds_flags):
    name = "-".join([os.environ["WORLD_SIZE"], os.environ["RANK"], str(layout.zero_stage)])
    path = Path(flags["output_dir"]) / f"ds-{name}.json"
    config = ds_config(path, layout.zero_stage, layout.micro_batch_size, layout.grad_accum_steps,
                       **{"optimizer": AT_REST} | ds_flags)
    return job_for(flags | {"ds_config": config} | layout.flags)


def keep_gradients(engine, stepper=None):
    """Return a dict that every optimizer step fills with the whole averaged gradients.

    Args:
        stepper: whose `step` the job calls; None: the engine's.
    """
    from deepspeed.utils import safe_get_full_grad

    gradients = {}
    stepper = stepper or engine
    take_step = stepper.step

    def step(*args, **options):
        if engine.is_gradient_accumulation_boundary():
            for name, parameter in engine.module.model.named_parameters():
                gradients[name] = safe_get_full_grad(parameter).clone()
        return take_step(*args, **options)

    stepper.step = step
    return gradients


def set_loss(state, inputs, loss):
    if loss == AS_FLAGS_SAY.loss:
        return
    changes = {"kd_weight": state.cfg.kd_weight} | flags_of(loss)
    if loss == state.cfg.loss:
        changes["loss_options"] = state.cfg.loss_options
    for setup in state.teachers:
        setup.cfg = dataclasses.replace(setup.cfg, **changes)
        setup.loss = build_loss(setup.cfg, inputs.student, setup.encoder, state.device,
                                setup.spec.is_truncated)


def small_collator(cfg, inputs, device, tile_mib=SMALL_TILE_MIB):
    """Return a Collator of such tiles; those that are not SMALL_TILE_MIB are cut as on a CPU."""
    collator = build_collator(cfg, inputs, device, tile_mib)
    if tile_mib == SMALL_TILE_MIB:
        collator.sub_tiles = SMALL_SUB_TILES
    return collator


def collator_of(state, inputs, case, samples, tile_mib=SMALL_TILE_MIB):
    """Return a Collator, and see that it packs, and cuts chunks, if these are to be tested."""
    pack = case.packed or state.cfg.pack
    cfg = dataclasses.replace(state.cfg, pack=pack)
    collator = small_collator(cfg, inputs, state.device, tile_mib)
    batch = collator(samples)
    if pack:
        assert len(batch.student.ids) == len(batch.teachers[0].ids) < len(samples)
    # where the student's tokens are no shorter, every chunk is one of them, so no border cuts any
    is_shorter = len(inputs.student.table) < len(state.teachers[0].encoder.table)
    if cfg.sequence_parallel > 1 and is_shorter:
        assert len(batch.teachers[0].halo_index) > 0
    return collator


def texts_of_rank(samples, layout):
    """Return the samples of this rank's micro-batches.

    Ranks of a sequence group, and stages of a pipeline, have the same.
    """
    sharing = layout.flags.get("sequence_parallel", 1) * layout.flags.get("pipeline_parallel", 1)
    reader = int(os.environ["RANK"]) // sharing
    num_readers = int(os.environ["WORLD_SIZE"]) // sharing
    size = layout.micro_batch_size
    texts = []
    for number in range(layout.grad_accum_steps):
        first = (number * num_readers + reader) * size
        texts.append(samples[first : first + size])
    return texts


def check_tiles(batch, layout, tile_mib):
    """See that small tiles are several, of several sub-tiles; rank 0 has the longest text."""
    if os.environ["RANK"] == "0" and tile_mib == SMALL_TILE_MIB and layout.micro_batch_size > 1:
        tiles = batch.teachers[0].tiles
        assert len(tiles) > 1
        assert len(tiles[0].sub_tiles) > 1


# --- the same by torch alone ----------------------------------------------------------------------


def references(flags_of_runs, samples):
    """Return the Reference of every run, computed in a process of its own."""
    return ranks.run(1, plain_references, flags_of_runs, samples)[0]


def references_of(flags, losses, samples):
    """Return {loss: Reference} of runs that differ in their loss."""
    runs = [flags | flags_of(loss) for loss in losses]
    return dict(zip(losses, references(runs, samples), strict=True))


def plain_references(flags_of_runs, samples):
    start_distributed()
    return [plain_reference(distill.Config(**flags), samples) for flags in flags_of_runs]


def plain_reference(cfg, samples):
    """Return the Reference of one batch by torch alone: no engine, ranks, accumulation or tiles."""
    student, _ = load_text_encoder("student", cfg.student, cfg.max_length)
    encoders = {}
    for name, teacher_cfg in configs_by_teacher(cfg).items():
        encoders[name], _ = load_text_encoder(
            "teacher", teacher_cfg.teacher, teacher_cfg.teacher_max_length)
    setups = plan_teachers(cfg, student, encoders, torch.device("cpu"))
    pairs = [PairOptions(setup.encoder, setup.loss.spelling) for setup in setups]
    batch = Collator(student, pairs)(samples)
    model = AutoModelForCausalLM.from_pretrained(cfg.student)
    logits_BSV = model(input_ids=batch.student.ids).logits[..., : len(student.table)]
    ce, count = next_token_cross_entropy(logits_BSV, batch.student.labels)
    loss = cfg.ce_weight * ce / count

    logits_of_teachers = []
    for setup, teacher in zip(setups, batch.teachers):
        logits_of_teachers.append(plain_teacher_logits(setup, teacher.ids))
    weights_MB = torch.ones(len(setups), len(samples))
    if len(setups) > 1 and cfg.teacher_weights != "fixed":
        scores = []
        for teacher, logits in zip(batch.teachers, logits_of_teachers):
            scores.append(plain_scores(teacher, logits))
        weights_MB = plain_weights(cfg, torch.stack(scores))
    for number, setup in enumerate(setups):
        kd = plain_kd(setup, batch.teachers[number], logits_BSV, logits_of_teachers[number],
                      weights_MB[number])
        loss = loss + setup.cfg.kd_weight * kd / batch.counts.pairs[number].kd_terms
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Reference(loss.item(), gradients)


def plain_teacher_logits(setup, ids):
    """Return the (B, T, W) logits of a teacher, or of the mean of two that weigh 2 and 1/2."""
    logits = []
    for spec in setup.spec.single():
        model = AutoModelForCausalLM.from_pretrained(spec.path)
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits[..., : len(setup.encoder.table)])
    if len(logits) == 1:
        return logits[0]
    first, second = logits
    return (0.8 * first.softmax(-1) + 0.2 * second.softmax(-1)).log()


def plain_scores(teacher, logits_BTW):
    """Return (B,) how sure a teacher is of each sample: minus its nats per byte of the text."""
    mask_BT = (teacher.labels >= 0) & (teacher.num_bytes >= 0)
    score_B = torch.full((len(mask_BT),), -torch.inf)
    for b in mask_BT.any(1).nonzero().flatten().tolist():
        mask_T = mask_BT[b]
        score_B[b] = token_scores(logits_BTW[b, mask_T], teacher.labels[b, mask_T]).mean()
    num_bytes_B = teacher.num_bytes.clamp(min=0).sum(1)
    per_byte_B = score_B * mask_BT.sum(1) / num_bytes_B.clamp(min=1)
    return torch.where(mask_BT.any(1), per_byte_B, score_B)


def plain_weights(cfg, scores_MB):
    if cfg.teacher_weights == "select":
        return (scores_MB == scores_MB.amax(0)).float()
    return scores_MB.softmax(0)


def plain_kd(setup, teacher, student_logits_BSV, teacher_logits_BTW, weight_B):
    """Return the sum of a distillation loss, every term weighing as much as its sample."""
    [tile] = teacher.tiles
    [sub_tile] = tile.sub_tiles
    loss_fn = setup.loss.loss_fn
    teacher_logits_NW = teacher_logits_BTW.flatten(0, 1)[sub_tile.teacher_positions]
    if setup.keeps_columns:
        importance_W = teacher_importance(teacher_logits_BTW, teacher.teacher_chunk)
        kept_K = importance_W.topk(setup.num_columns).indices.sort().values
        loss_fn, _ = setup.loss.for_columns(kept_K)
        teacher_logits_NW = teacher_logits_NW[:, kept_K]
    student_logits_NV = student_logits_BSV.flatten(0, 1)[tile.student_positions]
    sample = tile.student_positions // student_logits_BSV.shape[1]
    sub_tile = sub_tile._replace(weight=weight_B[sample])
    return loss_fn(student_logits_NV, teacher_logits_NW, sub_tile)


# --- compare --------------------------------------------------------------------------------------


def check_steps(expected, num_ranks, flags, samples, layouts, cases, tile_mib=SMALL_TILE_MIB,
                alternate=False, tolerance=1e-5):
    """Compare what `layout_results` returns with the references; return it.

    Args:
        expected: {loss: Reference}.
        tolerance: of the loss, of the gradients' norm, and of the norm of their difference, each
            relative.
    """
    arguments = flags, samples, layouts, cases, tile_mib, alternate
    results = ranks.run(num_ranks, layout_results, *arguments)[0]
    assert results
    for result in results:
        name = f"{num_ranks} ranks, {result.layout}, {result.case}"
        check_step(name, result, expected[result.case.loss], tolerance)
    return results


def check_step(name, result, reference, tolerance=1e-5):
    metrics = result.metrics
    assert abs(metrics["loss"] - reference.loss) <= tolerance * reference.loss, name
    square = check_gradients(name, result.gradients, reference, tolerance)
    assert abs(metrics["grad_norm"] - square**0.5) <= tolerance * square**0.5, name


def check_gradients(name, gradients, reference, tolerance=1e-5):
    """Compare all gradients by the norm of the difference; return the square of their norm."""
    square = 0.0
    error = 0.0
    for key, gradient in reference.gradients.items():
        square += (gradient**2).sum()
        error += ((gradients[key] - gradient) ** 2).sum()
    assert error <= tolerance**2 * square, (name, float((error / square) ** 0.5))
    return square


def flags_for(models, texts, folder, **changes):
    """Return flags of a run; both losses weigh less than 1, as a forgotten weight would be."""
    flags = dict(
        student=str(models[0]), teacher=str(models[1]), data=write_corpus(folder, texts, 20),
        max_length=250, kd_weight=0.7, ce_weight=0.3, output_dir=str(folder))
    return flags | changes
