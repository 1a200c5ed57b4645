# SPDX-License-Identifier: Apache-2.0
"""Which tensors a PEFT adapter has, and which part of them a rank holds.

A projection has A, B and, with DoRA, the lengths of its rows. An embedding's A and B have names of their own, and its
columns are the tokens. There are two layouts of routed experts (E experts, rank r, o outputs, i inputs):

- ``"stacked"``, PEFT's with transformers 5: one A and one B for all experts of a layer, for ``gate_up_proj`` and for
  ``down_proj``. A is [E r, i], and row ``e r + k`` belongs to expert e. B is [o, r E], and column ``k E + e`` belongs
  to it. PEFT wraps the module of the experts once for each, so the names of the inner one contain ``base_layer``.
- ``"each"``: a pair for each projection of each expert, ``mlp.experts.5.gate_proj.lora_A.weight``.

In the stacked layout the gate and the up projection share one A. If they have an A each, both are in it, one after the
other, and B has zeros where the rows of one meet the columns of the other. ``peft_folder.py`` reads them,
``interop/export_adapter.py`` writes them.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor

from lightning_mcore.config.lora import (
    EMBEDDING,
    OUTPUT,
    ROUTERS,
    TRIPLES,
    LoRA,
    by_pattern,
    in_transformers,
    parameter_of,
)
from lightning_mcore.hf.adapters import projection_names, weights_trained_whole
from lightning_mcore.layers.adapted_layers import ADAPTERS, adapted_weight
from lightning_mcore.layers.lora import Adapter, Adapters
from lightning_mcore.parallel.chunks import built_chunks

ExpertLayout = Literal["stacked", "each"]
PREFIX = "base_model.model."
_A, _B, _LENGTHS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_COPY = ".base_layer.weight"
_OF_EMBEDDING = {_A: "lora_embedding_A", _B: "lora_embedding_B"}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of the file that this rank holds."""

    key: str
    data: Tensor
    shape: Shape  # of the whole tensor
    start: Shape  # where the part begins in the tensor, seen as ``view``
    view: Shape | None = None  # with stacked experts, the shape in which the part is a rectangle

    @property
    def place(self) -> tuple[slice, ...]:
        """The part, in a tensor that is seen as ``view``."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.data.shape, strict=True))


@dataclass(frozen=True)
class Slot:
    """Where the adapter of one projection is in the tensors of the file.

    With 4 experts of rank 8, expert 2 of a stacked down_proj has rows 16-23 of A, seen as [4, 8, inputs], and columns
    2, 6, 10, ..., 30 of B, seen as [outputs, 8, 4].
    """

    stem: str  # names of the tensors without the last part
    rank: int  # of the tensors, per expert: 16 for gate and up of rank 8 with an A each
    first: int  # the projection's first index within that rank: 8 for that up projection
    row: int  # its first row of B: the up projection's follow the gate's
    outputs: int
    inputs: int
    expert: int | None = None  # its number, if the tensors hold all experts
    experts: int = 1

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of A and B by name."""
        rank = self.rank * self.experts
        return {self.key(_A): (rank, self.inputs), self.key(_B): (self.outputs, rank)}

    def key(self, last: str) -> str:
        """Return the name of A or B in the file."""
        return f"{self.stem}.{_OF_EMBEDDING[last] if is_embedding(self.stem) else last}"

    def a(self, values: Tensor, column: int) -> Piece:
        """Return the place of this rank's A, [r, columns], perhaps with padding columns."""
        key, values = self.key(_A), values[:, : self.inputs - column]
        if self.expert is None:
            return Piece(key, values, self.shapes[key], (0, column))
        view = (self.experts, self.rank, self.inputs)
        return Piece(key, values[None], self.shapes[key], (self.expert, self.first, column), view)

    def b(self, values: Tensor, row: int) -> Piece:
        """Return the place of this rank's B, [rows, r]."""
        key = self.key(_B)
        if self.expert is None:
            return Piece(key, values, self.shapes[key], (row, 0))
        view = (self.outputs, self.rank, self.experts)
        return Piece(key, values[..., None], self.shapes[key], (self.row + row, self.first, self.expert), view)


