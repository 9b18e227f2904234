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

from isogloss.flags.model_names import without_secrets
from isogloss.flags.terminal import one_line
from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.watch import print_line

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds to write a page
PROGRAM = "isogloss.report: "
CURVES = re.compile(r"<h2>Curves</h2>.*?</div>", re.S)


def show_report(cfg, log, monitor):
    """Write report.html where a monitor can show it, and show it; all ranks take part.

    The models are read again, by a process of its own.  What fails is a line, and ends no run.

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
    runs = list(filter(None, (run, monitor.wandb_monitor)))
    board = monitor.tb_monitor and monitor.tb_monitor.summary_writer
    page = _page(cfg) if runs or board else ""
    if board:
        body = page.partition("<body>")[2].partition("</body>")[0]
        board.add_text("report", CURVES.sub("", body), cfg.steps)
        board.flush()
    for its in runs:
        import wandb

        its.log({"report": wandb.Html(page, inject=False)})


def _page(cfg):
    """Return the page, without rows where they fail: a teacher may be too large for one process."""
    torch.cuda.empty_cache()  # that process has the same GPU
    path = Path(cfg.output_dir) / "report.html"
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-m", "isogloss.report", cfg.output_dir, f"--output={path}",
             f"--trust_remote_code={cfg.trust_remote_code}"]
    for rows in ([], ["--rows=0"]):
        try:
            done = subprocess.run([*words, *rows], env=os.environ | paths, capture_output=True,
                                  text=True, timeout=LIMIT, check=True)
            for line in done.stderr.splitlines():  # what the page lacks
                if line.startswith(PROGRAM):
                    print_line(f"report: {line.removeprefix(PROGRAM)}")
            break
        except subprocess.SubprocessError as error:
            said = error.stderr if isinstance(error.stderr, str) else ""
            reason = (said.splitlines() or [str(error)])[-1]
            if rows:
                raise ChildProcessError(reason) from None
            print_line(f"the report has no text in colors ({reason})")
    print(one_line(without_secrets(f"report in {path}")), file=sys.stderr, flush=True)
    return path.read_text(encoding="utf-8")
