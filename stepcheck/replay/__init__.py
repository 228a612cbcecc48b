"""Computes chosen steps again on a plain copy of the module. This checks what the audit trusts: the losses, gradients
and buffers that the forward and backward passes of the training compute."""

from stepcheck.replay.replay import Replay

__all__ = ["Replay"]
