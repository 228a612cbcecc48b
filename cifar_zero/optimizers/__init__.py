"""Defines the registry of optimizers. Each entry is a dataclass. Its fields are the `--optimizer.<option>` flags, and
its method `build` makes the optimizer in the implementation that the strategy chooses. Importing the registry imports
neither torch nor DeepSpeed."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cifar_zero.core.usage import Options, limited

Implementation = Literal["torch", "torch_fused", "deepspeed_cpu"]
"""The code that updates the weights, which the strategy chooses. `torch` is torch's own optimizer. `torch_fused` is
torch's update of all parameters in one call on CUDA, which accepts no DTensors of several meshes. `deepspeed_cpu` is
DeepSpeed's code for an optimizer that is offloaded to the CPU."""


@dataclass
class OptimizerOptions(Options):
    """The options that every optimizer has."""

    lr: float = 0.001
    """Learning rate."""

    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """Parameters that decay. matrices: weights of two and more dimensions, without biases and norms. all: all
    parameters."""

    moments: ClassVar[int] = 0  # numbers kept per element of a parameter, without those of `momentum` and `centered`

    temporaries: ClassVar[int] = 1
    """Temporary numbers that torch's update allocates per element of a parameter if it updates all parameters together
    in several calls, as it does on CUDA unless it is fused."""

    loops_on_cpu: ClassVar[bool] = True
    """Whether the update goes through the parameters one by one on the CPU, so that its temporary tensors are small."""

    shardable: ClassVar[bool] = True
    """Whether strategies that flatten, shard or split the parameters can use the optimizer. If not, the update needs
    each parameter as a full tensor."""

    compiled: ClassVar[bool] = False  # whether DeepSpeed's C++ updates the weights if the optimizer is offloaded

    fused: ClassVar[bool] = False  # whether torch can update all parameters in one call

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        """Returns the optimizer of `parameters`, which may be parameter groups. It is an instance of the class
        Torch<name> in `torch_updates` if there is one, or else of torch's class of the same name. Subclasses override
        this method to use DeepSpeed's implementation or to pass other options."""
        import torch

        from cifar_zero.optimizers import torch_updates

        name = type(self).__name__
        kind = getattr(torch_updates, f"Torch{name}", None) or getattr(torch.optim, name)
        options = self.torch_options()
        if self.fused and implementation == "torch_fused":
            options["fused"] = True
        return kind(parameters, **options)

    def torch_options(self) -> dict[str, Any]:
        """Returns the fields in the form that torch's optimizers expect. `weight_decay_on` is left out, because it acts
        through the parameter groups."""
        options = {**vars(self)}
        del options["weight_decay_on"]
        if "betas" in options:
            options["betas"] = tuple(options["betas"])  # a list in a recipe
        return options


@dataclass
class SGD(OptimizerOptions):
    """stochastic gradient descent with momentum"""

    momentum: float = limited(0.9, below=1)
    """Share of the last update that is kept."""

    nesterov: bool = False
    """Use Nesterov's form of momentum."""

    fused = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")


@dataclass
class Adam(OptimizerOptions):
    """Adam with the L2 penalty added to the gradient (Kingma and Ba 2015)"""

    betas: tuple[float, float] = limited((0.9, 0.999), below=1)
    """Decay of the running means of the gradient and of its square."""

    eps: float = 1e-8
    """Added to the denominator."""

    moments = 2
    compiled = True
    fused = True

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        if implementation == "deepspeed_cpu":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            # By default DeepSpeed's class decouples the weight decay, so that its Adam is AdamW.
            return DeepSpeedCPUAdam(parameters, adamw_mode=isinstance(self, AdamW), **self.torch_options())
        return super().build(parameters, implementation)


@dataclass
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)"""

    weight_decay: float = 0.01
    """Weight decay, subtracted from the weights in addition to the gradient's update."""


@dataclass
class RMSprop(OptimizerOptions):
    """RMSprop: steps divided by a running mean of the gradient's size (Tieleman and Hinton 2012)"""

    lr: float = 0.01
    """Learning rate."""

    alpha: float = limited(0.99, below=1)
    """Decay of the running mean of the squared gradient."""

    eps: float = 1e-8
    """Added to the denominator."""

    momentum: float = limited(0.0, below=1)
    """Share of the last update that is kept."""

    centered: bool = False
    """Divide by the gradient's running standard deviation, not by its size (Graves 2013)."""

    moments = 1


