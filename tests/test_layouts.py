"""Every layout gives the loss and gradient of one process with torch alone; on real gloo ranks."""

import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import steps
from isogloss import distill
from isogloss.objective.loss_table import LOSSES
from jobs import ds_config, job_for

pytestmark = pytest.mark.slow


@pytest.fixture
def check(models, texts, tmp_path):
    """Return a function that compares steps in some layouts with one process in plain torch.

    Args:
        layouts: {ranks: layouts}.
        losses: to be computed; cases: what is compared, None: each loss as it is.
        alternate: see `layout_results`; changes: of the flags.
    Returns:
        the StepResults.
    """
    def compare(layouts, losses, cases=None, alternate=False, **changes):
        flags = steps.flags_for(models, texts, tmp_path, **changes)
        samples = steps.uneven_samples(texts)
        expected = steps.references_of(flags, losses, samples)
        cases = cases or [steps.Case(loss) for loss in losses]
        results = []
        for num_ranks, of_ranks in layouts.items():
            results += steps.check_steps(expected, num_ranks, flags, samples, of_ranks, cases,
                                         alternate=alternate)
        return results

    return compare

# --- data parallelism, ZeRO, packing --------------------------------------------------------------

LAYOUTS = {  # ranks: layouts
    1: [steps.Layout(1, 4, 2), steps.Layout(3, 2, 4)],
    2: [steps.Layout(0, 2, 2), steps.Layout(1, 1, 4), steps.Layout(2, 4, 1), steps.Layout(3, 2, 2)],
    4: [steps.Layout(0, 2, 1), steps.Layout(2, 1, 2), steps.Layout(3, 1, 2)],
}


def test_same_loss_and_gradient_in_every_layout(check):
    # of the divergences one: they differ in what they make of the same nodes
    losses = ["cross_entropy", "piece_kl"]
    losses += [name for name, spec in LOSSES.items() if "loss_topk" not in spec.flags]
    flags = {"temperature": 2.0, "seed": 1}
    # two ranks, with the most layouts, take all losses
    check({2: LAYOUTS[2]}, losses, steps.packed_and_not(losses), alternate=True, **flags)
    check({1: LAYOUTS[1], 4: LAYOUTS[4]}, ["piece_kl", "projection_kl"], **flags)


PACKED = {  # ranks: layouts; rows of 250 and 250 positions
    1: [steps.Layout(2, 8, 1)],
    2: [steps.Layout(0, 4, 1), steps.Layout(3, 4, 2, {"sequence_parallel": 2})],
}


def test_weights_of_packed_samples_stay_with_their_sample(check, models, untied):
    """Of two teachers; fewer rows than samples, which do not see each other."""
    two = steps.several_teachers(models, untied, sharded=False)[:2]
    check(PACKED, [steps.AS_FLAGS_SAY.loss], teacher="", teachers=json.dumps(two),
          teacher_weights="ce", pack=True)


BOUNDED = {2: [steps.Layout(2, 2, 2), steps.Layout(3, 4, 2, {"sequence_parallel": 2})]}


def test_same_terms_are_clipped_in_every_layout(check, models, untied):
    """Those of one teacher of two."""
    pieces, equal = steps.several_teachers(models, untied, sharded=False)[:2]
    pieces["loss_options"] = {"max_divergence": 0.5}
    results = check(BOUNDED, [steps.AS_FLAGS_SAY.loss], teacher="",
                    teachers=json.dumps([pieces, equal]))
    [clipped] = {result.metrics["clipped_terms/pieces"] for result in results}
    assert 0 < clipped < 1
    assert not any("clipped_terms/equal" in result.metrics for result in results)


CUT = [
    steps.Layout(0, 1, 4),
    steps.Layout(2, 4, 1),
    steps.Layout(3, 4, 2, {"sequence_parallel": 2, "teacher_tp": 2}),
]


def test_same_loss_and_gradient_of_texts_that_the_limit_cuts(models, texts, tmp_path):
    """However much padding stands behind a cut: alone, beside others, reversed, packed, in shards.
    """
    flags = steps.flags_for(models, texts, tmp_path, **steps.cut_flags(models))
    samples = steps.uneven_samples(texts)
    expected = steps.references_of(flags, ["piece_kl"], samples)
    cases = [steps.Case("piece_kl"), steps.Case("piece_kl", packed=True)]
    steps.check_steps(expected, 2, flags, samples[::-1], CUT, cases, tile_mib=0.1)


