"""The same loss and gradient in every layout, whole checkpoints, exact resume, export: on real gloo ranks."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import distill
import losses
from data import Collate, CollateAll
from losses import next_token_cross_entropy
from objective import ANY_TOKENIZERS, ONE_TOKENIZER
from projection_tools import Pair, load_projection
from projection_tools.build import build_projection

SAMPLES = 8


def ds_config(path, stage, micro, micro_steps, **more):
    """A ds_config file; float32, AdamW unless `more` says otherwise."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": micro_steps,
              "gradient_clipping": 0.5, "zero_optimization": {"stage": stage}, "optimizer": optimizer}
    path.write_text(json.dumps(config | more))
    return str(path)


def write_corpus(folder, texts, count):
    path = Path(folder) / f"corpus{count}.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts[:count]))
    return str(path)


# --- invariance ---


def job_for(flags):
    device = distill.start_distributed()
    distill.quieten()
    cfg = distill.Config(**flags)
    inputs = distill.check_inputs(cfg, device)
    return distill.build_job(cfg, inputs, device), inputs


def batch_texts(texts):
    """Eight samples of very uneven length, one of them without a single token."""
    return [texts[0] * 2, None, texts[1][:9], texts[2], "", texts[3][:60], texts[4], texts[5][:30]]


def layout_results(flags, texts, layouts, losses, tile_mib):
    """[(name, loss metrics, gradients)] of one train_step per layout and loss; runs on every rank."""
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
        for loss in losses:
            for lesson in job.lessons if loss != "several" else ():
                lesson.cfg = dataclasses.replace(lesson.cfg, loss=loss)
                lesson.distillation = distill.build_loss(lesson.cfg, inputs.student, lesson.side, job.device)
            collate = distill.collate_all(job.cfg, inputs, tile_mib)
            if job.cfg.pack:
                every = collate(texts)[0]
                assert len(every["student_ids"]) == len(every["teacher_ids"]) < len(texts)
            window = [collate(part) for part in mine]
            assert parts == 1 or len(collate(texts)[0]["travels"]) > 0
            tiles = window[0][0]["tiles"]
            assert rank or tile_mib > 9 or len(tiles) > 1 < len(tiles[0].parts)
            metrics = distill.train_step(job, window)
            name = f"{loss}, ZeRO {stage}, {world} ranks x {micro} x {micro_steps} {more}"
            out.append((name, metrics, dict(gradients) if rank == 0 else None))
        job.engine.destroy()
    return out


def plain_references(flags, texts, losses):
    """{loss: (value, gradients)} of one process, one batch, torch alone: no engine, ranks, micro-batches."""
    distill.start_distributed()
    named = {loss: flags if loss == "several" else flags | {"loss": loss} for loss in losses}
    return {loss: plain_reference(distill.Config(**own), texts) for loss, own in named.items()}


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
            score = losses.teacher_scores(y, batch["teacher_labels"].clamp(min=0), mask, kind)
            size = batch["teacher_bytes"].clamp(min=0).sum(1).clamp(min=1)
            scores.append(score * mask.sum(1) / size if kind == "ce" else score)
        rows = x.flatten(0, 1)[tile.student_rows], y.flatten(0, 1)[tile.teacher_rows][:, columns]
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
    1: [(2, 2, 4), (3, 4, 2)],
    2: [(0, 2, 2), (1, 1, 4), (2, 4, 1), (3, 2, 2)],
    4: [(0, 2, 1), (2, 1, 2), (3, 1, 2)],
}


def test_same_loss_and_gradient_in_every_layout(models, texts, tmp_path):
    data = write_corpus(tmp_path, texts, 20)
    flags = dict(student=str(models[0]), teacher=str(models[1]), data=data, max_length=250, kd_weight=0.7,
                 ce_weight=0.3, temperature=2.0, projection_topk=100, output_dir=str(tmp_path), seed=1)
    samples = batch_texts(texts)
    expected = ranks.run(1, plain_references, flags, samples, ANY_TOKENIZERS)[0]
    for world, layouts in LAYOUTS.items():
        losses = ANY_TOKENIZERS if world == 2 else ("piece_kl", "projection_kl")
        how = flags, samples, layouts, losses, 0.2
        for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
            value, reference = expected[name.split(",")[0]]
            same_step(name, metrics, gradients, value, reference)


