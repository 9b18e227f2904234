"""evaluate.py against loops over tokens in float64, with whole and with top-k teacher outputs."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

import ranks
from isogloss import distill, once_in_a_while
from isogloss.evaluation.evaluate import PairSums, add_agreement
from isogloss.inputs import build_collator
from jobs import (
    ds_config,
    job_for,
    losses_of,
    run_and_listen,
    run_distill,
    short_run,
    write_corpus,
)
from steps import flags_for

TEXTS = ["The quick brown fox said hello to the 201 dogs.", "An index of the value, and its name."]


def evaluated(flags_list, evaluations):
    """Return, for each flags, the metrics of evaluations, of which each is a list of batches."""
    metrics = []
    for flags in flags_list:
        state, inputs = job_for(flags)
        collator = build_collator(state.cfg, inputs, state.device)
        metrics.append([once_in_a_while.run_evaluation(state, {"": list(map(collator, batches))})
                        for batches in evaluations])
    return metrics


def next_token_rows(model, tokenizer, table, text):
    """Return ([bos, *ids, eos], (tokens, V) float64 log-probabilities of all but the first)."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [table.bos, *ids, table.eos]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1, : len(table)]
    return ids, logits.double().log_softmax(-1)


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
    """What is kept of the teacher for the loss does not change what it says of the text."""
    from transformers import AutoModelForCausalLM

    flags = flags_for(models, texts, tmp_path, max_length=200, eval_rows=2,
                      ds_config=ds_config(tmp_path / "ds.json", 2, 3, 1))
    if top_k:
        flags |= {"teacher_output": "topk", "teacher_output_topk": top_k}
    # in one batch with a filler beside them
    [[[metrics]]] = ranks.run(1, evaluated, [flags], [[[*TEXTS, None]]])
    sides = []
    for folder, tokenizer, table in zip(models, tokenizers, tables):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        sides.append([next_token_rows(model, tokenizer, table, text) for text in TEXTS])
    for which, role in enumerate(("student", "teacher")):
        bits, accuracy, entropy = model_metrics(sides[which], tables, which)
        assert math.isclose(metrics[f"eval/{role}_bits_per_byte"], bits, rel_tol=1e-5)
        assert math.isclose(metrics[f"eval/{role}_accuracy"], accuracy, abs_tol=1e-9)
        assert math.isclose(metrics[f"eval/{role}_entropy"], entropy, rel_tol=1e-5)
    assert math.isclose(metrics["eval/top1_agreement"], agreement(*sides, tables), abs_tol=1e-9)


def test_a_batch_with_nothing_to_judge_adds_nothing(models, texts, tmp_path):
    """As of the rank that has no row in the last round, and of empty texts."""
    flags = flags_for(models, texts, tmp_path, max_length=90, eval_rows=2,
                      ds_config=ds_config(tmp_path / "ds.json", 0, 2, 1))
    of_top_k = flags | {"teacher_output": "topk", "teacher_output_topk": 20}
    whole = flags | {"tiled": False, "loss": "gold", "teacher_output": "logits"}
    of_nobody = [None, None]
    evaluations = [TEXTS], [of_nobody, TEXTS, of_nobody], [["", None], of_nobody]
    [of_kinds] = ranks.run(1, evaluated, [flags, of_top_k, whole], evaluations)
    for alone, beside_nothing, nothing in of_kinds:
        assert beside_nothing == alone and alone["eval/student_entropy"] > 1
        assert not nothing["eval/student_entropy"] and nothing["eval/kd"] is None


# --- top-k teacher outputs ------------------------------------------------------------------------


def recorded_runs(argv_list):
    """Return (exit codes, confidences (M, B) of every micro-batch) of command lines on a rank."""
    confidences = []
    all_parts = distill.all_parts

    def recording(state, micro_batches):
        of_batches = all_parts(state, micro_batches)
        for parts in of_batches:
            if parts[0].confidence is not None:
                confidences.append(torch.stack([part.confidence for part in parts]))
        return of_batches

    distill.all_parts = recording
    return run_distill(argv_list), confidences


def check_same_text_metrics(whole, top_k):
    """What the teachers say of the text is equal; what is learned from them is not."""
    suffixes = ["/" + key.split("/")[1] for key in whole if key.startswith("kd/")] or [""]
    for suffix in suffixes:
        for name in ("teacher_bits_per_byte", "teacher_accuracy", "teacher_entropy"):
            key = name + suffix
            assert math.isclose(whole[key], top_k[key], rel_tol=1e-5), key
        assert not math.isclose(whole["kd" + suffix], top_k["kd" + suffix], rel_tol=1e-3)


