"""Lay what the column's runs are worth beside what NeMo RL and X-Token publish.

Tests: tests/test_xtoken_column.py.
"""

# {column: (task, metric)}
COLUMNS = {"MMLU": ("mmlu", "acc"), "GSM8K": ("gsm8k", "exact_match_strict-match"),
           "HellaSwag": ("hellaswag", "acc_norm"), "WinoGrande": ("winogrande", "acc"),
           "ARC-Challenge": ("arc_challenge", "acc_norm"), "ARC-Easy": ("arc_easy", "acc_norm")}
NEMO = "https://github.com/NVIDIA-NeMo/RL"
GUIDE = "docs/guides/xtoken-off-policy-distillation.md"
SOURCES = {
    "NeMo RL, one": f"{NEMO}/blob/110bf11d868417a38bd5d873354ed47438a85f7b/{GUIDE}",
    "NeMo RL, two": f"{NEMO}/blob/7ea279abfbeb698b092856d0dab61e7cf39bc909/{GUIDE}",
    "X-Token": f"{NEMO}/discussions/3206, of arXiv:2605.21699: other runs than these of 100 steps; "
               "averages are of five tasks, with MATH and without ARC",
}
# (run, source, percent in the columns and on average; "-": not published)
PUBLISHED = (
    ("before", "NeMo RL, one", "32.05 5.69"),
    ("before", "X-Token", "32.05 5.69 65.08 61.48 - - 33.96"),
    ("text", "X-Token", "40.50 10.25 63.90 61.60 - - 36.63"),
    ("p_kl", "NeMo RL, one", "39.23 6.14"),
    ("p_kl", "X-Token", "44.67 15.54 62.63 63.46 - - 38.85"),
    ("two", "NeMo RL, two", "40.24 5.76"),
    ("two", "X-Token", "46.32 20.39 63.38 63.30 - - 40.48"),
    ("H-KL from Phi-4-mini", "X-Token", "43.93 19.11 62.67 61.87 - - 39.18"),
    ("KL from Llama-3.2-3B, same tokenizer", "X-Token", "43.83 12.89 64.42 62.70 - - 38.40"),
)


def read_table(printed):
    """Return {task: {metric: [value, standard error or None]}} of what isogloss-tasks prints."""
    results = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[3] not in ("value", "---"):
            _, task, metric, value, error, _, _ = cells
            number = [float(value), float(error) if error else None]
            results.setdefault(task, {})[metric] = number
    return results


def result_rows(titles, results):
    """Return the table's rows: of every run ours, then what others publish of it.

    Args:
        titles: {name of a run: what stands in its row}.
        results: {name of a run: see `read_table`}; empty: it has not been judged.
    """
    rows = [["run", "by", *COLUMNS, "average"]]
    for name in dict.fromkeys([*titles, *(row[0] for row in PUBLISHED)]):
        title = titles.get(name, name)
        if name in titles:
            judged = results[name]
            cells = [cell_of(judged.get(task, {}).get(metric)) for task, metric in COLUMNS.values()]
            rows.append([title, "ours", *cells, ""])
        for row, source, values in PUBLISHED:
            if row == name:
                cells = values.replace("-", "").split(" ")
                rows.append([title, source, *cells, *[""] * (len(COLUMNS) + 1 - len(cells))])
    return rows


def cell_of(result):
    """Return percent and standard error of a result; of None nothing."""
    if result is None:
        return ""
    value, error = result
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error is not None else "")


def result_table(titles, results):
    from isogloss.tasks import markdown_table

    sources = [f"- {name}: {address}" for name, address in SOURCES.items()]
    return "\n".join([markdown_table(result_rows(titles, results)), "", *sources])
