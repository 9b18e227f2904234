"""Ask a server over HTTP what its model says of texts: token ids in, likely tokens out.

Servers say it of the tokens of a prompt, each in its way:

    vLLM    POST /v1/completions, whose extension `prompt_logprobs` takes the number of tokens
    SGLang  POST /generate with `return_logprob`; its /v1/completions answers without token ids
    others  as vLLM; of the text's own tokens alone by `echo`, as hosted APIs say it; those that
            take no ids read the text, and their tokens are aligned with these ids

`/v1/models` tells servers apart by `owned_by`, and says how long a prompt may be.

An error that may pass (no connection, half an answer, a status from 500 on) is tried again, with
pauses that double, until the time-out.

Nothing that a server sends is believed: an answer has a time and a size, and every field of it a
type and a range.

Needs aiohttp and numpy.  Tests: tests/test_text_server.py.

Shapes: N tokens of a prompt behind its first, E tokens named in an answer, of all positions.
"""

import asyncio
import itertools
import json
import os
import threading
import time
from concurrent.futures import Future
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from isogloss.errors import DataError
from isogloss.flags.terminal import one_line

KEY_VARIABLE = "TEACHER_API_KEY"
FIRST_PAUSE = 0.5  # seconds before the second try; each later pause is twice as long
LONGEST_PAUSE = 30.0
PASSING = 408, 425, 429  # statuses below 500 that may pass
REFUSED = 400, 415, 422  # statuses of a request whose prompts may have another form
MOST_BYTES = 2**24  # of an answer, and beside what its entries take
BYTES_PER_ENTRY = 512  # vLLM's takes 100, and a token can be long
LARGEST = 2**31  # ids, indices and lengths are below
LONGEST_LOST = 32  # characters of a text that a token stands for which does not spell them
SAID = 300  # characters of a server's own words in a message
SPARE = 2  # positions of a context that a prompt leaves: its last token is no input, one is written


class Address(NamedTuple):
    """Hold the address of a server.

    base: what stands in front of "/v1/models".
    model: name of one of its models; empty: it has one.
    """

    base: str
    model: str

    @classmethod
    def of(cls, url):
        """Return the Address of http://host:8000, or http://host:8000/prefix/v1#model.

        Raises:
            ValueError: it is another one, or holds a secret.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query:  # run.json holds the flags; say nothing of it here
            raise ValueError("--teacher http://...: its address holds a password or a query, which "
                             f"logs would keep; put a key into the variable {KEY_VARIABLE}")
        try:
            is_whole = bool(parts.hostname and (parts.port or True))
        except ValueError:  # no port is such a text
            is_whole = False
        if not is_whole:
            raise ValueError(f"--teacher {url}: no address of a server; expected one such as "
                             "http://host:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(f"{parts.scheme.lower()}://{parts.netloc}{prefix}", parts.fragment)


def api_key():
    """Return the key that the environment holds for servers, or None.

    Raises:
        ValueError: it cannot be sent; the message does not repeat it.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the variable {KEY_VARIABLE} holds characters that no key has")
    return key or None


class ServedModel(NamedTuple):
    """Hold what a server says of its model.

    name: by which requests name it.
    owner: "vllm", "sglang", or what else made the server.
    context: tokens of a prompt and what follows; None: it does not say.
    """

    name: str
    owner: str
    context: int | None


class Likely(NamedTuple):
    """Hold what a server says of one text, position by position.

    ids_E, logp_E: int64 and float64, tokens and their log-probabilities, in no order; the text's
        own are among them, and no token comes twice at a position.
    counts_N: int64, how many of them each position has.
    spelled: what the server writes for the text's own tokens, or None where it does not say.
    """

    ids_E: np.ndarray
    logp_E: np.ndarray
    counts_N: np.ndarray
    spelled: list


class Spelled(NamedTuple):
    """Hold what tokens spell, as it is sent to an API that takes text alone.

    text: without what begins it where there are no words, such as bos, and without the part of a
        character that ends it.
    begins_T, sizes_T: int64, byte of the text at which each token begins, and its bytes.  What is
        not in the text lies beyond its end.
    special_T: bool, control tokens, whose names stand in the text.
    """

    text: str
    begins_T: np.ndarray
    sizes_T: np.ndarray
    special_T: np.ndarray


class Refused(DataError):
    """Report a request that the server does not take as it is."""


class Passing(Exception):
    """Report an error after which the same request may succeed."""


