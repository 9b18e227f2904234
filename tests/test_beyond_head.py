"""Control tokens that a tokenizer has and the lm_head has not: an image token, a late pad."""

import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
from isogloss.align import Located, TokenTable
from isogloss.data import rollouts
from isogloss.data.chat import render
from isogloss.data.sample import TextEncoder, TokenBeyondHead
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.projection_tools.tokenizers import load_tokenizer
from jobs import ds_config, losses_of, run_distill, write_corpus
from wrong_input import check_one_line, outcomes

IMAGE = "<image_soft_token>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def write_model(source, folder, more_rows=0, beyond=True):
    """Write a model whose lm_head has a row for each of its tokens, and then some tokens more."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer) + more_rows)
    model.save_pretrained(folder)
    if beyond:
        tokenizer.add_special_tokens(
            {"pad_token": "[PAD]", "additional_special_tokens": [IMAGE]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(models, texts, tmp_path_factory):
    """Students and teachers of the same weights, with tokens beyond their heads and without."""
    folder = tmp_path_factory.mktemp("beyond")
    for name, source in zip(("student", "teacher"), models):
        write_model(source, folder / name)
        write_model(source, folder / f"plain_{name}", beyond=False)
    write_model(models[0], folder / "equal", more_rows=2)  # which has rows for them
    write_corpus(folder, texts, 20)
    (folder / "image.jsonl").write_text(json.dumps({"text": f"A cat: {IMAGE}"}) + "\n")
    ds_config(folder / "ds.json", 2, 2, 1)
    return folder


def test_the_table_leaves_out_control_tokens_beyond_the_head(folder):
    for role in ("student", "teacher"):
        tokenizer, table = load_tokenizer(role, str(folder / role))
        _, plain = load_tokenizer(role, str(folder / f"plain_{role}"))
        assert len(tokenizer) == len(table) + 2 == len(plain) + 2
        assert table.pad == -1 and table.eos == plain.eos
        assert np.array_equal(table.lengths, plain.lengths)
        assert np.array_equal(table.data, plain.data) and table.tokens == plain.tokens


@pytest.mark.parametrize("role", ["bos", "eos", "unk", "text"])
def test_what_may_stand_in_a_text_is_not_left_out(tokenizers, role):
    table = TokenTable.from_tokenizer(tokenizers[0])
    size = len(table) - 1
    if role == "text":
        assert not table.special[size]
    else:
        table.special[size] = True
        setattr(table, role, size)
    with pytest.raises(ValueError, match=f"has the id {size}, beyond {size}"):
        table.below(size)


def test_a_text_that_holds_one_is_refused(folder):
    tokenizer, table = load_tokenizer("student", str(folder / "student"))
    encoder = TextEncoder(tokenizer, table, 100)
    tasks = TaskEncoder(tokenizer, AutoModelForCausalLM.from_pretrained(folder / "student").config)
    assert tasks.vocab == len(table)
    for encode in (encoder.encode, tasks.encode):
        assert max(encode(["A cat"])[0]) < len(table)
        with pytest.raises(TokenBeyondHead, match=f"a text holds '{IMAGE}', for which"):
            encode(["A cat", f"A cat: {IMAGE}"])


def test_a_chat_that_holds_one_is_refused_and_what_the_student_writes_is_not(folder):
    encoders = []
    for role in ("student", "teacher"):
        tokenizer, table = load_tokenizer(role, str(folder / role))
        tokenizer.chat_template = TEMPLATE
        encoders.append(TextEncoder(tokenizer, table, 100))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": IMAGE}]
    with pytest.raises(TokenBeyondHead, match=f"a text holds '{IMAGE}', for which"):
        render(messages, encoders[0])
    # the student may write the name letter by letter, which its tokenizer makes the token of
    plain = AutoTokenizer.from_pretrained(folder / "plain_student")
    ids = np.array(plain(IMAGE, add_special_tokens=False)["input_ids"])
    text = encoders[0].table.decode(ids).decode()
    assert IMAGE in text
    nowhere = np.zeros(0, np.int64)
    for of_chat in (None, messages[:1]):
        located = Located(nowhere, nowhere, nowhere)
        prompt = rollouts.RolloutPrompt((0, 0), nowhere, "", located, of_chat, 9, taught=of_chat)
        assert not rollouts.is_canonical(prompt, ids, text, encoders[0])
        rollout = rollouts.Rollout(prompt, ids, np.zeros(len(ids), np.float32), 0.0, ended=False,
                                   text=text, repeated=0.0, is_canonical=False)
        student = rollouts.student_reading(rollout, encoders[0])
        assert rollouts.pair_rollout(rollout, student, encoders).skipped


RUNS = {"piece_kl": ["--eval_rows=4"], "projection_kl": ["--loss=projection_kl"],
        "on-policy": ["--on_policy=0.5", "--rollout_tokens=6"], "equal_tokenizers": []}


def run_all(folder, base):
    commands = []
    for name, flags in RUNS.items():
        for prefix, equal in (("", "equal"), ("plain_", "plain_student")):
            teacher = equal if name == "equal_tokenizers" else f"{prefix}teacher"
            commands.append([*base, *flags, f"--student={folder}/{prefix}student",
                             f"--teacher={folder}/{teacher}",
                             f"--output_dir={folder}/{prefix}{name}"])
    codes = run_distill(commands)
    # the last one: what ends all ranks in the middle of a run is known to the whole group
    flags = f"--student={folder}/plain_student --teacher={folder}/teacher"
    image = f"{flags} --data={folder}/image.jsonl --output_dir={folder}/refused"
    return codes, outcomes(folder, base, [image])


def test_a_run_learns_what_it_would_without_them(folder):
    """Bit for bit: losses, rollouts, padding, and an equal tokenizer whose model has the rows."""
    base = [f"--data={folder}/corpus20.jsonl", f"--ds_config={folder}/ds.json", "--max_length=40",
            "--num_workers=0", "--steps=2"]
    [(codes, refused)] = ranks.run(1, run_all, folder, base)
    assert codes == [0] * (2 * len(RUNS))
    for name in RUNS:
        losses = losses_of(folder / name, -1)
        plain = losses_of(folder / f"plain_{name}", -1)
        assert losses == plain and len(losses) >= 2, name
    check_one_line(refused, f"a text holds '{IMAGE}', for which the lm_head of "
                            f"{folder / 'teacher'} has no row")
