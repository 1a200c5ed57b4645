# SPDX-License-Identifier: Apache-2.0
"""Text: lists of names, JSON objects, and for messages the nearest name for an unknown one, and short numbers."""

import difflib
import json
from collections.abc import Iterable
from typing import Any

_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def split_names(given: str | Iterable[str]) -> list[str]:
    """Return names from a list or from comma-separated text: ``"q_proj, v_proj"`` gives ``["q_proj", "v_proj"]``."""
    return [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]


_ELSEWHERE = {
    "global_batch_size": (
        "each model copy reads batch_size * accumulate_grad_batches rows in an optimizer step; set batch_size of the"
        " data and accumulate_grad_batches of the trainer"
    ),
    "context_parallel_size": "set it in the strategy",
    "micro_batch_size": "set it in the strategy",
    "pipeline_model_parallel_size": "set it in the strategy",
    "rampup_batch_size": "batches have the same size in a whole run; leave it out",
    "sequence_parallel": "set it in the strategy",
    "tensor_model_parallel_size": "set it in the strategy",
    "bias": "adapters train no biases; leave it out",
    "bf16": "set precision of the trainer to bf16-mixed",
    "ddp_timeout": "set timeout of the strategy",
    "eval_steps": "set val_check_interval of the trainer, in batches",
    "fp16": "set precision of the trainer to 16-mixed",
    "gradient_accumulation_steps": "set accumulate_grad_batches of the trainer",
    "group_by_length": "rows of equal length are not collected; packing leaves almost no padding",
    "gradient_checkpointing": "set recompute_granularity in transformer of the model",
    "logging_dir": "loggers write to the output folder of the run; leave it out",
    "logging_steps": "set log_every_n_steps of the trainer",
    "max_grad_norm": "set gradient_clip_val of the trainer",
    "num_train_epochs": "set max_epochs of the trainer",
    "output_dir": "set default_root_dir of the trainer",
    "packing": "set packing of the data",
    "per_device_eval_batch_size": "set eval_batch_size of the data",
    "per_device_train_batch_size": "set batch_size of the data",
    "report_to": "set logger of the trainer",
    "save_safetensors": "models are always written as safetensors; leave it out",
    "save_steps": "set every_n_train_steps of ModelCheckpoint, a callback of the trainer",
    "save_total_limit": "set save_top_k of ModelCheckpoint, a callback of the trainer",
    "task_type": "the class of the model says what is trained; leave it out",
}
"""Names of Megatron-LM, transformers and PEFT that no option has, and what to do instead."""


_SHORT = {
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "epochs": "max_epochs",
    "evaluation_strategy": "eval_strategy",
    "lr": "learning_rate",
    "no_cuda": "use_cpu",
    "rank": "r",
    "steps": "max_steps",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
}
"""Short and older names, and what they stand for where there is such a name."""

_MOST_NAMES = 12  # an error lists no more
_SIMILAR = 0.65  # "fti" is that close to "fit"; "rope_theta" is a little less close to "pref_beta"


def unknown_name(what: str, name: str, known: Iterable[str], where: str = "look for it in the documentation") -> str:
    """Return a sentence that rejects a name: ``unknown option 'lerning_rate'; did you mean 'learning_rate'?``.

    ``what`` is the kind of name, such as ``"option"`` or ``"key of run.yaml"``. ``where`` says what to do if no name is
    similar, and there are too many to list them.
    """
    last = name.removeprefix("--").rpartition(".")[2].replace("-", "_")
    names = sorted(set(known))
    if last in _ELSEWHERE and last not in {each.removeprefix("--").replace("-", "_") for each in names}:
        return f"unknown {what} {name!r}; {_ELSEWHERE[last]}"
    similar = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    close = [each for each in names if each == _SHORT.get(last)] or similar
    if close:
        return f"unknown {what} {name!r}; did you mean {close[0]!r}?"
    if len(names) > _MOST_NAMES:
        return f"unknown {what} {name!r}, which is like none of the {len(names)} known names; {where}"
    return f"unknown {what} {name!r}; choose from {', '.join(names)}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 row``, ``1,024 rows``."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def json_object(what: str, text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text; ``what``, such as ``"init_kwargs='{'"``, begins its ValueError."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}; give an object") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{what} holds a {type(loaded).__name__}, not an object; give an object")
    return loaded


def human(value: float) -> str:
    """Return a number as short text: ``12.3k``, ``2.31``, ``4.1e-05``."""
    size = abs(value)
    for prefix, unit in _PREFIXES:
        # With three digits, 999,600 would print as 1.00e+03k, so it is already 1.00M.
        if unit * 0.9995 <= size < 1e15:
            return f"{value / unit:#.3g}".rstrip(".") + prefix
    if size == 0 or 1e-3 <= size < 1e3:
        return f"{value:.4g}"
    return f"{value:.2g}"
