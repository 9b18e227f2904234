"""Every recipe is one that the command line takes; the tiny ones run."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from deepspeed.runtime.lr_schedules import WarmupCosineLR

import ranks
from conftest import ROOT
from isogloss.command import tool
from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.student.ds_config import batch_sizes, read_ds_config
from jobs import losses_of, run_and_listen, run_distill
from recipes.tiny import prepare
from test_writer_process import command  # noqa: F401, a fixture

LARGE = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = sorted((ROOT / "recipes" / "tiny").glob("*.yaml"))
# The others are read alone here: jobs of these features run in other tests.  A pipeline comes last,
# because DeepSpeed keeps its layout for all later engines of a process.
RUN = ("adapter", "chats", "completions", "draft", "from_scratch", "mixture", "self", "sharded",
       "teachers", "transfer", "written", "pipeline")
README = (ROOT / "recipes" / "README.md").read_text()


@pytest.mark.parametrize("path", [*LARGE, *TINY], ids=lambda path: path.stem)
def test_a_recipe_is_a_command_line(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = parse_flags(Config, [f"--config={path}"], file_flag="config")
    assert Path(cfg.output_dir).name == path.stem
    num_ranks = 2
    if path in LARGE:
        row = re.search(rf"\| \[{re.escape(path.stem)}\]\(.*?\) \| (\d+)", README)
        num_ranks = int(row[1])
    else:
        assert f"`{path.stem}`" in README
    # the batch of its ds_config is one of so many ranks
    num_ranks //= cfg.ranks_per_reader
    sizes = batch_sizes(read_ds_config(cfg.ds_config), num_ranks, cfg.ds_config)
    assert sizes.train_batch_size >= (32 if path in LARGE else 4)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_readme_says_what_a_recipe_needs_and_that_it_has_not_run(path, monkeypatch):
    from isogloss.command import PlanArgs
    from isogloss.plan import GIB, gpus_of, plan

    monkeypatch.chdir(ROOT)
    text = path.read_text()
    assert "NOT YET RUN ON GPUs" in text and f"--config recipes/{path.name}" in text
    cfg = parse_flags(Config, [f"--config={path}"], file_flag="config")
    name = rf"\[{re.escape(path.stem)}\]\({re.escape(path.name)}\)"
    row = re.search(rf"\| {name} \|(.*\|)", README)[1]
    gpus, memory, *_ = row.split("|")
    num_gpus, per_node, _ = gpus_of(PlanArgs(recipe=str(path)))
    assert "# GPUs: " in text and num_gpus == int(re.search("[0-9]+", gpus)[0])
    need = plan(cfg, num_gpus, per_node=per_node)
    assert float(memory) == pytest.approx(need.peak / GIB, abs=0.5)


def test_recipes_of_published_runs_are_those_runs():
    """NeMo RL's xtoken_off_policy_distillation.yaml: 250 steps of warm-up from 0.02, 4,750 down."""
    config = json.loads((ROOT / "recipes" / "ds_96.json").read_text())
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=5e-5)
    schedule = WarmupCosineLR(optimizer, **config["scheduler"]["params"])
    rates = []
    for _ in range(100):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    expected = [5e-5 * (0.02 + 0.98 * step / 250) for step in range(100)]
    assert rates == pytest.approx(expected)
    for name in ("qwen3_4b_to_llama_3.2_1b", "phi4_mini_llama_3b_to_llama_3.2_1b"):
        flags = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
        assert (flags["join_rows"], flags["max_length"], flags["steps"]) == (16384, 2048, 100)
        assert flags["ds_config"] == "recipes/ds_96.json"
        assert flags["eval_task_options"] == {"shots": 3}


def test_sizes_of_models_are_those_that_are_published(monkeypatch):
    """The table's numbers give as many weights as the model's name says."""
    from isogloss.plan import shape_of

    for name, values in yaml.safe_load((ROOT / "isogloss/architectures.yaml").read_text()).items():
        published = float(values["published"])
        assert shape_of("student", name).weights == pytest.approx(published, rel=0.02), name


