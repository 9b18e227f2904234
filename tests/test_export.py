"""The results of a run are never lost, and an export replaces nothing but an earlier export."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import ranks
from isogloss import export
from jobs import ds_config, losses_of, write_corpus
from wrong_input import Wrong, check_one_line, outcomes, run_wrong


def tree(folder):
    """Return {path: content} of all files in a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def place(models, texts, tmp_path):
    """(folder of models, data and a run; flags of a good command line)."""
    for name, model in zip(("student", "teacher"), models):
        shutil.copytree(model, tmp_path / "models" / name)
    (tmp_path / "data").mkdir()
    corpus = write_corpus(tmp_path / "data", texts, 20)
    folder = tmp_path / "models"
    flags = [f"--student={folder / 'student'}", f"--teacher={folder / 'teacher'}",
             f"--data={corpus}", f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 2, 1)}",
             "--max_length=40", "--num_workers=0", f"--output_dir={tmp_path / 'runs' / 'a'}"]
    return tmp_path, flags


REFUSED = {
    "the run": Wrong("--export={folder}/runs/a", "would replace --output_dir"),
    "above the run": Wrong("--export={folder}/runs", "would replace --output_dir"),
    "the checkpoints": Wrong("--export={folder}/runs/a/checkpoints/x", "would replace the check"),
    "the student": Wrong("--export={folder}/models/student", "would replace --student"),
    "above the teacher": Wrong("--export={folder}/models", "would replace --student"),
    "in the teacher": Wrong("--export={folder}/models/teacher/x", "would replace teacher"),
    "a link to the student": Wrong("--export={folder}/link", "would replace --student"),
    "a link above": Wrong("--export={folder}/link/../teacher", "would replace teacher"),
    "the data": Wrong("--export={folder}/data", "would replace --data"),
    "the data by glob": Wrong("--export={folder}/data --data={folder}/data/*.jsonl",
                              "would replace --data"),
    "another model": Wrong("--export={folder}/other", "which no export of ours wrote"),
    "a file": Wrong("--export={folder}/ds.json", "--ds_config"),
    "below a file": Wrong("--export={folder}/notes/x", "nothing can be written to"),
    "a file in the way": Wrong("--export={folder}/notes", "is a file; name a directory"),
    "no folder": Wrong("--export=/proc/x/y", "nothing can be written to"),
    "a run in a file": Wrong("--output_dir={folder}/notes/run", "nothing can be written to"),
    "a run where none can be": Wrong("--output_dir=/proc/x", "nothing can be written to"),
    "a projection in the way": Wrong(
        "--output_dir={folder}/taken --loss=projection_kl --learn_projection",
        "projection.pt is a directory"),
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
    for name, of_ranks in run_wrong(2, REFUSED, [*flags, "--steps=1"], folder).items():
        check_one_line(of_ranks, REFUSED[name].message)
    assert tree(folder) == before
    assert sorted(folder.rglob("*")) == folders  # the probes leave nothing behind


def test_what_an_export_may_replace(tmp_path):
    """An export's own files, an empty folder or none; a link is followed."""
    def refused(path):
        try:
            export._check_replaceable(str(path))
        except ValueError:
            return True
        return False

    target = tmp_path / "export"
    assert not refused(target)
    target.mkdir()
    assert not refused(target)
    (target / "a.json").write_text("{}")
    (target / "sub").mkdir()
    (target / "sub" / "b").write_text("")
    assert refused(target)
    manifest = {"files": ["a.json", "sub/b"]}
    (target / export.MANIFEST).write_text(json.dumps(manifest))
    assert not refused(target)
    (tmp_path / "link").symlink_to(target)
    assert not refused(tmp_path / "link")
    for name in ("notes", ".git/HEAD", "sub/c"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("")
        assert refused(target), name
        (target / name).unlink()
    assert refused(target)  # an empty folder .git
    (target / ".git").rmdir()
    (target / export.MANIFEST).write_text("no JSON")
    assert refused(target)
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    assert not refused(tmp_path / "dead")


def full_disk(folder, base, changes):
    """`outcomes` of runs on a rank whose exports fail as on a full disk."""
    def write(*_):
        raise OSError(28, "No space left on device")

    kept = export._write_model
    export._write_model = write
    try:
        return outcomes(folder, base, changes)
    finally:
        export._write_model = kept


def failed_then_exported(folder, base, changes):
    """Runs of which the first export fails."""
    return full_disk(folder, base, changes[:1]) + outcomes(folder, base, changes[1:])


def weights_of(folder):
    from transformers import AutoModelForCausalLM

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
    listed = json.loads((target / export.MANIFEST).read_text())["files"]
    assert sorted([*listed, export.MANIFEST]) == sorted(os.listdir(target))
    # nothing beside it, and what a user puts into it is not lost
    assert not [name for name in os.listdir(target.parent) if name.startswith(".")]
    (target / "notes.txt").write_text("mine")
    [[refused]] = ranks.run(1, outcomes, folder, flags, ["--steps=3"])
    check_one_line([refused], "holds notes.txt, which no export of ours wrote")
    assert (target / "notes.txt").read_text() == "mine"