def slot_of(name: str, shape: Sequence[int], lora: LoRA, experts: int, layout: ExpertLayout) -> Slot:
    """Return where a projection's adapter is, by Hugging Face name; ``shape`` is its weight's ``(outputs, inputs)``."""
    outputs, inputs = shape
    if layout == "each" or not is_stacked(name):
        known = parameter_of(name).removesuffix(".weight") if layout == "stacked" and is_router(name) else name
        return Slot(f"{PREFIX}{known}", lora.rank(name), 0, 0, outputs, inputs)
    prefix, _, last = name.rpartition(".")
    gate, up, down = (f"{prefix}.{other}" for other in next(names for names in TRIPLES if last in names))
    number = int(prefix.rpartition(".")[2])
    stem = PREFIX + parameter_of(name).rpartition(".")[0]
    if name == down:
        return Slot(stem, lora.rank(name), 0, 0, outputs, inputs, number, experts)
    # PEFT wraps the experts for down_proj last, so gate_up_proj is inside that wrapper if there is one
    stem += ".base_layer" if lora.adapts(down) else ""
    ranks = [lora.rank(other) if lora.adapts(other) else 0 for other in (gate, up)]
    shared = lora.targets_parameter(name)
    first = ranks[0] if name == up and not shared else 0
    row = outputs if name == up else 0
    return Slot(stem, ranks[0] if shared else sum(ranks), first, row, 2 * outputs, inputs, number, experts)


def is_stacked(name: str) -> bool:
    """Return whether transformers 5 keeps a projection in one parameter for all experts of a layer."""
    return not parameter_of(name).endswith(".weight")


def is_router(name: str) -> bool:
    """Return whether a projection is a router, which transformers 5 keeps as a bare parameter."""
    return name.rpartition(".")[2] in ROUTERS[:2]


def is_embedding(name: str) -> bool:
    """Return whether a projection is the embedding."""
    return name.rpartition(".")[2] == EMBEDDING


def adapter_pieces(module: pl.LightningModule, lora: LoRA, layout: ExpertLayout | None = None) -> Iterator[Piece]:
    """Yield what this rank holds of an adapter file's tensors; ``layout=None`` takes the layout of the settings."""
    names: Any = module
    family, fields = names.hf_names()
    family = family.in_adapters()
    experts = int(fields.get("num_moe_experts") or 0)
    layout = layout or own_layout(lora, projection_names(family, fields))
    for block, values in weights_trained_whole(built_chunks(module), family, fields):
        shape = tuple(a + n for a, n in zip(block.hf_start, block.hf_shape, strict=True))  # at least this large
        yield Piece(PREFIX + in_transformers(block.hf), values, shape, block.hf_start)
    for child in module.modules():
        if isinstance(child, Adapter):
            p = child.projection
            slot = slot_of(p.name, (p.out_features, p.in_features), lora, experts, layout)
            yield slot.a(child.lora_A, p.column)
            # lora_B has the rows in order; consecutive rows of the projection may be apart in Megatron's weight
            for run in p.runs:
                own = slice(run.start, run.start + run.count)
                yield slot.b(child.lora_B[own], run.hf_start)
                if child.lora_magnitude_vector is not None:
                    lengths = child.lora_magnitude_vector[own]
                    yield Piece(f"{slot.stem}.{_LENGTHS}", lengths, (p.out_features,), (run.hf_start,))


def copied_name(key: str) -> str | None:
    """Return the projection whose frozen weight PEFT has copied into the file under a name; None for other tensors."""
    name = key.removeprefix(PREFIX).removesuffix(_COPY)
    return name if key.endswith(_COPY) and name.rpartition(".")[2] in (EMBEDDING, OUTPUT) else None


