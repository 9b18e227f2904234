"""evaluate.py against loops over tokens in float64, with whole and with top-k teacher outputs."""

import math

import pytest
import torch

import distill
import ranks
from isogloss.inputs import build_collator
from jobs import ds_config, job_for, write_corpus

TEXTS = ["The quick brown fox said hello to the 201 dogs.", "An index of the value, and its name."]


def evaluated(flags, texts):
    """Return the metrics of held-out texts, evaluated in one batch with a filler beside them."""
    state, inputs = job_for(flags)
    collator = build_collator(state.cfg, inputs, state.device)
    return distill.run_evaluation(state, [collator([*texts, None])])


def next_token_rows(model, tokenizer, table, text):
    """Return ([bos, *ids, eos], (tokens, V) float64 log-probabilities of all but the first)."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [table.bos, *ids, table.eos]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1, : len(table)]
    return ids, logits.double().log_softmax(-1)


def top_k_of(logp, k):
    """Keep the k most likely tokens; the others share the rest evenly."""
    if k is None:
        return logp
    rows = []
    for row in logp.exp():
        kept = sorted(range(len(row)), key=lambda i: -float(row[i]))[:k]
        rest = 1 - sum(float(row[i]) for i in kept)
        spread = torch.full_like(row, rest / (len(row) - k))
        for i in kept:
            spread[i] = row[i]
        rows.append(spread.log())
    return torch.stack(rows)


def model_metrics(sides, tables, which):
    """Compute bits per byte, accuracy and entropy of one model, token by token."""
    nats = size = correct = entropy = tokens = 0
    for side, text in zip(sides, TEXTS):
        ids, logp = side
        spelled = b"".join(tables[which].bytes_of(token) for token in ids[1:-1])
        size += len(spelled) - (len(spelled) - len(text.encode()))  # a prefix space is no text
        for row, token in zip(logp, ids[1:-1]):  # eos is not text
            nats -= float(row[token])
            correct += int(row.argmax()) == token
            entropy -= sum(math.exp(x) * x for x in row.tolist())
            tokens += 1
    return nats / size / math.log(2), correct / tokens, entropy / tokens


def chunk_starts(ids, table, lead):
    """Return {byte of the text: token that begins there}, the end of the text (eos) included."""
    byte = -lead
    starts = {}
    for number, token in enumerate(ids[1:], 1):
        starts[max(byte, 0)] = number
        if not table.special[token]:
            byte += len(table.bytes_of(token))
    return starts


def agreement(student_sides, teacher_sides, tables):
    """Compute the share of chunk starts where both most likely tokens have the same bytes."""
    agree = total = 0
    for (student_ids, student_logp), (teacher_ids, teacher_logp) in zip(student_sides,
                                                                       teacher_sides):
        left = chunk_starts(student_ids, tables[0], lead=1)  # SentencePiece's prefix space
        right = chunk_starts(teacher_ids, tables[1], lead=0)
        for byte in left.keys() & right.keys():
            if byte == 0:  # the first chunk spells the prefix space on one side alone
                continue
            v = int(student_logp[left[byte] - 1].argmax())
            w = int(teacher_logp[right[byte] - 1].argmax())
            plain = not tables[0].special[v] and not tables[1].special[w]
            agree += plain and tables[0].bytes_of(v) == tables[1].bytes_of(w)
            total += 1
    return agree / total


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 20])
def test_equals_loops_over_tokens(models, tokenizers, tables, texts, tmp_path, top_k):
    from transformers import AutoModelForCausalLM

    flags = dict(student=str(models[0]), teacher=str(models[1]), max_length=200, eval_rows=2,
                 data=write_corpus(tmp_path, texts, 9), output_dir=str(tmp_path),
                 ds_config=ds_config(tmp_path / "ds.json", 2, 3, 1))
    if top_k:
        flags |= {"teacher_output": "topk", "teacher_output_topk": top_k}
    [metrics] = ranks.run(1, evaluated, flags, TEXTS)
    sides = []
    for folder, tokenizer, table in zip(models, tokenizers, tables):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        sides.append([next_token_rows(model, tokenizer, table, text) for text in TEXTS])
    sides[1] = [(ids, top_k_of(logp, top_k)) for ids, logp in sides[1]]
    for which, role in enumerate(("student", "teacher")):
        bits, accuracy, entropy = model_metrics(sides[which], tables, which)
        assert math.isclose(metrics[f"eval/{role}_bits_per_byte"], bits, rel_tol=1e-5)
        assert math.isclose(metrics[f"eval/{role}_accuracy"], accuracy, abs_tol=1e-9)
        assert math.isclose(metrics[f"eval/{role}_entropy"], entropy, rel_tol=1e-5)
    assert math.isclose(metrics["eval/top1_agreement"], agreement(*sides, tables), abs_tol=1e-9)


@pytest.mark.slow
def test_a_model_agrees_with_itself(models, texts, tmp_path):
    """Equal tokenizers and weights: divergence 0, agreement 1 where tokens spell something."""
    flags = dict(student=str(models[0]), teacher=str(models[0]), max_length=200, eval_rows=2,
                 data=write_corpus(tmp_path, texts, 9), output_dir=str(tmp_path), loss="forward_kl",
                 ds_config=ds_config(tmp_path / "ds.json", 2, 3, 1))
    [metrics] = ranks.run(1, evaluated, flags, texts[:2])
    assert abs(metrics["eval/kd"]) < 1e-6
    for name in ("bits_per_byte", "accuracy", "entropy"):
        student = metrics[f"eval/student_{name}"]
        assert math.isclose(student, metrics[f"eval/teacher_{name}"], rel_tol=1e-6)
    assert metrics["eval/top1_agreement"] > 0.9  # a most likely eos spells nothing
