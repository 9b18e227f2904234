"""Run an environment for a rank: python -m isogloss.environments, lines of JSON in and out.

    {"do": "load", "function": "package.module:name", "limits": [seconds, mib]}
                                                  -> {"done": name, "begins": false}
    {"do": "ask", "episodes": [{"key": 7, "do": "turn", "row": {}, "seed": 3, "messages": [...],
                                "tools": [...]}, ...]}         -> {"answers": [{...}, ...]}
    {"do": "end"}                                 -> {"done": number of episodes that were open}

Every episode has a process of its own, forked from this one once the environment is imported, from
its first question to its end.  One that takes too long, too much memory, or says too much ends; all
that it has started ends with it.  An answer is what `plain` makes of it, or {"error": line}.

Needs the standard library and Linux.  Tests: tests/test_environments.py.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from isogloss.job.commands.kept_process import PR_SET_CHILD_SUBREAPER, children, prctl
from isogloss.job.processes import end_with

SHIPPED = "calculator", "python"
SIDE_BY_SIDE = 32  # episodes that answer at the same time
MOST_BYTES = 2**20  # of an answer
KEYS = {"messages", "reward", "ended", "tools"}  # of an answer that is an object
GIVEN = "messages", "tools", "row", "seed"  # what a function may ask for by its parameters


# --- what a user wrote ----------------------------------------------------------------------------


def load(name):
    """Return the function or class that a name stands for.

    Raises:
        ValueError: there is none.
    """
    if name in SHIPPED:
        name = f"isogloss.environments.{name}:{name}"
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"{name}: expected one of {', '.join(SHIPPED)}, package.module:function, "
                         "or file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"{name}: is {type(found).__name__}, expected a function or a class")
    return found


def called(function, given):
    """Return what a function, which may be async, returns of those of `given` that it asks for."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        given = {name: value for name, value in given.items() if name in names}
    result = function(**given)
    if inspect.isawaitable(result):
        return asyncio.run(_awaited(result))
    return result


async def _awaited(result):
    return await result


def plain(result):
    """Return an answer as an object with some of KEYS.

    Args:
        result: None: the episode ends; a number: it ends with this reward; a message, or a list
            of messages: they are said next; or an object with some of KEYS.
    Raises:
        ValueError: it is something else.
    """
    if result is None:
        return {"ended": True}
    if hasattr(result, "__float__") and not isinstance(result, str | bytes):
        result = {"ended": True, "reward": float(result)}
    elif isinstance(result, dict) and "role" in result:
        result = {"messages": [result]}
    elif isinstance(result, list):
        result = {"messages": result}
    if not isinstance(result, dict) or result.keys() - KEYS:
        raise ValueError(f"returned {result!r:.80}; expected None, a number, a message, a list of "
                         f"messages, or an object with some of {', '.join(sorted(KEYS))}")
    result = dict(result)
    reward = result.pop("reward", None)  # None: as if nothing was said of it
    if reward is None:
        return result
    if not math.isfinite(float(reward)):
        raise ValueError(f"returned the reward {reward}; expected a finite number")
    return result | {"reward": float(reward)}


# --- the process of an episode --------------------------------------------------------------------


