"""Trains a module on the batches that a script was trained on, and compares them with the module's own batches."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from stepcheck.replay.random_state import set_random_state
from stepcheck.script.explain import explain_batch
from stepcheck.script.recording import Recording
from stepcheck.verdict import Verdict


class RecordedBatches:
    """Yields the script's micro-batches. Each new iterator yields the script's next epoch."""

    def __init__(self, recording: Recording):
        self._recording, self._next = recording, 1

    def __iter__(self) -> Iterator[Any]:
        epoch = None
        while self._next <= self._recording.steps:
            step = self._recording.step(self._next)
            if epoch not in (None, step.epoch):
                return
            epoch, self._next = step.epoch, self._next + 1
            yield from step.batches


def compare_batches(recording: Recording, loader: Iterable[Any], verdict: Verdict) -> None:
    """Compares the batches of the module's own loader with the script's, in order, and adds the first difference to the
    verdict. Each epoch begins with the random state with which the script's loader began it. Does not judge a recording
    without the batches of skipped steps."""
    if recording.skipped:
        verdict.not_judged["batches"] = "the script skipped steps that overflowed"
        return
    epoch, own = None, iter(())
    for number in range(1, recording.steps + 1):
        step = recording.step(number)
        if step.epoch != epoch:
            epoch = step.epoch
            set_random_state(step.order_state)
            own = iter(loader)
        for part, batch in enumerate(step.batches, 1):
            why = explain_batch(batch, next(own, None))
            text = f"micro-batch {part} of the module's own loader: {why}"
            verdict.add(number, "batch", math.inf if why else 0.0, text)
            if why:
                return
