# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory training files, run on megatron-core: ``lightning-mcore llamafactory FILE [key=value ...]``.

``arguments/documents.py`` reads the file. ``keys.py``, ``preference.py`` and ``rules.py`` say which keys are supported,
and reject the others. ``datasets.py`` looks up the datasets; ``data.py``, ``pairs.py`` and ``images.py`` read them. All
other keys are arguments of ``lightning_mcore.arguments``. ``run.py`` assembles the run, and ``cli/llamafactory.py``
runs it. Importing this package imports nothing else.
"""
