"""A server is asked until it answers, and only what fits the question is taken for an answer."""

import json
import socket

import numpy as np
import pytest
import torch

from isogloss.errors import DataError
from isogloss.flags.model_names import is_address
from isogloss.teachers import text_server
from isogloss.teachers.text_server import Address, Requests, TextServer, api_key
from text_servers import StandIn

KEY = "sk-secret-1234"
TEXTS = [[1, 7, 30, 2, 499], [3, 11]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(text_server, "FIRST_PAUSE", 0.001)


@pytest.fixture(scope="module")
def servers(models):
    """Return {owner: StandIn} that answer for the same teacher."""
    vllm = StandIn(models[1])
    sglang = StandIn(models[1], owner="sglang")
    hosted = StandIn(models[1], owner="somebody")
    with vllm.running(), sglang.running(), hosted.running():
        yield {"vllm": vllm, "sglang": sglang, "somebody": hosted}


@pytest.fixture
def server(servers):
    servers["vllm"].requests.clear()
    servers["vllm"].faults = []  # a test that failed may have left some
    return servers["vllm"]


def asked(server, timeout=60, key=None):
    """Return (TextServer, its ServedModel)."""
    text_server = TextServer(server.url, timeout, key)
    return text_server, text_server.describe()


def plain_logp(server, ids):
    """Return (N, W) log-probabilities of the tokens behind the first one, by torch alone."""
    with torch.no_grad():
        return server.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).double().numpy()


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_an_answer_is_what_the_model_says(servers, owner):
    source, model = asked(servers[owner])
    assert (model.owner, model.context) == (owner, 258)
    for ids, likely in zip(TEXTS, source.score(model, TEXTS, 5), strict=True):
        expected = plain_logp(servers[owner], ids)
        ends = likely.counts_N.cumsum()
        assert len(ends) == len(ids) - 1 and ends[-1] == len(likely.ids_E)
        for row, label, end, count in zip(expected, ids[1:], ends, likely.counts_N, strict=True):
            tokens = likely.ids_E[end - count : end]
            top = set(row.argsort()[-5:].tolist())
            assert set(tokens.tolist()) == top | {label} and len(tokens) == len(top | {label})
            np.testing.assert_allclose(likely.logp_E[end - count : end], row[tokens], atol=1e-5)


@pytest.mark.parametrize("owner", ["vllm", "sglang", "somebody"])
def test_of_the_text_alone_every_api_says_the_same(servers, owner):
    source, model = asked(servers[owner])
    servers[owner].requests.clear()
    for ids, likely in zip(TEXTS, source.score(model, TEXTS, 0), strict=True):
        expected = plain_logp(servers[owner], ids)[range(len(ids) - 1), ids[1:]]
        assert likely.ids_E.tolist() == ids[1:] and likely.counts_N.tolist() == [1] * len(expected)
        np.testing.assert_allclose(likely.logp_E, expected, atol=1e-5)
    [(_, _, body)] = servers[owner].requests
    assert ("echo" in body) == (owner == "somebody")


def without_last(answers):  # as an API answers that writes nothing behind the text
    for answer in answers:
        for values in answer["logprobs"].values():
            values.pop()


def test_an_api_with_echo_may_write_behind_the_text_or_not(servers):
    source, model = asked(servers["somebody"])
    expected = source.score(model, TEXTS, 0)
    servers["somebody"].faults = [without_last]
    for likely, other in zip(source.score(model, TEXTS, 0), expected, strict=True):
        assert all(map(np.array_equal, likely, other))


@pytest.mark.parametrize(("fault", "expected"), [
    (lambda answers: [without_last(answers) for _ in range(2)], "answers 4 positions of a text"),
    (lambda answers: answers[0]["logprobs"]["token_logprobs"].extend([-1.0] * 2),
     "answers 7 positions of a text of 5 tokens"),
    (lambda answers: answers[1].update(logprobs=None), "or an API with echo"),
    (lambda answers: answers[1]["logprobs"].pop("tokens"), "or an API with echo"),
    (lambda answers: answers[0]["logprobs"]["token_logprobs"].__setitem__(2, None), "no numbers"),
    (lambda answers: answers[0]["logprobs"]["tokens"].__setitem__(2, 7), "else than text"),
])
def test_an_echo_of_another_text_is_refused(servers, fault, expected):
    source, model = asked(servers["somebody"])
    servers["somebody"].faults = [fault]
    with pytest.raises(DataError, match=expected):
        source.score(model, TEXTS, 0)


