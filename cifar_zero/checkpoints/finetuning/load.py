"""Reads the weights that a run starts from, compares them with the model and loads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.read import RECORD, checked, plain_network, read
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.safetensors_file import read_safetensors
from cifar_zero.core.errors import UsageError

FILE = "weights.txt"  # file in the run folder with all that was loaded, initialised and not used
LISTED = 4  # maximum number of names of each kind in a line on the console


@dataclass(frozen=True)
class Match:
    """The weights in a file that fit a model."""

    loaded: dict[str, Tensor]  # by the model's own names
    initialised: list[str]  # names and shapes of what the file lacks, or has in another shape
    unused: list[str]  # names and shapes of what the model lacks, or has in another shape

    def summary(self, run_dir: Path) -> str:
        """Returns a line for the console; if it leaves names out, writes all of them into the run folder."""
        line = f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.initialised)} tensors"
        lines = ["loaded:", *self.loaded]
        for title, names in (("initialised", self.initialised), ("not used", self.unused)):
            lines += [f"{title}:", *names]
            if names:
                line += f"; {title}: {_few(names)}"
        if max(len(self.initialised), len(self.unused)) > LISTED:
            (run_dir / FILE).write_text("\n".join(lines) + "\n")
            line += f"; all names in {run_dir / FILE}"
        return line


def read_plain(file: Path, trust: bool = False) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint of any strategy, a safetensors file or a state_dict, with adapters merged.
    Raises UsageError: it is damaged, of another kind, or would need `trust`."""
    if file.suffix == ".safetensors":
        return read_safetensors(file)[0]
    if file.is_dir():
        return plain_network(read(file, trust))
    content: Any = load(file, trust)
    if isinstance(content, dict):
        if RECORD in content:
            return plain_network(checked(content, file))
        for wrapper in ("state_dict", "model"):  # of Lightning and timm; of torchvision's references and DeiT
            if isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return content
    raise UsageError(f"{file} holds no weights: it must be a checkpoint, a safetensors file or a dict of tensors")


def match(net: nn.Module, weights: Mapping[str, Tensor], file: str) -> Match:
    """Returns the weights that fit the plain model by name and shape. Raises UsageError: none fits."""
    wanted = net.state_dict()
    loaded = {name: value for name, value in weights.items() if name in wanted and value.shape == wanted[name].shape}
    if not loaded:
        has = _few([*weights]) if weights else "nothing"
        raise UsageError(f"--weights {file}: no tensor has a name and shape of the model's ({_few([*wanted])}): {has}")
    return Match(
        loaded,
        [_with_shape(name, value) for name, value in wanted.items() if name not in loaded],
        [_with_shape(name, value) for name, value in weights.items() if name not in loaded],
    )


def load_full_weights(
    net: nn.Module, weights: Mapping[str, Tensor], write: Callable[[Any, Tensor], Any] = Tensor.copy_
) -> None:
    """Loads weights into a model of which each rank may have only its share; the rest stays. All ranks call it. `write`
    overwrites a parameter, which the strategy may have sharded, with a whole tensor."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if name in weights:
            with torch.no_grad():
                write(tensor, weights[name])


def _with_shape(name: str, tensor: Tensor) -> str:
    return f"{name} ({'x'.join(map(str, tensor.shape)) or 'scalar'})"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