@pytest.mark.slow
def test_top_k_outputs_say_of_the_text_what_whole_ones_do(models, untied, texts, tmp_path):
    """Evaluations and samples' weights; teachers sharded, on ranks of their own, and averaged."""
    base = [f"--student={models[0]}", f"--data={write_corpus(tmp_path, texts, 12)}", "--steps=1",
            "--eval_rows=4", "--max_length=80", "--pack",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 3, 1)}"]

    def argv(name, weights, output, *flags, **layout):
        first = {"model": str(models[1])} | layout
        if weights.startswith("mean"):  # of one tokenizer
            first |= {"model": str(models[0]), "weight": 2.0}
        teachers = json.dumps([first, {"model": str(untied), "name": "b"}])
        flags = [*flags, *["--teacher_output_topk=16"] * (output == "topk")]
        return [*base, f"--teachers={teachers}", f"--teacher_weights={weights}", *flags,
                f"--teacher_output={output}", f"--output_dir={tmp_path / name}"]

    def before_training(name):
        first = losses_of(tmp_path / name, -1)[0]
        assert first["step"] == 0
        return {key.removeprefix("eval/"): value for key, value in first.items()}

    pairs = [(kind, output) for kind in ("ce", "mean_p") for output in ("hidden", "topk")]
    on_ranks = ranks.run(2, recorded_runs, [argv("-".join(pair), *pair, tp=2) for pair in pairs])
    for codes, confidences in on_ranks:
        assert codes == [0] * len(pairs)
        assert len(confidences) == 2
        for whole, top_k in zip(confidences[::2], confidences[1::2], strict=True):
            torch.testing.assert_close(whole, top_k, rtol=1e-5, atol=1e-6)
    for weights, _ in pairs[::2]:
        check_same_text_metrics(before_training(f"{weights}-hidden"),
                                before_training(f"{weights}-topk"))
    # two clients of the teachers, then one of two ranks
    for weights, shards in (("ce", 1), ("mean_p", 2)):
        flags = "--teacher_ranks=1", f"--sequence_parallel={shards}"
        remote = argv(f"remote{shards}", weights, "topk", *flags)
        of_student = ranks.run(3, recorded_runs, [remote])[:2]
        assert [codes for codes, _ in of_student] == [[0], [0]]
        check_same_text_metrics(before_training(f"{weights}-hidden"),
                                before_training(f"remote{shards}"))
        if weights == "ce":
            for (_, local), (_, remote) in zip(on_ranks, of_student, strict=False):
                torch.testing.assert_close(local[0], remote[0], rtol=1e-5, atol=1e-6)


def test_tokens_agree_if_they_have_the_same_bytes():
    """Tokens 0 have none, tokens 1 the same, tokens 2 others; a row of logits for each choice."""
    choices = [(0, 0), (1, 1), (2, 2), (1, 2)]
    rows = torch.eye(3)
    student = rows[[v for v, _ in choices]]
    teacher = rows[[w for _, w in choices]]
    chunk = torch.arange(len(choices))
    spelling = SimpleNamespace(student_V=torch.tensor([-1, 5, 6]),
                               teacher_W=torch.tensor([-1, 5, 7]))
    pair = SimpleNamespace(spelling_ids=spelling, loss=SimpleNamespace(indices_VK=None))
    sums = PairSums()
    sub_tile = SimpleNamespace(student_chunk=chunk, teacher_chunk=chunk)
    add_agreement(sums, student, teacher, sub_tile, pair)
    assert (sums.agree, sums.starts) == (1, 4)


def test_a_run_says_what_it_does(models, texts, tmp_path):
    """In the terminal: what comes, how the student does, what was written; and where it goes on."""
    config = ds_config(tmp_path / "ds.json", 0, 2, 2)
    output = tmp_path / "run"
    argv = [f"--ds_config={config}", f"--student={models[0]}", f"--teacher={models[1]}",
            f"--data={write_corpus(tmp_path, texts, 23)}", "--max_length=60", "--eval_rows=3",
            "--eval_every=1", f"--output_dir={output}", f"--export={output / 'student'}"]
    [(codes, said)] = ranks.run(1, run_and_listen, [*argv, "--steps=1"], [*argv, "--steps=2"])
    assert codes == [0, 0], said
    # as a file and a notebook have it: whole lines, of the bar too, in no color
    assert "\r" not in said and "\x1b" not in said, said
    lines = said.splitlines()
    assert all(lines), said
    assert any(re.fullmatch(r"2/2 steps \[.*, loss=.*, kd=.*, tok/s=.*\]", line) for line in lines)
    first, one, last = (f"{line['eval/student_bits_per_byte']:#.4g}"
                        for line in map(json.loads, (output / "metrics.jsonl").open())
                        if "eval/kd" in line)
    assert any(line.startswith(f"student {models[0]} (0.") for line in lines), said
    assert (f"1 step of 4 samples (1 x 2 x 2) = 0.2 epochs of 20, ZeRO 0 on 1 rank; "
            f"metrics in {output}") in lines, said
    assert any(line.startswith(f"step 0: {first} bits per byte (teacher ") for line in lines), said
    # of random models either may be the better one
    start = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    is_worse = start["eval/teacher_bits_per_byte"] > start["eval/student_bits_per_byte"]
    assert is_worse == any(line.startswith("warning: teacher ") and f" and {first} bits" in line
                           for line in lines), said
    assert f"goes on from {output / 'checkpoints' / 'step_0000001'} (step 1)" in lines
    for step, bits in ((1, one), (2, last)):
        [line] = {line for line in lines if line.startswith(f"step {step}: {bits} bits per byte (")}
        assert f", at the start {first}), kd " in line
    assert lines.count(f"exported to {output / 'student'}") == 2


