"""The two ways in which a run can fail in front of the user, each one line and one exit code."""


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
