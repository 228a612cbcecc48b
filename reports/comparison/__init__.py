"""The report of a comparison: report.html, report.md and their figures, from comparison/result.py's plain values."""

from __future__ import annotations

from pathlib import Path

from comparison.result import Comparison


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes the report into a folder that exists.

    Args:
        comparison: what is reported; figures that it lacks are left out or "-".
        folder: where to.

    Returns:
        The files: report.html, which needs no other, report.md and the PNGs that it shows.
    """
    # Matplotlib, NumPy and Jinja take half a second, which a mistake on the command line should not wait for.
    from reports.comparison.page import write_page

    return write_page(comparison, folder)
