"""A cache is repaired as often as it takes: kept shards are what they were, others are named."""

import contextlib
import io
import json
import os
import shutil
import signal

import pytest

import jobs
import ranks
from isogloss import cache
from isogloss.command import CacheArgs
from isogloss.flags.parse import parse_flags
from isogloss.inputs import load_text_encoder
from isogloss.job.launch import start_distributed
from isogloss.teachers import cache_files
from isogloss.teachers.cache_files import MANIFEST
from test_cached_teachers import bytes_of, write
from test_checkpoint import cut, flip

SHARD_BYTES = 2000
FIRST, SECOND, THIRD, *_ = map(cache_files.shard_name, range(9))


def end_of_repair(argv, loads_teacher=True):
    """Return what a rank says whose command writes a cache."""
    if not loads_teacher:
        cache.load_teacher = None
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        write([argv], SHARD_BYTES)
    lines = [line for line in said.getvalue().splitlines() if "examples/s" not in line]
    return "".join(line + "\n" for line in filter(None, lines))


def repair(argv, num_ranks=1, loads_teacher=True):
    """Return what the ranks of a command say, "" where it ends well."""
    return "".join(ranks.run(num_ranks, end_of_repair, argv, loads_teacher))


def die(argv, shard):
    group = ranks.start(1, write, [argv], SHARD_BYTES, shard)
    group[0][0].join(300)
    assert group[0][0].exitcode == -signal.SIGKILL
    ranks.kill(group)


@pytest.fixture(scope="module")
def whole(models, texts, tmp_path_factory):
    """Return (flags of a command, folder of its cache, which has some shards)."""
    folder = tmp_path_factory.mktemp("whole")
    common = [f"--teacher={models[1]}", f"--data={jobs.write_corpus(folder, texts, 12)}",
              "--top_k=5"]
    assert not repair([*common, f"--output={folder / 'cache'}"])
    assert (folder / "cache" / THIRD).exists()
    return common, folder / "cache"


@pytest.fixture
def copy(whole, tmp_path):
    """Return (command line, folder) of a copy of this cache."""
    folder = shutil.copytree(whole[1], tmp_path / "cache")
    return [*whole[0], f"--output={folder}"], folder


def test_no_repair_that_ends_early_forgets_what_the_shards_were(whole, copy):
    argv, folder = copy
    flip(folder / THIRD)
    (folder / FIRST).unlink()
    refusal = f"{folder}: {THIRD} is not what was written before; delete it and run the same"
    for num_ranks in (1, 2, 1):
        line = repair(argv, num_ranks, loads_teacher=False)
        assert refusal in line and line.count("\n") == 1, line
    with pytest.raises(ValueError, match="is not complete"):
        cache_files.open_cache(folder)
    (folder / THIRD).unlink()
    die(argv, 2)  # when the first one is there again
    flip(folder / SECOND)
    line = repair(argv, loads_teacher=False)
    assert f"{SECOND} is not what was written before" in line
    (folder / SECOND).unlink()
    assert not repair(argv)
    assert bytes_of(folder) == bytes_of(whole[1])


def test_a_shard_that_is_damaged_during_a_repair_is_not_accepted(copy):
    _, folder = copy
    manifest = cache_files.Manifest.read("output", folder)
    flip(folder / SECOND)
    with pytest.raises(ValueError, match=f"{SECOND} is not what was written before"):
        cache_files.complete(folder, manifest)
    cut(folder / THIRD)
    manifest.files = {}
    with pytest.raises(ValueError, match=f"{THIRD} cannot be read.*; delete it and run the same"):
        cache_files.complete(folder, manifest)


def test_all_files_that_were_cut_are_written_again(whole, copy):
    argv, folder = copy
    for name in (FIRST, THIRD, cache_files.INDEX, "teacher/config.json"):
        os.truncate(folder / name, 100)
    assert not repair(argv)
    assert bytes_of(folder) == bytes_of(whole[1])


