"""What the student writes, read back: prompts, sampled ids, and what the teachers see of them."""

import contextlib
import dataclasses
import json
import math
import types

import numpy as np
import pytest
import torch

from isogloss.align import TokenTable
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.batch_types import Batch, Example, StudentBatch
from isogloss.data.rollouts import Prompter, Rollout, SkippedPrompt, completed
from isogloss.data.sample import TextEncoder
from isogloss.errors import EngineError
from isogloss.job.counts import Counts
from isogloss.rollout import Completion
from isogloss.translation import CellColumns, going_on, root_target
from isogloss.writing import on_policy
from isogloss.writing.rollout_ratio import RatioSums, rollout_ratio
from test_batch import rows_of, sub_tiles_of
from test_chat import collator
from test_ends import CHATML
from tokens import translation_of

TEXT = "Once there was a crème brûlée, and 12.50 € on the table."


@pytest.fixture(scope="module")
def encoders(tokenizers, tables):
    return [TextEncoder(*pair, 250) for pair in zip(tokenizers, tables, strict=True)]


def prompter(encoder, **changes):
    options = dict(seed=0, share=0.5, samples_per_step=8, prompt_tokens=6, rollout_tokens=40)
    return Prompter(encoder, **options | changes)


def sampled(encoder, prompt, ids, ended=False):
    """Return the Rollout of a prompt that goes on with some ids."""
    ids = torch.tensor(ids, dtype=torch.long)
    logp = -torch.arange(1.0, len(ids) + 1)
    return completed(prompt, Completion(ids, logp, torch.ones(len(ids)), ended), encoder)


def rollout_of(encoder, text, size, ended=True):
    """Return a text as if the student had written all but its first `size` tokens."""
    prompt = prompter(encoder, prompt_tokens=size).prompt(Example(text), (0, 0))
    ids, = encoder.encode([text])
    ids = ids[len(prompt.ids) :]
    return sampled(encoder, prompt, ids if ended else ids[:-1], ended)


# --- which samples --------------------------------------------------------------------------------


def test_the_share_of_rollouts_depends_on_the_position_alone(encoders):
    chosen = []
    for samples_per_step in (8, 16):
        of = prompter(encoders[0], share=0.3, samples_per_step=samples_per_step)
        chosen.append([of.slot(position) is not None for position in range(4000)])
    assert chosen[0] == chosen[1]
    assert abs(sum(chosen[0]) / 4000 - 0.3) < 4 * (0.21 / 4000) ** 0.5
    assert all(prompter(encoders[0], share=1.0).slot(position) for position in range(50))
    other_seed = prompter(encoders[0], share=0.3, seed=1)
    assert chosen[0] != [other_seed.slot(position) is not None for position in range(4000)]


def test_steps_and_neighbors_share_prompts(encoders):
    of = prompter(encoders[0], share=1.0, per_prompt=4, every=3)
    for step in range(7):
        for place in range(8):
            slot = of.slot(step * 8 + place)
            first = step - step % 3
            assert slot == (first * 8 + place - place % 4, place % 4, step == first)


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_is_the_beginning_of_a_text(encoders):
    """Of whole characters; of a short text half is the prompt, a column of prompts is taken whole.
    """
    for encoder in encoders:
        ids, = encoder.encode([TEXT])
        for size in range(1, 30):
            prompt = prompter(encoder, prompt_tokens=size).prompt(Example(TEXT), (3, 1))
            assert np.array_equal(prompt.ids, ids[: len(prompt.ids)])
            assert TEXT.startswith(prompt.text)
            assert encoder.table.decode(prompt.ids).decode().strip() == prompt.text.strip()
            assert prompt.max_new_tokens == 40
        short, = encoder.encode([TEXT[:20]])
        prompt = prompter(encoder, prompt_tokens=30).prompt(Example(TEXT[:20]), (0, 0))
        assert 0 < len(prompt.ids) < len(short) - 2
        assert prompter(encoder).prompt(Example("not this", prompt=TEXT), (0, 0)).text == TEXT


def test_rollouts_stay_within_max_length(encoders):
    encoder = TextEncoder(encoders[0].tokenizer, encoders[0].table, 30)
    of = prompter(encoder, rollout_tokens=40)
    prompt = of.prompt(Example(TEXT), (0, 0))
    assert len(prompt.ids) + prompt.max_new_tokens == 31  # n positions predict n tokens
    with pytest.raises(SkippedPrompt, match="leaves no room"):
        of.prompt(Example("", prompt=TEXT * 5), (0, 0))


