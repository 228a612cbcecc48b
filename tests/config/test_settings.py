"""Each option has one owner, from which follows what may be compared and what a resumed run keeps."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from cifar_zero.checkpoints.resume import check_same_run
from cifar_zero.comparison import reading
from cifar_zero.comparison.result import Curve, FinishedRun, Variant
from cifar_zero.config import command_line
from cifar_zero.config.settings import OWNERS, Settings, flat, make_settings, may_change_on_resume, owner_of, tree_of
from cifar_zero.core.errors import UsageError

EVERY = flat(command_line.parse(["--model", "net_moe"]))
"""Every option of a run, with its default."""


def test_each_option_stands_in_one_part():
    names = [option.name for part in OWNERS.values() for option in dataclasses.fields(part)]
    assert sorted(name for name in names if names.count(name) > 1) == ["data", "data"]  # two sections of one name
    assert {owner_of(option) for option in EVERY} == {"recipe", "placement", "output"}
    with pytest.raises(KeyError):
        owner_of("no_such_option")


@pytest.mark.parametrize(
    ("option", "owner"),
    [
        ("optimizer.lr", "recipe"),
        ("batch_size", "recipe"),
        ("data.source", "recipe"),
        ("augment.flip", "recipe"),
        ("model.num_experts", "recipe"),
        ("model.ep_size", "placement"),
        ("data.root", "placement"),
        ("precision", "placement"),
        ("accumulate", "placement"),
        ("zero.overlap_comm", "placement"),
        ("offload.ratio", "placement"),
        ("name", "output"),
        ("save_top_k", "output"),
    ],
)
def test_the_owner_of_an_option(option: str, owner: str):
    assert owner_of(option) == owner


def other(value: Any) -> Any:
    """Returns another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "other"] if isinstance(value, list) else f"{value}other"


def finished(**changes: Any) -> FinishedRun:
    """Returns a finished run with these options, of which metrics.json says nothing."""
    metrics = {"dataset": "digits", "num_train": 100, "strategy": "ddp", "world_size": 1, "num_nodes": 1}
    return FinishedRun("runs/x", 0, {**metrics, "accumulate": 1}, {**EVERY, **changes}, Curve([], []), {})


def test_runs_of_one_recipe_are_compared_and_of_two_are_not():
    for option, value in EVERY.items():
        runs = {"a": finished(), "b": finished(**{option: other(value)})}
        differences = reading.differences([Variant(name, "ddp", 1, runs=[run]) for name, run in runs.items()])
        hindered = reading.hindering(differences, "a", "b")
        assert hindered == ([option] if owner_of(option) == "recipe" and option != "seed" else []), option


def test_a_resumed_run_keeps_its_recipe():
    now = command_line.parse(["--model", "net_moe", "--resume", "last.ckpt"])
    for option, value in EVERY.items():
        before = {**EVERY, option: other(value)}
        if option == "data.source" or may_change_on_resume(option):
            continue
        with pytest.raises(UsageError, match=f"that run had --{option} "):
            check_same_run(now, before)
    allowed = {option: other(value) for option, value in EVERY.items() if may_change_on_resume(option)}
    check_same_run(now, {**EVERY, **allowed, "data.source": "auto"})


def test_the_options_that_a_resumed_run_may_change():
    kept = {option for option in EVERY if not may_change_on_resume(option)}
    sections = {option.split(".")[0] for option in kept if option.split(".")[0] in ("model", "optimizer", "lora")}
    assert sections == {"model", "optimizer", "lora"}
    assert {"batch_size", "seed", "init", "trainable", "data.val_fraction", "data.image_size", "data.normalize"} <= kept
    assert not kept & {"epochs", "max_steps", "schedule", "augment.flip", "devices", "precision", "name"}


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--data", "digits"], "unknown option --data: did you mean --data."),
        (["digits"], "unexpected 'digits': options begin with --"),
        (["--seed", "1", "2"], "--seed takes one value, not 2: put '1 2' in quotes"),
        (["--optimizer"], "--optimizer has no value"),
        (["--config"], "--config has no value"),
        (["--trainer", "{}", "--trainer.benchmark", "true"], "cannot be combined: leave one of them out"),
    ],
)
def test_words_that_are_no_options(flags: list[str], refused: str):
    with pytest.raises(UsageError, match=re.escape(refused)):
        command_line.parse(flags)


def test_settings_are_what_their_tree_says():
    given = make_settings(batch_size=8, devices=2, name="mine")
    assert (given.recipe.batch_size, given.placement.devices, given.output.name) == (8, 2, "mine")
    assert given.changed(seed=3).recipe == dataclasses.replace(given.recipe, seed=3)
    assert given.changed(data=dataclasses.replace(given.data, root="elsewhere")).placement.data.root == "elsewhere"
    assert Settings().changed() == Settings()
    with pytest.raises(TypeError, match="no_such_option"):
        make_settings(no_such_option=1)
    assert tree_of(given)["data"]["source"] == "auto"
