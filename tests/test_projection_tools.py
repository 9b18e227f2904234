"""projection_tools: every weight is explained by bytes, every file belongs to its two tokenizers."""

import copy
import multiprocessing
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import ROOT, asset
from transformers import AutoTokenizer

from projection_tools.flags import parse_flags, tool
from projection_tools import (Pair, as_tables, build, cached, compare, cut, exact, fill_empty, fingerprint,
                              generate, load_projection, load_tables, multitoken, pack, save_atomically, show,
                              spell)


@pytest.fixture(scope="module")
def pair(tokenizers, tables):
    return Pair.of(*tokenizers, tables=tables)


def rows_explained(projection, pair):
    """Every weight stands on bytes of the student token, in reading order, control tokens aside."""
    (indices, likelihoods), (student, teacher) = projection, pair.tables
    text = ~student.special
    used = indices[text] >= 0
    size = np.where(used, teacher.lengths[np.where(used, indices[text], 0)], 0).sum(1)
    assert (size <= student.lengths[text]).all()
    begins = student.starts[:-1][text]  # a row's tokens spell the first `size` bytes of the student's token
    places = np.repeat(begins - (np.cumsum(size) - size), size) + np.arange(size.sum())
    assert student.data[places].tobytes() == teacher.decode(indices[text][used])
    sums = likelihoods.sum(1)
    assert ((np.abs(sums - 1) < 1e-6) | (sums == 0)).all()
    assert ((indices < 0) == (likelihoods == 0)).all() and (np.diff(likelihoods, axis=1) <= 0).all()


# --- rows -----------------------------------------------------------------------------------------


def test_packing_sorts_cuts_and_normalizes():
    found = pack([1, 0, 1, 1, 0], [5, 6, 7, 8, 6], [1.0, 2.0, 3.0, 1.0, 2.0], 3, 2)
    assert found[0].tolist() == [[6, 6], [7, 5], [-1, -1]]  # twice in a row stays twice; ties in their order
    assert found[1].tolist() == [[0.5, 0.5], [0.75, 0.25], [0, 0]]
    assert cut.cut_rows(found, 1)[1].tolist() == [[1], [1], [0]]
    assert cut.cut_rows(found, 2, threshold=0.3)[0].tolist() == [[6, 6], [7, -1], [-1, -1]]
    other = np.array([[1], [2], [3]]), np.ones((3, 1))
    assert fill_empty(found, other)[0].tolist() == [[6, 6], [7, 5], [3, -1]]


def expected_rows(pair, top_k, max_pieces, reverse):
    """multitoken.py by its definition, one dictionary a row."""
    (student, teacher), (student_tokenizer, teacher_tokenizer) = pair.tables, pair.tokenizers
    forward = spell.spell(student, teacher_tokenizer, teacher, 64).tolist()
    back = spell.spell(teacher, student_tokenizer, student, 64).tolist()
    back = [[i for i in row if i >= 0] for row in back]
    roles, out = dict(spell.link_special_tokens(student, teacher, 0.8)), []
    for v in range(len(student)):
        pieces = [w for w in forward[v] if w >= 0][:max_pieces]
        row = [(0.9 * 0.1**i, w) for i, w in enumerate(pieces)]
        if reverse:
            made_of = [(len(back[w]), w) for w in range(len(teacher))
                       if len(back[w]) > 1 and v in back[w][:max_pieces] and w not in pieces]
            row += [(0.9 * 0.1 ** back[w].index(v), w) for _, w in sorted(made_of)]
        row = [(0.9, roles[v])] if v in roles else row
        row = sorted(row, key=lambda entry: -entry[0])[:top_k]
        out.append([(w, weight / sum(x for x, _ in row)) for weight, w in row])
    return out


@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_equal_their_definition(pair, reverse):
    indices, likelihoods = multitoken.multitoken_rows(pair, top_k=5, max_pieces=3, reverse=reverse)
    several = 0
    for v, row in enumerate(expected_rows(pair, 5, 3, reverse)):
        assert [w for w in indices[v].tolist() if w >= 0] == [w for w, _ in row], v
        assert np.allclose(likelihoods[v, : len(row)], [weight for _, weight in row], atol=1e-12)
        several += len(row) > 3
    assert (several > 10) == reverse