# --- what the teachers see ------------------------------------------------------------------------


def chunks_of(batch):
    """Return {(last bytes)}: student and teacher labels of every chunk of a batch of one."""
    teacher = batch.teachers[0]
    found = []
    for chunk in sorted(set(teacher.student_chunk[teacher.student_chunk >= 0].tolist())):
        student = batch.student.labels[teacher.student_chunk == chunk].tolist()
        found.append((student, teacher.labels[teacher.teacher_chunk == chunk].tolist()))
    return found


@pytest.mark.parametrize("swap", [False, True])
def test_a_rollout_of_the_tokenizers_ids_is_the_end_of_the_text(encoders, swap):
    """Its chunks are those of the text that lie wholly behind the prompt, its end included."""
    student, teacher = reversed(encoders) if swap else encoders
    collate = collator((student, teacher))
    of_text = chunks_of(collate([TEXT]))
    for size in (3, 8, 15):
        rollout = rollout_of(student, TEXT, size)
        batch = collate([rollout])
        found = chunks_of(batch)
        num_tokens = sum(len(chunk[0]) for chunk in found)
        assert num_tokens <= len(rollout.ids)
        assert found == of_text[len(of_text) - len(found) :]
        # the chunk before them holds a byte of the prompt
        before = of_text[len(of_text) - len(found) - 1]
        assert num_tokens + len(before[0]) > len(rollout.ids)
        assert found[-1][0] == [student.table.eos]
        assert batch.counts.ce_tokens == 0
        assert batch.counts.tokens == len(rollout.ids)
        # one that was cut has no end
        cut = collate([rollout_of(student, TEXT, size, ended=False)])
        assert chunks_of(cut) == found[:-1]
        assert not (cut.teachers[0].labels == teacher.table.eos).any()


# --- the translated belief at what was written first ----------------------------------------------


@pytest.fixture(scope="module")
def pairs(encoders):
    """{swap: (student's encoder, PairOptions with the translation)}."""
    return {swap: (sides[0], PairOptions(sides[1], translation_of(sides)))
            for swap, sides in ((False, encoders), (True, encoders[::-1]))}


def root_targets(batch, tables):
    """Return {(sample, its position): what the teacher's belief is there}, and every lambda.

    The teacher's row is random, a function of the position in its text.
    """
    teacher = batch.teachers[0]
    generator = torch.Generator().manual_seed(0)
    logits_PW = 3 * torch.randn(300, len(tables.cell_W), generator=generator)
    logits_TW = rows_of(teacher, logits_PW[None], [0] * teacher.num_samples)
    targets, going = {}, {}
    columns_W = CellColumns.of(tables).columns_W
    for positions, sub_tile, y_MW in sub_tiles_of(teacher, logits_TW):
        goes = going_on(y_MW, sub_tile.terms.continuations, tables)
        cell_NC = root_target(y_MW, sub_tile.terms, goes, tables, columns_W).cell_NC
        row_S = positions[sub_tile.terms.roots.row_S]
        sample = teacher.sample_of_student[row_S]
        first = torch.searchsorted(teacher.sample_of_student, sample)
        for number, key in enumerate(zip(sample.tolist(), (row_S - first).tolist())):
            targets[key] = cell_NC[number]
            going[key] = 1 - float(goes.ends_K[number])
    return targets, going


@pytest.mark.parametrize("swap", [False, True])
def test_the_first_written_token_has_the_target_that_data_gives_it(pairs, texts, swap):
    """Also how the teacher's token in front of it would have gone on, which the prompt tells.

    However the batch is packed and cut into tiles; and nothing is asked about the prompt.
    """
    student, pair = pairs[swap]
    text = texts[0][:300]
    expected, _ = root_targets(Collator(student, [pair])([text]), pair.spelling)
    num_going = 0
    for size in range(1, 40, 3):
        rollout = rollout_of(student, text, size)
        for options in ({}, {"pack": True}, {"pack": True, "tile_mib": 0.02}):
            collator = Collator(student, [pair], **options)
            # packed between others: what stands in front of a text is not part of it
            samples = ["another", rollout, "third"] if options else [rollout]
            number = samples.index(rollout)
            targets, going = root_targets(collator(samples), pair.spelling)
            written = {key[1]: value for key, value in targets.items() if key[0] == number}
            first = min(written)
            assert first >= len(rollout.prompt.ids) - 1
            assert set(written) == {place for _, place in expected if place >= first}
            for place, target in written.items():
                assert torch.equal(target, expected[0, place]), (size, options, place)
        num_going += going[number, first] > 0
    # for the byte-level student no teacher token begins another one: nothing to go on with
    assert num_going > 2 or swap