def same_step(name, metrics, gradients, value, reference):
    assert abs(metrics["loss"] - value) <= 1e-5 * value, name
    square = sum((g**2).sum() for g in reference.values())
    error = sum(((gradients[key] - g) ** 2).sum() for key, g in reference.items())
    assert error <= 1e-10 * square, (name, float((error / square) ** 0.5))
    assert abs(metrics["grad_norm"] - square**0.5) <= 1e-5 * square**0.5, name


@pytest.fixture(scope="module")
def untied(models, tmp_path_factory):
    """The student with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    shutil.copytree(models[0], folder, dirs_exist_ok=True)
    model = distill.AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    distill.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


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


def deaf_to_positions(argv, said):
    """A run whose student does not hear where its samples begin; its stderr goes to a file."""
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)

    def deaf(model, *args, run_inside=distill.run_inside_forward):
        run_inside(model, *args)
        forward = model.forward
        model.forward = lambda *a, position_ids=None, **how: forward(*a, **how)

    distill.run_inside_forward = deaf
    return run_distill([argv])


def test_models_that_see_across_packed_samples_are_refused(flags):
    """A run with packed samples, in parts and with teachers apart; and one whose model would mix them."""
    folder, common = flags
    base = [*common, f"--ds_config={folder / 'zero2.json'}", "--steps=2", "--pack"]
    runs = {2: ["--sequence_parallel=2"], 3: ["--teacher_ranks=1", "--tiled=false"]}
    for world, how in runs.items():
        argv = [*base, *how, f"--output_dir={folder / f'packed{world}'}"]
        assert ranks.run(world, run_distill, [argv]) == [[0]] * world
        assert math.isfinite(losses_of(folder / f"packed{world}")[-1]["eval/kd"])
    said = folder / "said"
    assert ranks.run(1, deaf_to_positions, [*base, f"--output_dir={folder / 'deaf'}"], str(said)) == [[2]]
    assert "depends on the text before it in the same row; use --pack=false" in said.read_text()


SEQUENCES = {  # ranks: (ZeRO stage, samples, micro-steps, flags)
    2: [(stage, 4, 2, {"sequence_parallel": 2}) for stage in range(4)],
    4: [(0, 8, 1, {"sequence_parallel": 4}), (2, 2, 2, {"sequence_parallel": 2, "teacher_tp": 2}),
        (3, 4, 2, {"sequence_parallel": 4, "teacher_tp": 2}),
        (1, 4, 1, {"sequence_parallel": 2, "teacher_tp": 4})]}


def test_same_loss_and_gradient_with_sequences_in_parts(models, texts, tmp_path):
    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=250, kd_weight=0.7, ce_weight=0.3,
                 data=write_corpus(tmp_path, texts, 20), projection_topk=100, output_dir=str(tmp_path))
    samples, losses = batch_texts(texts), ("piece_kl", "projection_kl", "gold", "alm")
    expected = ranks.run(1, plain_references, flags, samples, losses)[0]
    for world, layouts in SEQUENCES.items():
        own = losses if world == 2 else losses[:2]
        how = flags, samples, layouts, own, 0.2
        for name, metrics, gradients in ranks.run(world, layout_results, *how)[0]:
            same_step(name, metrics, gradients, *expected[name.split(",")[0]])


CURVES = [(4, 1, 2, 1), (4, 2, 2, 2), (4, 4, 8, 1), (4, 4, 2, 4), (2, 2, 4, 2)]  # ranks, parts, micro, steps


def test_the_same_curve_in_every_layout(models, texts, tmp_path):
    """Twenty steps of eight samples, evaluated on the way; learning rate and clipping as in earnest."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 60)}",
            "--eval_rows=5", "--max_length=120", "--steps=20", "--eval_every=10"]
    curves = []
    for world, parts, micro, micro_steps in [(1, 1, 8, 1), *CURVES]:
        name = f"{world}_{parts}_{micro}_{micro_steps}"
        config = ds_config(tmp_path / f"{name}.json", 2 if parts < 4 else 3, micro, micro_steps)
        how = [f"--ds_config={config}", f"--sequence_parallel={parts}", f"--output_dir={tmp_path / name}"]
        assert ranks.run(world, run_distill, [argv + how]) == [[0]] * world
        curves.append(losses_of(tmp_path / name, -1))
    first = curves[0]
    assert first[-2]["loss"] < 0.9 * first[1]["loss"]
    for layout, curve in zip(CURVES, curves[1:]):
        for a, b in zip(first, curve, strict=True):
            assert a.keys() == b.keys()
            assert all(math.isclose(a[key], b[key], rel_tol=1e-4, abs_tol=1e-6) for key in a), (layout, a, b)


