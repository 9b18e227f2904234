"""A server says what the same teacher says here, in every layout; what it cannot say is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ranks
from isogloss import cache, distill
from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.inputs import check_inputs
from isogloss.job.launch import start_distributed
from isogloss.teachers import cache_files, text_server
from isogloss.teachers.kinds import TEACHER_KINDS
from isogloss.teachers.protocol import load_teacher
from isogloss.teachers.served import ServedTeacher, groups_of, scored_text
from isogloss.teachers.text_server import Likely
from jobs import ds_config, losses_of, run_and_listen, run_distill, write_corpus
from launched import Job
from steps import (
    AS_FLAGS_SAY,
    SMALL_TILE_MIB,
    Case,
    Layout,
    check_gradients,
    check_step,
    check_steps,
    cut_flags,
    flags_for,
    layout_results,
    references,
    references_of,
    uneven_samples,
)
from test_cached_teachers import CHAT_TEMPLATE, Reading, with_template, write
from text_servers import StandIn

KEY = "sk-secret-1234"
# metrics of a pipeline and of rollouts that no two runs share
TIMES = ("bubble", "slowest_stage", "fastest_stage", "eval/rollout/seconds", "rollout/seconds",
         "rollout/tokens_per_second", "eval/rollout/tokens_per_second")


@pytest.fixture(scope="module")
def servers(models):
    """Return (one whose model gives padding a probability, one whose padding never comes)."""
    padded = StandIn(models[1])
    masked = StandIn(models[1], masks_padding=True)
    with padded.running(), masked.running():
        yield padded, masked


# --- one text -------------------------------------------------------------------------------------


def likely_of(logits, labels, top_k):
    """Return the Likely of rows of logits: the most likely tokens and the labels, shuffled."""
    generator = np.random.default_rng(0)
    logp = logits.double().log_softmax(-1)
    ids = []
    values = []
    counts = []
    for row, label in zip(logp, labels.tolist(), strict=True):
        tokens = list({*row.topk(top_k).indices.tolist(), label})
        generator.shuffle(tokens)
        ids += tokens
        values += row[tokens].tolist()
        counts.append(len(tokens))
    return Likely(np.array(ids), np.array(values), np.array(counts), [None] * len(counts))


@pytest.mark.parametrize(("top_k", "vocab", "model_vocab"), [
    (3, 11, 11), (11, 11, 11), (20, 11, 14), (14, 11, 14), (12, 11, 14)])
def test_a_row_holds_the_likely_tokens_the_label_and_the_rest(top_k, vocab, model_vocab):
    generator = torch.Generator().manual_seed(top_k)
    logits = 3 * torch.randn(7, model_vocab, generator=generator)
    if top_k < model_vocab:  # what no tokenizer has never comes, or the server would name it
        logits[:, vocab:] = -50.0
    labels = torch.randint(vocab, (7,), generator=generator)
    likely = likely_of(logits, labels, min(top_k, model_vocab))
    scored = scored_text(likely, labels.numpy(), top_k, vocab, model_vocab)
    p = logits[:, :vocab].double().softmax(-1)
    expected = torch.zeros(7, vocab + 1, dtype=torch.float64)
    for n, label in enumerate(labels.tolist()):
        kept = sorted(range(vocab), key=lambda w: -float(p[n, w]))[:top_k]
        for token in {*kept, label}:
            expected[n, token] = p[n, token]
        expected[n, vocab] = 1 - expected[n].sum()
    rows = scored(torch.arange(7)).exp()
    torch.testing.assert_close(rows.double(), expected, rtol=2e-6, atol=3e-7)
    of_label = p.gather(1, labels[:, None]).squeeze(1).log()
    torch.testing.assert_close(scored.scores.logp_T.double(), of_label, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(scored.scores.max_logp_T.double(), p.max(1).values.log(), rtol=2e-6,
                               atol=2e-6)
    assert torch.equal(scored.scores.correct_T, (p.argmax(1) == labels).float())
    entropy = -(expected * expected.clamp(min=1e-30).log()).sum(1)
    torch.testing.assert_close(scored.scores.entropy_T.double(), entropy, rtol=1e-5, atol=1e-5)
    assert scored.logits.ids_TK.shape == (7, min(top_k, vocab) + 1)


def test_a_rest_below_the_noise_is_no_more_than_its_tokens_can_be():
    logits = torch.tensor([[0.0, -40.0, -41.0, -42.0]])
    likely = likely_of(logits, torch.tensor([0]), 2)
    scored = scored_text(likely, np.array([0]), 2, 4, 4)
    expected = logits.double().softmax(-1)[0, 2:].sum().log()
    assert expected <= scored.logits.rest_T[0] <= -40 + np.log(2) + 1e-5


def test_of_equally_likely_tokens_the_server_has_chosen():
    """A label beyond the number that was asked for takes no other token's place."""
    for order in ([5, 0, 1, 2], [0, 5, 2, 1], [2, 1, 0, 5]):
        likely = Likely(np.array(order), np.full(4, -np.log(8)), np.array([4]), [None])
        logits = scored_text(likely, np.array([5]), 3, 8, 8).logits
        assert sorted(logits.ids_TK[0, :3].tolist()) == [0, 1, 2] and logits.ids_TK[0, 3] == 5
        assert logits.rest_T.exp() == pytest.approx(0.5)


