"""Rollouts of several turns: what the student said, and what a template writes between two turns.

Tests: tests/test_episodes.py.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from isogloss.data.ends import stop_ids
from isogloss.doors import door


def heard(messages, number, encoder, tools):
    """Return what a template writes behind one message up to where the assistant speaks again.

    Args:
        messages: of the whole chat; number: of the assistant's last one.
    Returns:
        (ids without the token that ends the turn, the whole prompt as text).
    Raises:
        SkippedPrompt: it refuses the chat, or writes the turn otherwise before a prompt.
    """
    chats = door("chats")
    skipped = door("on_policy").SkippedPrompt
    try:
        rendering = chats.render(messages, encoder, tools)
        whole = chats.Template(encoder, tools).write(messages, is_prompt=True)
        ids, located = chats.read_rendering(whole, encoder)
    except chats.SkippedChat as error:
        raise skipped(str(error)) from None
    turns = [turn for turn in rendering.turns if turn.message == number]
    data = whole.encode(errors="replace")
    if not turns or data[: turns[-1].end] != rendering.data[: turns[-1].end]:
        raise skipped("the chat template writes an answer otherwise once another one follows")
    first = int(np.searchsorted(np.maximum.accumulate(located.begin), turns[-1].end))
    first += int(first < len(ids) and ids[first] in stop_ids(encoder))  # which is written already
    return ids[first:], whole


def heard_by(rollout, encoder):
    """Return a rollout with what stands between its turns as another template writes it.

    Raises:
        SkippedPrompt: see `heard`.
    """
    prompt = rollout.prompt
    ids, logp, turns = [], [], []
    size = 0
    messages = [*prompt.taught, *rollout.messages]
    for turn, following in zip(rollout.turns, [*rollout.turns[1:], None]):
        inside = slice(turn.first, turn.last)
        pieces = [(rollout.ids[inside], rollout.logp[inside])]
        if following is not None:
            before = len(prompt.taught) + following.message
            behind, _ = heard(messages[:before], len(prompt.taught) + turn.message, encoder,
                              prompt.tools)
            pieces.append((behind, np.full(len(behind), np.nan, np.float32)))
        turns.append(turn._replace(first=size, last=size + turn.last - turn.first))
        for of_ids, of_logp in pieces:
            ids.append(of_ids)
            logp.append(of_logp)
            size += len(of_ids)
    return replace(rollout, ids=np.concatenate(ids), logp=np.concatenate(logp), turns=turns)


@dataclass
class Episode:
    """Hold a rollout while it is written, turn by turn.

    Attributes:
        prompt: RolloutPrompt.
        messages: behind the prompt.
        parts: (ids, log-probabilities, NaN where the student did not write) so far.
        turns: WrittenTurns.
        text: of the turns.
        whole: the prompt of the next turn, as text.
        num_entropy: (number of the student's tokens, sum of its entropy there).
        is_canonical: see `rollouts.Rollout`.
        is_over: no other turn follows.
        outcome: what came of it: turns; calls and invalid_calls, their number; ended: the
            environment said so; reward, None: there was none; error: why it is left out.
    """

    prompt: object
    messages: list = field(default_factory=list)
    parts: list = field(default_factory=list)
    turns: list = field(default_factory=list)
    text: str = ""
    whole: str = ""
    num_entropy: tuple = (0, 0.0)
    is_canonical: bool = True
    is_over: bool = False
    outcome: dict = field(default_factory=lambda: {
        "calls": 0, "invalid_calls": 0, "ended": False, "reward": None, "error": ""})

    def __post_init__(self):
        self.whole = self.prompt.text

    @property
    def ids(self):
        """Return the tokens so far, with those of the prompt."""
        return np.concatenate([self.prompt.ids, *[ids for ids, _ in self.parts]])

    @property
    def chat(self):
        return [*self.prompt.messages, *self.messages]

    @property
    def chat_as_read(self):
        """Return the chat as what writes reads it."""
        prompt = self.prompt
        return [*(prompt.taught if prompt.reads_taught else prompt.messages), *self.messages]

    def add(self, completion, encoder):
        """Add what the student wrote; return the message as an environment reads it."""
        rollouts = door("on_policy")
        prompt = replace(self.prompt, text=self.whole, ids=self.ids)
        written = rollouts.completed(prompt, completion, encoder)
        message, problem, before = door("chats").message_of(
            written.ids, written.text, encoder, self.prompt.tools, self.whole)
        first = len(prompt.ids) - len(self.prompt.ids)
        first_byte = len(self.text.encode())
        # what is to be a call, and is none, has no form in which a teacher could judge it
        judged = len((before if problem else written.text).encode())
        self.text += written.text
        self.turns.append(rollouts.WrittenTurn(
            first, first + len(written.ids), first_byte, len(self.text.encode()),
            len(self.messages), written.ended, first_byte + judged))
        self.parts.append((written.ids, written.logp))
        num, entropy = self.num_entropy
        self.num_entropy = num + len(written.ids), entropy + written.entropy * len(written.ids)
        self.is_canonical &= written.is_canonical
        self.messages.append(message)
        self.outcome["calls"] += len(message.get("tool_calls", []))
        self.outcome["invalid_calls"] += bool(problem)
        shown = dict(message)
        if problem:
            shown["invalid_call"] = problem
        if not written.ended:
            shown["cut"] = True
        return shown

    def hear(self, answer, encoder, rollout_tokens, is_last):
        """Add what an environment said, up to where the student speaks again.

        Args:
            answer: see `process.checked`; is_last: no turn may follow.
        """
        outcome = self.outcome
        if "error" in answer:
            outcome["error"] = answer["error"]
            self.is_over = True
            return
        outcome["reward"] = answer.get("reward", outcome["reward"])
        outcome["ended"] = answer["ended"]
        self.is_over = answer["ended"] or is_last or not self.turns[-1].ended
        if self.is_over:
            return
        number = len(self.chat_as_read) - 1
        try:
            ids, whole = heard([*self.chat_as_read, *answer["messages"]], number, encoder,
                               self.prompt.tools)
        except door("on_policy").SkippedPrompt as error:
            outcome["error"] = str(error)
            self.is_over = True
            return
        room = encoder.max_length + 1 - len(self.ids) - len(ids)
        if room < 1:
            self.is_over = True
            return
        self.messages = [*self.messages, *answer["messages"]]
        self.parts.append((ids, np.full(len(ids), np.nan, np.float32)))
        self.whole = whole
        self.prompt.max_new_tokens = min(rollout_tokens, room)

    def begin(self, answer, encoder, rollout_tokens):
        """Take what an environment says in front of the first turn into the prompt."""
        rollouts = door("on_policy")
        if "error" in answer:
            self.outcome["error"] = answer["error"]
            self.is_over = True
            return
        prompt = self.prompt
        tools = answer["tools"] or prompt.tools
        try:
            ids, text, located = rollouts.chat_prompt(
                [*self.chat_as_read, *answer["messages"]], encoder, tools)
        except rollouts.SkippedPrompt as error:
            self.outcome["error"] = str(error)
            self.is_over = True
            return
        room = encoder.max_length + 1 - len(ids)
        self.is_over = room < 1
        if self.is_over:
            self.outcome["error"] = f"its prompt has {len(ids)} tokens"
            return
        self.prompt = replace(
            prompt, ids=ids, text=text, located=located, tools=tools,
            messages=[*prompt.messages, *answer["messages"]],
            taught=[*prompt.taught, *answer["messages"]],
            max_new_tokens=min(rollout_tokens, room))
        self.whole = text

    def rollout(self, temperature, top_p):
        """Return the Rollout; None: the environment has failed."""
        if self.outcome["error"]:
            return None
        rollouts = door("on_policy")
        ids = np.concatenate([ids for ids, _ in self.parts])
        logp = np.concatenate([logp for _, logp in self.parts])
        size, entropy = self.num_entropy
        return rollouts.Rollout(
            self.prompt, ids, logp, entropy / max(size, 1), self.turns[-1].ended, self.text,
            rollouts.repeated_4grams(ids[~np.isnan(logp)]), self.is_canonical, temperature, top_p,
            self.turns, self.messages, self.outcome | {"turns": len(self.turns)})
