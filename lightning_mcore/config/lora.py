# SPDX-License-Identifier: Apache-2.0
"""The settings of LoRA adapters, as plain data: which projections get one, and with which rank and scale.

Names and meanings are the same as in ``peft.LoraConfig``, which PEFT writes to ``adapter_config.json``. Projections
have their Hugging Face names, such as ``model.layers.3.self_attn.q_proj``, even if Megatron fuses several into one
weight. ``layers/lora.py`` has the adapters, ``hf/adapters.py`` puts them on a model.
"""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_mcore.config.value_checks import Settings, make_fields_plain, require_flag, require_number, require_size

ALL_LINEAR = "all-linear"
EXPERTS = ".experts."  # part of the name of each projection of a routed expert
_NAMES = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
EMBEDDING, OUTPUT = "embed_tokens", "lm_head"  # last parts of the names of these modules
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of routers' names, and of shared experts' gates
TOWERS = ("visual", "vision_tower", "vision_model", "merger", "multi_modal_projector")
"""Parts of the Hugging Face names of a vision tower's modules, which are frozen and have no adapters."""
# What "all-linear" does not mean
_NOT_ALL_LINEAR = (OUTPUT, EMBEDDING, "embeddings", "norm_f", *ROUTERS, "layer", "wg", "conv1d", "output_layer")
_EXPERT = re.compile(r"(.*\.)?\w+\.experts\.\d+\.(\w+)")
_HEADS = ["classifier", "score"]  # PEFT adds both to modules_to_save for every classifier, which has only one
_NUMBER_OF_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")
_INSIDE_EXPERTS = re.compile(r"(?<=\.experts)\.\d+\..*")
NOT_MERGED = (
    "adapters cannot be merged into weights with quantization='nf4'; write them alone (adapter=True), and merge them"
    " into the model that was quantized"
)
TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's projections: gate, up and down."""


