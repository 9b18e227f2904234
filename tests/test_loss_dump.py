"""--dump_losses and the accuracies of a step, compared with torch alone on what the files hold."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from isogloss import distill, losses
from isogloss.config import Config
from isogloss.errors import CannotSave
from isogloss.objective.loss_dump import LossDump
from isogloss.projection_tools.build import cached_projection
from isogloss.spelling import unwritten_twins
from jobs import check_refusals, ds_config, write_corpus
from steps import Layout, small_collator, start_layout, texts_of_rank, uneven_samples

LAYOUT = Layout(2, 2, 2)
PLAIN = {  # by teacher: (logits, chunks, projection, cfg) -> the loss of each chunk, in order
    "projected": lambda x, y, chunks, tables, **options: losses.projection_kl(
        x, y, *chunks, *tables, chunk_average="logp", reduction="none", **options)[0],
    "gold": lambda x, y, chunks, tables, **options: losses.gold(
        x, y, *chunks, *losses.common_tokens(*tables), reduction="none", **options)[0],
    "equal": lambda x, y, chunks, tables: losses.forward_kl(
        *first_rows(x, y, chunks), None, reduction="none")[0],
}


def first_rows(x, y, chunks):
    """Return the (1, C, X) rows where the chunks of both sides begin."""
    listed = losses.find_chunks(*chunks)
    return x.flatten(0, 1)[listed.first_S][None], y.flatten(0, 1)[listed.first_T][None]


def steps_of(flags_list, samples):
    """Return (metrics, what the student reads and predicts) of one step for each list of flags."""
    results = []
    for flags in flags_list:
        state, inputs = start_layout(flags, LAYOUT)
        collator = small_collator(state.cfg, inputs, state.device)
        batches = [collator(texts) for texts in texts_of_rank(samples, LAYOUT)]
        metrics = distill.train_step(state, batches).metrics()
        read = [(batch.student.ids.clone(), batch.student.labels.clone()) for batch in batches]
        results.append((metrics, read))
        state.engine.destroy()
    return results


@pytest.fixture
def entries(models, untied):
    return [{"name": "projected", "model": str(models[1]), "loss": "projection_kl",
             "loss_options": {"chunk_average": "logp"}},
            {"name": "gold", "model": str(models[1]), "loss": "gold", "weight": 0.5},
            {"name": "pieces", "model": str(models[1]), "token_weights": "early"},
            {"name": "equal", "model": str(untied), "loss": "forward_kl"}]


@pytest.fixture
def step(models, entries, texts, tmp_path):
    """Return (flags, metrics of a step, of the same without files, what each rank has read)."""
    flags = {"student": str(models[0]), "data": write_corpus(tmp_path, texts, 9), "max_length": 150,
             "teachers": json.dumps(entries), "output_dir": str(tmp_path)}
    dumping = flags | {"dump_losses": str(tmp_path / "losses")}
    samples = uneven_samples(texts)
    of_ranks = ranks.run(2, steps_of, [dumping, flags], samples)
    read = [pair for of_rank in of_ranks for pair in of_rank[0][1]]
    return dumping, *[metrics for metrics, _ in of_ranks[0]], read


@pytest.mark.slow
def test_files_hold_the_loss_of_each_chunk(step, models, entries, pair, tmp_path):
    flags, metrics, without_files, read = step
    times = "seconds", "tokens_per_second"
    assert {key: value for key, value in metrics.items() if not key.endswith(times)} == {
        key: value for key, value in without_files.items() if not key.endswith(times)}
    paths = sorted((tmp_path / "losses").iterdir())
    assert [path.name for path in paths] == [
        f"step_0000001_rank_00{rank}_batch_0{number}.safetensors"
        for rank in (0, 1) for number in (0, 1)]
    # who may read the run's other files may read these
    assert {path.stat().st_mode for path in paths} == {(tmp_path / "corpus9.jsonl").stat().st_mode}
    models_by_path = {path: AutoModelForCausalLM.from_pretrained(path)
                      for path in {flags["student"], *[entry["model"] for entry in entries]}}
    projection = cached_projection(pair)
    # a byte beside the token that has its bytes is no token of text
    written = projection["indices"].clone()
    written[unwritten_twins(pair.tables[0], pair.tokenizers[0])] = -1
    tables = dict.fromkeys(PLAIN, (projection["indices"], projection["likelihoods"]))
    tables["gold"] = written, projection["likelihoods"]
    totals, agreed, counts = [dict.fromkeys([entry["name"] for entry in entries], 0.0)
                              for _ in range(3)]
    correct = num_tokens = 0
    for path, (ids, labels) in zip(paths, read, strict=True):
        file = load_file(path)
        assert torch.equal(file["student_ids"], ids)
        logits = models_by_path[flags["student"]](input_ids=ids).logits.detach()
        student = logits[..., : len(pair.tables[0])]
        correct += int((student.argmax(-1) == labels).sum())
        num_tokens += int((labels >= 0).sum())
        for entry in entries:
            name = entry["name"]
            chunks, teacher_ids = [file[f"{side}/{name}"] for side in (
                "student_chunk", "teacher_chunk")], file[f"teacher_ids/{name}"]
            logits = models_by_path[entry["model"]](input_ids=teacher_ids).logits.detach()
            teacher = logits[..., : len(pair.tables[0 if name == "equal" else 1])]
            listed = losses.find_chunks(*chunks)
            rows = listed.first_S // ids.shape[1]
            numbers = chunks[0].flatten()[listed.first_S]
            assert torch.equal(file[f"chunk/{name}"], torch.stack([rows, numbers], 1))
            values = file[f"loss/{name}"]
            totals[name] += float(values.sum())
            counts[name] += len(values)
            if name in PLAIN:
                expected = PLAIN[name](student, teacher, chunks, tables[name])
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
            if name in ("projected", "gold"):
                agreed[name] += num_agreed(name, student, teacher, chunks, tables[name])
    for name in PLAIN:
        assert metrics[f"kd/{name}"] == pytest.approx(totals[name] / counts[name], rel=1e-5)
    terms = totals["pieces"] / metrics["kd/pieces"]  # positions, of which chunks have one or more
    assert terms == pytest.approx(round(terms), abs=1e-2) and terms > counts["pieces"]
    assert metrics["accuracy"] == pytest.approx(correct / num_tokens) and correct
    for name in ("projected", "gold"):
        value = metrics[f"projected_accuracy/{name}"]
        assert value == pytest.approx(agreed[name] / counts[name]) and 0 < value < 1
    assert not {"projected_accuracy/pieces", "projected_accuracy/equal"} & metrics.keys()


def num_agreed(name, student, teacher, chunks, tables):
    """Return in how many chunks both models find the same most likely, chunk by chunk."""
    indices, likelihoods = tables
    common = losses.common_tokens(*tables)
    agreed = 0
    for b in range(len(chunks[0])):
        for number in sorted(set(chunks[0][b].tolist()) & set(chunks[1][b].tolist()) - {-1}):
            p, q = [logits[b, chunk[b] == number].double().softmax(-1)
                    for logits, chunk in zip((student, teacher), chunks)]
            if name == "gold":
                p, q = p.mean(0)[common.student], q.mean(0)[common.teacher]
            else:
                mapped = torch.zeros(teacher.shape[-1], dtype=torch.float64)
                for slot in range(indices.shape[1]):
                    used = indices[:, slot] >= 0
                    mapped.index_add_(0, indices[used, slot],
                                      (p.mean(0) * likelihoods[:, slot])[used])
                p, q = mapped, q.log().mean(0)
            agreed += int(p.argmax() == q.argmax())
    return agreed


def test_a_place_that_cannot_be_written_to_is_one_line(models, texts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "corpus.txt").write_text("\n".join(texts[:9]))
    config = ds_config(tmp_path / "ds.json", 2, 1, 1)
    flags = {"student": str(models[0]), "teacher": str(models[1]), "ds_config": config,
             "data": str(tmp_path / "corpus.txt"), "output_dir": str(tmp_path / "run")}
    check_refusals(flags, [({"dump_losses": str(tmp_path / "file")},
                            "--dump_losses " + str(tmp_path / "file"))])
    with pytest.raises(ValueError, match="--dump_losses x with --sequence_parallel 2"):
        Config(**flags, dump_losses="x", sequence_parallel=2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    batch = SimpleNamespace(student=SimpleNamespace(ids=torch.zeros(1, 1)), teachers=[])
    with pytest.raises(CannotSave, match=r"--dump_losses: .*file/step_0000003_rank_000"):
        LossDump(tmp_path / "file", []).write(3, batch, [])
