"""The checkpoint and the run folder on which the ranks of several nodes, or of torchrun, agree before they train."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import checkpoint_to_resume, newest_of
from cifar_zero.config.run import Run
from cifar_zero.core import atomic
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import by_rank_0, ranks_on_another_disk
from cifar_zero.launch.rendezvous import Place
from cifar_zero.training.resolve import with_checkpoint


def agree_on_checkpoint(run: Run, places: Sequence[Place]) -> Run:
    """Returns the run with the checkpoint that it resumes, the same on all ranks.

    After torchrun has restarted the ranks it is the newest checkpoint of this very run, whatever --resume names. Before
    the first one is written, the run begins again.

    Args:
        run: of this rank.
        places: of all ranks.

    Raises:
        UsageError: there is none, or it is of another run; on all ranks.
    """
    if run.config.num_nodes == 1 and not rank_environment.by_torchrun():
        return run

    def found() -> str:
        config = run.config
        if own := newest_of({place.agent for place in places}, config.out, config.run_name):
            config = replace(config, resume=str(own))
            say(f"torchrun has restarted the run: it resumes from {own}")
        return checkpoint_to_resume(config)

    return with_checkpoint(run, by_rank_0(found))


def record_places(run: Run, places: Sequence[Place], run_dir: Path | None) -> None:
    """Writes the places of the ranks into the run folder, and checks that all nodes share --out.

    Args:
        run: of this rank.
        places: of all ranks.
        run_dir: the run folder, on rank 0.

    Raises:
        UsageError: they do not; on all ranks.
    """
    if run.config.num_nodes == 1 and not rank_environment.by_torchrun():
        return
    if run_dir is not None:
        file = run_dir / run_folder.RANKS
        atomic.staged(file).write_text(json.dumps([asdict(place) for place in places], indent=1) + "\n")
        atomic.put_in_place(file)
    if hosts := sorted({places[rank].host for rank in ranks_on_another_disk(run_dir)}):
        raise UsageError(
            f"--out {run.config.out}: {', '.join(hosts)} cannot see what {places[0].host} writes there: name a "
            "directory that all nodes share"
        )