def run_episode(make, questions, answers, mib):
    """Answer the questions of one episode until they end; run by its process.

    Args:
        make: the environment, a function or a class.
        questions, answers: file descriptors.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    environment = make
    is_new = True
    for line in os.fdopen(questions):
        question = json.loads(line)
        try:
            if is_new:
                random.seed(question["seed"])
                is_class = inspect.isclass(make)
                environment = called(make, _given(question, "row", "seed")) if is_class else make
                is_new = False
            function = environment.begin if question["do"] == "begin" else environment
            answer = json.dumps(plain(called(function, _given(question, *GIVEN))))
        except BaseException as error:  # SystemExit and MemoryError too
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        data = answer.encode("utf-8", "surrogatepass") + b"\n"
        while data:
            data = data[os.write(answers, data) :]


def _given(question, *names):
    return {name: question.get(name) for name in names}


class EpisodeProcess:
    """Ask the process of an episode, whatever it does.

    Attributes:
        process: its id; questions, answers: pipes.
        question: bytes that are still to be sent; answer: bytes that have come.
        deadline: time at which it ends.
    """

    def __init__(self, make, mib, private):
        """Start it.

        Args:
            private: file descriptor that it must not have.
        """
        there, self.questions = os.pipe()
        self.answers, back = os.pipe()
        parent = os.getpid()
        self.process = os.fork()
        if not self.process:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                end_with(parent)
                for descriptor in (self.questions, self.answers, private):
                    os.close(descriptor)
                run_episode(make, there, back, mib)
            finally:
                os._exit(0)
        os.close(there)
        os.close(back)
        for pipe in (self.questions, self.answers):
            os.set_blocking(pipe, False)

    def begin(self, question, seconds):
        self.question = json.dumps(question).encode() + b"\n"
        self.answer = bytearray()
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def advance(self, ready):
        """Send and receive what goes; return the answer once it is there, an object.

        Args:
            ready: descriptors that can be read or written.
        """
        if self.questions in ready and self.question:
            with suppress(BrokenPipeError):
                self.question = self.question[os.write(self.questions, self.question) :]
        if self.answers in ready:
            piece = os.read(self.answers, 2**16)
            if not piece:
                return {"error": "its process has ended"}
            self.answer += piece
        if len(self.answer) > MOST_BYTES:
            return {"error": f"said more than {MOST_BYTES} bytes"}
        if self.answer.endswith(b"\n"):
            try:
                return json.loads(self.answer)
            except ValueError:
                return {"error": f"wrote {bytes(self.answer[:80])!r} to the pipe of its answers"}
        if time.monotonic() > self.deadline:
            return {"error": f"has not answered for {self.seconds:g} seconds"}
        return None

    def end(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.process, 0)
        os.close(self.questions)
        os.close(self.answers)


# --- this process ---------------------------------------------------------------------------------


class Server:
    """Hold the episodes that are open.

    Args:
        private: see `EpisodeProcess`.
    """

    def __init__(self, private):
        self.private = private
        self.open = {}

    def load(self, function, limits):
        self.make = load(function)
        self.kept = set(children())  # which it has started for all episodes
        self.seconds, self.mib = limits
        return {"done": function, "begins": hasattr(self.make, "begin")}

    def ask(self, episodes):
        """Answer the questions of several episodes, each once; one that fails is over."""
        answers = {}
        waiting = list(enumerate(episodes))
        asked = {}
        while waiting or asked:
            while waiting and len(asked) < SIDE_BY_SIDE:
                number, question = waiting.pop(0)
                key = question.pop("key")
                if key not in self.open:
                    self.open[key] = EpisodeProcess(self.make, self.mib, self.private)
                self.open[key].begin(question, self.seconds)
                asked[number] = key
            ready = self._ready([self.open[key] for key in asked.values()])
            for number, key in list(asked.items()):
                answer = self.open[key].advance(ready)
                if answer is None:
                    continue
                answers[number] = answer
                del asked[number]
                if "error" in answer:
                    self._end([key])
        return {"answers": [answers[number] for number in range(len(episodes))]}

    def end(self):
        done = len(self.open)
        self._end(list(self.open))
        return {"done": done}

    def _end(self, keys):
        for key in keys:
            self.open.pop(key).end()
        known = self.kept | {its.process for its in self.open.values()}
        # what an episode has started and left falls to this process
        while orphans := set(children()) - known:
            for process in orphans:
                os.kill(process, signal.SIGKILL)
            for process in orphans:
                os.waitpid(process, 0)

    @staticmethod
    def _ready(processes):
        """Return the descriptors that can go on, once one can or a deadline comes."""
        looks = select.poll()
        for its in processes:
            looks.register(its.answers, select.POLLIN)
            if its.question:
                looks.register(its.questions, select.POLLOUT)
        first = min(its.deadline for its in processes)
        return dict(looks.poll(max(0, 1000 * (first - time.monotonic())) + 1))


def main():
    # what is imported may print to standard output, which belongs to the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = Server(answers.fileno())
    for line in sys.stdin:
        message = json.loads(line)
        try:
            response = getattr(server, message.pop("do"))(**message)
        except Exception as error:
            response = {"error": str(error)[:500]}
        answers.write(json.dumps(response) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
