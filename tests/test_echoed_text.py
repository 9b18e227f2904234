"""An API that takes text alone says the same of a text as one that takes ids."""

import numpy as np
import pytest
import torch

from isogloss.data.sample import TextEncoder
from isogloss.errors import DataError
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.teachers.served import speller
from isogloss.teachers.text_server import TextServer, of_text
from other_tokenizers import SCRIPTS
from text_servers import StandIn
from tokens import table_of

READS = "tokens", "offsets", "both", "stripped"


@pytest.fixture(scope="module")
def sides(models):
    """Return [(TextEncoder, {what it says: StandIn that reads text alone})] of both models."""
    of_models = []
    for folder in models:
        encoder = TextEncoder(*load_tokenizer("teacher", str(folder)), 400)
        servers = {reads: StandIn(folder, owner="somebody", reads=reads) for reads in READS}
        of_models.append((encoder, servers))
    return of_models


def logp_of(server, ids):
    with torch.no_grad():
        logits = server.model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).double().numpy()[range(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("reads", READS)
def test_what_is_said_of_a_text_is_what_is_said_of_its_ids(side, reads, sides, texts):
    encoder, servers = sides[side]
    sent = [ids.tolist() for ids in encoder.encode([texts[0][:200], *SCRIPTS])]
    server = servers[reads]
    with server.running():
        source = TextServer(server.url, 60)
        model = source.describe()
        server.requests.clear()
        scored = source.score(model, sent, 0, speller(encoder))
        source.score(model, sent[:1], 0, speller(encoder))
    # ids once, which are refused
    assert [type(body["prompt"][0]) for _, _, body in server.requests] == [list, str, str]
    for text, ids, likely in zip([texts[0][:200], *SCRIPTS], sent, scored, strict=True):
        assert likely.ids_E.tolist() == ids[1:]
        expected = logp_of(server, ids)
        assert server.encoded(speller(encoder)(ids).text)[-len(ids) :][1:] == ids[1:], text
        np.testing.assert_allclose(likely.logp_E, expected, atol=2e-5, err_msg=text)


# --- a text of six letters, by hand ---------------------------------------------------------------

PIECES = [b"<s>", b"ab", b"cd", b"ef", b"</s>", "\u00e9".encode()[:1]]


class Encoder:
    table = table_of(PIECES, bos=0, eos=4)

    def coded(self, text):
        return {"input_ids": []}


def read(ids, tokens, logp, **more):
    """Return the log-probabilities of the ids behind the first one."""
    choice = {"logprobs": {"tokens": tokens, "token_logprobs": logp, **more}}
    return of_text(choice, ids, speller(Encoder())(ids)).logp_E.tolist()


def test_equal_tokens_are_taken_one_by_one_whatever_stands_around_them():
    whole = [0, 1, 2, 3, 4]
    said = [-1, -2, -3, -4]
    tokens = ["ab", "cd", "ef", "</s>"]
    assert read(whole, ["<s>", *tokens], [None, *said]) == said
    assert read(whole, ["", *tokens, " the"], [None, *said, -9]) == said
    # by the offsets alone, with names that are none
    offsets = [0, 0, 2, 4, 6, 10]
    names = ["token_id:7"] * 6
    assert read(whole, names, [None, *said, -9], text_offset=offsets) == said
    assert read(whole, None, [None, *said, -9], text_offset=offsets) == said


def test_spans_between_common_cuts_keep_their_sum():
    ids = [0, 1, 2, 3, 4]
    tokens = ["<s>", "a", "bc", "d", "ef", "</s>"]
    logp = [None, -1, -2, -3, -4, -5]
    assert read(ids, tokens, logp) == [-3, -3, -4, -5]  # by their bytes
    logp[2] = -5
    assert read(ids, tokens, logp) == [-4.5, -4.5, -4, -5]


def test_what_is_not_told_counts_as_certain():
    tokens = ["ab", "cd", "ef", "</s>"]
    # no bos, so nothing of the first token
    assert read([0, 1, 2, 3, 4], tokens, [None, -2, -3, -4]) == [0, -2, -3, -4]
    # a control token that is read letter by letter
    letters = ["<s>", "ab", "cd", "ef", *"</s>"]
    assert read([0, 1, 2, 3, 4], letters, [None, -1, -2, -3, *[-9] * 4]) == [-1, -2, -3, 0]
    # a character that the end of the text cuts is not sent
    assert speller(Encoder())([0, 1, 2, 5]).text == "abcd"
    assert read([0, 1, 2, 5], ["<s>", "ab", "cd", "zz"], [None, -1, -2, -9]) == [-1, -2, 0]


@pytest.mark.parametrize(("tokens", "logp", "expected"), [
    (["<s>", "xy", "cd", "zz", "uv"], [None, -1, -2, -3, -4], "repeats another text"),
    (["<s>", "ab"], [None, -1], "repeats another text"),  # half of it
    (["<s>", "ab", "cd"], [None, -1], "names 3 tokens, 2 log-probabilities"),
    (["<s>", "ab", "cd", "ef", "</s>"], [None, -1, "-2", -3, -4], "no numbers"),
    (["<s>", "ab", "cd", "ef", 7], [None, -1, -2, -3, -4], "else than text"),
])
def test_an_answer_about_another_text_is_refused(tokens, logp, expected):
    with pytest.raises(ValueError, match=expected):
        read([0, 1, 2, 3, 4], tokens, logp)
    with pytest.raises(ValueError, match="another text than was sent"):
        read([0, 1, 2, 3, 4], None, [None, *[-1] * 4], text_offset=[0, 4, 2, 6, 10])


def test_only_a_refusal_of_ids_is_answered_with_text(sides):
    encoder, servers = sides[1]
    ids = encoder.encode(["in 2010"])[0].tolist()
    server = servers["tokens"]
    with server.running():
        source = TextServer(server.url, 60)
        model = source.describe()
        with pytest.raises(DataError, match="HTTP 422 prompt: expected a string"):
            source.score(model, [ids], 0)  # nobody knows what they spell
        server.requests.clear()
        server.faults = [(401, "who are you"), (400, "no ids"), (400, "no echo here")]
        with pytest.raises(DataError, match="HTTP 401 who are you"):
            source.score(model, [ids], 0, speller(encoder))
        with pytest.raises(DataError, match="HTTP 400 no echo here"):
            source.score(model, [ids], 0, speller(encoder))
