"""The weights that a run starts from: read from any file, compared with the network, put into it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.read import RECORD, read
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.safetensors_file import read_safetensors
from cifar_zero.checkpoints.weights import plain_network
from cifar_zero.core.errors import UsageError
from cifar_zero.models.moe import whole_names

BASE = "base"
"""Key of a delta's metadata, see checkpoints/finetuning/delta.py."""

FILE = "weights.txt"
"""In the run folder: all that was loaded, initialised and not used."""

LISTED = 4
"""Names of a kind that a line on the console shows."""

WRAPPERS = ("state_dict", "model")
"""Where the weights lie in files that hold more: Lightning's and timm's; those of torchvision's references and DeiT."""


@dataclass(frozen=True)
class Match:
    """What a file has for a network."""

    loaded: dict[str, Tensor]
    """By the network's own names."""

    initialised: list[str]
    """Names and shapes of what the file does not have, or has in another shape."""

    unused: list[str]
    """Names and shapes of what the network does not have so."""

    def summary(self, run_dir: Path) -> str:
        """A line for the console; the run folder gets a list of all names where the line leaves some out."""
        parts = [f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.initialised)} tensors"]
        parts += [f"initialised: {_few(self.initialised)}"] if self.initialised else []
        parts += [f"not used: {_few(self.unused)}"] if self.unused else []
        if max(len(self.initialised), len(self.unused)) > LISTED:
            lists = {"loaded": self.loaded, "initialised": self.initialised, "not used": self.unused}
            text = "".join(f"{title}:\n" + "".join(f"  {name}\n" for name in names) for title, names in lists.items())
            (run_dir / FILE).write_text(text)
            parts.append(f"all names in {run_dir / FILE}")
        return "; ".join(parts)


def read_plain(file: Path, trust: bool = False) -> dict[str, Tensor]:
    """The weights in a checkpoint of any strategy, a safetensors file or a state_dict, by the plain network's names:
    adapters are merged.

    Args:
        file: or the folder that DeepSpeed writes.
        trust: see `checkpointing.safe_load.load`.

    Raises:
        UsageError: it is damaged, of another kind, or would need `trust`.
    """
    if file.is_dir():
        return plain_network(read(file, trust))
    if file.suffix == ".safetensors":
        weights, metadata = read_safetensors(file)
        if BASE in metadata:
            raise UsageError(f"{file} holds only what was trained: --weights BASE --delta {file}")
        return weights
    content: Any = load(file, trust)
    if isinstance(content, dict) and RECORD in content:
        return plain_network(content)
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise UsageError(f"{file} holds no weights: it must be a checkpoint, a safetensors file or a dict of tensors")
    return content


def match(net: nn.Module, weights: Mapping[str, Tensor], file: str) -> Match:
    """What of the weights fits, by name and shape.

    Args:
        net: the plain network; one on torch's meta device will do.
        weights: as `read_plain` gives them.
        file: that they come from, for the message.

    Raises:
        UsageError: nothing does.
    """
    wanted = net.state_dict()
    loaded = {
        name: weights[name] for name, own in wanted.items() if name in weights and weights[name].shape == own.shape
    }
    if not loaded:
        theirs = _few([*weights]) if weights else "nothing"
        raise UsageError(
            f"--weights {file}: no tensor has a name and shape of the network's ({_few([*wanted])}): {theirs}"
        )
    return Match(
        loaded,
        [_with_shape(name, value) for name, value in wanted.items() if name not in loaded],
        [_with_shape(name, value) for name, value in weights.items() if name not in loaded],
    )


def put(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights into a network in which each rank may have its share alone, of the experts or of each parameter; all
    ranks call it. What the weights do not have stays."""
    whole = whole_names(net)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if whole[name] in weights:
            with torch.no_grad(), _gathered(tensor):
                tensor.copy_(weights[whole[name]])


def _gathered(tensor: Any) -> AbstractContextManager[Any]:
    """Within it a parameter that ZeRO-3 has sharded is whole; what rank 0 writes is sharded again."""
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor], modifier_rank=0)


def _with_shape(name: str, tensor: Tensor) -> str:
    return f"{name} ({'x'.join(map(str, tensor.shape)) or 'scalar'})"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
