"""Classifies image files with any checkpoint or export (see --help)."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_zero.checkpoints import run_folder
from cifar_zero.core import exits
from cifar_zero.core.console import command, printable
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting.export import add_weight_options

if TYPE_CHECKING:
    from cifar_zero.exporting.formats import Classifier

Named = list[tuple[str, float]]  # class names with their probabilities, from 0 to 1, the most probable first


def main() -> int:
    """Prints a line for each image, or an error if it cannot be read. Returns the exit code, which is 2 after any such
    error."""
    arguments = _parse()
    files = find_images(arguments.images)
    run_folder.find_checkpoint(arguments.network)  # raises UsageError before torch is imported
    from cifar_zero.exporting import formats  # which imports torch

    classifier = formats.load_classifier(arguments.network, arguments.trust, arguments.delta)
    unreadable = 0
    for file, classes in predict(classifier, files, arguments.top):
        if isinstance(classes, UsageError):
            unreadable += 1
            print(printable(f"error: {classes}"), file=sys.stderr)
        elif arguments.json:
            predictions = [{"class": name, "probability": probability} for name, probability in classes]
            print(json.dumps({"file": str(file), "predictions": predictions}))
        else:
            named = ", ".join(f"{name} {100 * probability:.1f} %" for name, probability in classes)
            print(printable(f"{file}: {named}"))
    if unreadable:
        return UsageError.exit_code
    return 0


def predict(classifier: Classifier, files: list[Path], top: int) -> Iterator[tuple[Path, Named | UsageError]]:
    """Classifies image files. Yields each file, in order, with its `top` most probable classes (or all, if there are
    fewer), or with the error if the file cannot be read."""
    import torch

    from cifar_zero.data.augment import normalize
    from cifar_zero.data.folder import decode

    top = min(top, len(classifier.classes))
    for file in files:
        try:
            image = torch.tensor(decode(file, classifier.inputs.side)).permute(2, 0, 1)
        except UsageError as error:
            yield file, error
            continue
        (scores,) = classifier.scores(normalize(image[None], classifier.inputs))
        best = scores.softmax(0).topk(top)
        labels, probabilities = best.indices.tolist(), best.values.tolist()
        yield file, [(classifier.classes[label], share) for label, share in zip(labels, probabilities, strict=True)]


def find_images(paths: Sequence[str]) -> list[Path]:
    """Returns the given files, and the PNG and JPEG files at any depth of the given folders, sorted by path within a
    folder, without hidden ones. Raises UsageError if a path does not exist, if a folder has no images, or if a path is
    a pipe or a device, because reading it may never end."""
    from cifar_zero.data.folder import SUFFIXES

    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path} does not exist: give image files or folders")
        if not path.is_dir():
            if not path.is_file():
                raise UsageError(f"{path} is neither a file nor a folder: name images or folders of images")
            files.append(path)
            continue
        inside: list[Path] = []
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.suffix.lower() in SUFFIXES and not hidden and file.is_file():
                inside.append(file)
        if not inside:
            raise UsageError(f"no {', '.join(SUFFIXES)} images in {path}")
        files += inside
    return files


def _parse() -> Namespace:
    parser = exits.Parser(prog=command("predict"), description="Classifies image files with any checkpoint or export.")
    add_weight_options(parser)
    add, network = parser.add_argument, "a run folder, a checkpoint, or a file that cifar-zero export wrote"
    add("network", metavar="CHECKPOINT_OR_EXPORT", help=network)
    add("images", metavar="IMAGE", nargs="+", help="an image file, or a folder of images")
    add("--top", metavar="K", type=int, default=1, help="classes to print (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object per image")
    arguments = parser.parse_intermixed_args()
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, not {arguments.top}")
    return arguments