def test_projection_of_two_kinds(pair):
    found = build.build_projection(pair)
    rows_explained(found, pair)
    (student, teacher), (indices, _) = pair.tables, found
    assert indices[student.eos].tolist() == [teacher.eos, -1, -1, -1]
    again = build.build_projection(pair)
    assert all(np.array_equal(a, b) for a, b in zip(found, again))
    assert build.empty_row_reasons(pair, indices) == {"control tokens without a counterpart": 2}
    assert show.byte_explained(found, pair)[indices >= 0].all()


def test_tokens_of_equal_bytes_are_alone_in_their_row(pair):
    student, teacher = pair.tables
    indices, likelihoods = build.build_projection(pair)
    common = {b for i in range(len(teacher)) if not teacher.special[i] and (b := teacher.bytes_of(i))}
    shared = [v for v in range(len(student)) if not student.special[v] and student.bytes_of(v) in common]
    assert len(shared) > 100 and (likelihoods[shared, 0] == 1).all() and (indices[shared, 1:] == -1).all()
    assert all(teacher.bytes_of(int(indices[v, 0])) == student.bytes_of(v) for v in shared)
    pinned = {}
    for turn in (pair, Pair.of(*pair.tokenizers[::-1], tables=pair.tables[::-1])):
        pieces = spell.spell(turn.tables[0], turn.tokenizers[1], turn.tables[1], max_pieces=2)
        v, w, duplicates = exact.exact_pairs(*turn.tables, pieces)
        pinned[turn is pair] = {turn.tables[0].bytes_of(i) for i in v}
        assert all(turn.tables[0].bytes_of(i) == turn.tables[1].bytes_of(j) for i, j in zip(v, w))
        assert duplicates[turn is pair] == 0 < duplicates[turn is not pair]  # <0x41> and A of the student
    assert pinned[True] == pinned[False]  # the same set whichever way round
    back = build.build_projection(Pair.of(*pair.tokenizers[::-1], tables=pair.tables[::-1]))
    a = teacher.tokens.index("a")
    assert student.tokens[back[0][a, 0]] == "a"  # the token that it writes, not the byte token of lower id


def test_one_tokenizer_gives_the_identity(tokenizers, tables):
    indices, likelihoods = build.build_projection(Pair.of(tokenizers[0], tokenizers[0]))
    assert np.array_equal(indices[:, 0], np.arange(len(tables[0]))) and (likelihoods[:, 0] == 1).all()


def test_common_sets(pair):
    projection = pack([0, 1, 2, 2, 3, 3, 4], [7, 7, 8, 9, 8, 5, 8], [1, 1, 0.7, 0.3, 0.5, 0.5, 1.0], 6, 2)
    assert [part.tolist() for part in show.common_set(projection)] == [[0, 4], [7, 8]]
    assert [part.tolist() for part in show.common_set(projection, relaxed=True)] == [[0, 4], [7, 8]]
    facts = show.row_statistics(build.build_projection(pair), pair)
    assert facts["entries that bytes do not explain"] == 0
    assert facts["common set, strict"] <= facts["of one teacher token"]
    assert facts["of these with equal bytes"] == facts["of one teacher token"] - 1  # the end of text


def test_similar_embeddings(pair, models):
    def embed(texts):
        letters = torch.tensor([(text.strip() or " ").encode()[0] for text in texts])
        return torch.nn.functional.one_hot(letters, 256).float()

    found = generate.similar_rows(pair, embed, top_k=3, block_mib=1)
    student, teacher = pair.tables
    v = student.tokens.index("▁the")
    assert all(teacher.bytes_of(int(w)).strip()[:1] == b"t" for w in found[0][v])
    assert (found[0][[i for i in range(len(student)) if student.special[i]]] == -1).all()
    for pooling in ("input", "output"):
        embedder = generate.Embedder(str(models[1]), pooling)
        vectors = embedder(["the value", "the value", "", "index"])
        assert torch.allclose(vectors[0], vectors[1]) and not vectors[2].any()
        assert torch.allclose(vectors[[0, 3]].norm(dim=1), torch.ones(2))
    filled = build.build_projection(pair, build.Recipe(embedding_model=str(models[1])))
    assert np.array_equal(filled[0], build.build_projection(pair)[0])  # bytes said all


# --- real tokenizers ------------------------------------------------------------------------------


def real_pair(student, teacher):
    return Pair.of(*[AutoTokenizer.from_pretrained(asset("tokenizers", name)) for name in (student, teacher)])