def test_a_run_ends_with_a_line_on_a_teacher_that_is_still_far_above():
    def said(student_bits, weights, **flags):
        state = SimpleNamespace(
            cfg=SimpleNamespace(**{"ce_weight": 1.0, "dynamic_scale": False} | flags),
            teachers=[SimpleNamespace(name=name, cfg=SimpleNamespace(kd_weight=weight))
                      for name, weight in weights.items()])
        suffix = "/{}" if len(weights) > 1 else ""
        bits = {f"eval/teacher_bits_per_byte{suffix.format(name)}": 1.0 for name in weights}
        return once_in_a_while.far_teachers(
            state, bits | {"eval/student_bits_per_byte": student_bits})

    line = ("teacher {} is still 0.25 bits per byte ahead: a larger --kd_weight, such as 4, may "
            "teach more")
    assert said(1.25, {"a": 1.0}) == [line.format("a")]
    assert said(1.25, {"a": 4.0, "b": 0.5}) == [line.format("b")]
    for student_bits, weight, flags in ((1.15, 1.0, {}), (0.9, 1.0, {}), (None, 1.0, {}),
                                        (1.25, 4.0, {}), (1.25, 1.0, {"ce_weight": 0.0}),
                                        (1.25, 1.0, {"dynamic_scale": True})):
        assert said(student_bits, {"a": weight}, **flags) == []


def test_a_run_begins_with_a_line_on_texts_that_are_read_often():
    """Of two sources the one that is read most; not where the teacher outweighs the text."""
    def said(num_samples, weight=1.0, **flags):
        sources = [SimpleNamespace(num_samples=samples, source=SimpleNamespace(name=name))
                   for name, samples in (("a", 20), ("b", 60))]
        data = SimpleNamespace(sources=sources, weights=lambda: [1.0, 1.0])
        state = SimpleNamespace(
            cfg=SimpleNamespace(
                **{"ce_weight": 1.0, "dynamic_scale": False, "on_policy": 0.0} | flags),
            teachers=[SimpleNamespace(cfg=SimpleNamespace(kd_weight=weight))])
        return once_in_a_while.texts_read_again(
            state, once_in_a_while.epochs_of(data, num_samples))

    assert said(200) == [
        "texts are read 5 times: a larger --kd_weight, such as 4, may teach more"]
    assert said(160) == said(200, 4.0) == said(200, ce_weight=0.0) == said(200, on_policy=0.5) == []


def listen_on_an_old_cpu(*argv_list):
    """Run command lines where the CPU has instructions for neither kind of 16 bits."""
    torch.cpu.get_capabilities = lambda: {
        "architecture": "x86_64", "avx512_bf16": False, "avx512_fp16": False}
    return run_and_listen(*argv_list)


def test_a_run_begins_with_a_line_on_16_bits_that_a_cpu_computes_by_hand(models, texts, tmp_path):
    """Of the student and of a teacher, each with what changes it; none of float32."""
    half = ds_config(tmp_path / "half.json", 2, 2, 1, bf16={"enabled": True})
    plain, both = [
        short_run(models, texts, tmp_path, "--steps=1", f"--output_dir={tmp_path / name}", *more)
        for name, *more in (("a",), ("b", f"--ds_config={half}", "--teacher_dtype=float16"))]
    [(codes, said)] = ranks.run(1, listen_on_an_old_cpu, plain, both)
    assert codes == [0, 0]
    assert [line for line in said.splitlines() if "CPU" in line] == [
        f"distill.py: {what}, for which this CPU has no instructions; float32 is up to ten times "
        f"as fast: {remedy}" for what, remedy in (
            (f"teacher {models[1]} computes in float16", "--teacher_dtype float32"),
            (f"student {models[0]} computes in bfloat16", "no bf16, no fp16 in --ds_config"))]
