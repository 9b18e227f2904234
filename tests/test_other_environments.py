"""Examples of environments of others, with stand-ins that have their signatures.

Of openenv-core 0.3.0: GenericEnvClient(base_url).sync(), reset(**options), step(action) and close;
of verifiers 0.1.14: load_environment, Client.get_response, Environment.rollout, rubric and types.
"""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from conftest import ROOT
from isogloss.environments import __main__ as server
from isogloss.environments.process import checked

FILE = ROOT / "examples" / "environments.py"
QUESTION = {"role": "user", "content": "Guess."}


def asked(function, row, messages, tools=None):
    """Return what an environment says, as its process reads it."""
    given = {"messages": messages, "tools": tools, "row": row, "seed": 5}
    return checked(json.loads(json.dumps(server.plain(server.called(function, given)))))


def said(content="", *calls, **more):
    functions = [{"type": "function", "function": {"name": "guess", "arguments": arguments}}
                 for arguments in calls]
    return {"role": "assistant", "content": content} | more | (
        {"tool_calls": functions} if functions else {})


# --- OpenEnv --------------------------------------------------------------------------------------


class GenericEnvClient:
    """Tell guesses whether they are low, and give half a point for each that is a number."""

    closed = 0

    def __init__(self, base_url, connect_timeout_s=10.0):
        assert base_url == "http://there:8000"

    def sync(self):
        return self

    def reset(self, **options):
        self.number = options["seed"] + options.get("more", 0)
        return SimpleNamespace(observation={"text": "Go on."}, reward=None, done=False)

    def step(self, action, **options):
        if set(action) != {"value"}:
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        if action["value"] == "down":
            raise RuntimeError("Server error: it is (code: EXECUTION_ERROR)")
        is_low = int(action["value"]) < self.number
        return SimpleNamespace(observation={"low": is_low, "é": 1}, reward=0.5, done=not is_low)

    def close(self):
        GenericEnvClient.closed += 1


@pytest.fixture
def openenv(monkeypatch):
    module = ModuleType("openenv.core")
    module.GenericEnvClient = GenericEnvClient
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", module)
    monkeypatch.delenv("VERIFIERS_ENVIRONMENT", raising=False)
    monkeypatch.setattr(GenericEnvClient, "closed", 0)
    return server.load(f"{FILE}:OpenEnv")


def test_a_server_of_openenv_is_an_environment(openenv, monkeypatch):
    row = {"url": "http://there:8000", "action": "value", "reset": {"more": 2}}
    its = server.called(openenv, {"row": row, "seed": 5})
    first = asked(its.begin, row, [QUESTION])
    assert first["messages"] == [{"role": "user", "content": "Go on."}]
    answer = asked(its, row, [QUESTION, said("6")])
    assert not answer["ended"] and answer["reward"] == 0.5
    assert answer["messages"] == [{"role": "user", "content": '{"low": true, "é": 1}'}]
    # a call that is none of its actions is told, and the next one is taken
    answer = asked(its, row, [QUESTION, said("", {"number": 3}, {"value": 4})])
    assert [(message["role"], message["content"][:12]) for message in answer["messages"]] == [
        ("tool", "Server error"), ("tool", '{"low": true')]
    assert answer["reward"] == 1.0 and not answer["ended"] and not GenericEnvClient.closed
    last = asked(its, row, [QUESTION, said("", {"value": 7}, {"value": 8})])
    assert last["ended"] and last["reward"] == 1.5 and GenericEnvClient.closed == 1
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
        its([said("down")])
    monkeypatch.setenv("OPENENV_URL", "http://there:8000")
    assert server.called(openenv, {"row": {}, "seed": 3}).field == "message"


# --- verifiers ------------------------------------------------------------------------------------


class Record(SimpleNamespace):
    """An object with the fields of a model of pydantic."""

    @classmethod
    def model_validate(cls, data):
        return json.loads(json.dumps(data), object_hook=lambda fields: cls(**fields))

    def model_dump(self, include):
        return {key: value for key, value in vars(self).items() if key in include}


