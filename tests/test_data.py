"""data.py: the right tokens meet the right predictions; the order of samples depends on the seed alone."""

import itertools
import json

import datasets
import numpy as np
import pytest
import torch

from isogloss.data import (Collate, CollateAll, HeldOutBatches, MicroBatches, Reader, Routed, ShuffledRows, TextEncoder,
                  StreamedRows, check_templates, holds_chats, load_rows, loader, render, split_rows)


@pytest.fixture
def sides(tokenizers, tables):
    return [TextEncoder(tokenizer, table, 400) for tokenizer, table in zip(tokenizers, tables)]


def spelled(table, labels, chunk, c):
    return b"".join(table.bytes_of(i) for i in labels[chunk == c].tolist() if not table.special[i])


def test_several_teachers_share_the_students_tokens(sides, texts):
    """Contexts of 60 and 90 tokens, on texts of very different length: all are cut where the shortest is."""
    student, teacher = sides
    cuts = [Collate(student, TextEncoder(teacher.tokenizer, teacher.table, most), None) for most in (400, 60, 90)]
    cuts.append(Collate(student, student, None))
    samples = [*texts[:8], None, "", texts[0][:9]]
    batches = CollateAll(cuts)(samples)
    for batch in batches[1:]:
        for key in ("student_ids", "student_labels", "student_bytes"):
            assert torch.equal(batch[key], batches[0][key])
    assert max(batch["teacher_ids"].shape[1] for batch in batches) <= 60 + 90
    alone = cuts[1](samples)  # as short as the shortest asks for, not shorter
    lengths = [(b["student_labels"] >= 0).sum(1) for b in (batches[0], alone)]
    assert (lengths[0] <= lengths[1]).all() and lengths[0].sum() > 0.9 * lengths[1].sum()


def test_a_teacher_gets_the_rows_that_are_for_it(sides, texts):
    routed = [Routed(text, route) for text, route in zip(texts[:6], ["a", "b", "c", "b", None, "a"])]
    own = Collate(*sides, None)
    batches = CollateAll([own] * 3, [["a"], ["b", "d"], None])([*routed, None])
    alone = own([*texts[:6], None])
    for batch, rows in zip(batches, ([0, 5], [1, 3], [2, 4])):
        assert torch.equal(batch["student_labels"], alone["student_labels"])
        for i in range(7):
            assert (batch["student_chunk"][i] >= 0).any() == (i in rows)
            if i in rows:
                assert torch.equal(batch["student_chunk"][i], alone["student_chunk"][i])
        assert ((batch["teacher_labels"] >= 0).any(1)).nonzero().flatten().tolist() == rows
    assert sum(batch["counts"]["kd"] for batch in batches) == alone["counts"]["kd"]


def test_chunks_speak_of_the_predicted_token(sides, texts):
    batch = Collate(*sides, None)(texts[:6])
    for b in range(6):
        for side in sides:
            name = "student" if side is sides[0] else "teacher"
            ids, labels = batch[f"{name}_ids"][b], batch[f"{name}_labels"][b]
            real = int((labels >= 0).sum())
            assert torch.equal(labels[: real - 1], ids[1:real]) and labels[real - 1] == side.table.eos
            assert ids[0] == side.table.bos and (labels[real:] == -100).all()
        s, t = batch["student_chunk"][b], batch["teacher_chunk"][b]
        for c in set(s.tolist()) - {-1}:
            assert spelled(sides[0].table, batch["student_labels"][b], s, c) == spelled(
                sides[1].table, batch["teacher_labels"][b], t, c)
    chunks = {(b, c) for b in range(6) for c in batch["student_chunk"][b].tolist() if c >= 0}
    assert batch["counts"]["kd"] == len(chunks)


def test_both_sides_are_cut_at_the_same_byte(tokenizers, tables, texts):
    text = " ".join(texts[:5])
    for student_max, teacher_max in ((40, 400), (400, 25), (33, 30)):
        sides = [TextEncoder(*pair, n) for *pair, n in zip(tokenizers, tables, (student_max, teacher_max))]
        batch = Collate(*sides, None)([text])
        read = []
        for name, side in zip(("student", "teacher"), sides):
            labels = batch[f"{name}_labels"][0]
            assert len(labels) <= side.max_length and side.table.eos not in labels
            read.append(side.table.decode(labels[labels >= 0].tolist()).lstrip())
            assert batch[f"{name}_chunk"][0, -1] >= 0  # no unaligned tail
        assert read[0] == read[1] and text.encode().startswith(read[0])
        assert batch["counts"]["text_bytes"] == len(read[0])


