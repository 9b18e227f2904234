"""batch.py: the right tokens meet the right predictions, and counts do not depend on the layout."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch

from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Example
from isogloss.data.options.packed import pack_rows
from isogloss.data.options.term_weights import weigh_positions
from isogloss.data.sample import TextEncoder
from isogloss.job.counts import Counts, PairCounts
from isogloss.job.sequence_group import document_spans
from isogloss.losses import find_chunks
from isogloss.objective.objective import Part
from isogloss.teachers.mixing import teacher_weights
from isogloss.teachers.text_scores import sample_scores, weigh_by_confidence
from isogloss.tiles import StoredLogits
from isogloss.translation import translated
from test_chat import CHAT, collator, with_templates
from test_sample import at_most, lower_casing, sample_of, spelled
from tokens import translation_of

STUDENT_FIELDS = "ids", "labels", "num_bytes"


def rows_of(teacher, rows_NTW, sample_ids=(0,)):
    """Return the rows at all positions of a TeacherBatch, given those at positions of its texts."""
    positions = teacher.positions
    if positions is None:
        positions = torch.arange(teacher.ids.shape[1]).expand_as(teacher.ids)
    return rows_NTW[torch.tensor(sample_ids)[teacher.sample], positions.flatten()]


def sub_tiles_of(teacher, rows_TW):
    """Yield (the student's positions, the sub-tile, the teacher's rows) of every sub-tile."""
    for tile in teacher.tiles:
        for sub_tile in tile.sub_tiles:
            if sub_tile.teacher_positions is not None:
                block = rows_TW[sub_tile.teacher_positions]
            positions = tile.student_positions[sub_tile.student_slice]
            yield positions, sub_tile, block[sub_tile.teacher_slice]


def same(first, second, names):
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [False, True])
def test_rows_are_as_wide_as_a_device_likes_them(encoders, texts, pack):
    """Beyond what a model may read they are not; shards are equally wide all the same."""
    lengths = [len(ids) for encoder in encoders for ids in encoder.encode(texts[:5])]
    for most, size in ((10_000, 1), (10_000, 3), (max(lengths) + 5, 1)):
        limited = [replace(encoder, max_length=most) for encoder in encoders]
        [whole] = shards_of(limited, texts[:5], 1, pack=pack)
        for side in (whole.student, *whole.teachers):  # padding is no text
            assert (side.num_bytes[side.labels < 0] == -1).all()
        shards = shards_of(limited, texts[:5], size, pack=pack, width_step=1009)
        assert sum((shard.counts for shard in shards[1:]), shards[0].counts) == whole.counts
        ids = torch.cat([shard.student.ids for shard in shards], 1)
        for wide, narrow in ((ids, whole.student.ids),
                             (shards[0].teachers[0].ids, whole.teachers[0].ids)):
            width = narrow.shape[1]
            expected = min(-(-width // 1009) * 1009, most)
            assert width < expected <= wide.shape[1] < expected + size
            assert torch.equal(wide[:, :width], narrow)


def test_a_tokenizer_without_pad_is_filled_by_an_id_that_it_has(encoders, texts):
    for eos in (encoders[0].table.eos, -1):
        student = replace(encoders[0], table=copy.copy(encoders[0].table))
        student.table.pad = -1
        student.table.eos = eos
        ids = collator((student, encoders[1]))([texts[0], texts[0][:9]]).student.ids
        assert ids[1, -1] == max(eos, 0)


def test_a_rank_without_samples_gives_an_empty_batch(encoders):
    for pack in (False, True):
        batch = collator(encoders, pack=pack)([None, None])
        assert batch.student.ids.shape[1] == 1 and (batch.student.labels == -100).all()
        assert batch.counts.tokens == batch.counts.pairs[0].kd_terms == 0
        assert batch.sample_ids == [-1, -1]
    assert collator(encoders)([None, None]).student.ids.shape == (2, 1)


def test_text_that_a_tokenizer_normalizes_is_counted_and_still_read(encoders):
    """What it lower-cases is learned from as text alone, the rest is aligned."""
    lossy = TextEncoder(lower_casing(encoders[0].tokenizer), encoders[0].table, 400)
    batch = collator((lossy, encoders[1]))(["the Upper value", "the value"])
    teacher = batch.teachers[0]
    assert (batch.student.labels[0] >= 0).any() and (teacher.student_chunk[0] >= 0).any()
    counts = batch.counts.pairs[0]
    assert 0 < counts.normalized_bytes < len("the Upper value")
    assert counts.unmatched_bytes == 0
    assert counts.source_bytes == len("the Upper valuethe value")
    student_chunk, teacher_chunk = teacher.student_chunk[0], teacher.teacher_chunk[0]
    for number in set(student_chunk.tolist()) - {-1}:
        assert spelled(
            lossy.table, batch.student.labels[0], student_chunk, number) == spelled(
            encoders[1].table, teacher.labels[0], teacher_chunk, number)


# --- several teachers -----------------------------------------------------------------------------


def test_a_tokenizer_is_called_once_for_the_texts_that_it_reads(encoders, texts, monkeypatch):
    calls = []
    encode = TextEncoder.encode
    monkeypatch.setattr(TextEncoder, "encode",
                        lambda self, given: calls.append(given) or encode(self, given))
    pairs = [PairOptions(replace(encoders[1]), routes=routes) for routes in (["a"], ["b"], None)]
    collate = Collator(encoders[0], pairs)
    collate([Example(texts[0], "a"), Example(texts[1], None), Example(texts[2], "a"), None, ""])
    assert calls == [[*texts[:3], ""], [texts[0], texts[2], ""], [""], [texts[1], ""]]
    collate([None])
    assert len(calls) == 4  # nothing to read


# --- routes ---------------------------------------------------------------------------------------


def routed_batch(encoders, examples, *routes):
    """Return the Batch of one teacher per list of routes."""
    pairs = [PairOptions(encoders[1], routes=of_teacher) for of_teacher in routes]
    return Collator(encoders[0], pairs)(examples)


def samples_of(teacher):
    """Return the samples that a teacher reads, and check that the student's chunks agree."""
    reads = (teacher.labels >= 0).any(1)
    assert torch.equal((teacher.student_chunk >= 0).any(1), reads)
    return reads.nonzero().flatten().tolist()