MOVES = {  # layout of a checkpoint -> those in which the run goes on: ranks, parts, ZeRO stage, micro, steps
    (2, 1, 2, 2, 2): [(4, 1, 2, 2, 1), (1, 1, 2, 4, 2), (4, 2, 1, 4, 1), (2, 1, 3, 2, 2)],
    (2, 2, 3, 4, 2): [(4, 2, 3, 2, 2), (2, 1, 3, 4, 1)]}


def test_a_run_goes_on_in_another_layout(models, texts, tmp_path):
    """Other ranks, ZeRO stage, parts of sequences, accumulation: the losses are as if nothing had changed."""
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--data={write_corpus(tmp_path, texts, 30)}",
            "--max_length=120"]
    schedule = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}
    decay = {"lr": 1e-3, "weight_decay": 50.0, "torch_adam": True}  # not for norms

    def run(layout, *more):
        world, parts, stage, micro, micro_steps = layout
        name = "-".join(map(str, (*layout, len(more))))
        config = ds_config(tmp_path / f"{name}.json", stage, micro, micro_steps, scheduler=schedule,
                           optimizer={"type": "AdamW", "params": decay})
        how = [f"--ds_config={config}", f"--sequence_parallel={parts}", f"--output_dir={tmp_path / name}"]
        codes = {code for [code] in ranks.run(world, run_distill, [[*argv, *how, *more]])}
        return tmp_path / name, codes

    for first, moves in MOVES.items():
        folder, codes = run(first, "--steps=5", "--save_every=3")
        checkpoint = folder / "checkpoints" / "step_0000003"
        assert codes == {0}
        for layout in moves:
            other, codes = run(layout, "--steps=5", f"--resume={checkpoint}", "--save_every=4")
            assert codes == {0}, layout
            for a, b in zip(losses_of(folder, 3), losses_of(other), strict=True):
                same = all(math.isclose(a[key], b[key], rel_tol=1e-5, abs_tol=1e-7) for key in a)
                assert same, (layout, a, b)
            left = {path.name for path in checkpoint.parent.iterdir()}
            assert {x for x in left if "zero_to" not in x} == {"step_0000003"}  # they come from DeepSpeed
    assert run((2, 1, 0, 4, 1), "--steps=5", f"--resume={checkpoint}")[1] == {2}  # ZeRO stage 0
    assert run((2, 1, 2, 4, 2), "--steps=5", f"--resume={checkpoint}")[1] == {2}  # 16 samples a step


def test_same_gradient_tied_or_not_tiled_or_not(models, untied, texts, tmp_path):
    flags = dict(teacher=str(models[1]), data=write_corpus(tmp_path, texts, 20), max_length=250,
                 projection_topk=100, output_dir=str(tmp_path), loss="gold", activation_checkpointing=True)
    samples = batch_texts(texts)
    for student in (models[0], untied):
        own = flags | {"student": str(student)}
        value, reference = ranks.run(1, plain_references, own, samples, ["gold"])[0]["gold"]
        for tiled, layouts in ((True, [(2, 2, 2), (3, 2, 2)]), (False, [(1, 2, 2), (3, 1, 4)])):
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
                 normalise_vocabulary=True, output_dir=str(tmp_path))
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


