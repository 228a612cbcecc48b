"""What tests of both packages need. Imports neither Lightning nor cifar_zero, so stepcheck's tests run without them."""

import os
from pathlib import Path

import pytest
import torch

WHOLE = "TEST_ALL" in os.environ
"""Whether `make test-all` runs the tests. It runs all tests in full, which takes hours."""

of_test_all = pytest.mark.skipif(not WHOLE, reason="of make test-all")

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

ROOT = Path(__file__).resolve().parents[2]

HANG_SECONDS = 1800
"""How long tests wait for the end of a program, or for another event, that takes a few seconds on an idle machine. Next
to 20 busy processes such an event takes less than this. The limit only ends a test that would never end."""