def test_bytes_count_the_text_once(sides, texts):
    """The space that SentencePiece puts before a text is none of its bytes; the end of text has none."""
    for text in (texts[0], " leading", "", "é"):
        batch = Collate(*sides, None)([text])
        for name in ("student", "teacher"):
            assert batch[f"{name}_bytes"].clamp(min=0).sum() == len(text.encode()), (name, text)


def test_without_bos_the_first_chunk_has_no_predictor(tokenizers, tables, texts):
    import copy

    table = copy.copy(tables[1])
    table.bos = -1
    whole, without = [TextEncoder(tokenizers[1], t, 400) for t in (tables[1], table)]
    assert 0 in Collate(whole, whole, None)(texts[:1])["student_chunk"]
    batch = Collate(whole, without, None)(texts[:1])
    assert 0 not in batch["student_chunk"] and 0 not in batch["teacher_chunk"]
    assert 1 in batch["student_chunk"] and 1 in batch["teacher_chunk"]
    assert batch["teacher_bytes"].clamp(min=0).sum() < batch["student_bytes"].clamp(min=0).sum()


def test_altered_text_is_counted_and_still_read(sides, tokenizers):
    """A tokenizer that lower-cases: what it alters is learned from as text alone, the rest is aligned."""
    import copy

    from tokenizers import normalizers

    lower = copy.deepcopy(tokenizers[0])
    backend = lower.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    lossy = TextEncoder(lower, sides[0].table, 400)
    batch = Collate(lossy, sides[1], None)(["the Upper value", "the value"])
    assert (batch["student_labels"][0] >= 0).any() and (batch["student_chunk"][0] >= 0).any()
    assert 0 < batch["counts"]["normalized_bytes"] < len("the Upper value")
    assert batch["counts"]["unmatched_bytes"] == 0
    assert batch["counts"]["source_bytes"] == len("the Upper valuethe value")
    s, t = batch["student_chunk"][0], batch["teacher_chunk"][0]
    for c in set(s.tolist()) - {-1}:
        assert spelled(lossy.table, batch["student_labels"][0], s, c) == spelled(
            sides[1].table, batch["teacher_labels"][0], t, c)


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
          "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}<|im_end|>\n"
          "{% endfor %}")
PLAIN = ("{% if messages[0].role != 'system' %}Be good.\n{% endif %}{% for m in messages %}{{ m.role }}: "
         "{% if '</think>' in m.content %}{{ m.content.split('</think>')[1] | trim }}{% else %}"
         "{{ m.content | trim }}{% endif %}{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}")