def test_what_may_pass_is_tried_again(server):
    source, model = asked(server, key=KEY)
    expected = source.score(model, TEXTS, 5)
    server.requests.clear()
    server.faults = [(500, "out of memory"), "half", (503, "loading"), (429, "busy")]
    for likely, other in zip(source.score(model, TEXTS, 5), expected, strict=True):
        assert all(map(np.array_equal, likely[:3], other[:3]))
    assert len(server.requests) == 5
    assert all(headers["Authorization"] == f"Bearer {KEY}" for _, headers, _ in server.requests)
    body = server.requests[-1][2]
    assert body["prompt"] == TEXTS and body["max_tokens"] == 1 and body["prompt_logprobs"] == 5


def changed(path, value):
    """Return a fault: the value at a path of keys into the answers."""
    def change(answers):
        place = answers
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def entry_of_30(value):
    return changed((0, "prompt_logprobs", 2, "30"), value)


def shorten(answers):
    answers[0]["prompt_logprobs"].pop()


def other_tokens(answers):
    for position in answers[0]["prompt_logprobs"][1:]:
        position.pop("30", None)


NO_LOGPROBS = "has no log-probabilities of the prompt; expected vLLM"
HUGE = int("9" * 26)


@pytest.mark.parametrize(("fault", "expected"), [
    # to another question
    (shorten, "answers 4 positions of a text of 5 tokens"),
    (other_tokens, "says nothing of token 30 of a text"),
    (list.pop, "1 answers to 2 texts"),
    ((401, f"wrong key {KEY}"), "HTTP 401 wrong key ***; put its key into the variable TEACHER_A"),
    ((404, "no model of this name"), "HTTP 404 no model of this name"),
    ((307, "elsewhere"), "HTTP 307 elsewhere"),
    ((400, "\x1b[2Jgone\r\n"), "HTTP 400 \ufffd[2Jgone"),
    # of another shape
    (b"[]", "not an object"), (b"[" * 10**5, "too deep"), (b"{}", NO_LOGPROBS),
    (b'{"choices": {"0": 1, "1": 2}}', NO_LOGPROBS), (b'{"choices": [{}, {}]}', NO_LOGPROBS),
    (changed((0, "index"), 1), "other indices"), (changed((0, "index"), HUGE), "other indices"),
    (changed((0, "prompt_logprobs"), None), NO_LOGPROBS),
    (changed((0, "prompt_logprobs", 1), [1]), NO_LOGPROBS),
    (changed((0, "prompt_logprobs", 2, str(HUGE)), {"logprob": -9}), "something else than their"),
    (changed((0, "prompt_logprobs", 2, "-1"), {"logprob": -9}), "something else than their ids"),
    (changed((0, "prompt_logprobs", 2, "030"), {"logprob": -9}), "a token twice at one position"),
    (entry_of_30({"logprob": HUGE * 10**300}), "no numbers"),
    (entry_of_30({"logprob": "-1.5"}), "no numbers"), (entry_of_30({"logprob": True}), "no numb"),
    (entry_of_30({"logprob": -1, "decoded_token": 7}), "else than text"),
    (entry_of_30({}), NO_LOGPROBS),
    ("endless", "longer than any that was asked for"),
])
def test_an_answer_that_does_not_fit_is_refused_at_once_with_one_line(
        server, monkeypatch, fault, expected):
    monkeypatch.setattr(text_server, "MOST_BYTES", 2**18)
    source, model = asked(server, key=KEY)
    server.requests.clear()
    server.faults = [fault]
    with pytest.raises(DataError) as caught:
        source.score(model, TEXTS, 1)
    line = str(caught.value)
    assert expected in line and line.isprintable() and len(line) < 600, line
    assert server.url in line and KEY not in line
    assert len(server.requests) == 1


@pytest.mark.parametrize("change", [
    ("input_token_logprobs", 2, [HUGE * 10**300, 30, None]), ("input_token_logprobs", 2, None),
    ("input_token_logprobs", 2, [-1, 30.0, None]), ("input_top_logprobs", 2, 7),
    ("input_top_logprobs", 2, [[-1, 9, None], [-2, 9, None]]),
])
def test_an_answer_of_sglang_of_another_shape_is_refused(servers, change):
    source, model = asked(servers["sglang"])
    *path, value = change
    servers["sglang"].faults = [changed((0, "meta_info", *path), value)]
    with pytest.raises(DataError, match=r"another model, or another version|no log-probabilities"):
        source.score(model, TEXTS, 1)


