"""A teacher says one thing: in this job, from a cache and behind a server, in every layout."""

import json
import shutil

import pytest
import torch

import ranks
import steps
from isogloss.config import Config
from isogloss.teachers import cache_files
from isogloss.teachers.protocol import load_teacher
from jobs import check_refusals, ds_config, write_corpus
from test_cached_teachers import Reading, write
from text_servers import StandIn


def cached(folder):
    return {"teacher_cache": str(folder), "teacher": ""}


def served(url, tokenizer, top_k):
    return {"teacher": url, "teacher_tokenizer": str(tokenizer),
            "teacher_output_topk": top_k}


@pytest.fixture(scope="module")
def servers(models):
    """Return (one whose model gives padding a probability, one whose padding never comes)."""
    padded = StandIn(models[1])
    masked = StandIn(models[1], masks_padding=True)
    with padded.running(), masked.running():
        yield padded, masked


def write_caches(teacher, texts, folder):
    """Return {kind: folder} of caches that hold all that a teacher says of the steps' texts."""
    texts = [*texts[:20], *filter(None, steps.uneven_samples(texts)), ""]
    data = write_corpus(folder, texts, len(texts))
    kinds = {"hidden": ["--hidden"], "all": ["--top_k=600", "--logp_bits=32"]}
    common = [f"--teacher={teacher}", f"--data={data}"]
    ranks.run(1, write, [[*common, f"--output={folder / kind}", *flags]
                         for kind, flags in kinds.items()])
    return {kind: folder / kind for kind in kinds}


@pytest.fixture(scope="module")
def caches(models, texts, tmp_path_factory):
    return write_caches(models[1], texts, tmp_path_factory.mktemp("caches"))


CASES = [steps.Case("piece_kl"), steps.Case("projection_kl", packed=True), steps.Case("alm")]
# float32 leaves 4e-7 at most of a cache
TOLERANCES = {"hidden": 1e-6, "all": 1e-6, "server": 1e-5}


@pytest.mark.slow
def test_same_loss_and_gradient_of_every_kind_in_every_layout(models, texts, caches, servers,
                                                              tmp_path):
    """All tokens: as of the whole teacher; 20 tokens: as of the live one that keeps 20."""
    padded, masked = servers
    flags = steps.flags_for(models, texts, tmp_path)
    # which columns a step keeps depends on the scale of logits
    wide = {"loss": "projection_kl", "loss_options": {"projection_topk": 600}}
    samples = steps.uneven_samples(texts)
    expected = steps.references_of(flags, [case.loss for case in CASES], samples)
    [of_all_columns] = steps.references([flags | wide], samples)
    live = {"teacher_output": "topk", "teacher_output_topk": 20}
    kinds = {kind: cached(folder) for kind, folder in caches.items()} | {
        "server": wide | served(padded.url, models[1], 600),
        "20 of a server": wide | served(masked.url, models[1], 20), "20 of a model": wide | live}
    for sequence_parallel in (1, 2):  # alone in its process a rank is below
        layouts = []
        for of_kind in kinds.values():
            layouts.append(steps.Layout(0, 2 * sequence_parallel, 2,
                                        of_kind | {"sequence_parallel": sequence_parallel}))
        masked.requests.clear()
        results = ranks.run(2, steps.layout_results, flags, samples, layouts, CASES,
                            steps.SMALL_TILE_MIB)[0]
        of_kinds = {kind: [results.pop(0) for _ in CASES] for kind in kinds}
        for kind, tolerance in TOLERANCES.items():
            of_losses = expected | ({"projection_kl": of_all_columns} if kind == "server" else {})
            for result in of_kinds[kind]:
                steps.check_step((sequence_parallel, kind), result, of_losses[result.case.loss],
                                 tolerance)
        for ours, other in zip(of_kinds["20 of a server"], of_kinds["20 of a model"], strict=True):
            loss = other.metrics["loss"]
            assert abs(ours.metrics["loss"] - loss) <= 1e-6 * loss, (sequence_parallel, ours.case)
            steps.check_gradients(f"sequences over {sequence_parallel}", ours.gradients, other)
        # however many ranks there are, each text is asked for once in a step
        num_texts = sum(map(bool, samples))
        assert len(masked.prompts()) == len(CASES) * num_texts + 1  # one before the first step


