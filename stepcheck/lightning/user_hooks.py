"""Finds the hooks in which a user's code may change gradients."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

LIBRARIES = {"lightning", "pytorch_lightning", "torch", "stepcheck"}


def hooks_on_gradients(trainer: Trainer, module: LightningModule) -> list[str]:
    """Returns the names of the user's hooks between the backward pass and the optimizer's step, with their classes. A
    callback or module whose attribute `keeps_gradients` is true changes none."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for owner in (each for each in (*callbacks, module) if not getattr(each, "keeps_gradients", False)):
        for name in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"):
            hook = getattr(owner, name, None)
            package = (getattr(hook, "__module__", None) or "").partition(".")[0]
            if hook is not None and package not in LIBRARIES:
                found.append(f"{name} of {type(owner).__name__}")
    return found
