"""The parameters of a run's model, read from a model without values (torch's meta device)."""

from dataclasses import dataclass

from cifar_zero.config.run import Run
from cifar_zero.planning.model_states import Weight


@dataclass(frozen=True)
class Network:
    """What the formulas need to know about a model."""

    weights: tuple[Weight, ...]
    largest_block: int
    """Elements of the largest block that fsdp2 shards; all elements if there are no blocks, 0 if unknown."""

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(weight.elements for weight in self.weights)

    @property
    def trained(self) -> int:
        """Elements that are not frozen."""
        return sum(weight.elements for weight in self.weights if weight.trained)


def of(run: Run) -> Network:
    """Returns the model of a run, with its adapters and frozen weights.

    Raises:
        UsageError: --lora.target or --trainable matches nothing in the model.
    """
    from cifar_zero.checkpoints.finetuning.network import check_patterns, on_meta
    from cifar_zero.models.moe import MixtureOfExperts
    from cifar_zero.optimizers.groups import hidden_matrices

    config = run.config
    net = on_meta(config.model, run.num_classes, config.trainable, config.lora)
    ep_size = config.model.options.get("ep_size", 1)
    check_patterns(net, config.trainable, ep_size)
    mixtures = [module for module in net.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(parameter) for mixture in mixtures for parameter in mixture.experts.parameters()}
    by_muon = hidden_matrices({name: parameter.dim() for name, parameter in net.named_parameters()})
    weights = tuple(
        Weight(
            parameter.numel(),
            len(parameter) if parameter.dim() else 1,
            parameter.requires_grad,
            muon=name in by_muon,
            ranks_that_share=ep_size if id(parameter) in experts else 1,
        )
        for name, parameter in net.named_parameters()
    )
    total = sum(weight.elements for weight in weights)
    children = getattr(net, "blocks", net).children() if hasattr(net, "blocks") else ()
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in children]
    return Network(weights, max(blocks, default=total))


def of_size(parameters: int) -> Network:
    """Returns a model of which only the number of parameters is known: one weight, blocks unknown."""
    return Network((Weight(parameters, parameters),), 0)