def test_a_teacher_gets_the_samples_that_are_for_it(encoders, texts):
    routes = ["a", "b", "c", "b", None, "a"]
    examples = [Example(text, route) for text, route in zip(texts, routes)]
    batch = routed_batch(encoders, [*examples, None], ["a"], ["b", "d"], None)
    alone = collator(encoders)([*texts[:6], None])
    assert same(batch.student, alone.student, STUDENT_FIELDS)
    for teacher, expected in zip(batch.teachers, ([0, 5], [1, 3], [2, 4])):
        assert samples_of(teacher) == expected
        for b in expected:
            assert torch.equal(teacher.student_chunk[b], alone.teachers[0].student_chunk[b])
    for name in vars(PairCounts()):
        total = sum(getattr(pair, name) for pair in batch.counts.pairs)
        assert total == getattr(alone.counts.pairs[0], name), name
    assert batch.counts.tokens == alone.counts.tokens
    # a fraction is one of the teacher's own rows
    first = batch.counts.pairs[0]
    assert first.read_bytes == batch.student.num_bytes[[0, 5]].clamp(min=0).sum()
    assert first.read_tokens == (batch.student.labels[[0, 5]] >= 0).sum()
    assert first.metrics()["aligned_bytes"] > 0.9


@pytest.mark.parametrize("kind", ["select", "ce"])
def test_a_sample_is_weighed_among_the_teachers_that_read_it(encoders, texts, kind):
    """However sure of it the only reader is; what weighed before stays a factor."""
    routes = ["a", "b", "neither"]
    examples = [Example(text, route) for text, route in zip(texts, routes)]
    batch = routed_batch(encoders, [*examples, Example(texts[3]), None], ["a"], ["b"])
    generator = torch.Generator().manual_seed(0)
    parts = []
    for teacher in batch.teachers:
        logits = torch.randn(teacher.labels.numel(), len(encoders[1].table), generator=generator)
        scores = sample_scores(StoredLogits(logits), teacher)
        assert (scores > -torch.inf).nonzero().flatten().tolist() == samples_of(teacher)
        twice = weigh_positions(teacher, torch.full((5,), 3.0)[teacher.sample_of_student])
        parts.append(Part(batch=twice, confidence=scores))
    weigh_by_confidence(parts, select=kind == "select")
    weights = []  # of each teacher, by sample
    for teacher in [part.batch for part in parts]:
        of_sample = {}
        for tile in teacher.tiles:
            sample = teacher.sample_of_student[tile.student_positions]
            for sub_tile in tile.sub_tiles:
                in_tile = sample[sub_tile.student_slice]
                of_sample |= dict(zip(in_tile.tolist(), sub_tile.weight.tolist()))
        weights.append(of_sample)
    first, second = weights
    assert (first[0], second[0]) == (3, 0) and (first[1], second[1]) == (0, 3)
    assert first[2] == second[2] == 0  # for none of them
    assert first[3] + second[3] == pytest.approx(3)


