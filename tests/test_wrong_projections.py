"""Projections, caches and outputs that are not what the tools write; jobs: test_wrong_flags.py."""

import io
import os
import pickle
import stat
import zipfile

import pytest
import torch

from isogloss.projection_tools import build, cells, cut, files, show
from isogloss.projection_tools.files import cached, load_tables
from isogloss.projection_tools.projection_files import as_tables
from isogloss.projection_tools.save import save_atomically
from isogloss.projection_tools.tokenizers import Pair
from pickled import Command
from wrong_input import error_line


@pytest.fixture(scope="module")
def good(pair):
    """The tables of a good projection."""
    return as_tables(build.build_projection(pair), pair, "test")


# --- projections ----------------------------------------------------------------------------------


def with_weights(change):
    return lambda tables: tables | {"likelihoods": change(tables["likelihoods"])}


def with_ids(change):
    return lambda tables: tables | {"indices": change(tables["indices"])}


def one_value(value):
    """Return a change of a tensor that sets one of its numbers."""

    def change(tensor):
        tensor = tensor.clone()
        tensor[9, 0] = value
        return tensor

    return change


# {what is wrong: (how the tables of a good projection become wrong, what the line says)}
PROJECTIONS = {
    "one NaN": (with_weights(one_value(torch.nan)), "1 of 1400 weights are negative or not"),
    "negative weights": (with_weights(lambda w: -w), "weights are negative or not finite"),
    "zeros": (with_weights(lambda w: w * 0), "no row has a teacher token with a weight above 0"),
    "empty slots": (with_ids(lambda i: torch.full_like(i, -1)), "no row has a teacher token"),
    "weights beyond float32": (with_weights(lambda w: w + 3e38), "have no finite sum"),
    "complex weights": (with_weights(lambda w: w + 0j), "expected two (V, K), the first of int64"),
    "ids beyond the vocabulary": (with_ids(lambda i: i + 10**6), "teacher ids up to"),
    "ids below -1": (with_ids(lambda i: i - 7), "teacher ids down to -8"),
    "ids of float": (with_ids(lambda i: i.float()), "expected two (V, K), the first of int64"),
    "a list of ids": (with_ids(lambda i: i.tolist()), "its indices are a list; expected a tensor"),
    "sparse weights": (with_weights(lambda w: w.to_sparse()), "without plain values (torch.sparse"),
    "meta ids": (with_ids(lambda i: i.to("meta")), "without plain values"),
    "one axis": (with_ids(lambda i: i[:, 0]), "expected two (V, K)"),
    "no columns": (lambda t: t | {"indices": t["indices"][:, :0],
                                  "likelihoods": t["likelihoods"][:, :0]}, "expected two (V, K)"),
    "other shapes": (with_weights(lambda w: w[:, :2]), "expected two (V, K)"),
    "too few rows": (lambda t: t | {"indices": t["indices"][:9],
                                    "likelihoods": t["likelihoods"][:9]}, "9 rows with teacher"),
    "no ids": (lambda t: {"likelihoods": t["likelihoods"]}, "not a projection, which has the keys"),
    "a list": (lambda t: [1, 2], "not a projection, which has the keys"),
    "another tokenizer": (lambda t: t | {"student_fingerprint": "0" * 32}, "made for another stu"),
    "a fingerprint that is a list": (lambda t: t | {"teacher_fingerprint": [1]},
                                     "made for another teacher tokenizer"),
}


# {what is wrong: content of a file}
FILES = {
    "an empty file": b"",
    "a web page": b"<!DOCTYPE html><html></html>",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "a pickle with code": pickle.dumps(Command("exploded")),
    "a zip archive with nothing in it": b"PK\x05\x06" + b"\0" * 18,
}


@pytest.mark.parametrize("case", PROJECTIONS)
def test_a_wrong_projection_is_refused(case, good, models, tmp_path, capsys):
    change, message = PROJECTIONS[case]
    torch.save(change(dict(good)), tmp_path / "p.pt")
    pair = [f"--student={models[0]}", f"--teacher={models[1]}"]
    error = error_line(capsys, show, [*pair, f"--projection={tmp_path / 'p.pt'}"])
    assert f"{tmp_path / 'p.pt'}: " in error
    assert message in error


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_projection_is_refused(case, suffix, models, tmp_path, capsys):
    path = tmp_path / f"p.{suffix}"
    path.write_bytes(FILES[case])
    argv = [f"--student={models[0]}", f"--teacher={models[1]}", f"--projection={path}"]
    argv.append(f"--output={tmp_path / 'out.pt'}")
    assert f"{path}: not a readable file of tables" in error_line(capsys, cut, argv)
    assert not os.path.exists("exploded")
    assert not (tmp_path / "out.pt").exists()


