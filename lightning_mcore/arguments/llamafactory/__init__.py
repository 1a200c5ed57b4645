# SPDX-License-Identifier: Apache-2.0
"""Training files of LLaMA-Factory, run on megatron-core: ``lightning-mcore llamafactory FILE [key=value ...]``.

A file is read (``file.py``), its keys are sorted into those that are carried out and those that are refused
(``keys.py``, ``keys.py``, ``rules.py``), the datasets are looked up (``datasets.py``) and read
(``rows.py``, ``data.py``), and the rest are arguments of ``lightning_mcore.arguments``.
``run.py`` puts it together, ``cli/llamafactory.py`` runs it. Importing this package imports nothing.
"""
