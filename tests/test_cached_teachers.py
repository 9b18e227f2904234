"""What a cache says is what the teacher says; a writer that is killed goes on; nothing else passes.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import jobs
import ranks
from isogloss import cache
from isogloss.command import CacheArgs
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.errors import DataError
from isogloss.flags.parse import parse_flags
from isogloss.inputs import load_text_encoder
from isogloss.job.files import locked, scratch_of
from isogloss.job.launch import start_distributed
from isogloss.job.watch import end_together
from isogloss.teachers import cache_files, packed_rows
from isogloss.teachers.cached import CachedTeacher
from isogloss.teachers.engines.whole import load_replicated
from isogloss.teachers.kept_tokens import byte_order, estimated, keep_tokens, uniform_numbers
from isogloss.teachers.text_scores import batch_texts
from steps import uneven_samples
from test_checkpoint import cut, flip


def write(argv_list, shard_bytes=None, die_at=None):
    """Write caches in this process.

    Args:
        shard_bytes: of a shard, in place of the usual number.
        die_at: kill this process while it writes a shard of this number.
    """
    device = start_distributed()
    if shard_bytes:
        cache.SHARD_BYTES = shard_bytes
    if die_at is not None:
        write_tensors = cache.cache_files.write_tensors

        def write_half(path, tensors):
            if path.name == cache_files.shard_name(die_at):
                scratch_of(path).write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            write_tensors(path, tensors)

        cache.cache_files.write_tensors = write_half
    with end_together():
        for argv in argv_list:
            cache.run(parse_flags(CacheArgs, argv), device)


def bytes_of(folder):
    """Return {name: content} of all files of a cache."""
    contents = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.name != ".lock":
            contents[path.relative_to(folder).as_posix()] = path.read_bytes()
    return contents


@pytest.fixture(scope="module")
def data(texts, tmp_path_factory):
    """Return the flags of the data: a corpus, and the samples of steps.py."""
    folder = tmp_path_factory.mktemp("data")
    samples = [text for text in uneven_samples(texts) if text is not None]
    return [f"--data={jobs.write_corpus(folder, texts, 20)}",
            f"--eval_data={jobs.write_corpus(folder, samples, len(samples))}"]


@pytest.fixture(scope="module")
def caches(models, data, tmp_path_factory):
    """Return {kind: folder} of caches of the small teacher."""
    folder = tmp_path_factory.mktemp("caches")
    kinds = {"hidden": ["--hidden"], "all": ["--top_k=600", "--logp_bits=32"], "20": ["--top_k=20"],
             "softened": ["--top_k=20", "--temperature=2"],
             "packed": ["--top_k=20", "--logp_bits=8"],
             "drawn": ["--top_k=20", "--sampled", "--seed=3", "--logp_bits=32"]}
    commands = []
    for kind, flags in kinds.items():
        commands.append([f"--teacher={models[1]}", *data, f"--output={folder / kind}", *flags])
    ranks.run(1, write, commands)
    return {kind: folder / kind for kind in kinds}


@pytest.mark.parametrize("flags, of_killed", [
    ([], []), pytest.param(["--logp_bits=8"], [], marks=pytest.mark.slow),
    pytest.param(["--sampled", "--temperature=2.0"], ["--streaming"], marks=pytest.mark.slow)])
def test_a_killed_writer_goes_on_and_the_cache_is_the_same_bit_by_bit(
        models, data, flags, of_killed, tmp_path):
    """Also where the killed one reads a stream of the same data."""
    shard = 10_000 if "--logp_bits=8" in flags else 20_000
    commands = []
    for name, more in (("whole", []), ("killed", of_killed)):
        commands.append([f"--teacher={models[1]}", *data, f"--output={tmp_path / name}",
                         "--top_k=9", "--batch_tokens=300", *flags, *more])
    ranks.run(1, write, commands[:1], shard)
    whole = bytes_of(tmp_path / "whole")
    assert sum(name.startswith("shard") for name in whole) > 4
    group = ranks.start(1, write, commands[1:], shard, 2)
    group[0][0].join(300)
    assert group[0][0].exitcode == -signal.SIGKILL
    ranks.kill(group)
    left = bytes_of(tmp_path / "killed")
    assert "shard-00001.safetensors" in left and "shard-00002.safetensors" not in left
    with pytest.raises(ValueError, match="is not complete"):
        cache_files.open_cache(tmp_path / "killed")
    # two ranks go on with what one began
    ranks.run(2, write, commands[1:], shard)
    assert bytes_of(tmp_path / "killed") == whole
    # a shard that is gone from a complete cache is written again, and nothing else is
    path = tmp_path / "killed" / "shard-00003.safetensors"
    reader = cache_files.CacheReader(tmp_path / "killed")
    place = int((reader.shard == 3).nonzero()[0][0])
    before = reader.columns(place, 2)
    path.unlink()
    ranks.run(1, write, commands[1:], shard)
    assert bytes_of(tmp_path / "killed") == whole
    # one who reads meanwhile goes on with what it has mapped
    after = reader.columns(place, 2)
    assert all(torch.equal(after[name], before[name]) for name in before)


def end_of_writer(argv):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        write([argv])
    return said.getvalue()


def end_of_changed_data(argv, path, change):
    """Return the line with which a writer ends whose data change after it has seen all of them.

    Args:
        change: "letters" or "length".
    """
    survey = cache.survey

    def survey_and_change(texts):
        surveyed = survey(texts)
        text = path.read_text()
        path.write_text(text.replace("a", "e") if change == "letters" else text.split("\n")[0])
        return surveyed

    cache.survey = survey_and_change
    return end_of_writer(argv)


@pytest.mark.parametrize("change, complaint", [
    ("letters", "the data was another one"), ("length", "the stream had 5 rows, and ends before")])
def test_a_stream_that_changes_is_no_cache(change, complaint, models, texts, tmp_path):
    path = Path(jobs.write_corpus(tmp_path, texts, 5))
    argv = [f"--teacher={models[1]}", f"--data={path}", f"--output={tmp_path / 'cache'}",
            "--streaming", "--top_k=5"]
    [line] = ranks.run(1, end_of_changed_data, argv, path, change)
    assert complaint in line and line.count("\n") == 1


@pytest.mark.slow
def test_caches_beside_teachers_on_ranks_of_their_own(models, data, caches, tmp_path):
    """One is read by the student's ranks, the other is asked; alone and as members of a mean."""
    live = {"model": str(models[1]), "name": "live"}
    cached = {"cache": str(caches["all"]), "weight": 2}
    ds_config = jobs.ds_config(tmp_path / "d", 2, 2, 2)
    argv = [f"--student={models[0]}", data[0], f"--ds_config={ds_config}", "--steps=3",
            "--max_length=60", "--eval_rows=2", "--eval_every=2",
            f"--teachers={json.dumps([cached, live])}"]
    for weights in ("fixed", "mean_p"):
        curves = []
        for num_ranks, flags in ((1, []), (2, ["--teacher_ranks=1"])):
            output = tmp_path / f"{weights}{num_ranks}"
            jobs.run_all(num_ranks, [*argv, *flags, f"--teacher_weights={weights}",
                                     f"--output_dir={output}"])
            curves.append(jobs.losses_of(output))
        jobs.check_same_curve(*curves, 1e-4, 1e-6, weights)
    alone = [*argv[:-1], f"--teacher_cache={caches['20']}", "--teacher_ranks=1",
             f"--output_dir={tmp_path / 'none'}"]
    line = "".join(said for _, said in ranks.run(2, jobs.run_and_listen, alone))
    assert "a cache needs no ranks" in line


