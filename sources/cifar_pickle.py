"""CIFAR's files are Python pickles. Reads them without the power that a pickle has to run code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from errors import RunError
from sources.dataset import IMAGE_SHAPE

PIXELS = int(np.prod(IMAGE_SHAPE))

_rebuild_array = np.empty(0, np.uint8).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _rebuild_array,  # as NumPy 1, and the published files, name it
    ("numpy._core.multiarray", "_reconstruct"): _rebuild_array,  # as NumPy 2 names it
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Makes arrays of the plain types, lists, dictionaries, strings and numbers; nothing else can be asked for."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look up what a pickle names; called by the pickle module."""
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None


def read_names(name: str, content: bytes, key: str) -> tuple[str, ...]:
    """The class names under `key` in a meta file. Raises RunError where there are none."""
    names = _unpickle(name, content).get(key)
    if not isinstance(names, list) or not names:
        raise RunError(f"the file {name} of the CIFAR archive has no list {key}")
    return tuple(_text(class_name) for class_name in names)


def read_batch(name: str, content: bytes, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 3, 32, 32) and labels (n,) of a batch file.

    Raises RunError unless there are n >= 1 rows of 3072 bytes and as many labels, each in 0 ... num_classes - 1.
    """
    batch = _unpickle(name, content)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise RunError(f"the file {name} of the CIFAR archive has no images of {PIXELS} bytes each")
    labels = batch.get("labels", batch.get("fine_labels"))  # CIFAR-10's and CIFAR-100's names
    if not isinstance(labels, list) or not len(labels) == len(data) > 0:
        raise RunError(f"the file {name} of the CIFAR archive does not have a label for each of its images")
    if not all(isinstance(label, int) and 0 <= label < num_classes for label in labels):
        raise RunError(f"the file {name} of the CIFAR archive has a label that is not in 0 ... {num_classes - 1}")
    return data.reshape(-1, *IMAGE_SHAPE), np.array(labels, dtype=np.int64)


def _unpickle(name: str, content: bytes) -> dict[str, Any]:
    try:
        # As bytes: Python 2 wrote these files, and its strings have no encoding.
        loaded = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise RunError(f"the file {name} of the CIFAR archive is refused: {error}") from error
    if not isinstance(loaded, dict):
        raise RunError(f"the file {name} of the CIFAR archive is refused: it is not a dictionary")
    return {_text(key): value for key, value in loaded.items()}


def _text(value: object) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
