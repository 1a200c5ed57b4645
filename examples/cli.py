# SPDX-License-Identifier: Apache-2.0
"""LightningCLI with lightning_mcore: a whole run described by one YAML file, with no other code.

``python examples/cli.py fit --config examples/configs/pretrain_gpt.yaml`` trains a model. Options
such as ``--trainer.strategy.context_parallel_size=2 --trainer.devices=8`` override the file, and ``fit --help``
explains every argument.
"""

from lightning.pytorch.cli import LightningCLI


def make_cli(run: bool = True) -> LightningCLI:
    """Build trainer, module and data from the command line, and run its subcommand.

    Args:
        run: Whether to run; if False, the command line has no subcommand.
    """
    return LightningCLI(run=run, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    make_cli()
