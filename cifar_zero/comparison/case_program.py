"""The program `python -m cifar_zero.comparison.case_program FILE` trains cases in ranks. `launches` writes FILE and
starts the program, which starts itself again as each of several ranks."""

import json
import sys
from pathlib import Path
from pkgutil import resolve_name

from cifar_zero.comparison.result import Variant
from cifar_zero.core import exits
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import local_launcher, rank_environment


def main() -> int:
    """Trains all jobs of the file that the command line names with `jobs.train_jobs`, and returns the exit code.
    Several ranks are started once for all jobs, because starting them takes seconds."""
    file = Path(sys.argv[1])
    work = json.loads(file.read_text())
    if work["ranks"] > 1 and not rank_environment.is_rank():
        return local_launcher.run_ranks(work["ranks"], on_cpu=gpu_count() == 0)
    from cifar_zero.comparison.jobs import train_jobs  # here, because it imports torch

    jobs = {Path(verdict_file): Variant(**case) for verdict_file, case in work["jobs"].items()}
    train_jobs(jobs, resolve_name(work["train"]), file.parent, work["sketches"])
    return 0


if __name__ == "__main__":
    exits.install()
    exits.run(main)
