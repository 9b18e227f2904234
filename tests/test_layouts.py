"""The same loss and gradient in every layout, on real gloo ranks, as in one process with torch alone."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import ranks
import torch
from jobs import ds_config, job_for, write_corpus
from torch.utils._python_dispatch import TorchDispatchMode

import distill
import losses
from isogloss.data import Collate, CollateAll
from losses import next_token_cross_entropy
from teacher_mixing import teacher_scores
from isogloss.objective import ANY_TOKENIZERS


def batch_texts(texts):
    """Eight samples of very uneven length, one of them without a single token."""
    return [texts[0] * 2, None, texts[1][:9], texts[2], "", texts[3][:60], texts[4], texts[5][:30]]


def flags_of(case):
    """Of "LOSS", "LOSS packed", or "cross_entropy" alone."""
    loss, _, packed = case.partition(" ")
    own = {"loss": "piece_kl", "kd_weight": 0.0} if loss == "cross_entropy" else {"loss": loss}
    return ({} if loss == "several" else own) | ({"pack": True} if packed else {})


def packed_and_not(losses):
    """Cases, so that every other one has each loss once, half of them packed."""
    pairs = [(loss, f"{loss} packed") for loss in losses]
    return [case for i, pair in enumerate(pairs) for case in pair[:: -1 if i % 2 else 1]]


def layout_results(flags, texts, layouts, cases, tile_mib, halve=False):
    """[(name, loss metrics, gradients)] of one train_step per layout and case; runs on every rank.

    Args:
        halve: take every other case, odd ZeRO stages those that even ones leave out.
    """
    from deepspeed.utils import safe_get_full_grad

    out, (rank, world) = [], (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for stage, micro, micro_steps, *more in layouts:
        config = Path(flags["output_dir"]) / f"ds-{world}-{rank}-{stage}.json"
        still = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}  # the next loss finds it unmoved
        ds_config(config, stage, micro, micro_steps, optimizer=still)
        job, inputs = job_for(flags | {"ds_config": str(config)} | dict(*more))
        parts = job.cfg.sequence_parallel
        place, places = rank // parts, world // parts
        mine = [texts[(m * places + place) * micro :][:micro] for m in range(micro_steps)]
        gradients, step = {}, job.engine.step

        def spy(job=job, gradients=gradients, step=step):
            if job.engine.is_gradient_accumulation_boundary():
                for key, p in job.engine.module.named_parameters():
                    gradients[key] = safe_get_full_grad(p).clone()
            step()

        job.engine.step = spy
        for case in cases[stage % 2 :: 2] if halve else cases:
            own = flags_of(case)
            pack = own.pop("pack", job.cfg.pack)
            for lesson in job.lessons if own else ():
                lesson.cfg = dataclasses.replace(lesson.cfg, **{"kd_weight": job.cfg.kd_weight} | own)
                lesson.distillation = distill.build_loss(lesson.cfg, inputs.student, lesson.side, job.device)
            collate = distill.collate_all(dataclasses.replace(job.cfg, pack=pack), inputs, tile_mib)
            if pack:
                every = collate(texts)[0]
                assert len(every["student_ids"]) == len(every["teacher_ids"]) < len(texts)
            window = [collate(part) for part in mine]
            assert parts == 1 or "forward_kl" in case or len(collate(texts)[0]["travels"]) > 0
            tiles = window[0][0]["tiles"]
            assert rank or tile_mib > 9 or micro < 2 or len(tiles) > 1 < len(tiles[0].parts)
            metrics = distill.train_step(job, window)
            name = f"{case}, ZeRO {stage}, {world} ranks x {micro} x {micro_steps} {more}"
            out.append((name, metrics, dict(gradients) if rank == 0 else None))
        job.engine.destroy()
    return out


def plain_references(flags, texts, cases):
    """{case: (value, gradients)} of one process, one batch, torch alone: no engine, ranks, micro-batches."""
    distill.start_distributed()
    return {case: plain_reference(distill.Config(**flags | flags_of(case)), texts) for case in cases}


def plain_reference(cfg, texts):
    student, sides = distill.load_side("student", cfg.student, cfg.max_length)[0], {}
    for name, own in distill.of_each_teacher(cfg).items():
        sides[name] = distill.load_side("teacher", own.teacher, own.teacher_max_length)[0]
    lessons = distill.plan_lessons(cfg, student, sides, torch.device("cpu"))
    batches = CollateAll([Collate(student, x.side, x.distillation.spelling) for x in lessons])(texts)
    model = distill.AutoModelForCausalLM.from_pretrained(cfg.student)
    x = model(input_ids=batches[0]["student_ids"]).logits[..., : len(student.table)]
    ce, n = next_token_cross_entropy(x, batches[0]["student_labels"])
    value, kd, scores = cfg.ce_weight * ce / n, [], []
    mean = cfg.teacher_weights.startswith("mean_")
    for lesson, batch in zip(lessons, batches):
        assert torch.equal(batch["student_ids"], batches[0]["student_ids"])
        [tile], W = batch["tiles"], len(lesson.side.table)
        [part] = tile.parts
        y = [distill.load_teacher(own.teacher, W).logits(batch["teacher_ids"])[..., :W]
             for own in lesson.members]
        if mean:  # shares 2 and 1/2
            p = [x if cfg.teacher_weights == "mean_logits" else x.softmax(-1) for x in y]
            p = 0.8 * p[0] + 0.2 * p[1]
            y = [p if cfg.teacher_weights == "mean_logits" else p.log()]
        [y] = y
        kd_loss, columns = lesson.distillation.loss, slice(None)
        if lesson.keeps_columns:
            importance = distill.teacher_importance(y, batch["teacher_chunk"])
            columns = importance.topk(lesson.cfg.projection_topk).indices.sort().values
            kd_loss = lesson.distillation.keep(columns)
        kind, mask = cfg.teacher_weights.replace("select", "ce"), batch["teacher_labels"] >= 0
        if kind != "fixed" and not mean:
            score = teacher_scores(y, batch["teacher_labels"].clamp(min=0), mask, kind)
            size = batch["teacher_bytes"].clamp(min=0).sum(1).clamp(min=1)
            scores.append(score * mask.sum(1) / size if kind == "ce" else score)
        rows = x.flatten(0, 1)[tile.student_rows], y.flatten(0, 1)[part.fetch][:, columns]
        scale = lesson.cfg.kd_weight / batch["counts"]["kd"]
        sample = tile.student_rows // x.shape[1]
        kd.append(lambda weight, loss=kd_loss, rows=rows, part=part, scale=scale, sample=sample:
                  scale * loss(*rows, part._replace(weight=weight[sample])))
    weights = torch.ones(len(kd), len(texts))
    if scores and len(kd) > 1:
        weights = (cfg.teacher_alpha * torch.stack(scores)).softmax(0)
        if cfg.teacher_weights == "select":
            weights = (torch.stack(scores) == torch.stack(scores).amax(0)).float()
    value = value + sum(loss(weight) for loss, weight in zip(kd, weights))
    value.backward()
    return value.item(), {key: p.grad for key, p in model.named_parameters()}


LAYOUTS = {
    1: [(0, 2, 4), (1, 4, 2), (2, 2, 4), (3, 4, 2)],
    2: [(0, 2, 2), (1, 1, 4), (2, 4, 1), (3, 2, 2)],
    4: [(0, 2, 1), (2, 1, 2), (3, 1, 2)],
}


def test_same_loss_and_gradient_in_every_layout(models, texts, tmp_path):
    data = write_corpus(tmp_path, texts, 20)
    flags = dict(student=str(models[0]), teacher=str(models[1]), data=data, max_length=250, kd_weight=0.7,
                 ce_weight=0.3, temperature=2.0, projection_topk=100, output_dir=str(tmp_path), seed=1)
    samples, names = batch_texts(texts), ("cross_entropy", *ANY_TOKENIZERS)
    expected = ranks.run(1, plain_references, flags, samples, names)[0]
    for world, layouts in LAYOUTS.items():
        cases = packed_and_not(names) if world == 2 else ("piece_kl", "projection_kl")
        how = flags, samples, layouts, cases, 0.2, world == 2
        for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
            value, reference = expected[name.split(",")[0].split(" ")[0]]
            same_step(name, metrics, gradients, value, reference)


def same_step(name, metrics, gradients, value, reference):
    assert abs(metrics["loss"] - value) <= 1e-5 * value, name
    square = sum((g**2).sum() for g in reference.values())
    error = sum(((gradients[key] - g) ** 2).sum() for key, g in reference.items())
    assert error <= 1e-10 * square, (name, float((error / square) ** 0.5))
    assert abs(metrics["grad_norm"] - square**0.5) <= 1e-5 * square**0.5, name


PACKED = {  # ranks: (ZeRO stage, samples, micro-steps, flags); rows of 250 and 250 positions
    1: [(2, 8, 1, {})],
    2: [(0, 4, 1, {}), (3, 4, 2, {"sequence_parallel": 2, "teacher_tp": 2}),
        (2, 2, 2, {"teacher_tp": 2})]}


@pytest.mark.parametrize("losses", [("piece_kl", "projection_kl", "gold"), ("several",)])
def test_same_loss_and_gradient_of_packed_samples(models, untied, texts, tmp_path, losses):
    """Fewer rows than samples, documents that do not see each other, weights that stay with their sample."""
    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=250, kd_weight=0.7, ce_weight=0.3,
                 data=write_corpus(tmp_path, texts, 20), projection_topk=100, output_dir=str(tmp_path))
    if losses == ("several",):
        teachers = json.loads(several_teachers(models, untied))[:2]
        flags |= {"teacher": "", "teachers": json.dumps([x | {"tp": 1} for x in teachers]),
                  "teacher_weights": "ce", "teacher_alpha": 0.7}
    samples = batch_texts(texts)
    expected = ranks.run(1, plain_references, flags, samples, losses)[0]
    for world, layouts in PACKED.items():
        how = flags | {"pack": True}, samples, layouts[: 1 if "teachers" in flags else 3], losses, 0.2
        for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
            same_step(name, metrics, gradients, *expected[name.split(",")[0]])


SEQUENCES = {  # ranks: (ZeRO stage, samples, micro-steps, flags)
    2: [(stage, 4, 2, {"sequence_parallel": 2}) for stage in range(4)],
    4: [(stage, 8, 1, {"sequence_parallel": 4, "teacher_tp": 2}) for stage in range(4)]}
MIXED = {
    4: [(2, 2, 2, {"sequence_parallel": 2, "teacher_tp": 2}),
        (1, 4, 1, {"sequence_parallel": 2, "teacher_tp": 4}),
        (0, 8, 1, {"sequence_parallel": 4, "teacher_tp": 4}),
        (3, 2, 2, {"sequence_parallel": 2, "activation_checkpointing": True, "activation_offload": True,
                   "mlp_tiles": 3}),
        (3, 1, 8, {"sequence_parallel": 4})],  # a text a micro-batch, some shorter than its four ranks
    8: [(3, 4, 1, {"sequence_parallel": 4, "teacher_tp": 2}),
        (2, 2, 1, {"sequence_parallel": 2, "teacher_tp": 4}), (1, 1, 1, {"teacher_tp": 8})]}
IN_PARTS = "cross_entropy", "piece_kl", "projection_kl", "gold", "alm"


def test_same_loss_and_gradient_with_sequences_in_parts(models, untied, texts, tmp_path):
    """Every ZeRO stage, two and four parts, packed and not."""
    flags = dict(student=str(models[0]), max_length=250, kd_weight=0.7, ce_weight=0.3,
                 data=write_corpus(tmp_path, texts, 20), projection_topk=100, output_dir=str(tmp_path))
    samples = batch_texts(texts)
    for teacher, names in ((models[1], IN_PARTS), (untied, ["forward_kl"])):
        own = flags | {"teacher": str(teacher)}
        expected = ranks.run(1, plain_references, own, samples, names)[0]
        whole = {2: [(stage, 2, 2, {}) for stage in range(4)]}  # for two tokenizers that is another test
        for world, layouts in (SEQUENCES if teacher == models[1] else SEQUENCES | whole).items():
            how = own, samples, layouts, packed_and_not(names), 0.2, world == 4 and len(names) > 1
            for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
                same_step(name, metrics, gradients, *expected[name.split(",")[0].split(" ")[0]])


def test_same_loss_and_gradient_in_mixed_layouts(models, texts, tmp_path):
    """Data, sequence and tensor parallelism together, on four and eight ranks; memory saved in every way."""
    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=250, kd_weight=0.7, ce_weight=0.3,
                 data=write_corpus(tmp_path, texts, 20), projection_topk=100, output_dir=str(tmp_path))
    samples, losses = batch_texts(texts), ("piece_kl", "projection_kl")
    expected = ranks.run(1, plain_references, flags, samples, losses)[0]
    for world, layouts in MIXED.items():
        how = flags, samples, layouts, losses, 0.2
        for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
            same_step(name, metrics, gradients, *expected[name.split(",")[0]])


def sgd_steps(flags, texts, layouts):
    """[(layout, how far one step of plain SGD with learning rate 1 moves every parameter)]."""
    from deepspeed.utils import safe_get_full_fp32_param

    def weights(engine):
        # stage 0 has no partitioned optimizer to ask
        return {key: (safe_get_full_fp32_param(p) if engine.zero_optimization() else p).detach().clone()
                for key, p in engine.module.named_parameters()}

    out, (rank, world) = [], (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for stage, micro, micro_steps, how in layouts:
        config = Path(flags["output_dir"]) / f"sgd-{world}-{rank}-{stage}.json"
        ds_config(config, stage, micro, micro_steps, optimizer={"type": "SGD", "params": {"lr": 1.0}},
                  gradient_clipping=0.0, zero_allow_untested_optimizer=True)
        job, inputs = job_for(flags | {"ds_config": str(config)} | how)
        parts, collate = job.cfg.sequence_parallel, distill.collate_all(job.cfg, inputs, 0.2)
        place, places = rank // parts, world // parts
        before = weights(job.engine)
        distill.train_step(job, [collate(texts[(m * places + place) * micro :][:micro])
                                 for m in range(micro_steps)])
        after = weights(job.engine)
        out.append(((stage, how), {key: before[key] - after[key] for key in before}))
        job.engine.destroy()
    return out


def test_a_step_of_plain_sgd_is_the_gradient(models, texts, tmp_path):
    """No factor of ranks, parts or stages is hidden by Adam or by clipping."""
    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=250, kd_weight=0.7, ce_weight=0.3,
                 data=write_corpus(tmp_path, texts, 20), output_dir=str(tmp_path))
    samples = batch_texts(texts)
    _, reference = ranks.run(1, plain_references, flags, samples, ["piece_kl"])[0]["piece_kl"]
    square = sum((g**2).sum() for g in reference.values())
    for world, micro, parts in ((2, 2, 1), (2, 4, 2), (4, 4, 2)):
        rest = micro, 8 * parts // (micro * world), {"sequence_parallel": parts}
        layouts = [(stage, *rest) for stage in range(4)]
        for layout, moved in ranks.run(world, sgd_steps, flags, samples, layouts)[0]:
            error = sum(((moved[key] - g) ** 2).sum() for key, g in reference.items())
            assert error <= 1e-10 * square, (world, layout, float((error / square) ** 0.5))


LEAN = {"activation_offload": True, "mlp_tiles": 3}


def test_same_gradient_tied_or_not_tiled_or_not(models, untied, texts, tmp_path):
    flags = dict(teacher=str(models[1]), data=write_corpus(tmp_path, texts, 20), max_length=250,
                 projection_topk=100, output_dir=str(tmp_path), loss="gold", activation_checkpointing=True)
    samples = batch_texts(texts)
    for student in (models[0], untied):
        own = flags | {"student": str(student)}
        value, reference = ranks.run(1, plain_references, own, samples, ["gold"])[0]["gold"]
        for tiled, layouts in ((True, [(2, 2, 2, LEAN), (3, 2, 2)]), (False, [(1, 2, 2), (3, 1, 4, LEAN)])):
            how = own | {"tiled": tiled}, samples, layouts, ["gold"], 0.2 if tiled else math.inf
            for name, metrics, gradients in ranks.run(2, layout_results, *how)[0]:
                same_step(f"{student}, tiled {tiled}, {name}", metrics, gradients, value, reference)


TEACHERS = [{"teacher_tp": 2, "teacher_offload": True}, {"teacher_tp": 4}, {"teacher_engine": "zero3"},
            {"teacher_tp": 2, "exchange": "logits"},
            {"teacher_tp": 4, "exchange": "topk", "exchange_topk": 600}]  # all of the 500 tokens


def test_same_loss_and_gradient_however_the_teacher_is_held(models, texts, tmp_path):
    """Student: data parallelism 4.  Teacher: tensor x data parallelism 2 x 2 and 4 x 1, or ZeRO-3."""
    data = write_corpus(tmp_path, texts, 20)
    flags = dict(student=str(models[0]), teacher=str(models[1]), data=data, max_length=250,
                 projection_topk=100, output_dir=str(tmp_path))
    samples, losses = batch_texts(texts), ("piece_kl", "projection_kl")
    expected = ranks.run(1, plain_references, flags, samples, losses)[0]
    layouts = [(2, 1, 2, how) for how in TEACHERS]
    per_token = {"hidden": 32 * 4, "logits": 500 * 4, "topk": 500 * (4 + 4) + 4}  # float32
    for name, metrics, gradients in ranks.run(4, layout_results, flags, samples, layouts, losses, 0.2)[0]:
        same_step(name, metrics, gradients, *expected[name.split(",")[0]])
        payload = per_token[next((x for x in ("logits", "topk") if f"'{x}'" in name), "hidden")]
        assert metrics["teacher_bytes_per_token"] == payload, name


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


def largest_tensors(flags, texts, changes):
    return [largest_tensor(flags | change, texts) for change in changes]


def largest_tensor(flags, texts):
    """(largest tensor of a step, student positions x V, teacher positions x W)."""
    job, inputs = job_for(flags)
    [batch] = distill.collate_all(job.cfg, inputs, 0.2)(texts)
    with Largest() as found:
        distill.train_step(job, [[batch]])
    return (found.numel, batch["student_ids"].numel() * job.vocab,
            batch["teacher_ids"].numel() * len(job.lessons[0].side.table))


def test_no_logits_of_all_positions_exist(models, texts, tmp_path):
    """Neither of the student nor of the teacher, forward or backward; the plain path does make them."""
    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=250, output_dir=str(tmp_path),
                 data=write_corpus(tmp_path, texts, 20), projection_topk=100,
                 ds_config=ds_config(tmp_path / "ds.json", 0, 8, 1))
    changes = [{"loss": loss} for loss in ("piece_kl", "projection_kl", "gold", "uld")] + [{"tiled": False}]
    [(*tiled, plain)] = ranks.run(1, largest_tensors, flags, batch_texts(texts), changes)
    parts = [{"loss": loss, "sequence_parallel": 2} for loss in ("piece_kl", "gold")]
    for found in ranks.run(2, largest_tensors, flags, batch_texts(texts), parts):
        tiled += found
    for most, of_student, of_teacher in tiled:
        assert most < 0.5 * min(of_student, of_teacher)  # it is a layer of the models
    assert plain[0] >= max(plain[1:])


def several_teachers(models, untied):
    """As --teachers: two tokenizers, four losses, one teacher that sees less of a text than the others."""
    return json.dumps([
        {"model": str(models[1]), "tp": 2, "weight": 2.0, "name": "pieces", "max_length": 150},
        {"model": str(untied), "loss": "forward_kl", "weight": 0.5, "temperature": 2.0, "name": "own"},
        {"model": str(models[1]), "loss": "projection_kl", "engine": "zero3", "name": "projected"},
        {"model": str(models[1]), "loss": "gold", "tp": 4, "exchange": "logits", "name": "gold"}])


def test_several_teachers_give_the_sum_of_their_losses(models, untied, texts, tmp_path):
    flags = dict(student=str(models[0]), teachers=several_teachers(models, untied), max_length=250,
                 data=write_corpus(tmp_path, texts, 20), kd_weight=0.7, ce_weight=0.3, projection_topk=100,
                 normalize_by_vocab=True, output_dir=str(tmp_path))
    samples = batch_texts(texts)
    value, reference = ranks.run(1, plain_references, flags, samples, ["several"])[0]["several"]
    for world, layouts in {1: [(2, 4, 2)], 4: [(0, 1, 2), (2, 2, 1), (3, 1, 2)]}.items():
        own = flags | ({"teachers": flags["teachers"].replace('"tp": 2, ', "").replace('"tp": 4, ', "")}
                       if world == 1 else {})
        for name, metrics, gradients in ranks.run(world, layout_results, own, samples, layouts, ["several"],
                                                  0.2)[0]:
            same_step(name, metrics, gradients, value, reference)
            names = "pieces", "own", "projected", "gold"
            kd = sum(metrics[f"kd/{x}"] * metrics[f"kd_weight/{x}"] for x in names)
            assert abs(0.3 * metrics["ce"] + kd - value) <= 1e-5 * value
    assert metrics["kd_weight/own"] == 0.7 * 0.5 and 1.0 < 0.7 * 2 / metrics["kd_weight/pieces"] < 1.2


def test_teachers_weigh_as_much_as_they_are_sure(models, untied, texts, tmp_path):
    two = json.dumps(json.loads(several_teachers(models, untied))[:2])  # one model twice would tie
    base = dict(student=str(models[0]), teachers=two, max_length=250,
                data=write_corpus(tmp_path, texts, 20), projection_topk=100, output_dir=str(tmp_path))
    kinds = {kind: {"teacher_weights": kind, "teacher_alpha": 0.7} for kind in
             ("ce", "entropy", "max_prob", "select")}
    samples, layouts = batch_texts(texts), [(2, 1, 2, how) for how in kinds.values()]
    found = ranks.run(4, layout_results, base, samples, layouts, ["several"], 0.2)[0]
    values = set()
    for how, (name, metrics, gradients) in zip(kinds.values(), found, strict=True):
        value, reference = ranks.run(1, plain_references, base | how, samples, ["several"])[0]["several"]
        same_step(name, metrics, gradients, value, reference)
        values.add(round(value, 4))
    assert len(values) == len(kinds)


def test_the_mean_of_teachers_with_one_tokenizer(models, untied, texts, tmp_path):
    teachers = [{"model": str(untied), "tp": 2, "weight": 2.0, "loss": "gold"},
                {"model": str(models[0]), "weight": 0.5, "name": "b", "exchange": "logits"}]
    base = dict(student=str(models[0]), teachers=json.dumps(teachers), max_length=250, kd_weight=0.7,
                data=write_corpus(tmp_path, texts, 20), output_dir=str(tmp_path))
    kinds = [{"teacher_weights": kind} for kind in ("mean_p", "mean_logits")]
    samples, layouts = batch_texts(texts), [(2, 1, 2, how) for how in kinds]
    found = ranks.run(4, layout_results, base, samples, layouts, ["several"], 0.2)[0]
    for how, (name, metrics, gradients) in zip(kinds, found, strict=True):
        value, reference = ranks.run(1, plain_references, base | how, samples, ["several"])[0]["several"]
        same_step(name, metrics, gradients, value, reference)
        assert metrics["kd"] > 0 and metrics["teacher_bytes_per_token"] == 4 * 32 + 4 * 350
