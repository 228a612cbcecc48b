from __future__ import annotations

import time

import psutil
import pytest

from cifar_zero.core import start_time


def test_the_first_note_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(start_time.VARIABLE, "1234.5")
    start_time.note()  # as a rank does, whose launcher has noted it
    assert start_time.command_given() == 1234.5


def test_a_process_of_its_own_started_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(start_time.VARIABLE, raising=False)
    assert start_time.command_given() == psutil.Process().create_time() < time.time()
