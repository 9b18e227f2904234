"""config.py: values are checked, teachers are read, and the tables of losses and sources decide."""

import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from cases import close, gradient
from conftest import ROOT
from isogloss import losses
from isogloss.config import Config, configs_by_teacher, options_of_tasks, routes_by_teacher
from isogloss.data.sample import TextEncoder
from isogloss.flags.help import help_text
from isogloss.flags.parse import choices_of, parse_flags
from isogloss.objective.loss_table import LOSSES, LossSpec, build_loss
from isogloss.projection_tools.build import cached_projection
from isogloss.several_teachers import loss_flags, teacher_keys
from isogloss.spelling import unwritten_twins
from isogloss.teachers.model import ENGINES
from isogloss.tile_plan import SubTile
from tokens import pair_of, real

GOOD = dict(student="s", teacher="t", data="d")
WEIGHED = '[{"data": "d", "weight_key": "w"}]'
ALM = {"max_divergence": 0.0}
DIVERGENCE = ALM | {"topk_of": "teacher", "choice_weight": 0.3}
JSD = {"loss": "generalized_jsd", "loss_options": {"beta": 0.3}}
NAMES = [entry.name for entry in fields(Config)]


def several(*entries, **flags):
    return Config(student="s", data="d", teachers=json.dumps(entries), **flags)


def test_help_names_every_choice_and_losses_read_flags_that_there_are():
    text = help_text(Config)
    for entry in fields(Config):
        for choice in choices_of(entry):
            assert choice in text, (entry.name, choice)
    for name, spec in LOSSES.items():
        assert set(spec.flags) <= set(NAMES), name
    about = text[text.index("--teacher_engine"):text.index("--teacher_tp")]
    assert all(engine in about for engine in ("auto", "transformers", "vllm", *ENGINES))


def test_the_memory_of_the_loss_follows_the_device(monkeypatch):
    from isogloss.inputs import automatic_mib, tile_memory

    cfg = Config(**GOOD)
    assert cfg == Config(**GOOD, loss_memory_mib="auto") == Config(**GOOD, loss_memory_mib=0)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert tile_memory(cfg, cpu) == 512
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, 80 * 2**30))
    assert tile_memory(cfg, cuda) == 8192
    assert tile_memory(Config(**GOOD, loss_memory_mib=7), cuda) == 7
    assert tile_memory(Config(**GOOD, loss_memory_mib=7, tiled=False), cuda) == float("inf")
    assert [automatic_mib(gib * 2**30) for gib in (1, 20, 1000)] == [512, 2048, 16_384]


def test_the_table_of_losses_decides(monkeypatch):
    """A new entry is a choice, and its flags may differ for each teacher."""
    with pytest.raises(ValueError, match="--loss mine: expected one of piece_kl"):
        Config(**GOOD, loss="mine")
    monkeypatch.setitem(LOSSES, "mine", LossSpec(build=None, needs="chunks", flags=("seed",)))
    assert Config(**GOOD, loss="mine").loss == "mine"
    assert "seed" in loss_flags() and "seed" in teacher_keys(Config)


@pytest.mark.parametrize("name", [name for name, spec in LOSSES.items()
                                  if "loss_topk" in spec.flags])
def test_topk_of_decides_whose_tokens_a_divergence_keeps(name):
    torch.manual_seed(0)
    x, y = 2 * torch.randn(2, 6, 12, dtype=torch.float64)
    chunk = torch.arange(6)[None]
    sub_tile = SimpleNamespace(terms=losses.find_chunks(chunk, chunk), weight=None)
    pair = SimpleNamespace(fingerprints=("one tokenizer", "one tokenizer"))
    divergence = getattr(losses, "forward_kl" if name == "piece_kl" else name)
    values = []
    for side in ("teacher", "student"):
        cfg = Config(**GOOD, loss=name, loss_topk=2, loss_options={"topk_of": side})
        loss = LOSSES[name].build(cfg, pair, "cpu")
        values.append(loss.loss_fn(x, y, sub_tile))
        expected, _ = divergence(x[None], y[None], None, top_k=2, support=side)
        assert abs(values[-1] - expected) < 1e-12
    assert abs(values[0] - values[1]) > 1e-3


