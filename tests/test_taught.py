"""A teacher that teaches nothing is known before the first step, or said of and not a success."""

import json
import shutil

import pytest

import ranks
from isogloss.log import NOTHING_TAUGHT
from jobs import check_refusals, ds_config, losses_of, run_and_listen

NOTHING = "nothing is wrong"


@pytest.fixture(scope="module")
def flags(chat_models, texts, tmp_path_factory):
    """Flags of a run on chats with hints, of which some columns are of no use."""
    folder = tmp_path_factory.mktemp("taught")
    rows = []
    for number, text in enumerate(texts[:24]):
        rows.append({
            "messages": [{"role": "user", "content": text[:20]},
                         {"role": "assistant", "content": text[20:80]}],
            "hint": text[:10], "long": text * 30, "empty": "", "domain": "x",
            "zero": 0.0, "weight": float(number == 23), "late": "?" if number == 23 else None})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return dict(student=chat_models[0], teacher=chat_models[1], data=str(folder / "rows.jsonl"),
                text_key="messages", max_length=200, steps=2, num_workers=0,
                output_dir=str(folder / "run"), ds_config=ds_config(folder / "ds.json", 2, 2, 1))


def teachers(models, *routes):
    """Return the flags of teachers with these routes."""
    entries = []
    for number, (model, of_teacher) in enumerate(zip(models, routes)):
        entries.append({"name": f"T{number}", "model": model, "routes": of_teacher})
        if of_teacher is None:
            del entries[-1]["routes"]
    return {"teachers": json.dumps(entries), "teacher": "", "route_key": "domain"}


@pytest.fixture(scope="module")
def deaf(chat_models, tmp_path_factory):
    """Directory of the teacher with a template that writes everything in other letters."""
    folder = tmp_path_factory.mktemp("deaf") / "teacher"
    shutil.copytree(chat_models[1], folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {% for letter in message.content %}#"
        "{% endfor %} {% endfor %}")
    return str(folder)


def weighed_by(flags, column):
    entry = {"data": flags["data"], "weight_key": column}
    return {"data": json.dumps([entry])}


def test_a_teacher_that_would_teach_nothing_is_refused(flags, chat_models, deaf):
    written = {"on_policy": 1.0, "rollout_tokens": 8}
    hint = {"teacher": "self", "teacher_prompt_key": "hint"}
    long = {"teacher": "self", "teacher_prompt_key": "long"}
    texts = {"text_key": "long", "prompt_tokens": 150}
    column = {"token_weights": "column"}
    refused = "teacher {}: would teach nothing of the first 24 rows: 24 are longer than its {}"
    check_refusals(flags, [
        (hint, NOTHING), (hint | written, NOTHING),
        ({"teacher": "self", "teacher_prompt_key": "hnit"},
         "--teacher_prompt_key hnit: no row has anything there"),
        ({"teacher": "self", "teacher_prompt_key": "empty"},
         "--teacher_prompt_key empty: no row has anything there"),
        ({"teacher": "self", "teacher_prompt_key": "late"}, NOTHING),
        *[(long | more, refused.format(chat_models[0], "256 positions")) for more in ({}, written)],
        (texts | written, NOTHING),
        (texts | written | {"teacher_max_length": 40},
         refused.format(chat_models[1], "40 positions before anything is compared (its context, or "
                        "--teacher_max_length)")),
        ({"teacher": deaf}, f"teacher {deaf}: would teach nothing of the first 24 rows: 24 hold "
         "nothing that both tokenizers spell and the student learns"),
        (column | weighed_by(flags, "zero"), "--data: weight_key zero: every row weighs 0"),
        (column | weighed_by(flags, "weight"), NOTHING),
        (teachers(chat_models, ["math"], ["code"]),
         "--teachers: no row is for T0, by its routes; the data have 'x'"),
        (teachers(chat_models, ["x"], ["code"]), "no row is for T1, by its routes"),
        (teachers(chat_models, ["x"], None), "no row is for T1, by its routes"),
        (teachers(chat_models, ["math", "x"], ["x"]), NOTHING),
    ])


def test_a_run_that_no_teacher_has_taught_says_so_after_a_step_and_fails(flags, chat_models):
    """Of streams only the steps tell; the student's own part is kept, and a resume goes on so."""
    streamed = flags | {"streaming": True, "save_every": 1}
    weightless = streamed | {"token_weights": "column"} | weighed_by(flags, "zero")
    routed = streamed | teachers(chat_models, ["math"], ["code"])
    half = streamed | teachers(chat_models, ["x"], ["code"])
    commands = []
    for name, of_run in (("weightless", weightless), ("routed", routed), ("half", half)):
        of_run = of_run | {"output_dir": f"{flags['output_dir']}/{name}"}
        for steps in (2, 3) if name != "half" else (2,):
            commands.append([f"--{key}={value}" for key, value in of_run.items()]
                            + [f"--steps={steps}", f"--export={of_run['output_dir']}/student"])
    [(codes, said)] = ranks.run(1, run_and_listen, *commands)
    assert codes == [1, 1, 1, 1, 0], said
    lines = [line for line in said.splitlines() if NOTHING_TAUGHT in line]
    of_steps = [line for line in lines if f"distill.py: {NOTHING_TAUGHT}; see" in line]
    of_ends = [line for line in lines if "so nothing was learned from a teacher; see" in line]
    assert len(of_steps) == len(of_ends) == 4 and len(lines) == 9, said
    assert f"distill.py: {NOTHING_TAUGHT} of T1; see" in lines[-1]
    for name in ("weightless", "routed"):
        assert [line["step"] for line in losses_of(f"{flags['output_dir']}/{name}")] == [1, 2, 3]