class Guesses:
    """An environment of verifiers: a rollout asks its client until the answer is told."""

    rewrites = False

    def __init__(self):
        self.rubric = self

    async def rollout(self, input, client, model, sampling_args=None):
        state = {"answer": input["answer"], "error": None, "client": client, "said": []}
        prompt = [Record(role="system", content="Be brief."), Record(**input["prompt"][0])]
        if input["prompt"][0]["role"] == "system":
            prompt = [Record(**message) for message in input["prompt"]]
        tools = [Record(name="guess", description="", parameters={"type": "object"}, strict=None)]
        while len(state["said"]) < 3:
            response = await state["client"].get_response(
                prompt=prompt, model=model, tools=tools, sampling_args=sampling_args, state=state)
            message = response.message
            state["said"].append(message)
            if message.is_truncated:
                state["error"] = ValueError("was cut")
                break
            if not message.tool_calls:
                break
            await asyncio.sleep(0)
            prompt = [*prompt, Record(role="assistant", content=message.content)]
            if self.rewrites:
                prompt = prompt[1:]
            for call in message.tool_calls:
                value = json.loads(call.arguments)["value"]
                prompt.append(Record(role="tool", tool_call_id=call.id, content=[
                    {"type": "text", "text": f"{call.name} {value} "},
                    {"type": "text", "text": "low" if value < 7 else "high"}]))
        return state

    async def score_rollout(self, state):
        state["reward"] = float(state["said"][-1].content == state["answer"])


class Client:
    """The client of verifiers."""

    def __init__(self, client_or_config):
        self.client = client_or_config

    async def get_response(self, prompt, model, sampling_args, tools=None, **options):
        raise AssertionError("the student answers")


@pytest.fixture
def verifiers(monkeypatch):
    module = ModuleType("verifiers")
    module.load_environment = lambda name: {"guesses": Guesses()}[name]
    module.OpenAIChatCompletionsClient = Client
    module.types = SimpleNamespace(Response=Record)
    monkeypatch.setitem(sys.modules, "verifiers", module)
    monkeypatch.setenv("VERIFIERS_ENVIRONMENT", "guesses")
    made = []

    def make(row):
        made.append(environment(row))
        return made[-1]

    environment = server.load(f"{FILE}:Verifiers")
    yield make
    for its in made:
        its.rollout.cancel()
        its.loop.run_until_complete(asyncio.wait([its.rollout]))


ROW = {"prompt": [{"role": "system", "content": "Be brief."}, QUESTION], "answer": "7",
       "example_id": 0}


def test_an_environment_of_verifiers_is_one_of_ours(verifiers):
    chat = list(ROW["prompt"])
    its = verifiers(ROW)
    first = asked(its.begin, ROW, chat)
    assert not first["messages"] and first["tools"][0]["function"] == {
        "name": "guess", "description": "", "parameters": {"type": "object"}}
    chat.append(said("So:", {"value": 6}, {"value": 8}))
    answer = asked(its, ROW, chat)
    assert not answer["ended"] and answer["messages"] == [
        {"role": "tool", "content": "guess 6 low"}, {"role": "tool", "content": "guess 8 high"}]
    last = asked(its, ROW, [*chat, *answer["messages"], said("7")])
    assert last["ended"] and last["reward"] == 1.0
    wrong = verifiers(ROW)
    wrong.begin(ROW["prompt"])
    assert asked(wrong, ROW, [*ROW["prompt"], said("8", invalid_call="no")])["reward"] == 0.0


def test_what_an_environment_of_verifiers_cannot_do_is_an_error(verifiers, monkeypatch):
    its = verifiers(ROW)
    its.begin(ROW["prompt"])
    with pytest.raises(ValueError, match="was cut"):
        its([*ROW["prompt"], said("7", cut=True)])
    # the chat of a row that is no longer the environment's
    with pytest.raises(ValueError, match="writes its chat anew"):
        verifiers(ROW | {"prompt": [QUESTION]}).begin([QUESTION])
    monkeypatch.setattr(Guesses, "rewrites", True)
    its = verifiers(ROW)
    its.begin(ROW["prompt"])
    with pytest.raises(ValueError, match="writes its chat anew"):
        its([*ROW["prompt"], said("", {"value": 1})])
    monkeypatch.delenv("VERIFIERS_ENVIRONMENT")
    with pytest.raises(ValueError, match="VERIFIERS_ENVIRONMENT names no environment"):
        server.load(f"{FILE}:Verifiers")(ROW)