def test_a_teacher_is_as_sure_as_its_nats_per_byte_of_what_is_learned(tokenizers, texts):
    """Of a completion, and of what the assistant says; an end without a byte weighs alike."""
    _, teacher = with_templates(tokenizers)
    said = CHAT[1] | {"content": texts[1]}
    examples = [Example(texts[0] + texts[1], context=len(texts[0])), Example([CHAT[0], said]),
                Example(texts[0], context=len(texts[0])), None]
    batch = Collator(teacher, [PairOptions(teacher)] * 2)(examples)
    generator = torch.Generator().manual_seed(0)
    shape = *batch.student.ids.shape, len(teacher.table)
    of_teachers = []
    for asked in batch.teachers:
        logits = 5 * torch.randn(shape, generator=generator)
        scores = sample_scores(StoredLogits(logits.flatten(0, 1)), asked)
        logp = logits.double().log_softmax(-1)
        for number in range(2):
            nats = size = 0
            for position, token in enumerate(batch.student.labels[number].tolist()):
                if token >= 0 and not teacher.table.special[token]:
                    nats -= float(logp[number, position, token])
                    size += len(teacher.table.bytes_of(token))
            assert len(texts[1]) <= size < len(texts[1]) + 8
            assert float(scores[number]) == pytest.approx(-nats / size, rel=1e-5)
        assert scores[3] == -torch.inf
        of_teachers.append(scores)
    assert teacher_weights(torch.stack(of_teachers))[:, 2].tolist() == [0.5, 0.5]


def test_a_route_of_none_goes_to_the_teachers_without_routes(encoders, texts):
    """An empty cell of the column; an example without a column is for every teacher."""
    examples = [Example(texts[0], None), Example(texts[1]), Example(texts[2], "a")]
    batch = routed_batch(encoders, examples, ["a"], None, None)
    assert [samples_of(teacher) for teacher in batch.teachers] == [[1, 2], [0, 1], [0, 1]]
    batch = routed_batch(encoders, examples, ["a"], ["b"])  # all teachers have routes
    assert [samples_of(teacher) for teacher in batch.teachers] == [[1, 2], [1]]
    assert (batch.student.labels >= 0).any(1).all()  # it is still learned from as text
    batch = routed_batch(encoders, examples, None)
    assert samples_of(batch.teachers[0]) == [0, 1, 2]


def test_a_chat_goes_to_the_teachers_that_it_is_for(tokenizers):
    student, teacher = with_templates(tokenizers)
    pairs = [PairOptions(teacher, routes=["a"]), PairOptions(teacher)]
    counts = Collator(student, pairs)([Example(CHAT, "a")]).counts
    alone = collator((student, teacher))([CHAT]).counts
    assert counts.pairs == [alone.pairs[0], PairCounts()]  # not for it, and so not skipped


# --- packing --------------------------------------------------------------------------------------


def test_rows_hold_what_fits_on_every_side():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = torch.randint(1, 12, (9, 3), generator=generator).tolist()
        limits = torch.randint(11, 30, (3,), generator=generator).tolist()
        rows = pack_rows(sizes, limits)
        assert sorted(itertools.chain(*rows)) == list(range(9))
        for line, row in enumerate(rows):
            assert row == sorted(row)
            for side, limit in enumerate(limits):
                assert sum(sizes[number][side] for number in row) <= limit
            # the first sample of a row had no room in any row before it
            for before in rows[:line]:
                earlier = [number for number in before if number < row[0]]
                totals = [sum(sizes[number][side] for number in [*earlier, row[0]])
                          for side in range(3)]
                assert any(total > limit for total, limit in zip(totals, limits))


