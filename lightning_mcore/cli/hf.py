# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore import`` and ``lightning-mcore export``: Hugging Face models to sharded checkpoints and back.

``__init__.py`` calls :func:`run`. ``interop/importing.py`` and ``interop/export.py`` do the work; they are imported
after the arguments are read, so that ``--help`` and errors are fast.
"""

from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command import CommandParser, run_command

_DTYPES = ["auto", "bfloat16", "float16", "float32"]


def run(arguments: Sequence[str]) -> int:
    """Run ``import`` or ``export`` (the first word, before its own words) and return the exit code."""
    name, *rest = arguments
    options = (_import_parser() if name == "import" else _export_parser()).read(rest)
    return run_command(lambda: _import(**options) if name == "import" else _export(**options))


def _import_parser() -> CommandParser:
    parser = CommandParser(
        "import", "Convert a Hugging Face model to a sharded checkpoint that any layout can load; needs no GPU."
    )
    parser.add_argument(
        "path", metavar="HF", help="folder of a Hugging Face model, in safetensors, or its name on the hub"
    )
    parser.add_argument("out", metavar="CKPT", help="the checkpoint, a directory that does not exist yet")
    parser.add_argument("--family", help='model_type, or "package.module:FAMILY" (default: the family in its config)')
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="dtype of the weights in the checkpoint (default: the model's)"
    )
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="PEFT",
        help="convert this PEFT adapter of HF, with all of HF in memory; if given several times, all but the last are"
        " merged into HF first",
    )
    return parser


def _export_parser() -> CommandParser:
    parser = CommandParser(
        "export", "Convert a sharded checkpoint of any layout to a Hugging Face model; needs no GPU."
    )
    parser.add_argument("path", metavar="CKPT", help="a checkpoint of MCoreStrategy or, with --like, of Megatron-LM")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must be empty or not exist")
    parser.add_argument(
        "--like",
        metavar="HF",
        help="folder of a Hugging Face model whose config and tokenizer to use (default: the checkpoint's)",
    )
    parser.add_argument("--family", help="model_type, or 'package.module:FAMILY' (default: the checkpoint's)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="dtype of the weights (default: the checkpoint's)"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="size of a file (default: 5GB)")
    lora = parser.add_mutually_exclusive_group()
    lora.add_argument("--adapter", action="store_true", help="write the LoRA adapters alone, as a PEFT folder")
    lora.add_argument(
        "--merge", action="store_true", help="write the model with its LoRA adapters merged into it (default)"
    )
    parser.add_argument(
        "--experts",
        choices=["stacked", "each"],
        default="stacked",
        help="with --adapter: expert adapters stacked, as PEFT with transformers 5, or a pair each (default: stacked)",
    )
    parser.add_argument(
        "--push-to-hub", metavar="REPO", help="upload OUT to this repository on the hub, made private if it is new"
    )
    return parser


def _import(path: str, out: str, **options: Any) -> None:
    from lightning_mcore.interop.importing import import_checkpoint

    import_checkpoint(path, out, **options)


def _export(path: str, out: str, **options: Any) -> None:
    from lightning_mcore.interop.export import export_checkpoint

    export_checkpoint(path, out, **options)
    print(f"wrote {out}")
