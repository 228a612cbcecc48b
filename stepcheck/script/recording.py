"""Saves and reads the optimizer steps that were recorded while a script ran. Their tensors are on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepcheck.engines.adapter import tensors_in
from stepcheck.usage import UsageError

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha", "rho", "amsgrad")
"""Options of torch's optimizers that are compared, because they change an update. Rarer options, such as centered and
maximize, are not compared."""


PRODUCTS = tuple(
    f"{name}.fp32_precision"
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
)
PRODUCTS_BEFORE_29 = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
"""Attributes of torch.backends that choose the precision of products of float32, such as TF32: PRODUCTS since torch
2.9, and these before it."""


@dataclass
class RecordedTensor:
    """A weight or a buffer of the script in a step."""

    is_weight: bool
    before: Tensor
    after: Tensor
    gradient: Tensor | None = None  # as the optimizer receives it
    options: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of its parameter group
    state: dict[str, Any] = field(default_factory=dict)  # of the optimizer, before the step


@dataclass
class RecordedStep:
    """An optimizer step of the script. Its lists have an item for each micro-batch."""

    epoch: int  # number of loader iterators that the script made before the iterator of this step
    order_state: Any  # state of the random generators before this iterator was made
    values: dict[str, RecordedTensor] = field(default_factory=dict)  # of the model, by name
    batches: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)  # of the random generators before each forward pass
    states_after: list[Any] = field(default_factory=list)  # and before each backward pass
    losses: list[Tensor] = field(default_factory=list)  # that backward passes start from, without a loss scale


@dataclass
class Recording:
    """The recorded steps in a folder, and what they have in common."""

    folder: Path
    model: str = ""  # name of the class of the script's model
    optimizer: str = ""  # and of its optimizer
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)  # see `settings`
    precision: str = "32-true"  # in Lightning's words
    gradient_clip_val: float = 0.0  # max_norm of clip_grad_norm_, or 0 if the script does not call it
    accumulate: int = 0  # micro-batches per step
    steps: int = 0
    skipped: int = 0  # steps that GradScaler left out, because a gradient overflowed

    def step(self, number: int) -> RecordedStep:
        """Reads the step with this number, from 1. Unpickles any class, because the script itself has run on this
        machine."""
        return torch.load(self.folder / f"{number}.pt", weights_only=False)

    def add(self, step: RecordedStep) -> None:
        self.steps += 1
        self.settings = settings()
        torch.save(step, self.folder / f"{self.steps}.pt")
        torch.save(self, self.folder / "recording.pt")

    @staticmethod
    def read(folder: Path) -> "Recording | None":
        file = folder / "recording.pt"
        return torch.load(file, weights_only=False) if file.is_file() else None


def settings() -> dict[str, Any]:
    """Returns the settings of torch that change how float32 is rounded: the number of threads, and the precision of
    products."""
    names = PRODUCTS if hasattr(torch.backends.cuda.matmul, "fp32_precision") else PRODUCTS_BEFORE_29
    return {"threads": torch.get_num_threads(), **{name: attrgetter(name)(torch.backends) for name in names}}


def use_settings(expected: Mapping[str, Any]) -> None:
    """Changes the settings of torch that differ from `expected`. Sets no others, because torch (2.15) may then refuse
    to read allow_tf32, which Lightning reads before a training."""
    now = settings()
    for name, value in expected.items():
        owner, _, flag = name.rpartition(".")
        if owner and now.get(name, value) != value:
            setattr(attrgetter(owner)(torch.backends), flag, value)
    torch.set_num_threads(expected["threads"])


def update_options(group: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    found = {key: group[key] for key in OPTIONS if group.get(key) is not None}
    return {
        key: tuple(float(each) for each in (value if isinstance(value, (tuple, list)) else [value]))
        for key, value in found.items()
    }


def samples_in(batch: Any) -> int:
    """Returns the number of samples in a batch: the length of its longest tensor, or 1 if no tensor has dimensions."""
    return max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=1)


def match_names(
    script: Mapping[str, Tensor], module: Mapping[str, Tensor], renames: Mapping[str, str]
) -> dict[str, str]:
    """Returns the name of a module's tensor for each name of a script's tensor. First replaces prefixes of the script's
    names, and adds one common prefix to all of them. If the results are not the module's names, matches the tensors by
    their order.

    Args:
        renames: Maps prefixes of the script's names to the prefixes that replace them. The first that fits a name is
            used.

    Raises:
        UsageError: If the numbers or shapes of the tensors differ. The message names the tensors.
    """
    renamed = {}
    for name in script:
        old = next((each for each in renames if name.startswith(each)), "")
        renamed[name] = renames.get(old, "") + name.removeprefix(old)
    names = dict(zip(script, module, strict=False))
    first = next(iter(renamed.values()), "")
    for prefix in (name.removesuffix(first) for name in module if name.endswith(first)):
        if {prefix + new for new in renamed.values()} == {*module}:
            names = {name: prefix + new for name, new in renamed.items()}
    if len(script) == len(module) and all(script[name].shape == module[new].shape for name, new in names.items()):
        return names
    own = [f"{new} {tuple(script[name].shape)}" for name, new in renamed.items()]
    other = [f"{name} {tuple(tensor.shape)}" for name, tensor in module.items()]
    only = [
        ", ".join([each for each in some if each not in others][:3]) or "no other tensor"
        for some, others in ((own, other), (other, own))
    ]
    raise UsageError(
        f"the script's model has {only[0]}, but the module has {only[1]}: use the same model in both, or map prefixes "
        "of names with --rename OLD=NEW"
    )