@pytest.mark.parametrize("lengths", [(150, 400), (400, 90)])
def test_packed_samples_are_what_they_are_alone(encoders, texts, lengths):
    student, teacher = map(at_most, encoders, lengths)
    samples = [*[text[: 30 + 25 * n] for n, text in enumerate(texts[:7])], None, ""]
    packed = collator((student, teacher), pack=True)(samples)
    plain = collator((student, teacher))(samples)
    assert packed.counts == plain.counts
    assert 1 < len(packed.student.ids) < len(samples)
    assert packed.student.ids.shape[1] <= lengths[0]
    assert packed.teachers[0].ids.shape[1] <= lengths[1]
    of_packed, of_plain = packed.teachers[0], plain.teachers[0]
    assert of_packed.num_samples == len(samples)
    sides = ((packed.student, plain.student, of_packed.sample_of_student),
             (of_packed, of_plain, of_packed.sample))
    seen = 0
    for number in range(len(samples)):
        for in_packed, in_plain, sample in sides:
            size = int((in_plain.labels[number] >= 0).sum())
            kept_positions = (sample == number).nonzero().flatten()[:size]
            for name in STUDENT_FIELDS:
                assert torch.equal(getattr(in_packed, name).flatten()[kept_positions],
                                   getattr(in_plain, name)[number, :size])
            assert in_packed.positions.flatten()[kept_positions].tolist() == list(range(size))
            seen += size
    assert seen == (packed.student.labels >= 0).sum() + (of_packed.labels >= 0).sum()


# --- counts ---------------------------------------------------------------------------------------


def test_counts_survive_their_vector_and_add_up(encoders, texts):
    student, teacher = encoders
    for pairs in ([], [PairOptions(teacher)], [PairOptions(teacher), PairOptions(student)]):
        collate = Collator(student, pairs)
        first, second = collate(texts[:3]).counts, collate(texts[3:5]).counts
        assert second.with_numbers(first.numbers()) == first
        assert first + second == collate(texts[:5]).counts
        assert len(first.pairs) == len(pairs)
        numbers = list(range(len(first.numbers())))  # no two fields are the same
        assert first.with_numbers(numbers).numbers() == numbers
    with pytest.raises(ValueError):
        Counts(pairs=[PairCounts()]) + Counts()  # of other teachers


@pytest.mark.parametrize("loss", [None, "chunks", "piece_kl"])
def test_tiles_hold_every_label_and_every_term_once_whatever_their_size(
        encoders, texts, loss):
    student, teacher = encoders
    spelling = translation_of(encoders) if loss == "piece_kl" else None
    pairs = [PairOptions(teacher, spelling)] if loss else []
    whole = Collator(student, pairs)(texts[:5])
    for pack, tile_mib in ((False, math.inf), (False, 0.25), (True, math.inf), (True, 0.25)):
        batch = Collator(student, pairs, pack=pack, tile_mib=tile_mib)(texts[:5])
        assert batch.counts == whole.counts
        tiles = batch.teachers[0].tiles if loss else batch.student.tiles
        assert (len(tiles) > 1) == (tile_mib < math.inf)
        terms = 0
        positions = []
        for tile in tiles:
            positions += tile.student_positions.tolist()
            for sub_tile in tile.sub_tiles:
                labels = batch.student.labels.flatten()[
                    tile.student_positions[sub_tile.student_slice]]
                learned = sub_tile.student_labels >= 0
                assert torch.equal(labels[learned], sub_tile.student_labels[learned])
                if loss == "piece_kl":
                    terms += len(sub_tile.terms.row_A)
                else:
                    terms += len(sub_tile.terms.first_S) if loss else int(learned.sum())
        assert terms == (batch.counts.pairs[0].kd_terms if loss else batch.counts.tokens) > 0
        assert len(set(positions)) == len(positions)
        learned = (batch.student.labels.flatten() >= 0).nonzero().flatten().tolist()
        assert set(learned) <= set(positions)


