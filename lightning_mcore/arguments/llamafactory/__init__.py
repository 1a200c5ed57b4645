# SPDX-License-Identifier: Apache-2.0
"""Training files of LLaMA-Factory, run on megatron-core: ``lightning-mcore llamafactory FILE [key=value ...]``.

A file is read (``arguments/llamafactory/file.py``), its keys are sorted into those that are carried out and those that are refused
(``arguments/llamafactory/keys.py``, ``arguments/llamafactory/refused_keys.py``, ``arguments/llamafactory/rules.py``), the datasets are looked up (``arguments/llamafactory/datasets.py``) and read
(``arguments/llamafactory/rows.py``, ``arguments/llamafactory/data.py``), and the rest are arguments of ``lightning_mcore.arguments``.
``arguments/llamafactory/run.py`` puts it together, ``cli/llamafactory.py`` runs it. Importing this package imports nothing.
"""
