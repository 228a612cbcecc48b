"""A pickle that runs code, to show where none is run."""

import os
from pathlib import Path
from typing import Any


class Evil:
    """Creates the folder `proof` when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)
