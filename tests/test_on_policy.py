"""Jobs whose student writes: the gradient of what was written, the same in every layout."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import ranks
from isogloss import distill
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Example
from isogloss.data.rollouts import Prompter, RolloutPrompt, completed
from isogloss.flags.on_policy import intention
from isogloss.inputs import load_text_encoder, plan_teachers
from isogloss.job.launch import start_distributed
from isogloss.losses import next_token_cross_entropy
from isogloss.rollout import Completion
from isogloss.writing import on_policy
from jobs import check_same_curve, ds_config, losses_of, run_all, write_corpus
from steps import Case, Layout, Reference, check_steps, flags_for

pytestmark = pytest.mark.slow


# --- the gradient of rollouts ---------------------------------------------------------------------


class Written(NamedTuple):
    """A text as if the student had written all but its first tokens, with its tokenizer's ids."""

    text: str
    prompt_tokens: int
    ended: bool


def mixed_samples(texts):
    """Eight samples: texts, an empty place, and what was written, some of it cut."""
    return [texts[0], Written(texts[1], 5, True), None, Written(texts[2], 30, False), texts[3][:60],
            Written(texts[4], 2, False), Written(texts[5], 12, True), "a"]


def as_example(sample, encoder):
    """Return the Example of a sample."""
    if not isinstance(sample, Written):
        return Example(sample)
    prompter = Prompter(encoder, 0, 1.0, 1, sample.prompt_tokens, 10**6)
    prompt = prompter.prompt(Example(sample.text), (0, 0))
    ids, = encoder.encode([sample.text])
    ids = torch.from_numpy(ids[len(prompt.ids) : None if sample.ended else -1])
    nothing = torch.zeros(len(ids))
    return Example(completed(prompt, Completion(ids, nothing, nothing, sample.ended), encoder))


def reference(flags, samples):
    """Return the Reference by torch alone, of whole texts fed as data whose terms weigh 0 or 1.

    A term counts if it begins behind the prompt, and not at the end of a text that was cut.
    """
    start_distributed()
    cfg = distill.Config(**flags)
    student, _ = load_text_encoder("student", cfg.student, cfg.max_length)
    teacher, _ = load_text_encoder("teacher", cfg.teacher, 0)
    [setup] = plan_teachers(cfg, student, {cfg.teacher: teacher}, torch.device("cpu"))
    collator = Collator(student, [PairOptions(teacher, setup.loss.spelling)])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (cfg.student, cfg.teacher)]
    ce = torch.zeros(())
    kd = torch.zeros(())
    ce_count = 0
    for sample in samples:
        written = isinstance(sample, Written)
        text = sample.text if written else sample
        if text is None:
            continue
        batch = collator([text])
        logits_BSV = models[0](input_ids=batch.student.ids).logits[..., : len(student.table)]
        with torch.no_grad():
            teacher_logits = models[1](input_ids=batch.teachers[0].ids).logits
        teacher_logits = teacher_logits[..., : len(teacher.table)]
        if not written:
            value, count = next_token_cross_entropy(logits_BSV, batch.student.labels)
            ce = ce + value
            ce_count += count
        for tile in batch.teachers[0].tiles:
            sub_tile, = tile.sub_tiles
            weight = torch.ones(len(tile.student_positions))
            if written:
                rollout = as_example(sample, student).content
                weight = (tile.student_positions >= len(rollout.prompt.ids) - 1).float()
                chunk = sub_tile.student_chunk
                for number in chunk[chunk >= 0].unique():  # wholly behind the prompt, or not at all
                    weight[chunk == number] = weight[chunk == number].min()
                if not sample.ended:
                    is_end = batch.student.labels.flatten()[tile.student_positions]
                    weight = weight * (is_end != student.table.eos)
            kd = kd + setup.loss.loss_fn(
                logits_BSV.flatten(0, 1)[tile.student_positions],
                teacher_logits.flatten(0, 1)[sub_tile.teacher_positions],
                sub_tile._replace(weight=weight))
    count = collator([as_example(sample, student) for sample in samples]).counts
    loss = cfg.ce_weight * ce / ce_count + cfg.kd_weight * kd / count.pairs[0].kd_terms
    assert count.ce_tokens == ce_count
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    return Reference(loss.item(), gradients)


