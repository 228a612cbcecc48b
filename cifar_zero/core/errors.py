"""The ways in which a run can end before its time, each one line and one exit code."""

import signal


class UsageError(Exception):
    """The command line, the configuration or the data that it names is wrong: exit code 2.

    The message is one line that says what is wrong and how to mend it.
    """

    exit_code = 2


class RunError(Exception):
    """The run could not go on (network, disk, a rank that died): exit code 1.

    The message is one line that says what happened and how to mend it.
    """

    exit_code = 1


class Stopped(Exception):
    """The user or the cluster ended the run; exit code as shells have it.

    The message is one line that says how to go on.
    """

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.exit_code = 128 + number
