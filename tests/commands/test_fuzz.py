"""Tests that each damaged or hostile file causes one clear error or does no harm. `make test-all` makes 1000 such
files."""

import json
import os
import pickle
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero import models
from cifar_zero.checkpoints.weights import encode
from cifar_zero.config import command_line
from cifar_zero.core.errors import RunError, UsageError
from tests.exporting.made_up import CLASSES
from tests.support.helpers import ROOT, WHOLE, read_weights, run_folder_of, run_program, train_all
from tests.users_code.evil import Evil

MUTATIONS = 200 if WHOLE else 15
"""Number of damaged copies of each kind of file."""


def truncate(file: Path, rng: random.Random, proof: Path) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def flip(file: Path, rng: random.Random, proof: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 10, 100))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def remove(file: Path, rng: random.Random, proof: Path) -> None:
    file.unlink()


def fill_with_noise(file: Path, rng: random.Random, proof: Path) -> None:
    file.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 10_000))))


def run_code(file: Path, rng: random.Random, proof: Path) -> None:
    if rng.random() < 0.5:
        torch.save({"state_dict": {}, "module": {}, "optimizer_state_dict": {}, "evil": Evil(proof)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(proof)))


def replace_with_another(file: Path, rng: random.Random, proof: Path) -> None:
    torch.save({"state_dict": {"net.weight": torch.ones(3)}, "global_step": 1}, file)


DAMAGES = [truncate, flip, flip, remove, fill_with_noise, run_code, replace_with_another]


def fuzz(original: Path, tmp_path: Path, read: Callable[[Path], Any], same: Callable[[Any], bool]) -> int:
    """Damages copies of a file or folder. `same` checks what was read from a copy that was not refused.

    Returns how many copies were refused.
    """
    rng = random.Random(0)
    refused = 0
    proof = tmp_path / "proof"
    for number in range(MUTATIONS):
        copy = tmp_path / f"{number}" / original.name
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            copy.parent.mkdir()
            shutil.copyfile(original, copy)
        target = rng.choice([*(path for path in sorted(copy.rglob("*")) if path.is_file())] or [copy])
        damage = rng.choice(DAMAGES)
        damage(target, rng, proof)
        case = f"{number}: {damage.__name__} {target.name}"
        try:
            result = read(copy)
        except Exception as error:
            if not isinstance(error, (UsageError, RunError)) or "\n" in str(error):
                raise AssertionError(case) from error
            refused += 1
        else:
            assert same(result), case
        assert not proof.exists(), case
        shutil.rmtree(copy.parent)
    return refused


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("deepspeed_stage_3", 2), *([("baseline", 1), ("deepspeed_stage_2", 1)] if WHOLE else [])],
)
def test_checkpoints(strategy: str, devices: int, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", strategy, "--devices", str(devices), "--accelerator", "cpu", "--batch_size", "16"]
    train_all({tmp_path / "out": [*small_data, *flags, "--max_steps", "4", "--trainer.limit_test_batches", "1"]})
    checkpoint = run_folder_of(tmp_path / "out") / "checkpoints" / "last.ckpt"
    net = models.build("net", 10)
    original = read_weights(net, checkpoint)

    def same(result: Any) -> bool:
        return all(torch.equal(result[key], original[key]) for key in original)

    assert fuzz(checkpoint, tmp_path, lambda path: read_weights(net, path), same) > MUTATIONS / 3


def test_recipes(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(command_line.dump(command_line.parse(["--config", str(ROOT / "configs" / "deepspeed.yaml")])))
    fuzz(recipe, tmp_path, lambda path: command_line.parse(["--config", str(path)]), lambda result: True)


def test_an_unknown_command_is_named():
    done = run_program("-m", "cifar_zero", "comapre")
    assert (done.returncode, done.stderr) == (2, "error: unknown command comapre: did you mean compare?\n")


def write_export(file: Path, side: int) -> None:
    """Writes an export of Net whose metadata has this image size."""
    about = {"model": "net", "options": "{}", "classes": json.dumps(CLASSES), "mean": "0.5", "std": "0.5"}
    file.write_bytes(encode(models.build("net", 10).state_dict(), {**about, "image_size": str(side)}))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_handlers: None) -> None:
    """Makes the files and folders that WRONG names, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    os.mkfifo("pipe.png")
    for side in (-1, 0, 64, 99999999):
        write_export(Path(f"{side}.safetensors"), side)


WRONG = {
    "train --model mlp --model.hidden [99999999999]": "parameters, and they take 616,600 GB of ",
    "train --model mlp --model.hidden [99999999999999999999]": "a tensor that is too large",
    "train --out file": "--out file: file/net-baseline cannot be written (Not a directory)",
    "train --data.source folder --data.root file": "cannot read file/train: Not a directory",
    "train --data.cache file/below": "Not a directory: file/below; fix this, or choose another directory with",
    "doctor memroy": "unknown check memroy: did you mean memory?",
    "doctor --ranks 0": "--ranks must be at least 1",
    "doctor --nodes": "torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d --rdzv_endpoint HOST:PORT -m cifar",
    "doctor --nodes memory": "--nodes cannot be combined with the name of a check",
    "evaluate good --devices 2": "--devices 2: evaluate computes on one device: leave it out",
    "evaluate good --trainer.limit_test_batches 1": "--trainer.limit_test_batches has no effect on evaluate: ",
    "export good.safetensors --to safetensors": "good.safetensors does not exist",
    "export 64.safetensors --to safetensors": "is the checkpoint itself",
    "export 64.safetensors --to onnx --output net.pt": "must end in .onnx",
    "export 64.safetensors --to onnx --output nowhere/net.onnx": "nowhere/net.onnx cannot be written",
    "plan --device_memry 80GB": "unknown option --device_memry",
    "plan --device_memory 80PB": "--device_memory 80PB: give a size such as 80GB",
    "plan --device_memory=": "--device_memory : give a size such as 80GB",
    "plan --host_memory 1e-10": "--host_memory 1e-10: give a size",
    f"plan --ds_config {ROOT}/cifar_zero/config/deepspeed_examples.json": "--ds_config cannot be planned",
    f"plan --model {ROOT}/tests/users_code/own_code.py:Small": "what it computes depends on values",
    "plan --model vit_tiny --trainable nothing.*": "--trainable nothing.* matches no parameter of",
    "predict 64.safetensors pipe.png": "pipe.png is neither a file nor a folder",
    "predict 64.safetensors file --delta pipe.png": "pipe.png does not exist, or is not a file",
    "predict ./-1.safetensors file": "image_size must be at least 32 and at most 8192, not -1",
    "predict 0.safetensors file": "image_size must be at least 32 and at most 8192, not 0",
    "predict 64.safetensors file": "its model does not fit its image_size 64",
    "predict 99999999.safetensors file": "image_size must be at least 32 and at most 8192, not 99999999",
}
"""Command lines with a mistake, and what is said about it."""


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns the bytes of each file, and none for folders and pipes."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(line: str, small_data: list[str], tmp_path: Path, run_command):
    name, *words = shlex.split(line)
    if name == "train":
        words = [*small_data, "--accelerator", "cpu", *words]
    before = contents(tmp_path)
    code, _, said = run_command(name, *words)
    *_, last = said.splitlines()
    assert code == 2, last
    assert last.startswith("error: ")
    assert WRONG[line] in last
    assert contents(tmp_path) == before
