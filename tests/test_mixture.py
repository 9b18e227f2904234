"""mixture.py: several data sets with weights, mapped and as streams, in runs that stop."""

import json

import pytest

import ranks
from isogloss.config import Config
from isogloss.data import stream
from isogloss.data.kinds import mixed as mixture
from isogloss.data.kinds.mixed import BLOCK, Mixture
from isogloss.data.mixture import Source, SourceOptions, seed_of, sources_of
from isogloss.data.open_data import load_dataset
from isogloss.data.order import ExampleReader, ShuffledExamples
from isogloss.data.stream import StreamedExamples
from jobs import check_same_curve, ds_config, losses_of, run_distill
from test_cached_teachers import write

# --- the order ------------------------------------------------------------------------------------


class Numbers:
    """A stream without an end whose samples are their numbers."""

    place = None

    def __init__(self, name):
        self.name = name

    def example(self, index):
        return self.name, index


def mixed(weights, seed=3):
    return Mixture([Numbers(name) for name in range(len(weights))], weights, seed)


@pytest.mark.parametrize("weights", [[1], [2, 1], [0.3, 0.3, 0.4], [5, 1, 1e-3], [1e-9, 1]])
def test_every_source_gives_its_samples_in_order_and_its_share(weights):
    examples = list(map(mixed(weights).example, range(3 * BLOCK + 99)))
    for name, weight in enumerate(weights):
        indices = [index for source, index in examples if source == name]
        assert indices == list(range(len(indices)))
        for end in (BLOCK, 2 * BLOCK, 3 * BLOCK):  # blocks end at most one per source earlier
            given = sum(source == name for source, _ in examples[:end])
            assert abs(given - end * weight / sum(weights)) <= 1 + len(weights)


def test_an_order_is_that_of_the_seed_and_of_the_place_alone():
    weights = [2, 1, 0.01]
    whole = list(map(mixed(weights).example, range(5 * BLOCK)))
    other = mixed(weights)
    for position in (4321, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 7):  # in any order
        assert other.example(position) == whole[position]
    assert whole != list(map(mixed(weights, seed=4).example, range(5 * BLOCK)))
    blocks = [[source for source, _ in whole[begin : begin + 100]] for begin in (0, BLOCK)]
    assert blocks[0] != blocks[1] and len(set(blocks[0])) > 1
    for position in (0, 999, 1000, 2998, 4999):
        assert other.position_of(*whole[position]) == position


def streams_of(folder, streaming, seed=3, places=(None, None)):
    """Return streams of 40 and of 25 rows."""
    streams = []
    for name, count, place in zip("ab", (40, 25), places):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": f"{name}{row}"}) for row in range(count)))
        dataset = load_dataset(str(path), "text", streaming=streaming)
        its_seed = seed_of(Source(name, None), seed)
        streams.append(StreamedExamples(dataset, ExampleReader("text"), its_seed, 0, place)
                       if streaming else ShuffledExamples(dataset, ExampleReader("text"), its_seed))
    return streams


