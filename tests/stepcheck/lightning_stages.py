"""Trains a module under DDP and under the ZeRO stages on two CPU ranks, and writes by how much the weights differ."""

import json
import sys
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepcheck.lightning.strategy import CPUDeepSpeedStrategy

STEPS = 4


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 5))
        self.weights = self.full_weights()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns an optimizer that shows a wrong scale of the gradients, or in bfloat16 one that counts its steps."""
        if self.trainer.precision == "32-true":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        self.weights = self.full_weights()

    def full_weights(self) -> torch.Tensor:
        """Returns all weights that the optimizer updates."""

        def full(parameter: Any) -> torch.Tensor:
            master = safe_get_full_fp32_param(parameter)
            return (parameter if master is None else master).detach().float().flatten().clone()

        with GatheredParameters([*self.parameters()], enabled=hasattr(self.net[0].weight, "ds_id")):
            return torch.cat([full(each) for each in self.parameters()])


def trained(strategy: Any, precision: Any, accumulate: int) -> torch.Tensor:
    module, generator = Classifier(), torch.Generator().manual_seed(1)
    images = torch.randn(8 * STEPS * accumulate, 12, generator=generator)
    labels = torch.randint(5, (len(images),), generator=generator)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        precision=precision,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        **quiet,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=4))
    assert trainer.global_step == STEPS
    return module.weights


def main() -> None:
    before, errors = Classifier().weights, {}
    stages: dict[str, dict[str, Any]] = {f"ZeRO {stage}": {"stage": stage} for stage in range(4)}
    stages |= {f"ZeRO {stage}, offload": {"stage": stage, "offload_optimizer": True} for stage in (2, 3)}
    for precision, accumulate in (("32-true", 2), ("bf16-mixed", 1)):
        weights: dict[str, torch.Tensor] = {}
        for name, options in stages.items():
            weights[name] = trained(CPUDeepSpeedStrategy(**options), precision, accumulate)
        expected = trained(DDPStrategy(), precision, accumulate)
        for name, actual in weights.items():
            error = (actual - expected).norm() / (expected - before).norm()
            errors[f"{name}, {precision}"] = float(error)
    if torch.distributed.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(errors, file)


if __name__ == "__main__":
    main()
