"""What the README and docs/architecture.md show works, and what they name exists."""

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, asset
from documented import COMMANDS
from isogloss import command
from isogloss.align import TokenTable
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder
from isogloss.projection_tools.__main__ import KINDS
from isogloss.report import __main__ as report

README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "index.md").read_text()
TRAINERS = (ROOT / "docs" / "trainers.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
LOG = (ROOT / "docs" / "LOG.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MONTHS = sorted((ROOT / "docs" / "log").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *MONTHS,
         ROOT / "ds_configs/README.md", ROOT / "recipes/README.md", ROOT / "CONTRIBUTING.md",
         ROOT / "CHANGELOG.md"]


def code_blocks(kind, text=README):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True)
    return listed.stdout.split()


# --- what can be run ------------------------------------------------------------------------------


def test_the_lines_to_copy_work(tokenizers, models, texts):
    """On texts as people have them, double spaces included, and models with padded heads."""
    [lines] = code_blocks("python")
    student, teacher = map(AutoModelForCausalLM.from_pretrained, models)
    assert student.get_output_embeddings().weight.shape[0] > len(tokenizers[0])
    texts = [*texts[:2], "two  spaces after  a word", ""]
    scope = dict(student_tokenizer=tokenizers[0], teacher_tokenizer=tokenizers[1], texts=texts,
                 student=student, teacher=teacher)
    exec(lines, scope)
    assert 0 < scope["loss"] < 40
    assert (scope["batch"].student_chunk[:3] >= 0).any(1).all()
    scope["loss"].backward()
    assert all(torch.isfinite(weight.grad).all() for weight in student.parameters())
    assert all(weight.grad is None for weight in teacher.parameters())


def test_the_pages_are_short_and_count_the_files_to_copy():
    assert len(README.split()) <= 1000
    pages = [path for path in PAGES if path.parent.name in ("docs", "recipes")]
    assert sum(len(path.read_text().split()) for path in pages if path.name != "LOG.md") <= 25_000
    assert "Several GPUs: not measured" in README
    [names] = re.findall(r"^    cp (.*) YOUR_FOLDER$", TRAINERS, re.M)
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in names.split())
    [said] = re.findall(r"seven files \(about ([\d,]+) lines\)", TRAINERS)
    assert len(names.split()) == 7
    assert abs(int(said.replace(",", "")) - lines) < 100


