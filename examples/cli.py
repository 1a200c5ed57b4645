# SPDX-License-Identifier: Apache-2.0
"""LightningCLI over lightning_mcore: the whole run in a YAML file, without other code.

``python examples/cli.py fit --config examples/configs/pretrain_gpt.yaml`` trains. Options change the file, such as
``--trainer.strategy.context_parallel_size=2 --trainer.devices=8``. ``python examples/cli.py fit --help`` explains every
argument.
"""

from lightning.pytorch.cli import LightningCLI

import quiet  # noqa: F401


def make_cli(run: bool = True) -> LightningCLI:
    """Build trainer, module and data from the command line, and run the sub-command it names.

    Args:
        run: False only builds; the command line then names no sub-command.
    """
    return LightningCLI(run=run, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    make_cli()