@dataclass
class Adagrad(OptimizerOptions):
    """Adagrad: steps divided by the size of all gradients so far (Duchi et al. 2011)"""

    lr: float = 0.01
    """Learning rate."""

    eps: float = 1e-10
    """Added to the denominator."""

    moments = 1
    temporaries = 2


@dataclass
class Adadelta(OptimizerOptions):
    """Adadelta: steps scaled by the size of earlier updates (Zeiler 2012)"""

    lr: float = 1.0
    """Factor of the update, whose size Adadelta computes itself."""

    rho: float = limited(0.9, below=1)
    """Decay of the running means of the squared gradient and update."""

    eps: float = 1e-6
    """Added to the running means of the squares; the first updates grow from it."""

    moments = 2
    temporaries = 2


@dataclass
class Lion(OptimizerOptions):
    """Lion: steps of one size, in the direction of the momentum's signs (Chen et al. 2023)"""

    lr: float = 1e-4
    """Learning rate; typically a third to a tenth of AdamW's learning rate."""

    weight_decay: float = 0.0
    """Weight decay, subtracted from the weights in addition to the update; typically three to ten times AdamW's weight
    decay."""

    betas: tuple[float, float] = limited((0.9, 0.99), below=1)
    """Share of the momentum in the update's direction, and decay of the momentum itself."""

    moments = 1
    loops_on_cpu = False


@dataclass
class Muon(OptimizerOptions):
    """Muon: hidden weight matrices by orthogonalised momentum (Jordan et al. 2024), all else by AdamW"""

    lr: float = 0.001
    """Learning rate of Muon and of AdamW; Muon's steps are scaled to the size of AdamW's steps (Liu et al. 2025)."""

    weight_decay: float = 0.01
    """Weight decay, subtracted from the weights in addition to the update."""

    momentum: float = limited(0.95, below=1)
    """Decay of the running mean of the gradient, in Nesterov's form."""

    ns_steps: int = limited(5, at_least=1, below=100)  # torch.optim.Muon's limit
    """Newton-Schulz iterations that orthogonalise a matrix."""

    betas: tuple[float, float] = limited((0.9, 0.999), below=1)
    """Decay of AdamW's running means of the gradient and of its square."""

    temporaries = 3  # measured with vit_tiny and vit_large; it stacks weights of one shape
    loops_on_cpu = False
    shardable = False


@dataclass
class MuonSGD(OptimizerOptions):
    """Muon for filters and matrices, SGD for biases and the last layer, each with its rate (airbench94, Jordan 2024)"""

    lr: float = 0.24
    """Learning rate of Muon: length of a step, where each filter has length 1 on average."""

    weight_decay: float = 0.0
    """Weight decay of SGD. Its L2 penalty is this value divided by the parameter group's initial learning rate, so that
    other learning rates do not change the decay. Muon's weights do not decay."""

    momentum: float = limited(0.6, below=1)
    """Muon's momentum, in Nesterov's form: share of the sum of gradients that is kept."""

    ns_steps: int = limited(3, at_least=1, below=100)  # torch.optim.Muon's limit
    """Newton-Schulz iterations that orthogonalise Muon's steps. Before each step Muon's weights are scaled to the
    length sqrt(filters), so that --optimizer.lr is an angle."""

    bias_lr: float = 100.0
    """Learning rate of SGD for biases, norms and embeddings, with respect to the mean loss of a batch. The speed
    records use 0.053 with the sum of the losses, which is 106 with the mean of 2,000 images, and less with fewer
    images."""

    head_lr: float = 1000.0
    """Learning rate of SGD for the weights of the last layer, with respect to the mean loss of a batch."""

    sgd_momentum: float = limited(0.85, below=1)
    """SGD's momentum, in Nesterov's form."""

    temporaries = 3  # measured with vit_tiny and vit_large; it stacks weights of one shape
    loops_on_cpu = False
    shardable = False

    def build(self, parameters: Any, implementation: Implementation) -> Any:
        from cifar_zero.optimizers.torch_updates import TorchMuon

        options = self.torch_options()
        for name in ("bias_lr", "head_lr", "weight_decay"):
            del options[name]
        fused = implementation == "torch_fused"
        return TorchMuon(parameters, fused=fused, weight_decay=0.0, **options)


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
}
