"""Make what the tiny recipes read: a student, two teachers and three corpora, in seconds.

    python -m recipes.tiny.prepare

They lie in runs/tiny.  The text is the interpreter's own documentation; weights are random, so the
recipes show that a feature runs, not that it teaches.
"""

import json
from pathlib import Path
from pydoc_data import topics

from isogloss import demo

FOLDER = Path("runs/tiny")
NUM_TEXTS = 300
SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
TEMPLATE = ("{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")


def main(folder=FOLDER):
    """Write all of it, over what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for _, text in sorted(topics.topics.items()):
        texts += [passage for passage in passages(text, 200) if len(passage) > 40]
    texts = texts[:NUM_TEXTS]
    tokenizers = {"student": demo.unigram(texts, 350), "teacher": demo.byte_level_bpe(texts, 500),
                  "second_teacher": demo.byte_level_bpe(texts, 400)}
    for seed, (name, tokenizer) in enumerate(tokenizers.items()):
        tokenizer.chat_template = TEMPLATE
        demo.llama(tokenizer, SHAPE, seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "texts.jsonl", [{"text": text} for text in texts])
    chats = []
    pairs = []
    for question, answer in zip(texts[::2], texts[1::2]):
        question = question.splitlines()[0]
        chats.append({"messages": [{"role": "user", "content": question},
                                   {"role": "assistant", "content": answer}],
                      "hint": answer[:60]})
        pairs.append({"question": question, "answer": answer})
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "pairs.jsonl", pairs)


def passages(text, limit):
    """Yield the text in pieces of at most about `limit` bytes, cut between lines.

    A line that is longer than `limit` stays whole.
    """
    piece = []
    for line in text.splitlines(keepends=True):
        too_long = len("".join([*piece, line]).encode()) > limit
        if piece and too_long:
            yield "".join(piece).strip("\n")
            piece = []
        piece.append(line)
    yield "".join(piece).strip("\n")


def write_rows(path, rows):
    """Write dicts as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
    print(FOLDER)
