"""Finds the keys that the installed DeepSpeed reads from a configuration. `python -m tests.support.deepspeed_keys`
writes them to cifar_zero/config/deepspeed_keys.json."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args
from unittest.mock import patch

import deepspeed
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS as REMOVED
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel

from cifar_zero.config.ds_config import KEYS

SEEDS = {"train_batch_size": 1, "optimizer": {"type": "adam"}, "scheduler": {"type": "WarmupLR"}}
"""Values without which DeepSpeed (0.19.8) does not read the other keys."""

IN_GROUPS = {"sequence_parallel_size": None}  # read only with process groups

PASSED_ON = "params"  # sections that are passed on to an optimizer or scheduler

ITSELF = "section"  # an entry of each section whose value is the section

Keys = dict[str, Any]  # each key, with the keys of its section, or None if it is not a section with fixed keys


class Section(dict[str, Any]):
    """A section of a configuration that records how it is read."""

    def __init__(self, content: Keys):
        super().__init__({ITSELF: self, "enabled": True, **content})  # some sections are read only if enabled
        self.keys_read: set[str] = set()  # the keys that were read
        self.takes_all = False  # whether the section was copied or its entries were listed
        self.model: type[BaseModel] | None = None  # the pydantic model to which it was unpacked: f(**section)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # defined here, because Python unpacks other dictionaries without __getitem__

    def keys(self) -> Any:
        return self

    def items(self) -> Any:
        self.takes_all = True
        return super().items()

    def __copy__(self) -> "Section":
        self.takes_all = True
        return self

    def __deepcopy__(self, memo: Any) -> "Section":
        return self.__copy__()


def read_by_deepspeed(path: Sequence[str] = ()) -> Keys | None:
    """Returns the keys that DeepSpeed reads in a section at `path`, each with the keys that it reads in a section
    there. Returns None if DeepSpeed reads nothing in the section, or takes any key."""
    root = section = Section({key: value for key, value in SEEDS.items() if key not in path[:1]})
    for key in path:
        seed = SEEDS.get(key)
        inner = Section(seed if isinstance(seed, dict) else {})
        dict.__setitem__(section, key, inner)
        section = inner
    original = DeepSpeedConfigModel.__init__

    def init(self: Any, strict: bool = False, **data: Any) -> None:
        if ITSELF in data:
            data.pop(ITSELF).model = type(self)
        original(self, strict, **data)

    with patch.object(DeepSpeedConfigModel, "__init__", init), suppress(Exception):  # a section in place of a number
        deepspeed.DeepSpeedConfig(root)
    if section.model is not None:
        return fields_of(section.model)
    keys = section.keys_read - {ITSELF}
    if not path:
        return {key: read_by_deepspeed([key]) for key in sorted(keys - {*REMOVED})} | IN_GROUPS
    if section.takes_all or not keys or path[-1] == PASSED_ON:
        return None
    return {key: read_by_deepspeed([*path, key]) for key in sorted(keys)}


def fields_of(model: type[BaseModel]) -> Keys:
    """Returns the names and aliases of a pydantic model's fields, with the fields of inner models."""
    fields: Keys = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        inner = next((fields_of(kind) for kind in kinds if issubclass(kind, BaseModel)), None)
        fields |= dict.fromkeys(filter(None, (name, field.alias)), inner)
    return dict(sorted(fields.items()))


if __name__ == "__main__":
    KEYS.write_text(json.dumps({"release": deepspeed.__version__, "keys": read_by_deepspeed()}, indent=1) + "\n")