def test_counts_are_those_of_the_tensors(encoders, texts):
    batch = collator([at_most(encoder, 60) for encoder in encoders])([*texts[:4], "é"])
    teacher = batch.teachers[0]
    counts = batch.counts.pairs[0]
    assert batch.counts.tokens == (batch.student.labels >= 0).sum()
    text_bytes = 0
    for labels in batch.student.labels:
        # a text without a space in front gets one from this tokenizer
        text_bytes += len(encoders[0].table.decode(labels[labels >= 0].tolist())) - 1
    assert batch.counts.text_bytes == text_bytes
    assert counts.aligned_tokens == (teacher.student_chunk >= 0).sum()
    assert counts.aligned_bytes == batch.student.num_bytes[
        (teacher.student_chunk >= 0) & (batch.student.num_bytes > 0)].sum()
    chunks = find_chunks(teacher.student_chunk, teacher.teacher_chunk)
    assert counts.kd_terms == len(chunks.first_S)
    # those below speak of whole texts
    assert counts.source_bytes == sum(len(text.encode()) for text in [*texts[:4], "é"])
    shapes = [getattr(counts, f"chunks_{shape}") for shape in ("1_1", "1_n", "n_1", "n_m")]
    assert sum(shapes) == counts.chunks > counts.kd_terms
    rest = inside = 0
    for text in [*texts[:4], "é"]:
        [pair] = sample_of(text, encoders[0], encoders[1:]).pairs
        alignment = pair.alignment
        for chunk in set(alignment.student_chunk.tolist()) - {-1}:
            num_S = (alignment.student_chunk == chunk).sum()
            num_T = (alignment.teacher_chunk == chunk).sum()
            inside += num_S
            rest += (num_S - 1) * (num_S > 1 and num_T > 1)
    assert counts.rest_tokens == rest > 0 and counts.tokens_in_chunks == inside


def test_tokens_outside_of_their_cell_are_counted(encoders, texts):
    """At the first token of a chunk: the cell of the student's token, and that of the teacher's."""
    tables = translation_of(encoders)
    tables.cell_W[::7] = 0
    batch = Collator(encoders[0], [PairOptions(encoders[1], tables)])(texts[:20])
    chunks = find_chunks(batch.teachers[0].student_chunk, batch.teachers[0].teacher_chunk)
    student = batch.student.labels.flatten()[chunks.first_S]
    teacher = batch.teachers[0].labels.flatten()[chunks.first_T]
    misplaced = sum(int(tables.cell_V[v] != tables.cell_W[w]) for v, w in zip(student, teacher))
    counts = batch.counts.pairs[0]
    assert counts.roots == len(student) and counts.misplaced_roots == misplaced > 0
    assert counts.metrics()["misplaced_roots"] == misplaced / len(student)


def test_counts_of_one_tokenizer_say_that_all_is_aligned(encoders, texts):
    student = encoders[1]  # the other one splits a space off the first word, as one chunk of 2:2
    counts = collator((student, student))(texts[:4]).counts
    metrics = counts.pairs[0].metrics()
    assert metrics == {
        "aligned_bytes": 1, "aligned_tokens": 1, "skipped_chats": 0, "normalized_bytes": 0,
        "unencodable_bytes": 0, "unmatched_bytes": 0, "chunks_1_1": 1, "chunks_1_n": 0,
        "chunks_n_1": 0, "chunks_n_m": 0, "rest_tokens": 0}
    # no text, no fraction of it
    assert PairCounts().metrics() == dict.fromkeys(metrics) | {"skipped_chats": 0}


def test_samples_that_are_cut_before_their_first_label_are_counted(encoders, texts):
    """A prompt as long as the limit leaves nothing to learn; an empty text teaches nothing."""
    long, short = texts[0], texts[1][:20]
    examples = [Example(long + " end", context=len(long)), Example(short + " end", context=5),
                Example(short), Example(""), None]
    for pairs in ([], [PairOptions(encoders[1])]):
        student = replace(encoders[0], max_length=12)
        batch = Collator(student, pairs)(examples)
        assert (batch.counts.samples, batch.counts.cut_samples) == (3, 1)
        assert (batch.student.labels[[0, 3, 4]] < 0).all()
        assert (batch.student.labels[1:3] >= 0).any(1).all()
        shards = [Collator(student, pairs, sequence_rank=rank, sequence_size=2)(examples).counts
                  for rank in range(2)]
        assert [(shard.samples, shard.cut_samples) for shard in shards] == [(3, 1), (0, 0)]
        whole = Collator(encoders[0], pairs)(examples)
        assert (whole.counts.samples, whole.counts.cut_samples) == (3, 0)


