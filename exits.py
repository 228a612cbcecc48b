"""How the programs end in front of a user: one clear line and an exit code, the traceback only for --debug."""

from __future__ import annotations

import sys
from collections.abc import Callable

from errors import RunError, UsageError


def guarded(main: Callable[[], int]) -> int:
    """Runs a program's `main` and returns its exit code: 2 for the user's mistakes, 1 for what failed while running."""
    try:
        return main()
    except (UsageError, RunError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        print(f"error: {type(error).__name__}: {first} (--debug shows where)", file=sys.stderr)
        return 1
