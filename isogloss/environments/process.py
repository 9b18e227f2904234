"""Ask the environment of a rank, which is a process; see isogloss/environments/__main__.py.

Tests: tests/test_environments.py.
"""

import shlex
import sys

from isogloss.doors import door
from isogloss.job.commands.engine_process import LOADING_SECONDS, EngineProcess

ROLES = "tool", "user", "system"  # for which an environment speaks
MOST_BYTES = 2**20 + 2**12  # of an answer of an episode
SIDE_BY_SIDE = 32


class EnvironmentProcess(EngineProcess):
    """Let an environment answer.

    Attributes:
        begins: it says something before the first turn.
    """

    def __init__(self, options):
        super().__init__("--environment", shlex.join([sys.executable, "-m",
                                                      "isogloss.environments"]))
        self.command = options["function"]
        self.seconds = options["seconds"]
        response = self.ask(LOADING_SECONDS, do="load", function=options["function"],
                            limits=[options["seconds"], options["mib"]])
        self.begins = response["begins"]

    def answers(self, questions):
        """Return what the environment says to each question, an object.

        Args:
            questions: objects with key, do ("begin" or "turn"), row, seed, messages, tools.
        Raises:
            EngineError: the process has ended.
        """
        if not questions:
            return []
        seconds = 60 + self.seconds * (1 + len(questions) // SIDE_BY_SIDE)
        response = self.ask(seconds, MOST_BYTES * (1 + len(questions)), do="ask",
                            episodes=questions)
        return [checked(answer) for answer in response["answers"]]

    def end_episodes(self):
        self.ask(60, do="end")


def checked(answer):
    """Return an answer with messages that chats may hold, or {"error": why it is none}."""
    if "error" in answer:
        return answer
    try:
        messages, tools = door("chats").read_answer(answer.get("messages"), answer.get("tools"))
    except ValueError as error:
        return {"error": f"answers{error}"}
    for message in messages:
        if message["role"] not in ROLES:
            return {"error": f"speaks for {message['role']!r:.40}; expected one of "
                             f"{', '.join(ROLES)}"}
    ended = answer.get("ended")
    ended = "messages" not in answer if ended is None else bool(ended)
    if not messages and not ended:
        return {"error": "answers no message, and not that the episode ends"}
    return answer | {"messages": messages, "ended": ended, "tools": tools}
