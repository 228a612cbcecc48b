"""The network's weights out of a checkpoint of any strategy."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import UsageError
from quiet import no_output

TAG = "checkpoint"
"""Folder inside a DeepSpeed checkpoint, as Lightning names it."""

PREFIX = "net."
"""Where the network lies in the LightningModule."""


def load_weights(net: nn.Module, checkpoint: Path) -> None:
    """Puts a checkpoint's weights into a network.

    Args:
        net: of the kind that the checkpoint was written for; its dtype stays.
        checkpoint: Lightning's file, or the folder that DeepSpeed writes, sharded or not.

    Raises:
        UsageError: the checkpoint is damaged or of another network.
    """
    try:
        state = _read_folder(checkpoint) if checkpoint.is_dir() else _read_file(checkpoint)
    except Exception as error:  # torch, pickle and zipfile each have errors of their own for a damaged file
        why = textwrap.shorten(str(error), 120, placeholder=" ...")
        raise UsageError(f"{checkpoint} cannot be read, it is damaged or no checkpoint: {why}") from error
    weights = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        why = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise UsageError(f"{checkpoint} is of another network: {why}") from error


def _read_file(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]


def _read_folder(path: Path) -> dict[str, Any]:
    """ZeRO 1 to 3: the float32 master weights put together from all ranks. Stage 0: the engine's own weights, which
    DeepSpeed's consolidation does not know (DeepSpeed issue 6699)."""
    if list((path / TAG).glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with no_output():
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG) or {})
    states: dict[str, Any] = torch.load(
        path / TAG / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False
    )
    return states["module"]
