"""Computes chosen steps again on a plain copy of the module, and so judges what the audit takes for granted: the loss,
the gradients and the buffers that the forward and backward passes of the training compute."""

from stepcheck.replay.replay import Replay

__all__ = ["Replay"]