class Reading:
    """Hold a live teacher and its caches, and how batches are made for both.

    Attributes:
        live: ModelTeacher.
        cached: {kind: CachedTeacher}.
    """

    def __init__(self, models, data, folders):
        device = start_distributed()
        cfg = Config(student=str(models[0]), teacher=str(models[1]), data=data)
        self.student, _ = load_text_encoder("student", cfg.student, 200)
        self.teacher, _ = load_text_encoder("teacher", cfg.teacher, 0)
        self.live = load_replicated(cfg.teacher_kind.of(cfg, self.teacher, device))
        self.cached = {}
        for kind, folder in folders.items():
            of_cache = Config(student=cfg.student, data=data, teacher_cache=str(folder))
            spec = of_cache.teacher_kind.of(of_cache, self.teacher, device)
            self.cached[kind] = CachedTeacher(spec)

    def batch(self, samples, **options):
        """Return a TeacherBatch."""
        pairs = [PairOptions(self.teacher, is_cached=True)]
        [batch] = Collator(self.student, pairs, **options)(samples).teachers
        return batch

    def check(self, samples, tolerances, **options):
        """Compare the probabilities of all positions of a batch with a text, for {kind: nats}."""
        batch = self.batch(samples, **options)
        positions = (batch.labels.flatten() != -100).nonzero().squeeze(1)
        assert len(positions)
        expected = self.live.targets(batch)(positions).log_softmax(-1)
        labels = batch.labels.flatten()[positions][:, None]
        for kind, tolerance in tolerances.items():
            logits = self.cached[kind].targets(batch)
            rows = logits(positions)
            logp = rows.log_softmax(-1)[:, : expected.shape[1]]
            is_kept = logp > -torch.inf
            error = (logp - expected)[is_kept].abs().max()
            assert error <= tolerance, (kind, options, error)
            if kind != "hidden":
                of_label = logits.scores.at(positions).logp_T
                assert (of_label - expected.gather(1, labels).squeeze(1)).abs().max() < 2e-5
                rest = expected.exp().masked_fill(is_kept, 0).sum(-1)
                torch.testing.assert_close(rows.softmax(-1)[:, -1], rest, rtol=2e-3, atol=2e-6)

    def check_packed(self, samples, **options):
        """Compare probabilities with those of the cache that rounds less, to half a step."""
        batch = self.batch(samples, **options)
        positions = (batch.labels.flatten() != -100).nonzero().squeeze(1)
        packed, exact = (self.cached[kind].targets(batch) for kind in ("packed", "20"))
        p, expected = packed(positions).softmax(-1), exact(positions).softmax(-1)
        assert torch.equal(packed.scores.logp_T, exact.scores.logp_T)
        is_token = p[:, :-1] > 0
        assert is_token.sum() > 0.5 * (expected[:, :-1] > 0).sum()
        # a row's sum is off, too, by what its tokens are
        step = 1 / packed_rows.STEPS
        assert (p - expected)[:, :-1].abs().max() < 0.6 * step + 1e-3 * expected.max()
        left = expected[:, :-1].masked_fill(is_token, 0).sum(-1)
        torch.testing.assert_close(p[:, -1], expected[:, -1] + left, atol=1e-3, rtol=1e-3)

    def check_tokens(self, samples):
        """See that a text of which a cache holds other tokens is refused, whichever is another."""
        batch = self.batch(samples)
        last = int((batch.labels[0] >= 0).sum()) - 1
        # the last one is predicted and not read
        for tokens, place in ((batch.ids, 0), (batch.ids, 7), (batch.labels, last)):
            right = int(tokens[0, place])
            tokens[0, place] = 9 if right != 9 else 10
            for source in self.cached.values():
                with pytest.raises(DataError, match="has other tokens there"):
                    source.targets(batch)
            tokens[0, place] = right

    def check_draws(self, samples, **options):
        """Compare rows of draws with what is drawn from the live rows of a batch."""
        batch = self.batch(samples, **options)
        source = self.cached["drawn"]
        order = byte_order(self.teacher.table)
        rows_of_cache = source.targets(batch)
        live = self.live.targets(batch)
        num_same = 0
        num_rows = 0
        for text in batch_texts(batch):
            uniform = uniform_numbers(3, batch.keys[text.sample].numpy(), len(text.positions))
            logits = live(text.positions).float()[:, order.ids_W]
            kept = keep_tokens(logits, source.manifest.top_k, text.tokens[1:], order, 1.0, uniform)
            expected = estimated(kept.scored, kept.num_drawn_N)(torch.arange(len(text.positions)))
            rows = rows_of_cache(text.positions)
            torch.testing.assert_close(rows.logsumexp(-1), expected.logsumexp(-1), atol=1e-4,
                                       rtol=0)
            is_same = ((rows > -torch.inf) == (expected > -torch.inf)).all(-1)
            torch.testing.assert_close(rows[is_same], expected[is_same], atol=1e-3, rtol=0)
            num_same += int(is_same.sum())
            num_rows += len(is_same)
        # rounding may draw a neighbor
        assert num_same >= 0.99 * num_rows > 0, (num_same, num_rows)