# --- sequence parallelism -------------------------------------------------------------------------

ALL_STAGES = range(4)
SEQUENCES = {  # ranks: layouts
    2: [steps.Layout(stage, 4, 2, {"sequence_parallel": 2}) for stage in ALL_STAGES],
    # the other stages are in MIXED
    4: [steps.Layout(stage, 8, 1, {"sequence_parallel": 4, "teacher_tp": 2}) for stage in (1, 2)],
}
# for two tokenizers these are among LAYOUTS
WHOLE_SEQUENCES = {2: [steps.Layout(stage, 2, 2) for stage in (0, 3)]}
MIXED = {
    4: [
        steps.Layout(2, 2, 2, {"sequence_parallel": 2, "teacher_tp": 2}),
        steps.Layout(1, 4, 1, {"sequence_parallel": 2, "teacher_tp": 4}),
        steps.Layout(0, 8, 1, {"sequence_parallel": 4, "teacher_tp": 4}),
        steps.Layout(3, 2, 2, {"sequence_parallel": 2, "activation_checkpointing": True,
                               "activation_offload": True, "mlp_tiles": 3}),
        # a text a micro-batch, some shorter than its four ranks
        steps.Layout(3, 1, 8, {"sequence_parallel": 4}),
    ],
    8: [
        steps.Layout(3, 4, 1, {"sequence_parallel": 4, "teacher_tp": 2}),
        steps.Layout(1, 1, 1, {"teacher_tp": 8}),
    ],
}
SHARDED_LOSSES = "cross_entropy", "piece_kl", "projection_kl", "gold", "alm"


def test_same_loss_and_gradient_with_sequences_in_shards(check, untied):
    """Every ZeRO stage, two and four shards, packed and not."""
    check(SEQUENCES, SHARDED_LOSSES, steps.packed_and_not(SHARDED_LOSSES), alternate=True)
    # with a teacher of the student's tokenizer
    check(SEQUENCES | WHOLE_SEQUENCES, ["forward_kl"], steps.packed_and_not(["forward_kl"]),
          teacher=str(untied))


def test_same_loss_and_gradient_in_mixed_layouts(check):
    """Data, sequence and tensor parallelism together; memory is saved in every way."""
    check(MIXED, ["piece_kl", "projection_kl"])


# --- the student ----------------------------------------------------------------------------------


def sgd_steps(flags, samples, layouts):
    """Return, for each layout, how far a step of SGD with learning rate 1 moves each weight.

    On rank 0 alone.
    """
    moves = []
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_clipping": 0.0,
           "zero_allow_untested_optimizer": True}
    for layout in layouts:
        state, inputs = steps.start_layout(flags, layout, **sgd)
        collator = steps.small_collator(state.cfg, inputs, state.device)
        texts = steps.texts_of_rank(samples, layout)
        before = state.engine.module.collect_weights()
        distill.train_step(state, [collator(examples) for examples in texts])
        after = state.engine.module.collect_weights()
        moves.append({name: before[name] - after[name] for name in before})
        state.engine.destroy()
    return moves


def test_a_step_of_plain_sgd_is_the_gradient(models, texts, tmp_path):
    """No factor of ranks, shards, micro-batches or stages is hidden by Adam or by clipping."""
    flags = steps.flags_for(models, texts, tmp_path)
    samples = steps.uneven_samples(texts)
    reference = steps.references_of(flags, ["piece_kl"], samples)["piece_kl"]
    layouts = [steps.Layout(stage, 2, 2, {"sequence_parallel": 2}) for stage in ALL_STAGES]
    moves = ranks.run(4, sgd_steps, flags, samples, layouts)[0]
    for layout, moved in zip(layouts, moves, strict=True):
        steps.check_gradients(f"4 ranks, {layout}", moved, reference)


LEAN = {"activation_offload": True, "mlp_tiles": 3}