def test_a_run_with_several_teachers_evaluates_stops_and_goes_on(flags, models, untied):
    folder, common = flags
    argv = [flag for flag in common if not flag.startswith("--teacher")] + ["--steps=4", "--save_every=2"]
    argv += [f"--ds_config={folder / 'zero2.json'}", f"--output_dir={folder / 'several'}"]
    argv.append("--teachers=" + json.dumps([{"model": str(models[1]), "tp": 2, "name": "a"},
                                            {"model": str(untied), "loss": "alm", "name": "b"}]))
    step = folder / "several" / "checkpoints" / "step_0000002"
    again = [*argv, f"--resume={step}"]
    assert ranks.run(2, run_distill, [argv]) == [[0]] * 2
    first = losses_of(folder / "several", 2)
    assert ranks.run(2, run_distill, [again]) == [[0]] * 2
    assert losses_of(folder / "several", 2) == first
    assert {"kd/a", "kd/b", "chunks_1_1/a", "ce", "loss"} <= first[0].keys()
    assert {"eval/kd/a", "eval/teacher_bits_per_byte/b", "eval/student_bits_per_byte"} <= first[-1].keys()


def test_teachers_by_the_domain_of_a_row(flags, models, untied, texts):
    """Two teachers, half of the rows each; with one row a rank and step, some have nothing of a teacher."""
    folder, common = flags
    data, odd = folder / "domains.jsonl", iter(range(99))
    data.write_text("\n".join(json.dumps({"text": t, "domain": "xy"[next(odd) % 2]}) for t in texts[:12]))
    argv = [flag for flag in common if not flag.startswith(("--teacher", "--data"))]
    argv += [f"--ds_config={folder / 'zero3.json'}", f"--data={data}", "--steps=5", "--route_key=domain"]
    teachers = [{"model": str(models[1]), "name": "a", "routes": ["x"], "tp": 2},
                {"model": str(untied), "loss": "projection_kl", "name": "b"}]
    runs = [[*argv, f"--teachers={json.dumps(teachers)}", f"--output_dir={folder / 'routed'}"],
            [*argv, f"--teachers={json.dumps(teachers)}", "--route_key=topic"]]
    assert ranks.run(2, run_distill, runs) == [[0, 2]] * 2
    lines = losses_of(folder / "routed")[:-1]
    shares = [[line[f"aligned_tokens/{name}"] for line in lines] for name in "ab"]
    assert all(0.9 < a + b <= 1 for a, b in zip(*shares)) and min(shares[0]) < 0.4 < max(shares[0])
    assert all(math.isfinite(line["loss"]) for line in lines)


TWO = '--teachers=[{"model":"TEACHER","tp":2,"name":"a"},{"model":"OTHER","loss":"alm","name":"b"}]'
APART = [  # flags, and those of ranks for teachers beside the two of the student
    (["--loss=piece_kl"], ["--teacher_ranks=2", "--teacher_tp=2"]),
    (["--loss=piece_kl"], ["--teacher_ranks=2", "--teacher_engine=transformers", "--teacher_tp=2"]),
    (["--loss=projection_kl", "--exchange=logits", "--projection_topk=100"],
     ["--teacher_ranks=2", "--teacher_tp=2"]),
    (["--loss=projection_kl", "--exchange=topk", "--exchange_topk=600"],
     ["--teacher_ranks=3", "--teacher_engine=zero3"]),
    (["--loss=gold", "--tiled=false"], ["--teacher_ranks=1"]), ([TWO], ["--teacher_ranks=2"])]