# --- aligners -------------------------------------------------------------------------------------


def test_dynamic_programming_gives_the_chunks_of_bytes_where_both_apply(encoders):
    by_bytes, by_path = [collator(encoders, aligner=aligner)(["is a number", "2010"])
                         for aligner in ("bytes", "dp")]
    for name in ("student_chunk", "teacher_chunk"):
        one, other = [getattr(batch.teachers[0], name)[0] for batch in (by_bytes, by_path)]
        # the end of the teacher's texts is their beginning too, as which it is compared
        assert torch.equal(one[:-1], other[:-1]) and (other >= 0).any()
    # `align_dp` counts what the student spells, a space before "2010" included
    counts = [batch.counts.pairs[0].aligned_bytes for batch in (by_bytes, by_path)]
    assert counts[1] == counts[0] + 1


# --- sequence shards ------------------------------------------------------------------------------


def shards_of(encoders, samples, size, spelling=None, teachers=1, **options):
    """Return the Batch of every rank of a sequence group."""
    student, teacher = encoders
    pairs = [PairOptions(teacher, spelling) for _ in range(teachers)]
    collate = Collator(student, pairs, **options)
    return [replace(collate, sequence_rank=rank, sequence_size=size)(samples, range(len(samples)))
            for rank in range(size)]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_shards_side_by_side_are_the_whole_batch(encoders, texts, pack, size):
    spelling = translation_of(encoders)
    for tables, teachers, tile_mib in ((None, 1, math.inf), (spelling, 2, 0.25), (None, 0, 0.25)):
        options = dict(spelling=tables, teachers=teachers, pack=pack, tile_mib=tile_mib)
        [whole] = shards_of(encoders, texts[:4], 1, **options)
        shards = shards_of(encoders, texts[:4], size, **options)
        width = whole.student.ids.shape[1]
        joined = {name: torch.cat([getattr(shard.student, name) for shard in shards], 1)
                  for name in (*STUDENT_FIELDS, "positions")}
        for name in STUDENT_FIELDS:
            assert torch.equal(joined[name][:, :width], getattr(whole.student, name))
        assert joined["ids"].shape[1] < width + size
        assert (joined["labels"][:, width:] == -100).all()
        assert (joined["num_bytes"][:, width:] == -1).all()
        expected = whole.student.positions
        if not pack:
            expected = torch.arange(width).expand(len(whole.student.ids), width)
        assert torch.equal(joined["positions"][:, :width], expected)
        # every term is counted by one rank
        assert sum((shard.counts for shard in shards[1:]), shards[0].counts) == whole.counts
        for shard in shards:
            assert shard.student.documents == document_spans(joined["positions"])
            assert shard.sample_ids == whole.sample_ids
            for of_shard, of_whole in zip(shard.teachers, whole.teachers):
                assert same(of_shard, of_whole, STUDENT_FIELDS)  # teachers read whole sequences
                assert of_shard.num_samples == 4
        for number, of_whole in enumerate(whole.teachers):
            # each chunk of the teacher's is kept by one rank, which computes it
            kept = [shard.teachers[number].teacher_chunk for shard in shards]
            assert torch.equal(sum((chunk >= 0).int() for chunk in kept),
                               (of_whole.teacher_chunk >= 0).int())


