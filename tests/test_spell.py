"""Spelling tables: how each side writes the other's tokens, and the events that both can express."""

import numpy as np
import oracle
import torch
from conftest import asset

from align import TokenTable
from projection_tools import Pair, load_tables, spell


def spelled(pieces, table):
    return b"".join(table.bytes_of(i) for i in pieces if i >= 0)


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


def test_what_is_unspelled_is_counted_with_its_reason(tokenizers, tables):
    student, teacher = tables
    pieces = spell.spell(teacher, tokenizers[0], student, max_pieces=2)
    used = pieces >= 0
    total = np.where(used, student.lengths[np.where(used, pieces, 0)], 0).sum(1)
    long = int((spell.spell(teacher, tokenizers[0], student)[:, 2:] >= 0).any(1).sum())
    assert long > 3 and spell.why_unspelled(teacher, pieces, total) == {
        "control tokens without a counterpart": 1, "spelled up to the most pieces only": long}
    mute = TokenTable(np.frombuffer(b"a\xf0\x9f", np.uint8), np.array([0, 1, 1, 3]), np.zeros(3, bool),
                      ["a", "", "?"], "plain")
    pieces = np.array([[4], [-1], [-1]])
    assert spell.why_unspelled(mute, pieces, np.array([1, 0, 0])) == {
        "ids without a token": 1, "bytes that the other side cannot write": 1}


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


def control_tokens(*names):
    raw = "".join(names).encode()
    starts = np.cumsum([0, *(len(name) for name in names)])
    return TokenTable(np.frombuffer(raw, np.uint8), starts, np.ones(len(names), bool), list(names), "plain")


def test_control_tokens_pair_by_role_then_by_name(tables):
    student, teacher = tables
    assert dict(spell.link_special_tokens(student, teacher)) == {student.eos: teacher.eos}
    s = control_tokens("<|pad|>", "<|im_start|>", "[/INST]", "<|reserved_1|>", "<s>", "<|tool_call|>")
    t = control_tokens("[PAD]", "<|im_end|>", "[INST]", "<|reserved_2|>", "</s>", "<tool_calls>")
    assert spell.link_special_tokens(s, t) == [(0, 0)]
    assert spell.link_special_tokens(s, t, 0.8) == [(0, 0), (5, 5)]
    same = spell.link_special_tokens(s, s, 0.8)
    assert same == [(i, i) for i in range(6)]  # equal names before similar ones


def test_one_tokenizer_gives_an_event_per_token(tokenizers, tables):
    found = spell.build_spelling(Pair.of(tokenizers[0], tokenizers[0]))
    assert found["num_events"] == len(tables[0])
    assert torch.equal(found["event_V"], found["event_W"])


# a plain script had counted one event less: it left control tokens out, and the pair of end-of-text tokens is
# an event here
def test_events_of_a_real_pair():
    from transformers import AutoTokenizer

    folders = asset("tokenizers", "tok512"), asset("models", "tinytalk_neo_3M")
    pair = Pair.of(*map(AutoTokenizer.from_pretrained, folders))
    facts = spell.statistics(spell.build_spelling(pair), pair)
    assert facts["events"] == 409 + 1


def test_the_command_line(models, tmp_path, capsys):
    for name in ("s.pt", "s.safetensors"):
        pair = dict(student_model=str(models[0]), teacher_model=str(models[1]))
        spell.main(spell.Args(**pair, output=str(tmp_path / name)))
    assert "pieces per teacher token" in capsys.readouterr().out
    first, second = load_tables(tmp_path / "s.pt"), load_tables(tmp_path / "s.safetensors")
    assert first["num_events"] == second["num_events"] > 100 and first.keys() == second.keys()
    assert torch.equal(first["low_V"], second["low_V"]) and first["low_V"].dtype == torch.int32
