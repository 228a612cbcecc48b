"""The command line of export.py and predict.py."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line as everywhere here; with the options that both programs have."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.add_argument(
            "--trust", action="store_true", help="load a checkpoint that could run code, of one you trust"
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message} (--help lists all options)")