@pytest.mark.parametrize("pack", [False, True])
def test_shards_know_the_samples_of_their_positions_and_of_the_halo(encoders, texts, pack):
    """The halo are the positions beyond a shard, each of which one rank holds."""
    [whole], shards = (shards_of(encoders, texts[:4], size, pack=pack, tile_mib=0.25)
                       for size in (1, 3))
    num_rows, width = whole.student.ids.shape
    expected = whole.teachers[0].sample_of_student.view(num_rows, width)
    halo = torch.full((len(shards[0].teachers[0].halo_index),), -1)
    by_rank = []
    for shard in shards:
        teacher = shard.teachers[0]
        num_local = shard.student.ids.numel()
        by_rank.append(teacher.sample_of_student[:num_local].view(num_rows, -1))
        holds = teacher.halo_index >= 0
        halo[holds] = teacher.sample_of_student[teacher.halo_index[holds]]
    assert torch.equal(torch.cat(by_rank, 1)[:, :width], expected)
    assert len(halo) and (halo >= 0).all()
    for shard in shards:
        appended = shard.teachers[0].sample_of_student[shard.student.ids.numel() :]
        # of the halo, a rank names what it owns; positions that it holds itself are in its shard
        owned = torch.zeros(len(halo), dtype=torch.bool)
        for tile in shard.teachers[0].tiles:
            beyond = tile.student_positions - shard.student.ids.numel()
            owned[beyond[beyond >= 0]] = True
        assert torch.equal(appended[owned], halo[owned])


# --- the loss of cut texts ------------------------------------------------------------------------


def translated_of(batches, tables, student_VV, teacher_NTW):
    """Return (sum over batches, its gradient by student_VV, terms).

    Args:
        student_VV: the student's row where it predicts a token.
        teacher_NTW: the teacher's row at a position of a text; NaN at those that predict nothing.
    """
    student_VV = student_VV.clone().requires_grad_()
    total, count = 0, 0
    for batch in batches:
        teacher = batch.teachers[0]
        every_row = rows_of(teacher, teacher_NTW, batch.sample_ids)
        every_row[teacher.labels.flatten() < 0] = torch.nan
        for _, sub_tile, rows_MW in sub_tiles_of(teacher, every_row):
            student_MV = student_VV[sub_tile.student_labels.clamp(min=0)]
            nats, terms = translated(student_MV[None], rows_MW[None], sub_tile.terms, tables)
            total, count = total + nats, count + int(terms)
    total.backward()
    assert count == sum(batch.counts.pairs[0].kd_terms for batch in batches)
    return total.detach(), student_VV.grad, count


@pytest.mark.parametrize(("limit", "step"), [(9, -1), (16, 1), (400, -1), (400, 1)])
def test_the_loss_of_a_cut_text_is_the_same_in_every_layout(encoders, texts, limit, step):
    """Micro-batches of any size and order, packed or not, in shards, tiles, beside empty samples.

    Nothing asks the teacher behind the end of a text, where there is padding in some layouts and
    no row in others.
    """
    encoders = encoders[::step]  # -1: the student's tokens are longer
    translation = translation_of(encoders)
    encoders[0] = at_most(encoders[0], limit)
    samples = [texts[0], texts[1][:30], texts[2], "", None, texts[4]]
    generator = torch.Generator().manual_seed(0)
    V, W = len(translation.cell_V), len(translation.cell_W)
    student_VV = torch.randn(V, V, generator=generator, dtype=torch.float64)
    teacher_NTW = 3 * torch.randn(len(samples), 400, W, generator=generator, dtype=torch.float64)

    def loss_of(groups, **options):
        collate = Collator(encoders[0], [PairOptions(encoders[1], translation)], **options)
        batches = [collate([samples[n] for n in group], group) for group in groups]
        return translated_of(batches, translation, student_VV, teacher_NTW)

    numbers = list(range(len(samples)))
    total, gradient, count = loss_of([[number] for number in numbers])
    assert count > 30
    layouts = [
        ([numbers], {}), ([numbers[::-1]], {"tile_mib": 0.25}),
        ([numbers[:2], numbers[2:4], numbers[4:]], {}), ([numbers], {"pack": True})]
    results = [loss_of(groups, **options) for groups, options in layouts]
    for size, pack in ((2, False), (3, True)):
        shards = [loss_of([numbers], sequence_rank=rank, sequence_size=size, pack=pack)
                  for rank in range(size)]
        results.append([sum(of_shards) for of_shards in zip(*shards)])
    for of_layout in results:
        torch.testing.assert_close(of_layout[0], total)
        torch.testing.assert_close(of_layout[1], gradient)
        assert of_layout[2] == count
