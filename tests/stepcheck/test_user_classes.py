"""What a file gives to a user's class or model is plain data: no file makes a program import or call what it names."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from stepcheck.lightning.case import UserClasses
from stepcheck.lightning.user_classes import instance, options_of_cli

TYPES = {
    "untyped": None,
    "unresolved": "'Missing'",
    "free": "Any",
    "thing": "object",
    "call": "Callable",
    "call_or_text": "Callable | str | None",
    "calls": "list[Callable]",
    "calls_by_name": "dict[str, Callable]",
    "net": "nn.Module",
    "net_or_none": "nn.Module | None",
    "nets": "list[nn.Module] | None",
    "nets_by_name": "Mapping[str, nn.Module]",
    "pair": "tuple[nn.Module, int]",
    "kind": "type[nn.Module]",
    "code": "ModuleType",
    "union_type": "UnionType",
    "bare_dict": "dict",
    "any_dict": "dict[str, Any]",
    "numbers": "list[float]",
    "text": "str",
    "config": "Config",
    "config_or_none": "Config | None",
    "config_or_text": "Config | str",
    "configs": "list[Config]",
    "outer": "Outer",
    "subclassed": "Subclassed",
    "typed_dict": "Typed",
    "named": "Named",
    "literal_or_call": "Literal['a'] | Callable",
}
"""The types of an argument, by its name. jsonargparse resolves each in another way."""

OWN = """
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, UnionType
from typing import Any, Literal, NamedTuple, TypedDict
from lightning.pytorch import LightningModule
from torch import nn

@dataclass
class Config:
    lr: float = 0.1
    name: str = "a"
    act: Callable | None = None
    free: Any = None
    net: nn.Module | None = None

@dataclass
class Outer:
    config: Config = field(default_factory=Config)
    maybe: Config | None = None

class Base:
    def __init__(self, act: Callable | None = None):
        pass

class Subclassed(Base):
    pass

class Typed(TypedDict, total=False):
    act: Callable

class Named(NamedTuple):
    act: Callable | None = None

class Own(LightningModule):
    def __init__(self, {argument} = None):
        super().__init__()
        self.given = {name}

class Required(Own):
    def __init__(self, {argument}):
        super().__init__({name})

class Model(nn.Module):
    def __init__(self, {argument} = None, fields=Named()):
        super().__init__()