@pytest.mark.parametrize(("change", "expected"), [
    (lambda likely: likely.ids_E.__setitem__(2, 11), "names token 11, but the vocabulary"),
    (lambda likely: likely.logp_E.__setitem__(2, np.nan), "no numbers"),
    (lambda likely: likely.logp_E.__setitem__(2, 3.0), "above 0"),
    (lambda likely: likely.logp_E.__setitem__(slice(None), -0.1), "of a position have the sum"),
    (lambda likely: likely.counts_N.__setitem__(0, 2), "names 2 tokens of a position, 3 were"),
])
def test_what_is_no_distribution_is_refused(change, expected):
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    likely = likely_of(logits, torch.tensor([1, 2, 3, 4]), 3)
    change(likely)
    with pytest.raises(ValueError, match=expected):
        scored_text(likely, np.array([1, 2, 3, 4]), 3, 11, 11)


def test_requests_hold_whole_texts():
    texts = [range(size + 1) for size in (3, 4, 9, 2, 1, 1)]
    groups = [[len(text) - 1 for text in group] for group in groups_of(texts, 7)]
    assert groups == [[3, 4], [9], [2, 1, 1]]
    assert groups_of([], 7) == []


# --- layouts --------------------------------------------------------------------------------------


def served(server, models, top_k, **flags):
    return flags | {"teacher": server.url, "teacher_tokenizer": str(models[1]),
                    "teacher_output_topk": top_k}


def shared_steps(flags, samples, layouts, cases):
    """Return `layout_results` of layouts with Cases of their own."""
    results = []
    for layout, of_layout in zip(layouts, cases, strict=True):
        results.append(layout_results(flags, samples, [layout], of_layout, SMALL_TILE_MIB))
    return results


