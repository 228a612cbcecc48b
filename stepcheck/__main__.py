"""The command `stepcheck`."""

import argparse
import sys
from collections.abc import Sequence

from stepcheck import run
from stepcheck.accept import command as accept


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "stepcheck",
        description="Proves, while a training runs, that each distributed step computes what PyTorch computes.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run.add_parser(commands)
    accept.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
