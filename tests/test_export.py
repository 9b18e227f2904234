"""The results of a run are never lost, and an export replaces nothing but an earlier export."""

import inspect
import json
import os
import re
import resource
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss import export, log
from isogloss.checkpoints import export_files, model_card, run_identity
from isogloss.command import tool
from isogloss.config import Config
from isogloss.curves import read_run
from isogloss.flags import model_names
from isogloss.job import launch
from jobs import ds_config, losses_of, run_distill, short_run, write_corpus
from wrong_input import check_one_line, error_line, good_line, outcomes, run_wrong


def tree(folder):
    """Return {path: content} of all files in a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def place(models, texts, tmp_path):
    """(folder of models, data and a run; flags of a good command line)."""
    for name, model in zip(("student", "teacher"), models):
        shutil.copytree(model, tmp_path / "models" / name)
    (tmp_path / "data").mkdir()
    copies = tmp_path / "models" / "student", tmp_path / "models" / "teacher"
    return tmp_path, short_run(copies, texts, tmp_path, "--max_length=40", "--num_workers=0",
                               f"--data={write_corpus(tmp_path / 'data', texts, 20)}",
                               f"--output_dir={tmp_path / 'runs' / 'a'}")


REFUSED = {
    "--export={folder}/runs/a": "would replace --output_dir",
    "--export={folder}/runs/a/checkpoints/x": "would replace the check",
    "--export={folder}/models/student": "would replace --student",
    "--export={folder}/models": "would replace --student",
    "--export={folder}/models/teacher/x": "would replace teacher",
    "--export={folder}/link": "would replace --student",
    "--export={folder}/data": "which no export of ours wrote",
    "--export={folder}/other": "which no export of ours wrote",
    "--export={folder}/ds.json": "is a file; name a directory",
    "--export={folder}/notes/x": "nothing can be written to",
    "--export={folder}/notes": "is a file; name a directory",
    "--output_dir={folder}/notes/run": "nothing can be written to",
    "--output_dir=/proc/x": "nothing can be written to",
    '--output_dir={folder}/taken --loss=projection_kl --loss_options={"learn_projection":true}':
        "projection.pt is a directory",
}


def test_an_export_over_anything_else_is_refused(models, place):
    folder, flags = place
    shutil.copytree(models[0], folder / "other")
    (folder / "other" / ".git").mkdir()
    (folder / "other" / ".git" / "HEAD").write_text("ref")
    (folder / "link").symlink_to(folder / "models" / "student")
    (folder / "notes").write_text("mine")
    (folder / "taken" / "projection.pt").mkdir(parents=True)
    (folder / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "a" / "metrics.jsonl").write_text("")
    before = tree(folder)
    folders = sorted(folder.rglob("*"))
    for change, of_ranks in run_wrong(2, REFUSED, [*flags, "--steps=1"], folder).items():
        check_one_line(of_ranks, REFUSED[change])
    assert tree(folder) == before
    assert sorted(folder.rglob("*")) == folders  # the probes leave nothing behind


def is_refused(path):
    try:
        export_files.check_replaceable(str(path))
    except ValueError:
        return True
    return False


def test_what_an_export_may_replace(tmp_path):
    """An export's own files, an empty folder or none; a link is followed."""
    target = tmp_path / "export"
    assert not is_refused(target)
    (target / "sub").mkdir(parents=True)
    (target / "a.json").write_text("{}")
    (target / "sub" / "b").write_text("")
    assert is_refused(target)
    names = ["a.json", "sub/b"]
    sizes = {name: export_files.size_and_checksum(target / name) for name in names}
    (target / export_files.MANIFEST).write_text(json.dumps({"files": sizes}))
    assert not is_refused(target)
    (tmp_path / "link").symlink_to(target)
    assert not is_refused(tmp_path / "link")
    for name in ("notes", ".git/HEAD", "sub/c"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("")
        assert is_refused(target), name
        (target / name).unlink()
    assert is_refused(target)  # an empty folder .git
    (target / ".git").rmdir()
    assert not is_refused(target)
    (target / "a.json").write_text("[]")  # as long as before
    assert is_refused(target)
    (target / "a.json").unlink()
    assert not is_refused(target)
    (target / export_files.MANIFEST).write_text("no JSON")
    assert is_refused(target)
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    assert not is_refused(tmp_path / "dead")


@pytest.mark.parametrize("place, message", [
    ("/", "is where a disk is mounted"), ("/proc", "is where a disk is mounted"),
    ("/usr", "which no export of ours wrote")])
def test_an_export_over_a_whole_system_is_refused_before_all_of_it_is_read(
        monkeypatch, place, message):
    monkeypatch.setattr(os, "walk", None)
    with pytest.raises(ValueError, match=f"--output {place}: .*{message}"):
        export_files.check_replaceable(place, "--output")


def full_disk(*_):
    raise OSError(28, "No space left on device")


def failed_then_exported(folder, base, changes):
    """`outcomes` of runs, the first of which fails to export, as on a full disk."""
    write = export_files.write_model
    export_files.write_model = full_disk
    ended = outcomes(folder, base, changes[:1])
    export_files.write_model = write
    return ended + outcomes(folder, base, changes[1:])


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_failed_export_loses_nothing(place):
    """The last step is saved without --save_every, so the same command exports again."""
    folder, flags = place
    target = folder / "runs" / "a" / "student"
    flags = [*flags, f"--export={target}"]
    on_ranks = ranks.run(2, failed_then_exported, folder, flags,
                         ["--steps=2", "--steps=2", "--steps=3"])
    failed, exported, again = on_ranks[0]
    assert [outcome.exit_code for outcome in on_ranks[1]] == [1, 0, 0]
    assert failed.exit_code == 1
    lines = [line for line in failed.stderr.splitlines() if line.startswith("distill.py: ")]
    assert len(lines) == 1 and "No space left on device" in lines[0]
    assert "same command writes it" in lines[0]
    assert exported.exit_code == again.exit_code == 0, exported
    assert [line["step"] for line in losses_of(folder / "runs" / "a")] == [1, 2, 3]
    checkpoints = sorted(os.listdir(folder / "runs" / "a" / "checkpoints"))
    assert {"step_0000002", "step_0000003"} <= set(checkpoints)
    # what is exported is the student of the last step
    saved = torch.load(folder / "runs/a/checkpoints/step_0000003/mp_rank_00_model_states.pt",
                       weights_only=False)["module"]
    for name, weight in weights_of(target).items():
        assert torch.equal(weight, saved[f"model.{name}"]), name
    listed = json.loads((target / export_files.MANIFEST).read_text())["files"]
    assert sorted([*listed, export_files.MANIFEST]) == sorted(os.listdir(target))
    # nothing beside it, and what a user puts into it is not lost
    assert [name for name in os.listdir(target.parent) if name.startswith(".")] == [".lock"]
    (target / "notes.txt").write_text("mine")
    [[refused]] = ranks.run(1, outcomes, folder, flags, ["--steps=3"])
    check_one_line([refused], "holds notes.txt, which no export of ours wrote")
    assert (target / "notes.txt").read_text() == "mine"


# --- any checkpoint, in one process ---------------------------------------------------------------

# name: (ZeRO stage, more of the ds_config, flags)
LAYOUTS = {
    "zero 0": (0, {}, []),
    "zero 3": (3, {"bf16": {"enabled": True}}, []),
    "adapter": (2, {}, ["--lora_r=4"]),
    "pipeline": (1, {"gradient_accumulation_steps": 2}, ["--pipeline_parallel=2"]),
}


# What a published model may say: several ends, settings that transformers itself would refuse to
# save, and keys that it does not know.
GENERATION = {"bos_token_id": 1, "eos_token_id": [7, 9], "pad_token_id": 0, "do_sample": False,
              "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 77, "chat_format": "chatml",
              "transformers_version": "4.37.0"}


@pytest.fixture(scope="module")
def exported(models, texts, tmp_path_factory):
    """A folder with a run of two steps in each of LAYOUTS, checkpoints and exports kept."""
    pytest.importorskip("peft")  # of the adapter
    folder = tmp_path_factory.mktemp("layouts")
    student = folder / "models" / "student"
    shutil.copytree(models[0], student)
    (student / "generation_config.json").write_text(json.dumps(GENERATION))
    argv = []
    for name, (stage, more, flags) in LAYOUTS.items():
        config = ds_config(folder / f"{name}.json", stage, 2, 1, **more)
        output = folder / name
        argv.append([
            *good_line((student, models[1]), texts, folder), f"--ds_config={config}",
            "--max_length=40", "--num_workers=0", "--steps=2", "--save_every=1", "--eval_rows=4",
            f"--output_dir={output}", f"--export={output / 'student'}", *flags])
    assert ranks.run(2, run_distill, argv, True) == [[0] * len(argv)] * 2
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_exports_what_the_job_does(exported, name, capsys):
    """Bit for bit, from one file, the shards of ZeRO-3 in bfloat16 and the stages of a pipeline.

    The student's own generation settings stay whole; eos ends every text that it learns from.
    """
    run = exported / name
    tool("export", [str(run)])
    assert capsys.readouterr().out == f"{run / 'export_0000002'}\n"
    of_job = run / "student"
    of_command = run / "export_0000002"
    assert sorted(os.listdir(of_command)) == sorted(os.listdir(of_job))
    for file in os.listdir(of_job):
        # the manifest has checksums of the other three
        if file not in ("README.md", "curves.png", "adapter_config.json", export_files.MANIFEST):
            assert (of_command / file).read_bytes() == (of_job / file).read_bytes(), file
    eos = AutoTokenizer.from_pretrained(of_job).eos_token_id
    assert eos not in GENERATION["eos_token_id"]
    settings = json.loads((of_job / "generation_config.json").read_text())
    assert settings == GENERATION | {"eos_token_id": [7, 9, eos]}
    # all files are read by the same people
    modes = {path.name: oct(path.stat().st_mode) for path in of_job.iterdir()}
    assert set(modes.values()) == {modes["README.md"]}, modes
    if name == "adapter":
        assert "adapter_model.safetensors" in os.listdir(of_job)
        return
    # an earlier step has other weights, from its own checkpoint
    tool("export", [str(run), "--step=1", f"--output={run / 'first'}"])
    first = weights_of(run / "first")
    last = weights_of(of_job)
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[key], last[key]) for key in first)
    if name == "pipeline":
        stages = [torch.load(path, weights_only=True) for path in
                  sorted((run / "checkpoints/step_0000001").glob("stage_*"))]
        saved = stages[0] | stages[1]
        for key, weight in first.items():
            assert torch.equal(weight, saved[f"model.{key}"]), key
    assert "| steps | 1 of 2 |" in (run / "first" / "README.md").read_text()