@pytest.mark.slow
def test_same_loss_and_gradient_as_the_live_teacher(models, texts, servers, tmp_path):
    """All tokens: as of the whole teacher; 20 tokens: as of the live one that keeps 20."""
    padded, masked = servers
    # all columns: which ones a step keeps depends on the scale of logits
    flags = flags_for(models, texts, tmp_path) | {"projection_topk": 600}
    samples = uneven_samples(texts)
    whole = [Case("piece_kl"), Case("projection_kl", packed=True)]
    some = [*whole, Case("alm")]
    expected = references_of(flags, [case.loss for case in whole], samples)
    live = {"teacher": str(masked_copy(models[1], tmp_path / "masked")),
            "teacher_output": "topk", "teacher_output_topk": 20}
    for num_ranks, sequence_parallel in ((1, 1), (2, 1), (2, 2)):
        shape = (0, 4 * sequence_parallel // num_ranks, 2)
        layouts = []
        for teacher in (served(padded, models, 600), served(masked, models, 20), live):
            layouts.append(Layout(*shape, teacher | {"sequence_parallel": sequence_parallel}))
        masked.requests.clear()
        results = ranks.run(num_ranks, shared_steps, flags, samples, layouts, [whole, some, some])
        of_all, of_some, of_live = results[0]
        for result in of_all:
            check_step(f"{num_ranks} ranks", result, expected[result.case.loss])
        for ours, other in zip(of_some, of_live, strict=True):
            loss = other.metrics["loss"]
            assert abs(ours.metrics["loss"] - loss) <= 1e-6 * loss, (num_ranks, ours.case)
            check_gradients(f"{num_ranks} ranks", ours.gradients, other)
        # however many ranks there are, each text is asked for once in a step
        prompts = []
        for path, _, body in masked.requests:
            if path.endswith("completions"):
                prompts += body["prompt"]
        num_texts = sum(sample is not None for sample in samples)
        assert len(prompts) == len(some) * num_texts + 1  # one before the first step


@pytest.mark.slow
def test_same_loss_and_gradient_of_texts_that_the_limit_cuts(models, texts, tmp_path):
    flags = flags_for(models, texts, tmp_path, **cut_flags(models))
    samples = uneven_samples(texts)
    expected = references_of(flags, ["piece_kl"], samples)
    server = StandIn(models[0])
    with server.running():
        layouts = [Layout(0, 1, 8, served(server, models[::-1], 400))]
        check_steps(expected, 1, flags, samples[::-1], layouts, [Case("piece_kl")],
                    SMALL_TILE_MIB)


def masked_copy(folder, target):
    """Return a copy of a model whose lm_head has no padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.slow
def test_served_and_live_teachers_mix(models, texts, servers, tmp_path):
    live = {"model": str(models[1]), "name": "live", "loss": "alm"}
    flags = flags_for(models, texts, tmp_path, teacher="", teacher_weights="ce")
    samples = uneven_samples(texts)
    [expected] = references([flags | {"teachers": json.dumps(
        [live | {"name": "other", "loss": "piece_kl", "weight": 2}, live])}], samples)
    entry = {"model": servers[0].url, "tokenizer": str(models[1]), "loss": "piece_kl", "weight": 2,
             "teacher_output_topk": 600, "name": "other"}
    layout = Layout(0, 4, 2, {"teachers": json.dumps([entry, live])})
    [result] = ranks.run(1, layout_results, flags, samples, [layout], [AS_FLAGS_SAY], 8)[0]
    check_step("mixed", result, expected)


# --- jobs -----------------------------------------------------------------------------------------


def flags_of_job(models, data, folder, *flags):
    config = ds_config(folder / "ds.json", 0, 2, 2)
    return [f"--student={models[0]}", f"--ds_config={config}", f"--data={data}", "--steps=4",
            "--max_length=80", "--eval_rows=3", "--eval_every=2", *flags]


def from_server(server, models, top_k=30):
    return [f"--teacher={server.url}", f"--teacher_tokenizer={models[1]}",
            f"--teacher_output_topk={top_k}"]


def check_same(ours, expected, tolerance=2e-5):
    assert [line["step"] for line in ours] == [line["step"] for line in expected]
    for line, other in zip(ours, expected, strict=True):
        for name in TIMES:
            line.pop(name, None)
            other.pop(name, None)
        # the entropy of a truncated row is a lower bound
        assert line.pop("eval/teacher_entropy", 0) <= other.pop("eval/teacher_entropy", 0) + 1e-5
        nothing = {key for key, value in other.items() if value is None}  # means over nothing
        assert {key for key, value in line.items() if value is None} == nothing, line["step"]
        for key in nothing:
            del line[key], other[key]
        assert line == pytest.approx(other, rel=tolerance, abs=1e-6), line["step"]


@pytest.mark.slow
def test_a_job_with_a_server_is_one_with_the_same_teacher_here(
        models, texts, tmp_path, monkeypatch):
    """By DeepSpeed's launcher on two ranks, with a key; the next step is asked for in advance."""
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    teacher = masked_copy(models[1], tmp_path / "teacher")
    pair = models[0], teacher
    data = write_corpus(tmp_path, texts, 20)
    server = StandIn(teacher)
    with server.running():
        server.faults = [None, (503, "busy"), "half", None, (500, "crash")]
        job = Job(flags_of_job(pair, data, tmp_path, *from_server(server, pair),
                               f"--output_dir={tmp_path / 'served'}"), ranks.free_port())
        code, message = job.wait()
    assert code == 0, message
    assert KEY not in message
    assert all(headers["Authorization"] == f"Bearer {KEY}" for _, headers, _ in server.requests)
    for path in (tmp_path / "served").rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    live = [f"--teacher={teacher}", "--teacher_output=topk", "--teacher_output_topk=30"]
    codes = ranks.run(2, run_distill, [flags_of_job(
        pair, data, tmp_path, *live, f"--output_dir={tmp_path / 'live'}")])
    assert codes == [[0], [0]]
    check_same(losses_of(tmp_path / "served", -1), losses_of(tmp_path / "live", -1))


@pytest.mark.slow
def test_a_server_corrects_what_the_student_writes(models, texts, tmp_path):
    """Rollouts are scored as by the live teacher; a resumed run may find the server elsewhere."""
    teacher = masked_copy(models[1], tmp_path / "teacher")
    pair = models[0], teacher
    common = [*flags_of_job(pair, write_corpus(tmp_path, texts, 20), tmp_path), "--on_policy=0.5",
              "--rollout_tokens=8", "--prompt_tokens=8", "--rollout_every=2"]
    live = [f"--teacher={teacher}", "--teacher_output=topk", "--teacher_output_topk=30"]
    first, second = StandIn(teacher), StandIn(teacher)
    with first.running(), second.running():
        commands = [[*common, *live, f"--output_dir={tmp_path / 'live'}"]]
        for server, more in ((first, ["--save_every=2"]), (second, ["--steps=6"])):
            commands.append([*common, *from_server(server, pair), *more,
                             f"--output_dir={tmp_path / 'served'}"])
        assert ranks.run(1, run_distill, commands) == [[0, 0, 0]]
    assert second.requests
    ours = losses_of(tmp_path / "served", -1)
    check_same([line for line in ours if line["step"] <= 4], losses_of(tmp_path / "live", -1))
    assert ours[-1]["step"] == 6


def run_ahead(argv, folder):
    """Run a command line; write down when the server was asked, and when a step was taken."""
    events = []

    def noted(function, event):
        def call(*arguments):
            events.append(event)
            return function(*arguments)

        return call

    ServedTeacher.request = noted(ServedTeacher.request, "ask")
    distill.train_step = noted(distill.train_step, "step")
    codes = run_distill([argv])
    (Path(folder) / "events.json").write_text(json.dumps(events))
    return codes


@pytest.mark.slow
def test_the_next_step_is_asked_for_before_this_one_is_taken(models, texts, servers, tmp_path):
    data = write_corpus(tmp_path, texts, 20)
    argv = [*flags_of_job(models, data, tmp_path, *from_server(servers[0], models, 600)),
            f"--output_dir={tmp_path / 'run'}"]
    argv.remove("--eval_every=2")
    argv.remove("--eval_rows=3")
    assert ranks.run(1, run_ahead, argv, tmp_path) == [[0]]
    events = json.loads((tmp_path / "events.json").read_text())
    window = ["ask"] * 2
    assert events == [*window, *([*window, "step"] * 3), "step"]


@pytest.mark.slow
def test_a_pipeline_asks_on_its_last_stage(models, texts, tmp_path):
    teacher = masked_copy(models[1], tmp_path / "teacher")
    pair = models[0], teacher
    data = write_corpus(tmp_path, texts, 20)
    config = ds_config(tmp_path / "pipe.json", 1, 2, 2)
    server = StandIn(teacher)
    folders = [str(tmp_path / name) for name in ("served", "cached", "live")]
    with server.running():
        common = [f"--student={pair[0]}", f"--ds_config={config}", f"--data={data}", "--steps=3",
                  "--max_length=80", "--eval_rows=3", "--pipeline_parallel=2"]
        written = [[*from_server(server, pair), f"--data={data}", f"--output={tmp_path / 'cache'}",
                    "--logp_bits=32"]]
        written[0] = [flag.replace("--teacher_output_topk", "--top_k") for flag in written[0]]
        ranks.run(1, write, written)
        runs = [from_server(server, pair), [f"--teacher_cache={tmp_path / 'cache'}"],
                [f"--teacher={teacher}", "--teacher_output=topk", "--teacher_output_topk=30"]]
        for run, folder in zip(runs, folders, strict=True):
            codes = ranks.run(2, run_distill, [[*common, *run, f"--output_dir={folder}"]])
            assert codes == [[0], [0]]
    for folder in folders[:2]:
        check_same(losses_of(folder, -1), losses_of(folders[2], -1))


# --- chats, caches --------------------------------------------------------------------------------


def test_chats_of_a_server_and_of_its_cache(models, texts, tmp_path):
    """What a server says of chats is what the model says; a cache keeps it."""
    folders = [with_template(model, tmp_path / model.name, CHAT_TEMPLATE) for model in models]
    chats = []
    for question, answer in zip(texts[:4], texts[4:8]):
        chats.append([{"role": "user", "content": question[:40]},
                      {"role": "assistant", "content": answer[:60]}])
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"text": chat}) for chat in chats))
    server = StandIn(folders[1])
    with server.running():
        commands = [[f"--teacher={server.url}", f"--teacher_tokenizer={folders[1]}", "--top_k=600",
                     f"--data={path}", f"--output={tmp_path / 'all'}", "--logp_bits=32"]]
        ranks.run(1, served_and_cached, commands, [str(folder) for folder in folders], str(path),
                  server.url, tmp_path / "all", chats)
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())
    assert manifest["dtype"] == cache_files.SERVED and manifest["holds_chats"]
    assert manifest["teacher"] == server.url


