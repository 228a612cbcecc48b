"""An object whose pickle runs code, for tests that loading a file runs no code."""

import os
from pathlib import Path
from typing import Any


class Evil:
    """Creates the folder `proof` when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)
