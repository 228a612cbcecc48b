"""Draws the figures of docs/course, or only those whose names are arguments: `python -m docs.figures [NAME ...]`."""

import sys

from matplotlib import pyplot

from docs.figures import FIGURES, file_of

for draw in FIGURES:
    if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
        draw()
        pyplot.savefig(file_of(draw), dpi=110)
        pyplot.close()
