"""Let a server answer prompts: any with OpenAI's API, vLLM and SGLang among them.

    texts   POST /v1/completions with the text of the prompt
    chats   POST /v1/chat/completions with its messages and tools, by the server's own template

Which tokens it draws, and whether it draws the same ones for the same `seed`, is its own affair.

Tests: tests/test_write.py.
"""

import json
from typing import NamedTuple

from isogloss.data.chat_rows import SHAPES, in_shape, problem_of_chat
from isogloss.flags.parse import DATE
from isogloss.rollout import hash_counters
from isogloss.teachers.text_server import Requests, TextServer, api_key

SEEDS = 2**31  # servers take no larger ones


class Answer(NamedTuple):
    """Hold what a teacher has written.

    message: of the assistant; of a text its content alone counts.
    ended: it is not cut.
    num_tokens: of it; 0: the server does not say.
    rollout: of several turns, see `rollouts.Rollout`; None: it is one message.
    """

    message: dict
    ended: bool
    num_tokens: int
    rollout: object = None


class ServedWriter(TextServer):
    """Ask one server for answers, several at once.

    Attributes:
        args: AnswerArgs.
        purpose: first counter of the noise.
        model: ServedModel.
    """

    def __init__(self, args, encoder, purpose):
        super().__init__(args.teacher, args.teacher_timeout, api_key())
        self.args = args
        self.purpose = purpose
        self.told = {name: value for name, value in encoder.template_kwargs.items() if name != DATE}
        self.model = self.describe()
        self.requests = Requests(args.rollout_batch)

    def write(self, prompts):
        """Return the Answer to each RolloutPrompt.

        Raises:
            DataError: the server does not answer, or otherwise than expected.
        """
        waited = [self.requests.submit(self._answer, prompt) for prompt in prompts]
        return [answer.result() for answer in waited]

    def close(self):
        """End nothing: every request has ended."""

    def _answer(self, prompt):
        args = self.args
        body = {"model": self.model.name, "max_tokens": prompt.max_new_tokens,
                "temperature": args.rollout_temperature, "top_p": args.rollout_top_p,
                "seed": hash_counters(args.seed, self.purpose, *prompt.key) % SEEDS}
        if prompt.messages is None:
            answer = self._ask("POST", "/v1/completions", body | {"prompt": prompt.text})
        else:
            # with names of calls, and arguments as text
            body["messages"] = in_shape(prompt.taught, SHAPES[-1], {})
            if prompt.tools:
                body["tools"] = prompt.tools
            if self.told:
                body["chat_template_kwargs"] = self.told
            answer = self._ask("POST", "/v1/chat/completions", body)
        try:
            return self._read_answer(answer)
        except (KeyError, TypeError, AttributeError, IndexError):
            raise self.error(f"its answer holds no message or text ({json.dumps(answer)[:80]}); "
                             "expected a server with OpenAI's API") from None

    def _read_answer(self, answer):
        choice = answer["choices"][0]
        said = choice.get("message") or {"content": choice["text"]}
        message = {"role": "assistant", "content": said["content"] or ""}
        for key in ("reasoning_content", "tool_calls"):
            if said.get(key):
                message[key] = said[key]
        if not isinstance(message["content"], str):
            raise TypeError(message["content"])
        if problem := problem_of_chat([message]):
            raise self.error(f"its answer{problem}")
        num_tokens = (answer.get("usage") or {}).get("completion_tokens")
        return Answer(message, choice.get("finish_reason") != "length",
                      num_tokens if type(num_tokens) is int else 0)