@dataclass(frozen=True)
class LoRA(Settings):
    """Low-rank adapters of frozen weights: ``W x + scale * B A x``, where only A and B are trained.

    Args:
        r: Rank: A has r rows, B has r columns.
        lora_alpha: The scale is ``lora_alpha / r``; with ``use_rslora`` ``lora_alpha / sqrt(r)``.
        lora_dropout: Probability that an input of A is dropped in training.
        target_modules: Which projections get an adapter: endings of their Hugging Face names, such as
            ``["q_proj", "v_proj"]``; a regular expression that matches whole names; or ``"all-linear"``, all
            projections of attention, of MLPs, of shared experts and of each expert. The router (``"gate"``), the gate
            of shared experts, the embedding and the output layer get one only if they are named.
        target_parameters: Endings of names of parameters that also get an adapter, regardless of ``exclude_modules``
            and ``layers_to_transform``. ``["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]`` are the routed
            experts as transformers 5 stores them: an expert's gate and up projections then share one A. None for none.
        exclude_modules: Which of ``target_modules`` get no adapter: endings of their names or of modules around them,
            such as ``["experts"]``, or a regular expression that matches whole names; None for none.
        layers_to_transform: Numbers of the layers that get adapters, counted from 0; None for all.
        rank_pattern: Ranks other than ``r``, by the ending of a name or by regular expression; None for none.
        alpha_pattern: Values other than ``lora_alpha``, likewise.
        modules_to_save: Modules that are trained in full, such as ``["lm_head", "embed_tokens"]``: endings of their
            names or of names of modules around them, wherever an ending begins. ``["norm"]`` means all norms;
            None for none.
        ensure_weight_tying: Train an embedding that is also the output layer as both, where ``modules_to_save`` names
            it. Without this, PEFT trains a copy and leaves the output layer unchanged, which is not supported.
        use_rslora: Divide ``lora_alpha`` by the square root of the rank (rsLoRA).
        use_dora: Also train the length ``m`` of each row of the weights (DoRA); the output is multiplied by
            ``m / |W + scale * B A|``.
        init_lora_weights: How A starts: True for a uniform distribution, ``"gaussian"`` for a normal one with standard
            deviation ``1 / r``. B starts at zero. For the embedding, A starts at zero and B with normal noise.
        quantization: ``"nf4"`` keeps the frozen weights of linear layers in 4 bits (QLoRA); None does not.
        double_quantization: With ``quantization``, keep the scales of its blocks in 8 bits.
        base_model_name_or_path: The model whose weights are frozen; ``from_pretrained`` fills it in.
        merged_adapters: Folders of the PEFT adapters that were merged into those weights before, in order;
            ``from_pretrained(adapters=...)`` fills it in.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.

    Examples:
        >>> from lightning_mcore import LoRA
        >>> lora = LoRA(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
        >>> lora.adapts("model.layers.0.self_attn.q_proj"), lora.adapts("model.layers.0.self_attn.o_proj")
        (True, False)
        >>> lora.scale("model.layers.0.self_attn.q_proj")
        2.0
    """

    argument = "lora"
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: list[str] | str = ALL_LINEAR
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: bool | str = True
    base_model_name_or_path: str | None = None
    merged_adapters: list[str] | None = None
    quantization: str | None = None
    double_quantization: bool = True

    def __post_init__(self) -> None:
        make_fields_plain(self)
        for flag in ("use_rslora", "use_dora", "double_quantization"):
            require_flag(flag, getattr(self, flag))
        for name, rank in {"r": self.r, **_entries("rank_pattern", self.rank_pattern)}.items():
            require_size(name, rank)
        for name, alpha in {"lora_alpha": self.lora_alpha, **_entries("alpha_pattern", self.alpha_pattern)}.items():
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
                raise TypeError(f"{name}={alpha!r} is not a number; give one")
        require_number("lora_dropout", self.lora_dropout, at_least=0)
        if self.lora_dropout >= 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} is not in [0, 1); choose 0 for none")
        if self.init_lora_weights is not True and self.init_lora_weights != "gaussian":
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights!r} is not supported; choose True (uniform) or 'gaussian'"
            )
        self._check_quantization()
        self._check_names()

    def _check_quantization(self) -> None:
        if self.quantization not in (None, "nf4"):
            raise ValueError(f"quantization={self.quantization!r} is not supported; choose 'nf4' or None")
        if self.quantization and self.use_dora:
            raise ValueError("use_dora=True is not supported with quantization='nf4'; leave one of them out")

    def _check_names(self) -> None:
        for name in _NAMES:
            given = getattr(self, name)
            if given is None and name != "target_modules":
                continue
            if name == "target_modules" and given == "all":
                raise ValueError(f"target_modules='all' is not a target; for all linear layers give {ALL_LINEAR!r}")
            if isinstance(given, str) and name in ("target_modules", "exclude_modules"):
                _compiled(name, given)
            elif not isinstance(given, list | tuple) or not all(isinstance(item, str) for item in given):
                raise TypeError(f"{name}={given!r} is not a list of names of modules; give one, such as ['q_proj']")
            elif not given and not (name == "target_modules" and self.target_parameters):
                raise ValueError(f"{name}=[] names nothing; name a module, or leave it out")
        layers = self.layers_to_transform
        if layers is not None:
            numbers = [layers] if isinstance(layers, int) else layers
            if not isinstance(numbers, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in numbers):
                raise TypeError(f"layers_to_transform={layers!r} is not a list of numbers of layers; count from 0")
        for pattern in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            _compiled("rank_pattern or alpha_pattern", pattern)

    def adapts(self, name: str) -> bool:
        """Return whether a projection gets an adapter; ``name`` is such as ``model.layers.3.self_attn.q_proj``."""
        # First modules_to_save, then target_parameters, which exclude_modules and layers_to_transform do not restrict.
        if self._surrounds(name):
            return False
        if self.targets_parameter(name):
            return True
        if self._excludes(name):
            return False
        targets = self.target_modules
        if targets != ALL_LINEAR and not isinstance(targets, str) and name in targets:
            return True  # a whole name is exempt from layers_to_transform, as in PEFT
        if self.layers_to_transform is not None:
            layer = _LAYER.search(f".{name}")
            wanted = self.layers_to_transform
            if layer is None or int(layer[1]) not in ([wanted] if isinstance(wanted, int) else wanted):
                return False
        if targets == ALL_LINEAR:
            last = name.rpartition(".")[2]
            return last not in _NOT_ALL_LINEAR and not last.endswith("norm")
        return _matches(targets, name)

    def targets_parameter(self, name: str) -> bool:
        """Return whether ``target_parameters`` names the transformers parameter that holds a projection."""
        return bool(self.target_parameters) and _matches(list(self.target_parameters or ()), parameter_of(name))

    def _excludes(self, name: str) -> bool:
        excluded = self.exclude_modules
        if excluded is None or isinstance(excluded, str):
            return excluded is not None and _matches(excluded, name)
        # Also the modules around it: "experts" excludes model.layers.0.mlp.experts.5.up_proj.
        parts = name.split(".")
        return any(_matches(excluded, ".".join(parts[:end])) for end in range(1, len(parts) + 1))

    def saves(self, name: str) -> bool:
        """Return whether a module, by its Hugging Face name, is trained in full."""
        if not self.modules_to_save:
            return False
        parts = _INSIDE_EXPERTS.sub("", name).split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        # PEFT compares with endswith, so "norm" also means input_layernorm.
        return any(module.endswith(tuple(self.modules_to_save)) for module in around)

    def with_saved(self, name: str) -> "LoRA":
        """Return settings with which a module, by its Hugging Face name, is trained in full."""
        return self if self.saves(name) else replace(self, modules_to_save=[*(self.modules_to_save or ()), name])

    def _surrounds(self, name: str) -> bool:
        """Return whether ``modules_to_save`` names a projection or a module around it, which then has no adapter.

        Source: ``check_target_module_exists`` (PEFT 0.21.2), whose entries are patterns of whole parts of names here.
        """
        module = _INSIDE_EXPERTS.sub("", name)
        return any(
            _compiled("modules_to_save", rf"(^|.*\.){entry}($|\..*)").match(module)
            for entry in self.modules_to_save or ()
        )

    def rank(self, name: str) -> int:
        """Return the rank of a projection's adapter."""
        rank: int = by_pattern(self.rank_pattern, self._known_as(name), self.r)
        return rank

    def alpha(self, name: str) -> float:
        """Return ``lora_alpha`` of a projection's adapter."""
        alpha: float = by_pattern(self.alpha_pattern, self._known_as(name), self.lora_alpha)
        return alpha

    def scale(self, name: str) -> float:
        """Return the scale of a projection's adapter."""
        # r=8, lora_alpha=16 and rank_pattern={"q_proj": 32}: q_proj has 16 / 32 = 0.5, the others 16 / 8 = 2.
        rank, alpha = self.rank(name), self.alpha(name)
        return float(alpha / math.sqrt(rank) if self.use_rslora else alpha / rank)

    def _known_as(self, name: str) -> str:
        return parameter_of(name) if self.targets_parameter(name) else name

    def check_targets(self, names: Iterable[str], strict: bool = True) -> None:
        """Raise ValueError if no projection gets an adapter, or one cannot have it.

        ``names`` are the Hugging Face names of all projections of the model, and of its other modules with a weight.
        ``strict`` also requires that each target, module to save, layer and pattern matches one of them; in PEFT's own
        files some do not.
        """
        known = list(names)
        for field in ("target_modules", "target_parameters", "modules_to_save"):
            entries = getattr(self, field)
            # A pattern is not a list of entries; a pattern without a match leaves no adapter, which is checked below.
            for entry in entries if strict and isinstance(entries, list | tuple) else ():
                self._check_entry(field, entry, known)
        if strict:
            self._check_layers(known)
        adapted = [name for name in known if self.adapts(name)]
        if not adapted:
            hint = ""
            if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
                hint = f"; a string is a pattern that matches whole names, or {ALL_LINEAR!r}"
            raise ValueError(
                f"target_modules={self.target_modules!r} with exclude_modules={self.exclude_modules!r} and"
                f" layers_to_transform={self.layers_to_transform!r} leaves no projection that gets an adapter; name"
                f" some, such as ['q_proj', 'v_proj']{hint}"
            )
        self.check_adapted(adapted)
        self._check_saved(known)
        for field in ("rank_pattern", "alpha_pattern"):
            for key in (getattr(self, field) or {}) if strict else ():
                if not any(by_pattern({key: True}, self._known_as(name), False) for name in adapted):
                    endings = sorted({name.rpartition(".")[2] for name in map(self._known_as, adapted)})
                    near = difflib.get_close_matches(key, endings, 3) or endings
                    raise ValueError(
                        f"{field} has {key!r}, and no projection that gets an adapter matches it; did you mean"
                        f" {', '.join(near)}?"
                    )

    def _check_layers(self, known: Iterable[str]) -> None:
        """Reject a layer to transform that a model does not have."""
        given = self.layers_to_transform
        layers = {int(found[1]) for found in map(_LAYER.search, known) if found}
        for layer in [given] if isinstance(given, int) else given or ():
            if layers and layer not in layers:
                raise ValueError(
                    f"layers_to_transform has {layer}, but the model's layers have the numbers {min(layers)} to"
                    f" {max(layers)}; choose from these"
                )

    def _check_entry(self, field: str, entry: str, known: list[str]) -> None:
        """Reject an entry of a field that names nothing in a model."""
        if field == "modules_to_save":
            # Ask saves(), whose endings begin anywhere; for a classifier, either of PEFT's two names is enough.
            saving = replace(self, modules_to_save=_HEADS if entry in _HEADS else [entry])
            if any(map(saving.saves, known)):
                return
        of_field = list(dict.fromkeys(map(parameter_of, known))) if field == "target_parameters" else known
        if any(_matches([entry], name) for name in of_field):
            return
        if not {*TOWERS}.isdisjoint(entry.split(".")):
            raise ValueError(
                f"{field} has {entry!r}, a part of the vision tower, which is frozen when adapters are trained; leave"
                " it out"
            )
        embeddings = [name for name in known if _matches([EMBEDDING], name)]
        is_tied = field == "modules_to_save" and self.ensure_weight_tying and any(map(self.saves, embeddings))
        # The output layer is the embedding, which is already trained.
        if entry == OUTPUT and is_tied:
            return
        if entry == OUTPUT and embeddings:
            raise ValueError(
                f"{field} has {OUTPUT!r}, and the model has none apart from its embedding; train the embedding with"
                f" modules_to_save=[{EMBEDDING!r}], and ensure_weight_tying=True if it is the output layer too"
            )
        parts = 2 if field == "target_parameters" else 1
        endings = sorted({".".join(name.split(".")[-parts:]) for name in of_field})
        near = difflib.get_close_matches(entry, endings, 3) or endings
        raise ValueError(f"{field} has {entry!r}, and the model has no such module; did you mean {', '.join(near)}?")

    def _check_saved(self, known: Iterable[str]) -> None:
        """Reject modules to save that PEFT cannot save, or that also get an adapter."""
        for name in filter(self.saves, known):
            if EXPERTS in name:
                raise ValueError(
                    f"modules_to_save={self.modules_to_save!r} means the routed experts too, such as {name}, which"
                    " cannot be trained in full together with adapters; name other modules"
                )
            if self.adapts(name):
                raise ValueError(
                    f"modules_to_save={self.modules_to_save!r} means {name}, which gets an adapter; write its last part"
                    " out in modules_to_save, or leave it out of target_modules"
                )

    def differs_among_experts(self, names: Iterable[str]) -> bool:
        """Whether experts of a layer differ in having an adapter or in its rank; ``names`` as in check_targets."""
        ranks: dict[str, set[int | None]] = {}
        for name in names:
            if EXPERTS in name:
                # model.layers.3.mlp.experts.5.up_proj is one of model.layers.3.mlp.experts.up_proj
                kind = _NUMBER_OF_EXPERT.sub("", name)
                ranks.setdefault(kind, set()).add(self.rank(name) if self.adapts(name) else None)
        return any(len(found) > 1 for found in ranks.values())

    def check_layers(self, config: Any, names: Iterable[str]) -> None:
        """Raise ValueError for a Megatron config that does not work with adapters; ``names`` as in check_targets."""
        if getattr(config, "moe_grouped_gemm", False) and any(EXPERTS in name and self.adapts(name) for name in names):
            raise ValueError(
                "moe_grouped_gemm=True is not supported with adapters on experts; set it to False, or leave the experts"
                " out (exclude_modules=['experts'])"
            )
        for field in ("tp_comm_overlap", "fp8_param"):
            if getattr(config, field, False):
                raise ValueError(f"{field}=True is not supported with adapters; leave it out")

    def check_adapted(self, adapted: Iterable[str]) -> None:
        """Raise ValueError for adapters on norms, for dropout or DoRA on experts and routers, or DoRA on the embedding.

        ``adapted`` are the Hugging Face names of the projections that get an adapter.
        """
        for name in adapted:
            last = name.rpartition(".")[2]
            if last.endswith("norm"):
                raise ValueError(
                    f"target_modules has {name}, and adapters are supported on linear layers, the embedding and routers"
                    " only; train it whole with modules_to_save, or leave it out"
                )
            kinds = (("experts", EXPERTS in name), ("routers", last in ROUTERS), ("the embedding", last == EMBEDDING))
            kind = next((kind for kind, applies in kinds if applies), None)
            for field in ("use_dora",) if kind == "the embedding" else ("lora_dropout", "use_dora"):
                if kind is not None and getattr(self, field):
                    raise ValueError(
                        f"{field}={getattr(self, field)!r} is not supported on {kind} such as {name}; leave it out, or"
                        f" leave {kind} without adapters (exclude_modules)"
                    )

    def check_parameters(self, name: str) -> None:
        """Raise ValueError for dropout or DoRA on a projection that PEFT treats as a parameter, like experts beside it.

        ``name`` is the Hugging Face name of a projection that gets an adapter, in a model with such experts.
        """
        last = name.rpartition(".")[2]
        for field in ("lora_dropout", "use_dora"):
            if getattr(self, field) and any(last in names for names in TRIPLES):
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not supported on {name}, because PEFT has adapters without it"
                    f" for every {last} of a model with experts; leave it out, or leave {name} without adapters"
                    " (exclude_modules)"
                )

    def check_vocabulary(self, names: Iterable[str], model: Mapping[str, Any], padded: int = 0, ranks: int = 1) -> None:
        """Raise ValueError for adapters on an embedding or output layer that cannot have one.

        ``model`` has ``vocab_size``, ``share_embeddings_and_output_weights`` and ``mtp_num_layers``; ``padded`` rows of
        the embedding, with its padding, are shared evenly by the tensor-parallel ``ranks``.
        """
        known = list(names)
        is_tied = model.get("share_embeddings_and_output_weights")
        if is_tied and not self.ensure_weight_tying and any(_matches([EMBEDDING], n) and self.saves(n) for n in known):
            raise ValueError(
                f"modules_to_save={self.modules_to_save!r} means the embedding, which is the output layer too; PEFT"
                " trains a copy of it and leaves the output layer as it was; to train both as one, here and in PEFT,"
                " give ensure_weight_tying=True, or leave it out"
            )
        for name in filter(self.adapts, known):
            last = name.rpartition(".")[2]
            for field in ("share_embeddings_and_output_weights", "mtp_num_layers"):
                if last == EMBEDDING and model.get(field):
                    raise ValueError(
                        f"target_modules has {name}, which the model uses twice ({field}={model[field]!r}); train it"
                        " whole with modules_to_save and ensure_weight_tying=True, or leave it out"
                    )
            # The last rank's rows begin at padded - padded // ranks. 130 tokens padded to 256 rows on 4 ranks: it would
            # hold rows 192 to 255, all padding.
            if last in (EMBEDDING, OUTPUT) and padded - padded // ranks >= model["vocab_size"]:
                raise ValueError(
                    f"target_modules has {name}, of whose {padded} rows with their padding the last of {ranks}"
                    " tensor-parallel ranks would have padding alone; choose a smaller tensor_model_parallel_size, or"
                    " leave it out"
                )


