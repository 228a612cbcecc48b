"""doctor.py --nodes on two hosts of this machine, and what it makes of figures that no such hosts have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import device

from diagnosis import links, nodes, nodes_report
from diagnosis.gathering import Arrival, disagreement
from diagnosis.links import Measured, Pair, rounds
from diagnosis.machines import Machine
from planning import link
from tests.helpers import ROOT, run_program
from tests.namespaces import DEVICE, Host, Hosts, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as hosts:
        yield hosts


def start(hosts: Hosts, rank: int, *flags: str) -> subprocess.Popen[str]:
    """One rank of two, one on each host."""
    host: Host = (hosts.a, hosts.b)[rank]
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
    meeting = {"MASTER_ADDR": hosts.a.address, "MASTER_PORT": "29532", "GLOO_SOCKET_IFNAME": DEVICE}
    return host.start(
        *(sys.executable, "doctor.py", "--nodes", *flags),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}, **meeting},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
def test_two_hosts_over_a_slow_link(hosts: Hosts, tmp_path: Path) -> None:
    """What is measured of 100 Mbit/s, and what plan.py reads of it."""
    hosts.slow("100mbit")
    file = tmp_path / "network.json"
    flags = ["--out", str(tmp_path), "--data.root", str(tmp_path / "data"), "--save", str(file)]
    ranks = [start(hosts, rank, *flags) for rank in range(2)]
    out, errors = ranks[0].communicate(timeout=100)
    assert ranks[0].returncode == 0, errors
    assert ranks[1].communicate(timeout=20)[0] == ""  # rank 0 speaks
    assert ranks[1].returncode == 0
    for host in (hosts.a, hosts.b):
        assert host.name in out
    for line in (
        "ok       versions ",
        "ok       clock ",
        "ok       devices ",
        "ok       links ",
        "ok       out ",
        "warning  data ",
    ):
        assert f"\n{line}" in out
    assert "Nothing failed, 1 warning." in out
    measured = link.read(file)
    assert 0.5 * 12.5e6 < measured.bytes_per_second < 1.1 * 12.5e6
    assert 0 < measured.latency_seconds < 0.1
    hosts.mend()


@pytest.mark.distributed
def test_a_machine_that_does_not_answer_is_named_in_time(hosts: Hosts) -> None:
    alone = start(hosts, 0, "--timeout", "2")
    out, errors = alone.communicate(timeout=60)
    assert alone.returncode == 1
    assert out == ""
    lines = [line for line in errors.splitlines() if "socket.cpp" not in line]  # torch's warning of a name
    assert lines == ["error: rank 1 did not answer within 2 s while meeting the others"]


@pytest.mark.distributed
def test_a_file_that_cannot_be_written_ends_all_ranks_before_anything_is_measured(hosts: Hosts) -> None:
    ranks = [start(hosts, rank, "--save", "/none/network.json") for rank in range(2)]
    for rank in ranks:  # of a machine each
        out, errors = rank.communicate(timeout=60)
        lines = [line for line in errors.splitlines() if "socket.cpp" not in line]
        assert lines == ["error: --save /none/network.json cannot be written: No such file or directory"]
        assert (rank.returncode, out) == (1, "")


def test_trying_to_write_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    assert nodes_report.cannot_save(tmp_path / "new") == ""
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("old")
    assert nodes_report.cannot_save(tmp_path / "old") == ""
    assert (tmp_path / "old").read_text() == "old"
    assert nodes_report.cannot_save(tmp_path) == f"--save {tmp_path} cannot be written: Is a directory"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes"], "start it on each machine with torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d"),
        (["--nodes", "port"], "--nodes measures between machines: leave the names of checks"),
        (["--save", "network.json"], "--save is of what --nodes measures"),
    ],
)
def test_wrong_usage_is_one_line(flags: list[str], said: str) -> None:
    done = run_program("doctor.py", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    tables = rounds(count)
    assert sorted(chain(*tables)) == [*combinations(range(count), 2)]
    for table in tables:
        assert len({*chain(*table)}) == 2 * len(table)
    assert len(tables) <= count


def machine(node: int, clock: float = 0.0, has_images: bool = True, **versions: str) -> Machine:
    return Machine(node, node, f"gpu{node}", "cuda:0", versions or {"torch": "2.15.0"}, "", has_images, clock)


def test_versions_that_differ_fail_and_are_named() -> None:
    three = [machine(0), machine(1, torch="2.14.0"), machine(2)]
    finding = nodes.versions(three)
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, gpu2; 2.14.0 on gpu1" in finding.found
    assert nodes.versions([machine(0), machine(1)]).status == "ok"
    missing = nodes.versions([machine(0, torch="1", nccl="2.27.3"), machine(1, torch="1")])
    assert "nccl 2.27.3 on gpu0; none on gpu1" in missing.found


def test_the_slow_link_is_named() -> None:
    three = [machine(node) for node in range(3)]
    pairs = [Pair((0, 1), 1e-5, 12e9), Pair((0, 2), 1e-5, 1e9), Pair((1, 2), 1e-5, 11e9)]
    finding = nodes.slow_links(pairs, three)
    assert finding.status == "warning"
    assert finding.found == "gpu0 - gpu2 1 GB/s, where the fastest pair of machines has 12 GB/s"
    fast = nodes.slow_links([*pairs[::2], Pair((0, 2), 1e-5, 9e9)], three)
    assert (fast.status, fast.found) == ("ok", "9 GB/s to 12 GB/s in each direction between any two machines")


def test_one_slow_machine_of_three_is_found_though_most_pairs_are_slow() -> None:
    pairs = [Pair((0, 1), 1e-5, 12e9), Pair((0, 2), 1e-5, 1e9), Pair((1, 2), 1e-5, 1.1e9)]
    finding = nodes.slow_links(pairs, [machine(node) for node in range(3)])
    assert finding.status == "warning"
    assert finding.found.startswith("gpu0 - gpu2 1 GB/s, gpu1 - gpu2 1.1 GB/s, where")


def test_of_many_machines_some_pairs_are_measured_and_few_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    many = [machine(node) for node in range(50)]
    met = chain(*rounds(50)[: links.ROUNDS])
    pairs = [Pair(nodes, 1e-5, 1e9 if 7 in nodes else 12e9) for nodes in met]
    finding = nodes.slow_links(pairs, many)
    assert finding.found.count("gpu7 ") == nodes.NAMED
    assert "and 8 other pairs, where" in finding.found
    assert finding.found.endswith("(400 of 1,225 pairs measured)")
    ladder = [Measured(4, 1e-5, 1e6), Measured(2**26, 1e-2, 6e9)]
    nodes_report.print_network(nodes.Network("gloo", many, {"links": finding}, ladder, {}, pairs))
    lines = [line for line in capsys.readouterr().out.splitlines() if " - gpu" in line and "links" not in line]
    assert len(lines) == nodes_report.ROWS
    assert sum("gpu7 " in line for line in lines) == links.ROUNDS  # the slowest are among them


def test_each_size_and_each_round_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, whose collectives are quick: what the deadline hears of."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 99)  # no machine's first
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    steps: list[str] = []
    again: list[None] = []
    progress = links.Progress(steps.append, lambda: again.append(None), 3.0)
    links.ladder(device("cpu"), "all ranks", progress, sizes=(4, 2**16))
    assert steps == [f"measuring all-reduces of {size} bytes of all ranks" for size in ("4", "65,536")]
    assert len(again) == 2 * (2 + links.REPETITIONS)
    steps.clear()
    assert links.pairs(device("cpu"), 0, range(50), 4, progress) == []
    assert [step.rsplit(", ")[1] for step in steps] == [f"round {number} of 16" for number in range(1, 17)]


def test_machines_without_the_gpus_of_the_others_are_named() -> None:
    good, bad = Arrival("gpu0", 8, 8), Arrival("gpu1", 8, 0, "driver too old")
    assert disagreement([good, good]) == disagreement([bad, bad]) == ""
    said = disagreement([good, bad, bad])
    assert said.startswith("not every rank has a GPU: gpu1 has 0 for 8 ranks (driver too old), where gpu0 has one")
    assert disagreement([Arrival("gpu0", 1, 1, refusal="no"), bad]) == "no"
    assert nodes.devices([good]).status == "ok"
    assert nodes.devices([Arrival("cpu0", 2, 0)]).found == "no GPUs, ranks run on the CPU"
    apart = nodes.devices([Arrival("gpu0", 8, 1)] * 8)  # --gpus-per-task
    assert (apart.status, apart.found.rsplit(": ")[1]) == ("warning", "gpu0 has 1 for 8")


def test_clocks_and_disks() -> None:
    assert nodes.clock([machine(0, 100.0), machine(1, 100.5)]).status == "ok"
    assert nodes.clock([machine(0, 103.0), machine(1, 100.5)]).found == "that of gpu1 is 2.5 s behind that of gpu0"
    two = [machine(0), machine(1, has_images=False)]
    assert nodes.on_one_disk(Path("runs"), [True, True], two).status == "ok"
    apart = nodes.on_one_disk(Path("runs"), [True, False], two)
    assert (apart.status, apart.found.split(":")[0]) == ("warning", "runs of gpu0 is not what gpu1 has there")
    assert "no images on gpu1" in nodes.images(Path("data"), [True, False], two).found