def served_and_cached(commands, folders, data, url, folder, chats):
    write(commands)
    cfg = Config(student=folders[0], teacher=folders[1], data=data, max_length=200)
    reading = Reading(cfg, {"all": folder})
    flags = dict(teacher=url, teacher_tokenizer=folders[1], teacher_output_topk=600)
    of_server = Config(student=folders[0], data=data, **flags)
    spec = of_server.teacher_kind.of(of_server, reading.teacher, torch.device("cpu"))
    reading.cached["served"] = load_teacher(spec)
    for options in ({}, {"pack": True}, {"sequence_rank": 1, "sequence_size": 2}):
        reading.check(chats, {"all": 3e-5, "served": 3e-5}, **options)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "expected"), [
    (["--hidden"], "--hidden with --teacher http://h: a server gives its most likely"),
    (["--temperature=2"], "their mass at temperature 1"),
    (["--teacher_tp=2"], "which is for a model that this job loads"),
])
def test_a_cache_of_a_server_keeps_its_likely_tokens_alone(flags, expected):
    command = ["--teacher=http://h", "--teacher_tokenizer=T", "--data=d.txt", "--output=o"]
    assert parse_flags(cache.Args, command).run_config().teacher_kind is TEACHER_KINDS["served"]
    with pytest.raises(ValueError, match=expected):
        parse_flags(cache.Args, [*command, *flags])


