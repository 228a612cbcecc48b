"""A file cannot make a program load code. Only the command line can."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cifar_zero.config import command_line
from cifar_zero.config.settings import make_settings, tree_of
from cifar_zero.core.errors import UsageError
from cifar_zero.training import evaluate
from cifar_zero.training.resolve import resolve
from tests.users_code.evil import Evil

REFUSED = "sets trust, which works only on the command line: remove it and add --trust"


@pytest.mark.parametrize(
    ("trust", "message"), [("false", "which could run any code"), ("true", f"the checkpoint's configuration {REFUSED}")]
)
def test_a_run_folder_cannot_switch_trust_on(trust: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The record in its checkpoint sets trust, but only the flag has an effect. Even with the flag, the record is
    refused."""
    proof, run = tmp_path / "proof", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    record = {"config": {**tree_of(make_settings()), "trust": True}, "classes": [*"0123456789"]}
    torch.save({"state_dict": {}, "cifar_zero": record, "evil": Evil(proof)}, run / "checkpoints" / "last.ckpt")
    monkeypatch.setattr(sys, "argv", ["evaluate", str(run), "--trust", trust])
    with pytest.raises(UsageError, match=message):
        evaluate.main()
    assert proof.exists() == (trust == "true")


def test_trust_is_a_flag_and_not_an_option_of_a_recipe(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    config = command_line.parse(["--trust"])
    assert config.consent.trust
    assert "trust" not in command_line.dump(config)
    for value in ("true", "'false'", "{a: 1}"):
        recipe.write_text(f"trust: {value}")
        with pytest.raises(UsageError, match=REFUSED):
            command_line.parse(["--config", str(recipe), "--trust"])


def test_no_recipe_names_a_callback(tmp_path: Path):
    """Only the command line may name a class, because the class is imported."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {callbacks: os.system}")
    with pytest.raises(UsageError, match=r"use the flag --trainer\.callbacks, which no recipe may set"):
        command_line.parse(["--config", str(recipe)])
    config = command_line.parse(["--trainer.callbacks", "a.B", "--epochs", "3", "--trainer.callbacks.patience=3"])
    assert config.consent.callbacks == ("--trainer.callbacks", "a.B", "--trainer.callbacks.patience=3")
    assert (config.recipe.trainer, config.recipe.epochs) == ({}, 3)


NETWORK = """
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from torch import nn

@dataclass
class Config:
    act: Callable | None = None

class Named(NamedTuple):
    act: Callable | None = None

class Net(nn.Module):
    def __init__(
        self, num_classes=10, act: Callable | None = None, free=None, layers: list[Callable] | None = None,
        nets: list[nn.Module] = (), any_dict: dict[str, Any] = {}, config: Config = None,
        pair: tuple[nn.Module, int] = (), fields=Named(),
    ):
        super().__init__()
"""
ARGUMENTS = ("act", "free", "layers", "nets", "any_dict", "config", "pair", "fields", "act.class_path", "config.act")


CLASS = {"class_path": "planted_code.Act"}
REFUSED_CLASS = "has class_path, which names code: give it on the command line"


@pytest.mark.parametrize(
    ("recipe", "flags", "refused"),
    [
        ({"trainer": {"profiler": CLASS}}, "", REFUSED_CLASS),
        ({"trainer": {"profiler": [{**CLASS, "init_args": {}}]}}, "", REFUSED_CLASS),
        ({"trainer": {"profiler": "{class_path: planted_code.Act}"}}, "", REFUSED_CLASS),
        ({"model": {"name": "{own}", "free": CLASS}}, "--model {own}", REFUSED_CLASS),
        ({"model": {"name": "{planted}:Act"}}, "", "name it on the command line too"),
        ({"augment": {"transform": "{planted}:act"}}, "", "name it on the command line too"),
        ({"model": {"name": "{own}", "act": "planted_code.act"}}, "--model {own}", None),
        ({"model": {"name": "{own}", "free": "planted_code.act"}}, "--model {own}", None),
    ],
)
def test_no_option_of_a_recipe_is_imported(
    planted: Path, tmp_path: Path, recipe: dict[str, Any], flags: str, refused: str | None
):
    (tmp_path / "my_net.py").write_text(NETWORK)
    file, own = tmp_path / "recipe.yaml", f"{tmp_path / 'my_net.py'}:Net"
    text = yaml.safe_dump(recipe).replace("{own}", own)
    file.write_text(text.replace("{planted}", str(tmp_path / "planted_code.py")))
    command = ["--config", str(file), *flags.replace("{own}", own).split()]
    if refused:
        with pytest.raises(UsageError, match=refused):
            resolve(command_line.parse(command))
    else:
        given = {option: value for option, value in recipe["model"].items() if option != "name"}
        assert command_line.parse(command).recipe.model.options.items() >= given.items()
    assert not planted.exists()


ACT = "planted_code.act"
VALUES: tuple[Any, ...] = (
    ACT,
    CLASS,
    str(CLASS),
    [ACT],
    [[CLASS], 3],
    {"a": CLASS},
    {"act": ACT},
    {"act.class_path": ACT},
    {"init_args": {"act": ACT}},
    {"__path__": "inner.yaml"},
    "inner.yaml",
    ["inner.yaml"],
    {"act": "inner.yaml"},
)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_no_value_of_a_recipe_is_imported(
    planted: Path, tmp_path: Path, argument: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("my_net.py").write_text(NETWORK)
    Path("inner.yaml").write_text(yaml.safe_dump({**CLASS, "act": ACT, "free": CLASS}))
    for value in VALUES:
        for recipe in ({"model": {"name": "my_net.py:Net", argument: value}}, {"trainer": {argument: value}}):
            Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
            with suppress(UsageError):
                command_line.parse(["--config", "recipe.yaml", "--model", "my_net.py:Net"])
            assert not planted.exists(), recipe
