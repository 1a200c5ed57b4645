# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore export``: a Hugging Face model of a sharded checkpoint.

``__init__.py`` calls :func:`run`; the work is that of ``hf/export.py``, which is imported when the arguments are read.
"""

from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command_errors import carried_out
from lightning_mcore.cli.command_parser import CommandParser
from lightning_mcore.cli.import_ import DTYPES


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: What follows its name.
    """
    parser = CommandParser(
        "export", "Make OUT, a Hugging Face model, of a sharded checkpoint of any layout; needs no GPU."
    )
    parser.add_argument("path", metavar="CKPT", help="a checkpoint of MCoreStrategy or, with --like, of Megatron-LM")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must be empty or not exist")
    parser.add_argument(
        "--like",
        metavar="HF",
        help="folder of a Hugging Face model whose config and tokenizer to use (those that the checkpoint names)",
    )
    parser.add_argument("--family", help='model_type, or "package.module:FAMILY" (what the checkpoint says)')
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (that of the checkpoint's)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file, such as 500MB (5GB)")
    options = parser.read(arguments)
    return carried_out(lambda: _export(**options))


def _export(path: str, out: str, **options: Any) -> None:
    from lightning_mcore.hf.export import export_checkpoint

    export_checkpoint(path, out, **options)