class TextServer:
    """Ask one server; each call is whole or raises.

    Attributes:
        url: as the flag says it.
        address: Address.
        timeout: seconds for a request with all its tries.
        key: sent with every request, and in no message; or None.
    """

    def __init__(self, url, timeout, key=None):
        self.url = url
        self.address = Address.of(url)
        self.timeout = timeout
        self.key = key
        self.takes_ids = None  # of an API with echo; None: it was not asked yet

    def describe(self):
        """Return the ServedModel.

        Raises:
            DataError: the server does not answer, or not with one model of the wanted name.
        """
        cards = self._ask("GET", "/v1/models").get("data")
        if not isinstance(cards, list) or not all(map(_is_card, cards)):
            raise self.error("its /v1/models lists no models; expected vLLM or SGLang")
        named = {card.get("id"): card for card in cards}
        wanted = self.address.model
        if (wanted and wanted not in named) or (not wanted and len(named) != 1):
            listed = ", ".join(named) or "none"
            raise self.error(f"its models are {listed[:SAID]}; name one of them behind #, as in "
                             "http://host:8000#name")
        [card] = [named[wanted]] if wanted else named.values()
        context = card.get("max_model_len")
        is_number = type(context) is int and 0 < context < LARGEST
        return ServedModel(card["id"], str(card.get("owned_by")), context if is_number else None)

    def score(self, model, texts, top_k, spell=None):
        """Return the Likely of each text.

        Args:
            texts: lists of token ids, of two or more.
            top_k: most likely tokens of each position; the text's own come beside them.  0: these
                alone.
            spell: function that returns the Spelled of a list of ids, for an API with echo that
                refuses ids; None: an error then.
        Raises:
            DataError: the time is over, or the answer is not what was asked for.
        """
        num_entries = (top_k + 1) * sum(map(len, texts))
        most_bytes = MOST_BYTES + BYTES_PER_ENTRY * num_entries
        if model.owner == "sglang":
            body = {"input_ids": texts, "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
            answers = self._ask("POST", "/generate", body, most_bytes, expected=list)
            return self._read(of_sglang, answers, texts)
        body = {"model": model.name, "prompt": texts, "max_tokens": 1, "temperature": 0}
        if top_k or model.owner == "vllm":
            body["prompt_logprobs"] = top_k
            return self._completed(body, most_bytes, of_vllm, texts)
        body |= {"echo": True, "logprobs": 1}
        if self.takes_ids is not False or spell is None:
            try:
                likely = self._completed(body, most_bytes, of_echo, texts)
                self.takes_ids = True
                return likely
            except Refused:
                if self.takes_ids or spell is None:
                    raise
        spelled = list(map(spell, texts))
        body["prompt"] = [one.text for one in spelled]
        likely = self._completed(body, most_bytes, of_text, texts, spelled)
        self.takes_ids = False
        return likely

    def _completed(self, body, most_bytes, read, texts, *more):
        """Ask /v1/completions; return what `read` makes of each choice, its text and more."""
        answers = self._ask("POST", "/v1/completions", body, most_bytes).get("choices")
        return self._read(read, answers, texts, *more)

    def _read(self, read, answers, texts, *more):
        try:
            if len(answers) != len(texts):
                raise ValueError(f"{len(answers)} answers to {len(texts)} texts")
            if read is not of_sglang:
                answers = sorted(answers, key=lambda answer: answer["index"])
                if [answer["index"] for answer in answers] != list(range(len(texts))):
                    raise ValueError("its choices have other indices than the texts")
            return list(map(read, answers, texts, *more))
        except ValueError as error:
            raise self.error(f"{error}; another model, or another version of the server, answers "
                             "there") from None
        except (KeyError, TypeError, AttributeError, IndexError):
            raise self.error("its answer has no log-probabilities of the prompt; expected vLLM "
                             "(with prompt_logprobs), SGLang or an API with echo") from None

    def error(self, what, kind=DataError):
        """Return an error of one line, without the key."""
        line = one_line(f"--teacher {self.url}: {what}")
        return kind(line.replace(self.key, "***") if self.key else line)

    # --- HTTP

    def _ask(self, method, path, body=None, most_bytes=MOST_BYTES, expected=dict):
        """Return the JSON of an answer; try again what may pass, until the time is over."""
        deadline = time.monotonic() + self.timeout
        pause = FIRST_PAUSE
        for tries in itertools.count(1):
            try:
                plain = self._try(method, path, body, deadline, most_bytes)
                if not isinstance(plain, expected):
                    kind = "an object" if expected is dict else "a list"
                    raise self.error(f"its answer to {path} is not {kind}; expected vLLM or SGLang")
                return plain
            except Passing as error:
                last = str(error)
            except TimeoutError:
                last = "TimeoutError"
            except (OSError, aiohttp.ClientError) as error:
                cause = getattr(error, "os_error", error)
                last = f"{type(cause).__name__} {' '.join(str(cause).split())[:SAID]}".strip()
            if time.monotonic() + pause >= deadline:
                raise self.error(
                    f"no answer to {path} in {self.timeout:g} seconds and {tries} tries (the last "
                    f"one: {last}); see whether the server runs, or raise --teacher_timeout")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, method, path, body, deadline, most_bytes):
        """Return the JSON of an answer of one try.

        Raises:
            Passing, OSError, ClientError: it may pass.
            DataError: it will not.
        """
        # not asyncio.run, which waits for the thread that looks up a name beyond the deadline
        loop = asyncio.new_event_loop()
        try:
            status, content = loop.run_until_complete(
                self._sent(method, path, body, deadline, most_bytes))
        finally:
            loop.close()
        return self._checked(status, content)

    async def _sent(self, method, path, body, deadline, most_bytes):
        """Return (status, content) of an answer, complete before the deadline."""
        # an answer that is packed could be of any size
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            data = None if body is None else json.dumps(body)
            async with session.request(method, self.address.base + path, data=data,
                                       headers=headers, allow_redirects=False) as response:
                pieces = []
                async for piece in response.content.iter_any():
                    pieces.append(piece)
                    most_bytes -= len(piece)
                    if most_bytes < 0:
                        raise self.error(f"its answer to {path} is longer than any that was asked "
                                         "for; expected vLLM or SGLang")
                return response.status, b"".join(pieces)

    def _checked(self, status, content):
        """Return the JSON of an answer that is no error."""
        if status >= 500 or status in PASSING:
            raise Passing(f"HTTP {status} {_words(content)}")
        if status >= 300:  # a redirection would take the key to another server
            raise self.error(f"HTTP {status} {_words(content)}{_advice(status, content)}",
                             Refused if status in REFUSED else DataError)
        try:
            return json.loads(content)
        except RecursionError:
            raise self.error("its answer is no JSON of vLLM or SGLang; it is too deep") from None
        except ValueError:
            raise Passing("half an answer, or one that is not JSON") from None


