"""Show the report of a run that ends in Weights & Biases and in TensorBoard, where they are on.

W&B shows the page as it is.  TensorBoard's Text tab knows tables, bold, slanted and what is said on
hover, but no colors and no pictures; the curves are among its scalars.

Tests: tests/test_report.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.watch import print_line
from isogloss.once_in_a_while import tell

ROOT = Path(__file__).parents[2]
ROWS = 3  # held-out rows in colors
LIMIT = 300  # seconds to write a page
CURVES = re.compile(r"<h2>Curves</h2>.*?</div>", re.S)


def show_report(cfg, log, monitor):
    """Write report.html where a monitor can show it, and show it; all ranks take part.

    The models are read again in a process of its own.  What fails there ends no run: it is a line.

    Args:
        log: Log, whose wandb run goes on; monitor: the engine's MonitorMaster.
    """
    if not cfg.wandb_project and not monitor.enabled:
        return
    if log.is_active:
        try:
            _show(cfg, log.wandb, monitor)
        except Exception as error:  # wandb and TensorBoard have errors of many kinds
            print_line(f"the monitors show no report ({type(error).__name__}: {error}); python -m "
                       f"isogloss.report {cfg.output_dir} writes it")
    values_of_ranks(None)  # ranks that leave before the others may be taken for dead


def _show(cfg, run, monitor):
    sends = [its.log for its in (run, monitor.wandb_monitor) if its]
    board = monitor.tb_monitor and monitor.tb_monitor.summary_writer
    if not sends and not board:
        return
    page = _page(cfg)
    if board:
        body = page.partition("<body>")[2].partition("</body>")[0]
        board.add_text("report", CURVES.sub("", body), cfg.steps)
        board.flush()
    for send in sends:
        import wandb

        send({"report": wandb.Html(page, inject=False)})


def _page(cfg):
    """Return the page, without rows where they fail: a teacher may be too large for one process."""
    torch.cuda.empty_cache()  # that process has the same GPU
    path = Path(cfg.output_dir) / "report.html"
    words = [sys.executable, "-m", "isogloss.report", os.path.abspath(cfg.output_dir),
             f"--output={path}"]
    reason = _failure_of([*words, f"--rows={ROWS}"])
    if reason:
        print_line(f"the report has no text in colors ({reason})")
        reason = _failure_of([*words, "--rows=0"])
    if reason:
        raise ChildProcessError(reason)
    tell(f"report in {path}")
    return path.read_text(encoding="utf-8")


def _failure_of(words):
    """Run a command; return why it failed, "": it has not."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        ended = subprocess.run(words, env=environment, capture_output=True, text=True,
                               timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMIT} s"
    lines = ["", *ended.stderr.splitlines()]
    return f"exit code {ended.returncode}, {lines[-1]}" if ended.returncode else ""
