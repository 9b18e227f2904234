"""A file of flags means what the same words on the command line mean."""

import json
import re

import pytest

from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.student.ds_config import read_ds_config

NEEDED = "student: S\nteacher: T\ndata: D\n"


def parse(tmp_path, text, *argv):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_flags(Config, [f"--config={path}", *argv], file_flag="config")


# lines of a file, and the words of a command line that they stand for
SAME = {
    "learning_rate: 1e-4": ["--learning_rate=1e-4"],
    "learning_rate: 1.5E-4  # comment": ["--learning_rate=1.5E-4"],
    "steps: 1e3": ["--steps=1e3"],
    "pack: true": ["--pack"],
    "tiled: False": ["--notiled"],
    "text_key: 2024": ["--text_key=2024"],
    "text_key: no": ["--text_key=no"],
    "text_key: 'null'": ["--text_key=null"],
    "max-length: 77": ["--max_length=77"],
    "split: 'train[:10%]'": ["--split=train[:10%]"],
    'wandb_project: ""': ["--wandb_project="],
    "output_dir: |-\n  a b": ["--output_dir=a b"],
    "loss: &a uld\nteacher_dtype: &b float32\nsplit: *b": [
        "--loss=uld", "--teacher_dtype=float32", "--split=float32"],
    "eval_tasks: [mmlu, gsm8k]": ["--eval_tasks=mmlu,gsm8k"],
    "template_kwargs: {enable_thinking: false, budget: 1e3, word: yes, nothing: ~}": [
        '--template_kwargs={"enable_thinking": false, "budget": 1000.0, "word": "yes", '
        '"nothing": null}'],
}


@pytest.mark.parametrize("lines", SAME)
def test_a_line_means_what_its_flag_means(tmp_path, lines):
    cfg = parse(tmp_path, NEEDED + lines)
    expected = parse_flags(Config, ["--student=S", "--teacher=T", "--data=D", *SAME[lines]])
    expected.config = cfg.config
    assert cfg == expected
    assert [type(value) for value in vars(cfg).values()] == [
        type(value) for value in vars(expected).values()]


def test_teachers_are_written_as_a_list(tmp_path):
    cfg = parse(tmp_path, """
student: S
data: D
route_key: domain
teachers:
  - {model: A, weight: 2, routes: [on, no]}
  - model: B
    temperature: 1e-1
""")
    assert json.loads(cfg.teachers) == [
        {"model": "A", "weight": 2, "routes": ["on", "no"]}, {"model": "B", "temperature": 0.1}]


def test_the_command_line_wins(tmp_path):
    cfg = parse(tmp_path, NEEDED + "steps: 5\npack: true\nexport: x\n", "--steps=7", "--nopack")
    assert (cfg.steps, cfg.pack, cfg.export) == (7, False, "x")
    # what it replaces may be wrong
    assert parse(tmp_path, NEEDED + "steps: many", "--steps=7").steps == 7


WRONG = {
    "max_lenght: 9": "unknown flag --max_lenght; did you mean --max_length?",
    "steps: many": "--steps=many: expected int, got str (--steps is from ",
    "steps: {a: 1}": "--steps={'a': 1}: expected int, got dict (--steps is from ",
    "steps: 0": "--steps 0: expected 1 or more (--steps is from ",
    "nopack: true": "nopack is no name of a flag; write pack: false",
    "config: b.yaml": "config cannot name another file",
    "steps: 1\nsteps: 2": "line 2: steps is there twice",
    "max_length: 7\nmax-length: 8": "max_length is there twice",
    "teachers: [{model: A, model: B}]": "line 1: teachers is no plain value (model is there twice",
    "template_kwargs:\n  a: {b: 1, b: 2}": "line 1: template_kwargs is no plain value (b is there",
    "export:": "line 1: export has no value; leave the line out",
    "[1]: 2": "line 1: expected the name of a flag in front of the colon",
    "steps: [1": "not YAML (",
    "a: b: c": "line 1: not YAML (mapping values are not allowed here)",
    "steps": "holds a scalar; expected lines like steps: 2000",
    "": "holds nothing; expected lines like steps: 2000",
    "steps: !!python/object:os.system {}": "could not determine a constructor",
    "teachers: " + "[" * 50_000: "is nested too deep; expected lines like steps: 2000",
    "teachers: " + "[[" * 120 + "]]" * 120: "--teachers: expected a list of objects",
    "steps: " + "9" * 5000: "--steps=9",
    # a key is looked at before any value
    "steps: !!python/object:os.system {}\nmax_lenght: 9": "unknown flag --max_lenght",
    "export:\nmax_lenght: 9": "unknown flag --max_lenght",
}


@pytest.mark.parametrize("text", WRONG, ids=[text[:40] for text in WRONG])
def test_a_wrong_file_is_refused_with_one_line(tmp_path, text):
    flags = () if text in ("", "steps") else (
        "--student=S", "--teacher=T", "--data=D")
    with pytest.raises(ValueError, match=re.escape(WRONG[text])) as error:
        parse(tmp_path, text, *flags)
    assert "run.yaml" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--config nowhere.yaml: cannot be read \(No such file"):
        parse_flags(Config, ["--config=nowhere.yaml"], file_flag="config")
    with pytest.raises(ValueError, match=r"run\.yaml: is not UTF-8"):
        parse(tmp_path, b"data: \xff")
    with pytest.raises(ValueError, match="Is a directory"):
        parse_flags(Config, [f"--config={tmp_path}"], file_flag="config")
    with pytest.raises(ValueError, match=r"--ds_config .*: no such file"):
        read_ds_config(tmp_path)