# nats; a live row differs by this much from itself in another batch
# "softened" also holds what a loss reads at temperature 1, as is done here
EXACT = {"hidden": 3e-5, "all": 3e-5, "20": 1e-3, "softened": 1e-3}


def read_all(models, data, caches, samples):
    """Compare caches with the teacher in one process, in batches of all kinds."""
    reading = Reading(models, data, caches)
    for options in ({}, {"pack": True}, {"sequence_rank": 1, "sequence_size": 2}):
        reading.check(samples, EXACT, **options)
    for options in ({}, {"pack": True}):
        reading.check_draws(samples, **options)
        reading.check_packed(samples, **options)
    reading.check_tokens(samples)
    reading.student.max_length = 23  # another cut is a beginning of the same text
    reading.check(samples, EXACT)
    reading.check_draws(samples)
    reading.check_packed(samples)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, flags, rows", [
    (1, [], [2, 1]), (2, [], [2, 1]), (2, ["--pipeline_parallel=2"], [2, 2])])
def test_what_a_cache_lacks_of_a_stream_costs_no_step(
        num_ranks, flags, rows, models, texts, tmp_path):
    """The last rank meets it in the third step; a stream is read without an end."""
    path = Path(jobs.write_corpus(tmp_path, texts, 20))
    rows_of_step = math.prod(rows) * (1 if flags else num_ranks)
    row = np.random.default_rng([0, 0, 0]).permutation(20)[3 * rows_of_step - 1]
    cached = tmp_path / "cached.jsonl"
    lines = path.read_text().splitlines()
    cached.write_text("\n".join(lines[:row] + lines[row + 1 :]))
    folder = tmp_path / "cache"
    ranks.run(1, write, [[f"--teacher={models[1]}", f"--data={cached}", f"--output={folder}",
                          "--top_k=5"]])
    argv = [f"--student={models[0]}", f"--data={path}", "--streaming", "--steps=4",
            "--max_length=60", f"--teacher_cache={folder}", *flags,
            f"--output_dir={tmp_path / 'run'}",
            f"--ds_config={jobs.ds_config(tmp_path / 'ds.json', 1, *rows)}"]
    on_ranks = ranks.run(num_ranks, jobs.run_and_listen, argv)
    assert [codes for codes, _ in on_ranks] == [[2]] * num_ranks, on_ranks
    said = "".join(of_rank for _, of_rank in on_ranks)
    [line] = [line for line in said.splitlines() if line.startswith("distill.py: --")]
    last = tmp_path / "run" / "checkpoints" / "step_0000002"
    assert "lacks a text of the data" in line and f"the last good checkpoint is {last}" in line
    assert last.exists()


