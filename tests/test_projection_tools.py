"""projection_tools: bytes explain every weight, every file belongs to its two tokenizers."""

import copy
import multiprocessing
import os
import resource
from itertools import permutations

import numpy as np
import pytest
import torch

import oracle
from conftest import asset
from isogloss.align import fingerprint
from isogloss.flags.parse import parse_flags
from isogloss.nodes import Tables
from isogloss.projection_tools import (
    build,
    cells,
    compare,
    cut,
    exact,
    files,
    generate,
    multitoken,
    pairs,
    projection_files,
    show,
)
from isogloss.projection_tools.__main__ import COMMANDS, cli, run
from isogloss.projection_tools.arrays import fill_empty, pack
from isogloss.projection_tools.save import save_atomically
from isogloss.projection_tools.tokenizers import Pair
from isogloss.spelling import link_special_tokens, spell as spell_tokens
from test_spell import without_padding
from tokens import real, table_of
from wrong_input import error_line


@pytest.fixture(scope="module")
def projection(pair):
    return build.build_projection(pair)


def swapped(pair):
    student_tokenizer, teacher_tokenizer = pair.tokenizers
    return Pair.of(teacher_tokenizer, student_tokenizer, tables=pair.tables[::-1])


def assert_explained(projection, pair):
    """Assert that every weight stands on bytes of the student token, in reading order.

    Control tokens, which have no bytes, are left out.
    """
    indices, likelihoods = projection
    student, teacher = pair.tables
    text = ~student.special
    text_indices = indices[text]
    used = text_indices >= 0
    size = np.where(used, teacher.lengths[np.where(used, text_indices, 0)], 0).sum(1)
    assert (size <= student.lengths[text]).all()

    # A row's tokens spell the first `size` bytes of the student's token.
    before = np.cumsum(size) - size
    positions = np.repeat(student.starts[:-1][text] - before, size)
    positions += np.arange(len(positions))
    assert student.data[positions].tobytes() == teacher.decode(text_indices[used])

    sums = likelihoods.sum(1)
    assert ((np.abs(sums - 1) < 1e-6) | (sums == 0)).all()
    assert ((indices < 0) == (likelihoods == 0)).all()
    assert (np.diff(likelihoods, axis=1) <= 0).all()


# --- projections as arrays ------------------------------------------------------------------------


def test_packing_sorts_cuts_and_normalizes():
    projection = pack([1, 0, 1, 1, 0], [5, 6, 7, 8, 6], [1.0, 2.0, 3.0, 1.0, 2.0], V=3, top_k=2)
    indices, likelihoods = projection
    # A token that occurs twice has two slots; of equal weights the earlier entry, 5, is kept.
    assert indices.tolist() == [[6, 6], [7, 5], [-1, -1]]
    assert likelihoods.tolist() == [[0.5, 0.5], [0.75, 0.25], [0, 0]]
    _, ones = cut.cut_rows(projection, 1)
    assert ones.tolist() == [[1], [1], [0]]
    heavy, _ = cut.cut_rows(projection, 2, threshold=0.3)
    assert heavy.tolist() == [[6, 6], [7, -1], [-1, -1]]
    # Only the third row is empty.
    filled, _ = fill_empty(projection, (np.array([[1], [2], [3]]), np.ones((3, 1))))
    assert filled.tolist() == [[6, 6], [7, 5], [3, -1]]


