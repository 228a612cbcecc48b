"""Colours, boxes and arrows of the figures."""

from functools import partial

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, GREY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#bbbbbb", "#f0c030"
BOX = partial(FancyBboxPatch, boxstyle="round,pad=0.05", linewidth=1.5, edgecolor="black")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = "white", size: int = 15):
    axes.add_patch(BOX((x, y), width, height, facecolor=color))
    on_color = "white" if color in (BLUE, ORANGE, GREEN) else "black"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=on_color)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black", curve: float = 0):
    style = {"arrowstyle": "-|>", "lw": 2, "color": color, "connectionstyle": f"arc3,rad={curve}"}
    axes.annotate("", end, start, arrowprops=style)


def sketch(width: float, height: float, size: tuple[float, float] = (12, 5)) -> Axes:
    """Returns axes without ticks, for boxes and arrows in a plane of `width` x `height`."""
    axes = pyplot.figure(figsize=size).add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes
