"""Rollouts of several turns: what the student said is learned, an environment's words are read."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ranks
from isogloss import distill
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Example
from isogloss.inputs import load_text_encoder, plan_teachers
from isogloss.job.launch import start_distributed
from jobs import ds_config, losses_of, run_all, run_and_listen
from steps import Case, Layout, Reference, check_steps
from talkers import CHAT, LONG, SHORT, TOOLS, Canned, write_talkers
from test_on_policy import check_same_rollouts_curve, config_of, records_of, without_gaps
from test_writer_process import command, without_entropy  # noqa: F401

pytestmark = pytest.mark.slow
ENVIRONMENT = Path(__file__).with_name("talk_environment.py")

SAMPLES = [Canned(CHAT), Canned(LONG), None, Canned(SHORT, 3), Canned(CHAT, 1, cut=True),
           Canned(LONG, 3)]
LOSSES = "alm", "piece_kl", "reverse_kl"


@pytest.fixture(scope="module")
def talkers(texts, tmp_path_factory):
    return write_talkers(texts, tmp_path_factory.mktemp("talkers"))


def flags_of(talkers, folder):
    rows = folder / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, '
                    '{"role": "assistant", "content": "b"}]}\n' * 9)
    return dict(student=str(talkers[0]), teacher=str(talkers[1]), data=str(rows),
                text_key="messages", max_length=400, kd_weight=0.7, ce_weight=0.3,
                output_dir=str(folder), on_policy=0.5)


def example_of(sample, encoder):
    return Example(None) if sample is None else sample.example(encoder, TOOLS)


def as_data(sample):
    """Return the Example of the same chat, of which only what the student said is learned."""
    chat = copy.deepcopy(sample.chat)
    for message in chat[: sample.prompt_messages]:
        message["weight"] = 0
    return Example(chat, tools=TOOLS)


def reference(flags):
    """Return the Reference by torch alone, of the chats as data."""
    start_distributed()
    cfg = distill.Config(**flags)
    student, _ = load_text_encoder("student", cfg.student, cfg.max_length)
    teacher, _ = load_text_encoder("teacher", cfg.teacher, 0)
    [setup] = plan_teachers(cfg, student, {cfg.teacher: teacher}, torch.device("cpu"))
    collator = Collator(student, [PairOptions(teacher, setup.loss.spelling)])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (cfg.student, cfg.teacher)]
    kd = torch.zeros(())
    num_terms = 0
    for sample in filter(None, SAMPLES):
        batch = collator([as_data(sample)])
        logits = models[0](input_ids=batch.student.ids).logits[..., : len(student.table)]
        with torch.no_grad():
            teacher_logits = models[1](input_ids=batch.teachers[0].ids).logits
        teacher_logits = teacher_logits[..., : len(teacher.table)]
        num_terms += batch.counts.pairs[0].kd_terms
        for tile in batch.teachers[0].tiles:
            sub_tile, = tile.sub_tiles
            weight = torch.ones(len(tile.student_positions))
            if sample.cut:
                is_end = tile.student_positions == int((batch.student.labels[0] >= 0).nonzero()[-1])
                weight = weight * ~is_end
                num_terms -= 1
            kd = kd + setup.loss.loss_fn(
                logits.flatten(0, 1)[tile.student_positions],
                teacher_logits.flatten(0, 1)[sub_tile.teacher_positions],
                sub_tile._replace(weight=weight))
    loss = cfg.kd_weight * kd / num_terms
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    return Reference(loss.item(), gradients)


def references(flags):
    return {loss: reference(flags | {"loss": loss}) for loss in LOSSES}


LAYOUTS = {
    1: [Layout(0, 6, 1), Layout(3, 2, 3), Layout(2, 3, 2, {"pack": True}),
        Layout(1, 6, 1, {"tiled": False})],
    2: [Layout(2, 1, 3), Layout(1, 6, 1, {"sequence_parallel": 2}),
        Layout(3, 3, 1, {"pack": True})],
}


def test_several_turns_teach_like_the_same_chat(talkers, tmp_path):
    """To 1e-6, wherever its samples are."""
    flags = flags_of(talkers, tmp_path)
    [expected] = ranks.run(1, references, flags)
    encoder, _ = load_text_encoder("student", flags["student"], flags["max_length"])
    examples = [example_of(sample, encoder) for sample in SAMPLES]
    for num_ranks, layouts in LAYOUTS.items():
        check_steps(expected, num_ranks, flags, examples, layouts, list(map(Case, LOSSES)),
                    tolerance=1e-6)


# --- whole jobs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(talkers, tmp_path_factory):
    """A folder with ds_configs, and flags of jobs of 8 samples a step, half of them rollouts."""
    folder = tmp_path_factory.mktemp("episodes")
    for stage, micro_batch_size, num_ranks in ((2, 8, 1), (3, 2, 2), (3, 8, 1), (1, 2, 1)):
        name = f"zero{stage}-{micro_batch_size}-{num_ranks}.json"
        ds_config(folder / name, stage, micro_batch_size, 8 // micro_batch_size // num_ranks)
    rows = []
    for number in range(40):
        messages = [{"role": "user", "content": f"What is {number} + {number % 7}?"},
                    {"role": "assistant", "content": f"It is {number + number % 7}."}]
        rows.append(json.dumps({"messages": messages, "answer": number + number % 7}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder, [
        f"--student={talkers[0]}", f"--teacher={talkers[1]}", "--max_length=240",
        f"--data={folder / 'rows.jsonl'}", "--text_key=messages", "--eval_rows=6",
        "--on_policy=0.5", "--rollout_tokens=16", "--rollout_log=8", "--rollout_eval=4",
        "--rollouts_per_prompt=2", "--loss=reverse_kl"]


def asked(name, **options):
    return f"--environment={json.dumps({'function': f'{ENVIRONMENT}:{name}'} | options)}"


TALK = asked("talk", max_turns=3, reward_weight=0.5)


def test_episodes_are_the_same_in_every_layout(base):
    """Also where only some ranks have an episode that goes on, and where a reward counts."""
    folder, argv = base
    runs = {
        "one": (1, config_of(base, 2, 8, 1)),
        "two": (2, config_of(base, 3, 2, 2), "--num_workers=1"),
        "hooks": (2, config_of(base, 3, 2, 2), "--rollout_replica=false"),
        "shards": (2, config_of(base, 3, 8, 1), "--sequence_parallel=2"),
        "pipeline": (2, config_of(base, 1, 2, 1), "--pipeline_parallel=2"),
        "packed": (1, config_of(base, 2, 8, 1), "--pack"),
    }
    by_ranks = {}
    for name, (num_ranks, *flags) in runs.items():
        words = [*argv, *flags, TALK, "--steps=3", "--rollout_every=2",
                   f"--output_dir={folder / name}"]
        by_ranks.setdefault(num_ranks, []).append(words)
    for num_ranks, commands in by_ranks.items():
        run_all(num_ranks, *commands)
    expected = losses_of(folder / "one", -1)
    rollouts = records_of(folder / "one")
    for name in runs:
        lines = losses_of(folder / name, -1)
        if name in ("shards", "pipeline"):  # whose ranks hold parts of a sequence or a model
            lines = [by_turn(line) | other for line, other in zip(expected, lines, strict=True)]
        check_same_rollouts_curve(expected, lines, name=name)
        for key, record in records_of(folder / name).items():
            assert rollouts[key]["ids"] == record["ids"], (name, key)
            assert rollouts[key]["messages"] == record["messages"], (name, key)
    check_turns_add_up(expected[0])
    turns = {len(record["turns"]) for record in rollouts.values()}
    assert turns == {1, 2, 3}
    lines = [line for line in expected if "loss" in line]
    assert sum(line.get("rollout/failed_episodes", 0) for line in lines) > 0
    assert any(line["rollout/reward"] for line in lines)
    assert any(record["episode"].get("advantage") for record in rollouts.values())


def by_turn(line):
    return {key: value for key, value in line.items() if "_turn_" in key}


def check_turns_add_up(line):
    """The mean over turns, each as often as it has bytes, is that of all of them."""
    prefix = "eval/rollout/reverse_kl_per_byte"
    values = by_turn(line).values()
    assert len(values) >= 2
    assert min(values) < line[prefix] < max(values)


def test_a_reward_changes_what_is_learned(base):
    folder, argv = base
    flags = [*argv, config_of(base, 2, 8, 1), "--steps=2", "--eval_rows=0"]
    run_all(1, [*flags, TALK, f"--output_dir={folder / 'rewarded'}"],
            [*flags, asked("talk", max_turns=3), f"--output_dir={folder / 'unrewarded'}"])
    first, second = (losses_of(folder / name, -1) for name in ("rewarded", "unrewarded"))
    assert first[0]["loss"] == second[0]["loss"]
    assert first[0]["grad_norm"] != second[0]["grad_norm"] and first[1]["kd"] != second[1]["kd"]


def test_one_turn_has_the_numbers_of_a_run_without_an_environment(base):
    folder, argv = base
    flags = [*argv, config_of(base, 2, 8, 1), "--steps=2"]
    run_all(1, [*flags, f"--output_dir={folder / 'without'}"],
            [*flags, asked("ends"), f"--output_dir={folder / 'with'}"])
    assert records_without_episodes(folder / "with") == records_of(folder / "without")
    for line, other in zip(*(losses_of(folder / name, -1) for name in ("without", "with"))):
        assert {key: other[key] for key in line} == line


def records_without_episodes(output):
    added = "messages", "episode", "turns"
    return {key: {name: value for name, value in record.items() if name not in added}
            for key, record in records_of(output).items()}


def test_resume_goes_on_bit_for_bit(base):
    """A run that ends between two steps that share episodes."""
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), TALK, "--rollout_every=3", "--save_every=1"]
    run_all(1, [*argv, "--steps=5", f"--output_dir={folder / 'through'}"],
            *[[*argv, f"--steps={steps}", f"--output_dir={folder / 'stopped'}"]
              for steps in (2, 5)])
    expected = [line for line in losses_of(folder / "through", -1) if line["step"] > 2]
    again = [line for line in losses_of(folder / "stopped", 2) if line["step"] > 2]
    assert without_gaps(again) == without_gaps(expected)
    assert again[0]["rollout/staleness"] == 2


def test_another_process_writes_turns_ahead(base, command):  # noqa: F811
    """Its first turns while the student trains; the others by the weights of the first."""
    folder, argv = base
    argv = [*argv, config_of(base, 2, 8, 1), TALK, "--steps=3"]
    run_all(1, [*argv, f"--output_dir={folder / 'own'}"],
            [*argv, f"--output_dir={folder / 'process'}", f"--writer={command()}",
             "--staleness=0"],
            [*argv, f"--output_dir={folder / 'ahead'}", f"--writer={command()}"])
    check_same_rollouts_curve(without_entropy(losses_of(folder / "own", -1)),
                              without_entropy(losses_of(folder / "process", -1)))
    ahead = [line for line in losses_of(folder / "ahead", -1) if "loss" in line]
    assert ahead[1]["rollout/staleness"] == 1 and ahead[1]["rollout/ratio"] != 1
    assert ahead[1]["rollout/turns"] > 1


@pytest.mark.parametrize("flags, line", [
    (["--environment=no.such:f"], "--environment no.such:f: no.such:f: ModuleNotFoundError"),
    (["--environment={}"], "--environment: function: is empty; expected calculator"),
    (['--environment={"function": "calculator", "turns": 3}'], "unknown option 'turns'"),
    (['--environment={"function": "calculator", "max_turns": 0}'], "max_turns 0: expected 1"),
    ([asked("talk", reward_weight=1), "--rollouts_per_prompt=1"], "add --rollouts_per_prompt 4"),
    ([asked("talk", reward_weight=1), "--rollout_temperature=0.7"], "leave both at 1"),
    ([asked("talk"), "--text_key=text"], "--environment answers in chats"),
])
def test_what_does_not_go_is_told_before_the_first_step(base, flags, line, tmp_path):
    _, argv = base
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c"}\n' * 20)
    data = [f"--data={tmp_path / 'texts.jsonl'}"] if "--text_key=text" in flags else []
    words = [*argv, config_of(base, 2, 8, 1), *flags, *data, f"--output_dir={tmp_path / 'out'}"]
    [(codes, said)] = ranks.run(1, run_and_listen, words)
    assert codes == [2] and line in said.splitlines()[-1], said


def test_many_failures_in_a_row_end_the_job(base, tmp_path):
    _, argv = base
    (tmp_path / "broken.py").write_text("def broken(row):\n    return row['no such column']\n")
    words = [*argv, config_of(base, 2, 8, 1), "--steps=50", "--save_every=1",
               f"--environment={tmp_path / 'broken.py'}:broken", f"--output_dir={tmp_path / 'out'}"]
    [(codes, said)] = ranks.run(1, run_and_listen, words)
    assert codes == [1]
    assert "episodes in a row have failed: KeyError: 'no such column'" in said.splitlines()[-1]
    assert "the last good checkpoint is" in said.splitlines()[-1]


def test_what_is_to_be_a_call_and_is_none_is_not_judged(talkers):
    """Only what stands in front of it is, and no end; it is learned by a reward alone."""
    encoders = [load_text_encoder("student", str(path), 400)[0] for path in talkers]
    chat = [SHORT[0], {"role": "assistant", "content": 'Well. <tool_call>\n{"name": "calc'},
            *SHORT[2:]]
    rollout = Canned(chat).example(encoders[0], TOOLS).content
    assert rollout.episode["invalid_calls"] == 1
    first, second = rollout.turns
    assert rollout.text.encode()[first.first_byte : first.judged] == b"Well. "
    assert second.judged == second.last_byte
    batch = Collator(encoders[0], [PairOptions(encoders[1], None)])([Example(rollout)])
    chunk = batch.teachers[0].student_chunk[0]
    begin = len(rollout.prompt.ids) - 1
    judged = chunk[begin + first.first : begin + first.last] >= 0
    spelled = [encoders[0].table.decode([token]) for token in rollout.ids[: first.last]]
    assert b"".join(piece for piece, is_judged in zip(spelled, judged) if is_judged) == b"ell."
    assert (batch.student.labels[0, begin : begin + first.last] >= 0).all()
    assert (chunk[begin + second.first :] >= 0).any()
