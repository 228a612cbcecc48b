"""Trains a small model in DeepSpeed's own loop. `engine.save_checkpoint` saves it once for each name in CASES."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CASES: dict[str, dict[str, Any]] = {
    "stage_0": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    "stage_1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "stage_1_fp32_gradients": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
    "stage_2": {"zero_optimization": {"stage": 2}},
    "stage_2_aligned": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
    },
    "stage_3": {"zero_optimization": {"stage": 3}},
    "stage_3_sub_groups": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "sub_group_size": 40}},
}
"""DeepSpeed's configuration for each checkpoint, by the checkpoint's name."""


class Tied(nn.Module):
    """A model in which a parameter and a module have two names each, with frozen parameters and buffers. Two ranks do
    not divide its sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.first = self.again = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(3, 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("offset", torch.tensor(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns a scalar loss of tokens, int64 (N,)."""
        hidden = self.again(self.first(self.frozen(self.embed(tokens))))
        return self.head(hidden).float().square().mean() + self.scale.float().square().sum()


def save_all(folder: str) -> None:
    """Writes all checkpoints, as one of the ranks of `helpers.on_ranks`."""
    import deepspeed

    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts and returns
    for name, config in CASES.items():
        net = Tied()
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.shape[-1] > 1]
        columns = [parameter for parameter in trained if parameter.shape[-1] == 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": columns, "weight_decay": 0.0}], lr=0.1)
        own = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
        engine, *_ = initialize(model=net, optimizer=optimizer, config={**own, **config})
        for step in range(2):
            engine.backward(engine(torch.arange(step, step + 4)))
            engine.step()
        engine.save_checkpoint(f"{folder}/{name}", client_state={"epoch": 1})
        engine.destroy()