def test_each_teacher_has_flags_and_routes_of_its_own():
    cfg = several({"model": "a/A", "weight": 3, "loss": "gold", "tp": 2, "temperature": 2.0},
                  {"model": "b/B", "name": "b", "max_length": 99, "teacher_output": "topk"},
                  {"model": "c/C", "loss": "reverse_kl", "loss_topk": 16,
                   "loss_options": {"topk_of": "student"}}, kd_weight=0.5, loss="alm")
    first, second, third = configs_by_teacher(cfg).items()
    assert first[0] == "A" and second[0] == "b"
    assert (first[1].teacher, first[1].kd_weight, first[1].loss) == ("a/A", 1.5, "gold")
    assert (first[1].teacher_tp, first[1].temperature) == (2, 2.0)
    assert (second[1].kd_weight, second[1].loss, second[1].teacher_max_length) == (0.5, "alm", 99)
    assert second[1].teacher_output == "topk" and second[1].teachers == ""
    assert (second[1].follows_student, third[1].follows_student) == (False, True)
    assert configs_by_teacher(Config(**GOOD)) == {"t": Config(**GOOD)}
    cfg = several({"model": "A", "routes": ["x"]}, {"model": "B"}, route_key="domain")
    assert routes_by_teacher(cfg) == {"A": ["x"], "B": None}
    assert routes_by_teacher(Config(**GOOD)) == {}


def test_options_go_with_the_loss_that_they_are_of():
    cfg = several({"model": "A"}, {"model": "B", "loss": "alm"},
                  {"model": "C", "loss_options": {"beta": 0.9}},
                  {"model": "D", "loss": "skew_forward_kl", "loss_options": {"skew": 0.2}}, **JSD)
    assert [of.options_of_loss for of in configs_by_teacher(cfg).values()] == [
        DIVERGENCE | {"beta": 0.3}, ALM, DIVERGENCE | {"beta": 0.9}, DIVERGENCE | {"skew": 0.2}]
    cfg.check_run()
    unread = several({"model": "A", "loss": "alm"}, {"model": "B", "loss_options": {"beta": 0.9}},
                     **JSD)
    with pytest.raises(ValueError, match=r"^--loss_options .* no teacher of this run reads it"):
        unread.check_run()
    learned = {"model": "A", "loss": "projection_kl", "loss_options": {"learn_projection": True}}
    with pytest.raises(ValueError, match="learn_projection of A: is for the only teacher"):
        several(learned)
    with pytest.raises(ValueError, match=re.escape("'jsd_beta'; it is --loss_options")):
        several({"model": "A", "jsd_beta": 0.3})


def test_falling_weights_have_one_name_and_a_half_life():
    lives = {"": 0, "column": 0, "early": 256, "early:256": 256, "early:9.50": 9.5,
             "early:1e9": 1e9}
    for weights, half_life in lives.items():
        cfg = Config(**GOOD | {"token_weights": weights, "data": WEIGHED})
        assert cfg.token_half_life == half_life
        assert Config(**GOOD | {"token_weights": cfg.token_weights, "data": WEIGHED}) == cfg
    assert Config(**GOOD, token_weights="early:256.0") == Config(**GOOD, token_weights="early")


def test_there_are_at_most_105_flags():
    assert len(NAMES) <= 105


def test_the_help_of_tasks_names_their_options():
    about = Config.__dataclass_fields__["eval_task_options"].metadata["about"]
    assert f"{', '.join(options_of_tasks(None).defaults)}." in about
    for options, message in (
        ({"shots": -2}, "--eval_task_options: shots -2: expected -1 or more"),
        ({"samples": 4}, "samples is 4 at temperature 0, where all samples are equal"),
        ({"seed": 4}, "unknown option 'seed'; an evaluation has data, shots"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**GOOD, eval_tasks="gsm8k", eval_task_options=options)


def test_the_page_of_losses_has_every_option():
    page = (ROOT / "docs" / "losses.md").read_text()
    section = page.split("## Options of a loss")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.M))
    divergences = [name for name, spec in LOSSES.items() if "loss_topk" in spec.flags]
    of_losses = {}
    for name, spec in LOSSES.items():
        for option in spec.options:
            of_losses.setdefault(option, set()).add(name)
    many = {"all": " ".join(LOSSES), "`piece_kl`, divergences": " ".join(divergences)}
    assert {option: set(re.findall(r"\w+", many.get(losses, losses)))
            for option, losses in rows.items()} == of_losses


