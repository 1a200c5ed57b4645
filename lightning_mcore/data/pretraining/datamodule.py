# SPDX-License-Identifier: Apache-2.0
"""``MCorePretrainingData``: a LightningDataModule for Megatron's indexed datasets, blends and splits.

``lightning-mcore preprocess`` or Megatron-LM makes the files. Megatron's ``GPTDataset``, built by ``blend.py``, cuts
documents into rows of ``seq_length`` tokens and shuffles them. Its order does not depend on ranks, so the loaders of
``data/sampling.py`` read it unchanged: every step sees the same samples whatever the layout, and a resumed run
continues with the next ones.

The order does depend on the number of samples to draw, which follows from ``max_steps``: Megatron joins as many passes
over the documents as it needs and shuffles across all of them. A run resumed with another number would read other
samples, some of them twice. So the checkpoint stores the number, and a resumed run keeps it if it is large enough.
"""

import logging
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_mcore.config.value_checks import require_flag, require_size
from lightning_mcore.data.checked_files import fingerprints, first_change
from lightning_mcore.data.pretraining.blend import (
    SPLITS,
    Blend,
    Rows,
    SplitRequest,
    build,
    parse_paths,
    parse_split,
    require_helpers,
    require_samples,
)
from lightning_mcore.data.pretraining.index import read_facts, read_index
from lightning_mcore.data.sampling import data_parallel_place, evaluation_loader, is_on_cuda, training_loader
from lightning_mcore.data.sources import names_of_sources
from lightning_mcore.parallel.consensus import run_on_rank0

DEFAULT_SPLIT = "969,30,1"

_WHOLE = (0.0, 1.0)
_log = logging.getLogger(__name__)