def expected_rows(pair, top_k, max_pieces, reverse):
    """Return the rows of multitoken.py by their definition, as lists of (teacher id, weight)."""
    student, teacher = pair.tables
    student_tokenizer, teacher_tokenizer = pair.tokenizers
    forward = without_padding(spell_tokens(student, teacher_tokenizer, teacher, 64))
    back = without_padding(spell_tokens(teacher, student_tokenizer, student, 64))
    linked = dict(link_special_tokens(student, teacher, 0.8))
    rows = []
    for v in range(len(student)):
        pieces = forward[v][:max_pieces]
        row = [(0.9 * 0.1**i, w) for i, w in enumerate(pieces)]
        if reverse:
            # Teacher tokens that the student spells with v, those of fewer pieces first.
            made_of_v = []
            for w, spelling in enumerate(back):
                if len(spelling) > 1 and v in spelling[:max_pieces] and w not in pieces:
                    made_of_v.append((len(spelling), w))
            for _, w in sorted(made_of_v):
                row.append((0.9 * 0.1 ** back[w].index(v), w))
        # A control token's row holds its counterpart alone.
        if v in linked:
            row = [(0.9, linked[v])]
        row = sorted(row, key=lambda entry: -entry[0])[:top_k]
        total = sum(weight for weight, _ in row)
        rows.append([(w, weight / total) for weight, w in row])
    return rows


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_equal_their_definition(pair, reverse):
    indices, likelihoods = multitoken.multitoken_rows(pair, top_k=5, max_pieces=3, reverse=reverse)
    longer_than_forward = 0
    for v, row in enumerate(expected_rows(pair, 5, 3, reverse)):
        padding = [-1] * (5 - len(row))
        assert indices[v].tolist() == [w for w, _ in row] + padding, v
        weights = [weight for _, weight in row]
        assert np.allclose(likelihoods[v, : len(row)], weights, atol=1e-12)
        longer_than_forward += len(row) > 3
    assert (longer_than_forward > 10) == reverse


def test_entries_of_large_vocabularies_stay_distinct():
    """Entry (v, w) is number v * W + w, which int32 cannot hold for two vocabularies of 130k."""
    # W teacher tokens, three of them spelled by several student tokens.
    W = 2**16
    back = np.full((W, 2), -1, np.int32)
    back[1:4] = (0, 2), (W, 3), (1, W)
    # In int32, W * W + 2 is 2: entry (W, 2) would be taken for the known one, (0, 2).
    entries = multitoken._reverse_entries(back, 2, np.array([0]), np.array([2]))
    assert set(zip(*[numbers.tolist() for numbers in entries])) == {
        (0, 1, 0), (2, 1, 1), (W, 2, 0), (3, 2, 1), (1, 3, 0), (W, 3, 1)}


def test_projection_of_two_kinds(pair, projection):
    assert_explained(projection, pair)
    student, teacher = pair.tables
    indices, _ = projection
    assert indices[student.eos].tolist() == [teacher.eos, -1, -1, -1]
    reasons = build.empty_row_reasons(pair, indices)
    assert reasons == {"control tokens without a counterpart": 2}
    assert show.byte_explained(projection, pair)[indices >= 0].all()


def text_ids(table):
    return [i for i in range(len(table)) if not table.special[i]]


def test_tokens_of_equal_bytes_are_alone_in_their_row(pair, projection):
    student, teacher = pair.tables
    indices, likelihoods = projection
    teacher_bytes = {teacher.bytes_of(i) for i in text_ids(teacher)} - {b""}
    common = [v for v in text_ids(student) if student.bytes_of(v) in teacher_bytes]
    assert len(common) > 100
    assert (likelihoods[common, 0] == 1).all()
    assert (indices[common, 1:] == -1).all()
    for v in common:
        assert teacher.bytes_of(int(indices[v, 0])) == student.bytes_of(v)


def test_the_pinned_set_is_the_same_in_both_directions(pair):
    """The student, a SentencePiece model, has bytes twice: '<0x41>' and 'A'."""
    pinned = []
    for one_pair in (pair, swapped(pair)):
        student, teacher = one_pair.tables
        pieces = spell_tokens(student, one_pair.tokenizers[1], teacher, max_pieces=2)
        v, w = exact.exact_pairs(student, teacher, pieces)
        student_bytes = [student.bytes_of(i) for i in v]
        assert student_bytes == [teacher.bytes_of(i) for i in w]
        pinned.append(set(student_bytes))
    assert pinned[0] == pinned[1]

    back, _ = build.build_projection(one_pair)
    a = student.tokens.index("a")
    assert teacher.tokens[back[a, 0]] == "a"  # the token that it writes, not the byte token


