"""Runs train.py on two hosts with separate addresses, started by torchrun on each host. The hosts train as one host
does, stop when the link between them is cut, and resume. In another test, one host is lost for good."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints import run_folder
from cifar_zero.launch.collectives import OWN_STORE
from tests.support.helpers import (
    HANG_SECONDS,
    ROOT,
    largest_difference,
    last_weights,
    of_test_all,
    train_all,
)
from tests.support.namespaces import DEVICE, Host, Hosts, two_hosts

pytestmark = [pytest.mark.distributed, of_test_all]

STEPS = 45
TIMEOUT_SECONDS = 30
"""Timeout of a collective. It is long enough for two busy cores, and shorter than the time after which torchrun counts
a host as lost."""

RENDEZVOUS = {"2": "keep_alive_max_attempt=36,read_timeout=300", "1:2": "last_call_timeout=15"}
"""torchrun's --rdzv_conf for each --nnodes. By default torchrun counts a host as lost after 3 missed heartbeats, 5 s
apart. Both hosts would then restart their ranks when the link is fixed, and again when they find each other. By default
torchrun gives up if the store does not answer within 60 s, but TCP waits longer and longer before it sends a lost
packet again. By default a host that is left alone waits 30 s for other hosts to join."""

RECIPE = [
    *("--accelerator", "cpu", "--batch_size", "16", "--data.val_fraction", "0", "--epochs", "2"),
    *("--max_steps", str(STEPS), "--optimizer.lr", "0.05", "--augment.flip", "random", "--logger", "none"),
]
"""An epoch has 40 steps."""

NETWORK = {"GLOO_SOCKET_IFNAME": DEVICE, OWN_STORE: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""The environment variables that docs/cluster.md recommends for each node, because a host's own name resolves to its
loopback address."""

SLOW = ("tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms")
"""A link on which sending the gradients of one step of Net takes about 0.1 s, so that there is time to cut it in a
step. netem, which could delay packets too, is a module that many kernels of virtual machines and containers lack."""
CUT = ("blackhole",)
"""A link that drops every packet. As when a cable behind a switch is cut, neither host is notified."""
UNLIMITED = ("pfifo",)


class Node:
    """Runs torchrun on a host, and keeps what it has printed."""

    def __init__(self, host: Host, folder: Path, nodes: str, endpoint: Host, *flags: str):
        self.log = folder / f"{host.name}.log"
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{endpoint.name}:29400"]
        torchrun = ["--nnodes", nodes, *rendezvous, "--rdzv_conf", RENDEZVOUS[nodes], "--max_restarts", "3"]
        program = ["--nproc_per_node", "1", str(ROOT / "train.py"), *flags, "--timeout", str(TIMEOUT_SECONDS)]
        self.process = host.start(
            *(sys.executable, "-m", "torch.distributed.run", *torchrun, *program),
            cwd=ROOT,
            env={**os.environ, **NETWORK},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, happens: Callable[[], object]) -> None:
        over = time.monotonic() + HANG_SECONDS
        while not happens():
            assert time.monotonic() < over, self.output[-4000:]
            assert self.process.poll() in (None, 0), self.output[-4000:]
            time.sleep(0.02)

    def end_well(self) -> None:
        self.wait_for(lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, self.output[-4000:]

    def says_that_it_lost_the_other(self) -> bool:
        """Returns whether the output has the one-line error and no traceback."""
        lost = "error: this rank waited" in self.output or "error: another rank has ended" in self.output
        return lost and "Traceback (most recent call last)" not in self.output


def nodes_of(hosts: Hosts, folder: Path, nodes: str, *flags: str) -> tuple[Node, Node]:
    a, b = (Node(host, folder, nodes, hosts.a, *flags) for host in (hosts.a, hosts.b))
    return a, b


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> dict[str, torch.Tensor]:
    """Returns the weights of an uninterrupted run on two ranks of one host."""
    out = tmp_path_factory.mktemp("one")
    train_all({out: [*small_data, *RECIPE, "--strategy", "ddp", "--devices", "2"]})
    return last_weights(out)


def test_a_run_resumes_after_a_cut_link_and_ends_as_on_one_host(
    tmp_path: Path, small_data: list[str], on_one_host: dict[str, torch.Tensor]
):
    """The weights agree bit for bit."""
    out = tmp_path / "out"
    flags = [*small_data, *RECIPE, "--save_every_n_steps", "10", "--out", str(out), "--name", "two"]
    with two_hosts() as hosts:
        hosts.queue(*SLOW)
        a, b = nodes_of(hosts, tmp_path, "2", *flags, "--strategy", "deepspeed_stage_2")
        a.wait_for(lambda: list(out.glob("two/*/checkpoints/*.ckpt")))
        hosts.queue(*CUT)
        for node in (a, b):
            node.wait_for(node.says_that_it_lost_the_other)
        hosts.queue(*UNLIMITED)
        for node in (a, b):
            node.end_well()
    assert "torchrun has restarted the run: it resumes from" in a.output
    ended = sorted(out.glob("two/version_*"))[-1]  # torchrun may have restarted it more than once
    places = json.loads((ended / run_folder.RANKS).read_text())
    assert [place["host"] for place in places] == [hosts.a.name, hosts.b.name]
    assert len({place["agent"] for place in places} - {""}) == 2
    assert largest_difference(last_weights(ended), on_one_host) == 0


def test_the_remaining_host_continues_alone(
    tmp_path: Path, small_data: list[str], on_one_host: dict[str, torch.Tensor]
):
    """The global batch stays the same, and the checkpoint is sharded again for one rank."""
    out = tmp_path / "out"
    flags = [*small_data, *RECIPE, "--save_every_n_steps", "10", "--out", str(out), "--name", "two"]
    with two_hosts() as hosts:
        hosts.queue(*SLOW)
        a, b = nodes_of(hosts, tmp_path, "1:2", *flags, "--strategy", "deepspeed_stage_3")
        a.wait_for(lambda: list(out.glob("two/*/checkpoints/*.ckpt")))
        places = json.loads(next(out.glob(f"two/*/{run_folder.RANKS}")).read_text())
        assert len(places) == 2, "the hosts have not waited for each other"
        hosts.b.end_all()
        b.process.wait()
        a.end_well()
    assert "torchrun has restarted the run: it resumes from" in a.output
    assert largest_difference(last_weights(sorted(out.glob("two/version_*"))[-1]), on_one_host) < 1e-5