def test_llama3_and_qwen2():
    pair = real_pair("llama3", "qwen2")
    student, teacher = pair.tables
    indices, likelihoods = found = build.build_projection(pair)
    v = student.tokens.index("201")
    assert [teacher.tokens[w] for w in indices[v, :3]] == ["2", "0", "1"]
    assert np.allclose(likelihoods[v, :3], [0.9009, 0.0901, 0.0090], atol=1e-4)
    assert int((indices >= 0).sum(1).__eq__(1).sum()) >= 109_500
    rows_explained(found, pair)
    halves = [i for i in range(len(student)) if not student.special[i]
              and set(student.bytes_of(i).decode(errors="replace")) == {"\ufffd"}]
    assert len(halves) > 500 and (indices[halves, 0] >= 0).all()
    assert set(build.empty_row_reasons(pair, indices)) == {"control tokens without a counterpart"}
    facts = spell.statistics(spell.build_spelling(pair), pair)
    # 109,564 of text, 101,675 of these of one token a side, and two pairs of control tokens
    assert facts["events"] == 109_566 and facts["of one token a side"] == 101_675 + 2
    assert facts["tokens of the largest"] == 873


def test_all_pairs_of_all_families():
    names = "gpt2", "t5", "llama2", "tok512"
    loaded = {name: real_pair(name, name) for name in names}
    for a, b in permutations(names, 2):
        pair = Pair((a, b), *[(getattr(loaded[a], part)[0], getattr(loaded[b], part)[0])
                              for part in ("tokenizers", "tables", "prints")])
        found = build.build_projection(pair)
        rows_explained(found, pair)
        if "t5" not in (a, b):  # it has no byte tokens
            assert "bytes that the teacher cannot write" not in build.empty_row_reasons(pair, found[0]), (a, b)
        if a != "gpt2" and b == "gpt2":
            the = pair.tables[0].tokens.index("▁the")
            assert pair.tables[1].bytes_of(int(found[0][the, 0])) == b" the" and found[1][the, 0] == 1


