"""Defines a plain vision transformer for small images (Dosovitskiy et al. 2021), with mean pooling as in Beyer et al.
2022."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.models import PATCH_SIDE
from cifar_zero.models.moe import MixtureOfExperts

MLP_RATIO = 4  # width of an MLP's hidden layer, as a multiple of the tokens' width


class ViT(nn.Module):
    """A vision transformer: patches -> tokens -> blocks of attention and MLP -> mean over the tokens -> class scores.

    With options of the class ViTMoE, every second MLP is a mixture of MLPs (GShard; V-MoE, Riquelme et al. 2021).
    Dropout follows Vaswani et al. 2017, section 5.4.
    """

    def __init__(self, num_classes: int, options: models.ViT | models.ViTMoE):
        super().__init__()
        width, depth, heads = options.layout
        self.patches = nn.Conv2d(3, width, PATCH_SIDE, stride=PATCH_SIDE)
        self.positions = nn.Parameter(0.02 * torch.randn(options.tokens_per_image, width))
        self.dropout = nn.Dropout(options.dropout)
        blocks: list[nn.Module] = []
        for number in range(depth):
            if isinstance(options, models.ViTMoE) and number % 2:
                experts = options.num_experts[number // 2 % len(options.num_experts)]
                mlp = MixtureOfExperts(width, experts, lambda: MLP(width), options)
            else:
                mlp = MLP(width)
            blocks.append(Block(width, heads, mlp, options.dropout))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns class scores (N, num_classes) for images (N, 3, 32, 32) in [-1, 1]."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # (N, 64, width)
        x = self.blocks(self.dropout(x + self.positions))
        return self.head(self.norm(x).mean(dim=1))


class Block(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection. Maps tokens (N, tokens, width) to the
    same shape."""

    def __init__(self, width: int, heads: int, mlp: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Multi-head self-attention. Maps tokens (N, tokens, width) to the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (N, heads, tokens, d)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them. Maps (..., width) to the same shape."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(width, MLP_RATIO * width), nn.GELU(), nn.Linear(MLP_RATIO * width, width))
