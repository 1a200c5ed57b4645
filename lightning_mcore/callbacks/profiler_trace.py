# SPDX-License-Identifier: Apache-2.0
"""A callback that writes traces of PyTorch's profiler for some steps of some ranks."""

from collections.abc import Sequence

from torch.profiler import profile

from lightning_mcore.callbacks.chosen_steps import ChosenSteps


class ProfilerTrace(ChosenSteps):
    """Profiles some optimizer steps on some ranks, and writes a Chrome trace for each rank.

    Each rank writes ``step<step>-rank<rank>-<coordinates>.json``; open it in https://ui.perfetto.dev. All other steps
    and ranks run at full speed. Lightning's ``PyTorchProfiler`` profiles all ranks, and names files by local rank; the
    two cannot run at the same time.

    Args:
        step: The first optimizer step to profile; 0 is the first of a run.
        num_steps: Number of steps to profile.
        ranks: The global ranks that profile.
        folder: Folder for the files.
        with_stack: Record the Python stack of each operation.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is too small.

    Examples:
        >>> from lightning_mcore.callbacks import ProfilerTrace
        >>> callback = ProfilerTrace(step=10, num_steps=2, ranks=[0, 8])
    """

    def __init__(
        self,
        step: int,
        num_steps: int = 1,
        ranks: Sequence[int] = (0,),
        folder: str = "traces",
        with_stack: bool = False,
    ) -> None:
        super().__init__(step, num_steps, ranks, folder, ".json")
        self.with_stack = with_stack
        self._profile: profile | None = None

    def begin(self) -> None:
        """Start the profiler."""
        self._profile = profile(with_stack=self.with_stack, acc_events=True)
        self._profile.start()

    def end(self, path: str) -> None:
        """Stop the profiler and write the file."""
        assert self._profile is not None
        self._profile.stop()
        self._profile.export_chrome_trace(path)
        self._profile = None
