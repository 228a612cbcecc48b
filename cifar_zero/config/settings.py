"""The settings that a user asks for: a recipe, a placement and an output. `resolve` turns them into a `Run`. Imports no
torch."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Self

from cifar_zero.config.output import Output
from cifar_zero.config.placement import Placement
from cifar_zero.config.recipe import Choice, DataConfig, Recipe, SourceName
from cifar_zero.core.errors import UsageError
from cifar_zero.models import MODELS
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES

Owner = Literal["recipe", "placement", "output"]

OWNERS: dict[Owner, type] = {"recipe": Recipe, "placement": Placement, "output": Output}

REGISTRIES: dict[str, Mapping[str, Any]] = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
"""The registries from which the recipe chooses model, optimizer and schedule. A `Choice` has the name of an entry and
its options."""

FALLBACK_SUFFIX = "-digits-fallback"
"""Suffix of the name of a run that uses the embedded digits because CIFAR-10 was not available."""

PLACED = ("model.ep_size", "data.root", "data.cache", "data.url", "data.loader", "data.workers")
"""Options in sections of the recipe that belong to the placement: on which ranks the experts are, where the images are,
and how they are read."""


def sections(part: type) -> dict[str, type]:
    """Returns the dataclass of each section of `part` (Recipe, Placement or Output), keyed by the section's name. A
    section is a field that holds a dataclass of options, such as zero. Its flags have dotted names."""
    return {
        option.name: option.default_factory
        for option in fields(part)
        if option.default_factory is not MISSING and is_dataclass(option.default_factory)
    }


@dataclass(frozen=True)
class Consent:
    """The user's consent to run code. Only the command line can give it, never a recipe, a run folder or a
    checkpoint."""

    trust: bool = False  # load checkpoints that could run code (--trust)
    callbacks: tuple[str, ...] = ()  # the flags --trainer.callbacks, which name classes to import


@dataclass(frozen=True)
class Settings:
    """The options that a user asks for."""

    recipe: Recipe = field(default_factory=Recipe)
    placement: Placement = field(default_factory=Placement)
    output: Output = field(default_factory=Output)
    consent: Consent = Consent()
    named: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # options that were set

    @property
    def data(self) -> DataConfig:
        return self.recipe.data

    @property
    def run_name(self) -> str:
        """The run's --name, or <model>-<strategy> if --name is empty."""
        return self.output.name or f"{self.recipe.model_name}-{self.placement.strategy_name}"

    @property
    def fell_back(self) -> bool:
        """Whether the run uses the embedded digits because CIFAR-10 was not available."""
        return self.data.source == "digits" and self.run_name.endswith(FALLBACK_SUFFIX)

    def with_images_of(self, source: SourceName) -> Self:
        """Returns the settings with --data.source auto replaced by `source`. If `source` is digits, the run's name gets
        FALLBACK_SUFFIX. Settings with another --data.source are returned unchanged."""
        if self.data.source != "auto":
            return self
        name = self.output.name
        if source == "digits":
            name = self.run_name + FALLBACK_SUFFIX
        return self.changed(data=replace(self.data, source=source), name=name)

    def changed(self, **options: Any) -> Self:
        """Returns the settings with some options changed: `changed(devices=2, seed=1)`. Raises TypeError for an unknown
        option."""
        parts: dict[Owner, Any] = {}
        for owner, part in OWNERS.items():
            given = {name: options.pop(name) for name in _names(part) & options.keys()}
            parts[owner] = replace(getattr(self, owner), **given)
        if options:
            raise TypeError(f"unknown options: {', '.join(sorted(options))}")
        return replace(self, **parts)


def make_settings(**options: Any) -> Settings:
    """Returns the default settings with some options changed; see `Settings.changed`."""
    return Settings().changed(**options)


def settings_of(tree: Mapping[str, Any]) -> Settings:
    """Returns the settings from a dictionary that `tree_of` made. Raises TypeError for unknown options, which another
    version of the program wrote, and UsageError if the dictionary sets `trust`."""
    check_no_consent(tree, "the checkpoint's configuration")
    types = {**sections(Recipe), **sections(Placement), **dict.fromkeys(REGISTRIES, Choice)}
    return make_settings(**{key: types[key](**value) if key in types else value for key, value in tree.items()})


def tree_of(given: Settings) -> dict[str, Any]:
    """Returns all options of recipe, placement and output, keyed by name, with sections as dictionaries, as a
    checkpoint records them."""
    return {**asdict(given.recipe), **asdict(given.placement), **asdict(given.output)}


def flat(given: Settings | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of all options, keyed by flag, such as data.root, optimizer.lr and seed. The value of `model`
    is the model's name. Accepts settings, the content of a recipe, or the options that a checkpoint records."""
    options: dict[str, Any] = {}
    if isinstance(given, Settings):
        given = tree_of(given)
    for key, value in given.items():
        if not isinstance(value, Mapping):
            options[key] = value
            continue
        section = {**value}
        if key in REGISTRIES and "name" in section:
            options[key] = section.pop("name")
            if [*section] == ["options"]:  # in a record; in config.yaml the options are next to the name
                section = section["options"]
        for option, setting in section.items():
            options[f"{key}.{option}"] = list(setting) if isinstance(setting, tuple) else setting
    return options


def canonical(option: str) -> str:
    """Returns `model` for the option model.name, likewise for optimizer and schedule, and any other option
    unchanged."""
    chooser = option.removesuffix(".name")
    return chooser if chooser in REGISTRIES else option


def owner_of(flag: str) -> Owner:
    """Returns whether an option, such as seed or optimizer.lr, belongs to the recipe, the placement or the output.
    Raises KeyError for an unknown option."""
    if flag in PLACED:
        return "placement"
    name = flag.partition(".")[0]
    for owner, part in OWNERS.items():
        if name in _names(part):
            return owner
    raise KeyError(flag)


def may_change_on_resume(flag: str) -> bool:
    """Returns whether a resumed run may change an option. It may change all options of the placement and the output.
    Raises KeyError for an unknown option."""
    if owner_of(flag) != "recipe":
        return True
    name, _, option = flag.partition(".")
    part = Recipe
    if name == "data":
        part, name = DataConfig, option
    return part.__dataclass_fields__[name].metadata.get("may_change_on_resume", False)


def check_no_consent(tree: Mapping[str, Any], source: str) -> None:
    """Raises UsageError if the options in `tree` set `trust`, because no file may allow code to run. `source` names the
    file that they come from."""
    if "trust" in tree:
        raise UsageError(f"{source} sets trust, which works only on the command line: remove it and add --trust")


def _names(part: type) -> set[str]:
    return {option.name for option in fields(part)}
