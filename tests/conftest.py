"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for 640 training and as many test images, decoded once for all tests."""
    root = tmp_path_factory.mktemp("data")
    return ["--data.source", "synthetic", "--data.synthetic_size", "640", "--data.root", str(root)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of several ranks follow one another in one worker of pytest-xdist (`--dist loadgroup`): two of them side by
    side on two cores take four times as long. The others stay together by file, for their fixtures' sake."""
    for item in items:
        ranks = item.get_closest_marker("distributed") is not None
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else item.nodeid.split("::")[0]))