def test_all_choices_are_asked_of_what_the_student_wrote(pairs, texts):
    """Of data none here, where the tables say that the teacher's tokens cross everywhere."""
    student, pair = pairs[True]
    closed_V = torch.zeros_like(pair.spelling.closed_V)
    pair = dataclasses.replace(pair, spelling=pair.spelling._replace(closed_V=closed_V))
    for text, is_asked in ((texts[0], False), (rollout_of(student, texts[0], 8), True)):
        batch = Collator(student, [pair])([text])
        num_choices = sum(len(sub_tile.terms.choices.level)
                          for tile in batch.teachers[0].tiles for sub_tile in tile.sub_tiles)
        assert (num_choices > 0) == is_asked


def test_dynamic_programming_aligns_rollouts_too(encoders):
    collate = collator(encoders, aligner="dp")
    found = chunks_of(collate([rollout_of(encoders[0], TEXT, 8)]))
    assert found and set(map(str, found)) <= set(map(str, chunks_of(collate([TEXT]))))


def test_sampled_ids_are_learned_not_those_of_the_text(encoders):
    """Letter by letter where the tokenizer would have one token; some end inside a character."""
    encoder = encoders[1]  # byte level, so that any bytes are tokens
    prompt = prompter(encoder).prompt(Example(TEXT), (0, 0))
    byte_ids = {encoder.table.bytes_of(token): token for token in range(len(encoder.table))}
    ids = [byte_ids[bytes([byte])] for byte in " table€".encode()[:-1]]
    rollout = sampled(encoder, prompt, ids)
    assert rollout.text == " table\ufffd" and not rollout.is_canonical
    batch = collator(encoders[::-1])([rollout])
    first = len(prompt.ids) - 1
    labels = batch.student.labels[0]
    assert labels[first : first + len(ids)].tolist() == ids
    assert (labels[:first] == -100).all()
    chunk = batch.teachers[0].student_chunk[0]
    assert (chunk[first : first + 6] >= 0).all()  # " table" is compared
    assert (chunk[first + 6 : first + 8] == -1).all()  # half of a character is not


def test_a_teacher_with_the_same_tokenizer_reads_the_sampled_ids(encoders):
    """Whatever the tokenizer would make of their text, control tokens included."""
    encoder = encoders[1]
    prompt = prompter(encoder).prompt(Example(TEXT), (0, 0))
    ids = [17, 300, 300, encoder.table.eos, 5, 128, encoder.table.eos]
    collator = Collator(encoder, [PairOptions(encoder, same_tokenizer=True)])
    batch = collator([sampled(encoder, prompt, ids, ended=True)])
    assert torch.equal(batch.teachers[0].ids, batch.student.ids)
    assert chunks_of(batch) == [([token], [token]) for token in ids]
    assert batch.counts.pairs[0].kd_terms == len(ids)


def test_a_teacher_is_judged_by_what_was_written_of_a_text(encoders):
    """But for a token that reaches into it from the prompt, which counts as a whole."""
    rollout = rollout_of(encoders[0], TEXT, 8)
    size = len(rollout.text.encode())
    for pair, more in ((PairOptions(encoders[1]), 8),
                       (PairOptions(encoders[0], same_tokenizer=True), 0)):
        [teacher] = Collator(encoders[0], [pair])([rollout]).teachers
        assert size <= teacher.num_bytes.clamp(min=0).sum() <= size + more


