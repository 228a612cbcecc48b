"""Runs a command, as `stepcheck COMMAND ...` or `python -m stepcheck COMMAND ...`."""

import argparse
import sys
from collections.abc import Collection, Sequence

from stepcheck import run
from stepcheck.accept import command as accept
from stepcheck.lightning import module
from stepcheck.report import check_files
from stepcheck.script import command as script
from stepcheck.usage import Parser, UsageError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, by default the command line of this process. Returns the command's exit
    code. Prints a UsageError to stderr, and then returns 2."""
    try:
        options = parse(arguments)
        check_files(options)
        return options.run(options)
    except UsageError as error:
        print(f"stepcheck: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, by default that of this process. In the result, `run` is the function of the command, and
    `more` has the values of options such as --module.lr. Raises UsageError."""
    parser = Parser(
        "stepcheck",
        description="Proves, while a training runs, that each distributed step computes what PyTorch computes.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run.add_parser(commands)
    accept.add_parser(commands)
    module.add_parser(commands)
    script.add_parser(commands)
    options, more = parser.parse_known_args(arguments)
    options.more = _sections(more, getattr(options, "sections", ()))
    return options


def _sections(words: Sequence[str], sections: Collection[str]) -> dict[str, str]:
    """Returns the values of the options --SECTION.NAME, keyed by "SECTION.NAME", where SECTION is in `sections`. Raises
    UsageError for any other word, and for an option without a value."""
    found, left = {}, [*words]
    while left:
        flag, equals, value = left.pop(0).partition("=")
        section, dot, _ = flag.removeprefix("--").partition(".")
        if not (flag.startswith("--") and dot and section in sections):
            known = [f"--{each}.NAME" for each in sections]
            raise UsageError(f"{flag} is not an option: {nearest(flag, known, otherwise='--help lists all')}")
        if not equals and not left:
            raise UsageError(f"{flag} has no value")
        found[flag.removeprefix("--")] = value if equals else left.pop(0)
    return found


if __name__ == "__main__":
    sys.exit(main())
