# SPDX-License-Identifier: Apache-2.0
"""Every field of ``TrainingArguments`` is in a table, and is parsed alike from words, YAML, JSON and a dict.

Where the fields land in a live run is shown by ``tests/distributed/test_arguments.py``; what a CPU cannot run is shown
here on config objects, and what is refused by its sentence.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from megatron.core.optimizer import OptimizerConfig
from transformers import HfArgumentParser

from lightning_mcore.arguments import (
    DistributingParallelArguments,
    MegatronArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    parse_arguments,
)
from lightning_mcore.arguments.build import make_precision, make_strategy
from lightning_mcore.arguments.mapping import callback_settings, logger_settings
from lightning_mcore.arguments.training_rules import IGNORED, REFUSED, SUPPORTED
from tests.distributed.test_arguments import words
from tests.support.argument_table import LIVE, ON_CONFIGS, REFUSED_OURS, Landing
from tests.support.sentences import refuses, says

FIELDS = {field.name: field for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
OURS = {field.name for field in dataclasses.fields(MegatronArguments)}
SHOWN = {landing.name for run in LIVE.values() for landing in run.landings} | {row.name for _, row in ON_CONFIGS}


def as_given(values: dict[str, Any], parsed: Any) -> dict[str, Any]:
    """Return the values that parsed arguments have for these names, as plain data."""
    found = {name: getattr(getattr(parsed, name), "value", getattr(parsed, name)) for name in values}
    if "recompute_modules" in found:  # a list in the arguments, as in mcore_adapter's
        found["recompute_modules"] = ",".join(found["recompute_modules"])
    return found


def test_every_field_is_in_a_table() -> None:
    refused = {name for name, _ in REFUSED_OURS}
    assert not OURS - SHOWN - refused
    # Of deepspeed nothing but the distributed optimizer is left; other fields may be newer than this transformers.
    assert {"deepspeed"} == (SUPPORTED - SHOWN) & set(FIELDS)
    foreign = set(FIELDS) - OURS
    assert not foreign - SUPPORTED - set(REFUSED) - set(IGNORED)


def test_the_peer_has_no_field_that_is_not_there() -> None:
    assert len(dataclasses.fields(DistributingParallelArguments)) == 38
    assert len(OURS - {"use_megatron_fsdp", "data_parallel_sharding_strategy"}) == 57  # these two are Megatron-LM's


def test_every_field_has_a_help_text() -> None:
    assert [name for name in OURS if len(FIELDS[name].metadata.get("help", "")) < 10] == []


@pytest.mark.parametrize("name", LIVE)
def test_a_run_is_parsed_alike_from_words_yaml_json_and_a_dict(name: str, tmp_path: Path) -> None:
    values = {"output_dir": str(tmp_path), **LIVE[name].values}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps(values), encoding="utf-8")
    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    ways = [
        parser.parse_args_into_dataclasses(words(values), look_for_args_file=False)[0],
        parser.parse_yaml_file(str(tmp_path / "run.yaml"))[0],
        TrainingArguments.from_json_file(str(tmp_path / "run.json")),
        TrainingArguments(**values),
        parse_arguments([str(tmp_path / "run.yaml")])[0],
        parse_arguments(words(values))[0],
    ]
    for parsed in ways:
        assert as_given(values, parsed) | {"accumulate_allreduce_grads_in_fp32": None} == {
            **values,
            "accumulate_allreduce_grads_in_fp32": None,
        }
        assert parsed.settings() == ways[0].settings()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("base", "landing"), ON_CONFIGS, ids=lambda item: getattr(item, "name", ""))
def test_a_field_that_a_cpu_cannot_run_lands_in_a_config(
    base: dict[str, Any], landing: Landing, tmp_path: Path
) -> None:
    values = {"output_dir": str(tmp_path), **base, landing.name: landing.value}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    for parsed in (parse_arguments(words(values)), parse_arguments(path)):
        settings = parsed[0].settings()
        scope = {
            "settings": settings,
            "transformer": _Attributes(settings.model["transformer"]),
            "precision": make_precision(settings.precision),
            "strategy": make_strategy(settings.strategy) if landing.place.startswith("strategy.") else None,
            "optimizer_config": optimizer_config(settings.strategy),
            "callbacks": callback_settings(parsed[0]),
            "loggers": logger_settings(parsed[0]),
        }
        assert eval(landing.place, scope) == landing.expected


def optimizer_config(strategy: Any) -> OptimizerConfig:
    """Return Megatron's config of its optimizers, without the option that Megatron checks TransformerEngine for."""
    return OptimizerConfig(**{**strategy.get("optimizer_config", {}), "use_precision_aware_optimizer": False})


