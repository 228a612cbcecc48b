"""Runs on_an_accelerator.py in a process of its own, because a process cannot lose a device again."""

from tests.support.suite import run_python


def test_the_audit_on_a_device_that_fails_as_a_gpu_does():
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/stepcheck/on_an_accelerator.py")
    assert done.returncode == 0, done.stdout[-5000:]
