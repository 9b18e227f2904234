"""Compare a student and its teacher token by token on held-out rows, for people to read.

Tests: tests/test_report.py.
"""

import math
from typing import NamedTuple

import torch

TOP = 5  # most likely tokens that are shown of each model


class ReadPiece(NamedTuple):
    """Hold a chunk of a text, or what no chunk holds.

    text: as the student spells it.
    bits: (student's, teacher's) of the chunk; None: it is not compared.
    guesses: (student's, teacher's) most likely first tokens of it, [(text, probability)].
    """

    text: str
    bits: tuple | None = None
    guesses: tuple = ()


@torch.no_grad()
def pieces_of(distillation, model, example):
    """Return the Pieces of an Example, in order.

    Args:
        distillation: `integrations.Distillation` of both tokenizers and the teacher.
        model: the student, on the device of the teacher.
    """
    batch = distillation.collator([example])
    student, teacher = batch.student, batch.teachers[0]
    if not student.ids.numel() or not teacher.ids.numel():
        return []
    device = model.device
    distillation.to(device)
    logits = model(input_ids=student.ids.to(device), use_cache=False).logits[0]
    num_tokens = [len(encoder.table) for encoder in (distillation.student, distillation.encoder)]
    logp_SV = logits[:, : num_tokens[0]].float().log_softmax(-1).cpu()
    source = distillation.setup.source.read(teacher.ids.to(device))
    positions = torch.arange(teacher.ids.numel(), device=device)
    logp_TW = source(positions)[:, : num_tokens[1]].float().log_softmax(-1).cpu()
    sides = [(logp_SV, student.labels[0], teacher.student_chunk[0]),
             (logp_TW, teacher.labels[0], teacher.teacher_chunk[0])]
    chunk = teacher.student_chunk[0].tolist()
    tokens = [int(student.ids[0, 0]), *following_tokens(student)]
    # of every run of positions with one chunk: its number, and where its tokens begin and end
    runs = [(-1, 0, 1)]
    for place, number in enumerate(chunk[: len(tokens) - 1], 1):
        if number == runs[-1][0] and place > 1:
            runs[-1] = number, runs[-1][1], place + 1
        else:
            runs.append((number, place, place + 1))
    pieces = []
    before = ""
    for number, _, end in runs:
        # as a part of what stands before it: alone it may lose its space
        whole = distillation.student.tokenizer.decode(tokens[:end])
        text = whole[num_common(before, whole):]
        before = whole
        if number < 0:
            pieces.append(ReadPiece(text))
            continue
        encoders = distillation.student, distillation.encoder
        bits, guesses = zip(*[of_chunk(side, number, encoder.table)
                              for side, encoder in zip(sides, encoders)])
        pieces.append(ReadPiece(text, bits, guesses))
    return pieces


def num_common(first, second):
    """Return how many characters two texts begin with alike: half a character may become whole."""
    count = 0
    for a, b in zip(first, second):
        if a != b:
            break
        count += 1
    return count


def following_tokens(student):
    """Return the tokens after the first one of a StudentBatch of one row, without its padding."""
    ids = student.ids[0, 1:].tolist()
    last = student.labels[0, -1].item()
    return ids if last == -100 else [*ids, last]


def of_chunk(side, number, table):
    """Return (bits of a chunk, most likely tokens at its first position) of one model.

    Args:
        side: (logp, labels, chunk of each predicted token); table: TokenTable.
    """
    logp, labels, chunk = side
    places = (chunk == number).nonzero().flatten()
    nats = -logp[places, labels[places]].sum()
    likely = logp[places[0]].topk(TOP)
    guesses = []
    for token, value in zip(likely.indices.tolist(), likely.values.exp().tolist()):
        spelled = table.bytes_of(token)
        guesses.append(((spelled or b"").decode(errors="replace"), value))
    return float(nats) / math.log(2), guesses