"""

PLANTED = "open({!r}, 'w')\ndef act(*_, **__): return act\nclass Act:\n    def __init__(self, *_, **__): act()\n"

ACT, CLASS = "planted_code.act", "planted_code.Act"
SPEC = {"class_path": CLASS}
VALUES: tuple[Any, ...] = (
    ACT,
    CLASS,
    "planted_code",
    f"{CLASS} | int",
    SPEC,
    {"class_path": CLASS, "init_args": {"a": ACT}},
    str(SPEC),
    [ACT],
    [SPEC],
    [[SPEC], 3],
    {"a": ACT},
    {"a": SPEC},
    {"act": ACT},
    {"free": SPEC},
    {"free.class_path": CLASS},
    {"net": SPEC},
    {"net": {"class_path": CLASS}},
    {"net.class_path": CLASS},
    {"config": {"act": ACT}},
    {"config": {"free": {"a": [SPEC]}}},
    {"maybe": {"act": ACT}},
    {"maybe.act": ACT},
    {"maybe": SPEC},
    {"init_args": {"act": ACT}},
    {"dict_kwargs": SPEC},
    {"init_args.act": ACT},
    {"__path__": "{inner}"},
    "{inner}",
    ["{inner}"],
    {"act": "{inner}"},
    {"config": "{inner}"},
    {"maybe": "{inner}"},
)
"""Values that name code: as a text, a class with its arguments, dotted keys, YAML in a text, or a second file."""

KEYS = ("{}+", "{}.help", "{}.class_path", "{}.act", "{}.init_args.act", "{}.config")
"""Other ways to write the name of an argument."""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of a file that the module `planted_code` writes when it is imported."""
    proof = tmp_path / "imported"
    (tmp_path / "planted_code.py").write_text(PLANTED.format(str(proof)))
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump({**SPEC, "act": ACT, "free": SPEC}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    return proof


def own_class(folder: Path, name: str) -> str:
    """Writes a file with a LightningModule and a model that have one argument, and returns its path."""
    kind = f": {TYPES[name]}" if TYPES[name] else ""
    file = folder / f"own_{name}.py"
    file.write_text(OWN.replace("{argument}", f"{name}{kind}").replace("{name}", name))
    return str(file)


def planted_trees(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yields the arguments that a file gives, each of which names code."""
    for key, value in (*(("{}", value) for value in VALUES), *itertools.product(KEYS, (ACT, SPEC, "{inner}"))):
        text = yaml.safe_dump({key.format(name): value}).replace("{inner}", str(folder / "inner.yaml"))
        yield yaml.safe_load(text)


@pytest.mark.parametrize("name", TYPES)
def test_no_file_makes_a_users_class_import_what_it_names(planted: Path, tmp_path: Path, name: str):
    own, file = own_class(tmp_path, name), tmp_path / "file.yaml"
    for tree, user_class in itertools.product(planted_trees(tmp_path, name), ("Own", "Required")):
        file.write_text(yaml.safe_dump({"model": tree}))
        with suppress(UsageError):
            module_of(f"{own}:{user_class}", "--config", str(file))
        assert not planted.exists(), tree


@pytest.mark.parametrize("name", ["untyped", "call", "nets", "any_dict", "bare_dict", "config", "pair", "named"])
def test_no_recipe_makes_a_users_model_import_what_it_names(planted: Path, tmp_path: Path, name: str):
    file, model = tmp_path / "file.yaml", f"{own_class(tmp_path, name)}:Model"
    for tree in planted_trees(tmp_path, name):
        (value,) = tree.values()
        models = ({**tree, "name": model}, {"fields": [value], "name": model})
        for recipe in (*({"model": options} for options in models), {"trainer": tree}):
            file.write_text(yaml.safe_dump(recipe))
            with suppress(UsageError):
                command_line.parse(["--config", str(file), "--model", model])
            assert not planted.exists(), recipe


def module_of(name: str, *flags: str) -> Any:
    """Builds a module with arguments by flags, and by a file after --config."""
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    file = words.pop("--config", None)
    files = {file: options_of_cli(file)[1]} if file else {}
    options = {"module": name, **{flag.removeprefix("--"): value for flag, value in words.items()}}
    return instance("module", UserClasses(options, files))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("free", "free: {hidden: [3, a], deep: {b: 1.5}}", {"hidden": [3, "a"], "deep": {"b": 1.5}}),
        ("untyped", "untyped: relu", "relu"),
        ("any_dict", "any_dict: {a.b: relu, c: 1}", {"a.b": "relu", "c": 1}),
        ("config", "config: {lr: 0.5, name: b, free: [c]}", "Config(lr=0.5, name='b', act=None, free=['c'], net=None)"),
        ("config_or_none", "config_or_none: {lr: 1}", "Config(lr=1.0, name='a', act=None, free=None, net=None)"),
        ("configs", "configs: [{name: b}]", "[Config(lr=0.1, name='b', act=None, free=None, net=None)]"),
        ("config", "config.lr: 2", "Config(lr=2.0, name='a', act=None, free=None, net=None)"),
        ("net_or_none", "net_or_none: null", None),
        ("numbers", "numbers: [1, 0.5]", [1.0, 0.5]),
    ],
)
def test_a_file_gives_plain_data(tmp_path: Path, name: str, text: str, expected: Any):
    own, file = own_class(tmp_path, name), tmp_path / "file.yaml"
    file.write_text(f"model:\n  {text}\n")
    given = module_of(f"{own}:Required", "--config", str(file)).given
    assert (repr(given) if isinstance(expected, str) and expected != "relu" else given) == expected


def test_the_command_line_names_code_and_overrides_a_file(planted: Path, tmp_path: Path):
    own, file = own_class(tmp_path, "net_or_none"), tmp_path / "file.yaml"
    file.write_text("model: {net_or_none: {class_path: planted_code.Act}}")
    linear = ["--module.net_or_none", "torch.nn.Identity"]
    assert type(module_of(f"{own}:Own", "--config", str(file), *linear).given).__name__ == "Identity"
    assert not planted.exists()
    with pytest.raises(UsageError):
        module_of(f"{own}:Own", "--module.net_or_none", CLASS)
    assert planted.exists(), "the other tests would find an import"


@pytest.mark.parametrize("value", ["{inner}", "{{act: {inner}}}", "{{config: {inner}}}", "file://{inner}"])
@pytest.mark.parametrize("name", ["config", "config_or_none", "outer", "net", "subclassed", "configs", "calls"])
def test_no_second_file_is_read(planted: Path, tmp_path: Path, name: str, value: str):
    """Not even if the command line names it."""
    own, text = own_class(tmp_path, name), value.format(inner=tmp_path / "inner.yaml")
    with pytest.raises(UsageError, match="could name code"):
        module_of(f"{own}:Required", f"--module.{name}", text)
    assert not planted.exists()
