"""Images as bytes (rows, channels, height, width): MNIST, CIFAR-10, and folders of your own."""

from __future__ import annotations

__all__ = ["IMAGE_SEED", "cifar10", "idx", "image_files", "read_images"]

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from ciflows.datasets.cache import Parts
from ciflows.datasets.recipes import reading
from ciflows.errors import UserError

IMAGE_SEED = 2020
SUFFIXES = (".png", ".jpg", ".jpeg")
IDX_IMAGES = 2051  # bytes in three dimensions
CIFAR_CLASSES = 10
CIFAR_SHAPE = (3, 32, 32)
EIGHT_BITS = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
GREY = ("1", "L", "LA")

Pixels = NDArray[np.uint8]


def idx(files: Sequence[Path]) -> Parts:
    """Read MNIST or Fashion-MNIST: a file of training and one of test images, gzipped or not."""
    known, test = (_read_idx(path) for path in files)
    if known.shape[1:] != test.shape[1:]:
        raise UserError(f"{files[1]}: its images differ in size from those of {files[0].name}.")
    return _hold_out(known, test, files[0])


def cifar10(files: Sequence[Path]) -> Parts:
    """Read the binary version of CIFAR-10: files of training images, then one of test images."""
    *parts, test = (_read_cifar(path) for path in files)
    return _hold_out(np.concatenate(parts), test, files[0])


def image_files(folder: Path) -> tuple[Path, ...]:
    """The image files of a folder, sorted by name; other files are ignored."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: it holds no images: no {', '.join(SUFFIXES)} files.")
    return tuple(files)


def read_images(files: Sequence[Path], channels: int | None = None) -> Pixels:
    """Read images of one size: (rows, channels, height, width).

    Arguments:
        channels: 3 to read grey images as coloured ones; if None, only if some are coloured.
    """
    images = [_read_image(path) for path in files]
    sizes = [image.shape[:2] for image in images]
    for path, size in zip(files, sizes, strict=True):
        if size != sizes[0]:
            first, other = (f"{width}×{height}" for height, width in (sizes[0], size))
            raise UserError(f"{path}: {other} pixels, but {files[0].name} has {first}: give one size.")
    if channels == 3 or any(image.ndim == 3 for image in images):
        images = [image if image.ndim == 3 else np.stack([image] * 3, axis=-1) for image in images]
    pixels = np.stack(images)
    return pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)


def _hold_out(known: Pixels, test: Pixels, path: Path) -> Parts:
    """Use the last tenth of the training images, in a fixed random order, for validation."""
    cut = len(known) - len(known) // 10
    if cut == len(known):
        raise UserError(f"{path}: {cut} images are too few to split.")
    order = RandomState(IMAGE_SEED).permutation(len(known))
    return Parts(known[order[:cut]], known[order[cut:]], test)


def _read_idx(path: Path) -> Pixels:
    with reading(path, "an IDX file of images"):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        kind, rows, height, width = struct.unpack_from(">4I", content)
        if kind != IDX_IMAGES or min(rows, height, width) < 1:
            raise ValueError(f"magic number {kind}")
        return np.frombuffer(content, np.uint8, offset=16).reshape(rows, 1, height, width)


def _read_cifar(path: Path) -> Pixels:
    """Read the images of a file of records, without the class that each begins with."""
    with reading(path, "a file of CIFAR-10 in its binary version"):
        size = 1 + int(np.prod(CIFAR_SHAPE))
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, size)
        if records[:, 0].max() >= CIFAR_CLASSES:
            raise ValueError("unknown classes")
        return records[:, 1:].reshape(-1, *CIFAR_SHAPE)


def _read_image(path: Path) -> Pixels:
    """Read one image: grey as (height, width), coloured as (height, width, 3)."""
    from PIL import Image

    with reading(path, "an image"), Image.open(path) as image:
        mode = image.mode
        clear = "A" in image.getbands() and np.asarray(image.getchannel("A")).min() < 255
        pixels = np.asarray(image.convert("L" if mode in GREY else "RGB"))
    if clear:
        raise UserError(f"{path}: some of its pixels are transparent: put it on a background first.")
    if mode not in EIGHT_BITS:
        raise UserError(f"{path}: expected 8 bits for each pixel and colour; got the mode {mode}.")
    return pixels