def test_no_control_token_reaches_a_teacher(encoders):
    student = encoders[0]
    prompt = prompter(student).prompt(Example(TEXT), (0, 0))
    ids, = student.encode(["the end"])
    special = np.flatnonzero(student.table.special)[0]
    rollout = sampled(student, prompt, [*ids[1:-1], special, *ids[1:-1]])
    assert rollout.text.count("the end") == 2
    assert student.table.tokens[special] not in rollout.text
    teacher = collator(encoders)([rollout]).teachers[0]
    is_control = encoders[1].table.special[teacher.ids[0].numpy()]
    assert is_control.sum() <= 1  # its own bos


@pytest.mark.parametrize("pack", [False, True])
def test_what_was_written_stands_at_the_positions_that_predict_it(encoders, pack):
    """Log-probabilities, and tiles, which hold rollouts or data; the same after a way as JSON."""
    rollout = rollout_of(encoders[0], TEXT, 5)
    chat = dict(messages=[{"role": "user", "content": "Hm?"}], tools=[{"type": "function"}],
                taught=[{"role": "user", "content": "Hm? (Yes)"}])
    rollout.prompt = dataclasses.replace(rollout.prompt, **chat)
    read = Rollout.from_plain(json.loads(json.dumps(rollout.to_plain())))
    assert {name: getattr(read.prompt, name) for name in chat} == chat
    batches = []
    for written in (rollout, read):
        collate = collator(encoders, pack=pack, tile_mib=0.05)
        batches.append(collate([TEXT, written, TEXT[:30]]))
    batch, other = batches
    logp = batch.student.logp
    is_written = ~logp.isnan()
    assert torch.equal(batch.student.labels[is_written], torch.from_numpy(rollout.ids))
    assert torch.equal(logp[is_written], torch.from_numpy(rollout.logp))
    positions = {False: 0, True: 0}
    for tile in batch.teachers[0].tiles:
        for sub_tile in tile.sub_tiles:
            here = is_written.flatten()[tile.student_positions[sub_tile.student_slice]]
            has_label = sub_tile.student_labels >= 0
            assert (here[has_label] == sub_tile.on_policy).all()
            positions[sub_tile.on_policy] += int(has_label.sum())
    assert positions[True] == len(rollout.ids)
    assert positions[False] == batch.counts.ce_tokens
    assert batch.counts.tokens == sum(positions.values())
    assert torch.equal(batch.student.ids, other.student.ids)
    assert logp.nan_to_num().equal(other.student.logp.nan_to_num())
    assert batch.counts == other.counts


def test_counts_of_rollouts(encoders):
    rollout = rollout_of(encoders[0], TEXT, 5)
    data, both = [collator(encoders)(texts).counts.pairs[0] for texts in ([TEXT], [TEXT, rollout])]
    batch = collator(encoders)([rollout])
    alone = batch.counts.pairs[0]
    assert data.rollout_terms == data.rollout_bytes == data.rollout_nats == 0
    assert alone.rollout_terms == alone.kd_terms == both.rollout_terms
    assert alone.rollout_bytes == alone.aligned_bytes == both.rollout_bytes
    logp = batch.student.logp[batch.teachers[0].student_chunk >= 0]
    assert alone.rollout_nats == pytest.approx(-float(logp.sum()))
    assert both.rollout_nats == pytest.approx(alone.rollout_nats)


# --- chats ----------------------------------------------------------------------------------------

LLAMA = ("{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|eot_id|>{% endfor %}"
         "{% if add_generation_prompt %}[assistant] {% endif %}")
HEADER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "How much is it?"},
        {"role": "assistant", "content": "It is 12.50."}]


@pytest.fixture(scope="module")
def chat_encoders(texts):
    """Two encoders with chat templates and ends of turns of their own."""
    from isogloss import demo

    found = []
    for tokenizer, template, markers in (
            (demo.unigram(texts, 350), CHATML, ["<|im_start|>", "<|im_end|>"]),
            (demo.byte_level_bpe(texts, 500), LLAMA, ["<|eot_id|>"])):
        tokenizer.add_special_tokens({"additional_special_tokens": markers})
        tokenizer.chat_template = template
        found.append(TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 250))
    return found


