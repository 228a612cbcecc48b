"""report.html and report.md: the tables and figures of a comparison on one page."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure
from PIL import Image

from comparison.result import Comparison
from reports.comparison import tables, text
from reports.comparison.bars import memory_figure, speed_figure
from reports.comparison.classes import class_figure
from reports.comparison.curves import accuracy_figure, loss_figure
from reports.comparison.look import theme
from reports.comparison.tables import Table

DPI = 150
"""Of the figures: 1,500 pixels wide, for screens of two pixels to a point."""

TEMPLATES = Path(__file__).parent
"""Where report.html.j2 and report.md.j2 lie."""


@dataclass
class Picture:
    """A figure, drawn."""

    file: str
    """Name of the PNG."""
    light: bytes
    """The PNG, for a light page."""
    dark: bytes
    """The PNG, for a dark page."""


@dataclass
class Section:
    """Of the page; what it has neither of is left out."""

    title: str
    table: Table
    picture: Picture | None


def write_page(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes report.html, report.md and the PNGs, and returns them."""
    sections = [
        Section("Loss", Table([], []), _picture("losses.png", loss_figure, comparison)),
        Section("Accuracy", tables.results(comparison), _picture("accuracy.png", accuracy_figure, comparison)),
        Section("Accuracy of each class", Table([], []), _picture("classes.png", class_figure, comparison)),
        Section("Speed", tables.speeds(comparison), _picture("speed.png", speed_figure, comparison)),
        Section("Memory", tables.memories(comparison), _picture("memory.png", memory_figure, comparison)),
        Section("What the strategies made of the request", tables.settings(comparison), None),
    ]
    sections = [section for section in sections if section.picture is not None or len(section.table.columns) > 1]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html.j2"], default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        base64=_base64,
        md=_markdown,
    )
    files = []
    for name in ("report.html", "report.md"):
        page = environment.get_template(f"{name}.j2").render(
            comparison=comparison,
            headline=text.headline(comparison),
            differences=[(each.setting, text.difference_line(each)) for each in comparison.differences],
            failed=[variant for variant in comparison.variants if variant.error],
            facts=[*comparison.recipe.items(), *comparison.machine.items()],
            causes=[
                (each.name, cause) for each in comparison.variants if each.verdict for cause in each.verdict.causes
            ],
            verdicts=tables.verdicts(comparison),
            sections=sections,
            reading=text.READING,
        )
        (folder / name).write_text(page, encoding="utf-8")
        files.append(folder / name)
    for picture in (section.picture for section in sections if section.picture is not None):
        (folder / picture.file).write_bytes(picture.light)
        files.append(folder / picture.file)
    return files


def _picture(file: str, draw: Callable[[Comparison], Figure | None], comparison: Comparison) -> Picture | None:
    drawn = []
    for dark in (False, True):
        with theme(dark):
            figure = draw(comparison)
            if figure is None:
                return None
            drawn.append(_png(figure))
    return Picture(file, *drawn)


def _png(figure: Figure) -> bytes:
    """With a palette of 256 colours, which a line drawing does with: a third of the bytes."""
    png, small = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=DPI)
    Image.open(png).convert("RGB").quantize(dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _markdown(cell: str) -> str:
    """Text that is no markup to GitHub's Markdown, within a table too."""
    return re.sub(r"([\\`*\[\]<>|#$])", r"\\\1", " ".join(cell.split()))
