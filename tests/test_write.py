"""A teacher's answers are its own draws, whole after any end, and rows from which a student learns.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jobs
import ranks
from isogloss import rollout, write
from isogloss.command import TOOLS, AnswerArgs
from isogloss.data.batch_types import Example
from isogloss.data.file_rows import HEADER
from isogloss.data.rollouts import Prompter
from isogloss.environments.episode import Episode
from isogloss.errors import DataError
from isogloss.flags.parse import parse_flags
from isogloss.inputs import load_text_encoder
from isogloss.job.files import locked
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.watch import end_together
from isogloss.writing.served_writer import Answer
from recipes.tiny import prepare
from talkers import write_talkers
from test_writer_process import command  # noqa: F401, a fixture

ENVIRONMENT = Path(__file__).with_name("talk_environment.py")

JUDGE = """
def is_short(messages, row):
    return len(messages[-1]["content"]) < len(row["hint"])

def length(messages, row):
    assert messages[-1]["role"] == "assistant"
    return len(messages[-1]["content"])

def raises(messages, row):
    raise KeyError("no such")

def odd(messages, row):
    return "good"

def two(messages, row):
    import numpy
    return numpy.ones(2)

def huge(messages, row):
    return 10**400
"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "user", "content": "The first question"},
    {"role": "assistant", "content": "An answer"},
    {"role": "user", "content": "and the second one"},
    {"role": "assistant", "content": "Another"},
]


def flags_of(folder, output, *more, data="chats"):
    flags = [f"--teacher={folder / 'teacher'}", f"--data={folder / data}.jsonl",
             f"--output={output}", "--max_new_tokens=12", *more]
    if data != "texts":
        flags.append("--text_key=messages")
    return parse_flags(AnswerArgs, flags, **TOOLS["write"][1])