class MCorePretrainingData(pl.LightningDataModule):
    """Rows of ``seq_length`` tokens from Megatron's indexed datasets.

    A batch is a dict of ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each [b, s], as ``MCoreGPT``
    expects it. A single dataset, or datasets with weights, are repeated as often as training needs; several datasets
    without weights are read once. Documents follow one another in a row, and attention sees the whole row.

    Args:
        data_paths: Prefix of a dataset's .bin and .idx files; or a list of prefixes; or a dict of prefixes and weights,
            which are fractions of the samples and need not sum to 1. None if the arguments below name the datasets.
        seq_length: Tokens in a row.
        batch_size: Rows in a batch on one data-parallel rank.
        split: Relative numbers of documents for training, validation and test; None for ``"969,30,1"``.
        train_paths: Datasets for training only, instead of ``data_paths`` and ``split``.
        val_paths: Datasets for validation only.
        test_paths: Datasets for testing only.
        train_samples: Rows to train on; None takes as many as ``max_steps`` needs, or without ``max_steps`` all rows,
            in a new order in each epoch. Set it if the run may be extended later.
        val_samples: Rows to validate on; None for all.
        test_samples: Rows to test on; None for all.
        seed: Seed of the order.
        num_workers: Number of processes of each loader.
        cache_dir: Folder for Megatron's index files, visible to all machines; None for ``PREFIX.cache`` next to the
            first dataset.
        reset_position_ids: Let positions start again after each end-of-document token.
        eod_mask_loss: Ignore the target that follows an end-of-document token.
        eod_token_id: The end-of-document token; None reads it from the file that ``lightning-mcore preprocess`` wrote.
        log_sources: Also log the loss of each dataset, as ``train_loss/NAME`` and ``val_loss/NAME``.

    Raises:
        ValueError: A value is wrong, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        Seven rows of ten come from ``web.bin`` and ``web.idx``.

        >>> from lightning_mcore import MCorePretrainingData
        >>> data = MCorePretrainingData({"web": 0.7, "code": 0.3}, seq_length=4096, batch_size=2)
    """

    def __init__(
        self,
        data_paths: str | list[str] | dict[str, float] | None = None,
        *,
        seq_length: int,
        batch_size: int,
        split: str | None = None,
        train_paths: str | list[str] | dict[str, float] | None = None,
        val_paths: str | list[str] | dict[str, float] | None = None,
        test_paths: str | list[str] | dict[str, float] | None = None,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 2,
        cache_dir: str | None = None,
        reset_position_ids: bool = False,
        eod_mask_loss: bool = False,
        eod_token_id: int | None = None,
        log_sources: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"seq_length": seq_length, "batch_size": batch_size}
        given = {"train_samples": train_samples, "val_samples": val_samples, "test_samples": test_samples}
        for name, value in (sizes | {name: value for name, value in given.items() if value is not None}).items():
            require_size(name, value)
        for name, value in {"seed": seed, "num_workers": num_workers}.items():
            require_size(name, value, at_least=0)
        require_flag("reset_position_ids", reset_position_ids)
        require_flag("eod_mask_loss", eod_mask_loss)
        require_flag("log_sources", log_sources)
        # Lists by split: training, validation, test.
        self._blends, self._shares = _splits(data_paths, split, [train_paths, val_paths, test_paths])
        self.seq_length = seq_length
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self.reset_position_ids = reset_position_ids
        self.eod_mask_loss = eod_mask_loss
        self.eod_token_id = eod_token_id
        prefixes = dict.fromkeys(prefix for blend in self._blends if blend is not None for prefix in blend.prefixes)
        self._sources = list(prefixes) if log_sources else []
        self.source_names = names_of_sources(self._sources)
        """Name of each dataset in the names of logged losses; empty without ``log_sources``."""
        self._samples = [train_samples, val_samples, test_samples]
        self._rows: dict[tuple[int, int | None], Rows] = {}
        self._eod: int | None = eod_token_id
        self._held: dict[int, int] = {}  # rows of one pass, by split, after setup
        self._restored: dict[str, Any] | None = None
        self._drawn: int | None = None  # training samples; None shuffles anew in each epoch
        self._order: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Check the files of the splits that the stage reads, on rank 0; every rank raises the errors found.

        Raises:
            FileNotFoundError: A dataset does not exist.
            ValueError: A dataset is damaged, too small, or has a larger vocabulary than the model.
            ModuleNotFoundError: The compiled part of megatron-core is missing.
        """
        stage = stage or "fit"
        if stage == "fit":
            self._restored, self._drawn, self._order = None, None, {}
        numbers = {"fit": [0, 1], "validate": [1], "test": [2]}.get(stage, [])
        if self.trainer is not None and stage == "fit" and not self.trainer.enable_validation:
            numbers = [0]
        module = self.trainer.lightning_module if self.trainer is not None else None
        vocabulary, longest = getattr(module, "vocab_size", None), getattr(module, "seq_length", None)
        if isinstance(longest, int) and longest < self.seq_length:
            raise ValueError(
                f"the data's seq_length={self.seq_length} exceeds the model's seq_length={longest}; choose"
                f" {longest} or less, or a model with a larger seq_length"
            )
        held, self._eod = run_on_rank0(lambda: self._check(numbers, vocabulary))
        self._held.update(held)
        for number, samples in held.items():
            _log.info("%s: %d rows of %d tokens", SPLITS[number], samples, self.seq_length)

    def _check(self, numbers: list[int], vocabulary: object) -> tuple[dict[int, int], int | None]:
        """Return how many samples each split holds, and the end-of-document token; runs on rank 0."""
        require_helpers()
        held: dict[int, int] = {}
        facts: list[tuple[str, dict[str, Any]]] = []
        for number in numbers:
            blend, share = self._blends[number], self._shares[number]
            if blend is None or share is None:
                continue
            request = self._request(number, None)
            held[number] = sum(require_samples(read_index(prefix), request) for prefix in blend.prefixes)
            facts += [(prefix, read_facts(prefix)) for prefix in blend.prefixes]
        if 0 in numbers and 0 not in held:
            raise ValueError("there is no data to train on; give train_paths, or a split with a share for training")
        for prefix, fact in facts:
            size = fact.get("vocab_size")
            if isinstance(vocabulary, int) and isinstance(size, int) and size > vocabulary:
                raise ValueError(
                    f"{prefix} was made with a vocabulary of {size}, but the model has vocab_size={vocabulary}; choose"
                    f" vocab_size={size} or more"
                )
        return held, self._end_of_document(facts)

    def _end_of_document(self, facts: list[tuple[str, dict[str, Any]]]) -> int | None:
        if not (self.reset_position_ids or self.eod_mask_loss) or self.eod_token_id is not None:
            return self.eod_token_id
        tokens = {fact.get("eod_token_id") for _, fact in facts}
        if len(tokens) != 1 or None in tokens:
            name = "reset_position_ids" if self.reset_position_ids else "eod_mask_loss"
            raise ValueError(
                f"{name}=True needs the end-of-document token, but the datasets"
                f" {'name different ones' if len(tokens - {None}) > 1 else 'do not name one'}; give eod_token_id"
            )
        return tokens.pop()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of full global batches in Megatron's order.

        Raises:
            ValueError: There are fewer rows than a global batch, or the checkpoint was taken with other data, or with
                fewer samples than are needed now.
        """
        self._require_setup(0)
        self._order = self._order_now()
        self._drawn = self._train_samples()
        rows = self._built(0, self._drawn)
        if self._drawn is not None:
            _log.info("training draws %d rows, %.2f passes over the data", self._drawn, self._drawn / self._held[0])
        # Megatron has shuffled all passes already; only single passes over all rows are shuffled here.
        return training_loader(
            self.trainer,
            rows,
            self.batch_size,
            seed=self.seed,
            shuffle=self._drawn is None,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> Any:
        """Return the loader of the validation split, in order; an empty list without one."""
        return self._evaluation(1)

    def test_dataloader(self) -> Any:
        """Return the loader of the test split, in order; an empty list without one."""
        return self._evaluation(2)

    def _evaluation(self, number: int) -> Any:
        blend = self._blends[number]
        if blend is None:
            return []
        self._require_setup(number)
        held, wanted = self._held[number], self._samples[number]
        if blend.weights is None and wanted is not None and wanted > held:
            raise ValueError(
                f"{SPLITS[number]}_samples={wanted} is more than the {held} rows of the split; choose {held} or less"
            )
        # A weighted blend has no end of its own: take as many rows as one pass has.
        if blend.weights is not None and wanted is None:
            wanted = held
        rows, pin_memory = self._built(number, wanted), is_on_cuda(self.trainer)
        return evaluation_loader(rows, self.batch_size, num_workers=self.num_workers, pin_memory=pin_memory)

    def _require_setup(self, number: int) -> None:
        if number not in self._held:
            raise RuntimeError(f"the {SPLITS[number]} data is not set up yet; call setup() before its loader")

    def _request(self, number: int, samples: int | None) -> SplitRequest:
        blend, share = self._blends[number], self._shares[number]
        assert blend is not None
        assert share is not None
        sizes = (self.seq_length, self.seed, self.reset_position_ids, self.eod_mask_loss)
        return SplitRequest(blend, number, share, samples, *sizes, self._eod)

    def _built(self, number: int, samples: int | None) -> Rows:
        key = (number, samples)
        if key not in self._rows:
            request = self._request(number, samples)
            self._rows[key] = build(request, self.cache_dir or f"{request.blend.prefixes[0]}.cache")
            if self._sources:
                self._rows[key].sources = [self._sources.index(prefix) for prefix in request.blend.prefixes]
        return self._rows[key]

    def _train_samples(self) -> int | None:
        """Return how many samples to draw: the given number, the checkpoint's, or what the steps need."""
        needed, given = self._needed(), self._samples[0]
        blend = self._blends[0]
        assert blend is not None
        if self._restored is not None:
            return self._restored_samples(self._restored, needed, given)
        if given is None and needed is None and blend.weights is not None:
            raise ValueError("datasets with weights repeat forever; set train_samples, or Trainer(max_steps=...)")
        return given if given is not None else needed

    def _needed(self) -> int | None:
        if self.trainer is None or self.trainer.max_steps < 0:
            return None
        _, ranks = data_parallel_place(self.trainer)
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches * self.batch_size * ranks

    def _restored_samples(self, restored: dict[str, Any], needed: int | None, given: int | None) -> int | None:
        if (change := first_change(restored["order"], self._order)) is not None:
            name, then, now = change
            raise ValueError(
                f"the checkpoint was taken with other data: {name} was {then} and is now {now}; resume with the data of"
                " its run, or start a new run with load_weights"
            )
        saved: int | None = restored["train_samples"]
        if given is not None and given != saved:
            raise ValueError(
                f"train_samples={given}, but the run of the checkpoint drew {saved}, and the order of all samples"
                f" depends on it; give train_samples={saved}, or start a new run with load_weights"
            )
        if given is None and needed is not None and saved is not None and needed > saved:
            raise ValueError(
                f"the run now needs {needed} training samples, but the run of the checkpoint drew {saved}, and the"
                f" order of all samples depends on it; give the data train_samples={saved} to read these again when"
                " they are used up, or start a new run with load_weights"
            )
        if needed != saved and given is None:
            _log.info("training draws %s rows, as in the run of the checkpoint, instead of %s", saved, needed)
        return saved

    def _order_now(self) -> dict[str, Any]:
        """Return what else decides the sample order. File names do not count, because files may move."""
        blend, share = self._blends[0], self._shares[0]
        assert blend is not None
        assert share is not None
        indexes = run_on_rank0(lambda: [(index.documents, index.tokens()) for index in map(read_index, blend.prefixes)])
        contents = run_on_rank0(lambda: fingerprints([f"{prefix}.bin" for prefix in blend.prefixes]))
        return {
            "seq_length": self.seq_length,
            "seed": self.seed,
            "the share of the documents": list(share),
            "the (documents, tokens) of the datasets": [list(counts) for counts in indexes],
            "the content of the datasets": contents,
            "the weights": None if blend.weights is None else list(blend.weights),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of training samples, and what else their order depends on."""
        if not self._order:
            return dict(self._restored or {})
        return {"train_samples": self._drawn, "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the result of :meth:`state_dict` for the training loader.

        Raises:
            ValueError: The loader has already been made with another number of samples, as happens under strategies
                that read checkpoints late.
        """
        if self._order and state_dict and state_dict["train_samples"] != self._drawn:
            raise ValueError(
                f"the training loader was created with {self._drawn} samples before the checkpoint was read, but the"
                f" run of the checkpoint drew {state_dict['train_samples']}; give"
                f" train_samples={state_dict['train_samples']}"
            )
        self._restored = state_dict or None


def _splits(
    data_paths: object, split: str | None, apart: list[Any]
) -> tuple[list[Blend | None], list[tuple[float, float] | None]]:
    """Return the datasets for training, validation and test, and the fractions of documents that each reads."""
    names = ("train_paths", "val_paths", "test_paths")
    if data_paths is not None and any(paths is not None for paths in apart):
        name = next(name for name, paths in zip(names, apart, strict=True) if paths is not None)
        raise ValueError(f"data_paths and {name} are both given; give one blend to split, or one for each split")
    if data_paths is None:
        if split is not None:
            raise ValueError(
                f"split={split!r} divides data_paths, which is not given; give data_paths, or remove split"
            )
        if all(paths is None for paths in apart):
            raise ValueError("no data is given; give data_paths, or train_paths, val_paths and test_paths")
        blends = [
            parse_paths(name, paths) if paths is not None else None for name, paths in zip(names, apart, strict=True)
        ]
        return blends, [_WHOLE] * len(SPLITS)
    blend = parse_paths("data_paths", data_paths)
    shares = parse_split(DEFAULT_SPLIT if split is None else split)
    return [blend if share is not None else None for share in shares], shares