@pytest.mark.parametrize("cards", [
    b"[]", b"{}", b'{"data": null}', b'{"data": [7]}', b'{"data": [{"id": ["teacher"]}]}',
    b"[" * 10**5,
])
def test_a_list_of_models_of_another_shape_is_refused(server, monkeypatch, cards):
    monkeypatch.setattr(server, "cards", cards)
    with pytest.raises(DataError, match=r"expected vLLM or SGLang|no JSON of vLLM or SGLang"):
        TextServer(server.url, 60).describe()
    # a context that is no length is none
    for context in (HUGE, True, -1, 0, "258", 258.0):
        card = {"id": "teacher", "owned_by": 7, "max_model_len": context}
        monkeypatch.setattr(server, "cards", json.dumps({"data": [card]}).encode())
        assert TextServer(server.url, 60).describe() == ("teacher", "7", None)


def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(server):
    source, model = asked(server, timeout=0.5)
    server.faults = ["drip"]
    with pytest.raises(DataError, match=r"in 0.5 seconds and 1 tries \(the last one: TimeoutErr"):
        source.score(model, TEXTS, 5)


def test_the_time_is_over_at_last(server):
    source, model = asked(server, timeout=0.3)
    server.faults = ["hang"]
    with pytest.raises(DataError, match=r"no answer to /v1/completions in 0.3 seconds and 1 tries"):
        source.score(model, TEXTS, 5)
    server.faults = [(500, f"crash {number}") for number in range(1000)]
    # the last try may have too little time left for an answer
    line = r"the last one: (HTTP 500 crash \d+|TimeoutError)\); see whether"
    with pytest.raises(DataError, match=line):
        source.score(model, TEXTS, 5)
    server.faults = []
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DataError, match="ConnectionRefusedError"):
            TextServer(address, 0.1).describe()


def test_no_more_requests_are_under_way_than_allowed(server):
    source, model = asked(server)
    source.score(model, TEXTS, 5)
    server.most_at_once = 0
    left = server.at_once  # of a test whose request the server still holds
    requests = Requests(3)
    futures = [requests.submit(source.score, model, [ids], 2) for ids in TEXTS * 10]
    sizes = [len(future.result()[0].counts_N) for future in futures]
    assert sizes == [4, 1] * 10
    assert 1 <= server.most_at_once - left <= 3
    server.faults = [(400, "no")]
    with pytest.raises(DataError, match="HTTP 400 no"):
        requests.submit(source.score, model, TEXTS, 2).result()


def test_addresses():
    assert Address.of("http://host:8000") == ("http://host:8000", "")
    assert Address.of("https://host/pre/v1/#a/b") == ("https://host/pre", "a/b")
    assert Address.of("HTTP://[::1]:80/v1") == ("http://[::1]:80", "")
    assert is_address("HTTP://host") and not is_address("org/http-model")
    for url in ("http://", "http://host:port", "https:///v1"):
        with pytest.raises(ValueError, match="no address of a server"):
            Address.of(url)
    for url in ("http://user:sk-secret@host", "http://host?key=sk-secret"):
        with pytest.raises(ValueError, match="TEACHER_API_KEY") as caught:
            Address.of(url)
        assert "secret" not in str(caught.value)


def test_a_key_comes_from_the_environment_and_no_message_repeats_it(monkeypatch):
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    assert api_key() is None
    monkeypatch.setenv("TEACHER_API_KEY", f" {KEY}\n")
    assert api_key() == KEY
    monkeypatch.setenv("TEACHER_API_KEY", f"{KEY}\r\nX: y")
    with pytest.raises(ValueError, match="characters that no key has") as caught:
        api_key()
    assert KEY not in str(caught.value)


def test_a_model_is_chosen_by_its_name(server):
    with pytest.raises(DataError, match="its models are teacher; name one of them behind #"):
        TextServer(f"{server.url}#other", 9).describe()
    assert TextServer(f"{server.url}/v1#teacher", 9).describe().name == "teacher"