def test_same_gradient_tied_or_not_tiled_or_not(models, untied, texts, tmp_path):
    """The step before leaves nothing in the next."""
    samples = steps.uneven_samples(texts)
    tiled = [steps.Layout(2, 2, 2, LEAN), *[steps.Layout(stage, 1, 4) for stage in ALL_STAGES]]
    untiled = [steps.Layout(1, 2, 2), steps.Layout(3, 1, 4, LEAN)]
    cases = [steps.Case("alm"), steps.Case("gold")]
    for student in (models[0], untied):
        if student == untied:  # at the first and the last stage
            tiled, untiled = [tiled[1], tiled[-1]], untiled[:1]
        flags = steps.flags_for(models, texts, tmp_path, student=str(student), kd_weight=1.0,
                                ce_weight=1.0, activation_checkpointing=True)
        expected = steps.references_of(flags, ["gold", "alm"], samples)
        steps.check_steps(expected, 2, flags, samples, tiled, cases)
        steps.check_steps(
            expected, 2, flags | {"tiled": False}, samples, untiled, cases[1:], math.inf)


class LargestTensor(TorchDispatchMode):
    """Note the numbers of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def largest_tensors(flags, samples, changes):
    """Return, for steps, their largest tensor as a share of all logits of the student or the
    teacher, whichever are fewer.
    """
    shares = []
    for change in changes:
        state, inputs = job_for(flags | change)
        batch = steps.small_collator(state.cfg, inputs, state.device)(samples)
        [teacher] = batch.teachers
        with LargestTensor() as largest:
            distill.train_step(state, [batch])
        student_logits = batch.student.ids.numel() * state.vocab
        teacher_logits = teacher.ids.numel() * len(state.teachers[0].encoder.table)
        shares.append(largest.numel / min(student_logits, teacher_logits))
    return shares


def test_no_logits_of_all_positions_exist(models, texts, tmp_path):
    """Neither the student's nor the teacher's, forward or backward; the untiled path makes them."""
    flags = steps.flags_for(models, texts, tmp_path, kd_weight=1.0, ce_weight=1.0,
                            ds_config=ds_config(tmp_path / "ds.json", 0, 8, 1))
    samples = steps.uneven_samples(texts)
    changes = [{"loss": loss} for loss in ("piece_kl", "projection_kl", "gold", "uld")]
    changes.append({"tiled": False})
    *tiled, untiled = ranks.run(1, largest_tensors, flags, samples, changes)[0]
    shards = [{"loss": loss, "sequence_parallel": 2} for loss in ("piece_kl", "gold")]
    for shares in ranks.run(2, largest_tensors, flags, samples, shards):
        tiled += shares
    assert max(tiled) < 0.5  # it is a layer of the models
    assert untiled >= 1


# --- teachers -------------------------------------------------------------------------------------

# Student: data parallelism 4.  Teacher: tensor x data parallelism 2 x 2 and 4 x 1, or ZeRO-3.
TEACHERS = [
    {"teacher_tp": 2, "teacher_offload": True},
    {"teacher_tp": 4},
    {"teacher_engine": "zero3"},
    {"teacher_tp": 2, "teacher_output": "logits"},
    # all of the 500 tokens
    {"teacher_tp": 4, "teacher_output": "topk", "teacher_output_topk": 600},
]
# float32 hidden states and logits; top-k also has an int32 id each, the label, the rest, the
# logsumexp, and four numbers about the text
BYTES_PER_TOKEN = {"hidden": 32 * 4, "logits": 500 * 4, "topk": 501 * (4 + 4) + 24}


def test_same_loss_and_gradient_wherever_the_teacher_is(check):
    layouts = [steps.Layout(2, 1, 2, changes) for changes in TEACHERS]
    results = check({4: layouts}, ["piece_kl", "projection_kl"], kd_weight=1.0, ce_weight=1.0)
    assert len(results) == 2 * len(TEACHERS)
    for result in results:
        output = result.layout.flags.get("teacher_output", "hidden")
        assert result.metrics["teacher_output_bytes"] == BYTES_PER_TOKEN[output], result.layout


def test_several_teachers_give_the_sum_of_their_losses(models, untied, texts, tmp_path):
    flags = steps.flags_for(models, texts, tmp_path, teacher="",
                            teachers=json.dumps(steps.several_teachers(models, untied)))
    samples = steps.uneven_samples(texts)
    cases = [steps.AS_FLAGS_SAY]
    expected = steps.references_of(flags, [steps.AS_FLAGS_SAY.loss], samples)
    whole = flags | {"teachers": json.dumps(steps.several_teachers(models, untied, sharded=False))}
    results = steps.check_steps(expected, 1, whole, samples, [steps.Layout(2, 4, 2)], cases)
    layouts = [steps.Layout(0, 1, 2), steps.Layout(2, 2, 1), steps.Layout(3, 1, 2)]
    results += steps.check_steps(expected, 4, flags, samples, layouts, cases)
    loss = expected[steps.AS_FLAGS_SAY.loss].loss
    for result in results:
        metrics = result.metrics
        total = 0.3 * metrics["ce"]
        for name in ("pieces", "equal", "projected", "gold"):
            total += metrics[f"kd/{name}"] * metrics[f"kd_weight/{name}"]
        assert abs(total - loss) <= 1e-5 * loss
        assert metrics["kd_weight/equal"] == 0.7 * 0.5
        assert metrics["kd_weight/pieces"] == 0.7 * 2


def check_flags(num_ranks, flags, samples, changes):
    """Compare a step in each change of the flags with its reference; return (results, losses)."""
    expected = steps.references([flags | change for change in changes], samples)
    layouts = [steps.Layout(2, 1, 2, change) for change in changes]
    results = ranks.run(num_ranks, steps.layout_results, flags, samples, layouts,
                        [steps.AS_FLAGS_SAY], steps.SMALL_TILE_MIB)[0]
    for result, reference in zip(results, expected, strict=True):
        steps.check_step(f"{num_ranks} ranks, {result.layout}", result, reference)
    return results, [reference.loss for reference in expected]


def test_teachers_weigh_as_much_as_they_are_sure(models, untied, texts, tmp_path):
    two = steps.several_teachers(models, untied)[:2]  # one model twice would tie
    flags = steps.flags_for(models, texts, tmp_path, teacher="", teachers=json.dumps(two),
                            kd_weight=1.0, ce_weight=1.0)
    changes = [{"teacher_weights": kind} for kind in ("ce", "select")]
    _, losses = check_flags(4, flags, steps.uneven_samples(texts), changes)
    assert len({round(loss, 4) for loss in losses}) == len(changes)


def test_the_mean_of_teachers_with_one_tokenizer(models, untied, texts, tmp_path):
    teachers = [
        {"model": str(untied), "tp": 2, "weight": 2.0, "loss": "gold"},
        {"model": str(models[0]), "weight": 0.5, "name": "b", "teacher_output": "logits"},
    ]
    flags = steps.flags_for(models, texts, tmp_path, teacher="", teachers=json.dumps(teachers),
                            ce_weight=1.0)
    changes = [{"teacher_weights": "mean_p"}]
    [result], _ = check_flags(4, flags, steps.uneven_samples(texts), changes)
    assert result.metrics["kd"] > 0
    # hidden states of the first, logits of the second
    assert result.metrics["teacher_output_bytes"] == 4 * 32 + 4 * 350


def student_passes(flags, samples):
    """Return the micro-step of every pass of the student in a step of two."""
    layout = steps.Layout(2, 4, 2)
    state, inputs = steps.start_layout(flags, layout)
    collator = steps.small_collator(state.cfg, inputs, state.device)
    passes = []
    state.engine.module.model.base_model.register_forward_hook(
        lambda *_: passes.append(state.engine.micro_steps))
    distill.train_step(state, [collator(texts) for texts in steps.texts_of_rank(samples, layout)])
    return passes


def test_three_teachers_share_one_student(models, untied, texts, tmp_path):
    """It runs once in a micro-batch; test_batch.py sees that it encodes each text once."""
    teachers = steps.several_teachers(models, untied, sharded=False)[:3]
    flags = steps.flags_for(models, texts, tmp_path, teacher="", teachers=json.dumps(teachers))
    assert ranks.run(1, student_passes, flags, steps.uneven_samples(texts)) == [[0, 1]]
