"""Read evaluation tasks: MMLU, LAMBADA and GSM8K, from local files or from the hub.

Prompts are those of lm-evaluation-harness 0.4.13, character by character: of its tasks `mmlu`,
`mmlu_continuation`, `lambada_openai` and `gsm8k`.  So a figure can be compared with published ones.

A folder of data holds what people have:

    mmlu/test/SUBJECT_test.csv    question, four choices, answer (A to D or 0 to 3); the original
    mmlu/dev/SUBJECT_dev.csv      files have no header row, copies may have one
    lambada_openai.jsonl          {"text": ...} or {"context": ..., "continuation": ...}
    gsm8k_test.jsonl              {"question": ..., "answer": "... #### 18"}
    gsm8k_train.jsonl             likewise; only for examples in the prompt (shots)

Tests: tests/test_tasks.py.
"""

import csv
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import datasets

from isogloss.data.chat_rows import is_text
from isogloss.flags.yaml_file import bounded_lines
from isogloss.projection_tools.tokenizers import reason_of

LETTERS = "ABCD"
MMLU_COLUMNS = 6  # question, four choices, answer
HUB_IDS = {
    "mmlu": ("cais/mmlu", "all"),
    "lambada": ("EleutherAI/lambada_openai", "default"),
    "gsm8k": ("openai/gsm8k", "main"),
}
LAMBADA_FILES = "lambada_openai.jsonl", "lambada_test.jsonl", "lambada.jsonl"
GSM8K_FILES = {
    "test": ("gsm8k_test.jsonl", "gsm8k/test.jsonl"),
    "train": ("gsm8k_train.jsonl", "gsm8k/train.jsonl"),
}
GSM8K_NEW_TOKENS = 256  # the harness's
GSM8K_STOPS = "Question:", "</s>", "<|im_end|>"
GSM8K_ANSWER = re.compile(r"#### -?[0-9.,]*[0-9]")
SHOT_SEED = 1234  # of the harness, which draws the examples of GSM8K by chance
# The examples of MMLU are the first of its dev split, which has five for a subject.


@dataclass(frozen=True)
class ScoredItem:
    """Ask a model which of some continuations is the most likely one.

    Attributes:
        task: name.
        id: within the task.
        group: MMLU's subject, or "".
        context: text before the continuations.
        continuations: with their leading space.
        answer: number of the right one.
    """

    task: str
    id: str
    group: str
    context: str
    continuations: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class WrittenItem:
    """Ask a model to write an answer.

    Attributes:
        task, id: as of ScoredItem.
        prompt: text.
        stops: texts that end an answer and are no part of it.
        max_new_tokens: after so many tokens an answer is cut.
        reference: what judges it.
    """

    task: str
    id: str
    prompt: str
    stops: tuple[str, ...]
    max_new_tokens: int
    reference: str


# --- MMLU -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """Hold a question of MMLU: its subject, text, four choices, and the number of the right one."""

    subject: str
    text: str
    choices: tuple[str, ...]
    answer: int


def read_mmlu(data, shots=0, limit=0):
    """Read MMLU in the form of letters: the continuations are " A" to " D".

    Args:
        data: folder, or "" for the hub.
        shots: examples in the prompt, from the dev split of the subject.
        limit: items of each subject, the first ones; 0: all.
    Returns:
        list of ScoredItem, subject by subject in alphabetical order.
    Raises:
        ValueError: files are missing or damaged, or hold too few examples.
    """
    head = "The following are multiple choice questions (with answers) about {subject}.\n\n"
    continuations = tuple(f" {letter}" for letter in LETTERS)
    items = []
    for questions, examples in _mmlu_subjects("mmlu", data, shots, limit):
        prefix = head.format(subject=_words_of(questions[0].subject))
        for example in examples:
            prefix += f"{_with_letters(example)} {LETTERS[example.answer]}\n\n"
        for number, question in enumerate(questions):
            items.append(ScoredItem(
                "mmlu", f"{question.subject}/{number}", question.subject,
                prefix + _with_letters(question), continuations, question.answer))
    return items