def test_one_tokenizer_gives_the_identity(tokenizers, tables):
    pair = Pair.of(tokenizers[0], tokenizers[0])
    indices, likelihoods = build.build_projection(pair)
    V = len(tables[0])
    assert np.array_equal(indices[:, 0], np.arange(V))
    assert (likelihoods[:, 0] == 1).all()


def test_common_sets(pair, projection):
    rows = [0, 1, 2, 2, 3, 3, 4]
    columns = [7, 7, 8, 9, 8, 5, 8]
    small = pack(rows, columns, [1, 1, 0.7, 0.3, 0.5, 0.5, 1.0], 6, 2)
    for relaxed in (False, True):
        assert show.num_common(small, relaxed) == 2
    assert show.num_common(pack([0, 0], [7, 8], [0.5, 0.5], 1, 2)) == 0
    facts = show.row_statistics(projection, pair)
    assert facts["entries that bytes do not explain"] == 0
    assert facts["common set, strict"] <= ((projection[0] >= 0).sum(1) == 1).sum()


def embed_first_letter(texts):
    letters = torch.zeros(len(texts), dtype=torch.int64)
    for n, text in enumerate(texts):
        first, *_ = text.strip().encode() or b" "
        letters[n] = first
    return torch.nn.functional.one_hot(letters, 256).float()


def test_similar_embeddings(pair, projection, models):
    indices, _ = generate.similar_rows(pair, embed_first_letter, top_k=3, block_mib=1)
    student, teacher = pair.tables
    for w in indices[student.tokens.index("▁the")]:
        assert teacher.bytes_of(int(w)).strip()[:1] == b"t"
    assert (indices[student.special] == -1).all()
    # Bytes leave no row of text empty here, so embeddings change nothing.
    recipe = build.Recipe(embedding_model=str(models[1]))
    filled, _ = build.build_projection(pair, recipe)
    assert np.array_equal(filled, projection[0])


def test_an_embedding_is_a_mean_of_length_one(models):
    embedder = generate.Embedder(str(models[1]))
    vectors = embedder(["the value", "the value", "", "index"])
    assert torch.allclose(vectors[0], vectors[1])
    assert not vectors[2].any()  # no token
    norms = vectors[[0, 3]].norm(dim=1)
    assert torch.allclose(norms, torch.ones(2))


# --- real tokenizers ------------------------------------------------------------------------------


def real_pair(student, teacher):
    tokenizers, tables = zip(real(student), real(teacher))
    return Pair.of(*tokenizers, (student, teacher), tables)


def is_part_of_a_character(raw):
    return set(raw.decode(errors="replace")) == {"\ufffd"}


@pytest.mark.slow
def test_llama3_and_qwen2():
    pair = real_pair("llama3", "qwen2")
    student, teacher = pair.tables
    projection = build.build_projection(pair)
    assert_explained(projection, pair)
    indices, likelihoods = projection
    v = student.tokens.index("201")
    assert [teacher.tokens[w] for w in indices[v, :3]] == ["2", "0", "1"]
    # 0.9, 0.09 and 0.009, normalized
    assert np.allclose(likelihoods[v, :3], [0.9009, 0.0901, 0.0090], atol=1e-4)
    assert ((indices >= 0).sum(1) == 1).sum() >= 109_500
    # Bytes, not text, decide: a part of a character has a row too.
    halves = [i for i in text_ids(student) if is_part_of_a_character(student.bytes_of(i))]
    assert len(halves) > 500
    assert (indices[halves, 0] >= 0).all()
    assert set(build.empty_row_reasons(pair, indices)) == {"control tokens without a counterpart"}
    facts = cells.statistics(cells.build_translation(pair))
    assert facts["cells"] == 109_564 + 2  # of text, and two pairs of control tokens