def test_a_cache_says_what_the_teacher_says(models, data, texts, caches):
    ranks.run(1, read_all, models, data[0].partition("=")[2], caches, uneven_samples(texts))


SHARD = "shard-00000.safetensors"
MANIFEST = cache_files.MANIFEST
# (kind of a cache, a file of a copy of it, what happens to that, what the job says)
DAMAGES = [
    ("20", SHARD, flip, f"{SHARD} is damaged"),
    ("hidden", "head.safetensors", flip, "head.safetensors is damaged"),
    ("20", SHARD, cut, "bytes, expected"),
    ("20", SHARD, Path.unlink, f"{SHARD} is missing; run the command"),
    ("20", "teacher", shutil.rmtree, "teacher/config.json is missing; run the command"),
    ("20", "teacher/tokenizer.json", flip, "teacher/tokenizer.json is damaged"),
    ("20", MANIFEST, cut, "nothing is wrong"),  # its last line end
]
# (what the manifest of a cache says, None: nothing of that; flags, what the job says)
MANIFESTS = [
    ({"files": {}}, {}, "is not complete"),
    ({"max_length": 100}, {"teacher_max_length": 200}, "holds 100 positions of a text"),
    ({"format": 1}, {}, "is damaged, or of another version"),
]


def damaged(caches, folder):
    """Return (changed flags, what the job says) of damaged caches."""
    cases = []
    for number, (kind, name, damage, line) in enumerate(DAMAGES):
        copy = shutil.copytree(caches[kind], folder / f"damaged{number}")
        damage(copy / name)
        cases.append(({"teacher_cache": str(copy)}, line))
    for number, (changes, flags, line) in enumerate(MANIFESTS):
        copy = shutil.copytree(caches["20"], folder / f"changed{number}")
        plain = json.loads((copy / MANIFEST).read_text()) | changes
        plain = {key: value for key, value in plain.items() if value is not None}
        (copy / MANIFEST).write_text(json.dumps(plain))
        cases.append((flags | {"teacher_cache": str(copy)}, line))
    return cases