@pytest.mark.slow
def test_same_loss_and_gradient_of_texts_that_the_limit_cuts(models, texts, tmp_path):
    """A cache is of the whole texts, and so knows more than a teacher that reads the cut ones."""
    flags = steps.flags_for(models, texts, tmp_path, **steps.cut_flags(models))
    samples = steps.uneven_samples(texts)
    expected = steps.references_of(flags, ["piece_kl"], samples)
    caches = write_caches(models[0], texts, tmp_path)
    server = StandIn(models[0])
    with server.running():
        kinds = cached(caches["all"]), served(server.url, models[0], 400)
        layouts = [steps.Layout(0, 1, 8, of_kind) for of_kind in kinds]
        steps.check_steps(expected, 1, flags, samples[::-1], layouts, [steps.Case("piece_kl")],
                          tolerance=1e-6)


@pytest.mark.slow
def test_an_api_with_echo_teaches_alm_as_the_whole_teacher_does(models, texts, tmp_path):
    flags = steps.flags_for(models, texts, tmp_path)
    samples = steps.uneven_samples(texts)
    expected = steps.references_of(flags, ["alm"], samples)
    hosted = StandIn(models[1], owner="somebody", masks_padding=True)
    with hosted.running():
        layouts = [steps.Layout(0, 4, 2, served(hosted.url, models[1], 0) | {"loss": "alm"})]
        cases = [steps.Case("alm"), steps.Case("alm", packed=True)]
        steps.check_steps(expected, 1, flags, samples, layouts, cases)
    assert all("prompt_logprobs" not in (body or {}) for _, _, body in hosted.requests)


@pytest.mark.slow
def test_other_kinds_and_live_teachers_mix(models, texts, caches, servers, tmp_path):
    live = {"model": str(models[1]), "name": "live", "loss": "alm"}
    other = {"name": "other", "loss": "piece_kl", "weight": 2}
    flags = steps.flags_for(models, texts, tmp_path, teacher="", teacher_weights="ce")
    samples = steps.uneven_samples(texts)
    [expected] = steps.references([flags | {"teachers": json.dumps([live | other, live])}], samples)
    kinds = [{"cache": str(folder)} for folder in caches.values()]
    kinds.append({"model": servers[0].url, "tokenizer": str(models[1]),
                  "teacher_output_topk": 600})
    layouts = [steps.Layout(0, 4, 2, {"teachers": json.dumps([of_kind | other, live])})
               for of_kind in kinds]
    case = steps.AS_FLAGS_SAY
    steps.check_steps({case.loss: expected}, 1, flags, samples, layouts, [case], 8)


CHAT_TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
                 "{{ eos_token }}{% endfor %}")


def with_template(folder, target, template):
    """Return a copy of a model that has a chat template."""
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").write_text(template)
    return target


def write_and_read_chats(commands, models, data, caches, url, chats):
    """See that caches and a server say of chats what the model says."""
    write(commands)
    reading = Reading(models, data, caches)
    of_server = Config(student=models[0], data=data, **served(url, models[1], 600))
    spec = of_server.teacher_kind.of(of_server, reading.teacher, torch.device("cpu"))
    reading.cached["served"] = load_teacher(spec)
    for options in ({}, {"pack": True}, {"sequence_rank": 1, "sequence_size": 2}):
        reading.check(chats, dict.fromkeys(reading.cached, 3e-5), **options)


def test_every_kind_reads_chats_as_the_teacher_renders_them(models, texts, tmp_path):
    folders = [str(with_template(model, tmp_path / model.name, CHAT_TEMPLATE)) for model in models]
    chats = []
    for question, answer in zip(texts[:4], texts[4:8]):
        chats.append([{"role": "user", "content": question[:40]},
                      {"role": "assistant", "content": answer[:60]}])
    data = write_corpus(tmp_path, chats, 4)
    caches = {kind: str(tmp_path / kind) for kind in ("hidden", "all")}
    server = StandIn(folders[1])
    with server.running():
        commands = [
            [f"--teacher={folders[1]}", "--hidden"],
            [f"--teacher={server.url}", f"--teacher_tokenizer={folders[1]}", "--top_k=600",
             "--logp_bits=32"]]
        for argv, folder in zip(commands, caches.values()):
            argv += [f"--data={data}", f"--output={folder}"]
        ranks.run(1, write_and_read_chats, commands, folders, data, caches, server.url, chats)
    manifest = json.loads((tmp_path / "all" / "manifest.json").read_text())
    assert manifest["dtype"] == cache_files.SERVED and manifest["holds_chats"]
    assert manifest["teacher"] == server.url
    other = with_template(models[1], tmp_path / "other", CHAT_TEMPLATE.replace("<", "["))
    flags = dict(student=folders[0], data=data, output_dir=str(tmp_path), max_length=99,
                 ds_config=ds_config(tmp_path / "ds.json", 0, 1, 1),
                 teacher_cache=caches["hidden"], teacher=str(other))
    check_refusals(flags, [({}, "by another chat template")])