@pytest.mark.parametrize("file", ["model.safetensors", "curves.png"])
def test_a_full_disk_is_one_line_and_leaves_nothing(exported, file, capsys):
    """The command fails as the job's own export does, and the disk is no fuller than before."""
    output = exported / f"full {file}"
    command = [str(exported / "zero 0"), f"--output={output}"]
    size = (exported / "zero 0" / "student" / file).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        error = error_line(capsys, export, command, "isogloss.export")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"--output {output}: cannot be written (" in error and "File too large" in error
    assert not [path.name for path in exported.iterdir() if output.name in path.name]
    tool("export", command)
    assert (output / file).exists()


def test_the_card_is_valid_and_its_lines_run(exported, monkeypatch, capsys):
    folder = exported / "zero 3" / "student"
    card = ModelCard.load(folder / "README.md")
    [first, *_] = card.data.eval_results
    assert first.metric_type == "student_bits_per_byte" and first.metric_value > 0
    assert first.dataset_name == "corpus20.jsonl"
    assert card.data.model_name == "student, distilled from teacher"
    monkeypatch.chdir(folder)
    code = re.search(r"^```python\n(.*?)^```", card.text, re.M | re.S)[1]
    exec(code, {})
    assert capsys.readouterr().out.startswith("The boat")
    assert "(curves.png)" in card.text and (folder / "curves.png").exists()