def test_a_bomb_is_no_projection(good, tmp_path):
    torch.save(good | {"likelihoods": torch.zeros(2**25)}, tmp_path / "large.pt")
    bomb = tmp_path / "bomb.pt"
    with (zipfile.ZipFile(tmp_path / "large.pt") as large,
          zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file):
        for name in large.namelist():
            file.writestr(name, large.read(name))
    assert bomb.stat().st_size < 2**20 and load_tables(tmp_path / "large.pt")
    with pytest.raises(ValueError, match="not a readable file of tables"):
        load_tables(bomb)


# --- caches ---------------------------------------------------------------------------------------


def every_tensor(change):
    """Return a change of tables that changes every tensor in them."""
    return lambda tables: {key: change(value) if isinstance(value, torch.Tensor) else value
                           for key, value in tables.items()}


def raised(tensor):
    """Return a tensor whose last number is raised by one."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] += 1
    return tensor


# {what is wrong: how the content of a cached file becomes wrong}
CACHES = {
    "another number": every_tensor(raised),
    "wrong keys": lambda tables: {"x": torch.ones(2)},
    "a missing key": lambda tables: dict(list(tables.items())[1:]),
}


def as_bytes(tables):
    file = io.BytesIO()
    torch.save(tables, file)
    return file.getvalue()


def test_a_bit_that_flips_in_a_cache_is_noticed(pair, tmp_path):
    """Or changes no value, as one of the padding between tensors."""
    expected = as_bytes(files.cached_translation(pair, directory=tmp_path))
    [path] = tmp_path.glob("*.pt")
    good_file = path.read_bytes()
    built = []

    def build():
        built.append(None)
        return cells.build_translation(pair)

    places = range(0, len(good_file), len(good_file) // 40)
    for number, place in enumerate(places):
        damaged = bytearray(good_file)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        assert as_bytes(cached(path.name, build, tmp_path)) == expected
    assert len(built) > len(places) // 2


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("kind", ["projection", "translation"])
def test_a_damaged_cache_is_built_anew(kind, case, pair, tmp_path):
    load = build.cached_projection if kind == "projection" else files.cached_translation
    expected = as_bytes(load(pair, directory=tmp_path))
    [path] = tmp_path.glob("*.pt")
    good_file = path.read_bytes()
    content = torch.load(path, weights_only=True)
    torch.save(CACHES[case](content), path)
    assert path.read_bytes() != good_file
    assert as_bytes(load(pair, directory=tmp_path)) == expected
    assert path.read_bytes() == good_file


def test_the_cache_of_another_pair_is_built_anew(pair, tokenizers, tmp_path):
    other = Pair.of(tokenizers[0], tokenizers[0])
    build.cached_projection(other, directory=tmp_path)
    [of_other] = tmp_path.glob("*.pt")
    expected = as_bytes(build.cached_projection(pair, directory=tmp_path / "clean"))
    [path] = (tmp_path / "clean").glob("*.pt")
    of_other.rename(path)
    assert as_bytes(build.cached_projection(pair, directory=tmp_path / "clean")) == expected


def test_the_cache_is_a_folder_of_the_users_own_and_a_lock_no_link(tmp_path):
    folder = tmp_path / "new"
    cached("t.pt", lambda: {"x": torch.ones(2)}, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".t.pt.lock").symlink_to(victim)
    with pytest.raises(ValueError, match="set ISOGLOSS_CACHE to a directory of your own"):
        cached("t.pt", lambda: {"x": torch.ones(2)}, tmp_path)
    assert victim.read_text() == "precious"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="set ISOGLOSS_CACHE to a"):
        cached("t.pt", lambda: {"x": torch.ones(2)}, tmp_path / "file")


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_nothing_but_a_file_is_replaced(suffix, models, tmp_path, capsys):
    pipe = tmp_path / f"pipe.{suffix}"  # stands for a device too
    os.mkfifo(pipe)
    link = tmp_path / f"link.{suffix}"
    link.symlink_to(pipe)
    folder = tmp_path / f"folder.{suffix}"
    folder.mkdir()
    argv = [f"--student={models[0]}", f"--teacher={models[1]}"]
    for path in (pipe, link, folder):
        kind = stat.S_IFMT(os.stat(path).st_mode)
        error = error_line(capsys, build, [*argv, f"--output={path}"])
        assert f"{path}: is no file that could be written anew" in error
        assert stat.S_IFMT(os.stat(path).st_mode) == kind
    below_a_file = tmp_path / "file"
    below_a_file.write_text("x")
    error = error_line(capsys, build, [*argv, f"--output={below_a_file / f'p.{suffix}'}"])
    assert "cannot be written (" in error
    assert sorted(tmp_path.iterdir()) == sorted([pipe, link, folder, below_a_file])  # no scratch


def test_a_file_is_written_through_no_link(good, tmp_path, monkeypatch):
    """Who knows a scratch name could lay a link under it."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    (tmp_path / ".p.pt.0").symlink_to(victim)
    with pytest.raises(ValueError, match="cannot be written"):
        save_atomically(good, tmp_path / "p.pt")
    assert victim.read_text() == "precious"