@pytest.mark.parametrize("streaming", [False, True])
def test_every_epoch_of_a_source_has_each_of_its_rows_once(tmp_path, streaming):
    examples = Mixture(streams_of(tmp_path, streaming), [2, 1], 3)
    texts = [examples.example(position).content for position in range(300)]
    for name, count in (("a", 40), ("b", 25)):
        own = [text for text in texts if text[0] == name]
        for epoch in range(len(own) // count):
            its = own[epoch * count : (epoch + 1) * count]
            assert sorted(its) == sorted(f"{name}{row}" for row in range(count))
            assert its != own[:count] or epoch == 0
    assert examples.place is None or streaming


def test_sources_of_equal_length_are_shuffled_each_its_own_way():
    seeds = {seed_of(Source(name, None), seed) for name in ("a", "b") for seed in (0, 1)}
    assert len(seeds) == 4
    assert seed_of(Source("", None), 5) == 5  # of a single one, as ever


def test_a_mixture_of_streams_goes_on_from_the_place_of_any_position(tmp_path, monkeypatch):
    """Which says no more than what can be read from there, and little less."""
    monkeypatch.setattr(stream, "BLOCK_ROWS", 8)
    monkeypatch.setattr(mixture, "BLOCK", 50)
    whole = Mixture(streams_of(tmp_path, True), [3, 1], 3)
    texts = []
    places = []
    for position in range(260):
        texts.append(whole.example(position).content)
        places.append(json.loads(json.dumps(whole.place)))
    for position in (0, 1, 30, 49, 50, 77, 150, 259):
        usable = [place for place in places if place["position"] <= position]
        place = usable[-1]
        assert place["position"] > position - 60
        again = Mixture(streams_of(tmp_path, True, places=place["sources"]), [3, 1], 3)
        assert [again.example(later).content for later in range(position, 260)] == texts[position:]


# --- what --data says -----------------------------------------------------------------------------

NEEDED = {"student": "s", "teacher": "t"}


def config(*entries, **flags):
    return Config(**NEEDED | flags, data=json.dumps(entries))


def test_a_source_has_the_flags_of_its_entry_and_those_of_the_run():
    first, second = sources_of(config(
        {"data": "x/a.jsonl", "weight": 2, "text_key": "messages", "eval_rows": 7},
        {"data": "org/b:c", "weight": 1, "name": "other", "route": "maths"}, split="train[:9]",
        eval_rows=5))
    assert (first.name, first.weight, first.route) == ("a.jsonl", 2, None)
    assert (second.name, second.weight, second.route) == ("other", 1, "maths")
    assert (first.cfg.data, first.cfg.text_key, first.cfg.eval_rows) == ("x/a.jsonl", "messages", 7)
    assert (second.cfg.data, second.cfg.text_key, second.cfg.eval_rows) == ("org/b:c", "text", 5)
    assert first.cfg.split == second.cfg.split == "train[:9]"
    [single] = sources_of(Config(**NEEDED, data="[1].jsonl"))  # a file
    assert single.name == "" and single.route is ... and single.cfg.data == "[1].jsonl"


def test_an_entry_alone_is_read_as_a_path_is_with_columns_of_its_own():
    [alone] = sources_of(config({"data": "a.jsonl", "tools_key": "functions", "drop_images": True,
                                 "txt_samples": "file"}, streaming=True))
    assert (alone.name, alone.cfg.data, alone.route) == ("", "a.jsonl", ...)
    options = alone.cfg.source_options
    assert (options.tools_key, options.drop_images, options.txt_samples) == (
        "functions", True, "file")
    first, second = sources_of(config({"data": "a", "tools_key": "functions"}, {"data": "b"}))
    assert (first.cfg.source_options.tools_key, first.name) == ("functions", "a")
    assert second.cfg.source_options == Config.source_options == SourceOptions()
    for wrong, message in (({"drop_images": 1}, "--data: drop_images=1: expected bool, got int"),
                           ({"txt_samples": "page"}, "--data: txt_samples page: expected one of")):
        with pytest.raises(ValueError, match=message):
            config({"data": "a"} | wrong)


A, B = {"data": "a"}, {"data": "b"}
WRONG = {
    "no data": ([{"weight": 1}], {}, "an entry names no data"),
    "an unknown key": ([A | {"texts": "x"}], {}, "unknown key 'texts'; its keys are name, weight"),
    "a key of the run": ([A | {"max_length": 9}], {}, "unknown key 'max_length'"),
    "a table in a table": ([{"data": "[{}]"}], {}, "an entry names no data"),
    "a weight of 0": ([A | {"weight": 0}, B | {"weight": 1}], {}, "weight 0 of a: expected"),
    "a weight for one": ([A | {"weight": 1}, B], {}, "b has no weight, and others have one"),
    "a stream without": ([A, B], {"streaming": True}, "a has no weight, and a stream does not"),
    "twins": ([A, A | {"data": "x/a"}], {}, "two are named a; give each"),
    "two choosers": ([A | {"route": "x", "route_key": "y"}], {}, "of a with a route_key: both"),
    "a wrong value": ([A | {"join_rows": -1}], {}, "--join_rows -1: expected 0 or more"),
    "flags apart": ([A | {"completion_key": "x"}], {}, "--completion_key x: what follows a prompt"),
    "an endless stream": ([A | {"weight": 1, "eval_split": "test"}], {"streaming": True},
                          "say by --eval_rows how many"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_mixtures_are_refused(case):
    entries, flags, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        config(*entries, **flags)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """Entries of a text, a prompt and its completion, and a chat."""
    folder = tmp_path_factory.mktemp("sources")
    chat = [[{"role": "user", "content": text[:30]}, {"role": "assistant", "content": text[30:]}]
            for text in texts[:10]]
    kinds = {
        "plain": [{"text": text} for text in texts[10:40]],
        "asked": [{"q": text[:20], "a": text[20:], "text": "unread"} for text in texts[40:48]],
        "chats": [{"messages": messages} for messages in chat],
    }
    keys = {"plain": {}, "asked": {"prompt_key": "q", "completion_key": "a"},
            "chats": {"text_key": "messages", "route": "talk"}}
    entries = []
    for weight, (name, rows) in zip((3, 1, 2), kinds.items()):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        entries.append({"data": str(path), "name": name, "weight": weight} | keys[name])
    return entries


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--num_workers=2"], ["--streaming", "--num_workers=2"],
                                  ["--on_policy=0.5", "--rollout_tokens=8", "--eval_samples=4",
                                   "--rollout_eval=3"]])
def test_three_sources_on_two_ranks_that_stop(chat_models, sources, tmp_path, more):
    """The curve of one rank, and of a run that goes on; held-out metrics of every source."""
    student, teacher = chat_models
    teachers = [{"model": str(teacher), "name": "all"},
                {"model": str(teacher), "name": "talker", "routes": ["talk"], "loss": "reverse_kl"}]
    base = [f"--student={student}", f"--data={json.dumps(sources)}", "--eval_rows=2",
            f"--teachers={json.dumps(teachers)}", "--max_length=64",
            "--eval_every=4", "--steps=6", "--teacher_dtype=float32", *more]

    def line(name, micro_batch, *flags):
        config = ds_config(tmp_path / f"{micro_batch}.json", 2, micro_batch, 2)
        return [*base, f"--ds_config={config}", f"--output_dir={tmp_path / name}", *flags]

    saved = tmp_path / "whole" / "checkpoints" / "step_0000003"
    assert ranks.run(2, run_distill, [
        line("whole", 2, "--save_every=3", "--keep_checkpoints=9"),
        line("resumed", 2, f"--resume={saved}")]) == [[0, 0]] * 2
    assert ranks.run(1, run_distill, [line("alone", 4)]) == [[0]]
    whole = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "whole", 3)
    check_same_curve(whole, losses_of(tmp_path / "alone"), 1e-5, 1e-7)
    [*_, last] = [measured for measured in whole if "eval/student_bits_per_byte" in measured]
    for name in ("plain", "asked", "chats"):
        assert last[f"eval/{name}/student_bits_per_byte"] > 0
    # which teacher reads what
    assert last["eval/chats/kd/talker"] > 0 and last["eval/chats/kd/all"] is None
    assert last["eval/plain/kd/talker"] is None and last["eval/plain/kd/all"] > 0


