"""A plain vision transformer for small images (Dosovitskiy et al. 2021; mean pooling as Beyer et al. 2022)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.models import LAYOUTS, PATCH_SIDE, Layout, ViTMoE
from cifar_zero.models.moe import MixtureOfExperts

MLP_RATIO = 4  # width of an MLP's hidden layer, as a multiple of the tokens'


class ViT(nn.Module):
    """Patches -> tokens -> blocks of attention and MLP -> mean over the tokens -> class scores.

    `make_mlp` builds the MLP of a block, (N, tokens, width) -> (N, tokens, width), from the number of the block.
    Dropout is that of Vaswani et al. 2017, section 5.4.
    """

    def __init__(
        self, layout: Layout, num_classes: int, make_mlp: Callable[[int], nn.Module] | None = None, dropout: float = 0.0
    ):
        super().__init__()
        make_mlp = make_mlp or (lambda block: MLP(layout.width))
        self.patches = nn.Conv2d(3, layout.width, PATCH_SIDE, stride=PATCH_SIDE)
        self.positions = nn.Parameter(0.02 * torch.randn(ViTMoE.tokens_per_image, layout.width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(layout, make_mlp(number), dropout) for number in range(layout.depth)))
        self.norm = nn.LayerNorm(layout.width)
        self.head = nn.Linear(layout.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (N, num_classes) of images (N, 3, 32, 32) in [-1, 1]."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # (N, 64, width)
        x = self.blocks(self.dropout(x + self.positions))
        return self.head(self.norm(x).mean(dim=1))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection; tokens (N, tokens, width) in and out."""

    def __init__(self, layout: Layout, mlp: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(layout.width)
        self.attention = Attention(layout.width, layout.heads)
        self.norm2 = nn.LayerNorm(layout.width)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Multi-head self-attention; tokens (N, tokens, width) in and out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (N, heads, tokens, d)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    """Two linear layers around a GELU; (..., width) in and out."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(width, MLP_RATIO * width), nn.GELU(), nn.Linear(MLP_RATIO * width, width))


def vit_moe(num_classes: int, options: ViTMoE) -> ViT:
    """Returns a transformer whose every second MLP is a mixture of MLPs (GShard; V-MoE, Riquelme et al. 2021)."""
    layout = LAYOUTS[options.size]

    def make_mlp(block: int) -> nn.Module:
        if block % 2 == 0:
            return MLP(layout.width)
        num_experts = options.num_experts[block // 2 % len(options.num_experts)]
        return MixtureOfExperts(layout.width, num_experts, lambda: MLP(layout.width), options)

    return ViT(layout, num_classes, make_mlp)