def test_what_does_not_fit_ends_with_one_line(models, untied, texts, data, caches, tmp_path):
    other_data = jobs.write_corpus(tmp_path, [text + "!" for text in texts[:5]], 5)
    cache_of = {kind: str(folder) for kind, folder in caches.items()}
    cases = damaged(caches, tmp_path) + [
        ({}, "nothing is wrong"),
        ({"teacher": str(models[1])}, "nothing is wrong"),
        ({"teacher_cache": str(tmp_path)}, "no manifest.json there"),
        ({"teacher": str(untied)}, "--teacher has another one"),
        ({"data": other_data}, "lacks row 3 of"),
        ({"teacher_max_length": 300}, "has a context of 256 positions"),
        ({"loss": "gold"}, "nothing is wrong"),
        ({"teacher_cache": cache_of["20"], "loss": "gold"}, "keeps 20 tokens, with --loss gold"),
        ({"teacher_cache": cache_of["20"], "loss": "reverse_kl"}, "between two tokenizers"),
        ({"teacher_cache": cache_of["20"], "temperature": 2.0, "loss": "projection_kl"},
         "--temperature 2.0"),
        # what sums up tokens first softens the sums, so it reads the rest at temperature 1
        ({"teacher_cache": cache_of["20"], "temperature": 2.0}, "nothing is wrong"),
        ({"teacher_cache": cache_of["20"], "temperature": 2.0, "loss": "alm"}, "nothing is wrong"),
        ({"teacher_cache": cache_of["drawn"]}, "nothing is wrong"),
        ({"teacher_cache": cache_of["drawn"], "temperature": 2.0, "loss": "projection_kl"},
         "were drawn at 1.0"),
        ({"teacher_cache": cache_of["drawn"], "temperature": 2.0}, "nothing is wrong"),
        ({"teacher_cache": cache_of["drawn"], "loss": "uld"}, "this loss reads others, too"),
        ({"temperature": 2.0}, "nothing is wrong"),
        ({"on_policy": 0.5}, "holds nothing of what the student writes"),
        ({"teacher_engine": "zero3"}, "loads no teacher"),
        ({"teacher_output": "topk", "teacher": str(models[1]), "teacher_cache": "",
          "loss": "uld"}, "this loss reads others, too"),
    ]
    flags = dict(student=str(models[0]), data=data[0].partition("=")[2], eval_rows=3,
                 max_length=250, output_dir=str(tmp_path / "run"), teacher_cache=cache_of["hidden"],
                 ds_config=jobs.ds_config(tmp_path / "ds.json", 0, 1, 1))
    jobs.check_refusals(flags, cases)


def end_beside_another(argv, folder):
    """Return the line with which a writer ends while another one writes to a folder."""
    with locked("--output", folder):
        return end_of_writer(argv)


def test_a_writer_does_not_mix_caches(models, data, caches, tmp_path):
    begun = tmp_path / "begun"
    shutil.copytree(caches["20"], begun)
    (begun / SHARD).unlink()
    common = [f"--teacher={models[1]}", *data]
    commands = [
        [*common, f"--output={caches['20']}", "--top_k=30"],
        [*common, f"--output={tmp_path}", "--top_k=20"],
        [*common, f"--output={begun}", "--top_k=20"],
        [*common, f"--output={caches['20']}", "--top_k=20"],
    ]
    before = bytes_of(caches["20"])
    unfit = {
        "--hidden --top_k=20": "--hidden with --top_k 20", "--hidden --sampled": "with --sampled",
        "--hidden --temperature=2.0": "with --temperature 2.0", "--seed=1": "is of --sampled",
        "--sampled --seed=-1": "--seed -1", "--logp_bits=7": "expected 8, 16 or 32",
        "--sampled --logp_bits=8": "8 with --sampled",
        "--temperature=2.0 --logp_bits=8": "8 with --temperature 2.0",
        "--hidden --logp_bits=32": "with --logp_bits 32"}
    of_server = {
        "--hidden": "--hidden with --teacher http://h: a server gives its most likely",
        "--temperature=2": "their mass at temperature 1",
        "--teacher_tp=2": "which is for a model that this job loads"}
    for flags, expected in of_server.items():
        unfit[f"--teacher=http://h --teacher_tokenizer=T {flags}"] = expected
    for flags, expected in unfit.items():
        with pytest.raises(ValueError, match=expected):
            parse_flags(CacheArgs, [*common, f"--output={tmp_path / 'no'}", *flags.split()])
    lines = []
    for argv in commands:  # a refused command ends its process group
        lines += ranks.run(1, end_beside_another, argv, begun)
    expected = ["top_k 20 there, 30 here", "holds other files", "another process is writing", ""]
    for text, line in zip(expected, lines, strict=True):
        assert text in line and line.count("\n") <= 1, line
    assert not lines[-1]
    assert bytes_of(caches["20"]) == before