CHAT = [{"role": "user", "content": "user"}, {"role": "assistant", "content": " the value \n"},
        {"role": "user", "content": "assistant: the 201?"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nIt is the index."}]


@pytest.fixture
def chat_sides(tokenizers):
    import copy

    from align import TokenTable

    student, teacher = map(copy.deepcopy, tokenizers)
    student.chat_template, teacher.chat_template = CHATML, PLAIN
    student.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return [TextEncoder(t, TokenTable.from_tokenizer(t), 400) for t in (student, teacher)]


def test_chats_meet_message_by_message(chat_sides):
    batch = Collate(*chat_sides, None)([CHAT])
    tables = [side.table for side in chat_sides]
    s, t = batch["student_chunk"][0], batch["teacher_chunk"][0]
    labels = [batch[f"{name}_labels"][0] for name in ("student", "teacher")]
    shared = b""
    for c in sorted(set(s.tolist()) - {-1}):
        parts = [spelled(table, row, chunk, c) for table, row, chunk in zip(tables, labels, (s, t))]
        assert parts[0] == parts[1]
        shared += parts[0]
    assert b" is the index." in shared and b"value" in shared and b"201" not in shared  # assistant only
    learned = tables[0].decode(labels[0][labels[0] >= 0].tolist())
    assert learned == b" the value \n<think>\nlong\n</think>\n\nIt is the index."
    ends = [row == stop for row, stop in zip(labels, (tables[0].end_of_turn, tables[1].eos))]
    assert ends[0].sum() == 2 and (s[ends[0]] >= 0).all()
    assert set(s[ends[0]].tolist()) == set(t[ends[1]].tolist())
    told = sum(len(m["content"]) for m in CHAT)
    assert batch["counts"]["source_bytes"] == told
    assert batch["counts"]["unmatched_bytes"] == len(" ") + len(" \n") + len("<think>\nlong\n</think>\n\n")
    whole = Collate(*chat_sides, None, "all")([CHAT])
    assert whole["counts"]["ce"] > batch["counts"]["ce"] and whole["counts"]["aligned_bytes"] > len(shared)
    assert Collate(chat_sides[0], None, None)([CHAT])["counts"]["ce"] == batch["counts"]["ce"]


def test_chats_are_cut_at_whole_chunks(chat_sides):
    for side in chat_sides:
        side.max_length = 30
    batch = Collate(*chat_sides, None, "all")([CHAT])
    for name in ("student", "teacher"):
        assert batch[f"{name}_labels"].shape[1] <= 30 and batch[f"{name}_chunk"][0, -1] >= 0


def test_reasoning_and_tool_calls_keep_their_place(chat_sides):
    call = {"function": {"name": "look", "arguments": {"at": "the index"}}}
    chat = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": "the index", "reasoning_content": "the value"}]
    template = ("{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}({{ m.reasoning_content }}"
                "){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
                "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endfor %}")
    for side in chat_sides:
        side.tokenizer.chat_template = template
    spans = render(chat, chat_sides[0]).spans
    order = sorted(spans, key=lambda key: spans[key])
    assert order == [(0, "content"), (1, (0, "name")), (1, (0, "arguments")), (2, "reasoning"),
                     (2, "content")]
    counts = Collate(*chat_sides, None, "all")([chat])["counts"]
    assert counts["source_bytes"] == len("look" "look" '{"at": "the index"}' "the index" "the value")
    assert counts["unmatched_bytes"] == 0


@pytest.mark.parametrize("side", [0, 1])
def test_a_chat_that_a_template_refuses_is_left_out_and_counted(chat_sides, side):
    """The student learns alone what the teacher's refuses; where all is refused, the job ends."""
    expected = [CollateAll([Collate(*chat_sides, None)])([chat])[0] for chat in (CHAT, CHAT[1:])]
    tokenizer = chat_sides[side].tokenizer
    tokenizer.chat_template = ("{% if messages|length != " + str(len(CHAT)) + " %}{{ raise_exception('no') }}"
                               "{% endif %}" + tokenizer.chat_template)
    with pytest.warns(UserWarning, match="refuses a chat: no; such chats are left out"):
        [found] = CollateAll([Collate(*chat_sides, None)])([CHAT, CHAT[1:]])
    counts = [batch["counts"] for batch in expected]
    assert counts[1]["kd"] > 0 == counts[0]["skipped_chats"]
    assert found["counts"]["skipped_chats"] == 1 and found["counts"]["kd"] == counts[0]["kd"]
    assert found["counts"]["ce"] == counts[0]["ce"] + (counts[1]["ce"] if side else 0)
    rows = datasets.Dataset.from_dict({"text": [CHAT[1:], CHAT]})
    check_templates(rows, "text", chat_sides)
    with pytest.raises(ValueError, match="refuses a chat: no; so it does the other 0 of the first chats"):
        check_templates(rows.select([0]), "text", chat_sides)


def test_columns_of_chats_are_recognized(tmp_path):
    frame = datasets.Dataset.from_dict({"messages": [CHAT] * 3, "text": ["a"] * 3})
    frame.to_json(tmp_path / "chats.jsonl")
    for streaming in (False, True):
        rows = load_rows(str(tmp_path / "chats.jsonl"), "messages", streaming=streaming)
        assert holds_chats(rows, "messages") and not holds_chats(rows, "text")


def test_a_rank_without_samples_gives_an_empty_batch(sides):
    batch = Collate(*sides, None)([None, None])
    assert batch["student_ids"].shape == (2, 1) and (batch["student_labels"] == -100).all()
    assert batch["counts"]["ce"] == batch["counts"]["kd"] == 0


class Texts:
    """A collate function that gives the texts back."""

    def __call__(self, texts):
        return texts


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(7)]})


def stream_of(rows, ranks, micro, micro_steps, workers=0, start=0, steps=6, seed=3):
    """Samples of the first steps, step by step, each sorted: what the optimizer sees."""
    samples = ShuffledRows(rows, Reader("text"), seed)
    parts = [MicroBatches(samples, Texts(), micro, micro_steps, r, ranks, start) for r in range(ranks)]
    iterators = [iter(loader(part, workers)) for part in parts]
    return [sorted(text for it in iterators for batch in itertools.islice(it, micro_steps) for text in batch)
            for _ in range(steps - start)]