def refusals(flags_list):
    """Return the line that each run ends with before its first step."""
    device = start_distributed()
    text_server.FIRST_PAUSE = 0.001
    lines = []
    for flags in flags_list:
        try:
            check_inputs(Config(**flags), device)
            lines.append("nothing is wrong")
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_what_does_not_fit_ends_with_one_line(models, untied, texts, servers, tmp_path):
    few = StandIn(models[1], max_logprobs=20)
    short = StandIn(models[1], context=100)
    other = StandIn(untied)  # a smaller vocabulary
    cut = StandIn(models[1])
    cut.faults = [drop_entries] * 9
    url = servers[0].url
    cases = [
        ({}, "nothing is wrong"),
        ({"teacher_max_length": 256}, "nothing is wrong"),
        ({"teacher_max_length": 300}, "has a context of 256 positions"),
        ({"teacher": short}, "nothing is wrong"),
        ({"teacher": short, "teacher_max_length": 99},
         "takes 100 tokens, so 98 positions of a text"),
        ({"teacher": few}, "Requested prompt logprobs of 256, which is greater than max allowed: "
         "20; start the server with --max-logprobs"),
        ({"teacher": few, "teacher_output_topk": 20}, "nothing is wrong"),
        ({"teacher": cut}, "names 3 tokens of a position, 256 were asked for"),
        ({"teacher": other}, "is out of vocabulary"),
        ({"teacher": other, "teacher_tokenizer": str(models[0]), "teacher_output_topk": 20},
         "nothing is wrong"),
        ({"teacher": "http://127.0.0.1:1", "teacher_timeout": 1}, "ConnectionRefusedError"),
        ({"teacher": "http://u:sk-secret@h"}, "holds a password"),
        ({"teacher_tokenizer": ""}, "name the directory or hub id of its tokenizer"),
        ({"teacher": str(models[1])}, "is for the address of a server as --teacher"),
        ({"loss": "gold"}, "256 most likely tokens alone with --loss gold: this loss reads all"),
        ({"loss": "event_kl"}, "reads all tokens of the teacher"),
        ({"loss": "reverse_kl"}, "between two tokenizers"),
        ({"teacher_output": "logits"}, "leave out --teacher_output logits"),
        ({"teacher_weights": "entropy"}, "its entropy is not known"),
        ({"temperature": 2.0}, "mass at temperature 1"),
        ({"temperature": 2.0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher_tp": 2}, "which is for a model that this job loads"),
        ({"teacher_engine": "zero3"}, "which is for a model that this job loads"),
        ({"teacher_ranks": 1}, "which hold a model"),
        ({"teacher_cache": str(tmp_path)}, "which takes its place"),
        ({"teacher_timeout": 0.5}, "--teacher_timeout 0.5: expected 1 or more"),
        ({"on_policy": 0.5, "rollout_tokens": 9}, "nothing is wrong"),
    ]
    flags = dict(student=str(models[0]), data=write_corpus(tmp_path, texts, 8), eval_rows=3,
                 max_length=250, output_dir=str(tmp_path / "run"), teacher=url,
                 teacher_tokenizer=str(models[1]),
                 ds_config=ds_config(tmp_path / "ds.json", 0, 1, 1))
    with few.running(), short.running(), other.running(), cut.running():
        runs = []
        for changes, _ in cases:
            changed = {key: getattr(value, "url", value) for key, value in changes.items()}
            runs.append(flags | changed)
        [lines] = ranks.run(1, refusals, runs)
    for (changes, expected), line in zip(cases, lines, strict=True):
        assert expected in line and "\n" not in line and "sk-secret" not in line, (changes, line)


def drop_entries(answers):
    """Leave three entries and the text's own token, which comes first, of each position."""
    for answer in answers:
        for position in answer["prompt_logprobs"][1:]:
            for key in list(position)[3:]:
                del position[key]


@pytest.mark.slow
def test_a_server_that_falls_silent_ends_the_job_with_one_line(models, texts, tmp_path):
    data = write_corpus(tmp_path, texts, 20)
    server = StandIn(models[1])
    with server.running():
        # the check before the first step, the evaluation, then nothing more
        server.faults = [None, None, None, *["hang"] * 99]
        argv = flags_of_job(models, data, tmp_path, *from_server(server, models),
                            "--teacher_timeout=2", f"--output_dir={tmp_path / 'run'}")
        [(codes, message)] = ranks.run(1, run_and_listen, argv)
    assert codes == [2]
    lines = [line for line in message.splitlines() if "no answer to" in line]
    assert len(lines) == 1 and "in 2 seconds and 1 tries" in lines[0], message
    assert server.url in lines[0] and "Traceback" not in message
