"""An environment whose episodes have one to four turns; for tests of whole jobs."""

import time


def talk(messages, tools, row, seed):
    """Ask on, call by call; the reward depends on what was said."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    if seed % 6 == 0:
        raise ValueError("some fail")
    if len(said) == 1 + seed % 4 or messages[-1].get("cut"):
        return {"ended": True, "reward": len("".join(said)) % 3 / 2}
    return [{"role": "user", "content": f"{row['answer']} {len(said)} {seed % 7}"}]


def ends(messages):
    return None


def slow(messages, seed):
    time.sleep(0.05)
    return talk(messages, None, {"answer": "slow"}, seed)