@pytest.mark.slow
def test_all_pairs_of_all_families():
    for a, b in permutations(("gpt2", "t5", "llama2", "tok512"), 2):
        pair = real_pair(a, b)
        projection = build.build_projection(pair)
        assert_explained(projection, pair)
        indices, likelihoods = projection
        if "t5" not in (a, b):  # it has no byte tokens
            reasons = build.empty_row_reasons(pair, indices)
            assert "bytes that the teacher cannot write" not in reasons, (a, b)
        if a != "gpt2" and b == "gpt2":
            the = pair.tables[0].tokens.index("▁the")
            assert pair.tables[1].bytes_of(int(indices[the, 0])) == b" the"
            assert likelihoods[the, 0] == 1


def test_the_tables_of_a_translation_are_written(tmp_path, capsys):
    """As `nodes.Tables` takes them, with the tokenizers that they are for."""
    path = tmp_path / "translation.safetensors"
    folders = [str(asset("models", name)) for name in ("stories260K", "tinytalk_neo_3M")]
    run("cells", ["--student", folders[0], "--teacher", folders[1], "--output", str(path)])
    assert "cells: 411" in capsys.readouterr().out
    written = files.load_tables(path)
    expected = cells.build_translation(Pair.load(*folders))
    for name in Tables._fields:
        if name == "num_cells":
            assert int(written[name]) == expected[name]
        else:
            assert torch.equal(written[name], expected[name])


def test_what_a_text_teaches_is_counted_by_its_chunks(tokenizers, tables, texts):
    for order in ((0, 1), (1, 0)):
        pair = Pair.of(*[tokenizers[side] for side in order], ("a", "b"),
                       tuple(tables[side] for side in order))
        translation = cells.build_translation(pair)
        text = "In 2010 the function returned 12.50, 3.14159, " + " ".join(texts[:9]).strip()
        counts = {"full": 0, "rest": 0, "misplaced": 0}
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"]
               for tokenizer in pair.tokenizers]
        pieces = [[table.bytes_of(i) for i in side] for side, table in zip(ids, pair.tables)]
        for side in pieces:  # the space that one of them puts before the text is no byte of it
            side[0] = side[0].lstrip()
        chunks = oracle.merge(*pieces)
        num_chunks = chunks[0][-1] + 1
        for chunk in range(num_chunks):
            first, num = zip(*[(side.index(chunk), side.count(chunk)) for side in chunks])
            is_many = min(num) > 1
            counts["full"] += 1 if is_many else num[0]
            counts["rest"] += num[0] - 1 if is_many else 0
            cell = [translation[name][ids[side][first[side]]]
                    for side, name in enumerate(("cell_V", "cell_W"))]
            counts["misplaced"] += int(cell[0] != cell[1])
        found = pairs.shares([text], pair, translation)
        assert counts["rest"] and found["none"] == 0
        assert found["full"] == pytest.approx(counts["full"] / len(ids[0]))
        assert found["rest"] == pytest.approx(counts["rest"] / len(ids[0]))
        assert found["misplaced"] == pytest.approx(counts["misplaced"] / num_chunks)


