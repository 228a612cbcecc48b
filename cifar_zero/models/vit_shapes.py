"""The sizes of the vision transformers; plain Python, for the command line."""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass
from typing import Literal

Size = Literal["tiny", "small", "base", "large", "1b", "13b"]


@dataclass(frozen=True)
class Shape:
    """Of a transformer: width of a token, blocks, attention heads."""

    width: int
    depth: int
    heads: int


SHAPES: dict[Size, Shape] = {
    # DeiT (Touvron et al. 2021)
    "tiny": Shape(192, 12, 3),
    "small": Shape(384, 12, 6),
    # ViT (Dosovitskiy et al. 2021)
    "base": Shape(768, 12, 12),
    "large": Shape(1024, 24, 16),
    # The widths of GPT-3 XL and GPT-3 13B (Brown et al. 2020), and the depth that makes 1.3 and 13 billion of them.
    "1b": Shape(2048, 26, 16),
    "13b": Shape(5120, 41, 40),
}