def copied_pieces(module: pl.LightningModule) -> Iterator[Piece]:
    """Yield what this rank holds of the frozen weights that PEFT may copy: embedding and output layer with adapters."""
    for layer in module.modules():
        adapters = layer._modules.get(ADAPTERS)
        for adapter in adapters.values() if isinstance(adapters, Adapters) else ():
            assert isinstance(adapter, Adapter)
            p, key = adapter.projection, f"{PREFIX}{adapter.projection.name}{_COPY}"
            first, rows, columns = p.first_row, p.out_features, p.in_features
            if p.is_embedding:
                first, rows, columns = p.column, columns, rows
            if copied_name(key) is not None:
                yield Piece(key, adapted_weight(layer)[: rows - first], (rows, columns), (first, 0))


def expected_shapes(
    lora: LoRA, names: Sequence[str], shapes: Mapping[str, Shape], fields: Mapping[str, Any], layout: ExpertLayout
) -> dict[str, Shape]:
    """Return the shapes of an adapter's tensors, for projections of a model with tensors of these shapes."""
    experts = int(fields.get("num_moe_experts") or 0)
    shapes = {**_shapes_of_experts(names, shapes, int(fields["hidden_size"])), **shapes}
    saved = {key: shape for key, shape in shapes.items() if lora.saves(key.rpartition(".")[0])}
    found = {PREFIX + in_transformers(key): shape for key, shape in saved.items()}
    for name in names:
        shape = shapes.get(f"{name}.weight", ())
        shape = shape[::-1] if is_embedding(name) else shape
        if len(shape) == 2 and lora.adapts(name):
            slot = slot_of(name, shape, lora, experts, layout)
            found |= slot.shapes
            if lora.use_dora:
                found[f"{slot.stem}.{_LENGTHS}"] = shape[:1]
    return found


def _shapes_of_experts(names: Iterable[str], shapes: Mapping[str, Shape], hidden: int) -> dict[str, Shape]:
    """Return the shapes of each expert's projections by name, if a model has one tensor for all of a layer."""
    found: dict[str, Shape] = {}
    for name in names:
        whole = shapes.get(parameter_of(name), ()) if is_stacked(name) else ()
        if len(whole) == 3:
            is_down = parameter_of(name).endswith("down_proj")
            # [E, 2f, h] or, transposed, [E, h, 2f]: the axis that is not hidden is the width, twice for gate_up
            inner = (whole[1] if whole[2] == hidden else whole[2]) // (1 if is_down else 2)
            found[f"{name}.weight"] = (hidden, inner) if is_down else (inner, hidden)
    return found


def own_layout(lora: LoRA, names: Sequence[str]) -> ExpertLayout:
    """Return the layout of experts that an adapter's settings describe."""
    found = any((is_stacked(name) or is_router(name)) and lora.targets_parameter(name) for name in names)
    return "stacked" if found else "each"


def can_stack(lora: LoRA, names: Sequence[str]) -> bool:
    """Return whether the stacked layout can hold the adapters of experts."""
    return _differing(lora, names) is None


def require_stackable(lora: LoRA, names: Sequence[str]) -> None:
    """Raise ValueError for adapters of experts that the stacked layout cannot hold."""
    parameter = _differing(lora, names)
    if parameter is not None:
        raise ValueError(
            f"the experts' adapters of {parameter} differ in target, rank or scale, and the stacked layout has one"
            " rank and scale for all; write them with experts='each' (--experts each)"
        )


def _differing(lora: LoRA, names: Iterable[str]) -> str | None:
    """Return the parameter of all experts of a layer that the stacked layout cannot hold; None if there is none."""
    # For each parameter and projection, the set of (rank, scale) among the experts; None for one without an adapter
    found: dict[str, dict[str, set[Any]]] = {}
    for name in filter(is_stacked, names):
        kind = (lora.rank(name), lora.scale(name)) if lora.adapts(name) else None
        found.setdefault(parameter_of(name), {}).setdefault(name.rpartition(".")[2], set()).add(kind)
    for parameter, projections in found.items():
        scales = {kind[1] for kinds in projections.values() for kind in kinds if kind is not None}
        if any(len(kinds) > 1 for kinds in projections.values()) or len(scales) > 1:
            return parameter
    return None


