"""Defines the command line's parser, and the errors for wrong usage."""

import argparse
import difflib
import textwrap
from collections.abc import Iterable
from typing import NoReturn

SHOWN = 20  # the most names that an error lists


class UsageError(Exception):
    """Raised for a wrong command line, or for a fault in a file or in code that the command line names. The message is
    one line with the fault and the fix."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists all options)")


def short(message: object, characters: int = 120) -> str:
    """Returns the error message of a library as one line of at most `characters` characters."""
    return textwrap.shorten(str(message), characters, placeholder=" ...")


def nearest(word: str, words: Iterable[str], most: int = 1, cutoff: float = 0.5, otherwise: str = "") -> str:
    """Returns a clause that suggests names for a misspelled `word`.

    Args:
        words: Names to choose from.
        most: Largest number of suggested names.
        cutoff: Least similarity of a suggested name, from 0 to 1 (difflib).
        otherwise: Returned if no name is similar. If it is empty, the first names of `words` are listed instead.
    """
    known = list(words)
    if close := difflib.get_close_matches(word, known, most, cutoff):
        return f"did you mean {' or '.join(close)}?"
    return otherwise or f"choose from {', '.join(known[:SHOWN])}{', ...' if len(known) > SHOWN else ''}"


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
