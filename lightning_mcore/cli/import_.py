# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore import``: a sharded checkpoint of a Hugging Face model.

``__init__.py`` calls :func:`run`; the work is that of ``hf/import_checkpoint.py``, which is imported when the arguments
are read.
"""

from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command_errors import carried_out
from lightning_mcore.cli.command_parser import CommandParser

DTYPES = ["auto", "bfloat16", "float16", "float32"]


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: What follows its name.
    """
    parser = CommandParser(
        "import", "Make CKPT, a sharded checkpoint for every layout, of a Hugging Face model; needs no GPU."
    )
    parser.add_argument(
        "path", metavar="HF", help="folder of a Hugging Face model, in safetensors, or its name on the hub"
    )
    parser.add_argument("out", metavar="CKPT", help="the checkpoint, a directory that does not exist yet")
    parser.add_argument("--family", help='model_type, or "package.module:FAMILY" (what its config says)')
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights in it (that of the model's)")
    options = parser.read(arguments)
    return carried_out(lambda: _import(**options))


def _import(path: str, out: str, **options: Any) -> None:
    from lightning_mcore.hf.import_checkpoint import import_checkpoint

    import_checkpoint(path, out, **options)
