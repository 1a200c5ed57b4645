# SPDX-License-Identifier: Apache-2.0
"""A model that is called like a Hugging Face model, on every layout.

A LightningModule that wraps ``AutoModelForCausalLM`` moves from DDP to Megatron by one line of ``configure_model``::

    self.model = hf_model(self, path)

:class:`HFModel` is called like the transformers model, with whole batches on every rank, and returns the same ``loss``
and ``logits``. Inside, an ``MCoreGPT`` builds this rank's chunks and reads the weights. ``layers/padded_rows.py``
prepares padded rows for the layers, and ``layers/sampling.py`` gathers logits from the ranks. ``parallel/pipeline.py``
explains how a training step runs as pipeline stages. Outside training, each call runs all stages, and every stage gets
the result.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.hf.adapters import weights_of_chunk
from lightning_mcore.hf.family import HIDDEN, SCORING
from lightning_mcore.hf.source import variant_name, with_numbers
from lightning_mcore.interop.export import export_model
from lightning_mcore.layers.autograd import sum_for_one_loss
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import IGNORED_LABEL, ModelInputs, check_vocabulary
from lightning_mcore.layers.lora import Adapter
from lightning_mcore.layers.padded_rows import PaddedRows
from lightning_mcore.layers.sampling import whole_logits, whole_sequence
from lightning_mcore.layers.score import HiddenStates, ScoreLayer
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models.generation import evaluating
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.groups import from_last_stage, process_group, process_groups_are_open
from lightning_mcore.parallel.pipeline import Pipeline
from lightning_mcore.strategy.checks import check_callbacks
from lightning_mcore.strategy.strategy import MCoreStrategy

Head = Literal["causal-lm", "sequence-classification", "hidden-states"]
_Compute = Callable[[Callable[..., Tensor]], Tensor]  # calls a function with the output of the last stage
_BUILT = "_hf_model"
_DEFAULTS = {"mtp_num_layers": None}  # transformers does not run these layers
_WITHOUT_EFFECT = ("use_cache", "return_dict")
_OF_LAYERS = "the layers are Megatron's, each rank has a part of them, and hf_named_parameters() gives their weights"
_BEFORE = "change the model with transformers, save it, and give its folder to hf_model()"
_RECOMPUTED = (
    "give hf_model() transformer={'recompute_granularity': 'full', 'recompute_method': 'uniform',"
    " 'recompute_num_layers': 1}, which recomputes all layers"
)
_INSTEAD = {
    **dict.fromkeys(("gradient_checkpointing_enable", "gradient_checkpointing_disable"), _RECOMPUTED),
    **dict.fromkeys(("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings"), _BEFORE),
    **dict.fromkeys(("get_input_embeddings", "get_output_embeddings", "lm_head", "model"), _OF_LAYERS),
    "enable_input_require_grads": "add_lora() lets gradients flow to adapters by itself",
    "push_to_hub": "write the model with save_pretrained(), and upload the folder with huggingface_hub",
}
"""What to do instead of reading an attribute that transformers models have."""
_OF_PEFT = "peft_config"  # which PEFT asks every model for


def hf_model(
    module: pl.LightningModule,
    path: str,
    *,
    head: Head = "causal-lm",
    num_labels: int | None = None,
    family: str | None = None,
    transformer: Mapping[str, Any] | None = None,
    transformer_impl: TransformerImpl = "auto",
) -> "HFModel":
    """Build this rank's part of a Hugging Face model, and read its weights; call it in ``configure_model``.

    A second call (``fit`` and then ``validate``) returns the existing model with its trained weights. A run that
    resumes from a checkpoint takes the weights from it. Works under ``MCoreStrategy``, ``"auto"`` and ``"ddp"``.

    Args:
        module: The LightningModule that will hold the model; it need not be an ``MCoreModule``.
        path: Folder of the model, in safetensors, or its name on the Hugging Face hub.
        head: What the model returns: the same as ``AutoModelForCausalLM`` (``"causal-lm"``),
            ``AutoModelForSequenceClassification`` (``"sequence-classification"``) or ``AutoModel``
            (``"hidden-states"``). The last two can also start from a language model; a missing score layer is new.
        num_labels: Number of scores of ``"sequence-classification"``, 1 for a reward model; None for the number in the
            model's config, or else 2.
        family: The kind of model, as in ``MCoreGPT.from_pretrained``; None for the family in its config.
        transformer: Fields of Megatron's ``TransformerConfig`` that override the model's config; None for none.
        transformer_impl: ``"local"``, ``"transformer_engine"`` or ``"auto"``, as in ``MCoreGPT``.

    Raises:
        FileNotFoundError: There is no such model.
        RuntimeError: No trainer is attached, or the model was built for another layout.
        ValueError: The head or the model's family is unknown, ``num_labels`` is given without scores, the config asks
            for something that is not supported, the layout does not divide the model's sizes, or a callback of the
            trainer averages weights.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import hf_model
        >>> class Tuned(pl.LightningModule):
        ...     def configure_model(self):
        ...         self.model = hf_model(self, "Qwen/Qwen3-0.6B")
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.model(**batch).loss
    """
    built: HFModel | None = module.__dict__.get(_BUILT)
    if built is None:
        if module._trainer is not None and module.trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(module, distributed=False, is_split=True)
        kind = _KINDS.get(head)
        if kind is None:
            raise ValueError(f"head={head!r} is not known; choose {', '.join(map(repr, _KINDS))}")
        builder = _Builder.from_pretrained(
            path,
            family=variant_name(path, family, kind.suffix),
            # training_step returns a mean, as with transformers, not a sum with its weight
            transformer={**_DEFAULTS, **(transformer or {}), "calculate_per_token_loss": False},
            transformer_impl=transformer_impl,
        )
        assert isinstance(builder, _Builder)
        built = kind(builder, num_labels)
        object.__setattr__(module, _BUILT, built)  # not as a submodule: the user's own attribute registers it
    built.build(module._trainer)
    return built


@contextlib.contextmanager
def as_hf_model(module: MCoreGPT) -> Iterator["HFModel"]:
    """Show an ``MCoreGPT`` as a Hugging Face model inside the ``with`` block, to score it or to generate text.

    Use it in a hook outside of steps, such as ``on_validation_epoch_end``, or in a block of ``single_process()``. The
    block is collective: all ranks enter it and make the same calls. Gradients are off, and the module is in evaluation
    mode.

    Args:
        module: A module that ``MCoreGPT.from_pretrained`` made, or that was loaded from its checkpoint.

    Yields:
        The model, which holds the weights of the module.

    Raises:
        ValueError: The module was not made from a Hugging Face model, so it has no config of one.

    Examples:
        >>> from lightning_mcore import MCoreGPT
        >>> from lightning_mcore.hf import as_hf_model
        >>> class Scored(MCoreGPT):
        ...     def on_validation_epoch_end(self):
        ...         with as_hf_model(self) as model:
        ...             self.scores = my_scores(model)
    """
    if not module.hparams.get("hf"):
        raise ValueError(
            f"{type(module).__name__} was not made from a Hugging Face model, whose config it lacks; make it with"
            " MCoreGPT.from_pretrained(path), or export its checkpoint"
        )
    strategy = module._trainer.strategy if module._trainer is not None else None
    model = HFModel(module, None)
    model.pipeline = module.model
    with contextlib.ExitStack() as stack:
        if isinstance(strategy, MCoreStrategy):
            stack.enter_context(strategy.model_calls())
        stack.enter_context(evaluating(module))
        stack.enter_context(torch.no_grad())
        yield model


class _Builder(MCoreGPT):
    """Builds the chunks, with another output layer if one is set."""

    make_output: Callable[[TransformerConfig], nn.Module] | None = None

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if self.make_output is not None and post_process:
            chunk.output_layer = self.make_output(self.config)
        return chunk


class _Call(NamedTuple):
    """The arguments of a call of the model."""

    input_ids: Tensor
    rows: PaddedRows
    labels: Tensor | None  # [b, s], [b] or None: targets, or classes of rows
    num_items: Tensor | int | None
    states: list[tuple[Tensor, Tensor | None]]  # what the output layer gets, if the call computes losses in chunks


_NEEDS_OTHER_CACHE: dict[str, Any] = {
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "guidance_scale": 1.0,
    "prefill_chunk_size": None,
}
"""Arguments of transformers' ``generate`` that are not supported, and the value at which each has no effect."""