def _is_card(card):
    return isinstance(card, dict) and isinstance(card.get("id"), str)


def _words(content):
    """Return what a server says of an error, in short."""
    text = content.decode(errors="replace")
    try:
        plain = json.loads(text)
        error = plain.get("error", plain)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    return " ".join(text[: 2**16].split())[:SAID]


def _advice(status, content):
    """Return what to do about an error, as far as its words tell."""
    if status in (401, 403) and b"--enable" not in content:
        return f"; put its key into the variable {KEY_VARIABLE}"
    if b"max allowed" in content and b"logprobs" in content:
        return ("; start the server with --max-logprobs of at least as many, or ask for fewer with "
                "--teacher_output_topk or --loss_topk")
    return ""


# --- answers --------------------------------------------------------------------------------------


def of_vllm(choice, ids):
    """Return the Likely of a choice of vLLM.

    Its `prompt_logprobs` are a list over the tokens of the prompt: null for the first one, then
    {id: {"logprob", "rank", "decoded_token"}} of the most likely ones and of the token itself.

    Raises:
        ValueError: it is about another text.
    """
    positions = _about(choice["prompt_logprobs"], ids)
    entries = list(itertools.chain.from_iterable(map(dict.values, positions)))
    logp = [entry["logprob"] for entry in entries]
    token_ids = list(map(int, itertools.chain.from_iterable(positions)))
    spelled = []
    for position, label in zip(positions, ids[1:]):
        spelled.append(_own(position.get(str(label)), label).get("decoded_token"))
    counts = np.array([len(position) for position in positions], np.int64)
    return _likely(token_ids, logp, counts, spelled)