LOSSES = "alm", "piece_kl", "reverse_kl"


def references(flags, samples):
    return {loss: reference(flags | {"loss": loss}, samples) for loss in LOSSES}


LAYOUTS = {
    1: [Layout(0, 8, 1), Layout(3, 2, 4), Layout(2, 4, 2, {"pack": True}),
        Layout(1, 8, 1, {"tiled": False})],
    2: [Layout(2, 2, 2), Layout(3, 4, 1, {"pack": True}),
        Layout(1, 4, 2, {"sequence_parallel": 2}),
        Layout(3, 8, 1, {"sequence_parallel": 2, "pack": True})],
}


def test_what_was_written_teaches_like_the_same_text(models, texts, tmp_path):
    """Wherever its samples are: no cross-entropy, no term that touches the prompt.

    To 1e-6: in float32 the norm of the difference is 2e-7 to 4e-7 of that of the gradient, for
    plain data too.
    """
    flags = flags_for(models, texts, tmp_path, on_policy=0.5)
    samples = mixed_samples(texts)
    [expected] = ranks.run(1, references, flags, samples)
    encoder, _ = load_text_encoder("student", flags["student"], flags["max_length"])
    examples = [as_example(sample, encoder) for sample in samples]
    for num_ranks, layouts in LAYOUTS.items():
        check_steps(expected, num_ranks, flags, examples, layouts, list(map(Case, LOSSES)),
                    tolerance=1e-6)