def run(all_args, part_answers=None, die_at=None):
    """Write files in this process.

    Args:
        part_answers: of a part, in place of the usual number.
        die_at: kill this process while it writes a part of this number; -1: once all are joined.
    """
    device = start_distributed()
    silence_libraries()
    if part_answers:
        write.PART_ANSWERS = part_answers
    if die_at is not None:
        write_atomically = write.write_atomically

        def write_half(path, text):
            if path.name == f"part-{die_at:05d}.jsonl":
                write.scratch_of(path).write_text("half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            write_atomically(path, text)

        write.write_atomically = write_half
        if die_at < 0:
            write.shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with end_together():
        for args in all_args:
            write.run(args, device)


def end_of(args):
    """Return the line with which a command ends."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        run([args])
    return said.getvalue()


def rows_of(path):
    header, *rows = map(json.loads, Path(path).read_text().splitlines())
    assert list(header) == [HEADER]
    return header[HEADER], rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with chat templates, texts.jsonl and chats.jsonl, three.jsonl of several turns."""
    folder = tmp_path_factory.mktemp("tiny")
    prepare.main(folder)
    for name, count in (("texts", 12), ("chats", 9)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    rows = [{"messages": CHAT, "tools": [TOOL], "id": "007"},
            {"messages": CHAT[:2], "hint": "42", "level": 3},
            {"messages": CHAT[:1], "id": "a user alone"},
            {"messages": CHAT[1:2], "id": "an assistant alone"}]
    (folder / "three.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "judge_of_tests.py").write_text(JUDGE)
    return folder


@pytest.fixture(scope="module")
def teacher(folder):
    """(model, tokenizer) as transformers loads them."""
    return (AutoModelForCausalLM.from_pretrained(folder / "teacher").eval(),
            AutoTokenizer.from_pretrained(folder / "teacher"))


def prompt_ids(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spelled(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


# --- what is written ------------------------------------------------------------------------------


def test_an_answer_is_the_draw_of_its_row_and_sample_alone(folder, teacher, tmp_path):
    """One prompt at a time, by the same noise; two parts on two ranks, side by side."""
    args = flags_of(folder, tmp_path / "w.jsonl", "--samples=3", "--seed=5", "--batch_size=7",
                    "--temperature=0.8", "--top_p=0.9")
    ranks.run(2, run, [args], 12)
    model, tokenizer = teacher
    header, rows = rows_of(args.output)
    chats = list(map(json.loads, (folder / "chats.jsonl").read_text().splitlines()))
    assert len(rows) == 3 * len(chats) == header["rows"]
    for place, row in enumerate(rows):
        number, sample = divmod(place, 3)
        *before, answer = row["messages"]
        assert before == chats[number]["messages"][:-1]
        prompt = rollout.Prompt(prompt_ids(tokenizer, before), (5, 4, number, sample), 12)
        [expected] = rollout.write(model, [prompt], [tokenizer.eos_token_id], len(tokenizer),
                                   temperature=0.8, top_p=0.9)
        assert answer == {"role": "assistant",
                          "content": spelled(tokenizer, expected.ids)}
        assert row["written"] == {"row": number, "sample": sample, "ended": expected.ended,
                                  "tokens": len(expected.ids)}
        assert row["hint"] == chats[number]["hint"]
    assert header["cut"] == sum(not row["written"]["ended"] for row in rows) > 0
    assert header["seed"] == 5 and header["rollout_temperature"] == 0.8 and header["date"]
    assert not (tmp_path / "w.jsonl.parts").exists()


def test_the_most_likely_answers_are_those_of_generate(folder, teacher, tmp_path):
    """Of texts and chats of several turns; a hint is read, and stands in no row's messages."""
    all_args = [
        flags_of(folder, tmp_path / "texts.jsonl", "--temperature=0", "--prompt_tokens=5",
                 data="texts"),
        flags_of(folder, tmp_path / "chats.jsonl", "--temperature=0",
                 "--teacher_prompt_key=hint", data="three")]
    ranks.run(1, run, all_args)
    model, tokenizer = teacher
    _, texts = rows_of(tmp_path / "texts.jsonl")
    header, chats = rows_of(tmp_path / "chats.jsonl")
    given = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    for row, text in zip(texts, given, strict=True):
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = whole[: min(5, -(-len(whole) // 2))]  # of a short text its half
        assert row["prompt"] == tokenizer.decode(ids) and text.startswith(row["prompt"])
        # a run begins its texts with bos, too
        expected = generated(model, tokenizer, [tokenizer.bos_token_id, *ids])
        assert row["completion"] == expected
        assert set(row) == {"prompt", "completion", "written"}
    several, hinted, asked = chats  # nobody asks in the fourth row
    assert header["no_prompt"] == 1
    assert [message.get("weight") for message in several["messages"]] == [None, 0, None, None]
    assert several["tools"] == [TOOL] and several["id"] == "007"
    assert hinted["hint"] == "42" and hinted["level"] == 3
    assert asked["messages"][:-1] == CHAT[:1] and asked["id"] == "a user alone"
    for row, hint in ((several, []), (hinted, [{"role": "system", "content": "42"}]), (asked, [])):
        ids = prompt_ids(tokenizer, [*hint, *row["messages"][:-1]])
        assert row["messages"][-1]["content"] == generated(model, tokenizer, ids)


def generated(model, tokenizer, ids):
    whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
    return spelled(tokenizer, whole[0, len(ids) :])


def test_a_killed_command_goes_on_and_the_file_is_the_same_byte_by_byte(folder, tmp_path):
    whole, killed = (flags_of(folder, tmp_path / name, "--samples=2", "--seed=1",
                              "--chat_date=2020-02-03") for name in ("whole.jsonl", "killed.jsonl"))
    ranks.run(1, run, [whole], 4)
    group = ranks.start(1, run, [killed], 4, 2)
    group[0][0].join(300)
    assert group[0][0].exitcode == -signal.SIGKILL
    ranks.kill(group)
    parts = sorted(path.name for path in (tmp_path / "killed.jsonl.parts").glob("part*"))
    assert parts == ["part-00000.jsonl", "part-00001.jsonl"]
    before = [path.stat().st_mtime_ns for path in (tmp_path / "killed.jsonl.parts").glob("part*")]
    # two ranks go on, on another day, and are killed when the file is there
    killed = flags_of(folder, tmp_path / "killed.jsonl", "--samples=2", "--seed=1")
    group = ranks.start(2, run, [killed], 4, -1)
    group[0][0].join(300)
    ranks.kill(group)
    assert Path(killed.output).read_bytes() == Path(whole.output).read_bytes()
    after = [path.stat().st_mtime_ns for path in (tmp_path / "killed.jsonl.parts").glob("part*")]
    assert set(before) < set(after) and len(after) == 5  # written once
    ranks.run(1, run, [killed], 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "whole.jsonl"]


# --- which answers stay ---------------------------------------------------------------------------


def test_a_filter_chooses_among_the_answers_that_would_be_written(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    keeps = {"all": "", "whole": "length", "short": "judge_of_tests:is_short",
             "best": "length,judge_of_tests:length"}
    all_args = []
    for name, keep in keeps.items():
        all_args.append(flags_of(folder, tmp_path / f"{name}.jsonl", "--samples=8", "--seed=2",
                                 "--max_new_tokens=60", f"--keep={keep}"))
    ranks.run(1, run_in, folder, all_args)
    (_, rows), (of_whole, whole), (_, short), (of_best, best) = (
        rows_of(args.output) for args in all_args)
    assert whole == [row for row in rows if row["written"]["ended"]]
    assert 0 < len(whole) < len(rows) == of_whole["rows"] + of_whole["dropped"]
    assert short == [row for row in rows
                     if len(row["messages"][-1]["content"]) < len(row["hint"])] != rows
    expected = {}
    for row in whole:
        number, size = row["written"]["row"], len(row["messages"][-1]["content"])
        if number not in expected or size > expected[number]["written"]["score"]:
            expected[number] = row | {"written": row["written"] | {"score": size}}
    assert best == list(expected.values()) and of_best["cut"] == 0


def run_in(folder, all_args):
    os.chdir(folder)
    run(all_args)


def test_an_environment_answers_in_between_and_its_rewards_choose(texts, tmp_path):
    """On two ranks as on one; the rows are chats of which what was written is learned."""
    talker, _ = write_talkers(texts, tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"What is {number}?"}], "answer": number}
            for number in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = json.dumps({"function": f"{ENVIRONMENT}:talk", "max_turns": 3})
    one, two, kept = (parse_flags(AnswerArgs, [
        f"--teacher={talker}", f"--data={tmp_path / 'rows.jsonl'}", f"--output={tmp_path / name}",
        "--prompt_key=messages", "--text_key=messages", "--samples=2", "--max_new_tokens=16",
        f"--environment={environment}", *more], **TOOLS["write"][1])
        for name, *more in (["one.jsonl"], ["two.jsonl"], ["kept.jsonl", "--keep=reward"]))
    ranks.run(1, run, [one, kept], 4)
    ranks.run(2, run, [two], 4)
    assert Path(one.output).read_bytes() == Path(two.output).read_bytes()
    header, written = rows_of(one.output)
    assert header["dropped"] > 0  # episodes that fail
    assert {row["written"]["turns"] for row in written} == {1, 2, 3}
    for row in written:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * row["written"]["turns"]
        assert row["messages"][0]["content"] == f"What is {row['answer']}?"
    assert rows_of(kept.output)[1] == [row for row in written if row["written"]["reward"]] != []


def test_a_hint_stays_in_front_where_an_environment_begins(texts, tmp_path):
    """And behind every turn; what is written stands without it."""
    encoder, _ = load_text_encoder("teacher", str(write_talkers(texts, tmp_path)[0]), 400)
    hint = {"role": "system", "content": "It is four."}
    chat = [{"role": "user", "content": words} for words in ("What is 2 + 2?", "Well?", "Why?")]
    example = Example(chat[:1], prompt=chat[:1], teacher_prompt=(hint,))
    prompt, = write.Prompts([], Prompter(encoder, 0, 1.0, 1, 8, 16), 1)._of_example(example, 0)
    episode = Episode(prompt)
    episode.begin({"messages": chat[1:2], "tools": None}, encoder, 16)
    ids = [*encoder.tokenizer("three", add_special_tokens=False)["input_ids"],
           encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    nothing = torch.zeros(len(ids))
    said = episode.add(rollout.Completion(torch.tensor(ids), nothing, nothing, True), encoder)
    episode.hear({"messages": chat[2:], "ended": False}, encoder, 16, False)
    assert not episode.outcome["error"]
    assert episode.whole == encoder.tokenizer.apply_chat_template(
        [hint, *chat[:2], said, chat[2]], tokenize=False, add_generation_prompt=True)
    assert episode.chat == [*chat[:2], said, chat[2]]  # as an environment reads it
    reader = SimpleNamespace(text_key="messages", prompt_key="", tools_key="")
    answer = Answer(None, True, 2, episode.rollout(1.0, 1.0))
    row = write.PromptRow({}, reader, example, [prompt]).answered(prompt, answer)
    assert row["messages"] == episode.chat


# --- a student learns from it ---------------------------------------------------------------------


@pytest.mark.parametrize("data, keys", [
    ("chats", ["--text_key=messages"]),
    ("texts", ["--prompt_key=prompt", "--completion_key=completion"])])
def test_a_student_learns_from_rows_and_cache_what_the_live_teacher_says(
        folder, data, keys, tmp_path):
    args = flags_of(folder, tmp_path / "w.jsonl", f"--teacher_cache={tmp_path / 'cache'}",
                    "--hidden", data=data)
    ranks.run(1, run, [args])
    _, rows = rows_of(args.output)
    config = jobs.ds_config(tmp_path / "ds.json", 0, len(rows), 1)
    common = [f"--student={folder / 'student'}", f"--data={args.output}", *keys, "--steps=1",
              "--max_length=256", f"--ds_config={config}"]
    live = [*common, f"--teacher={folder / 'teacher'}", f"--output_dir={tmp_path / 'live'}"]
    cached = [*common, f"--teacher_cache={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'run'}"]
    jobs.run_all(1, live, cached)
    [expected], [line] = ([line for line in jobs.losses_of(tmp_path / name) if "loss" in line]
                          for name in ("live", "run"))
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert line["kd"] == pytest.approx(expected["kd"], rel=1e-4)


@pytest.mark.slow
def test_a_process_writes_what_the_model_does(folder, command, tmp_path):  # noqa: F811
    """With its weights, for two ranks."""
    own = flags_of(folder, tmp_path / "own.jsonl")
    other = flags_of(folder, tmp_path / "other.jsonl", f"--writer={command()}")
    ranks.run(1, run, [own], 4)
    ranks.run(2, run, [other], 4)
    assert rows_of(other.output)[1] == rows_of(own.output)[1]


# --- a server -------------------------------------------------------------------------------------


class OpenAI:
    """Answer as a server with OpenAI's API, by what `answer` makes of a request.

    Attributes:
        requests: [(path, body)] of all of them.
    """

    def __init__(self, answer):
        self.requests = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"data": [{"id": "model", "owned_by": "someone"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.requests.append((self.path, body))
                self.reply(answer(self.path, body))

            def reply(self, plain):
                content = json.dumps(plain).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def of_openai(path, body):
    """Return an answer: of a text its length, of a chat with tools a call, of others their seed."""
    usage = {"completion_tokens": 4}
    if path == "/v1/completions":
        choice = {"text": f" {len(body['prompt'])}", "finish_reason": "length"}
    elif "tools" in body:
        message = {"content": None, "tool_calls": [CALL]}
        choice = {"message": message, "finish_reason": "tool_calls"}
    else:
        choice = {"message": {"content": str(body["seed"])}, "finish_reason": "stop"}
    return {"choices": [{"index": 0, **choice}], "usage": usage}


def test_a_server_answers_texts_and_chats_with_tools(folder, tmp_path):
    served = [f"--teacher_tokenizer={folder / 'teacher'}", "--samples=2", "--top_p=0.5"]
    with OpenAI(of_openai) as server:
        all_args = []
        for name in ("texts", "three"):
            all_args.append(flags_of(folder, tmp_path / f"{name}.jsonl", *served,
                                     f"--teacher={server.url}", data=name))
        ranks.run(1, run, all_args)
    _, texts = rows_of(tmp_path / "texts.jsonl")
    assert all(row["completion"] == f" {len(row['prompt'])}" for row in texts)
    assert not any(row["written"]["ended"] for row in texts) and len(texts) == 24
    header, chats = rows_of(tmp_path / "three.jsonl")
    assert header["no_prompt"] == 1 and header["tokens"] == 24
    assert chats[0]["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert [row["messages"][:-1] for row in chats[2:]] == [CHAT[:1]] * 4
    seeds = {row["messages"][-1]["content"] for row in chats[2:]}
    assert len(seeds) == 4 and all(row["written"]["ended"] for row in chats)
    bodies = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert {body["top_p"] for body in bodies} == {0.5}
    assert {body["max_tokens"] for body in bodies} == {12}
    with_tools, = {json.dumps(body["messages"]) for body in bodies if "tools" in body}
    assert json.loads(with_tools) == [
        message | {"content": message["content"]} for message in CHAT[:3]]
    config = jobs.ds_config(tmp_path / "ds.json", 0, 2, 1)
    student = [f"--student={folder / 'student'}", f"--teacher={folder / 'teacher'}", "--steps=1",
               "--text_key=messages", f"--ds_config={config}", "--max_length=256",
               f"--data={tmp_path / 'three.jsonl'}", f"--output_dir={tmp_path / 'run'}"]
    jobs.run_all(1, student)


@pytest.mark.parametrize("answer, complaint", [
    ({"choices": []}, "holds no message or text"), ({}, "holds no message or text"),
    ({"choices": [{"text": [3]}]}, "holds no message or text"),
    ({"choices": [{"message": {"content": None, "tool_calls": ["x"]}}]}, "has tool_calls"),
    ({"choices": [{"text": "\ud800"}]}, "half of a surrogate pair")])
def test_a_server_is_not_believed(folder, answer, complaint, tmp_path):
    with OpenAI(lambda *_: answer) as server:
        args = flags_of(folder, tmp_path / "w.jsonl", f"--teacher={server.url}",
                        f"--teacher_tokenizer={folder / 'teacher'}")
        [line] = ranks.run(1, end_of, args)
    assert complaint in line and line.count("\n") == 1 and not Path(args.output).exists()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two", "huge"])
def test_what_is_no_score_is_told(name, tmp_path, monkeypatch):
    (tmp_path / "judge_of_scores.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    answer = {"messages": CHAT, "written": {"row": 3}}
    with pytest.raises(DataError, match=f"judge_of_scores:{name}: of row 3 it raises"):
        write.Keeper(f"judge_of_scores:{name}").kept({}, [answer])


def test_wrong_flags_are_refused_with_one_line(folder, tmp_path):
    for more, complaint in {
        "--keep=reward": "add --environment", "--keep=best": "best is neither length, reward nor",
        "--keep=length,x:": "x: is neither", "--samples=0": "--samples 0: expected 1",
        "--hidden": "is of --teacher_cache, which is not set",
        "--rollout_top_p=0": "--rollout_top_p 0", "--temperature=-1": "expected 0 or more",
        "--teacher=http://h --teacher_tokenizer=T --writer=vllm": "the server writes",
        "--teacher=http://h": "brings no tokenizer",
        "--teacher_cache=c --hidden --top_k=9": "--hidden with --top_k 9",
    }.items():
        with pytest.raises(ValueError) as error:
            flags_of(folder, tmp_path / "w.jsonl", *more.split())
        assert complaint in str(error.value), more


@pytest.mark.parametrize("more, complaint", [
    (["--keep=no_such_module:f"], "No module named 'no_such_module'"),
    (["--keep=json:no_such"], "has no attribute 'no_such'"),
    (["--keep=json:__name__"], "is no function"),
    (["--text_key=nothing"], "no column 'nothing'"),
    (["--data=EMPTY"], "the data set is empty"),
    (["--teacher=BARE"], "has no chat template"),
    (["--output=w.json"], "expected a name that ends in .jsonl"),
    (["--output=FILE/w.jsonl"], "nothing can be written to"),
    (["--output=OTHER"], "is another file than this command writes"),
    (["--output=THERE"], "(weights 0 there, "),
    (["--output=BLOCKED"], "blocked.jsonl: cannot be written ("),
    (["--keep=judge_of_tests:raises"], "of row 0 it raises KeyError: 'no such'"),
    (["--keep=judge_of_tests:odd"], "it says 'good'; expected true, false or a number"),
    (["--keep=length", "--max_new_tokens=1", "--temperature=0"], "no answer stays"),
])
def test_a_fault_is_one_line(folder, more, complaint, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"text": "mine"}\n')
    (tmp_path / "there.jsonl").write_text(json.dumps({HEADER: {"weights": "0"}}) + "\n")
    (tmp_path / "blocked.jsonl.parts").write_text("mine")
    bare = shutil.copytree(folder / "teacher", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    names = {"EMPTY": "empty.jsonl", "OTHER": "other.jsonl", "THERE": "there.jsonl",
             "FILE": "other.jsonl", "BARE": "bare", "BLOCKED": "blocked.jsonl"}
    for name, path in names.items():
        more = [flag.replace(f"={name}", f"={tmp_path / path}") for flag in more]
    args = flags_of(folder, tmp_path / "w.jsonl", "--samples=2", *more)
    args.text_key = "nothing" if "--text_key=nothing" in more else args.text_key
    [line] = ranks.run(1, end_in, folder, args)
    assert complaint in line and line.count("\n") == 1, line
    assert (tmp_path / "other.jsonl").read_text() == '{"text": "mine"}\n'
    assert not (tmp_path / "w.jsonl").exists()


def end_in(folder, args):
    os.chdir(folder)
    return end_of(args)


def end_on_full_disk(args):
    """Return the line with which a command ends whose second part has no room."""
    write_atomically = write.write_atomically

    def full(path, text):
        if path.name == "part-00001.jsonl":
            raise OSError(28, "No space left on device")
        write_atomically(path, text)

    write.write_atomically = full
    write.PART_ANSWERS = 4
    return end_of(args)


def test_a_full_disk_is_one_line_and_the_command_goes_on(folder, tmp_path):
    args = flags_of(folder, tmp_path / "w.jsonl")
    [line] = ranks.run(1, end_on_full_disk, args)
    assert "No space left on device" in line and "the same command goes on" in line
    assert line.count("\n") == 1 and (tmp_path / "w.jsonl.parts" / "part-00000.jsonl").exists()
    ranks.run(1, run, [args], 4)
    assert len(rows_of(args.output)[1]) == 9


def test_two_commands_do_not_write_one_file(folder, tmp_path):
    args = flags_of(folder, tmp_path / "w.jsonl")
    (tmp_path / "w.jsonl.parts").mkdir()
    with locked("--output", tmp_path / "w.jsonl.parts"):
        [line] = ranks.run(1, end_of, args)
    assert "another process is writing there" in line and line.count("\n") == 1