def test_no_dense_matrix():
    """50k x 50k in float32 would be 9.4 GiB, as one byte an entry 2.4 GiB."""
    code = ("import json, resource; from transformers import AutoTokenizer; "
            "from projection_tools import Pair, build, spell; import copy; "
            f"t = AutoTokenizer.from_pretrained({str(asset('tokenizers', 'gpt2'))!r}); u = copy.deepcopy(t); "
            "from tokenizers import pre_tokenizers; "
            "u.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True); "
            "p = Pair.of(t, u); assert p.prints[0] != p.prints[1]; "
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
            "build.build_projection(p, build.Recipe(reverse=True)); spell.build_spelling(p); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700 * 1024, f"{int(done.stdout) / 1024:.0f} MiB"


# --- files and cache ------------------------------------------------------------------------------


def test_files_are_checked(pair, tmp_path):
    path = tmp_path / "p.pt"
    found = build.build_projection(pair)
    tables = as_tables(found, pair, "test")
    for suffix in ("pt", "safetensors"):
        save_atomically(tables, tmp_path / f"p.{suffix}")
        back = load_projection(tmp_path / f"p.{suffix}", pair)
        assert torch.equal(back["indices"], tables["indices"]) and back["tool"] == "test"
        assert torch.allclose(back["likelihoods"], tables["likelihoods"], atol=1e-7)
    turned = Pair.of(*pair.tokenizers[::-1], tables=pair.tables[::-1])
    with pytest.raises(ValueError, match="made for another student tokenizer"):
        load_projection(path, turned)
    bare = {k: tables[k] for k in ("indices", "likelihoods")}
    for content, message in (({"indices": bare["indices"]}, "no projection"),
                             (bare["indices"], "no projection"),
                             ({k: t[:9] for k, t in bare.items()}, "9 rows"),
                             (bare | {"indices": bare["indices"] + 600}, "teacher ids up to"),
                             (bare | {"likelihoods": bare["likelihoods"][:, :2]}, r"expected two \(V, K\)"),
                             (bare | {"indices": bare["indices"].float()}, "float32")):
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            load_projection(path, pair)
    whole = (tmp_path / "p.safetensors").read_bytes()
    for name in ("p.pt", "p.safetensors"):
        for damaged in (b"nothing", whole[: len(whole) // 2]):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(ValueError, match="not a readable file"):
                load_projection(tmp_path / name, pair)
    with pytest.raises(ValueError, match="no such file"):
        load_tables(tmp_path / "absent.pt")


def test_files_of_other_tools_load(pair, tmp_path):
    """bfloat16, no fingerprints, slots without sentinels, rows in any order, weights that do not sum to 1."""
    indices, likelihoods = build.build_projection(pair)
    path, ids = tmp_path / "p.pt", torch.from_numpy(indices)
    weights = torch.from_numpy(likelihoods).bfloat16()
    torch.save({"indices": ids.flip(1), "likelihoods": weights.flip(1), "model_A_id": "a"}, path)
    back = load_projection(path, pair)
    assert torch.equal(back["indices"].sort(1).values, ids.sort(1).values)
    assert ((back["indices"][:, 0] >= 0) == (ids[:, 0] >= 0)).all()
    assert torch.allclose(back["likelihoods"].sum(1), (ids[:, 0] >= 0).float())
    torch.save({"indices": ids.clamp(min=0), "likelihoods": weights}, path)
    assert torch.equal(load_projection(path, pair)["indices"], ids)
    row = int(np.flatnonzero(indices[:, 1] >= 0)[0])
    weights[row] *= 2
    weights[row + 1, -1] = 0.5
    ids[row + 1, -1] = -1
    torch.save({"indices": ids, "likelihoods": weights}, path)
    with pytest.warns(UserWarning, match="1 unused slots have a weight, 1 rows do not sum to 1; mended"):
        back = load_projection(path, pair)
    assert np.allclose(back["likelihoods"].numpy(), likelihoods, atol=4e-3)


def test_files_with_the_scale_trick_lose_its_column(pair, tmp_path):
    """What the public tool writes by default: 0.2 on a token without meaning in the last slot, normalized."""
    indices, likelihoods = build.build_projection(pair)
    tricked, several = likelihoods.copy(), (indices[:, 1] >= 0) & (indices[:, 3] < 0)
    ids = indices.copy()
    ids[several, 3], tricked[several, 3] = 0, 0.2
    tricked /= np.maximum(tricked.sum(1, keepdims=True), 1e-30)
    path = tmp_path / "p.pt"
    torch.save({"indices": torch.from_numpy(ids), "likelihoods": torch.from_numpy(tricked),
                "enable_scale_trick": True}, path)
    with pytest.warns(UserWarning, match="scale trick; its last column is left out"):
        back = load_projection(path, pair)
    assert several.any() and (back["indices"][several][:, 3] == -1).all()
    assert np.allclose(back["likelihoods"][several].numpy(), likelihoods[several], atol=1e-6)


def test_another_eos_is_another_pair(tokenizers, tmp_path):
    """Base and chat versions of a model share a tokenizer.json, but not the tables that link their eos."""
    chat = copy.deepcopy(tokenizers[1])
    chat.eos_token = chat.convert_ids_to_tokens(7)
    base, other = Pair.of(*tokenizers), Pair.of(tokenizers[0], chat)
    assert base.prints == other.prints and base.roles != other.roles and base.digest != other.digest
    tables = [build.cached_projection(pair, directory=tmp_path) for pair in (base, other)]
    assert not torch.equal(*[table["indices"] for table in tables])
    assert not torch.equal(*[spell.cached_spelling(pair, tmp_path)["event_W"] for pair in (base, other)])
    path = tmp_path / "p.pt"
    torch.save(tables[0], path)
    load_projection(path, base)
    with pytest.raises(ValueError, match="another teacher tokenizer .roles eos 1?.*, this one has eos 7"):
        load_projection(path, other)


def build_slowly(folder, marks):
    def make():
        with open(marks, "a") as file:
            file.write("x")
        return {"x": torch.ones(2)}

    assert cached("t.pt", make, folder)["x"].sum() == 2


def test_the_cache_builds_once_and_mends_a_damaged_file(tmp_path):
    marks = tmp_path / "marks"
    jobs = [multiprocessing.get_context("fork").Process(target=build_slowly, args=(tmp_path, marks))
            for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4 and marks.read_text() == "x"
    (tmp_path / "t.pt").write_bytes(b"damaged")
    for _ in range(2):
        build_slowly(tmp_path, marks)
    assert marks.read_text() == "xx"


def test_the_cache_knows_the_recipe(pair, tmp_path):
    first = build.cached_projection(pair, None, tmp_path)
    second = build.cached_projection(pair, build.Recipe(top_k=2), tmp_path)
    assert first["indices"].shape[1] == 4 and second["indices"].shape[1] == 2
    assert len(list(tmp_path.glob("*.pt"))) == 2 and "top_k" in second["tool"]


def test_a_fingerprint_sees_merges_but_not_truncation(tokenizers):
    other = copy.deepcopy(tokenizers[1])
    other.backend_tokenizer.enable_truncation(7)
    assert fingerprint(other) == fingerprint(tokenizers[1]) != fingerprint(tokenizers[0])


# --- command lines --------------------------------------------------------------------------------


def test_the_chain_of_command_lines_equals_build(models, tmp_path, capsys):
    def run(module, **flags):
        argv = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
        names = [f"--student-model={models[0]}", f"--teacher_model={models[1]}"]
        tool(module.Args, module.main, argv=[*names, *argv])
        return capsys.readouterr().out

    file = {name: tmp_path / f"{name}.pt" for name in "abcdeg"}
    run(multitoken, output=file["a"], max_pieces=4)
    assert "have the bytes of another one" in run(exact, projection=file["a"], output=file["b"])
    run(cut, projection=file["b"], output=file["c"], top_k=4)
    assert "empty: 2 control tokens" in run(build, output=file["d"])
    known = load_tables(file["d"])
    assert torch.equal(known["indices"], load_tables(file["c"])["indices"])
    assert known["tool"].startswith("isogloss projection_tools.build --top-k 4") and known["student_model_id"]
    run(cut, projection=file["d"], output=file["e"], top_k=1)
    out = run(compare, projection=file["d"], other=file["e"], num_examples=3)
    assert out.count(" -> ") == 3 and "with another heaviest token: 0" in out
    assert "the same within 1e-6: 350" in run(compare, projection=file["c"], other=file["d"])
    run(generate, output=file["g"], embedding_model=models[1], top_k=2)
    out = run(show, projection=file["d"], tokens="▁the,e,#5", png=tmp_path / "p.png")
    assert "' the' -> ' the' 1.0000" in out and "#5 " in out and "common set, strict" in out
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert run(show, projection=file["d"], num_examples=3).count(" -> ") == 3


def test_wrong_command_lines_end_with_one_line(models, tmp_path, capsys):
    (tmp_path / "bad.pt").write_bytes(b"?")
    pair = [f"--student-model={models[0]}", f"--teacher-model={models[1]}"]
    out = f"--output={tmp_path / 'o.pt'}"
    for module, argv, message in (
            (build, [out], "--student_model is missing"),
            (build, [*pair, out, "--topk=3"], "unknown flag --topk; did you mean --top_k?"),
            (build, [*pair, out, "--top-k=0"], "expected 1 or more"),
            (build, [*pair, out, "--top-k=many"], "--top_k=many: expected int, got str"),
            (build, [pair[0], f"--teacher-model={tmp_path}", out], "no tokenizer there"),
            (generate, [*pair, out, f"--embedding-model={tmp_path}"], "--embedding-model"),
            (cut, [*pair, out, f"--projection={tmp_path / 'bad.pt'}"], "not a readable file of tables"),
            (show, [*pair, f"--projection={tmp_path / 'no.pt'}"], "no such file"),
            (compare, [*pair, "a.pt", "b.pt"], "unexpected argument 'a.pt'")):
        with pytest.raises(SystemExit) as ended:
            tool(module.Args, module.main, argv=argv)
        error = capsys.readouterr().err
        assert ended.value.code == 2 and message in error and error.count("\n") == 1, error
        assert error.startswith(f"projection_tools.{module.__name__.split('.')[1]}: ")
    assert not (tmp_path / "o.pt").exists()
    found = parse_flags(compare.Args, ["a.pt", "b.pt", *pair], ("projection", "other"))
    assert (found.projection, found.other, found.student_model) == ("a.pt", "b.pt", str(models[0]))


def test_the_build_does_not_depend_on_its_threads(models, tmp_path, monkeypatch):
    """Bit for bit, with one thread of the tokenizer and with one per core."""
    flags = ["--reverse", f"--student-model={models[0]}", f"--teacher-model={models[1]}"]
    for parallel in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        for suffix in ("pt", "safetensors"):
            tool(build.Args, build.main, argv=[*flags, f"--output={tmp_path / f'{parallel}.{suffix}'}"])
    for suffix in ("pt", "safetensors"):
        one, many = [(tmp_path / f"{parallel}.{suffix}").read_bytes() for parallel in ("false", "true")]
        assert one == many
