"""Environments that others have written, as `--environment` asks them; to copy and to change.

    OPENENV_URL=http://localhost:8000 isogloss-distill ... \
        --environment examples/environments.py:OpenEnv
    VERIFIERS_ENVIRONMENT=wordle isogloss-distill ... --text_key prompt \
        --environment '{"function": "examples/environments.py:Verifiers", "mib": 4096}'

`OpenEnv` has run with openenv-core 0.3.0: a server with four sessions, three times four episodes.
`Verifiers` has run with verifiers 0.1.14: a ToolEnv, three episodes.  From 0.4 on tasks drive
agents of their own, which no rollout of ours can take the place of in a few lines.

Tests: tests/test_other_environments.py, with stand-ins of both packages.
"""

import asyncio
import importlib
import json
import os
from contextlib import suppress

with suppress(ImportError):  # here, not in the process of every episode
    importlib.import_module("openenv.core.generic_client")
ENVIRONMENT = None
if os.environ.get("VERIFIERS_ENVIRONMENT"):
    import verifiers

    ENVIRONMENT = verifiers.load_environment(os.environ["VERIFIERS_ENVIRONMENT"])


class OpenEnv:
    """Speak with a server of OpenEnv, each episode in a session of its own.

    An action is the arguments of a call (the row's tools say which), or what the student says, by
    the name `action` of the row ("message").  The rewards of an episode are added up.  The server
    needs as many sessions (max_concurrent_envs) as episodes are open.
    """

    def __init__(self, row, seed):
        from openenv.core import GenericEnvClient

        url = row.get("url") or os.environ["OPENENV_URL"]
        self.client = GenericEnvClient(base_url=url).sync()
        self.options = {"seed": seed} | (row.get("reset") or {})
        self.field = row.get("action") or "message"
        self.reward = None

    def begin(self):
        result = self.client.reset(**self.options)
        return {"role": "user", "content": shown(result.observation)}

    def __call__(self, messages):
        said = messages[-1]
        functions = [call["function"] for call in said.get("tool_calls", [])]
        answers = []
        for function in functions or [{"arguments": {self.field: said["content"]}}]:
            name = {"role": "tool", "name": function["name"]} if functions else {"role": "user"}
            try:
                result = self.client.step(function["arguments"])
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                answers.append(name | {"content": str(error)})  # no action of this server's
                continue
            answers.append(name | {"content": shown(result.observation)})
            if result.reward is not None:
                self.reward = (self.reward or 0.0) + result.reward
            if result.done:
                self.client.close()
                return {"ended": True, "reward": self.reward}
        return {"messages": answers, "reward": self.reward}


def shown(observation):
    """Return an observation as text: its only value where that is one, else JSON."""
    values = list(observation.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(observation, ensure_ascii=False)


class Verifiers:
    """Let an environment of verifiers do its rollout; the student is its client.

    Rows are those of its own data (`ENVIRONMENT.get_dataset()`).  It scores what has ended, so let
    `max_turns` be at least its own.
    """

    def __init__(self, row):
        if ENVIRONMENT is None:
            raise ValueError("VERIFIERS_ENVIRONMENT names no environment")
        client = verifiers.OpenAIChatCompletionsClient(None)
        client.get_response = self.ask
        self.asked = asyncio.Queue()
        self.answered = asyncio.Queue()
        self.loop = asyncio.new_event_loop()
        self.rollout = self.loop.create_task(self.run(row, client))

    async def run(self, row, client):
        """Return the reward of the rollout."""
        try:
            state = await ENVIRONMENT.rollout(row, client, "student", {})
            if state["error"]:
                raise state["error"]
            await ENVIRONMENT.rubric.score_rollout(state)
        finally:
            self.asked.put_nowait(None)
        return state["reward"]

    async def ask(self, prompt, tools=None, **options):
        """Return the student's answer; called by the environment."""
        self.asked.put_nowait((prompt, tools))
        return await self.answered.get()

    def begin(self, messages):
        answer = self.next(messages)
        return {key: value for key, value in answer.items() if value}

    def __call__(self, messages):
        self.answered.put_nowait(as_response(messages[-1]))
        return self.next(messages)

    def next(self, messages):
        """Let the environment go on until it asks again, or ends."""
        asked = self.loop.run_until_complete(self.asked.get())
        if asked is None:
            return {"ended": True, "reward": self.loop.run_until_complete(self.rollout)}
        prompt, tools = asked
        chat = [as_message(message) for message in prompt]
        for before, now in zip(messages, chat):
            if (before["role"], before["content"]) != (now["role"], now["content"]):
                raise ValueError("writes its chat anew, which no turn may")
        functions = [tool.model_dump(include={"name", "description", "parameters"})
                     for tool in tools or ()]
        return {"messages": chat[len(messages):],
                "tools": [{"type": "function", "function": function} for function in functions]}


def as_message(message):
    """Return a message of verifiers as one of ours."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {"role": message.role, "content": content}


def as_response(said):
    """Return what the student said as a Response of verifiers."""
    functions = [call["function"] for call in said.get("tool_calls", [])]
    calls = [{"id": f"call_{number}", "name": function["name"],
              "arguments": json.dumps(function["arguments"])}
             for number, function in enumerate(functions)]
    is_cut = bool(said.get("cut"))
    reason = "length" if is_cut else "tool_calls" if calls else "stop"
    return verifiers.types.Response.model_validate({
        "id": "student", "created": 0, "model": "student",
        "message": {"content": said["content"], "tool_calls": calls or None,
                    "finish_reason": reason, "is_truncated": is_cut}})