def of_sglang(answer, ids):
    """Return the Likely of an answer of SGLang.

    Its `meta_info` has `input_token_logprobs`, [log-probability, id, text] of each token of the
    prompt, and `input_top_logprobs`, a list of the same of each, null for the first one.

    Raises:
        ValueError: it is about another text.
    """
    meta = answer["meta_info"]
    labels = _about(meta["input_token_logprobs"], ids)
    tops = _about(meta.get("input_top_logprobs", [()] * len(ids)), ids)  # none were asked for
    entries = []
    counts = []
    for label, top, expected in zip(labels, tops, ids[1:]):
        _own(label if label[1] == expected else None, expected)
        others = [entry for entry in top if entry[1] != expected]
        entries += [label, *others]
        counts.append(1 + len(others))
    return _likely([entry[1] for entry in entries], [entry[0] for entry in entries],
                   np.array(counts, np.int64), [label[2] for label in labels])


def of_echo(choice, ids):
    """Return the Likely, of the text's own tokens alone, of a choice that repeats the prompt.

    Its `logprobs` have `tokens`, spelled, and `token_logprobs`, null for the first one: those of
    the prompt, and mostly of the token that was written behind it.  Raises: as above.
    """
    logp = choice["logprobs"]["token_logprobs"]
    end = -1 if len(logp) > len(ids) else None
    logp = _about(logp[:end], ids)
    spelled = _about(choice["logprobs"]["tokens"][:end], ids)
    return _likely(ids[1:], logp, np.ones(len(logp), np.int64), spelled)


def of_text(choice, ids, sent):
    """Return the Likely, of the text's own tokens alone, of a choice that repeats a text.

    The text is cut wherever both the server's tokens and these ids begin one.  Between two cuts
    equally many tokens are taken for the same ones; else the sum of the server's log-probabilities
    is shared by bytes, so that it is exact for every chunk that begins and ends at a cut.

    What the server does not tell counts as certain, so that `alm` learns it from the text: a first
    token for which it reads no bos, control tokens that it reads letter by letter, and the
    character that the end of the text cuts.  Raises: as above, or it is about another text.

    Args:
        sent: the Spelled of these ids.
    """
    logp, begins = _echoed(choice["logprobs"], sent.text)
    raw = sent.text.encode()
    total = len(raw)
    ends = [*begins[1:], total]
    is_sent = sent.begins_T + sent.sizes_T <= total
    cuts = np.intersect1d(sent.begins_T[sent.begins_T < total], begins)
    group_of_ours = np.where(is_sent, np.searchsorted(cuts, sent.begins_T, side="right"), -1)
    group_of_theirs = np.searchsorted(cuts, begins, side="right")
    label_logp = np.zeros(len(ids))
    spelled = [None] * len(ids)
    for group in range(1, len(cuts) + 1):
        ours = np.flatnonzero(group_of_ours == group)
        theirs = np.flatnonzero(group_of_theirs == group)
        values = [logp[token] for token in theirs]
        if None in values or (len(ours) != len(theirs) and sent.special_T[ours].any()):
            continue
        if len(ours) == len(theirs):
            label_logp[ours] = values
        else:
            sizes = sent.sizes_T[ours]
            label_logp[ours] = sum(values) * sizes / sizes.sum()
        for place, token in enumerate(ours):
            same = theirs[place : place + 1] if len(ours) == len(theirs) else theirs
            spelled[token] = raw[begins[same[0]] : ends[same[-1]]].decode(errors="replace")
    return _likely(ids[1:], label_logp[1:].tolist(), np.ones(len(ids) - 1, np.int64), spelled[1:])


def _echoed(logprobs, text):
    """Return (log-probabilities of tokens, bytes at which they begin) of a text that is repeated.

    What stands in front of the text, as bos, and what is written behind it are left out.
    """
    logp = list(logprobs["token_logprobs"])
    tokens = list(logprobs.get("tokens") or [""] * len(logp))
    offsets = list(logprobs.get("text_offset") or [])
    if len(tokens) != len(logp) or len(offsets) not in (0, len(logp)):
        raise ValueError(f"it names {len(tokens)} tokens, {len(logp)} log-probabilities and "
                         f"{len(offsets)} offsets")
    _likely([], logp[1:], np.zeros(0, np.int64), tokens)  # checks their types
    is_named = any(map(_is_clear, tokens))
    is_bos = is_named and (not tokens[0] or _end(tokens[0], text, 0) is None)
    if logp[0] is None and (is_bos or offsets[:1] == offsets[1:2] != []):
        del tokens[0], logp[0], offsets[:1]
    if offsets and not is_named and "\ufffd" not in "".join(tokens):
        places = _places_of_offsets(offsets, text)
    else:
        places = _places_of_tokens(tokens, text)
    size_of = np.cumsum([0, *[len(letter.encode()) for letter in text]])
    return logp[: len(places)], size_of[places]