def read_mmlu_continuation(data, shots=0, limit=0):
    """Read MMLU in the form of texts: the continuations are the choices.  See `read_mmlu`."""
    head = "The following are questions (with answers) about {subject}.\n\n"
    items = []
    for questions, examples in _mmlu_subjects("mmlu_continuation", data, shots, limit):
        prefix = head.format(subject=_words_of(questions[0].subject))
        for example in examples:
            prefix += f"{_without_choices(example)} {example.choices[example.answer]}\n\n"
        for number, question in enumerate(questions):
            continuations = tuple(f" {choice}" for choice in question.choices)
            items.append(ScoredItem(
                "mmlu_continuation", f"{question.subject}/{number}", question.subject,
                prefix + _without_choices(question), continuations, question.answer))
    return items


def _words_of(subject):
    return subject.replace("_", " ")


def _with_letters(question):
    lines = [question.text.strip()]
    for letter, choice in zip(LETTERS, question.choices):
        lines.append(f"{letter}. {choice}")
    lines.append("Answer:")
    return "\n".join(lines)


def _without_choices(question):
    return f"Question: {question.text.strip()}\nAnswer:"


def _mmlu_subjects(task, data, shots, limit):
    """Return [(questions, examples)] of every subject."""
    test = mmlu_split(task, data, "test")
    dev = mmlu_split(task, data, "dev") if shots else {}
    subjects = []
    for subject in sorted(test):
        examples = dev.get(subject, [])
        if len(examples) < shots:
            raise ValueError(f"{task}: {shots} shots of {subject} were asked for; its dev split "
                             f"holds {len(examples)}")
        questions = test[subject]
        subjects.append((questions[:limit] if limit else questions, examples[:shots]))
    return subjects


def mmlu_split(task, data, split):
    """Return {subject: Questions} of a split."""
    if not data:
        return _mmlu_from_hub(task, split)
    folders = [Path(data) / "mmlu" / split, Path(data) / split]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    suffix = f"_{split}.csv"
    paths = sorted(folder.glob(f"*{suffix}")) if folder else []
    if not paths:
        raise ValueError(f"{task}: {folder or folders[0]} holds no files SUBJECT{suffix}; expected "
                         "those of MMLU, or no data folder for the hub")
    questions = {}
    for path in paths:
        subject = path.name.removesuffix(suffix)
        questions[subject] = _questions_of_file(task, path, subject)
    return questions


