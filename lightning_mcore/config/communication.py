# SPDX-License-Identifier: Apache-2.0
"""Communication options that few runs need: for process groups and for the traffic between pipeline stages.

They form one argument of the strategy, ``MCoreStrategy(communication=CommunicationOptions(...))``, so that the list of
its arguments stays readable. Each field has Megatron's name and goes where Megatron reads it:
:meth:`CommunicationOptions.group_arguments` to ``initialize_model_parallel`` (through ``parallel/groups.py``),
:meth:`CommunicationOptions.megatron_fields` into the model's ``TransformerConfig``. On the CPU, options that need NCCL
raise when the trainer gets the model, before a group is opened.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.value_checks import require_choice, require_file, require_flag

if TYPE_CHECKING:
    import torch

PipelineBackend = Literal["nccl", "ucc"]
SharpGroup = Literal["dp", "dp_replica"]

# The names under which initialize_model_parallel (0.16.1 and 0.19.2) looks up a group's options.
GROUP_NAMES = frozenset({"cp", "dp", "dp_cp", "embd", "ep", "ep_dp", "ep_tp", "hcp", "inter_ep_dp", "intra_dp_cp"}) | {
    *("intra_dist_opt_instance", "intra_ep_dp", "mp", "pos_embd", "pp", "tp", "tp_cp", "tp_dp", "tp_dp_cp"),
    *("tp_ep_mp", "tp_ep_pp"),
}
_FOR_NCCL = (
    "pipeline_model_parallel_comm_backend",
    "use_sharp",
    "nccl_communicator_config_path",
    "high_priority_stream_groups",
)


@dataclass(frozen=True)  # without slots, which jsonargparse cannot read
class CommunicationOptions:
    """Rarely used options of Megatron's process groups and of the traffic between pipeline stages.

    Args:
        pipeline_model_parallel_comm_backend: Backend of the pipeline's groups; None for the other groups' backend. CUDA
            only.
        use_sharp: Let InfiniBand switches reduce (SHARP) for one kind of group. NCCL only.
        sharp_enabled_group: The kind of group that uses SHARP: ``"dp"``, or ``"dp_replica"`` with several
            distributed-optimizer instances; None for ``"dp"``.
        nccl_communicator_config_path: A YAML file with ``min_ctas``, ``max_ctas`` and ``cga_cluster_size`` for each
            group; None for NCCL's defaults. NCCL only.
        high_priority_stream_groups: Groups whose kernels have priority, such as ``["tp_dp_cp", "ep"]``; None for
            none. NCCL only.
        create_gloo_process_groups: Open gloo groups next to the data-parallel ones, for your own code to get from
            ``parallel_state``; this package does not need them.
        batch_p2p_comm: Batch the sends and receives between neighbouring stages; None batches them unless
            ``overlap_p2p_comm`` is on.
        overlap_p2p_comm_warmup_flush: Also overlap sending in the warm-up and flush of the interleaved schedule.
        deallocate_pipeline_outputs: Free a stage's output once it is sent; None frees it on CUDA, as Megatron-LM's
            training does, but not on the CPU, where gloo may still be sending from its memory.

    Raises:
        TypeError: A flag is not a bool, or a path or a list of names is something else.
        ValueError: Megatron does not know a value, or options contradict each other.
        FileNotFoundError: The file of ``nccl_communicator_config_path`` does not exist.

    Examples:
        >>> from lightning_mcore import CommunicationOptions, MCoreStrategy
        >>> options = CommunicationOptions(batch_p2p_comm=False)
        >>> strategy = MCoreStrategy(pipeline_model_parallel_size=2, communication=options)
    """

    pipeline_model_parallel_comm_backend: PipelineBackend | None = None
    use_sharp: bool = False
    sharp_enabled_group: SharpGroup | None = None
    nccl_communicator_config_path: str | None = None
    high_priority_stream_groups: list[str] | None = None
    create_gloo_process_groups: bool = False
    batch_p2p_comm: bool | None = None
    overlap_p2p_comm_warmup_flush: bool = False
    deallocate_pipeline_outputs: bool | None = None

    def __post_init__(self) -> None:
        """Check the values that depend on neither layout nor device."""
        for name in ("use_sharp", "create_gloo_process_groups", "overlap_p2p_comm_warmup_flush"):
            require_flag(name, getattr(self, name))
        for name in ("deallocate_pipeline_outputs", "batch_p2p_comm"):
            require_flag(name, getattr(self, name), or_none=True)
        backend = self.pipeline_model_parallel_comm_backend
        require_choice("pipeline_model_parallel_comm_backend", backend, PipelineBackend, or_none=True)
        require_choice("sharp_enabled_group", self.sharp_enabled_group, SharpGroup, or_none=True)
        if self.sharp_enabled_group is not None and not self.use_sharp:
            raise ValueError(f"sharp_enabled_group={self.sharp_enabled_group!r} needs use_sharp=True; set both")
        groups = self.high_priority_stream_groups or []
        if not isinstance(groups, list) or not all(isinstance(name, str) for name in groups):
            raise TypeError(f"high_priority_stream_groups={groups!r} is not a list of names; give one")
        if unknown := sorted(set(groups) - GROUP_NAMES):
            raise ValueError(
                f"high_priority_stream_groups names {unknown}, which Megatron does not know; choose from"
                f" {' '.join(sorted(GROUP_NAMES))}"
            )
        require_file("nccl_communicator_config_path", self.nccl_communicator_config_path)

    def layout_faults(self, layout: ParallelLayout, overlap_p2p_comm: bool, num_instances: int) -> Iterator[str]:
        """Yield a sentence for each option that contradicts the strategy's options or would have no effect.

        Source: ``ModelParallelConfig.__post_init__``, ``initialize_model_parallel`` (0.16) and, for the interleaved
        schedule without overlap, ``validate_args`` of Megatron-LM's training.
        """
        if overlap_p2p_comm and self.batch_p2p_comm:
            yield "batch_p2p_comm=True contradicts overlap_p2p_comm=True; set one of them to False"
        if self.overlap_p2p_comm_warmup_flush and not overlap_p2p_comm:
            yield (
                "overlap_p2p_comm_warmup_flush=True needs overlap_p2p_comm=True, which needs the interleaved schedule;"
                " set virtual_pipeline_model_parallel_size=2 or more"
            )
        if self.sharp_enabled_group == "dp_replica" and num_instances == 1:
            yield (
                "sharp_enabled_group='dp_replica' needs several distributed-optimizer instances; set"
                " ddp_config=DistributedDataParallelConfig(num_distributed_optimizer_instances=2) or more"
            )
        pp = layout.pipeline_model_parallel_size
        if self.pipeline_model_parallel_comm_backend is not None and pp == 1:
            yield (
                f"pipeline_model_parallel_comm_backend={self.pipeline_model_parallel_comm_backend!r} needs"
                " pipeline_model_parallel_size of 2 or more, but it is 1; leave the backend None"
            )
        if layout.is_interleaved and pp == 2 and not overlap_p2p_comm:
            yield (
                "overlap_p2p_comm=False with the interleaved schedule needs pipeline_model_parallel_size of 3 or more,"
                " but it is 2, where the two ranks would send to each other twice in one batch; leave it None"
            )

    def device_faults(self, device_type: str) -> Iterator[str]:
        """Yield a sentence for each option that needs NCCL, if the device is not ``"cuda"``."""
        if device_type == "cuda":
            return
        for name in _FOR_NCCL:
            if value := getattr(self, name):
                yield (
                    f"{name}={value!r} is an option of NCCL, but this run is on {device_type!r}, whose groups are gloo;"
                    " leave it out"
                )
        if self.deallocate_pipeline_outputs:
            yield (
                "deallocate_pipeline_outputs=True frees memory from which gloo may still be sending, so it is only "
                f"for CUDA, but this run is on {device_type!r}; leave it out"
            )

    def group_arguments(self) -> Mapping[str, Any]:
        """Return these options as arguments of ``initialize_model_parallel``."""
        names = (*_FOR_NCCL, "sharp_enabled_group", "create_gloo_process_groups")
        return {name: getattr(self, name) for name in names}

    def megatron_fields(self, layout: ParallelLayout, overlap_p2p_comm: bool, device: "torch.device") -> dict[str, Any]:
        """Return these options as fields of ``TransformerConfig``."""
        # Megatron allows only one of the two: batched sends, or sends that overlap.
        batched = self.batch_p2p_comm if self.batch_p2p_comm is not None else not overlap_p2p_comm
        freed = self.deallocate_pipeline_outputs
        if freed is None:
            freed = device.type == "cuda"
        return {
            "batch_p2p_comm": batched,
            # Megatron's default is to wait for the whole GPU after each batch of sends and receives, around a fault
            # that PyTorch 1.13 fixed (pytorch/pytorch#82450). The GPU itself still waits for what it received.
            "batch_p2p_sync": False,
            "overlap_p2p_comm_warmup_flush": self.overlap_p2p_comm_warmup_flush,
            # Without a pipeline, the output is the loss.
            "deallocate_pipeline_outputs": freed and layout.pipeline_model_parallel_size > 1,
        }
