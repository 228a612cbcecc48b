"""Watch decides from times and heartbeats alone which ranks hang; no process and no clock."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

from cifar_zero.launch import heartbeat
from cifar_zero.launch.heartbeat import RUNNING, WAITING, Beat, Board, Pulse, Watch

HOUR = 3600


def looks(watch: Watch, beats: list[Beat], start: float, end: float, stopped: tuple[int, ...] = ()) -> list[str]:
    """Checks the same heartbeats once a second; returns the verdicts."""
    return [watch.look(beats, stopped, float(second)) for second in range(int(start), int(end))]


def running(*ranks: tuple[int, float]) -> list[Beat]:
    return [Beat(RUNNING, batches, time) for batches, time in ranks]


def test_silence_of_all_is_a_hang_after_45_seconds():
    verdicts = looks(Watch(), running((7, 100.0), (7, 99.0)), 100, 147)
    assert verdicts == [""] * 46 + ["all ranks hang: 7 batches so far, nothing for 46 s"]


def test_one_beating_rank_means_no_hang():
    watch = Watch()
    assert not any(watch.look(running((7, 0.0), (second, second)), (), second) for second in range(HOUR))


def test_the_rank_with_the_fewest_batches_is_named():
    (verdict,) = filter(None, looks(Watch(), running((8, 100.0), (7, 100.0), (8, 100.0)), 100, 147))
    assert verdict == "rank 1 hangs: 7 batches so far, nothing for 46 s, and the others are further"


def test_a_waiting_rank_means_no_hang():
    beats = [Beat(RUNNING, 7, 0.0), Beat(WAITING, 7, 0.0)]
    assert not any(looks(Watch(), beats, 0, HOUR))


def test_long_steps_allow_a_longer_silence():
    watch = Watch()
    looks(watch, running((1, 0.0), (1, 0.0)), 0, 30)
    verdicts = looks(watch, running((2, 30.0), (2, 30.0)), 30, 332)
    assert verdicts == [""] * 301 + ["all ranks hang: 2 batches so far, nothing for 301 s"]


def test_a_pause_between_batches_is_not_a_long_step():
    watch = Watch()
    looks(watch, [Beat(WAITING, 1, 0.0)], 0, 30)
    assert any(looks(watch, running((2, 30.0)), 30, 77))


@pytest.mark.parametrize("state", [heartbeat.ABSENT, WAITING, RUNNING])
def test_a_stopped_rank_hangs_after_20_seconds_in_any_state(state: int):
    verdicts = looks(Watch(), [Beat(state, 0, 0.0)] * 3, 0, 22, stopped=(0, 2))
    assert verdicts == [""] * 21 + ["ranks 0, 2 hang: stopped by a signal for more than 20 s"]


def test_a_continued_rank_does_not_hang():
    watch = Watch()
    beats = [Beat(WAITING, 0, 0.0)]
    assert not any([*looks(watch, beats, 0, 15, stopped=(0,)), *looks(watch, beats, 15, 16)])
    assert not any(looks(watch, beats, 16, 36, stopped=(0,)))


def test_after_a_suspension_of_the_launcher_time_counts_from_zero():
    """Ctrl-Z stops the launcher and the ranks for an hour: neither their silence nor their length of step counts."""
    watch = Watch()
    before = running((7, 10.0), (7, 10.0))
    assert not any(looks(watch, before, 10, 15, stopped=(1,)))
    assert not any(looks(watch, before, HOUR, HOUR + 20, stopped=(1,)))
    after = running((8, HOUR + 20.0), (8, HOUR + 20.0))
    assert not any(looks(watch, after, HOUR + 20, HOUR + 66))
    assert not any(looks(watch, running((9, HOUR + 66.0), (9, HOUR + 66.0)), HOUR + 66, HOUR + 67))


def test_the_launcher_sees_what_the_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    board = Board(2)
    assert [beat.state for beat in board.read()] == [heartbeat.ABSENT] * 2
    with (tmp_path / "stack").open("w+b") as stack:
        monkeypatch.setenv(heartbeat.VARIABLE, board.ticket(1, stack)[0])
        pulse = Pulse()
        pulse.beat()
        pulse.beat()
        os.kill(os.getpid(), heartbeat.STACK_SIGNAL)
        faulthandler.unregister(heartbeat.STACK_SIGNAL)
    absent, beat = board.read()
    assert (absent.state, beat.state, beat.batches) == (heartbeat.ABSENT, RUNNING, 2)
    pulse.wait()
    assert board.read()[1][:2] == (WAITING, 2)
    assert "in test_the_launcher_sees_what_the_ranks_write" in (tmp_path / "stack").read_text()