def described_targets(
    lora: LoRA, adapted: Collection[str], names: Sequence[str], layout: ExpertLayout, is_translated: bool
) -> dict[str, Any]:
    """Return the settings of ``adapter_config.json`` that say which modules have adapters.

    PEFT takes ``gate_proj`` and the like among ``target_modules`` for routed experts only, and skips other modules of
    that name. So the weights of the others are listed in ``target_parameters``. With the layout ``"each"``, experts are
    in both, for PEFT with transformers 5 and for programs that read older files.
    ``is_translated`` says whether PEFT reads such names this way (:func:`~lightning_mcore.hf.adapters.is_translated`).
    """
    has_experts = any(map(is_stacked, names))
    is_plain = not (lora.lora_dropout or lora.use_dora)  # PEFT supports neither on parameters
    # PEFT turns the name of an expert's projection into the names in all layers.
    are_named = not is_translated or all(map(lora.adapts, filter(is_stacked, names)))
    is_whole = layout == "stacked" or _differing(lora, names) is None
    modules: dict[str, tuple[int, float]] = {}
    parameters: dict[str, tuple[int, float]] = {}
    for name in adapted:
        rank, alpha = lora.rank(name), lora.alpha(name)
        is_named_alike = has_experts and any(name.rpartition(".")[2] in of_expert for of_expert in TRIPLES)
        is_parameter = (
            is_router(name)
            or (is_stacked(name) and is_whole)
            or (is_named_alike and (is_translated or (is_plain and layout == "stacked")))
        )
        if is_parameter:
            # PEFT scales by alpha / rank, or alpha / sqrt(rank) with rsLoRA. Gate and up of rank 8 and alpha 16 are
            # stored with rank 16, so alpha becomes 32 to keep the scale of 2.
            whole = slot_of(name, (1, 1), lora, 1, "stacked").rank
            times = (whole / rank) ** 0.5 if lora.use_rslora else whole / rank
            parameters[parameter_of(name)] = (whole, alpha * times)
        if not is_parameter or (layout == "each" and is_named_alike and are_named):
            modules[name] = (rank, alpha)
    of_all = {**parameters, **modules}
    return {
        "target_modules": _endings(modules, names),
        "target_parameters": _endings(parameters, map(parameter_of, names), 1) or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "rank_pattern": _pattern({name: rank for name, (rank, _) in of_all.items()}, lora.r, lora.rank_pattern),
        "alpha_pattern": _pattern({n: alpha for n, (_, alpha) in of_all.items()}, lora.lora_alpha, lora.alpha_pattern),
    }


def _endings(chosen: Collection[str], names: Iterable[str], shortest: int = 0) -> list[str]:
    """Return name endings that mean all chosen ones and no other: the last part, or what follows the layer."""

    def endings(name: str) -> list[str]:
        return [name.rpartition(".")[2], _within_layer(name)][shortest:]

    # With experts, "gate_proj" means theirs too, so a dense layer's is "mlp.gate_proj"
    ambiguous = {ending for name in names if name not in chosen for ending in endings(name)}
    return sorted({next((ending for ending in endings(name) if ending not in ambiguous), name) for name in chosen})


def _within_layer(name: str) -> str:
    return re.sub(r"^.*?\.\d+\.", "", name)


def _pattern(values: Mapping[str, Any], default: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a pattern that gives each name its value, even after its keys have been sorted in a file.

    This is the given pattern, preceded by more entries where needed, or whole names if sorting would change a value.
    """
    of_ending: dict[str, set[Any]] = {}
    for name, value in values.items():
        of_ending.setdefault(_within_layer(name), set()).add(value)
    # The first pattern that matches counts. q_proj needs the layer in its name only if layers differ.
    own = {
        re.escape(name if len(of_ending[_within_layer(name)]) > 1 else _within_layer(name)): value
        for name, value in values.items()
        if by_pattern(given, name, default) != value
    }
    found = {**own, **(given or {})}
    in_file = dict(sorted(found.items()))  # here and in PEFT, the keys of a JSON file are sorted
    if all(by_pattern(in_file, name, default) == value for name, value in values.items()):
        return found
    return {re.escape(name): value for name, value in values.items() if value != default}
