"""cifar-zero plan's bytes per step are compared with those measured on the link between two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.planning.model_states import network_of
from cifar_zero.planning.overheads import sent_bytes
from cifar_zero.training.resolve import make_run
from tests.support.helpers import WHOLE
from tests.support.wire import TwoRanks, two_ranks

pytestmark = pytest.mark.distributed

COMMON = ["--optimizer", "adam", "--accelerator", "cpu", "--devices", "1", "--batch_size", "8"]
MLP = ["--model", "mlp", "--model.hidden", "[256]"]
"""790,000 parameters, most of them in a matrix that stage 3 shards."""

ALL = [
    ("ddp", []),
    ("deepspeed_stage_0", []),
    ("deepspeed_stage_1", []),
    ("deepspeed_stage_2", []),
    ("deepspeed_stage_3", []),
    ("fsdp2", []),
    ("ddp", ["--accumulate", "2"]),
    ("deepspeed_stage_1", ["--accumulate", "2"]),
    ("deepspeed_stage_2", ["--accumulate", "2"]),
    ("deepspeed_stage_3", ["--accumulate", "2"]),
    ("fsdp2", ["--accumulate", "2"]),
    ("deepspeed_stage_2", ["--precision", "bf16-mixed"]),
    ("deepspeed_stage_3", ["--precision", "bf16-mixed"]),
    ("fsdp2", ["--precision", "bf16-mixed"]),
    ("deepspeed_stage_2_offload", []),
    ("deepspeed_stage_3_offload", []),
    ("deepspeed_stage_3", ["--model", "vit_tiny", "--activation_checkpointing"]),
]
"""Strategies and options; `make test` runs the simplest and the most complex strategy."""

STEPS = 2, 12
"""Steps of two runs; their difference leaves out what a run sends at its start and end."""

TOLERANCE = 0.1
"""Allows for the headers of Ethernet, IP and TCP, acknowledgements, the few numbers that ranks exchange, and
differences between what two runs send at their start."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    with two_ranks(tmp_path_factory.mktemp("wire")) as ranks:
        yield ranks


@pytest.mark.parametrize(("strategy", "options"), ALL if WHOLE else [ALL[0], ALL[4]], ids=str)
def test_bytes_on_the_link(
    strategy: str, options: list[str], ranks: TwoRanks, small_data: list[str], tmp_path: Path
) -> None:
    model = [] if "--model" in options else MLP
    flags = [*COMMON, *model, *options, *small_data, "--strategy", strategy]
    sent: list[int] = []
    for steps in STEPS:
        before = ranks.sent()
        limits = ["--trainer.limit_val_batches", "0", "--trainer.limit_test_batches", "1", "--max_steps", str(steps)]
        ranks.train([*flags, *limits, "--out", str(tmp_path / str(steps))])
        sent.append(ranks.sent() - before)
    run = make_run(command_line.parse([*flags, "--num_nodes", "2"]))
    planned = sent_bytes(run, network_of(run))
    counted = (sent[1] - sent[0]) / (STEPS[1] - STEPS[0])
    assert counted == pytest.approx(planned, rel=TOLERANCE)