def test_flags_and_targets_that_the_text_names_exist():
    known = {*(entry.name for entry in fields(Config)), "help"}
    kinds = [*KINDS, report.Args]
    kinds += [kind for name, kind in vars(command).items() if name.endswith("Args")]
    for kind in kinds:
        known |= set(kind.__dataclass_fields__)
    known |= {"show", "html"}  # of align.py
    known |= {"memory", "sleep"}  # of vLLM's writer
    known |= {"master_port", "launcher", "num_gpus"}  # of DeepSpeed's launcher
    for page in PAGES:
        if page == ROOT / "README.md" or (page.parent.name == "docs" and page.name != "LOG.md"):
            for flag in re.findall(r"`--([a-z]\w*)(?![-\w])", page.read_text()):
                assert flag in known, (flag, page)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`(?:\w+=\S+ |SEEDS=\"[\d ]+\" )?make ([\w-]+)`", README + START):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_alignment_that_the_start_shows():
    shown = code_blocks("text", START)[0]
    [command] = [shlex.split(command.line) for command in COMMANDS
                 if command.page == "docs/index.md" and "align.py --student openai" in command.line]
    flags = dict(zip(command[2::2], command[3::2]))
    flags["--student"] = str(asset("tokenizers", "gpt2"))
    flags["--teacher"] = str(asset("tokenizers", "qwen2"))
    arguments = [word for pair in flags.items() for word in pair]
    printed = subprocess.run([sys.executable, "align.py", *arguments], cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_tables_agree_with_the_log():
    """What the demo printed stands in docs/log/, and what claims name is there."""
    log = "".join(path.read_text() for path in MONTHS)
    of_demo = log.split("## 2026-11-29: a demo of four students")[1].split("\n## ")[0]
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", RESULTS, re.M))
    # the table of a GPU is made of docs/log/gpu_day.json, see test_benchmarks.py, those of losses
    # of docs/log/square_*.json*, see test_square.py
    claims = sections["Newest figure of each claim"]
    for path in re.findall(r"(?:benchmarks|tests)/\w+\.py", claims):
        assert (ROOT / path).exists(), path
    shown = "".join(code_blocks("text", START.split("## The demo")[1]))
    for line in filter(None, shown.splitlines()):
        assert line in of_demo, line


# --- what exists ----------------------------------------------------------------------------------


def slug(heading):
    """Return the anchor that GitHub gives to a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in map(slug, headings), target
    defined = set(re.findall(r"^\[([\w-]+)\]: https://\S+$", text, re.M))
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used == defined


def test_entries_of_the_log_are_in_its_index_and_found_from_code():
    headings = {}
    for path in MONTHS:
        headings[path.name] = re.findall(r"^## [\d-]+: (.*)$", path.read_text(), re.M)
        anchors = [slug(line) for line in re.findall(r"^## (.*)$", path.read_text(), re.M)]
        assert re.findall(rf"\(log/{path.name}#(.*?)\)", LOG) == anchors
    for name in tracked_files():
        if name.endswith(".py") and (ROOT / name).exists():
            text = (ROOT / name).read_text()
            for file, entry in re.findall(r'docs/log/([\w-]+\.md), "([^"\\]+)"', text):
                assert " ".join(entry.split()) in headings[file], (name, entry)


# COMMIT:PATH is a file of that commit, `git show` finds it
NAMED_PATH = re.compile(r"(?<![\w:/])(?:isogloss|docs|tests|benchmarks)/[\w/-]+\.(?:py|md)\b")


def test_paths_that_pages_and_docstrings_name_exist():
    """The log speaks of its own time; everything else of what is there."""
    texts = []
    for page in PAGES:
        if page.name != "LOG.md" and page not in MONTHS:
            texts.append((page, re.sub(r"https://\S+", "", page.read_text())))
    for name in tracked_files():
        if name.endswith(".py") and not name.startswith("tests/"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    texts.append((name, ast.get_docstring(node) or ""))
    for source, text in texts:
        for path in NAMED_PATH.findall(text):
            assert (ROOT / path).exists(), (source, path)


def test_nothing_is_missing_on_the_map():
    """The rooms and files that the map names exist, and each of them is on it; so is every page."""
    named = set(re.findall(r"^\| `(\S+)` \|", ARCHITECTURE.split("## Extending")[0], re.M))
    pages = set(re.findall(r"\]\((docs/\w+\.md)\)", README))
    for name in named | pages:
        assert (ROOT / name).exists(), name
    for name in tracked_files():
        folder, _, rest = name.partition("/")
        if not rest:
            assert name in named or not name.endswith(".py"), name
        elif folder == "isogloss" and "/" in rest:
            assert f"isogloss/{rest.split('/')[0]}/" in named, name
        elif folder == "isogloss":
            stem = rest.removesuffix(".py")
            assert f"`{rest}`" in ARCHITECTURE or f"`{stem}`" in ARCHITECTURE or (
                stem in ("__init__", "loss_table")), name
        elif name.startswith("docs/log/") and name.endswith(".md"):
            assert f"({name.removeprefix('docs/')}#" in LOG, name
        elif folder == "docs" and name.endswith(".md"):
            assert name in pages, name


# --- docs/architecture.md -------------------------------------------------------------------------


def definitions(tree, prefix=""):
    """Yield the dotted names of all functions and classes in a syntax tree, nested ones by both."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            yield prefix + node.name
            yield from definitions(node, f"{node.name}.")
        else:
            yield from definitions(node, prefix)


def test_every_stop_can_be_found():
    """A stop is written as `file.py` `function`; a second one of the same file repeats the file."""
    stops = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", ARCHITECTURE)
    assert len(stops) > 50
    for path, name in stops:
        assert name in set(definitions(ast.parse((ROOT / path).read_text()))), (path, name)
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", ARCHITECTURE, re.M)]
    first_path = numbers.index(1, 1)
    assert numbers[first_path:] == list(range(1, len(numbers) - first_path + 1))


def test_the_text_that_is_followed():
    """The ids, labels, chunks and counts that the page shows are those of the Collator."""
    encoders = []
    for name in ("gpt2", "qwen2"):
        tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", name))
        encoders.append(TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 64))
    batch = Collator(encoders[0], [PairOptions(encoders[1])])(["in 2010"])
    teacher = batch.teachers[0]
    computed = {
        "student ids": batch.student.ids, "student labels": batch.student.labels,
        "student chunk": teacher.student_chunk, "teacher ids": teacher.ids,
        "teacher labels": teacher.labels, "teacher chunk": teacher.teacher_chunk}
    *lines, counts = code_blocks("text", ARCHITECTURE)[0].splitlines()
    for line, (name, tensor) in zip(lines, computed.items(), strict=True):
        assert line.startswith(name)
        assert list(map(int, line.removeprefix(name).split())) == tensor[0].tolist()
    pair = batch.counts.pairs[0]
    assert counts.split(maxsplit=1)[1] == (
        f"tokens {batch.counts.tokens}, text_bytes {batch.counts.text_bytes}, "
        f"kd_terms {pair.kd_terms}, aligned_bytes {pair.aligned_bytes}")
