"""Reads, compares and loads the weights of a model. Also writes and applies deltas: safetensors files with only the
weights that a run has trained, which need the weights that the run started from."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cifar_zero.build_model import create_meta_model, merged, trained_names
from cifar_zero.checkpoints.read import RECORD, of_another_version, read, with_checked_record
from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.checkpoints.zero_folder import AVERAGE
from cifar_zero.config.recipe import DataConfig
from cifar_zero.config.settings import settings_of
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.errors import UsageError, short

PREFIX = "net."  # prefix of the model's names in the LightningModule

BASE, DTYPES, RECIPE = "base", "base_dtypes", "recipe"
"""Additional keys of a delta's metadata. BASE is the `checksum` of the frozen tensors. DTYPES is a JSON object with the
dtype of each of them in the run, because DeepSpeed's mixed precision rounds them. RECIPE is a JSON object with the
run's configuration."""

FILE = "weights.txt"  # file in the run folder with all names that were loaded, initialised or not used
LISTED = 4  # maximum number of names of each kind in a line on the console


def net_weights(checkpoint: Mapping[str, Any], averaged: bool = True) -> dict[str, Tensor]:
    """Returns the model's weights in a checkpoint, keyed by the model's own names, without PREFIX. If `averaged` is
    set, each weight that has an average in the checkpoint is replaced by its average."""
    average = checkpoint[AVERAGE]["weights"] if averaged and AVERAGE in checkpoint else {}
    state = checkpoint["state_dict"]
    return {key.removeprefix(PREFIX): average.get(key, value) for key, value in state.items() if key.startswith(PREFIX)}


def merged_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of `net_weights` with LoRA adapters merged into them, for a model without adapters."""
    lora = checkpoint.get(RECORD, {}).get("config", {}).get("lora", {})
    return merged(net_weights(checkpoint), lora.get("alpha", 0.0))


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Loads weights into a model. If both are on torch's meta device, only compares names and shapes. Raises
    UsageError, which names `checkpoint`, if weights are missing, unknown or of another shape than in the model."""
    try:
        net.load_state_dict(dict(weights))
    except RuntimeError as error:
        differing = short(str(error).partition(":")[2], 160)  # torch (2.15) names the class before the colon
        raise UsageError(f"{checkpoint} comes from another model: {differing}") from error


def metadata_of(checkpoint: Mapping[str, Any], name: str) -> dict[str, str]:
    """Returns the metadata of an exported file. All values are strings, because safetensors allows no others. Raises
    UsageError if cifar-zero train did not write the checkpoint.

    `model`, `options` (JSON object) and `classes` (JSON list) are needed to build the model. `image_size` is in pixels.
    `mean` and `std` normalise images with pixels from 0 to 1. Each is one number, or three for red, green and blue with
    commas between them. `dtype` is the dtype of the weights in the file. `checkpoint` and `step` are their origin.
    transformers and other programs require `format`.
    """
    if RECORD not in checkpoint:
        raise UsageError(f"{name} does not name its model, because cifar-zero train did not write it")
    record = checkpoint[RECORD]
    side, mean, std = DataConfig(**record["config"]["data"]).inputs
    return {
        "format": "pt",
        "model": record["config"]["model"]["name"],
        "options": json.dumps(record["config"]["model"]["options"]),
        "classes": json.dumps(record["classes"]),
        "image_size": str(side),
        "mean": ",".join(map(str, mean)),
        "std": ",".join(map(str, std)),
        "dtype": "float32",
        "checkpoint": name,
        "step": str(checkpoint["global_step"]),
    }