def run_recipes(folder, names):
    """Run tiny recipes on this rank; return their exit codes."""
    os.chdir(folder)
    return run_distill([[f"--config=recipes/tiny/{name}.yaml"] for name in names])


def run_tool(folder, name, recipe):
    """Run the command in the head of a tiny recipe on this rank."""
    os.chdir(folder)
    [words] = re.findall(rf"isogloss {name} (.*)", Path(f"recipes/tiny/{recipe}.yaml").read_text())
    tool(name, words.split())


@pytest.mark.slow
def test_tiny_recipes_run(tmp_path, monkeypatch):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    prepare.main(tmp_path / "runs" / "tiny")
    monkeypatch.chdir(tmp_path)
    run_tool(tmp_path, "transfer", "transfer")
    ranks.run(1, run_tool, tmp_path, "write", "written")
    assert ranks.run(2, run_recipes, tmp_path, RUN) == [[0] * len(RUN)] * 2
    for name in RUN:
        lines = [line for line in losses_of(tmp_path / "runs/tiny" / name) if "loss" in line]
        assert [line["step"] for line in lines] == [1, 2, 3, 4], name
        cut = [line["cut_before_labels"] for line in lines]
        assert max(cut) < 0.25, (name, cut)
        record = json.loads((tmp_path / "runs/tiny" / name / "run.json").read_text())
        assert record["config"]["config"] == f"recipes/tiny/{name}.yaml"
        assert record["config_text"] == (ROOT / "recipes/tiny" / f"{name}.yaml").read_text()
    assert (tmp_path / "runs/tiny/adapter/export/model.safetensors").exists()


# --- the large ones, a thousand times smaller -----------------------------------------------------


@pytest.mark.slow
def test_every_recipe_runs_to_its_end_with_small_models(
        chat_models, untied, texts, tmp_path, command):  # noqa: F811
    """Its own flags, schedule and files; models, rows and batches of tiny size in their places."""
    data = tmp_path / "data"
    data.mkdir()
    for split, chosen in (("train", texts[:60]), ("test", texts[60:70])):
        rows = [{"text": text, "question": text[:30], "answer": text[30:90],
                 "messages": [{"role": "user", "content": text[:30]},
                              {"role": "assistant", "content": text[30:90]}]} for text in chosen]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    student, teacher = chat_models
    lines = []
    names = [path.stem for path in LARGE if "served" not in path.stem]  # whose server is elsewhere
    for name in names:
        flags = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
        config = json.loads((ROOT / flags["ds_config"]).read_text())
        config |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        line = [f"--config={ROOT / 'recipes' / name}.yaml", f"--student={student}",
                f"--data={data}", f"--ds_config={tmp_path / name}.json", "--steps=2",
                "--max_length=60", "--eval_rows=4", "--eval_every=2", "--eval_tasks=",
                "--eval_task_every=0", "--eval_task_options=", "--num_workers=0",
                f"--output_dir={tmp_path / name}", f"--export={tmp_path / name / 'student'}"]
        if "teachers" in flags:  # the second has the student's tokenizer
            entries = [dict(entry, model=str(model)) for entry, model in
                       zip(flags["teachers"], (teacher, untied), strict=True)]
            line.append(f"--teachers={json.dumps(entries)}")
        else:
            line.append(f"--teacher={teacher}")
        line += ["--teacher_tp=2"] * ("teacher_tp" in flags)
        line += [f"--teacher_engine={command('teacher')}"] * ("teacher_engine" in flags)
        line += ["--join_rows=200"] * ("join_rows" in flags)
        line += ["--rollout_tokens=8"] * ("rollout_tokens" in flags)
        lines.append(line)
    codes, said = ranks.run(2, run_and_listen, *lines)[0]
    assert codes == [0] * len(names), said
    for name in names:
        logged = losses_of(tmp_path / name)
        assert [line["step"] for line in logged if "loss" in line] == [1, 2], name
        assert all(0 < line["loss"] < 99 for line in logged if "loss" in line), name
        assert list((tmp_path / name / "student").glob("*.safetensors")), name