_NOT_GENERATED = ("output_hidden_states", "output_attentions", "output_router_logits", "token_healing", "position_ids")
"""More of them, which are not supported with or without a cache."""


class HFModel(nn.Module):
    """A Hugging Face model, called like the transformers model; :func:`hf_model` makes it.

    Args:
        builder: The module that builds the chunks and describes the model.
        num_labels: As in :func:`hf_model`.

    Attributes:
        pipeline: This rank's chunks.
    """

    pipeline: Pipeline

    suffix = ""
    """Suffix of its family's name."""

    def __init__(self, builder: MCoreGPT, num_labels: int | None) -> None:
        super().__init__()
        object.__setattr__(self, "_builder", builder)  # not a submodule: it holds the same chunks
        if num_labels is not None and self.suffix != SCORING:
            raise ValueError(
                f"num_labels={num_labels} is given for a model without scores; leave it out, or give"
                " head='sequence-classification'"
            )

    def build(self, trainer: "pl.Trainer | None") -> None:
        """Build the chunks for a run, unless an earlier run has built them.

        Args:
            trainer: The trainer of the user's module.
        """
        builder = self._own_builder
        if trainer is None and not process_groups_are_open():
            raise RuntimeError(
                "hf_model() builds Megatron layers, which need process groups: call it in configure_model(), which the"
                " Trainer runs, or work with the model in a block `with single_process():`"
            )
        # The builder is a module of its own, without a Trainer: it borrows the user's to find strategy and device
        builder._trainer = trainer
        host = builder._host()
        if host is not None:
            host.layout.validate_model(builder.model_shape())
            if host.layout.hybrid_context_parallel:
                raise ValueError(
                    "hybrid_context_parallel=True is for packed rows, and hf_model() pads its rows; set"
                    " hybrid_context_parallel=False, or take MCoreGPT.from_pretrained(path)"
                )
        builder.check_settings()
        with _fp32_by_default():  # Lightning may have set another default dtype
            builder.configure_model()
        self.pipeline = builder.model
        # Under context parallelism, a call gets whole rows and cuts them itself (_run)
        self.pipeline.takes_whole_batches = True

    def __getattr__(self, name: str) -> Any:
        """Raise an error for attributes of transformers models, with what to do instead.

        Raises:
            AttributeError: There is no such attribute.
            TypeError: PEFT asks for its own.
        """
        if name == _OF_PEFT:  # an AttributeError would let PEFT go on, to an error that does not help
            raise TypeError(
                "PEFT cannot put adapters on the model of hf_model(), whose layers are Megatron's; call"
                " add_lora(self.model.pipeline, LoRA(target_modules=['linear_qkv', 'linear_proj'])) instead, or take"
                " MCoreGPT.from_pretrained(path, lora=...), whose adapters PEFT reads"
            )
        if name in _INSTEAD:
            raise AttributeError(f"{name} is not available on the model of hf_model(); {_INSTEAD[name]}")
        return super().__getattr__(name)

    def hf_named_parameters(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
        """Yield this rank's parameters with the Hugging Face names of what each holds.

        A parameter may hold parts of several tensors: a layer's queries, keys and values are one, and so are gate and
        up projection. With tensor parallelism it is this rank's part of them. Adapters of ``add_lora`` are left out.
        Call it on all ranks, in ``configure_model`` or later.

        Yields:
            The names, such as ``("model.embed_tokens.weight",)``, and the parameter.
        """
        builder = self._own_builder
        chunks = built_chunks(builder)
        for index in range(len(chunks.bare)):
            for weight in weights_of_chunk(chunks, index, *builder.hf_names()):
                yield tuple(dict.fromkeys(block.hf for block, _ in weight.parts)), weight.parameter

    @cached_property
    def config(self) -> Any:
        """The model's config, as transformers reads it."""
        from transformers import AutoConfig

        content = with_numbers(self._own_builder.hparams["hf"]["config"])
        return AutoConfig.for_model(content.pop("model_type"), **content)

    @cached_property
    def generation_config(self) -> Any:
        """The defaults of :meth:`generate`, as transformers reads them; you may change them."""
        from transformers import GenerationConfig

        settings = self._own_builder.hparams["hf"]["generation_config"]
        made: Any = GenerationConfig
        return made(**settings) if settings else made.from_model_config(self.config)

    def export_options(self) -> dict[str, list[str]]:
        """Return what ``lightning-mcore export`` can write from a checkpoint of the user's module, and its options.

        Returns:
            ``{"export": ["--like", path]}``; empty if only :meth:`save_pretrained` can write the model: with another
            head, or with adapters.
        """
        if self.suffix or any(isinstance(child, Adapter) for child in self.modules()):
            return {}
        return {"export": ["--like", self.name_or_path]}

    @property
    def vocab_size(self) -> int:
        """The vocabulary size, without padding."""
        return self._own_builder.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def name_or_path(self) -> str:
        """The folder or the hub name of the model, where its tokenizer is."""
        return str(self._own_builder.hparams["hf"]["path"])

    def tie_weights(self) -> None:
        """Do nothing, because tied weights always are; lm-evaluation-harness calls it."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> "HFOutput":
        """Run the model as transformers does.

        Rows may be padded on the left or on the right. The logits at padding have no meaning, and labels there must be
        -100. With padding on the left, the first token of a row is not predicted from the padding before it.

        Args:
            input_ids: [b, s] int64, whole rows, the same on all ranks of a model copy.
            attention_mask: [b, s], 1 for a token and 0 for padding; None if there is no padding.
            position_ids: [b, s] int64, which must count up by one along the tokens of a row; None for 0, 1, 2, ...
            labels: [b, s] int64, not shifted, -100 without a target.
            num_items_in_batch: Divides the sum of the losses; None for the number of targets in this batch.
            others: Other arguments of transformers' models; they must be None, False or without effect.

        Returns:
            An object with ``loss``, a scalar in fp32: the sum over the targets of this batch divided by
            ``num_items_in_batch``, by default their mean; None without labels. And with ``logits``, [b, s, v], which
            are gathered from the ranks when they are first read: read them on all ranks or on none.

        Raises:
            ValueError: An argument is not supported, or the mask is not a padding mask.
            RuntimeError: It is the second call in a training step under pipeline parallelism.
        """
        _refuse_others(others)
        check_vocabulary({"tokens": input_ids}, self.vocab_size)
        # Padding on the left shifts positions, which changes nothing if only their differences count
        is_relative = not architecture_of(self._megatron_config).uses_places
        multiple = self.pipeline.layout.sequence_multiple
        rows = PaddedRows.of(input_ids, attention_mask, position_ids, multiple, is_relative)
        call = _Call(input_ids, rows, self._checked(labels, rows), num_items_in_batch, [])
        return self._output(call, self._sender(self._run_call(call), input_ids.device))

    def _sender(self, local: Tensor | None, device: torch.device) -> "_Compute":
        """Return what computes from the last stage's output; outside training steps, it sends that to all stages."""
        staged = self.pipeline.is_staged and not self.pipeline.is_active
        return partial(_on_all_stages if staged else _here, local, device=device)

    def _checked(self, labels: Tensor | None, rows: PaddedRows) -> Tensor | None:
        """Return the targets; checked on every stage, so that all of them raise the same error."""
        if labels is None:
            return None
        check_vocabulary({"tokens": labels.new_zeros(1, 1), "labels": labels}, self.vocab_size)
        return rows.targets(labels)

    def _output(self, call: _Call, compute: "_Compute") -> "HFOutput":
        loss = None if call.labels is None else compute(partial(self._mean_loss, call=call, targets=call.labels))
        return HFOutput(loss, {"logits": partial(compute, partial(self._whole_logits, call=call))})

    def _run_call(self, call: _Call) -> Tensor | None:
        """Return this rank's logits, or the losses of its targets, [b, length / cp], if they come in chunks.

        Losses come with the states from which logits are computed if they are read.
        """
        chunk: Any = self.pipeline.last_chunk
        labels = None if self.suffix else call.labels  # a classifier's labels are of rows, not of tokens
        targets = None if labels is None else self._own_targets(call, labels)
        if targets is None or chunk is None or chunk.config.mtp_num_layers or not chunk.takes_chunks(targets):
            return self._run(call.rows, call.input_ids)
        with chunk.keeping_states() as states:
            losses = self._run(call.rows, call.input_ids, labels=targets.clamp(min=0))
        call.states.extend(states)
        return losses

    def _own_targets(self, call: _Call, targets: Tensor) -> Tensor:
        """Return this rank's share of the targets, [b, length / cp]."""
        group = process_group("cp")
        return call.rows.share(targets, IGNORED_LABEL, group.rank(), group.size())

    def _run(self, rows: PaddedRows, input_ids: Tensor, **own: Tensor) -> Tensor | None:
        """Return this rank's logits, [b, length / cp, v / tp], or what ``own`` asks for; None on other stages."""
        group = process_group("cp")
        batch = {"tokens": rows.share(input_ids, 0, group.rank(), group.size())}
        if rows.lengths is not None:
            batch["lengths"] = rows.lengths
        inputs = ModelInputs.of(batch, group.rank(), group.size())
        more = inputs.arguments(self._megatron_config, self.pipeline.boundaries_on_host)
        logits: Tensor | None = self.pipeline(inputs.tokens, inputs.position_ids, None, **more, **own)
        return logits

    def _mean_loss(self, found: Tensor, call: _Call, targets: Tensor) -> Tensor:
        """Return the loss from logits, or from the losses of the targets."""
        own = self._own_targets(call, targets)
        counts = own != IGNORED_LABEL
        losses = found
        if not call.states:
            # Megatron's loss wants [s, b, v]
            turned = found.float().transpose(0, 1).contiguous()
            if turned.data_ptr() == found.data_ptr():
                turned = turned.clone()  # Megatron's loss overwrites it
            chunk: Any = self.pipeline.chunks[-1]
            # -100 is not a token: any token will do there, because torch.where drops its loss
            losses = chunk.compute_language_model_loss(own.masked_fill(~counts, 0), turned)
        total = sum_for_one_loss(torch.where(counts, losses, 0.0).sum(), process_group("cp"))
        return total / ((targets != IGNORED_LABEL).sum() if call.num_items is None else call.num_items)

    def _whole_logits(self, logits: Tensor, call: _Call) -> Tensor:
        rows = call.rows
        if call.states:  # of each part of the rows; the last part may have run more than once
            chunk: Any = self.pipeline.last_chunk
            parts = [chunk.output_layer(hidden, weight=weight)[0].transpose(0, 1) for hidden, weight in call.states]
            logits = torch.cat(parts)[: rows.shape[0]]
        return rows.restore(whole_logits(logits, self.vocab_size, process_group("tp"), process_group("cp")))

    def generate(self, inputs: Tensor | None = None, *, use_cache: bool = True, **arguments: Any) -> Any:
        """Continue prompts with transformers' own ``generate``; collective over all ranks that share the model.

        Keys and values are cached, so a step runs only the new token, not the whole sequence. Context-parallel ranks
        share the prompt and the cache. Pad prompts of different lengths on the left.

        Args:
            inputs: [b, s] int64, the prompts; the same on all ranks of a model copy.
            use_cache: Whether to cache keys and values.
            arguments: Other arguments of transformers' ``generate``: ``attention_mask``, ``max_new_tokens``,
                ``do_sample``, ``num_beams`` and so on.

        Returns:
            What transformers returns: by default the prompts with the new tokens, [b, s + new] int64.

        Raises:
            RuntimeError: It is called in ``training_step`` under pipeline parallelism.
            TypeError: The model has no logits over the vocabulary.
            ValueError: Prompts are padded on the right, transformers rejects an argument, or its value needs a cache
                of transformers.
        """
        config = arguments.get("generation_config") or self.generation_config
        for name, neutral in _NEEDS_OTHER_CACHE.items():
            if arguments.get(name, getattr(config, name, None)) not in (None, neutral):
                raise ValueError(
                    f"generate() got {name}, which needs transformers' own cache, while this model has another one;"
                    " leave it out"
                )
        for name in _NOT_GENERATED:
            value = arguments.get(name, getattr(config, name, None))
            if value is not None and value is not False:  # position_ids are a tensor
                raise ValueError(f"generate() got {name}, which is not supported; leave it out")
        arguments.pop("output_router_logits", None)  # transformers would pass False on to the model
        if self.suffix:
            raise TypeError("generate() needs logits over the vocabulary; give head='causal-lm' to hf_model()")
        if self.pipeline.is_active and self.pipeline.is_staged:
            raise RuntimeError(
                "self.model.generate() was called in training_step under pipeline_model_parallel_size="
                f"{self.pipeline.layout.pipeline_model_parallel_size}, where a stage runs its own layers only; call it"
                " in validation_step or in a hook such as on_train_batch_end"
            )
        from lightning_mcore.interop.generate import Generator, ready_to_generate

        if self.pipeline.layout.expert_model_parallel_size > 1:  # ranks with other prompts need each other's experts
            arguments.setdefault("synced_gpus", True)
        with ready_to_generate(self, use_cache) as logits:
            generator: Any = Generator(self, logits)
            # transformers' cache is off, ours (in Generator) is not
            return generator.generate(inputs, use_cache=False, **arguments)

    def save_pretrained(self, save_directory: str) -> None:
        """Write the model as transformers does, with config and tokenizer; collective over all ranks.

        Args:
            save_directory: The folder to write, on a disk that all ranks see; an existing model is replaced.

        Raises:
            RuntimeError: No trainer is running and there are no process groups.
        """
        export_model(self._own_builder, save_directory, replace=True)

    @property
    def _own_builder(self) -> MCoreGPT:
        builder: MCoreGPT = self.__dict__["_builder"]
        return builder

    @property
    def _megatron_config(self) -> Any:
        return self.pipeline.chunks[0].config


class HFClassifier(HFModel):
    """Like ``AutoModelForSequenceClassification``: scores of each row, from its last token; labels are [b].

    ``logits`` are [b, num_labels] fp32, on all ranks. The loss is transformers' loss for the config's
    ``problem_type``, a mean over the rows of this batch.
    """

    suffix = SCORING

    def __init__(self, builder: _Builder, num_labels: int | None) -> None:
        super().__init__(builder, num_labels)
        given = builder.hparams["hf"]["config"]
        self.num_labels: int = num_labels or len(given.get("id2label") or ()) or 2
        builder.make_output = partial(ScoreLayer, num_scores=self.num_labels)
        # A score layer cannot be the embedding, even if the config ties the output layer
        builder.hparams["share_embeddings_and_output_weights"] = False

    @cached_property
    def config(self) -> Any:
        """The model's config, as transformers reads it."""
        config = super().config
        if config.num_labels != self.num_labels:
            config.num_labels = self.num_labels
        return config

    def _checked(self, labels: Tensor | None, rows: PaddedRows) -> Tensor | None:
        if self.config.pad_token_id is None and rows.shape[0] > 1:
            raise ValueError(
                "the model's config has no pad_token_id, which tells the last token of a row; set"
                " self.model.config.pad_token_id, or give rows one by one"
            )
        return labels

    def _output(self, call: _Call, compute: "_Compute") -> "HFOutput":
        from transformers.loss.loss_utils import ForSequenceClassificationLoss

        # Always computed, on all stages: transformers' loss needs them whole
        logits = compute(partial(self._of_last_tokens, call=call))
        loss = None
        if call.labels is not None:
            measure: Any = ForSequenceClassificationLoss
            loss = measure(call.labels, logits, self.config)
        return HFOutput(loss, {"logits": lambda: logits})

    def _of_last_tokens(self, scores: Tensor, call: _Call) -> Tensor:
        """Return the scores, [b, num_labels], of each row's last token that is not ``pad_token_id``."""
        whole = call.rows.restore(whole_sequence(scores, process_group("cp")))
        if self.config.pad_token_id is None:
            return whole[:, -1]
        columns = torch.arange(call.rows.shape[1], device=whole.device)
        # Tokens 7 8 0 0 with pad_token_id 0: columns times "not padding" is 0 1 0 0, whose argmax is 1
        last = (columns * (call.input_ids != self.config.pad_token_id)).argmax(dim=1)
        return whole[torch.arange(len(last), device=whole.device), last]


class HFEncoder(HFModel):
    """Like ``AutoModel``: ``last_hidden_state``, [b, s, h] after the last norm, on all ranks. It takes no labels."""

    suffix = HIDDEN

    def __init__(self, builder: _Builder, num_labels: int | None) -> None:
        super().__init__(builder, num_labels)
        builder.make_output = HiddenStates
        builder.hparams["share_embeddings_and_output_weights"] = False

    def _checked(self, labels: Tensor | None, rows: PaddedRows) -> Tensor | None:
        if labels is not None:
            raise ValueError("labels are given to a model with head='hidden-states', which has no loss; leave them out")
        return None

    def _output(self, call: _Call, compute: "_Compute") -> "HFOutput":
        return HFOutput(None, {"last_hidden_state": partial(compute, partial(self._whole_states, rows=call.rows))})

    def _whole_states(self, states: Tensor, rows: PaddedRows) -> Tensor:
        return rows.restore(whole_sequence(states, process_group("cp")))


_KINDS: dict[str, type[HFModel]] = {
    "causal-lm": HFModel,
    "sequence-classification": HFClassifier,
    "hidden-states": HFEncoder,
}


class HFOutput:
    """The result of a call; values are read as attributes, by name or by index, as in transformers.

    ``parts`` are functions that gather the other values, by name; each is called once, when its value is first read.
    """

    def __init__(self, loss: Tensor | None, parts: Mapping[str, Callable[[], Tensor]]) -> None:
        self.loss = loss
        self._parts = parts

    def __getattr__(self, name: str) -> Tensor:
        """Gather a value, such as ``logits``; collective over the ranks of the model copy."""
        if name.startswith("_") or name not in self._parts:
            raise AttributeError(f"the output has {', '.join(self.keys())}, not {name!r}")
        value = self._parts[name]()
        setattr(self, name, value)
        return value

    def keys(self) -> list[str]:
        """Return the names of the values."""
        return [*([] if self.loss is None else ["loss"]), *self._parts]

    def __getitem__(self, key: str | int) -> Tensor:
        """Return a value by its name or its index."""
        name = key if isinstance(key, str) else self.keys()[key]
        if name not in self.keys():
            raise KeyError(key)
        value: Tensor = getattr(self, name)
        return value


def _refuse_others(others: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that would change the result."""
    for name, value in others.items():
        if value is None or value is False or name in _WITHOUT_EFFECT:
            continue
        raise ValueError(
            f"{name} is not supported by the model of hf_model(); give input_ids, attention_mask, position_ids, labels"
            " and num_items_in_batch only"
        )


def _here(local: Tensor | None, compute: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Return what this stage computes from its own output."""
    assert local is not None
    return compute(local)


def _on_all_stages(local: Tensor | None, compute: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Return on every pipeline stage what the last one computes from its output; collective over the pipeline."""
    sent: Tensor = from_last_stage(None if local is None else compute(local), device)
    return sent


@contextlib.contextmanager
def _fp32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
