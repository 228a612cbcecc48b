"""Names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN = 3
"""Names that an error shows."""


def near(pattern: str, names: Sequence[str]) -> str:
    """A half sentence with the names that are closest to a pattern, or the first ones where none is close."""
    close = difflib.get_close_matches(pattern, names, n=SHOWN, cutoff=0.3)
    more = ", ..." if len(names) > SHOWN else ""
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names[:SHOWN])}{more}"
