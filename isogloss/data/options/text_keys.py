"""What teachers read of an example, and the key by which a cache knows it.

Tests: tests/test_cache_files.py, tests/test_chat.py.
"""

import hashlib
import json

import numpy as np
import torch


def read_by_teachers(example):
    """Return (the text or chat of an Example as teachers read it, messages that it has more).

    A system message in front is one with that of the chat.
    """
    if not example.teacher_prompt:
        return example.content, 0
    prompt = list(example.teacher_prompt)
    chat = list(example.content)
    if chat and chat[0]["role"] == prompt[0]["role"] == "system":
        joined = f"{prompt[0]['content']}\n\n{chat[0]['content']}"
        return [chat[0] | {"content": joined}, *prompt[1:], *chat[1:]], len(prompt) - 1
    first = int(bool(chat) and chat[0]["role"] == "system")
    return [*chat[:first], *prompt, *chat[first:]], len(prompt)


def key_of(example):
    """Return two int64 for what teachers read of an Example, with the tools of a chat.

    What models say of it depends on nothing else of its row.
    """
    return text_key(read_by_teachers(example)[0], example.tools)


def text_key(content, tools=None):
    """Return `key_of` a text, or of a chat with its tools."""
    if isinstance(content, str):
        described = b"text " + content.encode("utf-8", "surrogatepass")
    else:
        described = b"chat " + json.dumps([content, tools], sort_keys=True).encode()
    digest = hashlib.blake2b(described, digest_size=16).digest()
    return np.frombuffer(digest, "<i8")


def keys_of(examples):
    """Return (samples, 2) int64 keys of Examples, by which a cache knows them; 0 for none."""
    keys = np.zeros((len(examples), 2), np.int64)
    for number, example in enumerate(examples):
        if example.content is not None:
            keys[number] = key_of(example)
    return torch.from_numpy(keys)