def _questions_of_file(task, path, subject):
    """Return the Questions of a CSV file with or without a header row."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(bounded_lines(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{task}: {path} cannot be read ({reason_of(error)})") from None
    if rows and rows[0] and rows[0][0].strip().lower() == "question":
        rows = rows[1:]
    questions = []
    for number, row in enumerate(rows, 1):
        if len(row) != MMLU_COLUMNS:
            raise ValueError(f"{task}: {path}, question {number}: {len(row)} columns; expected "
                             f"{MMLU_COLUMNS}, the question, four choices and the answer")
        answer = row[5].strip()
        if answer in ("0", "1", "2", "3"):
            answer = LETTERS[int(answer)]
        if not row[0].strip() or not any(choice.strip() for choice in row[1:5]):
            raise ValueError(f"{task}: {path}, question {number}: its text or all of its choices "
                             "are empty; repair or remove it")
        if answer not in ("A", "B", "C", "D"):
            raise ValueError(f"{task}: {path}, question {number}: its answer is {answer!r}; "
                             "expected A to D or 0 to 3")
        questions.append(Question(subject, row[0], tuple(row[1:5]), LETTERS.index(answer)))
    if not questions:
        raise ValueError(f"{task}: {path} holds no question")
    return questions


def _mmlu_from_hub(task, split):
    questions = {}
    for row in _hub_rows(task, "mmlu", split):
        question = Question(row["subject"], row["question"], tuple(row["choices"]), row["answer"])
        questions.setdefault(question.subject, []).append(question)
    return questions


# --- LAMBADA --------------------------------------------------------------------------------------


def read_lambada(data, shots=0, limit=0):
    """Read LAMBADA in OpenAI's version: the continuation is the last word of a passage.

    Args:
        data, limit: see `read_mmlu`.
        shots: has no effect, because LAMBADA has no examples apart from the test.
    Returns:
        list of ScoredItem of one continuation each.
    Raises:
        ValueError: files are missing or damaged.
    """
    if data:
        path = _first_file("lambada", data, LAMBADA_FILES)
        rows = _json_lines("lambada", path, limit)
    else:
        path = HUB_IDS["lambada"][0]
        rows = _hub_rows("lambada", "lambada", "test", limit)
    items = []
    for number, row in enumerate(rows):
        where = f"lambada: {path}, row {number + 1}"
        if "text" in row:
            context, _, word = _text_of(row, "text", where).rpartition(" ")
        elif "context" in row and "continuation" in row:
            context = _text_of(row, "context", where)
            word = _text_of(row, "continuation", where).removeprefix(" ")
        else:
            raise ValueError(f"{where} has {', '.join(row)}; expected text, or context and "
                             "continuation")
        if not word.strip():
            raise ValueError(f"{where} has no last word")
        if not context.strip():
            raise ValueError(f"{where} has nothing before its last word; expected a passage")
        items.append(ScoredItem("lambada", str(number), "", context, (f" {word}",), 0))
    return items


# --- GSM8K ----------------------------------------------------------------------------------------


def read_gsm8k(data, shots=0, limit=0, max_new_tokens=GSM8K_NEW_TOKENS):
    """Read GSM8K, of which a model writes the solution.

    Args:
        data, limit: see `read_mmlu`.
        shots: solved examples in the prompt, drawn anew for each item from the training split.
        max_new_tokens: of a solution.
    Returns:
        list of WrittenItem.
    Raises:
        ValueError: files are missing or damaged, or hold too few examples.
    """
    examples = gsm8k_rows(data, "train") if shots else []
    if len(examples) < shots:
        raise ValueError(f"gsm8k: {shots} shots were asked for; the training split holds "
                         f"{len(examples)}")
    # an item has the harness's own examples, which depend on how many items came before it
    draws = random.Random(SHOT_SEED)
    items = []
    for number, row in enumerate(gsm8k_rows(data, "test", limit)):
        prompt = ""
        for example in draws.sample(examples, shots):
            prompt += f"{_gsm8k_question(example)} {example['answer']}\n\n"
        prompt += _gsm8k_question(row)
        items.append(WrittenItem(
            "gsm8k", str(number), prompt, GSM8K_STOPS, max_new_tokens, row["answer"]))
    return items


def _gsm8k_question(row):
    return f"Question: {row['question']}\nAnswer:"


def gsm8k_rows(data, split, limit=0):
    if not data:
        return _hub_rows("gsm8k", "gsm8k", split, limit)
    path = _first_file("gsm8k", data, GSM8K_FILES[split])
    rows = _json_lines("gsm8k", path, limit)
    for number, row in enumerate(rows, 1):
        where = f"gsm8k: {path}, row {number}"
        for key in ("question", "answer"):
            _text_of(row, key, where)
        if not GSM8K_ANSWER.search(row["answer"]):
            raise ValueError(f"{where}: its answer does not end in '#### ' and a number, by which "
                             "solutions are judged; repair or remove it")
    return rows


def _text_of(row, key, where):
    """Return the text of a field; a ValueError where it is none."""
    text = row.get(key)
    if not isinstance(text, str) or not is_text(text):
        holds = f"{key!r} is {text!r:.40}" if key in row else f"it has {', '.join(row)}"
        raise ValueError(f"{where}: expected a text {key!r}; {holds}")
    return text


# --- files and hub --------------------------------------------------------------------------------


def _first_file(task, data, names):
    """Return the path of the first of some files that is there."""
    for name in names:
        path = Path(data) / name
        if path.is_file():
            return path
    raise ValueError(f"{task}: {Path(data) / names[0]} does not exist; expected it "
                     f"(or {', or '.join(names[1:])} there), or no data folder for the hub")


def _json_lines(task, path, limit=0):
    """Return the rows of a .jsonl file, the first `limit` ones."""
    rows = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for line in bounded_lines(file):
                if line.strip():
                    rows.append(json.loads(line))
                if limit and len(rows) == limit:
                    break
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{task}: {path}, row {len(rows) + 1} cannot be read "
                         f"({reason_of(error)})") from None
    if not rows:
        raise ValueError(f"{task}: {path} holds no row")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{task}: {path}, row {number} is a {type(row).__name__}; expected an "
                             "object with named fields")
    return rows


def _hub_rows(task, key, split, limit=0):
    """Return the rows of a data set of the hub, the first `limit` ones."""
    name, config = HUB_IDS[key]
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises errors of any type
        raise ValueError(f"{task}: {name} cannot be loaded from the hub ({reason_of(error)}); "
                         "name a data folder with its files") from None
    count = min(limit, len(dataset)) if limit else len(dataset)
    return list(dataset.select(range(count)))
