"""Makes the folder of a run, <out>/<name>/version_N, and finds the checkpoints in it. Only one process can claim a
version."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cifar_zero.checkpoints.zero_folder import LATEST, is_checkpoint_folder
from cifar_zero.config.settings import FALLBACK_SUFFIX
from cifar_zero.core.errors import UsageError

CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"
CONFIG = "config.yaml"
METRICS = "metrics.json"
LOSSES = "losses.csv"
DEEPSPEED_CONFIG = "deepspeed.json"
RANKS = "ranks.json"
STEP_CHECK = "step_check.json"


def claim(out: str, name: str) -> Path:
    """Makes the folder version_N of a new run with the given name, and returns it. N is one more than the highest
    version of this name, and 0 for the first run. Raises UsageError if the folder cannot be made."""
    parent = Path(out) / name
    try:
        while True:
            parent.mkdir(parents=True, exist_ok=True)
            version = max(map(_version, parent.glob("version_*")), default=-1) + 1
            folder = parent / f"version_{version}"
            # Another run has just made the same folder, or has removed the empty parent.
            with suppress(FileExistsError, FileNotFoundError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise UsageError(f"--out {out}: {parent} cannot be written ({error.strerror})") from error


@contextmanager
def removed_on_failure(folder: Path | None, kind: type[BaseException] = BaseException) -> Iterator[None]:
    """Removes the folder of a run if the `with` block raises an exception of this kind and the folder has no
    checkpoint. Also removes <out>/<name> if it is then empty."""
    try:
        yield
    except kind:
        if folder is not None and not checkpoints(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it has other versions
                folder.parent.rmdir()
        raise


def keep_code(folder: Path, name: str) -> None:
    """Copies the file of a user's model or transform into a run's folder if `name` is FILE.py:NAME."""
    file = Path(name.rpartition(":")[0])
    if file.suffix == ".py":
        shutil.copy(file, folder)


def newest(candidates: list[Path]) -> Path:
    """Returns the newest of several checkpoints.

    First selects the run name of the checkpoint that was written last. Then selects the highest version among the runs
    of this name. Returns the last.ckpt of this run, or else its checkpoint that was written last. Times alone are not
    enough, because copying a folder changes them.
    """
    name, _ = _run_of(max(candidates, key=written))
    of_name = [path for path in candidates if _run_of(path)[0] == name]
    return max(of_name, key=lambda path: (_run_of(path)[1], path.name == LAST, written(path)))


def _run_of(checkpoint: Path) -> tuple[Path, int]:
    """Returns the folder <out>/<name> and the version of a checkpoint's run. Outside of a run folder the version is
    -1."""
    folder = checkpoint.absolute().parent.parent  # version_N, if the path is <name>/version_N/checkpoints/last.ckpt
    return folder.parent, _version(folder)


def _version(folder: Path) -> int:
    version = folder.name.removeprefix("version_")
    return int(version) if version.isdecimal() else -1


def newest_run(folder: Path) -> Path:
    """Returns the run folder with the highest version in `folder`, or `folder` itself if it contains none."""
    return max(folder.glob("version_*"), key=_version, default=folder)


def checkpoints(folder: Path) -> list[Path]:
    """Returns all complete checkpoints under a folder, in no order: *.ckpt files and DeepSpeed's *.ckpt folders."""
    return [path for path in folder.rglob("*.ckpt") if path.is_file() or is_checkpoint_folder(path)]


def last_checkpoint(out: str, name: str, fallback: bool = False) -> Path:
    """Returns the checkpoint that `--resume last` names: the newest of all runs named `name` under `out`. With
    `fallback`, runs that fell back from CIFAR-10 to the digits count too. Raises UsageError if there is none."""
    own, digits = Path(out, name), Path(out, name + FALLBACK_SUFFIX)
    candidates = checkpoints(own)
    if fallback:
        candidates += checkpoints(digits)
    elif digits.is_dir() and not own.is_dir():
        raise UsageError(
            f"--resume last: the only run named {name} under {out} was trained on the embedded digits, not CIFAR-10: "
            f"continue it with --resume {digits}"
        )
    if not candidates:
        raise UsageError(
            f"--resume last: no run named {name} under {out} has a checkpoint: name the run with --name (by default "
            "<model>-<strategy>), or give its folder to --resume"
        )
    return newest(candidates)


def find_checkpoint(path: str) -> Path:
    """Returns the checkpoint that a path on the command line names. The path may be a checkpoint (a file or DeepSpeed's
    folder), a file or folder inside DeepSpeed's folder, or any other folder, whose newest checkpoint is returned.
    Raises UsageError if there is none."""
    named = Path(path)
    if not named.exists():
        raise UsageError(f"{path} does not exist: give a run folder, or a .ckpt file or folder")
    for folder in (named, *named.absolute().parents[:2]):  # users confuse these paths: Lightning issues 20453 and 17763
        if is_checkpoint_folder(folder):
            return folder
    if named.is_file():
        return named
    if candidates := checkpoints(named):
        return newest(candidates)
    raise UsageError(f"no checkpoint under {path}: give a run folder, or a .ckpt file or folder")


def written(checkpoint: Path) -> int:
    """Returns when a checkpoint was finished, in nanoseconds since 1970."""
    finished = checkpoint
    if checkpoint.is_dir():
        finished = checkpoint / LATEST  # written last
    return finished.stat().st_mtime_ns


def recipe_of(checkpoint: Path) -> Path | None:
    """Returns the config.yaml of a checkpoint's run folder, or None outside of a run folder."""
    folder = checkpoint.resolve().parent
    recipe = folder.parent / CONFIG
    if folder.name == CHECKPOINTS and recipe.is_file():
        return recipe
    return None