def test_pairs_of_tokenizers_are_a_table(models, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("some words, 12 numbers\n" * 200)
    names = f"--tokenizers={models[0]},{models[1]}"
    run("pairs", [names, f"--texts=plain={path},again={path}", "--pages=2"])
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head == "| student | teacher | tokens a cell | plain | again |" and len(rows) == 2
    for argv, message in (
        ([f"--tokenizers={models[0]}", f"--texts=a={path}"], "expected two or more"),
        ([names, f"--texts={path}"], "expected NAME=FILE"),
        ([names, "--texts=a=nowhere"], "cannot be read"),
    ):
        assert message in error_line(capsys, pairs, argv)


def memory_of_a_build(pair):
    """Return the MiB by which building both kinds of tables raises this process's maximum."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    build.build_projection(pair, build.Recipe(reverse=True))
    cells.build_translation(pair)
    # Linux counts in KiB
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.slow
def test_no_dense_matrix():
    """50k x 32k in float32 would be 6 GiB, as one byte an entry 1.5 GiB."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(memory_of_a_build, [real_pair("gpt2", "llama2")]) < 700


# --- files and cache ------------------------------------------------------------------------------


def test_files_hold_what_was_saved(pair, projection, tmp_path):
    tables = projection_files.as_tables(projection, pair, "test")
    for name in ("p.pt", "p.safetensors"):
        save_atomically(tables, tmp_path / name)
        back = projection_files.load_projection(tmp_path / name, pair)
        assert torch.equal(back["indices"], tables["indices"])
        assert back["tool"] == "test"
        assert torch.allclose(back["likelihoods"], tables["likelihoods"], atol=1e-7)
        # read by the public NeMo-RL tools under these names
        assert {"student_model_id", "teacher_model_id"} <= back.keys()
        with pytest.raises(ValueError, match="made for another student tokenizer"):
            projection_files.load_projection(tmp_path / name, swapped(pair))
    learned = torch.nn.Parameter(tables["likelihoods"])  # as a loop of one's own saves it
    torch.save(tables | {"likelihoods": learned}, tmp_path / "p.pt")
    assert np.allclose(projection_files.load_arrays(tmp_path / "p.pt", pair)[1], projection[1])


def test_files_of_other_tools_load(pair, projection, tmp_path):
    """bfloat16, no fingerprints, slots without -1, unsorted rows, weights that do not sum to 1."""
    indices, likelihoods = projection
    path = tmp_path / "p.pt"
    ids = torch.from_numpy(indices.copy())
    weights = torch.from_numpy(likelihoods).bfloat16()
    content = {"indices": ids.flip(1), "likelihoods": weights.flip(1), "model_A_id": "a"}
    torch.save(content, path)
    back = projection_files.load_projection(path, pair)
    # The order of equal weights is free, so the ids of a row are compared as a set.
    assert torch.equal(back["indices"].sort(1).values, ids.sort(1).values)
    assert torch.equal(back["indices"][:, 0] >= 0, ids[:, 0] >= 0)
    assert torch.allclose(back["likelihoods"].sum(1), (ids[:, 0] >= 0).float())

    # Without the -1, unused slots hold any id, with weight 0.
    torch.save({"indices": ids.clamp(min=0), "likelihoods": weights}, path)
    assert torch.equal(projection_files.load_projection(path, pair)["indices"], ids)

    # Contradictions are repaired and counted.
    row = int(np.flatnonzero(indices[:, 1] >= 0)[0])
    weights[row] *= 2
    weights[row + 1, -1] = 0.5
    ids[row + 1, -1] = -1
    torch.save({"indices": ids, "likelihoods": weights}, path)
    message = "1 unused slots have a weight, 1 rows do not sum to 1; repaired"
    with pytest.warns(UserWarning, match=message):
        back = projection_files.load_projection(path, pair)
    assert np.allclose(back["likelihoods"].numpy(), likelihoods, atol=4e-3)


def test_files_with_the_scale_trick_lose_its_column(pair, projection, tmp_path):
    """The public tool writes by default 0.2 in the last slot, on a token without meaning."""
    indices, likelihoods = projection
    several = (indices[:, 1] >= 0) & (indices[:, 3] < 0)  # rows of two or three tokens
    assert several.any()
    ids, tricked = indices.copy(), likelihoods.copy()
    ids[several, 3] = 0
    tricked[several, 3] = 0.2
    tricked /= np.maximum(tricked.sum(1, keepdims=True), 1e-30)
    path = tmp_path / "p.pt"
    torch.save({"indices": torch.from_numpy(ids), "likelihoods": torch.from_numpy(tricked),
                "enable_scale_trick": True}, path)
    with pytest.warns(UserWarning, match="scale trick; its last column is left out"):
        back = projection_files.load_projection(path, pair)
    assert (back["indices"][several][:, 3] == -1).all()
    assert np.allclose(back["likelihoods"][several].numpy(), likelihoods[several], atol=1e-6)


def test_another_eos_is_another_pair(tokenizers, tmp_path):
    """Base and chat models share a tokenizer.json, but not the tables that link their eos."""
    chat = copy.deepcopy(tokenizers[1])
    chat.eos_token = chat.convert_ids_to_tokens(7)
    pairs = Pair.of(*tokenizers), Pair.of(tokenizers[0], chat)
    assert pairs[0].fingerprints == pairs[1].fingerprints
    assert pairs[0].roles != pairs[1].roles
    assert pairs[0].digest != pairs[1].digest
    projections = [build.cached_projection(pair, directory=tmp_path) for pair in pairs]
    assert not torch.equal(*[projection["indices"] for projection in projections])
    translations = [files.cached_translation(pair, tmp_path) for pair in pairs]
    assert not torch.equal(*[tables["pieces_W"] for tables in translations])

    # A file knows which of the two it was made for.
    path = tmp_path / "p.pt"
    torch.save(projections[0], path)
    projection_files.load_projection(path, pairs[0])
    message = "another teacher tokenizer .roles eos 1?.*, this one has eos 7"
    with pytest.raises(ValueError, match=message):
        projection_files.load_projection(path, pairs[1])


def build_slowly(folder, marks):
    """Use a cache whose builder leaves an x in the file `marks`."""

    def make():
        with open(marks, "a") as file:
            file.write("x")
        return {"x": torch.ones(2)}

    assert files.cached("t.pt", make, folder)["x"].sum() == 2


def test_the_cache_builds_once_and_repairs_a_damaged_file(tmp_path):
    marks = tmp_path / "marks"
    # Four processes ask at the same time.
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=build_slowly, args=(tmp_path, marks)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert marks.read_text() == "x"
    # The first call builds it anew, the second one reads it.
    (tmp_path / "t.pt").write_bytes(b"damaged")
    for _ in range(2):
        build_slowly(tmp_path, marks)
    assert marks.read_text() == "xx"


def test_the_cache_knows_the_recipe(pair, tmp_path):
    first = build.cached_projection(pair, None, tmp_path)
    second = build.cached_projection(pair, build.Recipe(top_k=2), tmp_path)
    assert (first["indices"].shape[1], second["indices"].shape[1]) == (4, 2)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    assert "top_k" in second["tool"]


def test_a_fingerprint_sees_merges_but_not_truncation(tokenizers):
    # Truncation is a setting of a caller, no identity.
    other = copy.deepcopy(tokenizers[1])
    other.backend_tokenizer.enable_truncation(7)
    assert fingerprint(other) == fingerprint(tokenizers[1]) != fingerprint(tokenizers[0])


# --- command lines --------------------------------------------------------------------------------


def test_the_chain_of_command_lines_equals_build(models, tmp_path, capsys):
    """Models are named as in the public tools' recipes; the new flags are in tests below."""
    def run_tool(name, **flags):
        argv = [f"--student-model={models[0]}", f"--teacher_model={models[1]}"]
        for key, value in flags.items():
            argv.append(f"--{key.replace('_', '-')}={value}")
        run(name, argv)
        return capsys.readouterr().out

    file = {name: tmp_path / f"{name}.pt" for name in "abcdegs"}
    run_tool("multitoken", output=file["a"], max_pieces=4)
    out = run_tool("exact", projection=file["a"], output=file["b"])
    assert " pinned" in out
    run_tool("cut", projection=file["b"], output=file["c"], top_k=4)
    out = run_tool("build", output=file["d"])
    assert "empty: 2 control tokens" in out
    built = files.load_tables(file["d"])
    assert torch.equal(built["indices"], files.load_tables(file["c"])["indices"])
    assert built["tool"].startswith("isogloss projection_tools.build --top-k 4 --max-pieces 4")
    # The model ids have keys of their own.
    assert "--student" not in built["tool"] and "given" not in built["tool"]
    assert built["student_model_id"] == str(models[0])

    # Rows that were cut differ from those that were not.
    run_tool("cut", projection=file["d"], output=file["e"], top_k=1)
    out = run_tool("compare", projection=file["d"], other=file["e"], num_examples=3)
    assert out.count(" -> ") == 3
    assert "with another heaviest token: 0" in out
    out = run_tool("compare", projection=file["c"], other=file["d"])
    assert "the same within 1e-6: 350" in out
    run_tool("generate", output=file["g"], embedding_model=models[1], top_k=2)
    out = run_tool("show", projection=file["d"], tokens="▁the,e,#5")
    assert "' the' -> ' the' 1.0000" in out
    assert "#5 " in out
    assert "common set, strict" in out
    out = run_tool("show", projection=file["d"], num_examples=3)
    assert out.count(" -> ") == 3
    assert "cells: " in run_tool("cells", output=file["s"])


def test_wrong_command_lines_end_with_one_line(models, tmp_path, capsys):
    (tmp_path / "bad.pt").write_bytes(b"?")
    student = f"--student={models[0]}"
    pair = [student, f"--teacher={models[1]}"]
    out = f"--output={tmp_path / 'o.pt'}"
    bad = f"--projection={tmp_path / 'bad.pt'}"
    no_model = f"--embedding-model={tmp_path}"
    for module, argv, message in (
        (build, [out], "--student is missing"),
        (build, [student, f"--teacher={tmp_path}", out], "its tokenizer cannot be loaded"),
        (generate, [*pair, out, no_model], f"--embedding_model {tmp_path}: its tokenizer cannot"),
        (cut, [*pair, out, bad], "not a readable file of tables"),
        (show, [*pair, f"--projection={tmp_path / 'no.pt'}"], "no such file"),
        (compare, [*pair, "a.pt", "b.pt"], "unexpected argument 'a.pt'"),
        (build, [*pair, f"--output={tmp_path / 'o.txt'}"], "expected a name that ends in .pt or"),
    ):
        assert message in error_line(capsys, module, argv)
    assert not (tmp_path / "o.pt").exists()

    cli(["--help"])
    help_lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in help_lines[2:-2]] == list(COMMANDS)
    for words, message in (([], "no command"), (["bild", *pair], "unknown command 'bild'")):
        with pytest.raises(SystemExit) as ended:
            cli(words)
        line = capsys.readouterr().err
        assert ended.value.code == 2 and line.count("\n") == 1
        assert line.startswith(f"projection_tools: {message}; expected one of build, ")

    # compare takes its two files before the flags.
    args = parse_flags(COMMANDS["compare"], ["a.pt", "b.pt", *pair], ("projection", "other"))
    assert args.projection == "a.pt"
    assert args.other == "b.pt"
    assert args.student == str(models[0])


def test_tokens_are_named_by_text_bytes_or_id():
    table = table_of([b"\xe9", "²".encode(), b"#\xc2\xb2"])
    assert show.find_tokens([os.fsdecode(b"\xe9"), "²", "#1", "#²"], table) == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="--tokens #³: the student has no such token"):
        show.find_tokens(["#³"], table)


def test_the_build_does_not_depend_on_its_threads(models, tmp_path, monkeypatch):
    """Bit for bit, with one thread of the tokenizer and with one per core."""
    flags = ["--reverse", f"--student={models[0]}", f"--teacher={models[1]}"]
    for suffix in ("pt", "safetensors"):
        contents = set()
        for parallel in ("false", "true"):
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
            path = tmp_path / f"{parallel}.{suffix}"
            run("build", [*flags, f"--output={path}"])
            contents.add(path.read_bytes())
        assert len(contents) == 1
