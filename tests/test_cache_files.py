"""Numbers in few bits, the bytes they take, and looking texts up."""

import math
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import save

from isogloss.data.options.text_keys import text_key
from isogloss.errors import DataError
from isogloss.teachers import cache_files, packed_rows
from isogloss.teachers.text_scores import truncate


@pytest.mark.parametrize("vocab", [2, 300, 65_536, 65_537, 151_646, 262_144])
@pytest.mark.parametrize("top_k", [1, 7, 16])
def test_ids_come_back_whatever_the_vocabulary(vocab, top_k):
    generator = torch.Generator().manual_seed(vocab)
    ids = torch.randint(vocab, (9, top_k), generator=generator, dtype=torch.int32)
    ids[0, 0] = vocab - 1
    packed = cache_files.pack_ids(ids, vocab)
    assert torch.equal(cache_files.unpack_ids(packed["low"], packed["high"]), ids)


def test_log_probabilities_are_off_by_half_a_step_at_most():
    logp = -torch.rand(50, 8, generator=torch.Generator().manual_seed(0)) * 40
    logp[0, :3] = torch.tensor([0.0, -63.0, -math.inf])
    back = cache_files.unpack_logp(cache_files.pack_logp(logp))
    assert (back - logp.clamp(min=-63.9)).abs().max() <= 0.15  # the end of the scale
    finite = logp > -60
    assert (back - logp)[finite].abs().max() <= 1 / 2048 + 1e-6


@pytest.mark.parametrize("vocab", [600, 151_646])
def test_packed_rows_come_back_to_half_a_step(vocab):
    """Steps are as fine as a token is relevant; a row may keep one token alone."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(40, vocab, generator=generator)
    logits[0, 7] += 100
    logp, ids = logits.log_softmax(-1).topk(64)
    # no token is more relevant than its share of all that begin as it does
    factor = 1 + torch.rand(40, 64, generator=generator) * (1 / logp.exp() - 1).clamp(max=1e9)
    factor[:20] = 1
    steps = packed_rows.steps_of(logp, factor)
    order = packed_rows.order_of_use(ids, steps, vocab)
    assert order.sort().values.tolist() == list(range(vocab))
    packed = packed_rows.pack(ids, steps, order)
    back_ids, back_logp = packed_rows.unpack(packed, order, 40, 70)
    p = torch.zeros(40, vocab + 1).scatter_(1, back_ids.long() % (vocab + 1), back_logp.exp())
    error = (p.gather(1, ids) - logp.exp()).abs()
    step = 1 / packed_rows.STEPS / factor
    step[20:] *= 2  # of a power of 2
    assert (error <= 0.6 * step + 1e-6 * logp.exp()).all()
    assert (back_ids >= 0).sum() == (steps > 0).sum() and back_ids[0].tolist() == [7] + 69 * [-1]


def test_what_is_not_packed_joins_the_rest():
    """But for the text's own token, which is kept beside the others."""
    scored, labels = scored_rows(40, 39)
    columns = cache_files.top_k_columns(scored, 40, 8)
    order = packed_rows.order_of_use(columns["ids"], columns["steps"], 40)
    packed = packed_rows.pack(columns.pop("ids"), columns.pop("steps"), order)
    columns["ids"], columns["logp"] = packed_rows.unpack(packed, order, 6, 39)
    assert (columns["ids"] < 0).any()
    back = cache_files.scored_logits(columns, labels, 40)
    total = back.logits(torch.arange(6)).logsumexp(-1) - back.logits.total_T
    assert total.abs().max() < 0.02  # of 16 bits
    p = back.logits._replace(total_T=None)(torch.arange(6)).exp().sum(-1)
    torch.testing.assert_close(p, torch.ones(6), atol=40 / packed_rows.STEPS, rtol=0)
    assert torch.equal(back.scores.logp_T, scored.scores.logp_T)


def scored_rows(vocab, top_k, temperature=1.0):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, vocab, generator=generator)
    labels = torch.randint(vocab, (6,), generator=generator)
    return truncate(logits, top_k, labels, temperature), labels


@pytest.mark.parametrize(("vocab", "top_k", "logp_bits", "temperature"), [
    (14_019, 256, 16, 1.0), (151_646, 256, 16, 1.0), (151_646, 13, 32, 2.0), (40, 64, 16, 1.0)])
def test_the_stated_bytes_are_those_of_the_file_and_labels_come_back(
        vocab, top_k, logp_bits, temperature):
    scored, labels = scored_rows(vocab, top_k, temperature)
    plain = None if temperature == 1 else torch.zeros(6)
    for drawn in (None, torch.zeros(6)):
        columns = cache_files.top_k_columns(scored, vocab, logp_bits, plain, drawn)
        # of the label nothing is rounded, however it is stored
        back = cache_files.scored_logits(columns, labels, vocab)
        assert torch.equal(back.logits.logp_TK[:, -1], scored.scores.logp_T)
        size = sum(tensor.nbytes for tensor in columns.values()) / 6 + 4  # an id
        assert size == cache_files.bytes_per_position(
            "topk", vocab, top_k, logp_bits=logp_bits, hidden_bytes=0,
            softened=temperature != 1, sampled=drawn is not None)
        if top_k == 256:
            assert size <= 1200
    hidden = torch.zeros(6, 8, dtype=torch.bfloat16)
    assert hidden.nbytes / 6 + 4 == cache_files.bytes_per_position("hidden", vocab, hidden_bytes=16)
    assert save(columns)


def test_texts_are_told_apart_by_all_that_a_teacher_reads():
    chat = [{"role": "user", "content": "a"}]
    keys = [text_key("a"), text_key("a "), text_key(chat), text_key(chat, [{"name": "f"}]),
            text_key([{"role": "system", "content": "a"}]), text_key("\ud800")]
    assert len({key.tobytes() for key in keys}) == len(keys)
    assert np.array_equal(text_key("a"), keys[0])


def test_a_shard_that_a_disk_has_no_room_for_is_named_and_takes_none(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"shard-00000.*cannot be written .*File too large"):
            cache_files.write_tensors(path, {"logp": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    cache_files.write_tensors(path, {"logp": torch.zeros(1000)})
    assert path.exists()
