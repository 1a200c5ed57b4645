# SPDX-License-Identifier: Apache-2.0
"""The files of images and videos, as rows have them: paths within ``media_dir``, or the bytes of files.

``images.py`` and ``videos.py`` open them: when rows are tokenised, to count tokens, and when batches are made.
"""

import os
from collections.abc import Mapping
from io import BytesIO
from typing import Any

Stored = dict[str, Any]
"""A file: its ``path`` within ``media_dir``, or its ``bytes``; the other is None."""


class UnusableFileError(ValueError):
    """An image or a video does not exist, or cannot be read or used."""


def stored(given: Any, kind: str, name: str) -> Stored:
    """Return a file as its path or its bytes.

    Args:
        given: A path, bytes, or a mapping with ``path`` and ``bytes``.
        kind: What it is, for errors: ``"an image"`` or ``"a video"``.
        name: What to call the row in an error.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(given, str) and given:
        return {"path": given, "bytes": None}
    if isinstance(given, bytes):
        return {"path": None, "bytes": given}
    if isinstance(given, Mapping):
        path, content = given.get("path"), given.get("bytes")
        if (isinstance(content, bytes) and content) or (content is None and isinstance(path, str) and path):
            return {"path": path, "bytes": content}
    raise TypeError(f"{name} has {kind} of type {type(given).__name__}; give its path, or the bytes of its file")


def called(file: Stored, media_dir: str) -> str:
    """Return a name for a file in errors."""
    return os.path.join(media_dir, file["path"]) if file["path"] else f"one of {len(file['bytes'])} bytes"


def source(file: Stored, media_dir: str, kind: str, name: str) -> str | BytesIO:
    """Return the path of a file, or its bytes as a file.

    Args:
        file: Its path or its bytes.
        media_dir: The folder that the path is relative to.
        kind: What it is, for errors: ``"an image"`` or ``"a video"``.
        name: What to call the row in an error.

    Raises:
        ValueError: There is no such file.
    """
    if file["bytes"] is not None:
        return BytesIO(file["bytes"])
    path = os.path.join(media_dir, file["path"])
    if not os.path.isfile(path):
        raise UnusableFileError(f"{path}, {kind} of {name}, does not exist; give its path, relative to media_dir")
    return path


def opened_image(file: Stored, media_dir: str, name: str) -> Any:
    """Open an image of a row; only its header is read.

    Args:
        file: Its path or its bytes.
        media_dir: The folder that the path is relative to.
        name: What to call the row in an error.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
        ValueError: The file does not exist, or is not an image.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images need Pillow, which is not installed; install lightning-mcore[vision]"
        ) from error
    try:
        return Image.open(source(file, media_dir, "an image", name))
    except (OSError, Image.DecompressionBombError) as error:
        raise UnusableFileError(
            f"{called(file, media_dir)}, an image of {name}, is not an image that can be read; give its path, relative"
            " to media_dir"
        ) from error


def loaded_image(file: Stored, media_dir: str, name: str) -> Any:
    """Read an image of a row; the arguments and errors are those of :func:`opened_image`.

    Raises:
        ValueError: Also if the file is damaged beyond its header.
    """
    with opened_image(file, media_dir, name) as image:
        try:
            image.load()
        except (OSError, SyntaxError, ValueError) as error:
            what = called(file, media_dir)
            raise UnusableFileError(f"{what} is damaged: {error}; replace it, or leave its row out") from error
        return image
