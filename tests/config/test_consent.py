"""No file makes a program load code: only --trust on the command line does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from cifar_zero.config import command_line
from cifar_zero.config.flags import Config, config_of
from cifar_zero.core.errors import UsageError
from tests.support.evil import Evil
from tests.support.helpers import run_program

REFUSED = "sets trust, which only the command line may: take it out and add --trust"


def test_a_run_folder_cannot_switch_trust_on(tmp_path: Path):
    """Its config.yaml and the record in its checkpoint set trust; only the flag itself has an effect."""
    proof, run = tmp_path / "proof", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    recipe = {**yaml.safe_load(command_line.dump(Config())), "data": {"source": "digits"}, "trust": True}
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    record = {"config": {**asdict(Config()), "trust": True}, "classes": [*"0123456789"]}
    torch.save({"state_dict": {}, "cifar_zero": record, "evil": Evil(proof)}, run / "checkpoints" / "last.ckpt")
    done = run_program("evaluate.py", str(run))
    assert not proof.exists(), "the folder ran code"
    assert (done.returncode, done.stderr) == (2, f"error: --config {run / 'config.yaml'} {REFUSED}\n")
    (run / "config.yaml").unlink()
    done = run_program("evaluate.py", str(run), "--trust", "false")
    assert (done.returncode, "which could run any code" in done.stderr) == (2, True)
    assert not proof.exists()
    done = run_program("evaluate.py", str(run), "--trust")  # the flag is obeyed; the record is refused all the same
    assert (done.returncode, proof.exists()) == (2, True)
    assert done.stderr == f"error: the checkpoint's configuration {REFUSED}\n"


def test_trust_is_a_flag_and_no_option_of_a_recipe(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    config = command_line.parse(["--trust"])
    assert command_line.consent(["--trust"]).trust
    assert command_line.consent([]).trust is command_line.consent(["--trust", "false"]).trust is False
    recipe.write_text(command_line.dump(config))
    assert "trust" not in recipe.read_text()
    assert "trust" not in asdict(config)
    assert not command_line.consent(["--config", str(recipe)]).trust
    for value in ("true", "'false'", "1", "{a: 1}"):
        recipe.write_text(f"trust: {value}")
        with pytest.raises(UsageError, match=REFUSED):
            command_line.parse(["--config", str(recipe), "--trust"])
    with pytest.raises(UsageError, match=REFUSED):
        config_of({**asdict(Config()), "trust": False})


def test_no_recipe_names_a_callback(tmp_path: Path):
    """A class path is imported: only the command line may give one."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {callbacks: os.system}")
    with pytest.raises(UsageError, match=r"use the flag --trainer\.callbacks, which no recipe may set"):
        command_line.parse(["--config", str(recipe)])
    flags = ["--trainer.callbacks", "a.B", "--epochs", "3", "--trainer.callbacks.patience=3"]
    assert command_line.consent(flags).callbacks == ("--trainer.callbacks", "a.B", "--trainer.callbacks.patience=3")
    assert command_line.parse(flags).trainer == {}
    assert command_line.parse(flags).epochs == 3
