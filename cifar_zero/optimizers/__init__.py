"""The registry of optimizers: each a dataclass whose fields are the `--optimizer.<option>` flags.

Which implementation runs is the strategy's to say: torch's own, DeepSpeed's on the CPU where the optimizer is
offloaded, or DeepSpeed's fused Adam on CUDA. Reading the registry imports neither torch nor DeepSpeed.
"""

from cifar_zero.optimizers.adam import Adam, Adam8bit, AdamW
from cifar_zero.optimizers.adaptive import Adadelta, Adagrad, RMSprop
from cifar_zero.optimizers.lion import Lion
from cifar_zero.optimizers.muon import Muon, MuonSGD
from cifar_zero.optimizers.options import Implementation
from cifar_zero.optimizers.sgd import SGD

__all__ = ["BY_DEEPSPEED", "OFFLOADED_BY", "OPTIMIZERS", "Implementation", "OptimizerOptions"]

OptimizerOptions = SGD | Adam | RMSprop | Adagrad | Adadelta | Lion | Muon | MuonSGD

OPTIMIZERS: dict[str, type[OptimizerOptions]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "lion": Lion,
    "muon": Muon,
    "muon_sgd": MuonSGD,
    "adam8bit": Adam8bit,
}

BY_DEEPSPEED = "DeepSpeed's C++"

OFFLOADED_BY = {
    "sgd": "torch",
    "adam": BY_DEEPSPEED,
    "adamw": BY_DEEPSPEED,
    "rmsprop": "torch",
    "adagrad": "torch",
    "adadelta": "torch",
    "lion": "torch",
}
"""Whose code updates on the CPU where a strategy offloads the optimizer. The others need whole tensors: no ZeRO stage
from 1 on, which lays them end to end and cuts them, can run them."""
