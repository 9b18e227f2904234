"""What programs print: nothing that a terminal would obey, whoever has written the text."""

import contextlib
import json
import logging
import os
import pty
import runpy
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import pytest

import ranks
from isogloss import align_view
from isogloss.flags import terminal
from isogloss.flags.terminal import harmless, one_line
from jobs import ds_config, write_to_file
from text_servers import StandIn

ROOT = Path(__file__).resolve().parent.parent
# sets the title, clears the screen, colors by one byte, goes back, rings, turns the direction of
# writing, hides, breaks lines in five ways
HOSTILE = ("o\x1b]0;title\x07\x1b[2Jp\x9b31mq\rr\x08s\u202et\u2066u\u200bv\x85w\u2028x\x0by\x1b"
           "[1mz\nfake")
NAME = HOSTILE.replace("z\n", "z\t\n")  # a file may be named so


def commands_in(text):
    """Return the characters of a text that are none to look at; line ends are."""
    return {letter for letter in text
            if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and letter != "\n"}


def test_every_character_is_printed_or_harmless():
    """Those to look at as they are, all others as nothing that a terminal obeys."""
    letters = "".join(map(chr, range(sys.maxunicode + 1)))
    printed = harmless(letters)
    assert not commands_in(printed) and not commands_in(one_line(letters))
    for letter, shown in zip(letters, printed, strict=True):
        if letter.isprintable() or letter in "\n\u00a0\u3000":
            assert shown == letter, hex(ord(letter))
    assert harmless("a\r\nb\n\x1b[1;31mred\x1b[0m") == "a\nb\nred"
    assert "\n" not in one_line(HOSTILE) and one_line("  a\n\n  b ") == "a b"


def run_here(words, folder, path):
    """Run a command on this rank, which writes to a file; return its exit code."""
    write_to_file(path)
    os.chdir(folder)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else end.code or 0
    return 0