def test_a_chat_goes_on_where_the_assistant_speaks(chat_encoders):
    student, teacher = chat_encoders
    prompt = prompter(student).prompt(Example(CHAT), (0, 0))
    answer = student.tokenizer("It is 12.50.", add_special_tokens=False)["input_ids"]
    rollout = sampled(student, prompt, [*answer, student.table.end_of_turn], ended=True)
    assert prompt.text.endswith("<|im_start|>assistant\n") and "12.50" not in prompt.text
    collate = collator(chat_encoders)
    found = chunks_of(collate([rollout]))
    # the same chunks as if the data had said so, the end of the turn included
    assert found == chunks_of(collate([CHAT]))
    assert found[-1] == ([student.table.end_of_turn], [teacher.table.end_of_turn])
    assert chunks_of(collate([sampled(student, prompt, answer)])) == found[:-1]


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("hint", [[{"role": "system", "content": "the solution"}],
                                  [{"role": "user", "content": "a?"},
                                   {"role": "assistant", "content": "b"}]])
def test_what_teachers_alone_read_stands_in_front_of_what_was_written(
        chat_encoders, is_same, hint):
    student, teacher = chat_encoders[0], chat_encoders[0 if is_same else 1]
    collate = Collator(student, [PairOptions(teacher, same_tokenizer=is_same)])
    answer = student.tokenizer("It is 12.50.", add_special_tokens=False)["input_ids"]
    batches = []
    for example in (Example(CHAT), Example(CHAT, teacher_prompt=tuple(hint))):
        prompt = prompter(student).prompt(example, (0, 0))
        rollout = sampled(student, prompt, [*answer, student.table.end_of_turn], ended=True)
        rollout = Rollout.from_plain(json.loads(json.dumps(rollout.to_plain())))
        batches.append(collate([rollout]))
    plain, hinted = batches
    assert torch.equal(plain.student.ids, hinted.student.ids)
    assert chunks_of(plain) == chunks_of(hinted)
    read = [teacher.tokenizer.decode(batch.teachers[0].ids[0]) for batch in batches]
    assert hint[0]["content"] in read[1] and hint[0]["content"] not in read[0]
    for batch in batches:  # it is judged by the answer alone
        assert batch.teachers[0].num_bytes.clamp(min=0).sum() == len(" It is 12.50.")


def test_the_first_token_of_an_answer_has_one_target_whatever_is_learned_of_the_chat(
        chat_encoders, monkeypatch):
    """Dynamic programming aligns the headers too, so that there is a chunk in front of it."""
    student, teacher = chat_encoders
    for encoder in chat_encoders:
        monkeypatch.setattr(encoder.tokenizer, "chat_template", HEADER)
    spelling = translation_of(chat_encoders)
    targets = {}
    for train_on in ("all", "assistant"):
        collator = Collator(student, [PairOptions(teacher, spelling)], train_on, "dp")
        targets[train_on], going = root_targets(collator([CHAT]), spelling)
    assert 0 < len(targets["assistant"]) < len(targets["all"])
    assert going[min(going)] > 0
    for place, target in targets["assistant"].items():
        assert torch.equal(target, targets["all"][place]), place


def test_the_prompt_of_a_chat_ends_where_its_last_answer_is_or_would_be(chat_encoders):
    of = prompter(chat_encoders[0])
    asked_last = of.prompt(Example([*CHAT, *CHAT[:1]]), (0, 0))
    assert asked_last.messages == [*CHAT, *CHAT[:1]]  # the last question is answered
    assert of.prompt(Example(CHAT[:1]), (0, 0)).text == of.prompt(Example(CHAT), (0, 0)).text
    with pytest.raises(SkippedPrompt, match="begins with the assistant"):
        of.prompt(Example(CHAT[1:]), (0, 0))
    whole = of.prompt(Example("", prompt=CHAT[:1]), (0, 0))  # a column of prompts has no answer
    assert whole.text == of.prompt(Example(CHAT), (0, 0)).text


# --- ends of turns --------------------------------------------------------------------------------


def test_the_students_end_of_turn_is_the_teachers_and_nothing_else(chat_encoders):
    """Paired with nothing, or with another token, answers would grow to the length limit."""
    tables = translation_of(chat_encoders)
    student, teacher = chat_encoders
    cell = tables.cell_V[student.table.end_of_turn]
    for cell_of_token, encoder in ((tables.cell_V, student), (tables.cell_W, teacher)):
        assert (cell_of_token == cell).nonzero().tolist() == [[encoder.table.end_of_turn]]
    assert cell < tables.num_cells - 1  # that of tokens that no text has


