"""Describes the recorded steps of a script. Does not import torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORDING = "recording"
"""Directory of the recorded steps, in the comparison's folder."""


@dataclass
class Recording:
    """Describes the recorded steps of a script in plain data."""

    model: str = ""  # name of the class of the script's model
    steps: int = 0  # recorded optimizer steps
    accumulate: int = 1  # micro-batches per step
    batch_size: int = 1  # samples per micro-batch
    precision: str = "32-true"  # Lightning's name of autocast's precision
    draws: bool = False  # whether a forward pass drew random numbers, as dropout does
    gradient_clip_val: float = 0.0  # max_norm of the script's call of clip_grad_norm_, or 0 without a call
    renames: dict[str, str] = field(default_factory=dict)  # maps old prefixes of weight names to new prefixes
    own_data: bool = False  # the module trains on its own loader

    def write(self, folder: Path) -> None:
        """Writes the description into `folder`, next to the recorded steps."""
        (folder / "recording.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> "Recording":
        """Returns the description that `write` has written into `folder`."""
        return Recording(**json.loads((folder / "recording.json").read_text()))
