# SPDX-License-Identifier: Apache-2.0
"""The image and video processors of a model, transformers classes that ``images.py`` and ``videos.py`` load."""

from typing import Any, Literal

from lightning_mcore.data.preprocess.worker import first_line

Kind = Literal["image", "video"]


def require_processor(kind: Kind, given: Any) -> None:
    """Raise TypeError unless an argument can be a processor, the folder or name of a model, or None."""
    if not (given is None or isinstance(given, str) or hasattr(given, "to_json_string")):
        raise TypeError(
            f"{kind}_processor is of type {type(given).__name__}; give a folder or name of a model, or its {kind}"
            " processor"
        )


def load_processor(given: Any, kind: Kind) -> Any:
    """Return a processor whose limits are checked; code in its folder is not run."""
    processor = given
    if isinstance(given, str):
        import transformers

        loader: Any = transformers.AutoImageProcessor if kind == "image" else transformers.AutoVideoProcessor
        # Always the Pillow processor: patches must not depend on whether torchvision is installed.
        backend = {"backend": "pil"} if kind == "image" else {}
        try:
            processor = loader.from_pretrained(given, trust_remote_code=False, **backend)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"the {kind} processor of {given!r} cannot be loaded: {first_line(error)}; give a folder or name of a"
                " model that has one"
            ) from error
    # Qwen-VL towers merge merge_size x merge_size patches into one token.
    if not hasattr(processor, "merge_size"):
        raise TypeError(
            f"{type(processor).__name__} is not the {kind} processor of a Qwen-VL model; give a folder or name of such"
            f" a model, or its {kind} processor"
        )
    # Despite the names, these are the least and the most pixels of an image.
    least, most = (processor.size[name] for name in ("shortest_edge", "longest_edge"))
    if not 0 < least <= most:
        raise ValueError(
            f"the {kind} processor has a minimum of {least} pixels and a maximum of {most} for"
            f" {'an image' if kind == 'image' else 'a video'}; set a minimum that is not above the maximum"
        )
    return processor