def test_order_depends_on_the_seed_alone(rows):
    one = stream_of(rows, 1, 4, 1)
    assert one == stream_of(rows, 2, 2, 1) == stream_of(rows, 4, 1, 1) == stream_of(rows, 2, 1, 2)
    assert one == stream_of(rows, 2, 1, 2, workers=2) != stream_of(rows, 1, 4, 1, seed=4)
    assert one[2:] == stream_of(rows, 2, 2, 1, workers=1, start=2)
    flat = [text for step in stream_of(rows, 1, 1, 1, steps=14) for text in step]
    assert sorted(flat[:7]) == sorted(flat[7:]) == sorted(rows["text"]) and flat[:7] != flat[7:]  # epochs


def test_a_stream_gives_the_same_again(rows):
    def read(start):
        stream = StreamedRows(rows.to_iterable_dataset(), Reader("text"), 3)
        batches = MicroBatches(stream, Texts(), 2, 1, 0, 1, start)
        return list(itertools.islice(iter(loader(batches, 1)), 8 - start))

    whole = read(0)
    assert whole[3:] == read(3) and sorted(sum(whole, [])[:7]) == sorted(rows["text"])


def test_held_out_rows_are_read_once_by_equally_many_batches(rows):
    for ranks, micro in ((1, 2), (2, 2), (4, 3)):
        batches = [HeldOutBatches(rows, Reader("text"), Texts(), micro, rank, ranks) for rank in range(ranks)]
        parts = [list(loader(part, 0)) for part in batches]
        assert len({len(p) for p in parts}) == 1
        assert sorted(t for p in parts for batch in p for t in batch if t) == sorted(rows["text"])


def test_loading_leaves_the_random_state_alone(rows):
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    next(iter(loader(MicroBatches(ShuffledRows(rows, Reader("text"), 0), Texts(), 1, 1, 0, 1), 0)))
    assert torch.equal(torch.get_rng_state(), expected)


def test_files_of_every_kind(tmp_path):
    lines = ["one", "two", "three"]
    frame = datasets.Dataset.from_dict({"text": lines})
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines))
    (tmp_path / "c.json").write_text(json.dumps(lines))
    frame.to_parquet(tmp_path / "d.parquet")
    frame.to_csv(tmp_path / "e.csv", index=False)
    frame.save_to_disk(tmp_path / "disk")
    sources = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.json", "d.parquet", "e.csv", "disk")]
    sources.append(next((tmp_path / "disk").glob("*.arrow")))
    for source in sources:
        assert list(load_rows(str(source), "text")["text"]) == lines, source
    more = tmp_path / "more"
    more.mkdir()
    for name in ("x.jsonl", "y.jsonl"):
        (more / name).write_text((tmp_path / "b.jsonl").read_text())
    assert len(load_rows(str(more), "text")) == len(load_rows(f"{more}/*.jsonl", "text")) == 6
    stream = load_rows(str(more), "text", streaming=True)
    train, held_out = split_rows(stream, 2, "text")
    assert [row["text"] for row in held_out] == lines[:2] and len(list(train)) == 4
    with pytest.raises(ValueError, match="--eval_rows 6: the data has 6 rows, none is left to train on"):
        split_rows(stream, 6, "text")
    assert next(iter(load_rows(str(tmp_path / "disk"), "text", streaming=True)))["text"] == lines[0]
    datasets.Dataset.from_dict({"text": ["a", None, "b"]}).to_json(tmp_path / "null.jsonl")
    with pytest.raises(ValueError, match="sample 1 of the stream holds None, expected text"):
        split_rows(load_rows(str(tmp_path / "null.jsonl"), "text", streaming=True), 1, "text")
    train, held_out = split_rows(load_rows(str(more), "text"), 2, "text")
    assert list(held_out["text"]) == lines[:2] and len(train) == 4


def test_numpy_tables_survive_a_worker(sides, texts):
    rows = datasets.Dataset.from_dict({"text": texts[:8]})
    batches = MicroBatches(ShuffledRows(rows, Reader("text"), 0), Collate(*sides, None), 2, 1, 0, 1)
    here, there = [next(iter(loader(batches, workers))) for workers in (0, 1)]
    assert all(torch.equal(here[key], there[key]) for key in here if isinstance(here[key], torch.Tensor))
    assert np.isfinite(here["counts"]["ce"])
