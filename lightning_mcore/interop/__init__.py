# SPDX-License-Identifier: Apache-2.0
"""Turn this package's models into Hugging Face models and back, and use one like the other.

``export.py`` and ``importing.py`` convert checkpoints and running models, ``callback.py`` exports during a run,
``named_weights.py`` streams weights to an engine outside, and ``auto_model.py`` makes a model that is called like
transformers'. Users import the names from ``lightning_mcore.hf``.
"""
