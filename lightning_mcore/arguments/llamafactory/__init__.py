# SPDX-License-Identifier: Apache-2.0
"""Training files of LLaMA-Factory, run on megatron-core: ``lightning-mcore llamafactory FILE [key=value ...]``.

A file is read (``factory_file.py``), its keys are sorted into those that are carried out and those that are refused
(``factory_keys.py``, ``refused_keys.py``, ``key_rules.py``), the datasets are looked up (``dataset_info.py``) and read
(``factory_rows.py``, ``factory_data.py``), and the rest are arguments of ``lightning_mcore.arguments``.
``factory_run.py`` puts it together, ``llamafactory_command.py`` runs it. Importing this package imports nothing.
"""
