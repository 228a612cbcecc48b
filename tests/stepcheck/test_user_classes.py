"""Arguments of a user's class: code is loaded only if the command line names it, and no file can name it."""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs Lightning")

from stepcheck.lightning.user_classes import build_parts
from stepcheck.usage import UsageError
from tests.support.suite import WHOLE

TYPES = (
    "Any",
    "object",
    "Callable",
    "list[Callable]",
    "nn.Module | None",
    "Mapping[str, nn.Module]",
    "tuple[nn.Module, int]",
    "type[nn.Module]",
    "ModuleType",
    "dict",
    "dict[str, Any]",
    "Config",
    "Config | None",
    "Config | str",
    "list[Config]",
    "Outer",
    "Outer | None",
    "list[Outer]",
    "dict[str, Outer]",
    "Deep",
    "Deep | None",
    "Takes",
    "Typed",
    "Named",
    "Literal['a'] | Callable",
)
"""jsonargparse resolves each of these in another way."""

OWN = """
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypedDict
from lightning.pytorch import LightningModule
from torch import nn

@dataclass
class Config:
    lr: float = 0.1
    act: Callable | None = None
    net: nn.Module | None = None

@dataclass
class Outer:
    config: Config = field(default_factory=Config)
    maybe: Config | None = None

@dataclass
class Deep:
    outer: Outer = field(default_factory=Outer)
    outers: list[Outer] | None = None

class Takes:
    def __init__(self, config: Config = Config(), outer: Outer | None = None):
        pass

class Typed(TypedDict, total=False):
    config: Config

class Named(NamedTuple):
    act: Callable | None = None

class Own(LightningModule):
    def __init__(self, it: {kind} = None, text: str = "", texts: list[str] = ()):
        super().__init__()
        self.it, self.text, self.texts = it, text, texts
"""

INNER = "{class_path: planted_code.Act, act: planted_code.act, net: planted_code.Act}"

KEYS = ("it", "it.config", "it.act", "it.outer", "it.outer.config", "it.init_args.config", "it.maybe")
VALUES = (
    "{0}",
    "file://{0}",
    "[{0}]",
    "{{act: {0}}}",
    "{{config: {0}}}",
    "config: {0}",
    "{{a: {{config: {0}}}}}",
    "[{{config: {0}}}]",
    "{{outer: {{config: {0}}}}}",
    "{{outers: [{{config: {0}}}]}}",
    "{{init_args: {{config: {0}}}}}",
    "{{class_path: Takes, init_args: {{config: {0}}}}}",
    "{{__path__: {0}}}",
)
"""Options and values that name a second file."""

PAIRS = [*itertools.product(KEYS, VALUES if WHOLE else VALUES[:2]), *((KEYS[0], value) for value in VALUES[2:])]


def built(folder: Path, kind: str, given: dict[str, str]) -> Any:
    """Builds a module that has an argument of a type."""
    own = folder / f"own_{TYPES.index(kind)}.py"
    own.write_text(OWN.format(kind=kind))
    options = {"module": f"{own}:Own", **{f"module.{name}": text for name, text in given.items()}}
    return build_parts(options, needs_data=False)[0]


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_that_the_command_line_names_cannot_name_code(planted: Path, tmp_path: Path, kind: str):
    for key, value in PAIRS:
        with suppress(UsageError):
            built(tmp_path, kind, {key: value.format(tmp_path / "inner.yaml")})
        assert not planted.exists(), (key, value)


def test_the_command_line_names_code(planted: Path, tmp_path: Path):
    assert type(built(tmp_path, "nn.Module | None", {"it": "torch.nn.Identity"}).it).__name__ == "Identity"
    with pytest.raises(UsageError):
        built(tmp_path, "nn.Module | None", {"it": "planted_code.Act"})
    assert planted.exists(), "the other test would find an import"


def test_plain_arguments(planted: Path, tmp_path: Path):
    """Texts may name files."""
    file = str(tmp_path / "inner.yaml")
    module = built(tmp_path, "Outer", {"it.config.lr": "0.5", "text": file, "texts": f"[{file}, b]"})
    assert (module.it.config.lr, module.text, module.texts) == (0.5, file, [file, "b"])
    assert built(tmp_path, "Config", {"it": "{lr: 2}"}).it.lr == 2
