"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for 640 training and as many test images, decoded once for all tests."""
    root = tmp_path_factory.mktemp("data")
    return ["--data.source", "synthetic", "--data.synthetic_size", "640", "--data.root", str(root)]