# --- whole jobs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(models, texts, tmp_path_factory):
    """A folder with ds_configs, and flags of jobs of 8 samples a step, half of them rollouts."""
    folder = tmp_path_factory.mktemp("on_policy")
    for stage in (0, 2, 3):
        for micro_batch_size, num_ranks in ((8, 1), (2, 2), (4, 2), (2, 4)):
            name = f"zero{stage}-{micro_batch_size}-{num_ranks}.json"
            ds_config(folder / name, stage, micro_batch_size, 8 // micro_batch_size // num_ranks)
    for num_ranks in (1, 2):  # of pipelines
        ds_config(folder / f"zero1-2-{num_ranks}.json", 1, 2, 4 // num_ranks)
    return folder, [
        f"--student={models[0]}", f"--teacher={models[1]}", "--max_length=120",
        f"--data={write_corpus(folder, texts, 30)}", "--eval_rows=6", "--on_policy=0.5",
        "--rollout_tokens=24", "--prompt_tokens=8", "--rollout_log=8", "--rollout_eval=4",
        "--num_workers=0", "--loss=reverse_kl"]


def config_of(base, stage, micro_batch_size, num_ranks):
    return f"--ds_config={base[0] / f'zero{stage}-{micro_batch_size}-{num_ranks}.json'}"


def records_of(output):
    """Return {(step, is held out, sample, copy): record} of rollouts.jsonl."""
    found = {}
    for line in (Path(output) / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        key = record["step"], record["held_out"], record["sample"], record["copy"]
        assert key not in found
        found[key] = record
    return found


def written_by(output):
    """Return {key of a record: (ids, ended)}."""
    return {key: (record["ids"], record["ended"]) for key, record in records_of(output).items()}


def said_of(record):
    """Return what the models say of a record, nats per byte."""
    return [record["student_nats_per_byte"], *record["teacher_nats_per_byte"].values()]


def without_gaps(lines):
    """Return metrics lines without what only some layouts have."""
    only_some = "rollout/logp_gap", "bubble", "slowest_stage", "fastest_stage"
    return [{key: value for key, value in line.items() if not key.startswith(only_some)}
            for line in lines]


def check_same_rollouts_curve(expected, lines, name=""):
    check_same_curve(without_gaps(expected), without_gaps(lines), 1e-4, 1e-5, name)


def test_the_same_rollouts_and_curve_in_every_layout(base):
    """Also where ranks end at different tokens of a partitioned student, and serve teachers."""
    folder, argv = base
    runs = {
        "one": (1, config_of(base, 2, 8, 1)),
        "two": (2, config_of(base, 3, 2, 2), "--num_workers=1"),
        "hooks": (2, config_of(base, 3, 4, 2), "--rollout_replica=false", "--rollout_batch=1"),
        "shards": (2, config_of(base, 3, 8, 1), "--sequence_parallel=2"),
        "packed": (2, config_of(base, 2, 4, 2), "--pack"),
        "four": (4, config_of(base, 2, 2, 4)),
        "pipelines": (4, config_of(base, 1, 2, 2), "--pipeline_parallel=2"),
    }
    by_ranks = {}
    for name, (num_ranks, *flags) in runs.items():
        command = [*argv, *flags, "--steps=2", "--rollout_tokens=12",
                   f"--output_dir={folder / name}"]
        by_ranks.setdefault(num_ranks, []).append(command)
    for num_ranks, commands in by_ranks.items():
        run_all(num_ranks, *commands)
    expected = losses_of(folder / "one", -1)
    rollouts = records_of(folder / "one")
    for name in runs:
        check_same_rollouts_curve(expected, losses_of(folder / name, -1), name=name)
        for key, record in records_of(folder / name).items():  # rank 0 logs its own
            assert rollouts[key]["ids"] == record["ids"], (name, key)
            assert said_of(rollouts[key]) == pytest.approx(said_of(record), rel=1e-3), (name, key)
    last = expected[-2]
    assert 0 < last["rollout/share"] < 1
    assert last["rollout/staleness"] == 0
    assert last["kd/on"] > 0 and last["kd/off"] > 0
    assert expected[-1]["eval/rollout/share"] == 1
    for name in ("two", "pipelines"):  # a copy of the student writes
        for line in losses_of(folder / name, 0)[:2]:
            assert line["rollout/logp_gap"] < 1e-4


def test_teachers_on_ranks_of_their_own_correct_rollouts(base):
    """Also with rollouts that several steps share, of which they know the next ones ahead."""
    folder, argv = base
    flags = [*argv, "--rollout_every=3", "--steps=4", config_of(base, 2, 8, 1)]
    run_all(1, [*flags, f"--output_dir={folder / 'own'}"])
    # shards of sequences, and stages: the two ranks have the samples of one
    stages = config_of(base, 1, 2, 1)
    for flag, *more in (["--teacher_ranks=1"], ["--sequence_parallel=2"],
                        ["--pipeline_parallel=2", stages]):
        run_all(2, [*flags, flag, *more, f"--output_dir={folder / flag}"])
        check_same_rollouts_curve(losses_of(folder / "own", -1), losses_of(folder / flag, -1))


def test_resume_goes_on_with_the_rollouts_of_its_batch(base):
    """A run that ends between two steps of a batch, or is killed; on other ranks, with copies."""
    folder, argv = base
    argv = [*argv, "--rollout_every=3", "--rollouts_per_prompt=2", "--save_every=1",
            "--num_workers=1"]
    one = [*argv, config_of(base, 2, 8, 1)]
    stopped = f"--output_dir={folder / 'stopped'}"
    moved = f"--output_dir={folder / 'moved'}"
    run_all(1, [*one, "--steps=7", f"--output_dir={folder / 'through'}"],
            [*one, "--steps=2", moved], [*one, "--steps=2", stopped], [*one, "--steps=5", stopped])
    # as if it had been killed in its fifth step, of which the logs have lines
    shutil.rmtree(folder / "stopped" / "checkpoints" / "step_0000005")
    run_all(1, [*one, "--steps=7", stopped])
    expected = losses_of(folder / "through", -1)
    assert written_by(folder / "stopped").items() >= written_by(folder / "through").items()
    own = [line for line in expected if line["step"] in (3, 4, 5, 6, 7)]
    again = [line for line in losses_of(folder / "stopped", 2) if line["step"] > 2]
    log = (folder / "through" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in log if "rollout/tokens_per_second" in line
             and '"loss"' in line]
    assert steps == [1, 4, 7]  # those that write
    # an evaluation comes at the end of each command
    training = [line for line in again if "loss" in line]
    assert without_gaps(training) == without_gaps([line for line in own if "loss" in line])
    assert training[0]["rollout/staleness"] == 2 and training[1]["rollout/staleness"] == 0
    assert training[0]["rollout/ratio"] != 1.0
    run_all(2, [*argv, config_of(base, 3, 2, 2), "--steps=4", moved])
    lines = [line for line in losses_of(folder / "moved", 2) if "loss" in line]
    check_same_rollouts_curve([line for line in own if "loss" in line][:2], lines)


def test_a_student_that_is_its_teacher_learns_nothing(base, models):
    """Of what it wrote: every divergence and its gradient are 0, whatever is kept of the tokens."""
    folder, argv = base
    argv = [flag for flag in argv if not flag.startswith(("--teacher", "--loss", "--on_policy"))]
    commands = []
    for loss, top_k in (("reverse_kl", 0), ("reverse_kl", 1), ("generalized_jsd", 16),
                        ("piece_kl", 0), ("alm", 0)):
        commands.append([
            *argv, f"--teacher={models[0]}", f"--loss={loss}", f"--loss_topk={top_k}",
            "--on_policy=1", "--steps=1", config_of(base, 0, 8, 1),
            f"--output_dir={folder / f'equal-{loss}-{top_k}'}"])
    run_all(1, *commands)
    for command in commands:
        output = command[-1].split("=")[1]
        line, = [line for line in losses_of(output, 0) if "loss" in line]
        assert abs(line["kd/on"]) < 1e-6 and line["grad_norm"] < 1e-4, command
        assert abs(line["rollout/reverse_kl_per_byte"]) < 1e-5
        # there is no text of the data to learn
        assert line["ce"] is None and line["kd/off"] is None and line["rollout/share"] == 1
        assert line["loss"] == line["kd"]
        record, *_ = records_of(output).values()
        [teacher_nats] = record["teacher_nats_per_byte"].values()
        assert record["student_nats_per_byte"] == pytest.approx(teacher_nats, rel=1e-4)


@pytest.mark.parametrize("keys, age", [([(0, 0), (1, 0)], 1), ([(0, 0)], 0)])
def test_what_was_written_ahead_serves_the_step_that_it_was_written_for(monkeypatch, keys, age):
    """A checkpoint of the step before bad ones lacks some of it: then today's weights write."""
    monkeypatch.setattr(on_policy, "global_sums", lambda values: values)
    prompts = [RolloutPrompt((source, 0), [], "", None, None, 1) for source in range(2)]
    writer = on_policy.Writer(*[None] * 7, is_restored=True, ahead=dict.fromkeys(keys, "ahead"))
    asked = []

    def write(prompts, _):
        asked.extend(prompts)
        return [SimpleNamespace(prompt=prompt) for prompt in prompts]

    writer.rollouts = write
    draft = SimpleNamespace(examples=[Example(prompt) for prompt in prompts])
    writer._take_batch([draft])
    assert writer.age == age and (not asked) == bool(age)
    assert set(writer.written) == {(0, 0), (1, 0)}
    assert (set(writer.written.values()) == {"ahead"}) if age else len(asked) == 2


def test_the_terminal_says_what_the_student_writes_and_how():
    cfg = distill.Config(student="S", teacher="T", data="D", on_policy=0.5, rollout_tokens=384,
                         writer="vllm")
    assert intention(cfg) == (
        "the student writes 50% of the samples, up to 384 tokens each, by vLLM")
    metrics = {f"eval/rollout/{name}": value for name, value in (
        ("reverse_kl_per_byte", 0.2876), ("repeated_4grams", 0.03), ("truncated", 0.12))}
    assert on_policy.Writer.summary(None, metrics) == (
        ", own text 0.288 nats a byte, 3% repeated, 12% cut")
    assert on_policy.Writer.summary(None, {}) == ""