def test_teachers_on_ranks_of_their_own(flags, models, untied):
    """Losses, gradient norms and evaluations do not depend on where the teacher is."""
    folder, common = flags
    base = [*common, f"--ds_config={folder / 'zero2.json'}", "--steps=4", "--eval_every=2"]
    seen = {}
    for number, (how, apart) in enumerate(APART):
        how = [x.replace("TEACHER", str(models[1])).replace("OTHER", str(untied)) for x in how]
        argv = [x for x in base if not (x.startswith("--teacher") and "--teachers" in how[0])] + how
        lines = []
        for more in ([], apart):
            output, world = folder / f"apart_{number}_{len(more)}", 2
            if more:
                world += int(more[0].removeprefix("--teacher_ranks="))
            if (str(how), str(more)) not in seen:
                run = [[*argv, *more, f"--output_dir={output}"]]
                assert ranks.run(world, run_distill, run) == [[0]] * world, (how, apart)
                seen[str(how), str(more)] = losses_of(output)
            lines.append(seen[str(how), str(more)])
        assert [line["step"] for line in lines[0]] == [1, 2, 2, 3, 4, 4]
        for a, b in zip(*lines, strict=True):
            assert a.keys() == b.keys()
            assert all(math.isclose(a[key], b[key], rel_tol=1e-5, abs_tol=1e-7) for key in a), (apart, a, b)


def one_tokenizer_steps(flags, texts, names):
    """{loss: metrics of two steps} with the student as its own teacher at first."""
    job, inputs = job_for(flags)
    collate, out = distill.collate_all(job.cfg, inputs, math.inf), {}
    for name in names:
        cfg = distill.Config(**flags | {"loss": name})
        [lesson] = job.lessons
        lesson.distillation = distill.build_loss(cfg, inputs.student, lesson.side, job.device)
        half = texts[dist.get_rank() :: 2]
        out[name] = [distill.train_step(job, [collate(half)]) for _ in range(2)]
    return out


def test_every_loss_for_one_tokenizer_trains(models, texts, tmp_path):
    flags = dict(student=str(models[0]), teacher=str(models[0]), data=write_corpus(tmp_path, texts, 20),
                 max_length=120, output_dir=str(tmp_path), loss="forward_kl", top_k=20,
                 ds_config=ds_config(tmp_path / "ds.json", 2, 4, 1))
    names = list(ONE_TOKENIZER)
    for found in ranks.run(2, one_tokenizer_steps, flags, texts[:8], names):
        first = found[names[0]][0]
        assert abs(first["kd"]) < 1e-6 and first["aligned_tokens"] > 0.95  # it agrees with itself
        assert all(0 < found[name][1]["kd"] < 1 and found[name][1]["ce"] < first["ce"] for name in names)


# --- runs that stop and go on ---


def run_distill(argv_list):
    """Several command lines in one process; their exit codes."""
    codes = []
    for argv in argv_list:
        try:
            distill.cli(argv + ["--local_rank=" + os.environ["LOCAL_RANK"]])
            codes.append(0)
        except SystemExit as end:
            codes.append(end.code)
    return codes


@pytest.fixture(scope="module")
def flags(models, texts, tmp_path_factory):
    """A small run that crosses epochs in mid-step, with dropout, schedule, accumulation and clipping."""
    folder = tmp_path_factory.mktemp("runs")
    student = folder / "student"
    shutil.copytree(models[0], student)
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    schedule = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    for stage in range(4):
        ds_config(folder / f"zero{stage}.json", stage, 1, 2, scheduler=schedule)
    ds_config(folder / "bf16.json", 2, 1, 2, scheduler=schedule, bf16={"enabled": True})
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    ds_config(folder / "offload.json", 2, 1, 2, scheduler=schedule, zero_optimization=offload,
              zero_force_ds_cpu_optimizer=False)
    data = write_corpus(folder, texts, 11)
    return folder, [f"--student={student}", f"--teacher={models[1]}", f"--data={data}", "--eval_rows=2",
                    "--max_length=120"]


