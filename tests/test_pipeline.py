"""A pipeline gives the loss, the gradient, the evaluation and the export of one process.

One group of four ranks takes all single steps, two more all whole jobs.
"""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import conftest
import ranks
from hub_copies import HAS_LM_EVAL, needs_lm_eval, write_copy
from isogloss import demo, distill
from isogloss.student.checks import check_logits
from isogloss.student.packing import check_packing
from isogloss.student.stages import num_weights, probe_ids
from jobs import ds_config, losses_of, run_all, run_distill, write_corpus
from launched import die_after
from steps import (
    FEW_COLUMNS,
    Layout,
    check_gradients,
    cut_flags,
    flags_for,
    keep_gradients,
    references,
    several_teachers,
    small_collator,
    start_layout,
    texts_of_rank,
    uneven_samples,
)
from test_cached_teachers import write as write_cache

pytestmark = pytest.mark.slow

# the gradient of one process in plain PyTorch, relative, in float32
TOLERANCE = 1e-6
SHAPE = conftest.SHAPE | {"num_hidden_layers": 4}
STAGE_METRICS = {"bubble", "slowest_stage", "fastest_stage"}


@pytest.fixture(scope="module")
def students(tokenizers, tmp_path_factory):
    """{name: directory} of students with four layers and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("students")
    tied = demo.llama(tokenizers[0], SHAPE, 5)
    tied.resize_token_embeddings(len(tokenizers[0]) + 10)
    kinds = {
        "tied": tied.config,
        "qwen2": AutoConfig.for_model("qwen2", **SHAPE, tie_word_embeddings=False),
        "gpt_neox": AutoConfig.for_model("gpt_neox", **SHAPE),
    }
    for name, config in kinds.items():
        config.vocab_size = len(tokenizers[0]) + 10
        torch.manual_seed(6)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizers[0].save_pretrained(folder / name)
    shutil.copytree(folder / "tied", folder / "dropout")
    path = folder / "dropout" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.1}))
    return {path.name: str(path) for path in folder.iterdir()}


def step_of(num_stages, micro_batch_size, grad_accum_steps, **flags):
    """Return the Layout of a step of 4 / num_stages pipelines."""
    return Layout(1, micro_batch_size, grad_accum_steps, {"pipeline_parallel": num_stages} | flags)


def stages_of(step):
    return step.flags["pipeline_parallel"]


class StepResult(NamedTuple):
    """What a step gave on one rank.

    gradients: of the weights here, averaged, before they are clipped.
    permuted: the same with the micro-batches in another order.
    teacher_weights: on this rank.
    bad_steps: how many steps in a row were skipped, after one whose loss is NaN.
    moved: whether a weight changed in it.
    """

    metrics: dict
    gradients: dict
    permuted: dict
    teacher_weights: int
    bad_steps: int
    moved: bool


def steps_of(students, models, untied):
    """Return {name: Layout}: one pipeline and two, teachers and batches of all kinds."""
    two = json.dumps(several_teachers(models, untied, sharded=False)[:2])
    several = {"teacher": "", "teachers": two, "teacher_weights": "ce"}
    return {
        "four stages": step_of(4, 1, 8),
        "cut texts": step_of(2, 1, 4, **cut_flags(models)),
        "untiled": step_of(2, 2, 2, tiled=False, loss="gold"),
        "packed": step_of(2, 2, 2, pack=True, activation_checkpointing=True,
                          loss_options={"max_divergence": 0.5}, student=students["gpt_neox"]),
        "sharded teacher": step_of(2, 1, 4, teacher_tp=4),
        "partitioned teacher, kept columns": step_of(2, 1, 4, teacher_engine="zero3",
                                                     loss="projection_kl",
                                                     loss_options=FEW_COLUMNS),
        "several teachers": step_of(4, 2, 4, **several, student=students["qwen2"]),
        # one that cuts texts as the student alone does
        "no teacher": step_of(4, 1, 8, kd_weight=0.0, teacher=students["tied"]),
    }


def take_steps(flags, steps, samples):
    """Return {name: StepResult}; runs on every rank."""
    return {name: take_step(flags, step, samples) for name, step in steps.items()}


def take_step(flags, step, samples):
    """Return the StepResult of a step whose learning rate is 0."""
    state, inputs = start_layout(flags, step)
    check_logits(state, probe_ids(state.vocab).tolist())
    if state.cfg.pack:
        check_packing(state)
    collator = small_collator(state.cfg, inputs, state.device)
    micro_batches = [collator(texts) for texts in texts_of_rank(samples, step)]
    gradients = keep_gradients(state.engine, state.engine.optimizer)
    metrics = distill.train_step(state, micro_batches).metrics()
    kept = dict(gradients)
    distill.train_step(state, micro_batches[::-1])
    teacher_weights = sum(num_weights(model) for model in teacher_models(state))
    permuted = dict(gradients)
    moved = take_bad_step(state, micro_batches)
    state.engine.destroy()
    return StepResult(metrics, kept, permuted, teacher_weights, state.bad_steps.count, moved)


def take_bad_step(state, micro_batches):
    """Take a step whose loss is NaN; return whether it changed a weight."""
    for group in state.engine.optimizer.param_groups:
        group["lr"] = 1.0
    weights = [parameter.detach().clone() for parameter in state.engine.module.parameters()]
    term_weights = distill.term_weights
    distill.term_weights = lambda *_: distill.TermWeights(float("nan"), [0.0] * 2)
    distill.train_step(state, micro_batches)
    distill.term_weights = term_weights
    after = list(state.engine.module.parameters())
    return not all(torch.equal(*both) for both in zip(weights, after, strict=True))


def teacher_models(state):
    models = []
    for setup in state.teachers:
        members = getattr(setup.source, "members", [setup.source])
        for member in members:
            whole = getattr(member.runner, "whole", member.runner)
            if hasattr(whole, "model"):
                models.append(whole.model)
    return models


def gradients_of(of_ranks, step, attribute="gradients"):
    """Return the gradients of all stages by name; those of a tied head are equal at both ends."""
    gradients = {}
    for result in of_ranks[: stages_of(step)]:
        for name, gradient in getattr(result, attribute).items():
            if name in gradients:
                assert torch.equal(gradients[name], gradient), name
            gradients[name] = gradient
    return gradients


@pytest.fixture(scope="module")
def flags(models, students, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    return flags_for((students["tied"], models[1]), texts, folder, eval_rows=2)


@pytest.fixture(scope="module")
def steps(students, models, untied):
    return steps_of(students, models, untied)


@pytest.fixture(scope="module")
def results(flags, steps, texts):
    """{name of a step: StepResult of every rank}."""
    of_ranks = ranks.run(4, take_steps, flags, steps, uneven_samples(texts))
    return {name: [of_rank[name] for of_rank in of_ranks] for name in steps}


@pytest.fixture(scope="module")
def expected(flags, steps, texts):
    """{name: Reference} of the same steps in one process, by torch alone."""
    runs = []
    for step in steps.values():
        spread = {"pipeline_parallel", "pack", "teacher_tp", "teacher_engine"}
        changes = {key: value for key, value in step.flags.items() if key not in spread}
        runs.append(flags | changes)
    return dict(zip(steps, references(runs, uneven_samples(texts)), strict=True))


# --- single steps ---------------------------------------------------------------------------------


def test_same_loss_and_gradient_as_one_process(steps, results, expected):
    """Also of texts without a token, of widths that grow and shrink, whatever the order."""
    for name, step in steps.items():
        of_ranks = results[name]
        reference = expected[name]
        gradients = gradients_of(of_ranks, step)
        assert gradients.keys() == reference.gradients.keys()
        square = check_gradients(name, gradients, reference, TOLERANCE)
        for result in of_ranks:  # every rank logs the same
            metrics = result.metrics
            assert abs(metrics["loss"] - reference.loss) <= TOLERANCE * reference.loss, name
            assert abs(metrics["grad_norm"] - square**0.5) <= TOLERANCE * square**0.5, name
        permuted = gradients_of(of_ranks, step, "permuted")
        check_gradients(f"{name}, permuted", permuted, reference, TOLERANCE)


def test_the_last_stage_alone_holds_a_teacher(steps, results):
    """But for one that all ranks hold together."""
    for name, step in steps.items():
        is_shared = "teacher_tp" in step.flags or "teacher_engine" in step.flags
        for rank, result in enumerate(results[name]):
            is_last = rank % stages_of(step) == stages_of(step) - 1
            if not is_last and not is_shared:
                assert result.teacher_weights == 0, name


def test_a_step_that_is_not_finite_changes_no_stage(results):
    """The loss is known to the last stage alone; all of them skip the step, and count it."""
    for name, of_ranks in results.items():
        for result in of_ranks:
            assert result.bad_steps == 1, name
            assert not result.moved, name


# --- whole jobs -----------------------------------------------------------------------------------


class Jobs(NamedTuple):
    folder: Path
    flags: list

    def line(self, name, num_stages, grad_accum_steps, *more, num_readers=1):
        """Return the command line of a run in pipelines (readers), of eight samples a step."""
        config = ds_config(self.folder / f"{name}.json", 1,
                           8 // grad_accum_steps // num_readers, grad_accum_steps)
        output = self.folder / name
        return [*self.flags, f"--ds_config={config}", f"--output_dir={output}",
                f"--pipeline_parallel={num_stages}", "--steps=4", *more]

    def exported(self, name):
        return self.folder / name / "student"

    def copy(self, source, name, step):
        """Copy a run, as it was when it had just written the checkpoint of a step."""
        shutil.copytree(self.folder / source, self.folder / name,
                        ignore=shutil.ignore_patterns("student"))  # its export
        for path in (self.folder / name / "checkpoints").glob("step_*"):
            if path.name != f"step_{step:07d}":
                shutil.rmtree(path)

    def checkpoint(self, name, step):
        return self.folder / name / "checkpoints" / f"step_{step:07d}"


def run_until_killed(argv, rank, step):
    """Run a job of which one rank gets SIGKILL before it has logged a step."""
    if int(os.environ["RANK"]) == rank:
        steps = itertools.count(1)
        die_after(distill, "train_step", lambda *_: next(steps) == step)
    return run_distill([argv])


@pytest.fixture(scope="module")
def jobs(models, students, texts, tmp_path_factory):
    """Whole jobs: one process, four stages, two pipelines; one killed; others that resume them."""
    folder = tmp_path_factory.mktemp("jobs")
    argv = [f"--teacher={models[1]}", f"--data={write_corpus(folder, texts, 60)}",
            "--max_length=80", "--eval_rows=6", "--save_every=2", "--keep_checkpoints=9",
            "--num_workers=0"]
    rows = [{"text": text[:60]} for text in texts[:7]]
    write_copy(folder, "EleutherAI/lambada_openai", {"default": {"test": rows}})
    random = Jobs(folder, [*argv, f"--student={students['dropout']}"])
    argv.append(f"--student={students['tied']}")
    learning = Jobs(folder, [*argv, "--loss=projection_kl", '--loss_options={"learn_projection": '
                             'true, "projection_learning_rate": 1e-2}'])
    if HAS_LM_EVAL:
        argv += ["--eval_tasks=lambada", "--eval_task_every=2",
                 f'--eval_task_options={{"data": "{folder}"}}']
    jobs = Jobs(folder, argv)
    run_all(1, jobs.line("one", 1, 4), learning.line("one learned", 1, 4))
    killed = random.line("killed", 2, 2, num_readers=2)
    run_all(4, jobs.line("four", 4, 4),
            jobs.line("two", 2, 2, f"--export={jobs.exported('two')}", num_readers=2),
            random.line("unkilled", 2, 2, num_readers=2), learning.line("four learned", 4, 4))
    group = ranks.start(4, run_until_killed, killed, 1, 3)
    for process, _ in group:  # the others end by themselves
        process.join(120)
        assert process.exitcode is not None
    assert group[1][0].exitcode == -signal.SIGKILL
    jobs.copy("two", "two to four", 2)
    jobs.copy("one learned", "one to two learned", 2)
    jobs.copy("four learned", "four to four learned", 2)
    run_all(4, killed, jobs.line("two to four", 4, 4),
            learning.line("one to two learned", 2, 2, num_readers=2),
            learning.line("four to four learned", 4, 4))
    # processes join one world, so two worlds take new ones
    run_all(4, jobs.line("remote", 2, 4, "--teacher_ranks=2"))
    jobs.copy("four", "four to one", 2)
    jobs.copy("two", "two exported", 4)
    run_all(1, jobs.line("four to one", 1, 2),
            jobs.line("two exported", 1, 4, f"--export={jobs.exported('two exported')}"))
    return jobs


def check_curve(jobs, name, expected, tolerance):
    """Compare all that was logged, held-out metrics included, but what a pipeline alone has."""
    for line, reference in zip(losses_of(jobs.folder / name), losses_of(jobs.folder / expected),
                               strict=True):
        assert line.keys() - STAGE_METRICS == reference.keys() - STAGE_METRICS
        for key in reference.keys() - STAGE_METRICS:
            # of a tail of the vocabulary, 1e-3 in all
            allowed = 1e-3 if key == "eval/joined_mass" else tolerance
            assert abs(line[key] - reference[key]) <= allowed * abs(reference[key]), (name, key)


def test_a_pipeline_logs_what_one_process_logs(jobs):
    check_curve(jobs, "four", "one", 1e-5)
    check_curve(jobs, "two", "one", 1e-5)
    check_curve(jobs, "remote", "one", 1e-5)  # teachers on ranks of their own
    for line in losses_of(jobs.folder / "four"):
        if "loss" in line:
            assert 0 <= line["bubble"] < 1 and line["slowest_stage"] >= line["fastest_stage"] > 0
    assert not STAGE_METRICS & losses_of(jobs.folder / "one")[1].keys()


@needs_lm_eval
def test_tasks_judge_what_all_stages_are_together(jobs):
    """And so do the curves of the other tests."""
    judged = [line for line in losses_of(jobs.folder / "two") if "eval/lambada_acc" in line]
    assert [line["step"] for line in judged] == [2, 4]  # and 0, which `losses_of` leaves out


def test_a_run_goes_on_with_another_number_of_stages(jobs):
    for name in ("two to four", "four to one"):
        check_curve(jobs, name, "one", 1e-5)


def test_a_projection_is_learned_as_in_one_process(jobs):
    """Also by a run that goes on with other stages; one with the same stages goes on bit by bit."""
    first = projection_of(jobs, "one learned")
    for name in ("four learned", "one to two learned"):
        check_curve(jobs, name, "one learned", 1e-5)
        projection = projection_of(jobs, name)
        assert torch.equal(projection["indices"], first["indices"])
        assert torch.allclose(projection["likelihoods"], first["likelihoods"], rtol=0, atol=1e-5)
    resumed = projection_of(jobs, "four to four learned")
    assert torch.equal(resumed["likelihoods"], projection_of(jobs, "four learned")["likelihoods"])
    weights = []
    for number in range(4):
        path = jobs.checkpoint("four learned", 4) / f"stage_{number:02d}_model_states.pt"
        weights.append(torch.load(path, weights_only=True)["projection_scores"])
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def projection_of(jobs, name):
    return torch.load(jobs.folder / name / "projection.pt", weights_only=True)


def without_times(lines):
    return [{key: value for key, value in line.items() if key not in STAGE_METRICS}
            for line in lines]


def test_a_run_of_which_a_stage_was_killed_resumes_bit_by_bit(jobs):
    """With dropout, whose random numbers every rank has of its own."""
    killed = without_times(losses_of(jobs.folder / "killed"))
    assert killed == without_times(losses_of(jobs.folder / "unkilled"))
    for path in jobs.checkpoint("unkilled", 4).glob("stage_*"):
        weights = torch.load(path, weights_only=True)
        resumed = torch.load(jobs.checkpoint("killed", 4) / path.name, weights_only=True)
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_the_export_is_that_of_a_job_without_a_pipeline(jobs):
    """Byte for byte, from the same checkpoint."""
    staged = jobs.exported("two")
    whole = jobs.exported("two exported")
    names = {path.name for path in staged.iterdir()}
    assert names == {path.name for path in whole.iterdir()}
    assert "model.safetensors" in names
    for name in names:
        assert (staged / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_teacher_with_ranks_and_one_in_a_cache_teach_a_pipeline(models, texts, tmp_path):
    """The first stage, which asks neither, hears of texts that the last one looks up."""
    data = f"--data={write_corpus(tmp_path, texts, 20)}"
    cache = tmp_path / "cache"
    ranks.run(1, write_cache, [[f"--teacher={models[1]}", data, f"--output={cache}",
                               "--top_k=340"]])
    teachers = [{"name": "live", "model": str(models[1])}, {"name": "kept", "cache": str(cache)}]
    config = ds_config(tmp_path / "ds.json", 1, 1, 2)
    run_all(3, [f"--student={models[0]}", f"--teachers={json.dumps(teachers)}", data,
                f"--ds_config={config}", f"--output_dir={tmp_path / 'run'}", "--max_length=60",
                "--steps=3", "--pipeline_parallel=2", "--teacher_ranks=1"])
    for line in losses_of(tmp_path / "run"):
        assert line["kd/live"] == pytest.approx(line["kd/kept"], rel=0.03)  # few tokens less
