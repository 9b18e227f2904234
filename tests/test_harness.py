"""Tasks of lm-evaluation-harness have the values that its own model class gives them.

Most of this skips where lm_eval is not installed.
"""

import functools
import json
import logging

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import asset
from hub_copies import HAS_LM_EVAL, copy_gsm8k, copy_lambada, copy_mmlu, needs_lm_eval
from isogloss.evaluation.harness import NAMES, load_harness_task
from isogloss.evaluation.task_model import TaskEncoder
from isogloss.evaluation.task_suite import load_suite
from isogloss.flags.task_options import TaskOptions
from recipes.xtoken_column.rehearsal import write_questions

QUESTIONS = [
    {"question": "Who had a red ball?", "choices": ["Lily", "The big dog", "a cat", "no one"],
     "answer": 0, "text": "Once upon a time there was a little girl called Lily. " * 9},
    {"question": "Where did they go?", "choices": ["to the park", "home", "up", "to bed, all"],
     "answer": 1, "text": "Tom liked to play. One day he went to the park with his mom."},
    {"question": "What is blue?", "choices": ["the sky", "grass", "it", "a sun"], "answer": 2,
     "text": "The sky was blue."},
]
TASKS = {
    "own_choice": """
        output_type: multiple_choice
        doc_to_text: "{{question}}\\nAnswer:"
        doc_to_choice: "{{choices}}"
        doc_to_target: answer
        metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "own_rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
    "own_writing": """
        output_type: generate_until
        doc_to_text: "{{text[:60]}}"
        doc_to_target: "{{question}}"
        generation_kwargs: {until: ["."], max_gen_toks: 24}
        metric_list: [{metric: exact_match}]""",
    "own_code": """
        output_type: generate_until
        unsafe_code: true
        doc_to_text: "{{text}}"
        doc_to_target: "{{question}}"
        metric_list: [{metric: exact_match}]""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps(question) for question in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    for name, text in TASKS.items():
        lines = [line.strip() for line in text.strip().split("\n")]
        head = [f"task: {name}", "dataset_path: json", "test_split: test", "dataset_kwargs:",
                f"  data_files: {{test: {folder / 'questions.jsonl'}}}"]
        (folder / f"{name}.yaml").write_text("\n".join(head + lines) + "\n")
    choice = (folder / "own_choice.yaml").read_text()
    # a question is no example of itself
    (folder / "own_shots.yaml").write_text(
        choice.replace("own_choice", "own_shots") + "fewshot_split: test\n")
    by_code = choice.replace('"{{question}}\\nAnswer:"', "!function code.text")
    assert by_code != choice
    (folder / "included").write_text(by_code)
    (folder / "own_function.yaml").write_text("include: included\ntask: own_function\n")
    (folder / "code.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w')\ndef text(row):\n    return 'Q'\n")
    return folder


@pytest.fixture(scope="module")
def model():
    path = asset("models/stories260K")
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.fixture(autouse=True, scope="module")
def one_index():
    """Let the harness look through its folders once for all tests, which takes many seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_LM_EVAL:
            from lm_eval import tasks

            patch.setattr(tasks, "TaskManager", functools.cache(tasks.TaskManager))
        yield


@needs_lm_eval
def test_values_are_those_of_the_harness_own_model_class(folder, model):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = ["own_choice", "own_rolling", "own_writing"]
    student, tokenizer = model
    suite = load_suite([f"lm_eval:{name}" for name in names], TaskOptions(data=str(folder)),
                       TaskEncoder(tokenizer, student.config))
    metrics, records = suite.run(student)

    loaded = TaskManager(include_path=str(folder), include_defaults=False).load(names)
    expected = evaluate(HFLM(pretrained=student.eval(), tokenizer=tokenizer, batch_size=2), loaded,
                        bootstrap_iters=0)
    compared = 0
    for name in names:
        for key, value in expected["results"][name].items():
            metric, _, rule = key.partition(",")
            if isinstance(value, float) and rule:
                assert metrics[f"eval/lm_eval:{name}_{metric}"] == pytest.approx(value, rel=1e-5)
                compared += 1
    assert compared >= 5
    written = [record["prediction"] for record in records if "writing" in record["task"]]
    theirs = [sample["filtered_resps"][0] for sample in expected["samples"]["own_writing"]]
    assert written == theirs


@needs_lm_eval
@pytest.mark.slow
def test_named_tasks_are_the_harness_own_item_by_item(model, tmp_path):
    """Prompts, answers and scores of its own evaluator, model class and data sets."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    student, tokenizer = model
    write_questions(tmp_path)
    copy_lambada(tmp_path, 12)
    copy_gsm8k(tmp_path, 6)
    copy_mmlu(tmp_path, 4)
    theirs = HFLM(pretrained=student.eval(), tokenizer=tokenizer, batch_size=3)
    # five: all that there are for a subject of MMLU
    for name, shots in (("lambada", -1), ("gsm8k", 2), ("mmlu", 5), ("mmlu_continuation", 1),
                        ("hellaswag", 1), ("winogrande", -1), ("arc_challenge", 1),
                        ("arc_easy", -1)):
        options = TaskOptions(data=str(tmp_path), shots=shots, batch_size=5)
        suite = load_suite([name], options, TaskEncoder(tokenizer, student.config))
        metrics, records = suite.run(student)
        [task] = suite.tasks
        of_harness = NAMES[name][0]
        expected = simple_evaluate(
            theirs, tasks=list(task.loaded["tasks"].values()), bootstrap_iters=0,
            num_fewshot=None if shots < 0 else shots, task_manager=TaskManager(
                include_defaults=False))
        samples = []
        for of_task in task.loaded["tasks"]:
            samples += expected["samples"][of_task]
        for record, sample in zip(records, samples, strict=True):
            answers = sample["filtered_resps"]
            if "answer" in record:
                assert record["answer"] == sample["resps"][0][0]
                assert record["prediction"] == answers[0]
                assert record["exact_match"] == sample["exact_match"]
            else:
                nats = [-logp for logp, _ in answers]
                assert record["nats"] == pytest.approx(nats, abs=1e-4)
                assert record["acc"] == sample["acc"]
        for metric, value in expected["results"].get(of_harness, {}).items():
            shown = f"eval/{name}_" + metric.replace(",none", "").replace(",", "_")
            if isinstance(value, float) and "stderr" not in metric:
                assert metrics[shown] == pytest.approx(value, rel=1e-4)
        assert not any("stem" in key for key in metrics)
    with pytest.raises(ValueError, match=r"mmlu: .* with 6 worked examples, of which"):
        load_harness_task("mmlu", TaskOptions(data=str(tmp_path), shots=6))


@needs_lm_eval
@pytest.mark.parametrize("name, message", [
    ("own_code", "runs what the student writes inside of this job"),
    ("no_such_task", "lm_eval has no such task"),
])
def test_what_does_not_fit_is_refused(folder, name, message):
    with pytest.raises(ValueError, match=message):
        load_harness_task(f"lm_eval:{name}", TaskOptions(data=str(folder)))


@needs_lm_eval
def test_functions_of_own_yaml_files_run_with_the_flag_alone(folder):
    """Named there, or in a file that is included; those of the harness itself are its own."""
    name = "lm_eval:own_function"
    line = f"{name}: a YAML file in {folder} names !function code.text, Python code"
    with pytest.raises(ValueError, match=line):
        load_harness_task(name, TaskOptions(data=str(folder)))
    assert not (folder / "ran").exists()
    trusting = TaskOptions(data=str(folder), trust_remote_code=True)
    task = load_harness_task(name, trusting).loaded["tasks"]["own_function"]
    assert (folder / "ran").exists() and task.doc_to_text(QUESTIONS[0]) == "Q"


@needs_lm_eval
@pytest.mark.parametrize("name, most", [("lm_eval:own_shots", 2), ("gsm8k", 9)])
def test_more_worked_examples_than_there_are_is_refused_at_once(folder, tmp_path, name, most):
    """The harness says so in the middle of an evaluation, by an assertion."""
    data = folder if "own" in name else tmp_path
    if name == "gsm8k":
        copy_gsm8k(tmp_path, 2, examples=most)
    assert load_harness_task(name, TaskOptions(data=str(data), shots=most))
    for shots in (most + 1, 1000):
        with pytest.raises(ValueError, match=f"{name}: .* with {shots} worked examples, of which"):
            load_harness_task(name, TaskOptions(data=str(data), shots=shots))


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm_eval is installed")
def test_without_lm_eval_a_line_says_how_to_install_it():
    for name in ("lm_eval:hellaswag", "gsm8k"):
        with pytest.raises(ValueError, match=name + r": needs .* pip install .isogloss.eval"):
            load_harness_task(name, TaskOptions())


@needs_lm_eval
def test_a_copy_that_changed_is_read_anew(tmp_path):
    """datasets alone knows the folder by its name."""
    for limit in (2, 3):
        copy_lambada(tmp_path, limit)
        task = load_harness_task("lambada", TaskOptions(data=str(tmp_path)))
        assert len(task.loaded["tasks"]["lambada_openai"].eval_docs) == limit