# --- ratios ---------------------------------------------------------------------------------------


def test_a_term_weighs_what_was_written_before_it():
    """Packed rows: a product over each sample's own written tokens, one by one."""
    nan = math.nan
    #                 prompt    written                 prompt written      data
    old = torch.tensor([[nan, nan, -1.0, -2.0, -0.5, nan, nan, -3.0, -1.0, nan, nan]])
    now = torch.tensor([[-9.0, -9.0, -0.5, -2.5, -0.1, -9.0, -9.0, -1.0, -4.0, -9.0, -9.0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]])
    batch = Batch(StudentBatch(old, old, old, positions, logp=old), [], Counts(), [])
    sums = RatioSums()
    cfg = types.SimpleNamespace(max_ratio=2.0)
    found, largest = rollout_ratio(cfg, batch, now, None, sums)
    expected = [1.0] * 11  # the third written token: exp(0.5 - 0.5)
    expected[8] = 2.0
    expected[3] = math.exp(0.5)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert (sums.count, sums.limited) == (5, 1)
    assert largest == pytest.approx(math.exp(2.0), rel=1e-6)
    # padding changes nothing, though the product behind the last written token is larger
    last = torch.tensor([[nan, -1.0, -4.0, nan]]), torch.tensor([[-9.0, -0.5, -1.0, -9.0]])
    for width in (3, 4):
        old, now = [x[:, :width] for x in last]
        batch = Batch(StudentBatch(old, old, old, None, logp=old), [], Counts(), [])
        _, largest = rollout_ratio(cfg, batch, now, None, RatioSums())
        assert largest == pytest.approx(math.exp(0.5), rel=1e-6)


def test_a_checkpoint_says_at_what_temperature_its_log_probabilities_are(encoders):
    """Without a word they are at temperature 1, and weigh nothing that was drawn at another."""
    rollout = dataclasses.replace(rollout_of(encoders[0], TEXT, 5), temperature=0.7)
    entry = json.loads(json.dumps(on_policy.WrittenExample(rollout, ...).to_plain(0)))
    cfg = types.SimpleNamespace(rollout_temperature=0.7)
    writer = on_policy.Writer(cfg, *[None] * 6)
    writer.load_state([entry])
    [written] = writer.written.values()
    assert written.rollout.temperature == 0.7
    del entry["rollout"]["temperature"]
    with pytest.raises(ValueError, match=r"rollouts say log-probabilities at temperature 1\.0"):
        writer.load_state([entry])
    cfg.rollout_temperature = 1.0
    writer.load_state([entry])


# --- the writer's weights -------------------------------------------------------------------------


def test_gaps_above_and_below_do_not_cancel(monkeypatch):
    """What is no token of the student's has no log-probability to compare.

    Nor has one that rounding leaves out of today's nucleus.
    """
    now = torch.tensor([[-0.5, -2.5, 0.0, -math.inf]])
    monkeypatch.setattr(on_policy, "current_logp", lambda *_: now)
    monkeypatch.setattr(on_policy, "global_sums", torch.as_tensor)
    monkeypatch.setattr(on_policy.dist, "all_reduce", lambda *_, **__: None)
    student = types.SimpleNamespace(logp=torch.tensor([[-1.0, -2.0, math.nan, -3.0]]))
    writer = types.SimpleNamespace(cfg=None, runner=None, device=torch.device("cpu"))
    metrics = on_policy.Writer.gap(writer, [types.SimpleNamespace(student=student)])
    assert metrics == {"rollout/logp_gap": 0.5, "rollout/logp_gap_max": 0.5}


@pytest.mark.parametrize("gap, ends", [(None, False), (0.3, False), (0.4, True), (math.nan, True)])
def test_a_gap_above_the_largest_or_no_number_ends_the_job(gap, ends):
    writer = types.SimpleNamespace(has_other_weights=lambda: True, reward_weight=0.0,
                                   gap=lambda _: {"rollout/logp_gap": gap})
    cfg = types.SimpleNamespace(max_logp_gap=0.3)
    state = types.SimpleNamespace(cfg=cfg, writer=writer)
    raises = pytest.raises(EngineError, match="other weights")
    with raises if ends else contextlib.nullcontext():
        on_policy.RolloutHook(state).before_step([types.SimpleNamespace(rollout_age=0)])
