"""spelling.py: how each side writes the other's tokens, and the tables made of that."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import asset
from isogloss.align import TokenTable, all_bytes
from isogloss.projection_tools.cells import build_translation
from isogloss.projection_tools.tokenizers import Pair
from isogloss.spelling import (
    CHARACTER_OF_BYTE,
    link_special_tokens,
    spell as spell_tokens,
    translation_tables,
    unwritten_tokens,
    unwritten_twins,
)
from tokens import real, table_of


def without_padding(pieces):
    """Return spellings as lists of ids, without the -1 behind them."""
    return [row[row >= 0].tolist() for row in pieces]


def test_spellings_have_the_same_bytes(tokenizers, tables):
    """No more: SentencePiece adds a space before a text, the spelling of a token does not."""
    for source, tokenizer, target in zip(tables, tokenizers[::-1], tables[::-1]):
        pieces = spell_tokens(source, tokenizer, target, max_pieces=64)  # none is longer
        for i, spelling in enumerate(without_padding(pieces)):
            expected = b"" if source.special[i] else source.bytes_of(i)
            assert b"".join(map(target.bytes_of, spelling)) == expected, source.tokens[i]


def control_tokens(*names):
    """Return a TokenTable of control tokens alone."""
    data = np.frombuffer("".join(names).encode(), np.uint8)
    starts = np.cumsum([0, *map(len, names)])
    return TokenTable(data, starts, np.ones(len(names), bool), list(names), "plain")


def test_control_tokens_pair_by_role_then_by_name(tables):
    student, teacher = tables
    assert link_special_tokens(student, teacher) == [(student.eos, teacher.eos)]
    # Names with a slash or other digits differ, brackets and case do not.
    s = control_tokens(
        "<|pad|>", "<|im_start|>", "[/INST]", "<|reserved_1|>", "<s>", "<|tool_call|>")
    t = control_tokens("[PAD]", "<|im_end|>", "[INST]", "<|reserved_2|>", "</s>", "<tool_calls>")
    assert link_special_tokens(s, t) == [(0, 0)]
    assert link_special_tokens(s, t, 0.8) == [(0, 0), (5, 5)]
    # equal names before similar ones
    assert link_special_tokens(s, s, 0.8) == [(i, i) for i in range(6)]


@pytest.mark.parametrize(("student", "unwritten"), [
    ("tok512", {"<0x2E>": ".", "<0x41>": "A"}), ("llama2", {"<0x2E>": ".", "<0x20>": "▁"}),
    ("deepseek_coder", {})])
def test_tokens_that_a_tokenizer_never_writes_get_no_mass(student, unwritten):
    """Those with the bytes of another token, and what no text is cut into; on real texts."""
    loaded, tables = zip(real(student), real("gpt2"))
    fields = build_translation(Pair.of(*loaded, tables=tables))
    cell_V = fields["cell_V"].numpy()
    last = fields["num_cells"] - 1
    without_mass = np.zeros(len(cell_V), bool)
    if not (fields["cell_W"] == last).any():
        without_mass = cell_V == last
    for byte_token, letter in unwritten.items():
        ids = loaded[0].convert_tokens_to_ids([byte_token, letter])
        assert without_mass[ids].tolist() == [True, False]
    assert without_mass.any()
    for name in ("wikitext2_valid_tokens.txt", "zh_yuanqu_head.txt", "ja_wagahai_neko_head.txt"):
        text = asset("text", name).read_text(encoding="utf-8", errors="ignore")[:100_000]
        written = loaded[0](text, add_special_tokens=False, verbose=False)["input_ids"]
        assert not without_mass[written].any()


@pytest.mark.parametrize(("name", "twins"), [
    ("tok512", {"<0x2E>": ".", "<0x41>": "A"}), ("llama2", {"<0x2E>": ".", "<0x20>": "▁"}),
    ("mistral_v7", {"<0x2E>": "."}), ("gpt2", {})])
def test_of_twins_the_one_counts_that_is_written(name, twins):
    """No token of a text is unwritten, and each that is has the bytes of a written one."""
    tokenizer, table = real(name)
    unwritten_V = unwritten_twins(table, tokenizer)
    for hidden, shown in twins.items():
        ids = tokenizer.convert_tokens_to_ids([hidden, shown])
        assert unwritten_V[ids].tolist() == [True, False]
    shown = {raw for raw, hidden in zip(all_bytes(table), unwritten_V) if not hidden}
    assert {table.bytes_of(v) for v in np.flatnonzero(unwritten_V).tolist()} <= shown
    text = asset("text", "wikitext2_valid_tokens.txt").read_text(encoding="utf-8")[:100_000]
    written = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert not unwritten_V[written].any() and unwritten_V.any() == bool(twins)


BYTE_NAMES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
LETTERS = " ▁aeht"


def fallback_bpe():
    vocab = {name: i for i, name in enumerate([*BYTE_NAMES, *LETTERS, "th", "the"])}
    return Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")], unk_token="<unk>",
                                byte_fallback=True))


def fallback_unigram():
    scores = [(name, -9.0) for name in BYTE_NAMES] + [(letter, -2.0) for letter in LETTERS]
    return Tokenizer(models.Unigram([*scores, ("the", -1.0)], 0, byte_fallback=True))


def normalized_to_bytes():
    vocab = {letter: byte for byte, letter in CHARACTER_OF_BYTE.items()}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.ByteLevel()])
    backend.pre_tokenizer = pre_tokenizers.Split("Ġ", "merged_with_next")
    return backend


@pytest.mark.parametrize("kind", [fallback_bpe, fallback_unigram, normalized_to_bytes])
def test_a_vocabulary_with_all_bytes_spells_any(kind):
    """Byte tokens without SentencePiece's spaces; bytes that the normalizer writes."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind())
    table = TokenTable.from_tokenizer(tokenizer)
    text = "the hé ▁ 🙂 tea"
    assert table.decode(tokenizer(text)["input_ids"]) == text.encode()
    pieces = [b" the", "▁é".encode(), b"the \xc3", b" \xa9 \xff", bytes([0, 10, 255])]
    spelled = spell_tokens(table_of(pieces), tokenizer, table)
    assert [table.decode(ids) for ids in without_padding(spelled)] == pieces


