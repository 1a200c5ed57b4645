# SPDX-License-Identifier: Apache-2.0
"""muP by Megatron's fields: logits and learning rates are Megatron's, and a narrow model's rate serves a wide one."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from lightning_mcore import MCoreGPT, Recipe, single_process

pytestmark = [
    pytest.mark.skipif(
        not hasattr(TransformerConfig, "use_mup"), reason="megatron-core has muP since 0.17; make test-latest runs this"
    ),
    pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning"),  # of Megatron
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
]

TOKENS, LENGTH, BASE = 64, 16, 32


def model(width: int, lr: float = 0.01, **fields: Any) -> MCoreGPT:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": width, "num_attention_heads": width // 8, "ffn_hidden_size": 2 * width}
    recipe = Recipe(
        learning_rate=lr, min_learning_rate=lr, weight_decay=0.01, optimizer=fields.pop("optimizer", "adamw")
    )
    ends = {name: fields.pop(name) for name in ("share_embeddings_and_output_weights",) if name in fields}
    module = MCoreGPT(TOKENS, LENGTH, {**sizes, **fields}, recipe=recipe, **ends)
    module.configure_model()
    return module


MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": 8.0}


def test_the_logits_are_scaled_as_megatrons_are() -> None:
    with single_process():
        module = model(128, **MUP)
        chunk: Any = module.model.chunks[0]
        tokens, positions = torch.arange(LENGTH)[None], torch.arange(LENGTH)[None]
        found = chunk(tokens, positions, None)
        chunk.output_layer._forward_hooks.clear()
        plain = chunk(tokens, positions, None)
        assert torch.equal(found, GPTModel._scale_logits(chunk, plain))
        assert not torch.equal(found, plain)
        assert chunk.decoder.layers[0].self_attention.core_attention.softmax_scale == 8**0.5 / 8


@pytest.mark.parametrize("tied", [False, True])
def test_fresh_weights_are_as_wide_as_megatrons(tied: bool) -> None:
    torch.manual_seed(0)
    with single_process():
        module = model(128, share_embeddings_and_output_weights=tied, **MUP)
        assert module.config is not None
        theirs = GPTModel(
            module.config,
            get_gpt_layer_local_spec(),
            vocab_size=TOKENS,
            max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        )
        wanted = {name: weight.std().item() for name, weight in theirs.named_parameters() if weight.dim() > 1}
        found = dict(module.model.chunks[0].named_parameters())
        assert len(wanted) == (9 if tied else 10)
        assert {name: found[name].std().item() for name in wanted} == pytest.approx(wanted, rel=0.1)


def test_a_factor_of_the_logits_without_mup_does_nothing() -> None:
    with single_process():
        assert not model(32, mup_output_mult=0.25).model.chunks[0].output_layer._forward_hooks


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_learning_rates_are_megatrons(optimizer: str) -> None:
    from megatron.core.optimizer import get_mup_config_overrides

    with single_process():
        module = model(128, optimizer=optimizer, **MUP)
        named = [*module.named_parameters()]
        width = module.config.mup_width_mult
        assert width == 4
        made = module.recipe.build_optimizer(named, width)
    kind = "adam" if optimizer == "adamw" else "sgd"
    config = OptimizerConfig(optimizer=kind, lr=0.01, min_lr=0.01, adam_eps=module.recipe.eps)
    rules = get_mup_config_overrides(config, width, kind)
    groups = {id(p): group for group in made.param_groups for p in group["params"]}
    assert len(groups) == len(named)
    for name, parameter in named:
        own = groups[id(parameter)]
        wanted = {"max_lr": 0.01, "eps": module.recipe.eps}
        for key, values in rules.items():
            if key.matches(parameter, name):
                wanted |= values
        assert own["lr"] == pytest.approx(wanted["max_lr"]), name
        assert own.get("eps", wanted["eps"]) == pytest.approx(wanted["eps"]), name


def trained(width: int, lr: float, **fields: Any) -> float:
    """Return the mean loss of the last five of 24 steps on a text with four possible next tokens."""
    module = model(width, lr, **fields)
    optimizer = module.recipe.build_optimizer([*module.named_parameters()], module.config.mup_width_mult)
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(0, TOKENS, (TOKENS, 4), generator=generator)
    found = []
    for _ in range(24):
        rows = [torch.randint(0, TOKENS, (16,), generator=generator)]
        for _ in range(LENGTH):
            rows.append(follows[rows[-1], torch.randint(0, 4, (16,), generator=generator)])
        tokens = torch.stack(rows, dim=1)
        losses, _ = module.token_losses({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return sum(found[-5:]) / 5


@pytest.mark.thorough
def test_the_learning_rate_of_the_narrowest_of_three_models_serves_the_widest() -> None:
    """With muP the widest loses 0.5 % by it, and 9.7 % without."""
    rates, widths = [2**-9, 2**-7, 2**-5, 2**-3], (64, 128, 256)
    costs: dict[bool, list[float]] = {}
    with single_process():
        for is_mup in (True, False):
            losses = [{lr: trained(width, lr, **(MUP if is_mup else {})) for lr in rates} for width in widths]
            chosen = min(rates, key=lambda lr: losses[0][lr])
            costs[is_mup] = [of_width[chosen] / min(of_width.values()) - 1 for of_width in losses]
    assert max(costs[True]) < 0.02, costs
    assert costs[False][-1] > 0.05, costs
