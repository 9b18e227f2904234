"""What monitors record by themselves holds no secret; their runs end in plain text."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading

import deepspeed
import pytest

from conftest import ROOT
from isogloss.student.ds_engine import start_deepspeed
from jobs import ds_config, losses_of, write_corpus
from test_launch import KEPT

SECRET = b"hunter"  # all secrets of these runs begin so
REMOTE = "https://ghp_hunterhunter1234567890@github.com/me/it.git"


@pytest.fixture
def address(texts, tmp_path):
    """Serve the texts behind a name, a password and a signature that nobody checks."""
    (tmp_path / "served").mkdir()
    write_corpus(tmp_path / "served", texts, 20)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (f"http://me:hunterpassword@127.0.0.1:{server.server_port}/corpus20.jsonl"
               "?sig=hunterquery")
        server.shutdown()


def repository(folder):
    """Make a repository of git with a token in its remote and a password in its differences."""
    folder.mkdir()
    code = folder / "code.py"
    code.write_text("")
    git = ["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@here"]
    for words in (["init", "-q"], ["remote", "add", "origin", REMOTE], ["add", "."],
                  ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    code.write_text("x = 'hunterdifference'\n")


MONITORS = {"tensorboard": {"enabled": True, "output_path": "board"},
            "csv_monitor": {"enabled": True, "output_path": "csv"}}


@pytest.mark.slow
def test_no_secret_reaches_a_monitor(models, address, tmp_path):
    """In fresh processes, byte by byte in all files that are written, and in what is printed."""
    repository(tmp_path / "work")
    config = ds_config(tmp_path / "ds.json", 2, 2, 1, **MONITORS)
    writer = f"{sys.executable} {ROOT / 'tests' / 'stand_in_writer.py'} --api-key=hunterkey"
    environment = {key: value for key, value in os.environ.items() if key in KEPT}
    environment |= {"MY_PASSWORD": "hunterenvironment", "WANDB_API_KEY": "hunter".ljust(40, "0"),
                    "TMPDIR": str(tmp_path / "work")}
    done = subprocess.run(
        [sys.executable, ROOT / "distill.py", f"--student={models[0]}", f"--teacher={models[1]}",
         f"--data={address}", f"--ds_config={config}", "--max_length=60", "--steps=3",
         "--on_policy=0.5", "--rollout_tokens=4", f"--writer={writer} --token hunterword",
         "--num_workers=0", "--output_dir=run", "--wandb_project=p"],
        cwd=tmp_path / "work", env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    printed = done.stdout + done.stderr
    assert SECRET not in printed and b"\x1b" not in printed, printed.decode()
    assert b"WARNING" not in printed, printed.decode()
    assert len(losses_of(tmp_path / "work" / "run")) == 3
    run_files = []
    for path in (tmp_path / "work").rglob("*"):
        of_git = ".git" in path.parts or path.name == "code.py"
        if path.is_file() and not of_git:
            content = path.read_bytes()
            assert SECRET not in content, path
            run_files += [content] if path.suffix == ".wandb" else []
    [content] = run_files
    assert content.count(b"train/loss") >= 3 and b"--data=http://***@127.0.0.1" in content
    record = json.loads((tmp_path / "work" / "run" / "run.json").read_text())
    assert f"--writer={writer.replace('hunterkey', '***')} --token ***" in record["argv"]


def test_a_command_line_without_a_secret_keeps_its_console(monkeypatch):
    from isogloss.config import Config
    from isogloss.job import monitors

    monkeypatch.setattr(os, "environ", {"WANDB_DISABLE_GIT": "false"})
    arguments = ["distill.py", "--data=https://host/a.jsonl"]
    monkeypatch.setattr(sys, "argv", arguments)
    cfg = Config(student="s", teacher="t", data="https://host/a.jsonl")
    with monitors.guarded_monitors(cfg):
        assert os.environ["WANDB_DISABLE_CODE"] == "true" and "WANDB_CONSOLE" not in os.environ
        assert os.environ["WANDB_DISABLE_GIT"] == "false"  # as its user says
    # of a file of flags, no word of the command line tells
    cfg = Config(student="s", teacher="t", data="https://me:word@host/a.jsonl")
    with pytest.raises(ValueError), monitors.guarded_monitors(cfg):
        assert os.environ["WANDB_CONSOLE"] == "off" and sys.argv == arguments
        raise ValueError
    assert sys.argv is arguments


def test_where_wandb_does_not_start_no_ds_config_is_blamed(monkeypatch):
    import wandb

    def unreachable(**_):
        raise wandb.errors.CommError("Timed out while retrying")

    monkeypatch.setattr(deepspeed, "initialize", unreachable)
    with pytest.raises(ValueError, match=r"^wandb, of .*WANDB_MODE=offline.*Timed out while retry"):
        start_deepspeed("ds.json")
