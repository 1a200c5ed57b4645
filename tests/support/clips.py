# SPDX-License-Identifier: Apache-2.0
"""Videos of noise, made on the spot without loss, so that every release of FFmpeg decodes the same frames."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def frames_of(count: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return frames that differ, [count, height, width, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 255, (count, 4, 4, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(each).resize((width, height))) for each in coarse])


def write_clip(
    file: Path,
    count: int,
    width: int,
    height: int,
    rate: int = 8,
    seed: int = 0,
    codec: str = "png",
    hidden: int = 0,
    **options: str,
) -> str:
    """Write a video unless it is there, and return its name.

    Args:
        file: Its path; the ending is that of a container: ``.mov`` counts frames in its header, ``.mkv`` does not.
        count: Number of frames.
        width: In pixels.
        height: In pixels.
        rate: Frames of a second.
        seed: Of the noise.
        codec: A codec without loss.
        hidden: How many frames at the start a list of edits cuts off; the header of ``.mov`` counts them.
        options: Of the container.
    """
    if not file.exists():
        import av

        part = file.with_name(f"{os.getpid()}-{file.name}")  # several ranks may write it
        with av.open(str(part), "w", options=options) as container:
            stream: Any = container.add_stream(codec, rate=rate)
            stream.width, stream.height = width, height
            stream.pix_fmt = "rgb24" if codec == "png" else "bgr0"
            frames = [
                av.VideoFrame.from_ndarray(pixels, format="rgb24") for pixels in frames_of(count, width, height, seed)
            ]
            for packet in [packet for frame in (*frames, None) for packet in stream.encode(frame)]:
                packet.pts = packet.dts = packet.pts - round(hidden / rate / packet.time_base)
                container.mux(packet)
        part.replace(file)
    return file.name