def test_a_shard_without_a_checksum_that_cannot_be_read_is_named(whole, copy):
    argv, folder = copy
    plain = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(plain | {"files": {}}))  # as of a first command
    for name in (FIRST, THIRD):
        os.truncate(folder / name, 100)
    for name in (FIRST, THIRD):
        line = repair(argv, loads_teacher=False)
        assert f"{folder}: {name} cannot be read" in line and line.count("\n") == 1, line
        assert "delete it and run the same command again" in line
        (folder / name).unlink()
    assert not repair(argv)
    assert bytes_of(folder) == bytes_of(whole[1])


def test_other_names_of_teacher_and_data_repair_a_cache(whole, copy, models, tmp_path):
    _, folder = copy
    teacher = shutil.copytree(models[1], tmp_path / "its_copy")
    data = shutil.copy(whole[0][1].removeprefix("--data="), tmp_path / "other.jsonl")
    (folder / SECOND).unlink()
    assert not repair([f"--teacher={teacher}", f"--data={data}", "--top_k=5",
                       f"--output={folder}"])
    for name, content in bytes_of(whole[1]).items():
        assert name in (MANIFEST, "README.md") or (folder / name).read_bytes() == content, name
    cache_files.open_cache(folder)


@pytest.mark.parametrize("lists_card", [False, True])
def test_a_card_and_notes_are_the_users(lists_card, copy):
    """Also of caches of before, whose manifests list the card."""
    argv, folder = copy
    plain = json.loads((folder / MANIFEST).read_text())
    assert "README.md" not in plain["files"]
    if lists_card:
        plain["files"]["README.md"] = [9, 9]
        (folder / MANIFEST).write_text(json.dumps(plain))
    (folder / "README.md").write_text("# Our cache\n")
    (folder / "notes.txt").write_text("of July")
    manifest = cache_files.open_cache(folder)
    cache_files.check_contents(folder, manifest, manifest.files)
    (folder / FIRST).unlink()
    assert not repair(argv)
    manifest = cache_files.open_cache(folder)
    assert not {"README.md", "notes.txt"} & manifest.files.keys()
    assert (folder / "README.md").read_text() == "# Our cache\n"


# --- which rows -----------------------------------------------------------------------------------


def rows_of(argv_list):
    """Return the texts that each command reads, or the line with which it ends."""
    start_distributed()
    found = []
    for argv in argv_list:
        args = parse_flags(CacheArgs, argv)
        encoder, _ = load_text_encoder("teacher", args.teacher, 0)
        try:
            texts = cache.open_texts(args, encoder)
            found.append([example.content for example in texts.all()])
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_cache_has_the_rows_that_a_run_holds_out(models, tmp_path):
    """Those of another split of its data too, and each set once."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text(json.dumps({"text": name + split}))
    a, b = tmp_path / "a", tmp_path / "b"
    lists = {"plain": [{"data": f"{a}"}, {"data": f"{b}"}],
             "split": [{"data": f"{a}", "eval_split": "test"}, {"data": f"{b}"}],
             "data": [{"data": f"{a}", "eval_data": f"{b}"}, {"data": f"{b}"}],
             "join": [{"data": f"{a}", "join_rows": 9}]}
    lists = {name: json.dumps(entries) for name, entries in lists.items()}
    cases = [
        ([a], ["atrain"]), ([a, "test"], ["atrain", "atest"]),
        ([a, "", b], ["atrain", "btrain"]), ([a, "test", b], ["atrain", "btest"]),
        ([lists["plain"], "test"], ["atrain", "atest", "btrain", "btest"]),
        ([lists["plain"], "test", a], ["atrain", "atest", "btrain"]),
        ([lists["split"]], ["atrain", "atest", "btrain"]),
        ([lists["data"], "test"], ["atrain", "btest", "btrain"]),
        ([a, "no"], "--eval_split no: "), ([a, "no", b], f"--eval_split no: {b} has no split"),
        ([lists["join"]], "--data: join_rows 9 of "),
    ]
    argv_list = []
    for words, _ in cases:
        named = zip(("data", "eval_split", "eval_data"), words)
        argv_list.append([f"--teacher={models[1]}", "--output=o",
                          *[f"--{name}={word}" for name, word in named]])
    [found] = ranks.run(1, rows_of, argv_list)
    for (words, expected), rows in zip(cases, found, strict=True):
        if isinstance(expected, str):
            assert isinstance(rows, str) and expected in rows, rows
        else:
            assert rows == expected, words
