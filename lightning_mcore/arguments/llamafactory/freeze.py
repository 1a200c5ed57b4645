# SPDX-License-Identifier: Apache-2.0
"""``finetuning_type: freeze``: which weights are trained, as ``MCoreGPT(train_only=...)`` takes them.

As in LLaMA-Factory, the last layers are trained, or the first ones for a negative number. Outside the layers, only
``freeze_extra_modules`` are trained. A weight belongs to these if its name contains one of them, so ``norm`` also means
the norms inside the layers. The score layer of a reward model is always trained, because it starts from random values.
"""

from lightning_mcore.arguments.llamafactory.keys import FactoryKeys
from lightning_mcore.config.text import split_names
from lightning_mcore.hf.adapters import tensor_names
from lightning_mcore.hf.family import SCORE, SCORING
from lightning_mcore.hf.registry import family_and_fields
from lightning_mcore.hf.source import planned_settings, variant_name


def trained_parts(keys: FactoryKeys) -> list[str]:
    """Return parts of Hugging Face names; weights with one of these parts in their names are trained."""
    path, is_reward = str(keys.model_name_or_path), keys.stage == "rm"
    name = variant_name(path, None, SCORING if is_reward else "")
    family, fields = family_and_fields(planned_settings(path, name))
    names = [name for of_weight in tensor_names(family, fields).values() for name in of_weight]
    prefix = family.layer_prefix.partition("{layer}")[0]
    # "model.layers.0.self_attn.q_proj.weight" has the module self_attn; "model.norm.weight", outside, has norm.
    count, total = keys.freeze_trainable_layers, int(fields["num_layers"])
    layers = range(max(0, total - count), total) if count > 0 else range(min(-count, total))
    chosen = tuple(f"{prefix}{layer}." for layer in layers)
    in_layers = {name.removeprefix(prefix).split(".")[1] for name in names if name.startswith(chosen or prefix)}
    outside = {name.split(".")[-2] for name in names if not name.startswith(prefix)}
    lacks = f"the layers chosen by freeze_trainable_layers: {count} lack"
    modules = _chosen("freeze_trainable_modules", keys.freeze_trainable_modules, {"all", *in_layers}, lacks)
    extra = _chosen("freeze_extra_modules", keys.freeze_extra_modules, outside, "the model lacks")
    if is_reward:
        extra.append(SCORE)
    # The last 2 of 4 layers are "model.layers.2." and "model.layers.3."; with modules, "model.layers.2.mlp." etc.
    parts = [f"{layer}{'' if name == 'all' else f'{name}.'}" for name in modules for layer in chosen]
    # Not every layer has each module: only Kimi Linear's first has mlp, and the others block_sparse_moe.
    parts = [part for part in parts if any(name.startswith(part) for name in names)] + extra
    if not parts:
        raise ValueError(
            f"freeze_trainable_layers: {count} without freeze_extra_modules trains nothing; choose another number, or"
            " name modules"
        )
    return parts


def _chosen(key: str, given: str | None, known: set[str], lacks: str) -> list[str]:
    names = [] if given is None else split_names(given)
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: {given} has {name!r}, which {lacks}; choose {', '.join(sorted(known))}")
    return names
