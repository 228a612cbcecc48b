from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import largest
from benchmarks.contenders import last_json
from benchmarks.largest import FULL, next_depth
from benchmarks.processes import RunFailed, run
from cifar_zero.core import exits


@pytest.mark.parametrize("most", [0, 1, 7, 40, 41, 99])
@pytest.mark.parametrize("guess", [1, 40, 60])
def test_the_search_ends_at_the_largest(most: int, guess: int) -> None:
    """Within a tenth of it, and in few trials."""
    fits, failed, trials = 0, None, 0
    while (depth := next_depth(fits, failed, guess, largest.GROWTH, largest.PRECISION)) is not None:
        trials += 1
        if depth <= most:
            fits = depth
        else:
            failed = depth
    assert failed is not None
    assert fits <= most < failed
    assert failed - fits <= max(1, fits * largest.PRECISION)
    assert trials < 25


def test_a_full_memory_is_told_from_other_failures(tmp_path: Path) -> None:
    """A process that takes more than it may, and one that fails otherwise."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nheld = bytearray(int(sys.argv[1])) if sys.argv[1].isdecimal() else sys.exit('no')\n"
    )
    limited = ["-m", "benchmarks.limited", "500000000", str(program)]
    peak = last_json(run(*limited, "200000000").stdout)["host_peak_bytes"]
    assert 0 < peak < 500_000_000
    with pytest.raises(RunFailed, match=FULL.pattern):
        run(*limited, "600000000")
    with pytest.raises(RunFailed) as failure:
        run(*limited, "nothing")
    assert not FULL.search(str(failure.value))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--device_memory SIZE is needed on the CPU"),
        (["--device_memory", "much"], "--device_memory much: give a size"),
        (["--device_memory", "3GB", "--bench_steps", "0"], "--bench_steps must be at least 1"),
        (["--strategies", "zero"], "argument --strategies: invalid choice"),
    ],
)
def test_mistakes_are_told_in_one_line(
    flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["largest", "--accelerator", "cpu", *flags])
    assert exits.guarded(largest.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {expected}")
