# SPDX-License-Identifier: Apache-2.0
"""Draws settings of a run at random: layout, model, precision, gradients, batches, and the course of its training.

Most values are drawn so that they can fit each other, a few so that they cannot: a draw that is always accepted says
nothing about refusals, and one that is always refused nothing about training. A draw is plain data and depends on its
seed alone, so a failure is repeated by its number.
"""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

WORLD_SIZES = (1, 2, 2, 4, 4, 4, 8)
ODD_ONE_OUT = 0.03
"""How often a setting takes a value without regard to the others."""


OPTIMIZERS: dict[str, dict[str, Any]] = {  # eps: a gradient that is a rounding error shall not move a weight
    "AdamW": {"lr": 1e-2, "eps": 1e-4},
    "Adam": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1},
    "Adam amsgrad": {"lr": 1e-2, "eps": 1e-4, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 1e-2, "eps": 1e-4},
    "Adagrad": {"lr": 1e-2, "eps": 1e-4},
    "Adafactor": {"lr": 1e-2},
}


@dataclass(frozen=True)
class Course:
    """How long a run trains, where it is interrupted, and what it validates.

    Args:
        optimizer: A key of ``OPTIMIZERS``.
        steps: Optimizer steps of the whole run.
        stop: Steps until the checkpoint from which other runs go on.
        steps_in_epoch: Whole accumulation windows in an epoch.
        more_rows: Rows for each rank of the world that follow these windows in a short one.
        val_samples: The number of samples in each validation loader.
        val_rows: Rows of a validation batch.
        others: Arguments of ``MCoreStrategy``; the first that are accepted make the other layout that goes on.
    """

    optimizer: str
    steps: int
    stop: int
    steps_in_epoch: int
    more_rows: int
    val_samples: tuple[int, ...]
    val_rows: int
    others: tuple[dict[str, Any], ...] = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """One run.

    Args:
        seed: What it was drawn from.
        world_size: Number of ranks.
        strategy: Arguments of ``MCoreStrategy``.
        ddp: Fields of Megatron's ``DistributedDataParallelConfig``; empty for none.
        model: Arguments of ``MCoreGPT``.
        trainer: Arguments of ``Trainer``.
        rows: Rows of a DataLoader batch.
        course: How long it trains, where it is interrupted, and what it validates.
    """

    seed: int
    world_size: int
    strategy: dict[str, Any]
    ddp: dict[str, Any]
    model: dict[str, Any]
    trainer: dict[str, Any]
    rows: int
    course: Course

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return self.world_size // (math.prod([int(self.strategy.get(size, 1)) for size in sizes]) or 1)

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step over all ranks."""
        accumulated: int = self.trainer["accumulate_grad_batches"]
        return self.rows * accumulated * self.copies

    def on(self, strategy: dict[str, Any], world_size: int) -> "Settings | None":
        """Return the same run with the same batches on another layout; None if they do not fit there."""
        if "micro_batch_size" in self.strategy:
            strategy = {**strategy, "micro_batch_size": self.strategy["micro_batch_size"]}
        other = replace(self, world_size=world_size, strategy=strategy)
        trainer = dict(self.trainer)
        for name in ("accumulate_grad_batches", "limit_val_batches"):
            if isinstance(trainer[name], int):
                trainer[name], left = divmod(trainer[name] * self.copies, max(1, other.copies))
                if left:
                    return None
        return replace(other, trainer=trainer)

    def __str__(self) -> str:
        def spelt(arguments: dict[str, Any]) -> str:
            return ", ".join(f"{name}={value!r}" for name, value in arguments.items())

        return (
            f"seed {self.seed}, {self.world_size} ranks, batches of {self.rows}: MCoreStrategy({spelt(self.strategy)}"
            f"{', ddp_config=(' + spelt(self.ddp) + ')' if self.ddp else ''}), MCoreGPT({spelt(self.model)}),"
            f" Trainer({spelt(self.trainer)}), {self.course}"
        )


def draw(seed: int) -> Settings:
    """Return the settings of a seed."""
    return _Draw(seed).settings()


@dataclass
class _Draw:
    """One draw; parts that are drawn later look at those that are there."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def settings(self) -> Settings:
        world_size = self.rng.choice(WORLD_SIZES)
        experts = self.chance(0.35)
        strategy = self._layout(world_size, experts)
        model = self._model(strategy, experts)
        strategy |= self._gradients()
        accumulate, rows = self._batches(strategy)
        trainer: dict[str, Any] = {
            "precision": self.rng.choice(("32-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")),
            "accumulate_grad_batches": accumulate,
            "gradient_clip_val": self.rng.choice((None, 1.0)),
        }
        if self.chance(0.1):
            trainer["gradient_clip_algorithm"] = "value"
        ddp = self._ddp()
        if self.chance(ODD_ONE_OUT):
            self._put_odd_value(strategy, model)
        trainer |= self._validation()
        course = self._course(world_size, experts, strategy)
        return Settings(self.seed, world_size, strategy, ddp, model, trainer, rows, course)

    def _put_odd_value(self, strategy: dict[str, Any], model: dict[str, Any]) -> None:
        """Give one argument a value of any kind."""
        value: Any = self.rng.choice((5, 0, -1, 1.5, math.inf, "x", b"x", (), {}, [1], True))
        homes: tuple[tuple[dict[Any, Any], tuple[Any, ...]], ...] = (
            (strategy, ("communication", "checkpoint_io", "process_group_backend", "timeout")),
            (strategy, ("tp_comm_overlap_cfg", "cluster_environment", "optimizer_config")),
            (model, ("rotary_base", "rotary_percent", "rope_scaling_factor", "architecture", "recipe")),
            (model, ("seq_len_interpolation_factor", "yarn", "lora", "train_only")),
            (model["transformer"], (5, "num_layers", "window_size", "recompute_modules")),
        )
        home, names = self.rng.choice(homes)
        home[self.rng.choice(names)] = value

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def size(self, at_most: int) -> int:
        """Return a power of two that divides what is left of the world, or now and then any number."""
        if self.chance(ODD_ONE_OUT):
            return self.rng.choice((0, -1, 2, 3, 5, 16))
        return self.rng.choice([n for n in (1, 1, 2, 4, 8) if n <= max(1, at_most)])

    def maybe(self, arguments: dict[str, Any], probability: float) -> dict[str, Any]:
        """Return each argument with this probability."""
        return {name: value for name, value in arguments.items() if self.chance(probability)}

    def _layout(self, world_size: int, experts: bool) -> dict[str, Any]:
        left = world_size
        sizes = {}
        axes = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
        self.rng.shuffle(axes)
        for axis in axes:
            sizes[axis] = self.size(left)
            left = max(1, left // max(1, sizes[axis]))
        if experts or self.chance(ODD_ONE_OUT):
            sizes["expert_model_parallel_size"] = self.size(world_size // max(1, sizes["pipeline_model_parallel_size"]))
        if self.chance(0.15 if experts else ODD_ONE_OUT):
            sizes["expert_tensor_parallel_size"] = self.rng.choice((1, 2))
        sizes = {name: size for name, size in sizes.items() if size != 1 or self.chance(0.2)}
        tensor = sizes.get("tensor_model_parallel_size", 1)
        arguments: dict[str, Any] = dict(sizes)
        if self.chance(0.7 if tensor > 1 else ODD_ONE_OUT):
            arguments["sequence_parallel"] = True
        if self.chance(0.35 if sizes.get("pipeline_model_parallel_size", 1) > 1 else ODD_ONE_OUT):
            arguments["virtual_pipeline_model_parallel_size"] = self.rng.choice((2, 2, 2, 4, 3, 1))
            if self.chance(0.2):
                arguments["microbatch_group_size_per_vp_stage"] = self.rng.choice((1, 2, 4))
        return arguments

    def _model(self, strategy: dict[str, Any], experts: bool) -> dict[str, Any]:
        stages = strategy.get("pipeline_model_parallel_size", 1) * strategy.get(
            "virtual_pipeline_model_parallel_size", 1
        )
        layers = self.rng.choice((2, 3, 4, 6)) if self.chance(0.3) else max(1, stages) * self.rng.choice((1, 1, 2))
        heads = self.rng.choice((2, 4, 8, 8))
        transformer: dict[str, Any] = {
            "num_layers": layers,
            "hidden_size": heads * self.rng.choice((4, 8)),
            "num_attention_heads": heads,
            **self._dense_options(layers, heads),
            **self._recompute(layers),
        }
        if experts:
            transformer |= self._experts(layers)
        if self.chance(0.08):
            latent = {"q_lora_rank": self.rng.choice((None, 8)), "kv_lora_rank": 8, "qk_head_dim": 8}
            transformer |= {"multi_latent_attention": True, **latent, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
            transformer.pop("num_query_groups", None)
        model: dict[str, Any] = {
            "vocab_size": self.rng.choice((32, 61)),
            "seq_length": self.rng.choice((16, 32)),
            "make_vocab_size_divisible_by": self.rng.choice((1, 16, 16, 64, 64)),
            "position_embedding_type": self.rng.choice(("rope", "rope", "learned_absolute", "none")),
            "share_embeddings_and_output_weights": self.chance(0.3),
            "transformer": transformer,
        }
        return model

    def _dense_options(self, layers: int, heads: int) -> dict[str, Any]:
        options = self.maybe(
            {
                "num_query_groups": self.rng.choice((1, 2, heads)),
                "ffn_hidden_size": self.rng.choice((24, 32)),
                "normalization": "RMSNorm",
                "gated_linear_unit": True,
                "activation_func": self.rng.choice(("gelu", "silu", "squared_relu")),
                "add_bias_linear": False,
                "add_qkv_bias": True,
                "qk_layernorm": True,
                "attention_output_gate": True,
                "no_rope_freq": self.rng.choice((layers, layers, 2)),
                "rotary_interleaved": True,
                "cross_entropy_loss_fusion": True,
                "window_attn_skip_freq": 2,
                "layernorm_zero_centered_gamma": True,
                "attention_dropout": 0.1,
                "hidden_dropout": 0.1,
                "window_size": [4, 0],
                "softmax_scale": 0.25,
                "fp32_residual_connection": True,
                "calculate_per_token_loss": False,
            },
            0.15,
        )
        uneven = {
            "num_layers_in_first_pipeline_stage": self.rng.randint(1, layers),
            "num_layers_in_last_pipeline_stage": self.rng.randint(1, layers),
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
        return options | self.maybe(uneven, ODD_ONE_OUT) | self.maybe({"mtp_num_layers": self.rng.choice((1, 2))}, 0.1)

    def _recompute(self, layers: int) -> dict[str, Any]:
        if not self.chance(0.2):
            return {}
        if self.chance(0.4):
            modules = self.rng.sample(["core_attn", "mlp", "layernorm", "moe", "moe_act"], k=self.rng.choice((1, 1, 2)))
            return {"recompute_granularity": "selective", "recompute_modules": modules}
        method = self.rng.choice(("uniform", "block"))
        number = self.rng.randint(1, layers)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}

    def _experts(self, layers: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_moe_experts": self.rng.choice((2, 4, 4, 8)),
            "moe_router_topk": self.rng.choice((1, 2, 2, 2, 2, 4)),
            "moe_token_dispatcher_type": self.rng.choice(("alltoall", "allgather")),
            "moe_router_load_balancing_type": self.rng.choice(
                ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn")
            ),
            "add_bias_linear": False,
        }
        pairs = (  # the second needs the first
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        )
        for pair in pairs:
            if self.chance(0.1):
                options |= pair if self.chance(0.9) else self.maybe(pair, 0.5)
        return options | self.maybe(
            {
                "moe_aux_loss_coeff": 0.01,
                "moe_z_loss_coeff": 0.001,
                "moe_ffn_hidden_size": 16,
                "moe_shared_expert_intermediate_size": 16,
                "moe_expert_capacity_factor": 1.5,
                "moe_token_drop_policy": "position",
                "moe_router_score_function": "sigmoid",
                "moe_router_pre_softmax": True,
                "moe_layer_freq": self.rng.choice((1, 2, [i % 2 for i in range(layers)])),
                "moe_router_dtype": "fp32",
                "moe_shared_expert_overlap": True,
            },
            0.15,
        )

    def _gradients(self) -> dict[str, Any]:
        sharded = self.chance(0.4)
        overlap = self.chance(0.4)
        arguments: dict[str, Any] = {}
        if sharded or self.chance(0.3):
            arguments["use_distributed_optimizer"] = sharded
        if overlap:
            arguments["overlap_grad_reduce"] = True
        if (sharded and overlap and self.chance(0.6)) or self.chance(ODD_ONE_OUT):
            arguments["overlap_param_gather"] = True
        if self.chance(ODD_ONE_OUT):
            arguments["overlap_p2p_comm"] = self.chance(0.5)
        return arguments

    def _ddp(self) -> dict[str, Any]:
        if not self.chance(0.15):
            return {}
        odd = {"average_in_collective": True, "align_param_gather": True, "num_distributed_optimizer_instances": 2}
        usual = {
            "bucket_size": self.rng.choice((1, 1000)),
            "check_for_nan_in_grad": True,
            "pad_buckets_for_high_nccl_busbw": True,
            "grad_reduce_in_fp32": True,
        }
        return self.maybe(usual, 0.4) | self.maybe(odd, 0.1)

    def _validation(self) -> dict[str, Any]:
        """Return arguments of the Trainer; the interval is in microbatches of the whole run."""
        interval = self.rng.choice((None, 1, 2))
        every = {} if interval is None else {"val_check_interval": interval, "check_val_every_n_epoch": None}
        return {**every, "limit_val_batches": self.rng.choice((1.0, 1.0, 1, 2))}

    def _course(self, world_size: int, experts: bool, strategy: dict[str, Any]) -> Course:
        steps = self.rng.choice((2, 3, 4))
        adam = strategy.get("use_distributed_optimizer") and not self.chance(0.1)
        optimizer = self.rng.choice(("AdamW", "Adam") if adam else tuple(OPTIMIZERS))
        others = [{**self._layout(world_size, experts), **self._gradients()} for _ in range(8)]
        if optimizer not in ("AdamW", "Adam") and not self.chance(0.1):
            others = [{**other, "use_distributed_optimizer": False, "overlap_param_gather": False} for other in others]
        return Course(
            optimizer=optimizer,
            steps=steps,
            stop=self.rng.randrange(1, steps),
            steps_in_epoch=self.rng.choice((1, 2, steps)),
            more_rows=self.rng.choice((0, 0, 1)),
            val_samples=tuple(self.rng.randint(1, 4 * world_size + 1) for _ in range(self.rng.choice((1, 1, 2)))),
            val_rows=self.rng.choice((1, 2, 3)),
            others=tuple(others),
        )

    def _batches(self, strategy: dict[str, Any]) -> tuple[int, int]:
        """Return ``accumulate_grad_batches`` and the rows of a batch."""
        group = max(1, strategy.get("pipeline_model_parallel_size", 1))
        interleaved = "virtual_pipeline_model_parallel_size" in strategy
        microbatches = group * self.rng.choice((1, 2)) if interleaved else self.rng.choice((1, 2, 3, 4))
        if self.chance(0.1):
            microbatches = self.rng.choice((1, 2, 3, 5))
        if self.chance(0.2):
            strategy["micro_batch_size"] = self.rng.choice((1, 2))
            return 1, strategy["micro_batch_size"] * microbatches
        return microbatches, self.rng.choice((1, 2))