def _end(token, text, place):
    """Return where a token ends that begins at a place of a text; None: it is not there.

    APIs leave out the space in front of a token, or write one that the text does not have.
    """
    token = token.replace("\u2581", " ")
    if text.startswith(token, place):
        return place + len(token)
    if text[place : place + 1] == " " and text.startswith(token, place + 1):
        return place + 1 + len(token)
    if place == 0 and token[:1] == " " and text.startswith(token[1:]):
        return len(token) - 1
    return None


def _is_clear(token):
    """Return whether a token is what it spells, and no part of a character, nothing or a number."""
    return bool(token) and "\ufffd" not in token and not token.startswith(("bytes:", "token_id:"))


def _places_of_tokens(tokens, text):
    """Return the character at which each token of a text begins.

    A token that does not tell begins where the one before it ends, or with it if it does not tell.

    Raises:
        ValueError: they spell another text.
    """
    places = []
    place = 0
    num_lost = num_parts = 0  # tokens since the last one that was found; those that are not empty
    num_wrong = 0
    for token in tokens:
        begin, end = place, None
        if _is_clear(token) and not num_lost:
            end = _end(token, text, place)
        elif _is_clear(token):  # a character has four bytes at most, so four of the lost ones
            begin = text.find(token, place + -(-num_parts // 4), place + LONGEST_LOST * num_lost)
            end = None if begin < 0 else begin + len(token)
        is_near = len(text) - place <= LONGEST_LOST * num_lost
        if place == len(text) or (end is None and is_near and _is_clear(token)):
            break  # it stands behind the text
        places.append(place if end is None else begin)
        num_lost = num_lost + 1 if end is None else 0
        num_parts = num_parts + bool(token) if end is None else 0
        num_wrong += end is None and _is_clear(token)
        place = place if end is None else end
    if len(text) - place > LONGEST_LOST * num_lost or 2 * num_wrong > len(places):
        raise ValueError("it repeats another text than was sent")
    return places


def _places_of_offsets(offsets, text):
    """Return the character at which each token of a text begins.

    Raises:
        ValueError: the offsets are none of this text.
    """
    if not offsets or not set(map(type, offsets)) <= {int} or offsets != sorted(offsets):
        raise ValueError("it repeats another text than was sent")
    return [place - offsets[0] for place in offsets if place - offsets[0] < len(text)]


def _likely(token_ids, logp, counts_N, spelled):
    """Return a Likely; a ValueError where a field is of another type or range, or a token twice."""
    if not set(map(type, token_ids)) <= {int} or not all(0 <= one < LARGEST for one in token_ids):
        raise ValueError("it names tokens by something else than their ids")
    if not set(map(type, logp)) <= {int, float} or any(abs(value) > 1e300 for value in logp
                                                       if type(value) is int):
        raise ValueError("it has log-probabilities that are no numbers")
    if not set(map(type, spelled)) <= {str, type(None)}:
        raise ValueError("it spells tokens by something else than text")
    ids_E = np.array(token_ids, np.int64)
    position_E = np.repeat(np.arange(len(counts_N)), counts_N)
    if len(np.unique(position_E * LARGEST + ids_E)) < len(ids_E):
        raise ValueError("it names a token twice at one position")
    return Likely(ids_E, np.array(logp, np.float64), counts_N, spelled)


def _about(positions, ids):
    """Return what an answer says of all tokens but the first."""
    if len(positions) != len(ids):
        raise ValueError(f"it answers {len(positions)} positions of a text of {len(ids)} tokens")
    return positions[1:]


def _own(entry, label):
    """Return what an answer says of the text's own token at a position."""
    if entry is None:
        raise ValueError(f"it says nothing of token {label} of a text, where it stands, so it "
                         "reads other tokens than were sent")
    return entry


# --- beside the student ---------------------------------------------------------------------------


class Requests:
    """Run calls beside the program, a few at a time; their results are `Future`s.

    Threads are made for calls: data workers are forked before.  They do not keep the process from
    ending.
    """

    def __init__(self, most_at_once):
        self.free = threading.BoundedSemaphore(most_at_once)

    def submit(self, function, *arguments):
        future = Future()
        call = (future, function, *arguments)
        threading.Thread(target=self._run, args=call, daemon=True).start()
        return future

    def _run(self, future, function, *arguments):
        with self.free:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # it belongs to the one who waits
                future.set_exception(error)