@pytest.fixture(scope="module")
def chat_run(chat_models, texts, tmp_path_factory):
    """A run on chats, of two epochs and a third, half of which the student writes."""
    folder = tmp_path_factory.mktemp("chats")
    turns = [[{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:60]}]
             for text in texts[:10]]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    config = ds_config(folder / "ds.json", 1, 2, 2, scheduler={
        "type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 1}})
    line = [f"--student={chat_models[0]}", f"--teacher={chat_models[1]}", "--text_key=messages",
            f"--data={folder / 'chats.jsonl'}", f"--ds_config={config}", "--max_length=60",
            "--steps=4", "--eval_rows=3", "--on_policy=0.5", "--rollout_tokens=6",
            '--template_kwargs={"thinks": false}', f"--output_dir={folder}",
            f"--export={folder / 'student'}"]
    assert ranks.run(1, run_distill, [line]) == [[0]]
    return folder


def test_the_card_of_a_chat_student_asks_it_by_messages(chat_run, monkeypatch, capsys):
    card = ModelCard.load(chat_run / "student" / "README.md")
    assert "conversational" in card.data.tags and "--chat_date 20" in card.text
    monkeypatch.chdir(chat_run / "student")
    code = re.search(r"^```python\n(.*?)^```", card.text, re.M | re.S)[1]
    assert '"role": "user"' in code and "tokenizer_encode_kwargs={'thinks': False}" in code
    scope = {}
    exec(code, scope)
    printed = capsys.readouterr().out
    assert printed.strip() and "What is" not in printed  # the answer alone
    assert scope["write"].tokenizer.chat_template


def test_the_card_says_how_the_student_was_trained(chat_run, exported):
    """As it follows from the files that the run was given, and from its log."""
    card = (chat_run / "student" / "README.md").read_text()
    lines = read_run(chat_run)
    tokens = [line["tokens"] for line in lines if "tokens" in line]
    first, last = [line for line in lines if "eval/kd" in line]
    for row in (f"| batch | 4 samples, {sum(tokens) / 4:,.0f} learned tokens on average |",
                "| optimizer | AdamW, WarmupLR, learning rate up to 0.002 |",
                "| precision | float32, ZeRO stage 1 |",
                f"| seen | {sum(tokens):,} learned tokens, 2.29 epochs of 7 samples |",
                "| held-out rows | 3 |",
                "| on-policy | the student writes 50% of the samples, up to 6 tokens each |",
                "| cross-entropy | weight 1, on the samples of the data |"):
        assert row in card, (row, card)
    for key, text in (("reverse_kl_per_byte", "reverse KL, nats a byte"),
                      ("repeated_4grams", "repeated 4-grams of tokens"),
                      ("truncated", "cut before its end")):
        values = [f"{line[f'eval/rollout/{key}']:#.4g}" for line in (first, last)]
        assert f"| text of its own: {text} | {values[0]} | {values[1]} |" in card
    bits = [first[f"eval/{role}_bits_per_byte"] for role in ("teacher", "student")]
    worse = "teacher teacher is worse on the held-out rows than the student ({:#.4g} and {:#.4g} "
    assert (worse.format(*bits) in card) == (bits[0] > bits[1])
    card = (exported / "zero 3" / "student" / "README.md").read_text()
    assert "| precision | bf16, ZeRO stage 3 |" in card and "| held-out rows | 4 |" in card
    assert "chat_date" not in card and "conversational" not in card
    alone = Config(student="s", teacher="t", data="d", on_policy=1, max_length=600)
    metrics = {"step": 0, "eval/student_bits_per_byte": 6.0, "eval/teacher_bits_per_byte": 7.0}
    text = model_card.card_text({}, alone, [metrics], 3, False)
    assert "the student writes 100% of the samples" in text and "cross-entropy" not in text
    assert "| 6.000 | 6.000 |" in text
    assert ("\nBefore training teacher t is worse on the held-out rows than the student (7.000 "
            "and 6.000 bits per byte).\n") in text


def test_without_matplotlib_a_card_has_no_picture(exported, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model_card.write_card(tmp_path, exported / "zero 3", 2)
    assert "curves.png" not in (tmp_path / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_the_card_says_what_licenses_ask(tmp_path):
    names = {"base": "license: llama3.2\nlanguage:\n- en", "free": "license: apache-2.0",
             "strict": "license: other\nlicense_name: gemma", "silent": ""}
    for name, front in names.items():
        (tmp_path / name).mkdir()
        if front:
            (tmp_path / name / "README.md").write_text(f"---\n{front}\n---\n# {name}\n")
    teachers = [{"model": str(tmp_path / name)} for name in ("free", "strict", "silent")]
    cfg = Config(student=str(tmp_path / "base"), data="org/data:x", text_key="it's",
                 teachers=json.dumps(teachers))
    text = model_card.card_text({}, cfg, [], 3, False)
    data = ModelCard(text).data
    assert data.license == "llama3.2" and data.language == ["en"] and data.datasets == ["org/data"]
    assert "# base, distilled from free, strict, silent\n" in text
    assert re.findall(r"^- (\w+) \((.*?)\)", text, re.M) == [("base", "llama3.2"),
                                                            ("strict", "gemma")]
    assert "--text_key 'it'\"'\"'s'" in text  # as a shell takes it
    assert "license" not in model_card.front_matter(Config(student="s", teacher="t", data="d"))
    mixture = Config(student="s", teacher="t", data='[{"data": "/x/a.jsonl"}, {"data": "org/b"}]')
    lines = [{"step": 1, "eval/student_bits_per_byte": 2.0, "eval/b/student_bits_per_byte": 1.5}]
    text = model_card.card_text({}, mixture, lines, 3, False)
    assert "| bits per byte, student (b) | 1.500 (step 1) | 1.500 |" in text
    assert "| data | a.jsonl, org/b |" in text and "datasets:\n- org/b\n" in text
    assert ModelCard(text).data.eval_results[0].dataset_name == "a.jsonl, org/b"
    front = model_card.front_matter(Config(student="no/such_base", teacher="t", data="d", lora_r=2))
    assert "base_model_relation: adapter" in front and "library_name: peft" in front


def test_the_card_says_what_it_was_made_of_and_no_path(exported):
    folder = exported / "zero 3" / "student"
    card = (folder / "README.md").read_text()
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "library_name: transformers" in front and "tags:\n- isogloss" in front
    assert "base_model:" not in front and "datasets:" not in front  # paths are no hub ids
    for text in ("# student, distilled from teacher", "| base model | student |",
                 "teacher: loss `piece_kl`, weight 1",
                 "| data | corpus20.jsonl |", "| steps | 2 of 2 |", "| ranks | 2 |",
                 "--max_length 40", "![Curves of the run](curves.png)"):
        assert text in body, text
    for path in folder.iterdir():  # of none of the files
        assert str(exported).encode() not in path.read_bytes(), path
    lines = losses_of(exported / "zero 3", -1)
    bits = [line["eval/student_bits_per_byte"] for line in lines if "eval/kd" in line]
    assert f"| bits per byte, student | {bits[0]:#.4g} | {bits[-1]:#.4g} |" in body
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    cfg = Config(student="org/base", teacher="org/teacher", data="org/data:subset")
    front = model_card.front_matter(cfg)
    assert "base_model:\n- org/base\n" in front and "datasets:\n- org/data\n" in front
    several = Config(student="org/base", data="a.jsonl", from_scratch=True, kd_weight=2, teachers=(
        '[{"model": "org/one", "weight": 0.5}, {"model": "/home/two", "loss": "alm"}]'))
    text = model_card.card_text({}, several, [], 3, False)
    assert "base_model:" not in text and "| base model | org/base (shape only) |" in text
    assert "| teacher | org/one: loss `piece_kl`, weight 1 |" in text
    assert "| teacher | two: loss `alm`, weight 2 |" in text and "/root" not in text


def test_the_card_says_at_which_step_a_number_was_measured():
    bits, kd = "eval/student_bits_per_byte", "eval/kd"
    lines = [{"step": 4, bits: 3.0, "eval/teacher_bits_per_byte": 4.0}, {"step": 5, "loss": 1.0},
             {"step": 8, bits: 2.0, kd: 0.5}]
    cfg = Config(student="org/base", teacher="org/teacher", data="org/data")
    card = model_card.card_text({}, cfg, lines, 11, False)
    for line in ("| steps | 11 of 1000 |", "|  | before | step 8 |",
                 "| bits per byte, student | 3.000 (step 4) | 2.000 |",
                 "| bits per byte, teacher | 4.000 (step 4) | 4.000 (step 4) |",
                 "| distillation loss, nats per term | 0.5000 (step 8) | 0.5000 |"):
        assert line in card, card
    assert "Before training" not in card
    card = model_card.card_text({}, cfg, [lines[0] | {"step": 0}], 11, False)
    assert "| bits per byte, student | 3.000 | 3.000 |" in card and "Before training" in card


def test_a_name_that_is_no_text_ends_no_export(tmp_path):
    """As of a file whose name another system has written."""
    config = asdict(Config(student="org/base", teacher="org/teacher", data="/caf\udce9.jsonl"))
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    model_card.write_card(tmp_path, tmp_path, 3)
    assert "| data | caf?.jsonl |" in (tmp_path / "README.md").read_text("utf-8")


SECRETS = ("pa55", "s1gn", "hf_AbCdEf0123456789", "k3y", "pr0ject-key")
# {what a line says: what of it may be read by others}
PUBLIC = {
    "--data https://me:pa55@host/a.jsonl?sig=s1gn: cannot be read":
        "--data https://***@host/a.jsonl?***: cannot be read",
    "(https://host/a.jsonl?sig=s1gn).": "(https://host/a.jsonl?***).",
    "https://me:pa55@pa55@host:80/x": "https://***@host:80/x",
    "s3://AKIA:pa55/pa55@bucket/x": "s3://***@bucket/x",
    "filecache::https://me@host/a?s1gn and b@c": "filecache::https://***@host/a?*** and b@c",
    "hf://datasets/org/name@main/a.jsonl": "hf://datasets/org/name@main/a.jsonl",
    "http://host:8000/v1#model": "http://host:8000/v1#model",
    '[{"model": "http://host:80", "routes": ["a@b"]}]':
        '[{"model": "http://host:80", "routes": ["a@b"]}]',
    "the token hf_AbCdEf0123456789 is not valid": "the token hf_*** is not valid",
    'comet: {"api_key": "k3y", "mode": "x"}': 'comet: {"api_key": "***", "mode": "x"}',
    "COMET_API_KEY=k3y python": "COMET_API_KEY=*** python",
    "the server says: no pr0ject-key here": "the server says: no *** here",
    "eos_token: </s>, org/name?": "eos_token: </s>, org/name?",
    "a writer --api-key=k3y --hub-token k3y --token -v --prompt_tokens 32":
        "a writer --api-key=*** --hub-token *** --token -v --prompt_tokens 32",
}


@pytest.fixture
def secret_variable(monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "pr0ject-key")


@pytest.mark.parametrize("line", PUBLIC)
def test_stars_stand_for_what_is_secret(line, secret_variable, capsys):
    with pytest.raises(SystemExit):
        launch.fail(line, loud=True)
    assert capsys.readouterr().err.endswith(f": {PUBLIC[line]}\n")
    assert model_names.without_secrets([{"a": line}]) == [{"a": PUBLIC[line]}]


def test_a_long_text_is_no_work():
    # minutes, if every place looked to the end
    for text in ("a_b" * 10**6, "://a" * 10**6, "-a" * 10**6):
        assert model_names.without_secrets(text) == text


def test_no_record_of_a_run_holds_a_secret(models, tmp_path, monkeypatch, secret_variable):
    """Run.json, the card, a checkpoint's identity, a cache's manifest."""
    address = "https://me:pa55@host/{}.jsonl?sig=s1gn"
    ds_path = tmp_path / "ds.json"
    ds_path.write_text(json.dumps({"train_batch_size": 1, "comet": {"api_key": "k3y"}}))
    flags = {"student": str(models[0]), "teacher_cache": "/home/me/caches/of_teacher",
             "data": address.format("a"), "eval_data": address.format("b"),
             "ds_config": str(ds_path)}
    cfg = Config(**flags)
    monkeypatch.setattr(sys, "argv", [f"--{name}={value}" for name, value in flags.items()])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(log, "model_versions", lambda cfg: {cfg.data: {}})
    monkeypatch.setattr(log, "_git", lambda *arguments: None)  # the diff may hold this file
    record = json.loads(log.run_record(cfg, 0, json.loads(ds_path.read_text())))
    assert record["config"]["data"] == "https://***@host/a.jsonl?***"
    assert record["config"]["student"] == str(models[0])  # with which it is run again
    served = Config(**flags | {"teacher_cache": "", "teacher": "http://host:80",
                               "teacher_tokenizer": "/home/me/models/of_server"})
    cards = [model_card.card_text(record, each, [], 3, False) for each in (cfg, served)]
    assert "/home/me" not in "".join(cards) and str(tmp_path) not in "".join(cards)
    assert "| teacher | of_teacher: " in cards[0] and "| teacher | of_server: " in cards[1]
    assert "| data | https://***@host/a.jsonl?*** |" in cards[0]
    identity = run_identity.run_identity(cfg)
    other = run_identity.run_identity(replace(cfg, data=cfg.data.replace("s1gn", "an0ther")))
    assert identity == other  # a signature is no other data
    for what in (record, cards, identity):
        for secret in SECRETS:
            assert secret not in str(what), (secret, what)


@pytest.fixture
def hub(monkeypatch):
    """[(method, arguments, options, files)] of what would be told to the hub."""
    calls = []
    for name in ("create_repo", "upload_folder"):
        signature = inspect.signature(getattr(huggingface_hub.HfApi, name))

        def call(*args, name=name, signature=signature, **options):
            signature.bind(*args, **options)
            folder = options.get("folder_path")
            calls.append((name, args[1:], options, os.listdir(folder) if folder else []))

        monkeypatch.setattr(huggingface_hub.HfApi, name, call)
    return calls


def refuse(*args, **options):
    raise RuntimeError("401 Client Error\nmore of it")


def test_an_export_is_pushed_as_it_is(exported, hub, monkeypatch, capsys):
    output = exported / "pushed"
    command = [str(exported / "pipeline"), f"--output={output}"]
    tool("export", [*command, "--push_to_hub=me/student", "--private"])
    assert "pushed to me/student" in capsys.readouterr().out
    (first, args, options, _), (second, _, upload, files) = hub
    assert (first, args, options) == ("create_repo", ("me/student",),
                                      {"private": True, "exist_ok": True})
    assert second == "upload_folder" and upload["repo_id"] == "me/student"
    assert {"README.md", "curves.png", "model.safetensors", "tokenizer.json"} <= set(files)
    assert upload["ignore_patterns"] == [export_files.MANIFEST]
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    error = error_line(capsys, export, [*command, "--push_to_hub=me/other"], "isogloss.export")
    assert "--push_to_hub me/other: RuntimeError: 401 Client Error; " in error


def test_an_adapter_of_a_local_model_is_not_pushed(exported, hub, capsys):
    """No one else has that path.  With a hub id in its place the adapter is uploaded."""
    output = exported / "adapter_to_push"
    command = [str(exported / "adapter"), f"--output={output}", "--push_to_hub=me/adapter"]
    printed = error_line(capsys, export, command, "isogloss.export")
    path = output / "adapter_config.json"
    config = json.loads(path.read_text())
    base = config["base_model_name_or_path"]
    assert Path(base).is_dir() and not hub
    assert f"{path} names the base model by a path of this machine, {base};" in printed
    path.write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    export.push(output, "me/adapter", private=False)
    assert [name for name, *_ in hub] == ["create_repo", "upload_folder"]


def test_wrong_input_of_the_command_is_one_line(exported, capsys):
    run = exported / "pipeline"
    for words, message in (
        ([], "expected a run"),
        (["nowhere"], "run.json: cannot be read"),
        ([str(run), "--step=7"], "no checkpoint of that step; there are those of 1, 2"),
        ([str(run), f"--output={run}"], "which no export of ours wrote"),
        ([str(run), f"--output={run / 'run.json'}"], "is a file; name a directory"),
        ([str(run), "--push_to_hub=student"], "expected OWNER/NAME"),
        ([str(run), "--private"], "name it with --push_to_hub"),
    ):
        assert message in error_line(capsys, export, words, "isogloss.export")
    damaged = exported / "damaged"
    shutil.copytree(run, damaged)
    with open(damaged / "checkpoints/step_0000002/stage_00_model_states.pt", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 8)
    error = error_line(capsys, export, [str(damaged)], "isogloss.export")
    assert "stage_00_model_states.pt is damaged" in error