def run(words, folder, code=0):
    """Run a command of this project in a process that is forked; return all that it prints,
    checked.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "printed"
        codes = ranks.run(1, run_here, list(map(str, words)), folder, str(path))
        printed = path.with_name("printed0").read_bytes().decode()
    assert codes == [code], printed
    assert not commands_in(printed), printed
    fake = [line for line in printed.splitlines() if line.startswith("fake")]
    assert printed and (not fake or "Traceback" in printed), printed
    return printed


def on_a_terminal(words, folder, code=0):
    """Return what a command prints to a terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, stdout=its,
                               stderr=its, env=os.environ | {"PYTHONPATH": str(ROOT)})
    os.close(its)
    printed = b""
    with contextlib.suppress(OSError):  # its end
        while piece := os.read(ours, 2**16):
            printed += piece
    assert process.wait() == code, printed
    return printed.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def hostile(models, tmp_path_factory):
    """Folder of models, a template, a tokenizer and data that hold HOSTILE wherever they can."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, model in zip(("student", "teacher"), models):
        shutil.copytree(model, folder / f"{name}{NAME}")
    refusing = "{% if 'no' in messages[0].content %}{{ raise_exception(" + json.dumps(HOSTILE) \
        + ") }}{% endif %}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    (folder / f"student{NAME}" / "chat_template.jinja").write_text(refusing)
    (folder / f"teacher{NAME}" / "chat_template.jinja").write_text(refusing)
    chats = []
    for number in range(12):
        chats.append([{"role": "user\x1b[2J", "content": f"{'no' * (number % 2)} {HOSTILE}"},
                      {"role": "assistant", "content": f"said {number} {HOSTILE}"}])
    rows = {"texts": [{"text": f"Text {number} {HOSTILE}", "system": HOSTILE}
                      for number in range(12)],
            "chats": [{"messages": chat} for chat in chats]}
    for name, lines in rows.items():
        (folder / f"{name}{NAME}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def flags(folder, **more):
    """Return the command line of a run of two sources and two teachers with such names."""
    data = [{"data": f"texts{NAME}.jsonl", "eval_rows": 3, "name": f"texts {HOSTILE}"},
            {"data": f"chats{NAME}.jsonl", "eval_rows": 3, "text_key": "messages"}]
    teachers = [{"model": f"teacher{NAME}", "name": f"first {HOSTILE}"},
                {"model": f"teacher{NAME}", "name": "second"}]
    values = {"student": f"student{NAME}", "data": json.dumps(data), "steps": 2,
              "ds_config": ds_config(folder / "ds.json", 0, 2, 1), "num_workers": 1,
              "eval_every": 1, "eval_samples": 3, "output_dir": f"run{NAME}",
              "export": f"exported{NAME}", "save_every": 1, "max_length": 250} | more
    if "teacher" not in more:
        values["teachers"] = json.dumps(teachers)
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.slow
def test_a_run_prints_nothing_that_a_terminal_obeys(hostile):
    """Nor does what draws its curves."""
    printed = run([ROOT / "distill.py", *flags(hostile)], hostile)
    for said in (" >> ", "such chats are left out", "exported to exported", "no model reads its",
                 "step 2: ", "bits per byte (texts "):
        assert said in printed, said
    folder = hostile / f"run{NAME}"
    run(["-m", "isogloss.report", folder, "--rows=0"], hostile)
    # a damaged checkpoint is named, and a traceback that holds such a text is harmless, too
    newest = sorted(folder.rglob("*model_states.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    (hostile / "plugin.py").write_text(
        "from isogloss.evaluation.eval_samples import EvalSamples\n"
        f"def write(self):\n    raise RuntimeError({HOSTILE!r})\nEvalSamples.write = write\n")
    printed = on_a_terminal(
        [ROOT / "distill.py", *flags(hostile, steps=3, plugin="plugin.py")], hostile, 1)
    assert "; it is left out" in printed and "RuntimeError: o" in printed
    assert "\r" in printed and commands_in(printed) == {"\r"}  # of the progress bar


@pytest.mark.slow
def test_errors_say_nothing_that_a_terminal_obeys(hostile, models):
    broken = hostile / f"broken{NAME}"
    shutil.copytree(models[0], broken, dirs_exist_ok=True)
    (broken / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    printed = run([ROOT / "distill.py", *flags(hostile, teacher=broken.name)], hostile, 2)
    assert printed.startswith("distill.py: ") and printed.count("\n") == 1
    printed = run(["-m", "isogloss.report", f"run that is none{HOSTILE}"], hostile, 2)
    assert printed.count("\n") == 1


@pytest.mark.slow
def test_a_server_says_nothing_that_a_terminal_obeys(hostile, models):
    with StandIn(models[1]).running() as server:
        server.faults = [(400, HOSTILE)] * 99
        more = {"teacher": server.url, "teacher_tokenizer": f"teacher{NAME}", "loss_topk": 20,
                "data": f"texts{NAME}.jsonl", "eval_rows": 3}
        printed = run([ROOT / "distill.py", *flags(hostile, **more)], hostile, 2)
    assert "HTTP 400 o" in printed


# --- tokens ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(models, tmp_path_factory):
    """Directories of two tokenizers, whose special tokens are hostile."""
    from transformers import AutoTokenizer

    folders = []
    for number, model in enumerate(models):
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_special_tokens({"additional_special_tokens": [f"<{number}{HOSTILE}>"]})
        folders.append(tmp_path_factory.mktemp("tokens") / f"t{number}")
        tokenizer.save_pretrained(folders[-1])
    return folders


def test_tokens_are_shown_in_our_colors_alone(tokens):
    words = ["align.py", "--student", tokens[0], "--teacher", tokens[1],
             "--show", f"a <0{HOSTILE}> b <1{HOSTILE}>"]
    printed = on_a_terminal(words, ROOT)
    assert align_view.CYAN in printed and align_view.RED in printed
    for color in (align_view.CYAN, align_view.RED, align_view.YELLOW, align_view.RESET):
        printed = printed.replace(color, "")
    assert not commands_in(printed) and "title" in printed, printed
    printed = run(["align.py", "--student", f"none{HOSTILE}", *words[3:]], ROOT, 1)
    assert printed.count("\n") == 1


@pytest.mark.slow
def test_tools_show_tokens_as_text(tokens, tmp_path):
    pair = [f"--student={tokens[0]}", f"--teacher={tokens[1]}"]
    files = [tmp_path / f"{name}{NAME}.pt" for name in "ab"]
    run(["-m", "isogloss.projection_tools.build", *pair, f"--output={files[0]}"], ROOT)
    run(["-m", "isogloss.projection_tools.exact", *pair, f"--output={files[1]}"], ROOT)
    printed = run(["-m", "isogloss.projection_tools.show", *pair, f"--projection={files[0]}",
                   f"--tokens=<0{HOSTILE}>"], ROOT)
    assert "<0o" in printed and "title" in printed
    run(["-m", "isogloss.projection_tools.compare", *files, *pair, "--num_examples=999"], ROOT)
    run(["-m", "isogloss.projection_tools.cells", *pair, f"--output={files[0]}"], ROOT)


def test_a_warning_stands_above_a_progress_bar():
    """Behind it, the rest of the line would be read as part of the bar."""
    program = ("import sys, warnings; from tqdm import tqdm\n"
               "from isogloss.flags.terminal import guard_terminal, unguarded\n"
               "guard_terminal()\n"
               "bar = tqdm(total=9, ascii=True, file=unguarded(sys.stderr)); bar.update(3)\n"
               "warnings.warn('abc\\x07')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    lines = done.stderr.replace("\r", "\n").split("\n")
    [warning] = [line for line in lines if "UserWarning" in line]
    assert warning.endswith(f"UserWarning: abc{terminal.UNKNOWN}"), done.stderr
    assert "%" not in warning and [line for line in lines if "33%" in line], done.stderr


def test_a_warning_of_ours_is_a_line_without_a_place():
    """One of a library keeps it."""
    place = "/x/isogloss/inputs.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "PACKAGE", "/x/isogloss")
        assert terminal._format_warning("a\x1b[2J\nb", UserWarning, place, 7) == (
            f"warning: a{terminal.UNKNOWN}[2J b\n")
        assert "y.py:7: UserWarning: a" in terminal._format_warning("a", UserWarning, "/y.py", 7)


def test_that_there_is_no_gpu_is_no_news():
    """What DeepSpeed and torch say on import stays away; `make flows` sees whole commands."""
    for name, said in (("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other"),
                       ("torch.utils.cpp_extension", "No CUDA runtime is found, using %s")):
        logger = logging.getLogger(name)
        assert not logger.filter(logging.makeLogRecord({"msg": said}))
        assert logger.filter(logging.makeLogRecord({"msg": "another thing"}))