def losses_of(output, start=0):
    """{step: everything but times} of a run."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in line.items() if k not in times} for line in lines if line["step"] > start]


def test_resume_is_exact_and_export_equals_the_engine(flags, texts):
    """For every ZeRO stage, bf16 and offload: 6 steps at once, and 2 + 4 steps, give the same bits."""
    folder, common = flags
    kinds = ["zero0", "zero1", "zero2", "zero3", "bf16", "offload"]
    first, second = [], []
    for kind in kinds:
        base = [*common, f"--ds_config={folder / kind}.json", "--steps=6", "--eval_every=3"]
        base += ["--activation_checkpointing"] * (kind == "zero1")
        whole, part = [f"--output_dir={folder / name / kind}" for name in ("whole", "part")]
        export = f"--export={folder / 'export' / kind}"
        first.append([*base, whole, "--save_every=2", "--keep_checkpoints=9", export])
        second.append([*base, part, f"--resume={folder / 'whole' / kind / 'checkpoints' / 'step_0000002'}"])
    assert ranks.run(2, run_distill, first) == [[0] * len(kinds)] * 2
    assert ranks.run(2, run_distill, second) == [[0] * len(kinds)] * 2
    for kind in kinds:
        whole, part = losses_of(folder / "whole" / kind, 2), losses_of(folder / "part" / kind)
        assert whole == part and len(part) == 6, kind  # four steps, evaluated after 3 and 6
        assert part[-1]["eval/kd"] > 0 and part[0]["loss"] != part[-2]["loss"]
        run = json.loads((folder / "whole" / kind / "run.json").read_text())
        assert run["ranks"] == 2 and run["ds_config"]["scheduler"]["params"]["total_num_steps"] == 6
    exported = {kind: held_out_bits(folder / "export" / kind, texts) for kind in kinds}
    for kind in kinds:
        logged = losses_of(folder / "whole" / kind)[-1]["eval/student_bits_per_byte"]
        assert abs(exported[kind] / logged - 1) < (1e-6 if kind != "bf16" else 1e-3), kind


def held_out_bits(directory, texts):
    """Bits per byte of an exported student, with transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = [kind.from_pretrained(directory) for kind in (AutoModelForCausalLM, AutoTokenizer)]
    nats = size = 0
    for text in texts[:2]:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        ids = torch.tensor([ids[:121]])
        logp = model(ids).logits[0, :-1, : len(tokenizer)].double().log_softmax(-1)
        nats -= logp.gather(1, ids[0, 1:, None]).sum().item()
        size += len(tokenizer.decode(ids[0, 1:]).encode())
    return nats / size / 0.6931471805599453


def run_until(argv, moment):
    """A job whose rank 0 gets SIGKILL in the backward of step 4, or once it has written a file."""
    if os.environ["RANK"] == "0":
        calls = itertools.count(1)
        if moment == "mid-step":
            die_after(distill, "gradient_norm", lambda engine: next(calls) == 7)
        else:
            die_after(torch, "save", lambda content, path, **_: moment in str(path))
    run_distill([argv])


def die_after(module, name, now):
    function = getattr(module, name)

    def call(*args, **options):
        result = function(*args, **options)
        if now(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, call)


def test_a_killed_run_goes_on_from_the_last_whole_checkpoint(flags):
    """SIGKILL in mid-step and in mid-save; no incomplete checkpoint is ever picked up."""
    folder, common = flags
    argv = [*common, f"--ds_config={folder / 'zero2.json'}"]
    argv += ["--steps=7", "--save_every=1", "--num_workers=0"]
    expected = [*argv, f"--output_dir={folder / 'unkilled'}"]
    assert ranks.run(2, run_distill, [expected]) == [[0], [0]]
    killed = folder / "killed"
    for moment in ("mid-step", ".step_0000005.incomplete", ".step_0000006.incomplete/random_0.pt"):
        group = ranks.start(2, run_until, [*argv, f"--output_dir={killed}"], moment)
        group[0][0].join()
        ranks.kill(group)
        assert group[0][0].exitcode == -signal.SIGKILL
    assert ranks.run(2, run_distill, [[*argv, f"--output_dir={killed}"]]) == [[0], [0]]
    assert losses_of(killed) == losses_of(folder / "unkilled")
    left = {path.name for path in (killed / "checkpoints").iterdir() if path.is_dir()}
    assert left == {"step_0000006", "step_0000007"}  # nothing half-written or half-deleted stays behind