def test_an_offload_without_transformer_engine_is_refused(tmp_path: Path) -> None:
    """On a CPU there is nothing to offload, and the option is left out."""
    args = TrainingArguments(output_dir=str(tmp_path), use_distributed_optimizer=True, optimizer_cpu_offload=True)
    with refuses(ModuleNotFoundError, "optimizer_cpu_offload=True"):
        make_strategy(args.settings(on_cpu=False).strategy)
    assert args.strategy().optimizer_config is None


class _Attributes:
    def __init__(self, values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(("name", "value"), REFUSED_OURS)
def test_what_nobody_would_carry_out_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}='?{value}'?.*;"):
        MegatronArguments(**{name: value})


def other_value(name: str) -> Any:
    """Return a value of the field's type that is not its default, and that means something."""
    field = FIELDS[name]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    special = {"hub_strategy": "end", "debug": "underflow_overflow", "fsdp": "full_shard"}
    if name in special:
        return special[name]
    hint = get_type_hints(Seq2SeqTrainingArguments)[name]
    kinds = [item for item in (get_args(hint) or (hint,)) if item is not type(None)]
    for kind in kinds:
        if get_origin(kind) is list or get_origin(hint) is list:
            return ["some"]
        if kind is bool:
            return not default
        if kind in (int, float):
            return (default or 0) + 1
        if kind is str:
            return "other"
        if kind is dict or get_origin(kind) is dict:
            return {"some": True}
    return "other"


ONE_OF_EACH_REASON = {reason: name for name, reason in REFUSED.items() if name in FIELDS}.values()


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(FIELDS)))
def test_what_transformers_trainer_alone_can_do_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name}=") as caught:
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), **{name: other_value(name)})
    if name in ONE_OF_EACH_REASON:
        says(str(caught.value))


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_happens_anyway_may_be_said(name: str, tmp_path: Path) -> None:
    TrainingArguments(output_dir=str(tmp_path), **{name: other_value(name)})


WITHOUT_EFFECT_ON_SETTINGS = {
    "average_tokens_across_devices": "it agrees with calculate_per_token_loss, or is refused",
    "bf16_full_eval": "it agrees with bf16, or is refused",
    "fp16_full_eval": "it agrees with fp16, or is refused",
    "ckpt_format": "the other format is refused",
    "distrib_optim_fully_reshardable": "checkpoints always are",
    "distrib_optim_fully_reshardable_mem_efficient": "checkpoints always are written without gathering",
    "ddp_find_unused_parameters": "the other value is refused",
    "log_level": "it is set when the trainer is made",
    "logging_first_step": "it agrees with logging_steps=1, or is refused",
    "optim": "it agrees with optimizer, or is refused",
    "tf32": "it is set when the trainer is made",
}


def everything_that_follows(values: dict[str, Any]) -> Any:
    """Return all that arguments mean, as plain data; the refusal where they are refused."""
    try:
        args = TrainingArguments(**values)
    except ValueError as refusal:
        return str(refusal)
    return args.settings(), callback_settings(args), logger_settings(args), args.stages, args.ckpt_path


@pytest.mark.parametrize("name", sorted(SHOWN - set(WITHOUT_EFFECT_ON_SETTINGS)))
def test_no_field_is_decorative(name: str, tmp_path: Path) -> None:
    rows = [run.values for run in LIVE.values() if name in run.values]
    rows += [{**base, landing.name: landing.value} for base, landing in ON_CONFIGS if landing.name == name]
    assert any(
        everything_that_follows({"output_dir": str(tmp_path), **row})
        != everything_that_follows({key: value for key, value in row.items() if key != name})
        for row in ({"output_dir": str(tmp_path), **row} for row in rows)
    )


def test_a_copy_with_one_other_field_is_accepted(tmp_path: Path) -> None:
    for run in LIVE.values():
        args = TrainingArguments(**{"output_dir": str(tmp_path), **run.values})
        copy = dataclasses.replace(args, weight_decay=0.5)
        assert copy.settings() != args.settings()
        assert dataclasses.replace(copy, weight_decay=args.weight_decay) == args