def check_train_only(given: object, has_adapters: bool) -> None:
    """Raise TypeError or ValueError for a ``train_only`` that chooses no weights or is given with adapters."""
    if not isinstance(given, list | tuple) or not all(isinstance(part, str) and part for part in given):
        raise TypeError(
            f"train_only={given!r} is not a list of parts of names; give one, such as ['layers.31.', 'norm']"
        )
    if not given:
        raise ValueError("train_only=[] trains nothing; name a weight, or leave it out to train all")
    if has_adapters:
        raise ValueError(
            f"train_only={given!r} contradicts lora, which freezes the weights; leave one of them out, or name modules"
            " in modules_to_save"
        )


def parameter_of(name: str) -> str:
    """Return the name of the parameter that holds a projection in transformers 5.

    ``model.layers.3.mlp.experts.5.up_proj`` is in ``model.layers.3.mlp.experts.gate_up_proj``: one parameter holds a
    projection of all experts in a layer, and the gate and up projections share one.
    """
    expert = _EXPERT.fullmatch(name)
    for gate, up, down in TRIPLES if expert else ():
        if expert is not None and expert[2] in (gate, up, down):
            return f"{expert[1] or ''}mlp.experts.{'down_proj' if expert[2] == down else 'gate_up_proj'}"
    return in_transformers(f"{name}.weight")


