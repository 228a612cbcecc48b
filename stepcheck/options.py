"""Compares the options of parameter groups with those that the user gave and that the schedule left."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stepcheck.engines import View
from stepcheck.engines.view import Target
from stepcheck.start import plain


class OptionsCheck:
    """Remembers options before an engine steps, and compares them in its update."""

    def __init__(self, view: View, given: Mapping[int, dict[str, Any]]):
        """Takes the options that the user gave for each parameter, by index."""
        self.view, self.given = view, given
        self._before: dict[int, dict[str, Any]] = {}  # by id of the group

    def before_step(self) -> None:
        """Remembers the options of all groups."""
        self._before = {id(group): _options(group) for group in self.view.optimizer.param_groups}

    def compare(
        self, group: dict[str, Any], targets: Mapping[int, Target], is_first: bool, add: Callable[..., None]
    ) -> None:
        """Compares a group in its update with what it was before the engine's step, and in the first step with what
        the user gave."""
        for key, value in self._before.get(id(group), {}).items():
            if group.get(key, value) != value:
                add("options", 2.0, f"{key} is {group[key]} in the update and was {value} before the step")
        for text in self._not_as_given(group, targets) if is_first else ():
            add("options", 2.0, text)

    def _not_as_given(self, group: dict[str, Any], targets: Mapping[int, Target]) -> Iterator[str]:
        for tensor in group["params"]:
            for part in targets[id(tensor)].parts if id(tensor) in targets else ():
                for key, value in self.given.get(part.index, {}).items():
                    if key in group and plain(group[key]) != plain(value):
                        yield f"{key} of {self.view.names[part.index]} is {group[key]}, and {value} was given"


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, (int, float, bool, tuple))}