def test_a_template_that_explodes_ends_a_writer_with_one_line(models, tmp_path):
    teacher = shutil.copytree(models[1], tmp_path / "teacher")
    (teacher / "chat_template.jinja").write_text("{{ 'a' * 10 ** 11 }}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"text": chat}) + "\n")
    argv = [f"--teacher={teacher}", f"--data={tmp_path / 'chats.jsonl'}",
            f"--output={tmp_path / 'cache'}", "--top_k=20"]
    [said] = ranks.run(1, end_of_writer, argv)
    *_, line = said.splitlines()  # behind the progress of datasets
    assert f"of {teacher} takes more than 1 GiB of memory; repair" in line
    assert not (tmp_path / "cache").exists()


# --- the hub --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["20", "packed"])
def test_the_card_reads_a_cache_without_isogloss(kind, caches, monkeypatch):
    """Its lines, as they stand there, give what the reader gives."""
    reader = cache_files.CacheReader(caches[kind])
    card = (caches[kind] / "README.md").read_text()
    assert "# What teacher says of" in card and str(caches[kind].parent.parent) not in card
    monkeypatch.chdir(caches[kind])
    said = {}
    exec(re.search(r"^```python\n(.*?)^```", card, re.M | re.S)[1], said)
    first = next(place for place in range(len(reader.keys))
                 if reader.shard[place] == 0 and reader.text[place] == 0)
    columns = reader.columns(first, int(reader.size[first]))
    if kind == "packed":
        is_kept = columns["ids"] >= 0
        assert torch.equal(torch.from_numpy(said["ids"]), columns["ids"][is_kept])
        assert torch.equal(torch.from_numpy(said["position"]), is_kept.nonzero()[:, 0])
        p = torch.from_numpy(said["p"]).float()
        return torch.testing.assert_close(p, columns["logp"][is_kept].exp())
    ids = cache_files.unpack_ids(columns["low"], columns["high"])
    assert torch.equal(torch.from_numpy(said["ids"]), ids.long())
    logp = cache_files.unpack_logp(columns["logp"])
    assert torch.allclose(torch.from_numpy(said["logp"]).float(), logp, atol=1e-6)


def test_a_cache_is_pushed_and_read_from_the_hub(models, data, caches, tmp_path, monkeypatch):
    """Stand-ins for the hub: a folder takes what is uploaded, and gives it back."""
    hub = tmp_path / "hub"
    calls = []
    monkeypatch.setattr(cache.HfApi, "create_repo",
                        lambda self, name, **options: calls.append((name, options)))
    monkeypatch.setattr(cache.HfApi, "upload_folder", lambda self, **options: shutil.copytree(
        options["folder_path"], hub / options["repo_id"]))
    args = parse_flags(CacheArgs, [f"--teacher={models[1]}", *data, f"--output={caches['20']}",
                                    "--push_to_hub=me/cache", "--private"])
    cache.push(args)
    assert calls == [("me/cache", {"repo_type": "dataset", "private": True, "exist_ok": True})]
    monkeypatch.setattr(cache_files, "snapshot_download",
                        lambda name, repo_type, revision: str(hub / name))
    folder = cache_files.local_cache("hf://datasets/me/cache")
    assert bytes_of(folder) == bytes_of(caches["20"])
    assert Config(student="s", data="d", teacher_cache="hf://datasets/me/cache").teacher_path == \
        str(hub / "me/cache" / "teacher")

    def refuse(*_, **__):
        raise RuntimeError("404")

    monkeypatch.setattr(cache_files, "snapshot_download", refuse)
    with pytest.raises(ValueError, match="hf://datasets/no/cache: cannot be downloaded"):
        cache_files.local_cache("hf://datasets/no/cache")
    with pytest.raises(ValueError, match="--push_to_hub me: expected OWNER/NAME"):
        parse_flags(CacheArgs, ["--teacher=t", "--data=d", "--output=o", "--push_to_hub=me"])
