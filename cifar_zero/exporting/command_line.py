"""The command line of export.py and predict.py."""

from typing import Any

from cifar_zero.core import exits


class Parser(exits.Parser):
    """With the options that both programs have."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_argument(
            "--delta", metavar="FILE", default="", help="what a run trained over these weights (export.py --to delta)"
        )
        self.add_argument(
            "--trust", action="store_true", help="load a checkpoint that could run code, of one you trust"
        )