def encode(weights: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Returns the bytes of a safetensors file. Weights that share memory are written once for each name."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return safetensors.torch.save(plain, metadata)


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the weights in a safetensors file, on the CPU, and its metadata, which may be empty. Raises UsageError if
    the file is missing or damaged."""
    if not file.is_file():
        raise UsageError(f"{file} {'is not a file' if file.exists() else 'does not exist'}")
    try:
        with safe_open(file, "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read, because it is damaged or not a safetensors file: {error}") from error


@dataclass(frozen=True)
class Match:
    """The weights in a file that fit a model, and the names of the other tensors of the model and of the file."""

    loaded: dict[str, Tensor]  # by the model's own names
    initialised: list[str]  # names and shapes of tensors that the file lacks or has in another shape
    unused: list[str]  # names and shapes of tensors that the model lacks, or has in another shape

    def summary(self, run_dir: Path) -> str:
        """Returns a line for the console. If the line leaves names out, writes all names to FILE in the run folder."""
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
    """Returns the weights of a checkpoint of any strategy, a safetensors file or a file with a state_dict, on the CPU.
    A checkpoint of this program gives its averaged weights, if it has them, with adapters merged. Raises UsageError if
    the file is damaged, a delta or of another kind, or would need `trust`."""
    if file.suffix == ".safetensors":
        return read_full_safetensors(file)[0]
    if file.is_dir():
        return merged_weights(read(file, trust))
    content: Any = load_safely(file, trust)
    if isinstance(content, dict):
        if RECORD in content:
            return merged_weights(with_checked_record(content, file))
        for wrapper in ("state_dict", "model"):  # keys of Lightning and timm, and of torchvision's references and DeiT
            if isinstance(content.get(wrapper), dict):
                content = content[wrapper]
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return content
    raise UsageError(f"{file} contains no weights: it must be a checkpoint, a safetensors file or a dict of tensors")


def read_full_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Like `read_safetensors`, but also raises UsageError if the file is a delta."""
    weights, metadata = read_safetensors(file)
    if BASE in metadata:
        how = f"merge it with its base: cifar-zero export BASE --delta {file} --to safetensors"
        raise UsageError(f"{file} contains only the trained weights: {how}")
    return weights, metadata


def match(net: nn.Module, weights: Mapping[str, Tensor], file: str) -> Match:
    """Compares weights with the tensors of `net`. Raises UsageError, which names `file`, if none has a fitting name and
    shape."""
    expected = net.state_dict()
    loaded = {
        name: value for name, value in weights.items() if name in expected and value.shape == expected[name].shape
    }
    if not loaded:
        has = _few([*weights]) if weights else "nothing"
        raise UsageError(
            f"--weights {file}: no tensor has a name and shape of the model ({_few([*expected])}); the file has {has}"
        )
    return Match(
        loaded,
        [_with_shape(name, value) for name, value in expected.items() if name not in loaded],
        [_with_shape(name, value) for name, value in weights.items() if name not in loaded],
    )


def load_full_weights(net: nn.Module, weights: Mapping[str, Tensor], write: Callable[[Any, Tensor], Any]) -> None:
    """Loads full tensors, keyed by the model's own names, into a model whose tensors may be sharded. `weights` may lack
    tensors of the model. `write` overwrites a parameter or buffer with a full tensor. Every rank must call this
    function."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if name in weights:
            write(tensor, weights[name])


def _with_shape(name: str, tensor: Tensor) -> str:
    return f"{name} ({'x'.join(map(str, tensor.shape)) or 'scalar'})"


def _few(names: list[str]) -> str:
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return listed


def read_with_delta(checkpoint: Path, delta: str, trust: bool) -> dict[str, Any]:
    """Reads a checkpoint and applies the delta in the file `delta`, unless this path is empty. The run that trained the
    delta must have started from `checkpoint`."""
    if delta:
        return apply_delta(checkpoint, Path(delta), trust)
    return read(checkpoint, trust)


def write_delta(checkpoint: Mapping[str, Any], output: Path, name: str) -> list[str]:
    """Writes a delta with the weights that the checkpoint's run trained, averaged if the checkpoint has averages, and
    returns their names. Raises UsageError, which names the checkpoint as `name`, if the run froze nothing, or
    cifar-zero train did not write the checkpoint."""
    metadata = metadata_of(checkpoint, name)
    record = checkpoint[RECORD]
    recipe = settings_of(record["config"]).recipe
    trained = trained_names(create_meta_model(recipe, len(record["classes"])))
    weights = net_weights(checkpoint)
    base = {key: value for key, value in weights.items() if key not in trained}
    if not base:
        raise UsageError(f"--to delta: the run of {name} trained all weights: use --to safetensors")
    metadata |= {
        BASE: checksum(base),
        DTYPES: json.dumps({key: str(value.dtype).removeprefix("torch.") for key, value in base.items()}),
        RECIPE: json.dumps(record["config"]),
    }
    own = {key: value for key, value in weights.items() if key in trained}
    atomic.write(output, encode(own, metadata))
    return [*own]


def apply_delta(base: Path, delta: Path, trust: bool = False) -> dict[str, Any]:
    """Reconstructs, bit for bit, the weights that were stored as a delta of `base`, the file from which the run
    started. Returns them in the form of `read.read`, without what is needed to resume. Raises UsageError if a file is
    damaged, if `base` would need `trust`, or if the files do not belong together."""
    trained, metadata = read_safetensors(delta)
    if BASE not in metadata:
        raise UsageError(f"--delta {delta} was not written by cifar-zero export --to delta")
    try:
        said = {key: plain_data.parse_json(metadata[key], key) for key in (DTYPES, RECIPE, "classes")}
        dtypes = {name: getattr(torch, dtype) for name, dtype in said[DTYPES].items()}
        if not all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
            raise TypeError(f"{DTYPES} has another name than those of dtypes")
        record = {"config": said[RECIPE], "classes": said["classes"]}
        step = int(metadata["step"])
    except (AttributeError, KeyError, TypeError, UsageError, ValueError) as error:
        raise of_another_version(f"--delta {delta}", error) from error
    weights = read_plain(base, trust)
    missing = [name for name in dtypes if name not in weights]
    if missing:
        raise UsageError(f"--delta {delta} does not belong to {base}, which lacks {missing[0]}")
    frozen = {name: weights[name].to(dtype) for name, dtype in dtypes.items()}
    if checksum(frozen) != metadata[BASE]:
        raise UsageError(f"--delta {delta} does not belong to {base}, because the checksums of their weights differ")
    state = {PREFIX + name: value for name, value in {**frozen, **trained}.items()}
    return with_checked_record({"state_dict": state, "global_step": step, RECORD: record}, f"--delta {delta}")


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the names, dtypes, shapes and values of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
