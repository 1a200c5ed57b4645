# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory files that export a model, with PEFT adapters merged into it, as a Hugging Face folder.

``cli/llamafactory.py`` asks :func:`read_export` first, because the same command trains and exports.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mcore.arguments.llamafactory.rules import check_supported, own_keys, read_keys
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.hf.family import VALUE_HEAD_FILE
from lightning_mcore.hf.source import local_folder, read_config, seeing_name, sees_images

_OWN = ("export_dir", "export_size", "export_device")  # a device has no effect: tensors are written from the CPU


@dataclass(frozen=True)
class FactoryExport:
    """The export that a file asks for."""

    model: str
    adapters: tuple[str, ...]  # folders, merged in this order
    out: str
    max_shard_size: str

    def write(self) -> None:
        """Merge the adapters and write the model, all in this process."""
        from lightning_mcore.hf.peft_folder import has_scores
        from lightning_mcore.interop.export import export_model
        from lightning_mcore.interop.export_folder import require_free
        from lightning_mcore.layers.session import single_process
        from lightning_mcore.models.gpt import MCoreGPT
        from lightning_mcore.models.preference import MCorePreference
        from lightning_mcore.models.vision import MCoreVisionGPT

        # Before the model is read, which may take minutes.
        require_free(self.out)
        config = read_config(self.model)
        dtype = config.get("dtype") or config.get("torch_dtype") or "auto"
        # The whole model, even if its language model may be read alone
        kind = MCoreVisionGPT if sees_images(self.model, seeing_name(self.model, None)) else MCoreGPT
        adapters = list(self.adapters)
        scored = [path for path in adapters if has_scores(path)]
        module: MCoreGPT
        if not scored:
            module = kind.from_pretrained(self.model, adapters=adapters)
        elif kind is MCoreVisionGPT or scored[-1] != adapters[-1]:
            raise ValueError(
                f"adapter_name_or_path has {scored[-1]}, which has a score layer; its model may have no images, and it"
                " must be the last adapter"
            )
        else:
            module = MCorePreference.from_pretrained(self.model, preference={"loss": "reward"}, adapters=adapters)
        module.check_settings()
        with single_process():
            module.configure_model()
            export_model(module, self.out, dtype=dtype, max_shard_size=self.max_shard_size)
        # LLaMA-Factory keeps a reward model's score layer in a file next to the adapter or the model
        heads = [os.path.join(local_folder(path), VALUE_HEAD_FILE) for path in (self.model, *adapters)]
        if not scored and (found := [head for head in heads if os.path.exists(head)]):
            shutil.copy(found[-1], self.out)


def read_export(path: str | None, overrides: Sequence[str] = ()) -> FactoryExport | None:
    """Return the export that a file asks for, after its changes (``key=value``); None if it trains or evaluates."""
    given = read_keys(path, overrides)
    out = given.get("export_dir")
    if not out or given.get("do_train") or given.get("do_eval"):
        return None
    keys = own_keys(given)
    check_supported({key: value for key, value in given.items() if key not in _OWN})
    if keys.quantization_bit is not None:
        raise ValueError(
            f"quantization_bit: {keys.quantization_bit} contradicts export_dir: {out}, because adapters cannot be"
            " merged into quantized weights; leave it out to merge them into the model itself"
        )
    size = given.get("export_size", 5)
    require_size("export_size", size)
    return FactoryExport(str(keys.model_name_or_path), tuple(keys.adapters), str(out), f"{size}GB")
