"""Models that talk in chats with tools, each by a template and a tokenizer of its own."""

import numpy as np
import torch

from conftest import SHAPE
from isogloss import demo
from isogloss.data.batch_types import Example
from isogloss.data.rollouts import Prompter
from isogloss.environments.episode import Episode
from isogloss.rollout import Completion
from template_shapes import ENDS, MARKS, SHAPES

TOOLS = [{"type": "function", "function": {
    "name": "calculator", "description": "d", "parameters": {
        "type": "object", "properties": {"expression": {"type": "string"}}}}}]


def call(expression):
    return [{"type": "function", "function": {
        "name": "calculator", "arguments": {"expression": expression}}}]


# A chat whose question is a prompt: two calls, two results, an answer that stands behind them.
CHAT = [
    {"role": "user", "content": "What is 3 * 4 + 5?"},
    {"role": "assistant", "content": "", "tool_calls": call("3 * 4")},
    {"role": "tool", "name": "calculator", "content": "12"},
    {"role": "assistant", "content": "", "tool_calls": call("12 + 5")},
    {"role": "tool", "name": "calculator", "content": "17"},
    {"role": "assistant", "content": "So it is 17, of course."},
]
SHORT = [
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": "What is warm for you?"},
    {"role": "user", "content": "Thirty degrees."},
    {"role": "assistant", "content": "Then it is not."},
]

# Whose second turn lies where two shards of a sequence meet.
LONG = [SHORT[0], SHORT[1], {"role": "user", "content": "Why?" + " Why" * 9},
        {"role": "assistant", "content": "Because some characters are special. " * 6}]


def write_talkers(texts, folder, shapes=("ChatML", "Llama 3"), size=None):
    """Write a student and a teacher; return their folders.  The student often ends its turns.

    Args:
        size: of the models; None: that of other tests.
    """
    folders = []
    for number, shape in enumerate(shapes):
        tokenizer = demo.unigram(texts, 350) if not number else demo.byte_level_bpe(texts, 500)
        template = SHAPES[shape]
        marks = sorted({*MARKS.findall(template), *ENDS})
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.chat_template = template
        path = folder / f"{number}"
        model = demo.llama(tokenizer, size or SHAPE, number + 1)
        model.config.max_position_embeddings = 512
        if not number:
            end_often(model, tokenizer.convert_tokens_to_ids("<|im_end|>"))
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        folders.append(path)
    return folders


def end_often(model, end):
    """Let a model with random weights often find one token likely."""
    torch.manual_seed(0)
    with torch.no_grad():
        hidden = model.model(torch.randint(0, 300, (16, 64))).last_hidden_state
        mean = hidden.flatten(0, 1).mean(0)
        model.get_output_embeddings().weight[end] = mean * (5 / (mean @ mean))


class Canned:
    """A chat as if the student had said what its assistant says."""

    def __init__(self, chat, prompt_messages=1, cut=False):
        self.chat = chat
        self.prompt_messages = prompt_messages
        self.cut = cut

    def example(self, encoder, tools):
        """Return the Example of a Rollout of several turns, of the template's own tokens."""
        from isogloss.data.chat import render

        before = self.chat[: self.prompt_messages]
        prompter = Prompter(encoder, 0, 1.0, 1, 8, 10**6)
        prompt = prompter.prompt(Example(before, prompt=before, tools=tools), (0, 0))
        episode = Episode(prompt)
        rendering = render(self.chat, encoder, tools)
        number = self.prompt_messages
        while number < len(self.chat):
            turn, = [turn for turn in rendering.turns if turn.message == number]
            begin = rendering.located.begin
            inside = (begin >= turn.begin) & (begin < turn.end)
            ids = rendering.ids[inside].tolist() + [rendering.ids[turn.stop]]
            is_last = number == len(self.chat) - 1
            ended = not (is_last and self.cut)
            ids = torch.tensor(np.array(ids if ended else ids[:-1]))
            nothing = torch.zeros(len(ids))
            episode.add(Completion(ids, nothing, nothing, ended), encoder)
            said = []
            while number + 1 < len(self.chat) and self.chat[number + 1]["role"] != "assistant":
                number += 1
                said.append(self.chat[number])
            number += 1
            episode.hear({"messages": said, "ended": is_last}, encoder, 10**6, False)
            assert not episode.outcome["error"], episode.outcome
        return Example(episode.rollout(1.0, 1.0))
