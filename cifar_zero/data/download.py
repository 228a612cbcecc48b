"""Downloads a file by torchvision, with retries and clear errors."""

import socket
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError

from torchvision.datasets.utils import download_url

from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError

TIMEOUT_S = 10.0
"""Time limit of connecting, and of each read."""

TRIES = 3
BACKOFF_S = 0.5
"""Seconds before the second try; twice that before the third."""


class DownloadError(RunError):
    """The file cannot be downloaded: no connection, a connection that breaks repeatedly, or the wrong content."""


def download(url: str, target: Path, md5: str, fix: str) -> None:
    """Downloads `url` to `<target>.part` and renames it to `target` when its MD5 is right.

    The caller must keep other processes from downloading to the same target. `fix` ends the message of a DownloadError;
    an OSError comes from the disk.
    """
    part = target.with_name(f"{target.name}.part")
    default_timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # torchvision sets none, and a server that does not answer would block the run
    try:
        for attempt in range(1, TRIES + 1):
            try:
                download_url(url, str(part.parent), part.name, md5)
                part.replace(target)
                return
            except (URLError, HTTPException, ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
                failure = _reason(error, md5)
                # Without a connection or a valid address, another try only delays the fallback.
                final = isinstance(error, URLError | ValueError) and getattr(error, "code", 0) < 500
                if final or attempt == TRIES:
                    raise DownloadError(f"cannot download {url}: {failure}; {fix}") from error
            say(f"{url}: {failure}; trying again.")
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
    finally:
        socket.setdefaulttimeout(default_timeout_s)
        part.unlink(missing_ok=True)


def _reason(error: Exception, md5: str) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code} {error.reason}"
    if isinstance(error, URLError):
        return str(error.reason)
    if type(error) is RuntimeError:  # torchvision's for a wrong checksum
        return f"the content is incomplete or wrong: its MD5 is not {md5}"
    return str(error) or type(error).__name__