def test_a_token_that_spells_one_of_the_teachers_is_written():
    """However the student's tokenizer cuts it where it stands alone."""
    student, table = real("tok512")
    dot, letter = student.convert_tokens_to_ids(["<0x2E>", "<0x41>"])
    nothing = np.zeros(len(table), bool)
    for spelled, expected in ((-1, [True, True]), (dot, [False, True])):
        pieces_WP = np.array([[letter + 1, spelled], [-1, -1]])
        unwritten = unwritten_tokens(table, student, pieces_WP, nothing)
        assert unwritten[[dot, letter]].tolist() == expected


def test_joins_of_white_space_are_left_out():
    """How a tokenizer cuts two spaces depends on what follows; " a" it does join."""
    texts = [b" ", b"a", b"  ", b" a", b"\n", b" \n"]
    spell_bytes = {b"a": [1], b" ": [0], b"\n": [4]}
    # the teacher writes one byte at a time
    A = np.array([[0], [1], [4]])
    B = np.array([[0, -1], [1, -1], [0, 0], [0, 1], [2, -1], [0, 2]])
    fields = translation_tables(A, B, texts, [b" ", b"a", b"\n"], np.ones(6, bool),
                                lambda raws: [spell_bytes[raw] for raw in raws])
    assert fields["joined_V"].tolist() == [1, 0, 0, 0, 0, 0]
    place = fields["join_low_J"][fields["join_start_V"][0]]
    assert fields["order_W"][place] == 1


def control_table(tokenizer, roles):
    """Return the TokenTable of a bare tokenizer whose control tokens get these roles."""
    return TokenTable.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles))


def test_a_token_that_only_doubles_as_unknown_is_no_counterpart():
    """GPT-NeoX names <|endoftext|> for bos, eos and unk; BERT has an [UNK] that is nothing else."""
    neox = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    neox.pre_tokenizer = pre_tokenizers.ByteLevel()
    end = "<|endoftext|>"
    neox = control_table(neox, {"bos_token": end, "eos_token": end, "unk_token": end})
    bert = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    bert = control_table(bert, {"unk_token": "[UNK]", "pad_token": "[PAD]"})
    assert neox.unk == neox.eos >= 0 and bert.unk == 0
    assert link_special_tokens(neox, bert) == []
    assert link_special_tokens(bert, neox) == []
    assert link_special_tokens(bert, bert) == [(bert.pad, bert.pad), (0, 0)]
    # it goes on to stand for itself
    assert link_special_tokens(neox, neox) == [(neox.eos, neox.eos)]


def test_paths_longer_than_a_number_has_bits_are_written():
    """Of 40 teacher tokens, the first of which another one of the teacher crosses."""
    long = b"a" * 40
    texts = [b"a", b"aa", long]
    A = np.array([[0, -1], [0, 0], [0, 0]])  # of a, aa, aaa: the last is not asked for
    B = np.full((3, 40), -1)
    B[0, 0], B[1, :2], B[2] = 0, 0, 0

    def as_written(raws):
        return [[1] * (len(raw) // 2) + [0] * (len(raw) % 2) for raw in raws]

    fields = translation_tables(A, B, texts, [b"a", b"aa", b"aaa"], np.ones(3, bool), as_written)
    closed = fields["closed_V"]
    assert closed[2] == closed.astype(np.int32)[2] < 0
    bits = closed[2] >> np.arange(40) & 1
    assert 0 in bits[:31] and (bits[31:] == 1).all()