def in_transformers(name: str) -> str:
    """Return the name that a tensor in a file has in the memory of transformers 5."""
    return name if ".router." in name else name.replace(".block_sparse_moe.", ".mlp.")


@dataclass(frozen=True)
class Pair:
    """Sizes of A and B, the matrices of one projection's adapter."""

    rank: int  # rows of A, columns of B
    rows: int  # of B
    columns: int  # of A
    expert: int = 0
    has_a: bool = True  # whether it has its own A, or shares the A of the pair before it
    has_lengths: bool = False  # whether it also has DoRA's trained length of each row
    looks_up: bool = False  # belongs to an embedding, which looks up columns of A

    @property
    def multiplications(self) -> int:
        """Multiplications per token with A and B; a look-up in A does not count."""
        return self.rank * (self.rows if self.looks_up else self.rows + self.columns)


@dataclass(frozen=True)
class Trained:
    """How one of Megatron's weights is trained."""

    is_saved: bool
    shape: tuple[int, ...]  # of the whole weight; for experts, their number comes first
    pairs: tuple[Pair, ...]  # adapters in order; for experts, one expert after the other


@dataclass(frozen=True)
class AdaptedModel:
    """What is trained in a model with frozen weights."""

    lora: LoRA | None
    of: Mapping[str, Trained]  # by name in a checkpoint; an absent weight is frozen and has no adapter
    is_tied: bool = False

    def multiplications(self, prefix: str | tuple[str, ...] = "", topk: int = 0) -> tuple[float, float]:
        """Return the multiplications per token with weights that are trained in full, and with A and B.

        ``prefix`` begins the names of the weights to count; each token goes to ``topk`` experts.
        """
        saved = added = 0.0
        for name, trained in self.of.items():
            if not name.startswith(prefix):
                continue
            # Rank 8 on 8 experts of 64 x 32 with topk=2: a token sees 2 of the 8 adapters, 2 * 8 * (64 + 32) = 1,536.
            share = topk / trained.shape[0] if len(trained.shape) == 3 else 1.0
            multiplies = len(trained.shape) > 1 and (self.is_tied or not name.startswith("embedding."))
            saved += share * math.prod(trained.shape) if trained.is_saved and multiplies else 0
            added += share * sum(pair.multiplications for pair in trained.pairs)
        return saved, added


def _entries(field: str, pattern: Mapping[str, Any] | None) -> dict[str, Any]:
    if pattern is not None and not isinstance(pattern, Mapping):
        raise TypeError(f"{field}={pattern!r} is not a mapping; give {{'q_proj': 16}}, for example")
    return {f"{field}[{key!r}]": value for key, value in (pattern or {}).items()}


@functools.lru_cache(maxsize=1024)
def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}={pattern!r} is not a regular expression: {error}; give one, or names") from error


def _matches(entries: list[str] | str, name: str) -> bool:
    # Text is a pattern for whole names; a list has endings that begin at a dot.
    if isinstance(entries, str):
        return _compiled("target_modules", entries).fullmatch(name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)


def by_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a name or its ending after a dot, as PEFT does."""
    for key, value in (pattern or {}).items():
        if _compiled("rank_pattern or alpha_pattern", rf"(.*\.)?({key})").fullmatch(name):
            return value
    return default
