"""One file from the network: resumed where it was cut, checked, and put into its place only when it is right."""

from __future__ import annotations

import hashlib
import os
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from errors import RunError
from sources.console import progress, say

TIMEOUT_S = 10.0
"""For connecting, and for each read after that."""

TRIES = 3
BACKOFF_S = 0.5
"""Seconds before the second try; twice that before the third."""

CHUNK_BYTES = 1 << 18


class DownloadError(RunError):
    """The file cannot be had: the server cannot be reached, keeps cutting, or sends something else."""


class _Interrupted(Exception):
    """The connection failed in a way that another try may mend."""


def file_md5(path: Path) -> str:
    """MD5 of a file in hexadecimal (against damage; it protects from nobody)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def download(url: str, target: Path, md5: str, mend: str) -> None:
    """Fetch `url` to `target`, by way of `<target>.part`, which a later call goes on with if this one is killed.

    Where the MD5 is wrong, everything is fetched once more from the start. The caller sees to it that no other process
    fetches the same target. `mend` ends the message of a DownloadError, the only exception but for OSError from the
    disk.
    """
    part = target.with_name(f"{target.name}.part")
    found = ""
    for _ in range(2):
        _fetch(url, part, mend)
        found = file_md5(part)
        if found == md5:
            os.replace(part, target)
            return
        part.unlink()
        say(f"{url}: the MD5 is {found}, expected {md5}.")
    raise DownloadError(f"{url} is not the right file: its MD5 is {found}, expected {md5}; {mend}")


def _fetch(url: str, part: Path, mend: str) -> None:
    """Complete `part`, in up to TRIES connections."""
    failure = ""
    for attempt in range(TRIES):
        if attempt:
            say(f"{url}: {failure}; trying again.")
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            return _transfer(url, part)
        except HTTPError as error:
            failure = f"HTTP status {error.code} {error.reason}"
            if error.code < 500:  # the server understood, and does not have it
                break
        except URLError as error:  # no connection: where the first try finds none, waiting would only keep the user
            failure = str(error.reason)
            if attempt == 0:
                break
        except _Interrupted as error:
            failure = str(error)
        except ValueError as error:  # not a URL at all
            failure = str(error)
            break
    raise DownloadError(f"cannot download {url}: {failure}; {mend}")


def _transfer(url: str, part: Path) -> None:
    """Append to `part` what it lacks, or write it from the start where the server cannot continue."""
    done = part.stat().st_size if part.exists() else 0
    try:
        response = _open(url, done)
    except HTTPError as error:
        if error.code == 416 and done:  # nothing lies beyond: complete, or not this file, which the MD5 tells
            return
        raise
    with response:
        if response.status != 206:
            done = 0
        length = response.headers["Content-Length"]
        total = done + int(length) if length else None
        label = f"Downloading {url.rsplit('/', 1)[-1]}"
        with part.open("ab" if done else "wb") as file, progress(label, total, "bytes", done) as advance:
            while chunk := _read(response):
                file.write(chunk)
                done += len(chunk)
                advance(len(chunk))
    if total is not None and done < total:
        raise _Interrupted(f"the connection was cut after {done:,} of {total:,} bytes")


def _open(url: str, offset: int) -> HTTPResponse:
    request = Request(url, headers={"User-Agent": "cifar-zero", "Accept-Encoding": "identity"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    try:
        return cast(HTTPResponse, urlopen(request, timeout=TIMEOUT_S))
    except URLError:  # HTTPError too
        raise
    except (OSError, HTTPException) as error:  # connected, and cut before the answer
        raise _Interrupted(f"no answer ({error})") from error


def _read(response: HTTPResponse) -> bytes:
    # Apart from the writing, so that a full disk is not taken for a broken connection.
    try:
        return response.read(CHUNK_BYTES)
    except (OSError, HTTPException) as error:
        raise _Interrupted(f"the connection broke ({error})") from error