@pytest.mark.parametrize("apart", [0, 1])
def test_sigterm_on_one_rank_saves_and_ends_all(flags, apart):
    """Ranks for teachers alone go on until the student's ranks have saved, and leave in peace."""
    folder, common = flags[0] / f"sigterm{apart}", flags[1]
    argv = [*common, f"--ds_config={folder.parent / 'zero1.json'}", "--steps=400"]
    argv += [f"--output_dir={folder / 'told'}", f"--teacher_ranks={apart}"]
    group = ranks.start(2 + apart, run_distill, [argv])
    metrics = folder / "told" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert all(process.is_alive() for process, _ in group)
        time.sleep(0.01)
    for process, _ in group[::2]:
        os.kill(process.pid, signal.SIGTERM)
    assert ranks.results(group) == [[128 + signal.SIGTERM]] * 2 + [[0]] * apart
    last = losses_of(folder / "told")[-1]["step"]
    assert [p.name for p in (folder / "told" / "checkpoints").glob("step_*")] == [f"step_{last:07d}"]
    other_run = [[*argv, "--seed=9"]]
    assert ranks.run(2 + apart, run_distill, other_run) == [[2]] * (2 + apart)


def test_text_only_loads_no_teacher_and_kd_only_computes_no_cross_entropy(flags):
    folder, common = flags
    without = [flag for flag in common if not flag.startswith("--teacher")]
    base = [f"--ds_config={folder / 'zero2.json'}", "--steps=2"]
    text_only = [*without, *base, f"--output_dir={folder / 'text'}", "--kd_weight=0"]
    kd_only = [*common, *base, f"--output_dir={folder / 'kd'}", "--ce_weight=0", "--loss=projection_kl",
               "--wandb_project=isogloss-test"]
    assert ranks.run(2, run_distill, [text_only, kd_only]) == [[0, 0]] * 2
    text, kd = losses_of(folder / "text"), losses_of(folder / "kd")
    assert "kd" not in text[0] and text[0]["loss"] == text[0]["ce"]
    assert "ce" not in kd[0] and kd[0]["loss"] == kd[0]["kd"]
    assert kd[-1]["eval/teacher_bits_per_byte"] > 0 and "eval/teacher_bits_per_byte" not in text[-1]
    assert list((folder / "kd" / "wandb").glob("offline-run-*"))  # logs without a network


def test_a_learned_projection_is_trained_saved_and_resumed(flags, models):
    """The same in every ZeRO stage, tiled or not; the file is a projection that loads again."""
    folder, common = flags
    argv = [*common, "--loss=projection_kl", "--learn_projection", "--projection_learning_rate=0.3"]
    argv += ["--projection_topk=100", "--steps=4", "--save_every=2"]
    runs = {"zero2": [], "zero3": [], "zero1": ["--tiled=false"]}
    lines = [[*argv, f"--ds_config={folder / kind}.json", f"--output_dir={folder / 'learned' / kind}", *more]
             for kind, more in runs.items()]
    resume = folder / "learned" / "zero3" / "checkpoints" / "step_0000002"
    again = [[*lines[1], f"--resume={resume}", f"--output_dir={folder / 'learned' / 'again'}"]]
    assert ranks.run(2, run_distill, lines) == [[0] * 3] * 2
    assert ranks.run(2, run_distill, again) == [[0]] * 2
    found = {kind: losses_of(folder / "learned" / kind) for kind in runs}
    for kind in runs:
        for line, other in zip(found["zero2"], found[kind], strict=True):
            assert line.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5), kind
    assert losses_of(folder / "learned" / "again") == losses_of(folder / "learned" / "zero3", 2)
    pair = Pair.load(*map(str, models))
    built = build_projection(pair)
    learned = load_projection(folder / "learned" / "zero3" / "projection.pt", pair)
    sums = learned["likelihoods"].sum(1)
    assert torch.allclose(sums, (learned["indices"][:, 0] >= 0).float(), atol=1e-6)
    several = torch.from_numpy(built[0][:, 1] >= 0)
    top = learned["likelihoods"][:, 0] - torch.from_numpy(built[1][:, 0])
    assert top[~several].abs().max() < 1e-6 and top[several].abs().max() > 0.01


def gather_sums():
    distill.start_distributed()
    return distill.global_sums([1.0, dist.get_rank()], torch.device("cpu")).tolist()


def test_global_sums_are_equal_on_every_rank():
    assert ranks.run(4, gather_sums) == [[4.0, 6.0]] * 4