@pytest.mark.slow
def test_caches_of_some_sources_say_what_live_teachers_say(chat_models, sources, tmp_path):
    """Each holds the rows of its routes alone."""
    student, teacher = chat_models
    folders = {"written": sources[:2], "talker": sources[2:]}
    commands = [[f"--teacher={teacher}", f"--data={json.dumps(entries)}", "--hidden",
                 f"--output={tmp_path / name}", "--teacher_dtype=float32"]
                for name, entries in folders.items()]
    ranks.run(1, write, commands)
    config = ds_config(tmp_path / "ds.json", 2, 4, 2)
    lines = []
    for kind in ("live", "cached"):
        entries = []
        for name in folders:
            whose = {"model": str(teacher)} if kind == "live" else {"cache": str(tmp_path / name)}
            routes = {"routes": ["talk"]} if name == "talker" else {}
            entries.append(whose | {"name": name} | routes)
        lines.append([f"--student={student}", f"--data={json.dumps(sources)}", "--eval_rows=2",
                      f"--teachers={json.dumps(entries)}", "--max_length=64", "--steps=3",
                      f"--ds_config={config}", f"--output_dir={tmp_path / f'run_{kind}'}",
                      *["--teacher_dtype=float32"][: kind == "live"]])
    assert ranks.run(1, run_distill, lines) == [[0, 0]]
    live, cached = [losses_of(tmp_path / f"run_{kind}") for kind in ("live", "cached")]
    for of_live, of_cache in zip(live, cached, strict=True):
        for name in folders:
            for key in {f"kd/{name}", f"eval/kd/{name}", f"eval/chats/kd/{name}"} & of_live.keys():
                expected = of_live[key] and pytest.approx(of_live[key], rel=1e-4)  # or None
                assert of_cache[key] == expected, key
