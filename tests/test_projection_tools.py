"""projection_tools: every weight and every spelling is explained by bytes."""

import numpy as np
import oracle
import pytest
import torch
from conftest import asset

from align import TokenTable
from projection_tools import build, cached, fingerprint, load_tables, save_atomically, spell


def spelled(pieces, table):
    return b"".join(table.bytes_of(i) for i in pieces if i >= 0)


def rows_explained(student, teacher, tables):
    """Every weight of a projection stands on bytes of the student token, in reading order."""
    rows = tables["indices"].tolist()
    for v in np.flatnonzero(~student.special):
        row = rows[v]
        assert student.bytes_of(v).startswith(spelled(row, teacher)), (v, row)
    sums = tables["likelihoods"].sum(1)
    assert (((sums - 1).abs() < 1e-6) | (sums == 0)).all()
    assert ((tables["indices"] < 0) == (tables["likelihoods"] == 0)).all()


def test_spellings_say_the_same_bytes(tokenizers, tables):
    for source, tokenizer, target in zip(tables, reversed(tokenizers), reversed(tables)):
        pieces = spell.spell(source, tokenizer, target, max_pieces=64).tolist()
        for i in range(len(source)):
            expected = b"" if source.special[i] else source.bytes_of(i)
            assert spelled(pieces[i], target) == expected, source.tokens[i]


def test_a_space_inside_a_text_stays_one(tokenizers, tables):
    """SentencePiece adds a space before a text; the spelling of a token must not."""
    student, teacher = tables
    pieces = spell.spell(student, tokenizers[1], teacher)
    the = student.tokens.index("▁the")
    assert [teacher.tokens[i] for i in pieces[the] if i >= 0] == ["Ġthe"]
    back = spell.spell(teacher, tokenizers[0], student)
    assert student.tokens[back[teacher.tokens.index("Ġthe"), 0]] == "▁the"
    word = next(w for w in range(len(teacher)) if teacher.tokens[w].isascii() and teacher.tokens[w].isalpha())
    assert not student.tokens[back[word, 0]].startswith("▁")


def test_events_equal_a_brute_force_union(tokenizers, tables):
    student, teacher = tables
    A = spell.spell(teacher, tokenizers[0], student)
    B = spell.spell(student, tokenizers[1], teacher)
    event_V, event_W, count = spell.events(A, B)
    lists = [[[i for i in row if i >= 0] for row in pieces.tolist()] for pieces in (A, B)]
    expected = oracle.components(*lists)
    assert count == len(set(expected.values()))
    names = {}
    for (side, i), name in expected.items():
        event = (event_V if side == "s" else event_W)[i]
        assert names.setdefault(name, event) == event
    assert (event_V >= 0).sum() + (event_W >= 0).sum() == len(expected)


def test_prefix_ranges_equal_brute_force(tokenizers, tables):
    pieces = spell.spell(tables[1], tokenizers[0], tables[0])
    order, low, high = spell.prefix_ranges(pieces)
    for n in range(0, len(pieces), 7):
        for k in range(1, min(4, pieces.shape[1])):
            expected = {m for m in range(len(pieces)) if (pieces[m, :k] == pieces[n, :k]).all()}
            assert set(order[low[n, k] : high[n, k]].tolist()) == expected


def test_control_tokens_pair_by_role(tables):
    student, teacher = tables
    pairs = dict(spell.link_special_tokens(student, teacher))
    assert pairs == {student.eos: teacher.eos}  # the teacher's one control token is its bos and pad too


def test_one_tokenizer_gives_the_identity(tokenizers, tables):
    same = build.build_projection(tokenizers[0], tokenizers[0])
    assert torch.equal(same["indices"][:, 0], torch.arange(len(tables[0])))
    assert (same["likelihoods"][:, 0] == 1).all()
    tables_ = spell.build_spelling(tokenizers[0], tokenizers[0])
    assert tables_["num_events"] == len(tables[0])
    assert torch.equal(tables_["event_V"], tables_["event_W"])


def test_projection_of_two_kinds(tokenizers, tables):
    found = build.build_projection(*tokenizers)
    rows_explained(*tables, found)
    student, teacher = tables
    assert found["indices"][student.eos].tolist() == [teacher.eos, -1, -1, -1]
    again = build.build_projection(*tokenizers)
    assert all(torch.equal(found[key], again[key]) for key in ("indices", "likelihoods"))


def test_weights_of_a_known_row():
    from transformers import AutoTokenizer

    pair = [AutoTokenizer.from_pretrained(asset("tokenizers", name)) for name in ("llama3", "qwen2")]
    student, teacher = both = [TokenTable.from_tokenizer(tokenizer) for tokenizer in pair]
    found = build.build_projection(*pair, *both)
    v = student.tokens.index("201")
    assert [teacher.tokens[w] for w in found["indices"][v, :3].tolist()] == ["2", "0", "1"]
    assert torch.allclose(found["likelihoods"][v, :3], torch.tensor([0.9009, 0.0901, 0.0090]), atol=1e-4)
    assert int((found["indices"] >= 0).sum(1).eq(1).sum()) >= 109_500
    rows_explained(student, teacher, found)


def test_files_are_checked(tokenizers, tables, tmp_path):
    path = tmp_path / "p.pt"
    save_atomically(build.build_projection(*tokenizers), path)
    assert build.load_projection(path, *tokenizers, *tables)["indices"].shape == (len(tables[0]), 4)
    with pytest.raises(ValueError, match="made for another student tokenizer"):
        build.load_projection(path, *tokenizers[::-1], *tables[::-1])
    bare = {k: v for k, v in load_tables(path).items() if k in ("indices", "likelihoods")}
    torch.save(bare | {"likelihoods": bare["likelihoods"].bfloat16()}, path)  # as the public tools write it
    assert build.load_projection(path, *tokenizers, *tables)["likelihoods"].dtype == torch.float32
    torch.save({"indices": bare["indices"][:9], "likelihoods": bare["likelihoods"][:9]}, path)
    with pytest.raises(ValueError, match="9 rows"):
        build.load_projection(path, *tokenizers, *tables)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a readable file"):
        build.load_projection(path, *tokenizers, *tables)
    with pytest.raises(ValueError, match="no such file"):
        load_tables(tmp_path / "absent.pt")


def test_the_cache_builds_once_and_mends_a_damaged_file(tmp_path):
    calls = []
    make = lambda: calls.append(1) or {"x": torch.ones(2)}  # noqa: E731
    for _ in range(2):
        assert cached("t.pt", make, tmp_path)["x"].sum() == 2
    (tmp_path / "t.pt").write_bytes(b"damaged")
    assert cached("t.pt", make, tmp_path)["x"].sum() == 2
    assert len(calls) == 2


def test_a_fingerprint_sees_merges_but_not_truncation(tokenizers):
    import copy

    other = copy.deepcopy(tokenizers[1])
    other.backend_tokenizer.enable_truncation(7)
    assert fingerprint(other) == fingerprint(tokenizers[1]) != fingerprint(tokenizers[0])


def test_command_lines(models, tmp_path, capsys):
    pair = dict(student_model=str(models[0]), teacher_model=str(models[1]))
    build.main(build.Args(**pair, output=str(tmp_path / "p.pt"), top_k=3))
    spell.main(spell.Args(**pair, output=str(tmp_path / "s.pt")))
    out = capsys.readouterr().out
    assert "rows" in out and "events" in out
    assert load_tables(tmp_path / "p.pt")["indices"].shape[1] == 3
    assert load_tables(tmp_path / "s.pt")["num_events"] > 100