def test_configs_of_teachers_are_made_once_and_hear_what_the_start_of_a_run_says():
    cfg = several({"model": "a/A"}, {"model": "b/B"})
    configs = configs_by_teacher(cfg)
    cfg.settle("chat_date", "2026-05-01")
    assert configs_by_teacher(cfg) is configs
    assert {each.chat_date for each in (cfg, *configs.values())} == {"2026-05-01"}
    other = replace(cfg, kd_weight=2.0)
    assert [each.kd_weight for each in configs_by_teacher(other).values()] == [2.0, 2.0]


WRONG = {
    "no list": ('{"model": "A"}', "expected a list of objects"),
    "no JSON": ('[{"model": "A"]', r"not valid JSON \(line 1, column 15\); expected a list such"),
    "an unknown key": ('[{"model": "A", "los": "gold"}]', "unknown key 'los'; its keys"),
    "no model": ('[{"name": "A"}]', "an entry names no model"),
    "a wrong value": ('[{"model": "A", "loss": "x"}]', "--loss x: expected one of"),
    "a weight of 0": ('[{"model": "A", "weight": 0}]', "weight 0 of A: expected a number above 0"),
    "a weight in words": ('[{"model": "A", "weight": "2"}]', "weight '2' of A: expected a number"),
    "twins": ('[{"model": "A"}, {"model": "x/A"}]', "two are named A; give each"),
    "a key twice": ('[{"model": "A", "loss": "alm", "loss": "uld"}]', "has the key 'loss' twice"),
    "a depth without end": ("[" * 100_000, "nested too deep"),
    "a number without end": ("9" * 5000, "--teachers: not valid JSON"),
    "a name of 300 letters": (json.dumps([{"model": "A", "name": 300 * "b"}]), "name 'bbb"),
    "no name": ('[{"model": "A", "name": ""}]', "name '': expected a text"),
    "a name that is a list": ('[{"model": "A", "name": ["b"]}]', "expected a text of at most"),
    "a weight that is true": ('[{"model": "A", "weight": true}]', "weight True of A: expected"),
    "a weight of infinity": ('[{"model": "A", "weight": 1e999}]', "weight inf of A: expected"),
    "routes without a key": ('[{"model": "A", "routes": ["x"]}]', "that --route_key names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_teachers_are_refused(case):
    text, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Config(student="s", data="d", teachers=text)


@pytest.mark.parametrize(("flags", "message"), [
    ({"teacher": ""}, "--teacher is missing: give a hub id or a local path"),
    ({"template_kwargs": "[1]"}, "expected a JSON object"),
    *[({"loss": "hybrid_uld", "loss_options": {"matched_weight": weight}},
       f"--loss_options: matched_weight={weight}: expected a number, 0 or more and at most 1")
      for weight in (-0.5, 1.5)],
    *[({"token_weights": weights}, f"--token_weights {weights}: expected early, early:N")
      for weights in ("late", "early:", "early:0", "early:nan", "early:x", "column:w")],
    ({"data": '[{"data": "d", "weight_key": 3}]'}, "--data: weight_key=3: expected str, got int"),
    ({"data": WEIGHED, "join_rows": 9}, "--data: weight_key w with --join_rows 9: weighs one row"),
    ({"loss_options": "[1]"}, r"--loss_options \[1\]: expected a JSON object"),
    ({"loss_options": "beta"}, "--loss_options: not valid JSON"),
    ({"loss_options": {"beta": 1}}, "unknown option 'beta'; --loss piece_kl has max_diver"),
    (JSD | {"loss_options": '{"beta": NaN}'}, "beta=nan: expected a number"),
    (JSD | {"loss_options": '{"beta": true}'}, "beta=True: expected float, got bool"),
])
def test_wrong_values_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        Config(**GOOD | flags)
    Config(student="s", data="d", kd_weight=0)  # no teacher is needed


IDLE = [  # flags that would do nothing, words of the line
    ({"loss": "alm", "loss_topk": 5}, "--loss_topk 5: no teacher of this run reads it, nor does"),
    ({"loss_options": {"topk_of": "student"}}, "topk_of student: is for --loss_topk; add it"),
    ({"projection": "x"}, "--projection x: no teacher of this run reads it"),
    ({"token_weights": "early", "data": WEIGHED}, "--data: weight_key: no teacher of this run"),
    ({"teacher_output_topk": 5}, "--teacher_output_topk 5: no teacher of this run reads it"),
    ({"teacher_cache": "c", "teacher_output": "topk"}, "--teacher_output topk: no teacher of"),
    ({"teacher_cache": "c", "teacher_tp": 2}, "--teacher_tp 2: no teacher of this run reads it"),
    ({"rollout_every": 2}, "--rollout_every 2: is for what the student writes; add --on_policy"),
    ({"rollout_tokens": 9}, "--rollout_tokens 9: is for what the student writes"),
    ({"on_policy": 0.5, "max_ratio": 2.0}, "each step has its own; add --rollout_every"),
    ({"eval_task_options": {"limit": 5}},
     '--eval_task_options {"limit": 5}: is for --eval_tasks, which names none'),
    ({"eval_every": 5}, "--eval_every 5: is for held-out rows, and there are none"),
    ({"eval_samples": 5}, "--eval_samples 5: is for held-out rows, and there are none"),
    ({"eval_draft": True}, "--eval_draft: is for held-out rows, and there are none"),
    ({"teacher_weights": "ce"}, "--teacher_weights ce: is for several teachers"),
    ({"route_key": "x"}, "--route_key x: chooses among teachers; list them with --teachers"),
    ({"teacher": "self", "dynamic_scale": True}, "a teacher that begins as the student has a loss"),
]
SEVERAL_IDLE = [  # --teachers, --teacher_weights, words of the line
    ([{"model": "A", "loss": "alm", "loss_topk": 3}], "fixed", "loss_topk 3 of A: nothing reads"),
    ([{"cache": "A", "tp": 2}, {"model": "B"}], "fixed", "tp 2 of A: nothing reads it there"),
    ([{"model": "A"}, {"model": "B", "loss": "alm"}], "mean_p", "loss alm of B: --teacher_weights"),
    ([{"model": "A"}, {"model": "B", "temperature": 2.0}], "mean_p", "has one loss, the"),
]


@pytest.mark.parametrize(("flags", "message"), IDLE)
def test_a_flag_that_would_do_nothing_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**GOOD | flags).check_run()


@pytest.mark.parametrize(("entries", "weights", "message"), SEVERAL_IDLE)
def test_a_key_that_no_teacher_reads_is_refused(entries, weights, message):
    with pytest.raises(ValueError, match=message):
        several(*entries, teacher_weights=weights).check_run()


SOURCES = json.dumps([{"data": "a", "eval_rows": 3, "weight_key": "w", "route_key": "r"},
                      {"data": "b"}])


@pytest.mark.parametrize("flags", [
    # a run to compare with
    {"kd_weight": 0.0, **JSD, "teacher_output_topk": 5},
    JSD | {"teachers": [{"model": "A"}, {"model": "B", "loss": "alm"}], "teacher_weights": "ce"},
    {"teachers": [{"model": "A"}, {"cache": "B"}], "teacher_tp": 2, "teacher_output": "topk"},
    {"teachers": [{"model": "A", "loss_topk": 5}, {"model": "B"}],
     "loss_options": {"topk_of": "student"}},
    {"teachers": [{"model": "A", "token_weights": "column"}, {"model": "B"}], "data": WEIGHED},
    {"teachers": [{"model": "A", "routes": ["x"]}, {"model": "B"}], "data": SOURCES,
     "token_weights": "column", "eval_samples": 2, "eval_every": 5},
    {"teachers": [{"model": "A", "loss": "alm"}, {"model": "B", "loss": "alm"}],
     "teacher_weights": "mean_p"},
    {"eval_samples": 2, "eval_rows": 3, "rollout_tokens": 9},
    {"teacher": "http://a:1", "teacher_tokenizer": "t", "teacher_output_topk": 5},
    {"on_policy": 0.5, "writer": "x", "max_ratio": 2.0},
    {"teacher": "self", "dynamic_scale": True, "teacher_prompt_key": "hint"},
])
def test_flags_that_something_reads_are_taken(flags):
    """By one teacher of several, or by one source of several, too."""
    if "teachers" in flags:
        flags = {"teacher": ""} | flags | {"teachers": json.dumps(flags["teachers"])}
    Config(**GOOD | flags).check_run()


def test_a_command_line_is_checked_as_a_whole(tmp_path):
    words = [f"--{name}={value}" for name, value in GOOD.items()]
    with pytest.raises(ValueError, match=r"^--loss_topk 5: no teacher of this run reads it, nor"):
        parse_flags(Config, [*words, "--loss=alm", "--loss_topk=5"])
    path = tmp_path / "f.yaml"
    path.write_text("rollout_every: 3\neval_every: 9")
    # what the file says goes with what the command line switches off
    words_off = [*words, f"--config={path}", "--on_policy=0", "--eval_rows=0"]
    assert parse_flags(Config, words_off, file_flag="config").rollout_every == 3
    with pytest.raises(ValueError, match=r"add --on_policy \(--rollout_every is from"):
        parse_flags(Config, [*words, f"--config={path}"], file_flag="config")


# --- one loss in a run ----------------------------------------------------------------------------

HYBRID = GOOD | dict(loss="hybrid_uld", temperature=1.5)
# chunks of one token and of two on either side, a position outside of chunks
STUDENT_CHUNK = torch.tensor([0, 1, 1, 2, -1])
TEACHER_CHUNK = torch.tensor([-1, 0, 1, 2, 2])


def sub_tile_of(vocab_sizes):
    """Return a sub-tile of random labels; test_losses.py compares the function itself."""
    torch.manual_seed(1)
    labels = [torch.randint(size, (5,)) for size in vocab_sizes]
    return SubTile(slice(0, 5), slice(0, 5), *labels, STUDENT_CHUNK, TEACHER_CHUNK,
                   losses.find_chunks(STUDENT_CHUNK[None], TEACHER_CHUNK[None]),
                   weight=torch.tensor([1.0, 0.5, 9.0, 2.0, 9.0]))


@pytest.mark.parametrize("matched_weight", [None, 0.0, 0.8])
def test_hybrid_uld_of_a_run_is_the_function(encoders, matched_weight):
    sizes = [len(side.table) for side in encoders]
    sub_tile = sub_tile_of(sizes)
    more = {} if matched_weight is None else {"matched_weight": matched_weight}
    loss = build_loss(Config(**HYBRID, loss_options=more), *encoders, "cpu")
    x, y = [2 * torch.randn(5, size, dtype=torch.float64) for size in sizes]
    x.requires_grad_()
    value = loss.loss_fn(x, y, sub_tile)
    projection = cached_projection(pair_of(encoders))
    projection["indices"][unwritten_twins(encoders[0].table, encoders[0].tokenizer)] = -1
    common = losses.common_tokens(projection["indices"], projection["likelihoods"])
    ids = [side[None] for side in sub_tile[2:6]]
    expected, _ = losses.uld(
        x[None], y[None], *ids, common=common, matched_weight=matched_weight, temperature=1.5,
        weight_BS=sub_tile.weight[None])
    assert abs(value - expected) < 1e-9 * expected
    assert close(gradient(value, x), gradient(expected, x), 1e-9)


@pytest.mark.parametrize("loss", ["gold", "h_kl", "hybrid_uld"])
def test_a_period_is_taught_by_a_period(loss):
    """Not its byte, for which SentencePiece has a token, too, that it does not write."""
    encoders = [TextEncoder(*real(name), 400) for name in ("tok512", "gpt2")]
    rows = [torch.zeros(5, len(side.table), dtype=torch.float64) for side in encoders]
    rows[1][:, encoders[1].tokenizer.convert_tokens_to_ids(".")] = 20.0
    rows[0].requires_grad_()
    options = {"matched_weight": 1.0} if loss == "hybrid_uld" else {}
    of_run = build_loss(Config(**GOOD | dict(loss=loss), loss_options=options), *encoders, "cpu")
    value = of_run.loss_fn(*rows, sub_tile_of([len(side.table) for side in encoders]))
    raised = gradient(value, rows[0])[0].argmin()  # the student begins with equal logits
    assert raised == encoders[0].tokenizer.convert_tokens_to_ids(".")
