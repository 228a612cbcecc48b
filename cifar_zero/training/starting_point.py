"""The starting point of a run: a checkpoint to resume, or weights to fine-tune; checked before the run is built."""

from pathlib import Path

from cifar_zero.checkpoints.finetuning.delta import together
from cifar_zero.checkpoints.finetuning.load import Match, match, read_plain
from cifar_zero.checkpoints.finetuning.network import check_patterns, on_meta
from cifar_zero.checkpoints.read import RECORD, check_fits, network, plain_network, read
from cifar_zero.checkpoints.resume import check_same_run, source_of
from cifar_zero.config.flags import SourceName
from cifar_zero.config.run import Run
from cifar_zero.launch.collectives import by_rank_0


def check_resume(run: Run) -> SourceName | None:
    """Refuses a checkpoint that cannot be resumed. Every rank must call it.

    Only rank 0 reads: it compares the checksums, and reads names and shapes without the tensors' values.

    Returns:
        The source of the checkpoint's images; None for a run that begins.

    Raises:
        UsageError: it is damaged, of another model or other images, or cannot be trusted.
    """
    config = run.config

    def source() -> SourceName | None:
        model = on_meta(config.model, run.num_classes, config.trainable, config.lora)
        checkpoint = read(Path(config.resume), run.consent.trust, device="meta")
        check_fits(model, network(checkpoint), config.resume)
        if RECORD in checkpoint:
            check_same_run(config, checkpoint[RECORD]["config"])
            return source_of(config, checkpoint[RECORD])
        return None

    return by_rank_0(source) if config.resume else None


def pretrained_weights(run: Run) -> Match | None:
    """Returns the weights to start from; None for fresh ones or a resumed run.

    Raises:
        UsageError: they are damaged or of another model, or --trainable or --lora.target names nothing.
    """
    config = run.config
    model = on_meta(config.model, run.num_classes, config.trainable, config.lora)
    check_patterns(model, config.trainable, config.model.options.get("ep_size", 1))
    if not config.weights or config.resume:
        return None
    file = Path(config.weights)
    if config.delta:
        weights = plain_network(together(file, Path(config.delta), run.consent.trust))
    else:
        weights = read_plain(file, run.consent.trust)
    return match(on_meta(config.model, run.num_classes), weights, config.weights)
