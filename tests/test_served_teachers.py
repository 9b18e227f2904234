"""A server says what the same teacher says here, in every layout; what it cannot say is refused."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import jobs
import ranks
from isogloss import distill
from isogloss.evaluation.evaluate import EvaluationSums, ModelSums, PairSums, metrics_of
from isogloss.objective.loss_table import DistillationLoss
from isogloss.teachers import served
from isogloss.teachers.served import (
    ServedSpec,
    ServedTeacher,
    groups_of,
    scored_text,
)
from isogloss.teachers.text_server import Likely
from isogloss.writing.rollout_ratio import without_gradient
from test_cached_teachers import write
from text_servers import StandIn

KEY = "sk-secret-1234"
STAGE_METRICS = "bubble", "slowest_stage", "fastest_stage"  # which no two runs share


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
    (0, 11, 14), (3, 11, 11), (11, 11, 11), (20, 11, 14), (14, 11, 14), (12, 11, 14)])
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
    if top_k:
        torch.testing.assert_close(scored.scores.max_logp_T.double(), p.max(1).values.log(),
                                   rtol=2e-6, atol=2e-6)
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


@pytest.mark.parametrize(("output_topk", "known"), [(5, True), (0, False)])
def test_metrics_that_an_answer_does_not_tell_are_null(output_topk, known):
    spec = ServedSpec("http://host", 11, output_topk=output_topk)
    setup = SimpleNamespace(spec=spec, loss=DistillationLoss(None), speculation=None)
    teacher = ModelSums(nats=3.0, num_bytes=2, correct=1, entropy=2.0, tokens=2)
    pair = PairSums(kd=3.0, kd_terms=2, agree=1, starts=2)
    _, [metrics] = metrics_of(EvaluationSums(teachers=[teacher], pairs=[pair]), [setup])
    assert metrics["kd"] == 1.5 and metrics["teacher_bits_per_byte"] > 2
    for name in ("teacher_accuracy", "teacher_entropy", "top1_agreement"):
        assert (metrics[name] is not None) == known


@pytest.mark.parametrize("mode", [True, False])
def test_a_student_is_asked_without_dropout_and_stays_in_its_mode(mode):
    module = torch.nn.Dropout().train(mode)
    numbers = torch.ones(100, requires_grad=True)
    student = SimpleNamespace(
        engine=SimpleNamespace(module=module, eval=module.eval, train=module.train),
        reduce=lambda batches, terms: [terms[0].reduce(module(batches[0]))])
    answer = without_gradient(student, numbers, lambda logits: 2 * logits)
    assert torch.equal(answer, 2 * numbers) and not answer.requires_grad
    assert module.training == mode


def test_requests_hold_whole_texts():
    texts = [range(size + 1) for size in (3, 4, 9, 2, 1, 1)]
    groups = [[len(text) - 1 for text in group] for group in groups_of(texts, 7)]
    assert groups == [[3, 4], [9], [2, 1, 1]]
    assert groups_of([], 7) == []


def flags_of_job(models, data, folder, *flags):
    config = jobs.ds_config(folder / "ds.json", 0, 2, 2)
    return [f"--student={models[0]}", f"--ds_config={config}", f"--data={data}", "--steps=4",
            "--max_length=80", "--eval_rows=3", "--eval_every=2", *flags]


def from_server(server, models, top_k=30):
    return [f"--teacher={server.url}", f"--teacher_tokenizer={models[1]}",
            f"--teacher_output_topk={top_k}"]


def from_model(models):
    return [f"--teacher={models[1]}", "--teacher_output=topk", "--teacher_output_topk=30"]


def check_same(ours, expected):
    for line, other in zip(ours, expected, strict=True):
        for name in STAGE_METRICS:
            line.pop(name, None)
            other.pop(name, None)
        # the entropy of a truncated row is a lower bound
        assert line.pop("eval/teacher_entropy", 0) <= other.pop("eval/teacher_entropy", 0) + 1e-5
    jobs.check_same_curve(expected, ours, 2e-5, 1e-6)


def run_with_key(*argv_list):
    os.environ["TEACHER_API_KEY"] = KEY
    return jobs.run_and_listen(*argv_list)


@pytest.mark.slow
def test_a_job_with_a_server_is_one_with_the_same_teacher_here(models, untied, texts, tmp_path):
    """On two ranks, of data and rollouts, with a key that nobody writes down.

    A resumed run may find the server elsewhere.  A server with echo is one.
    """
    common = [*flags_of_job(models, jobs.write_corpus(tmp_path, texts, 20), tmp_path),
              "--on_policy=0.5", "--rollout_tokens=8", "--prompt_tokens=8", "--rollout_every=2"]
    first, second = (StandIn(models[1], masks_padding=True) for _ in range(2))
    first.faults = [None, (503, "busy"), "half", None, (500, "crash")]
    hosted = StandIn(models[1], owner="somebody", masks_padding=True)  # which has echo alone
    of_text = StandIn(models[1], owner="somebody", masks_padding=True, reads="tokens")
    with first.running(), second.running(), hosted.running(), of_text.running():
        others = {
            "alm": ["--loss=alm", f"--teacher={models[1]}"],
            "echo": ["--loss=alm", *from_server(hosted, models, 0)],
            "text": ["--loss=alm", *from_server(of_text, models, 0)]}
        commands = [[*common, *from_model(models), f"--output_dir={tmp_path / 'live'}"]]
        commands += [[*common, *flags, f"--output_dir={tmp_path / name}"]
                     for name, flags in others.items()]
        for server, more in ((first, "--save_every=2"), (second, "--steps=6")):
            commands.append([*common, *from_server(server, models), more,
                             f"--output_dir={tmp_path / 'served'}"])
        for codes, message in ranks.run(2, run_with_key, *commands):
            assert codes == [0] * 6 and KEY not in message, message
    assert not first.faults and second.requests
    for _, headers, _ in first.requests + second.requests:
        assert headers["Authorization"] == f"Bearer {KEY}"
    for path in (tmp_path / "served").rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    ours = jobs.losses_of(tmp_path / "served", -1)
    check_same([line for line in ours if line["step"] <= 4], jobs.losses_of(tmp_path / "live", -1))
    assert ours[-1]["step"] == 6
    ours, of_texts, expected = [jobs.losses_of(tmp_path / run, -1)
                                for run in ("echo", "text", "alm")]
    assert all(line["eval/teacher_accuracy"] is None for line in ours if "eval/kd" in line)
    for line in ours + of_texts + expected:
        for unknown in ("eval/teacher_accuracy", "eval/teacher_entropy", "eval/top1_agreement",
                        "teacher_output_bytes"):
            line.pop(unknown, None)
    check_same(ours, expected)
    # where a text is cut, the server may cut its last word in another way
    jobs.check_same_curve(expected, of_texts, 2e-2, 1e-6)


def run_ahead(argv):
    """Run a command line; return when the server was asked, and when a step was taken."""
    events = []

    def noted(function, event):
        def call(*arguments):
            events.append(event)
            return function(*arguments)

        return call

    ServedTeacher.request = noted(ServedTeacher.request, "ask")
    distill.train_step = noted(distill.train_step, "step")
    assert jobs.run_distill([argv]) == [0]
    return events


@pytest.mark.slow
def test_the_next_step_is_asked_for_before_this_one_is_taken(models, texts, tmp_path):
    data = jobs.write_corpus(tmp_path, texts, 20)
    server = StandIn(models[1])
    with server.running():
        argv = flags_of_job(models, data, tmp_path, *from_server(server, models, 600),
                            f"--output_dir={tmp_path / 'run'}")
        argv.remove("--eval_every=2")
        argv.remove("--eval_rows=3")
        [events] = ranks.run(1, run_ahead, argv)
    window = ["ask"] * 2
    assert events == [*window, *([*window, "step"] * 3), "step"]


@pytest.mark.slow
def test_a_pipeline_asks_on_its_last_stage(models, texts, tmp_path):
    data = f"--data={jobs.write_corpus(tmp_path, texts, 20)}"
    cache_flag = f"--teacher_cache={tmp_path / 'cache'}"
    server = StandIn(models[1], masks_padding=True)
    with server.running():
        ranks.run(1, write, [[
            f"--teacher={server.url}", f"--teacher_tokenizer={models[1]}", "--top_k=30", data,
            f"--output={tmp_path / 'cache'}", "--logp_bits=32"]])
        server.requests.clear()
        kinds = {"served": from_server(server, models), "cached": [cache_flag],
                 "live": from_model(models)}
        common = [f"--student={models[0]}", data, "--steps=3", "--max_length=80", "--eval_rows=3",
                  f"--ds_config={jobs.ds_config(tmp_path / 'pipe.json', 1, 2, 2)}",
                  "--pipeline_parallel=2"]
        jobs.run_all(2, *[[*common, *flags, f"--output_dir={tmp_path / kind}"]
                          for kind, flags in kinds.items()])
    # once before the first step, and of each step and both evaluations, whatever the stages
    assert len(server.prompts()) == 1 + 3 * 4 + 2 * 3
    for kind in ("served", "cached"):
        check_same(jobs.losses_of(tmp_path / kind, -1), jobs.losses_of(tmp_path / "live", -1))


def run_impatiently(argv, hangs):
    """Run a command line; once a file is there, this rank is asked to end."""
    served.PATIENCE = 5.0  # seconds, in which step 3 is done
    threading.Thread(target=end_once, args=(hangs, os.getpid()), daemon=True).start()
    return jobs.run_and_listen(argv)


def end_once(path, process):
    while not path.exists():
        time.sleep(0.1)
    os.kill(process, signal.SIGTERM)


class EndsAtText(StandIn):
    """Answer until one text is asked about again; whatever ranks do sooner or later than others.

    Attributes:
        ids: of the text.
        num_good: how often it is answered.
        is_silent: called where no answer is to come; None: it is an error.
    """

    def __init__(self, folder, text, num_good, is_silent=None):
        super().__init__(folder, masks_padding=True)
        self.ids = self.encoded(text)
        self.num_good = num_good
        self.is_silent = is_silent

    def score(self, body, fault):
        if not any(ids == self.ids[: len(ids)] for ids in body["prompt"]):
            return super().score(body, fault)
        if self.num_good:
            self.num_good -= 1
        elif self.is_silent:
            self.is_silent()
            fault = "hang"
        else:
            fault = 500, "gone"
        return super().score(body, fault)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "is_silent", "flags", "steps", "code"), [
    ("last of step 4", False, [], 3, 1),
    ("last of step 4", False, ["--pipeline_parallel=2"], 3, 1),
    ("held out", False, [], 2, 1),  # in the evaluation behind the second step
    ("held out", False, ["--pipeline_parallel=2"], 2, 1),
    ("first of step 4", True, [], 3, 128 + signal.SIGTERM),
])
def test_steps_are_saved_on_all_ranks_where_a_server_is_gone(
        models, texts, tmp_path, place, is_silent, flags, steps, code):
    """Of a step's rows the last are another rank's than the first; held out are four."""
    num_rows, held_out, seed = 40, 4, 0
    rows_of_step = 2 * 2 if flags else 2 * 2 * 2
    order = np.random.default_rng([seed, 0]).permutation(num_rows - held_out)
    row, num_good = {"held out": (0, 1),
                     "first of step 4": (held_out + order[3 * rows_of_step], 0),
                     "last of step 4": (held_out + order[4 * rows_of_step - 1], 0)}[place]
    hangs = tmp_path / "hangs"

    def hang():
        # all ranks have asked about four steps, and two evaluations and the probe came before
        while len(server.prompts()) < 4 * rows_of_step + 2 * held_out + 1 or server.at_once > 1:
            time.sleep(0.1)
        hangs.touch()

    argv = flags_of_job(models, jobs.write_corpus(tmp_path, texts, num_rows), tmp_path, *flags,
                        "--steps=8", f"--eval_rows={held_out}", f"--seed={seed}",
                        f"--output_dir={tmp_path / 'run'}")
    jobs.ds_config(tmp_path / "ds.json", 1, 2, 2)
    server = EndsAtText(models[1], texts[row], num_good, hang if is_silent else None)
    with server.running():
        argv += [*from_server(server, models), f"--teacher_timeout={600 if is_silent else 2}"]
        for codes, said in ranks.run(2, run_impatiently, argv, hangs):
            assert codes == [code], said
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert saved == [f"step_{steps:07}"]


def test_what_does_not_fit_ends_with_one_line(models, untied, texts, tmp_path):
    good = StandIn(models[1])
    few = StandIn(models[1], max_logprobs=20)
    short = StandIn(models[1], context=100)
    other = StandIn(untied)  # a smaller vocabulary
    hosted = StandIn(models[1], owner="somebody", context=None)
    of_text = StandIn(models[1], owner="somebody", context=None, reads="offsets")
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
        ({"teacher": other}, "is out of vocabulary"),
        ({"teacher": other, "teacher_tokenizer": str(models[0]), "teacher_output_topk": 20},
         "nothing is wrong"),
        ({"teacher_tokenizer": ""}, "name the directory or hub id of its tokenizer"),
        ({"teacher": str(models[1])}, "is for the address of a server as --teacher"),
        ({"loss": "gold"}, "256 most likely tokens alone with --loss gold: this loss reads others"),
        ({"loss": "reverse_kl"}, "between two tokenizers"),
        ({"teacher_output": "logits"}, "leave out --teacher_output logits"),
        ({"teacher_output_topk": 0}, "gives the text's own tokens alone with --loss piece_kl"),
        ({"teacher_output_topk": 0, "loss": "alm", "teacher_weights": "mean_p"},
         "its mean_p is not known"),
        ({"teacher_output_topk": 0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher_output_topk": 0, "loss": "alm", "teacher": str(models[1]),
          "teacher_tokenizer": "", "teacher_output": "topk"}, "is for the address of a server"),
        ({"loss_topk": 9, "loss_options": {"topk_of": "student"}},
         "of this teacher the tokens that it finds likely are kept"),
        ({"teacher": hosted}, "HTTP 400 unknown field prompt_logprobs"),
        ({"teacher": hosted, "teacher_output_topk": 0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher": of_text}, "HTTP 422 prompt: expected a string"),
        ({"teacher": of_text, "teacher_output_topk": 0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher": of_text, "teacher_output_topk": 0, "loss": "alm",
          "teacher_tokenizer": str(models[0])}, "tokens of a text otherwise; name the tokenizer"),
        ({"temperature": 2.0}, "mass at temperature 1"),
        ({"temperature": 2.0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher_tp": 2}, "which is for a model that this job loads"),
        ({"teacher_ranks": 1}, "which hold a model"),
        ({"teacher_cache": str(tmp_path)}, "which takes its place"),
        ({"teacher_timeout": 0.5}, "--teacher_timeout 0.5: expected 1 or more"),
        ({"on_policy": 0.5, "rollout_tokens": 9}, "nothing is wrong"),
    ]
    flags = dict(student=str(models[0]), data=jobs.write_corpus(tmp_path, texts, 8), eval_rows=3,
                 max_length=250, output_dir=str(tmp_path / "run"),
                 teacher_tokenizer=str(models[1]),
                 ds_config=jobs.ds_config(tmp_path / "ds.json", 0, 1, 1))
    with good.running(), few.running(), short.running(), other.running(), hosted.running(), \
            of_text.running():
        flags["teacher"] = good.url
        cases = [({key: getattr(value, "url", value) for key, value in changes.items()}, expected)
                 for changes, expected in cases]
        jobs.check_refusals(flags, cases)
