"""Whole jobs on real gloo ranks: the same curve in every layout, whole checkpoints, exact resume, export."""

import itertools
import json
import math
import os
import shutil
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from jobs import ds_config, job_for, losses_of, run_distill, write_corpus

from isogloss import checkpoint
import distill
from conftest import ROOT
from isogloss.objective import ONE_TOKENIZER
from projection_tools import Pair, load_projection
from projection_tools.build import build_projection


def listen(argv, path):
    """The exit code of a command line; what the ranks write goes to files, one each."""
    for stream in (1, 2):
        os.dup2(os.open(f"{path}{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    return run_distill([argv])


def deaf_to_positions(argv, path):
    """`listen` to a run whose student does not hear where its samples begin."""
    def deaf(model, *args, run_inside=distill.run_inside_forward):
        run_inside(model, *args)
        forward = model.forward
        model.forward = lambda *a, position_ids=None, **how: forward(*a, **how)

    distill.run_inside_forward = deaf
    return listen(argv, path)


def neighbors_mix(argv, path):
    """`listen` to a run whose student looks at the position before by other means than attention."""
    def mixing(*args, load=distill.load_student):
        model = load(*args)
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x + x.roll(1, 1))
        return model

    distill.load_student = mixing
    return listen(argv, path)


def test_students_that_look_beyond_their_part_are_refused(flags, tmp_path):
    folder, common = flags
    argv = [*common, f"--ds_config={folder / 'zero2.json'}", "--steps=2", "--sequence_parallel=2",
            f"--output_dir={tmp_path}"]
    assert ranks.run(2, neighbors_mix, argv, str(tmp_path / "said")) == [[2]] * 2
    assert "depends on where its parts are cut" in (tmp_path / "said0").read_text()
    argv = [*common, f"--ds_config={folder / 'bf16.json'}", "--steps=1", "--sequence_parallel=2",
            f"--output_dir={tmp_path / 'bf16'}"]
    assert ranks.run(2, run_distill, [argv]) == [[0]] * 2  # other blocks, other rounding


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
    assert "depends on the text before it in the same row; use --pack=false" in (folder / "said0").read_text()


def test_reports_of_deepspeed(flags, tmp_path):
    """The summary of collectives has times of single calls; flops, memory and time are printed."""
    folder, common = flags
    profiler = {"enabled": True, "profile_step": 1, "module_depth": 1, "top_modules": 1, "detailed": False}
    config = ds_config(tmp_path / "ds.json", 3, 2, 1, flops_profiler=profiler, wall_clock_breakdown=True,
                       memory_breakdown=True)
    argv = [*common, f"--ds_config={config}", "--steps=20", f"--output_dir={tmp_path}", "--log_comms",
            "--sequence_parallel=2"]
    begin = time.time()
    assert ranks.run(2, listen, argv, str(tmp_path / "said")) == [[0]] * 2
    said, seconds = (tmp_path / "said0").read_text(), time.time() - begin
    for words in ("DeepSpeed Flops Profiler", "fwd flops per GPU", "bwd_inner_micro", "Engine after forward"):
        assert words in said
    summary = said[said.index("Comm. Op") :]
    assert {"all_to_all_single", "all_gather_into_tensor"} <= set(summary.split())
    calls = [float(line.split()[3]) for line in summary.splitlines()[1:] if len(line.split()) == 7]
    assert len(calls) > 3 and sum(calls) < 1000 * seconds


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
    (["--loss=gold", "--tiled=false"], ["--teacher_ranks=1"]), ([TWO], ["--teacher_ranks=2"]),
    (["--loss=piece_kl", "--sequence_parallel=2"], ["--teacher_ranks=2"])]


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


def test_the_dynamic_scale_is_that_of_the_step_before(flags, models, untied):
    """It is exact after a resume, each teacher's own, and the same on any number of ranks."""
    folder, common = flags
    two = json.dumps([{"model": str(models[1]), "name": "a"},
                      {"model": str(untied), "loss": "alm", "name": "b", "weight": 0.5}])
    argv = [flag for flag in common if not flag.startswith(("--teacher", "--student"))]  # without dropout
    argv += [f"--student={models[0]}", f"--teachers={two}", "--kd_weight=0.6", "--ce_weight=0.3", "--steps=5",
             "--dynamic_scale", "--save_every=3"]
    curves = []
    for world, micro_steps in ((2, 2), (1, 4)):
        output = folder / f"dynamic{world}"
        config = ds_config(folder / f"dynamic{world}.json", 2, 1, micro_steps)
        run = [*argv, f"--ds_config={config}", f"--output_dir={output}"]
        assert ranks.run(world, run_distill, [run]) == [[0]] * world
        curves.append([line for line in losses_of(output) if "loss" in line])
    step = output / "checkpoints" / "step_0000003"
    assert ranks.run(1, run_distill, [[*run, f"--resume={step}"]]) == [[0]]
    assert [line for line in losses_of(output) if "loss" in line] == curves[1]
    for before, line in zip([None, *curves[1]], curves[1]):
        kd = 0
        for name, weight in (("a", 0.6), ("b", 0.3)):
            factor = before["ce"] / before[f"kd/{name}"] if before else 1
            assert math.isclose(line[f"kd_weight/{name}"], weight * factor, rel_tol=1e-6)
            kd += line[f"kd_weight/{name}"] * line[f"kd/{name}"]
        assert math.isclose(line["loss"], 0.3 * line["ce"] + kd, rel_tol=1e-9)
    for a, b in zip(*curves, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-5)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-4)


def test_what_was_written_last_counts_after_going_back(tmp_path):
    """A run that went back from step 600 to 200 goes on from 300, and 600 is what makes room for it."""
    for written, step in enumerate((500, 600, 300)):
        (tmp_path / f"step_{step:07d}").mkdir()
        (tmp_path / f"step_{step:07d}" / "position.json").write_text(json.dumps(
            {"step": step, "run": {}, "layout": {}, "written": written}))
    found = checkpoint.complete_checkpoints(tmp_path)
    assert [checkpoint.position_of(path)["step"] for path in found] == [500, 600, 300]
    assert checkpoint.find_checkpoint("auto", tmp_path, {}) == found[-1]


def test_a_run_may_go_on_with_offload_and_reports(models, monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    plain = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    reports = {"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True}
    (tmp_path / "reports.json").write_text(json.dumps(plain | reports))
    (tmp_path / "clipped.json").write_text(json.dumps(plain | {"gradient_clipping": 7.0}))
    names = [ROOT / "ds_configs" / f"{name}.json" for name in ("zero2", "zero2_offload", "zero3_offload")]
    found = [distill.run_identity(distill.Config(student="a", teacher="b", data="c", ds_config=str(path)))
             for path in (*names, tmp_path / "reports.json", tmp_path / "clipped.json")]
    assert all(identity == found[0] for identity in found[:4]) and found[4] != found[0]


def test_global_sums_are_equal_on_every_rank():
    assert ranks.run(4, gather_sums) == [[4.0, 6.0]] * 4
