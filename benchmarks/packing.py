# SPDX-License-Identifier: Apache-2.0
"""Benefits of packing: how full rows are, how fast samples are packed, and how much faster training is.

* **Fill.** The share of row positions that hold a token, for three length distributions. Compared are best-fit
  decreasing over all samples, the stream packer with a bounded number of open rows, first-fit and next-fit in sample
  order, and padded batches.
* **Packing speed.** Samples per second on one core: assigning samples to rows (``pack_lengths``), and building row
  tensors (``build_row``, ``OnlinePacker``).
* **Idle share.** The share of a step in which data-parallel ranks wait for the slowest one, because attention costs
  rows different amounts of work: rows in shuffled order, and dealt out by cost as the data modules do; for prepared
  files and for streams, which each rank packs for itself. Computed, not timed, from the operations of a Llama-3 8B in
  rows of 32,768.
* **Context parallelism.** What a row costs the ranks that share it, if every document is split over them, and with
  ``hybrid_context_parallel``: how many ranks share documents, padding, keys and values that a rank sends, and the share
  of the time that ranks would wait if they met after every row. Computed like the idle share.
* **Training speed.** Real tokens per second on one CPU rank under ``MCoreStrategy``. One ``Trainer.fit`` trains on one
  group of samples after another, each group in three forms: packed, padded to the longest sample of a batch, and padded
  to the row length. Batches of the three forms alternate, with equally many optimizer steps, so all forms see the same
  samples under the same load on a shared machine. The time of a batch covers everything: collation, Lightning's loops
  and the optimizer. If a row position cost the same in every form, the speed-up from packing would be the inverse of
  the fill of the padded form. *Efficiency* is the measured speed-up divided by this ideal.

    python -m benchmarks.packing
    python -m benchmarks.packing --parts training --rounds 5

The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import contextlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.overhead import LEARNING_RATE, REPOSITORY, circumstances, transformer_fields, write_results
from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.data.packing.best_fit import RowPart, TokenSample, pack_lengths, pack_parts
from lightning_mcore.data.packing.online import OnlinePacker
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.data.sampling import even_out
from tests.support.ranks import run_ranks

PARTS = ("fill", "speed", "idle", "context", "training")
VOCAB_SIZE = 1024
ROW_LENGTH = 8192  # for the first two parts
LONG_ROW = 32_768  # for the idle share
PARAMETERS, LAYERS, WIDTH, KEYS = 8.03e9, 32, 4096, 1024  # of Llama-3 8B
LINEAR = 6 * PARAMETERS * LONG_ROW  # operations of a row outside of attention, forward and backward
WARM_UP = 1  # warm-up rounds
TRAINING_FORMS = ("packed", "padded to the longest of a batch", "padded to the row")


def distributions(count: int, row_length: int = ROW_LENGTH) -> dict[str, np.ndarray]:
    """Return sample lengths in tokens: documents, uniform up to a row, and short questions with long answers."""
    generator = np.random.default_rng(1)
    bimodal = np.where(
        generator.random(count) < 0.7, generator.normal(250, 80, count), generator.normal(2500, 600, count)
    )
    return {
        "log-normal": np.clip(generator.lognormal(6, 1, count).astype(np.int64), 1, row_length),
        "uniform": generator.integers(1, row_length + 1, count),
        "bimodal": np.clip(bimodal.astype(np.int64), 1, row_length),
    }


# ---- how full rows are


def measure_fill(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the fill for each distribution and each way to build rows."""
    results = []
    for name, lengths in distributions(options.fill_samples).items():
        places = {
            "best-fit decreasing": len(pack_lengths(lengths, ROW_LENGTH)) * ROW_LENGTH,
            **{f"online, {rows} open rows": online_rows(lengths, rows) * ROW_LENGTH for rows in options.open_rows},
            "first-fit": first_fit_rows(lengths) * ROW_LENGTH,
            "next-fit": online_rows(lengths, 1) * ROW_LENGTH,
            "8 padded to the longest": padded_places(lengths, 8),
            "one in a row": len(lengths) * ROW_LENGTH,
        }
        results.append({"lengths": name, "mean": float(lengths.mean()), **fills(lengths, places)})
        print(results[-1], flush=True)
    return results


def fills(lengths: np.ndarray, places: dict[str, int]) -> dict[str, float]:
    return {name: float(lengths.sum() / number) for name, number in places.items()}


def online_rows(lengths: np.ndarray, open_rows: int) -> int:
    """Return how many rows the stream packer would produce, without building them."""
    packer = OnlinePacker(ROW_LENGTH, open_rows=open_rows)
    packer._close = lambda row: {}  # type: ignore[method-assign]  # builds no tensors
    tokens = np.zeros(ROW_LENGTH + 1, np.int64)
    made = sum(len(packer.add(TokenSample(tokens[: length + 1]))) for length in lengths.tolist())
    return made + len(packer.flush())


def first_fit_rows(lengths: np.ndarray) -> int:
    """Return the number of rows if each sample goes into the first row with room; searches a tree of free space."""
    leaves = 1 << int(len(lengths) - 1).bit_length()
    most = [ROW_LENGTH] * (2 * leaves)
    opened = 0
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= length else 2 * node + 1
        opened = max(opened, node - leaves + 1)
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return opened


def padded_places(lengths: np.ndarray, batch_size: int) -> int:
    starts = range(0, len(lengths), batch_size)
    return sum(len(batch) * int(batch.max()) for batch in (lengths[start : start + batch_size] for start in starts))


# ---- how fast samples are packed


def median_rate(amount: float, action: Callable[[], Any], rounds: int) -> float:
    """Return the amount that an action processes per second, as the median of some rounds."""
    seconds = []
    for _ in range(rounds):
        since = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - since)
    return amount / statistics.median(seconds)


def measure_speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return samples and tokens per second on one core."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    count = options.speed_samples
    for name, lengths in distributions(count).items():
        for multiple in (1, 8):
            rate = median_rate(count, lambda: pack_lengths(lengths, ROW_LENGTH, multiple), options.speed_rounds)  # noqa: B023
            results.append({"what": f"pack_lengths, multiple={multiple}", "lengths": name, "samples_per_second": rate})
            print(results[-1], flush=True)
    lengths = distributions(count // 20)["log-normal"]
    samples = as_samples(lengths)
    rows = pack_lengths(lengths, ROW_LENGTH)
    packer = OnlinePacker(ROW_LENGTH)
    actions = {
        "build_row": lambda: [build_row([samples[index] for index in row], ROW_LENGTH) for row in rows],
        "OnlinePacker.add, rows built": lambda: [packer.add(sample) for sample in samples],
    }
    for what, action in actions.items():
        rate = median_rate(len(samples), action, options.speed_rounds)
        tokens = rate * float(lengths.mean())
        results.append({"what": what, "lengths": "log-normal", "samples_per_second": rate, "tokens_per_second": tokens})
        print(results[-1], flush=True)
    return results


def as_samples(lengths: np.ndarray, seed: int = 1) -> list[TokenSample]:
    """Return samples of random tokens."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB_SIZE, int(lengths.sum()) + len(lengths))
    ends = np.cumsum(lengths + 1)
    return [
        TokenSample(tokens[end - length - 1 : end], None, number)
        for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True))
    ]


# ---- how long ranks wait for each other


def measure_idle(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the share of a step that ranks wait, before and after rows are dealt out by cost."""
    results = []
    for name, lengths in distributions(options.fill_samples, LONG_ROW).items():
        rows = pack_lengths(lengths, LONG_ROW)
        squares = np.add.reduceat(np.square(lengths[rows.order].astype(np.float64)), rows.offsets[:-1])
        shuffled = np.random.default_rng(2).permutation(work_of(squares))
        for ranks in options.idle_ranks:
            streamed = work_of(streamed_squares(lengths, ranks))
            for turns in options.idle_rows:
                found = {
                    "lengths": name,
                    "attention": 1 - LINEAR / float(shuffled.mean()),
                    "ranks": ranks,
                    "rows": turns,
                }
                for kind, work in (("", shuffled), ("streamed_", streamed)):
                    read = work[: len(work) // (ranks * turns) * ranks * turns]
                    dealt = read[even_out(read, ranks, turns)]
                    before, after = (idle_share(each.reshape(-1, turns, ranks).sum(1)) for each in (read, dealt))
                    found |= {f"{kind}shuffled": before, f"{kind}by_cost": after}
                results.append(found)
                print(found, flush=True)
    return results


def work_of(squares: np.ndarray) -> np.ndarray:
    """Return the operations of rows, forward and backward, from the sum of their documents' squared lengths."""
    # Causal attention has two products of l^2 / 2 * WIDTH multiply-adds in each layer.
    return LINEAR + 6 * LAYERS * WIDTH * squares


def streamed_squares(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Return the squares of streamed rows, turn by turn; rank r packs samples r, r + ranks and so on."""
    by_rank = []
    for rank in range(ranks):
        rows = streamed_rows(OnlinePacker(LONG_ROW), lengths[rank::ranks])
        by_rank.append([sum(length**2 for length in part.samples) for [part] in rows])
    turns = min(map(len, by_rank))  # where the stream's epoch ends
    return np.array([squares[:turns] for squares in by_rank], np.float64).T.flatten()


def streamed_rows(packer: OnlinePacker, lengths: np.ndarray) -> list[list[RowPart]]:
    """Return the parts of the rows that a stream makes, with the lengths of their documents."""
    tokens = np.zeros(LONG_ROW + 1, np.int64)
    packer._close = lambda row: [RowPart(width, [each.length for each in part]) for width, part in row]  # type: ignore
    made = [packer.add(TokenSample(tokens[: length + 1])) for length in lengths.tolist()]
    rows: Any = [row for closed in made for row in closed] + packer.flush()
    return rows


def idle_share(work: np.ndarray) -> float:
    """Return the mean share that ranks wait for the slowest; ``work`` [steps, ranks]."""
    return float(1 - (work.mean(1) / work.max(1)).mean())


# ---- what context-parallel ranks exchange, and how long they wait for each other


def measure_context(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return padding, traffic and waiting for every document split, and on as few ranks as possible."""
    results = []
    for name, lengths in distributions(options.fill_samples, LONG_ROW).items():
        for ranks in options.context_ranks:
            # Forward gathers keys and values, backward does so again and then reduces their gradients, in 16 bits.
            sent = 3 * (ranks - 1) * LONG_ROW // ranks * 2 * KEYS * 2 * LAYERS / 2**30
            found = {"lengths": name, "ranks": ranks, "sent_before": sent}
            found |= {"padding_before": padding_of(lengths, 2 * ranks)}
            packed = pack_parts(lengths, LONG_ROW, 2 * ranks, ranks)
            of_files = [
                [RowPart(width, lengths[part].tolist()) for width, part in packed[row]] for row in range(len(packed))
            ]
            of_stream = streamed_rows(OnlinePacker(LONG_ROW, 2 * ranks, parts=ranks), lengths)
            for kind, rows in (("", of_files), ("streamed_", of_stream)):
                shared_by = np.array([[width for width, _ in row for _ in range(width)] for row in rows])
                squares = [
                    np.repeat(
                        [sum(length**2 for length in part) / width for width, part in row], [width for width, _ in row]
                    )
                    for row in rows
                ]
                work = work_of_parts(np.array(squares), ranks)
                padding = 1 - lengths.sum() / (len(rows) * LONG_ROW)
                found |= {
                    f"{kind}shared_by_all": float((shared_by == ranks).mean()),
                    f"{kind}shared_by_some": float(((shared_by > 1) & (shared_by < ranks)).mean()),
                    f"{kind}padding": float(padding),
                    f"{kind}idle": idle_in_rows(work),
                    f"{kind}sent": sent * float(((shared_by - 1) / (ranks - 1)).mean()),
                }
                is_alone = (shared_by == 1).all(1)
                unsorted = work.copy()
                unsorted[is_alone] = np.random.default_rng(2).permutation(work[is_alone].flatten()).reshape(-1, ranks)
                found[f"{kind}idle_of_any_parts"] = idle_in_rows(unsorted)
            results.append(found)
            print(found, flush=True)
    return results


def idle_in_rows(work: np.ndarray) -> float:
    """Return the share of the time that ranks wait if they meet after every row; ``work`` [rows, ranks]."""
    return float(1 - work.mean(1).sum() / work.max(1).sum())


def work_of_parts(squares: np.ndarray, ranks: int) -> np.ndarray:
    """Return the operations of one rank from the sum of the squared lengths in its part of a row."""
    return work_of(squares * ranks) / ranks


def padding_of(lengths: np.ndarray, multiple: int) -> float:
    """Return the share of positions that hold padding if each document is padded to a multiple."""
    return float(1 - lengths.sum() / (len(pack_lengths(lengths, LONG_ROW, multiple)) * LONG_ROW))


# ---- how much faster training is


class Forms(IterableDataset[dict[str, torch.Tensor]]):
    """Groups of samples in every form, alternating between batches of each form; ``plan`` describes each batch.

    Args:
        options: The number and lengths of the samples.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plan: list[tuple[int, str]] = []
        self.tokens: Counter[tuple[int, str]] = Counter()
        self.places: Counter[tuple[int, str]] = Counter()
        self.seconds: Counter[tuple[int, str]] = Counter()  # for building batches
        self.all_seconds = 0.0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(WARM_UP + self.options.rounds):
            samples = self.group(number)
            batches = {form: self.batches(form, samples) for form in TRAINING_FORMS}
            while batches:
                for form in list(batches):
                    since = time.perf_counter()
                    batch = next(batches[form], None)
                    seconds = time.perf_counter() - since
                    key = (number, form)
                    self.seconds[key] += seconds
                    self.all_seconds += seconds
                    if batch is None:
                        del batches[form]
                        continue
                    self.plan.append(key)
                    self.tokens[key] += int(batch.pop("real"))
                    self.places[key] += batch["tokens"].numel()
                    yield batch

    def group(self, number: int) -> list[TokenSample]:
        generator = np.random.default_rng(number)
        lengths = generator.lognormal(np.log(self.options.median), 1, self.options.group).astype(np.int64)
        return as_samples(np.clip(lengths, 2, self.options.row_length), number)

    def batches(self, form: str, samples: Sequence[TokenSample]) -> Iterator[dict[str, torch.Tensor]]:
        size, row_length = self.options.batch_size, self.options.row_length
        steps = -(-len(samples) // size)
        if form != "packed":
            length = row_length if form == "padded to the row" else None
            for start in range(0, len(samples), size):
                batch = collate_padded(samples[start : start + size], row_length=length)
                yield {**batch, "real": batch["lengths"].sum()}
            return
        rows = list(pack_lengths([sample.length for sample in samples], row_length))
        for step in range(steps):  # as many optimizer steps as in the other forms
            part = rows[step * len(rows) // steps : (step + 1) * len(rows) // steps]
            if part:
                batch = collate_rows([build_row([samples[index] for index in row], row_length) for row in part])
                yield {**batch, "real": batch["cu_seqlens"][:, -1].sum()}


class BatchTimes(pl.Callback):
    """Times each batch from the end of the previous one; building it is timed apart, because Lightning prefetches.

    Args:
        forms: Records how long building batches takes.
    """

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.seconds: list[float] = []
        self.since = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.forms.all_seconds

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.since = self.now()

    def on_train_batch_end(self, *_: Any) -> None:
        now = self.now()
        self.seconds.append(now - self.since)
        self.since = now


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Rank function: return the seconds, tokens and row positions of each form in each round."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    forms = Forms(options)
    times = BatchTimes(forms)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MCoreStrategy(),
        plugins=[LightningEnvironment()],
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MCoreGPT(
        VOCAB_SIZE,
        options.row_length,
        transformer_fields(options),
        recipe=Recipe(learning_rate=LEARNING_RATE, min_learning_rate=LEARNING_RATE),
    )
    trainer.fit(model, DataLoader(forms, batch_size=None))
    for key, seconds in zip(forms.plan, times.seconds, strict=True):
        forms.seconds[key] += seconds
    return {"seconds": forms.seconds, "tokens": forms.tokens, "places": forms.places}


def measure_training(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the speed of each form and the speed-up from packing."""
    found = run_ranks(1, train, options, timeout=3600)[0]
    rounds = range(WARM_UP, WARM_UP + options.rounds)
    results = []
    for form in TRAINING_FORMS:
        tokens = sum(found["tokens"][number, form] for number in rounds)
        places = sum(found["places"][number, form] for number in rounds)
        rates = [found["tokens"][number, form] / found["seconds"][number, form] for number in rounds]
        gains = [found["seconds"][number, form] / found["seconds"][number, "packed"] for number in rounds]
        inverse = places / tokens
        results.append(
            {
                "form": form,
                "rounds": len(rounds),
                "fill": tokens / places,
                "median_tokens_per_second": statistics.median(rates),
                "gain_of_packing": statistics.median(gains),
                "inverse_of_fill": inverse,
                "efficiency": statistics.median(gains) / inverse,
                "seconds": [found["seconds"][number, form] for number in rounds],
            }
        )
    return results


# ---- the report


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as Markdown tables."""
    lines: list[str] = []
    if "fill" in results:
        ways = [name for name in results["fill"][0] if name not in ("lengths", "mean")]
        lines += ["Share of the places that hold a token, rows of 8,192:", ""]
        lines += [f"| lengths (mean) | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
        for row in results["fill"]:
            cells = " | ".join(f"{row[way]:.4f}" for way in ways)
            lines.append(f"| {row['lengths']} ({row['mean']:,.0f}) | {cells} |")
        lines.append("")
    if "speed" in results:
        lines += ["Packing on one core, medians:", "", "| what | lengths | samples/s | tokens/s |", "|---|---|---|---|"]
        for row in results["speed"]:
            tokens = f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""
            lines.append(f"| {row['what']} | {row['lengths']} | {row['samples_per_second']:,.0f} | {tokens} |")
        lines.append("")
    if "idle" in results:
        lines += [
            "Share of a step in which ranks wait for the slowest, Llama-3 8B in rows of 32,768 (computed):",
            "",
            "| lengths | attention's share of the work | ranks | rows of a rank in a step | shuffled | by cost | "
            "stream, as read | stream, by cost |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['lengths']} | {row['attention']:.1%} | {row['ranks']} | {row['rows']} | {row['shuffled']:.1%} | "
            f"{row['by_cost']:.1%} | {row['streamed_shuffled']:.1%} | {row['streamed_by_cost']:.1%} |"
            for row in results["idle"]
        ]
        lines.append("")
    if "context" in results:
        lines += [
            "One row of 32,768 tokens on the ranks that share it, Llama-3 8B (computed): every document split, and as "
            "few ranks as possible for each (`hybrid_context_parallel`). Shares are of all positions:",
            "",
            "| lengths | ranks | all ranks share | some ranks share | GiB a rank sends for a row: all split "
            "| hybrid | padding: all split | hybrid | waiting: parts of one rank in any order | parts of like cost | "
            "stream: all ranks share | some ranks share | GiB | padding | waiting |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['lengths']} | {row['ranks']} | {row['shared_by_all']:.1%} | {row['shared_by_some']:.1%} | "
            f"{row['sent_before']:.2f} | {row['sent']:.2f} | {row['padding_before']:.2%} | {row['padding']:.2%} | "
            f"{row['idle_of_any_parts']:.1%} | {row['idle']:.2%} | {row['streamed_shared_by_all']:.1%} | "
            f"{row['streamed_shared_by_some']:.1%} | {row['streamed_sent']:.2f} | {row['streamed_padding']:.2%} | "
            f"{row['streamed_idle']:.2%} |"
            for row in results["context"]
        ]
        lines.append("")
    if "training" in results:
        lines += [
            "Training on one CPU rank, real tokens, medians of rounds on the same samples:",
            "",
            "| form | rounds | fill | tokens/s | packing wins | inverse of the fill | efficiency |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['form']} | {row['rounds']} | {row['fill']:.3f} | {row['median_tokens_per_second']:,.0f} | "
            f"{row['gain_of_packing']:.2f} | {row['inverse_of_fill']:.2f} | {row['efficiency']:.2f} |"
            for row in results["training"]
        ]
    return "\n".join(lines).strip()


def main() -> None:
    """Run the selected parts and write the results."""
    parser = argparse.ArgumentParser(description="Measure packing: fill of the rows, speed, gain in training.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--fill-samples", type=int, default=200_000)
    parser.add_argument("--open-rows", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--idle-ranks", type=int, nargs="+", default=[8, 64], help="data-parallel ranks")
    parser.add_argument("--idle-rows", type=int, nargs="+", default=[1, 4, 16], help="rows of a rank in a step")
    parser.add_argument("--context-ranks", type=int, nargs="+", default=[2, 4, 8], help="context-parallel ranks")
    parser.add_argument("--speed-samples", type=int, default=1_000_000)
    parser.add_argument("--speed-rounds", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=12, help="groups of samples to train on that count")
    parser.add_argument("--group", type=int, default=128, help="samples of a group")
    parser.add_argument("--median", type=int, default=60, help="tokens of a sample in training, log-normal")
    parser.add_argument("--row-length", type=int, default=512, help="tokens of a row in training")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a padded batch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    measures = {
        "fill": measure_fill,
        "speed": measure_speed,
        "idle": measure_idle,
        "context": measure_context,
        "training": measure_training,
    }
    results = {part: measures[part](options) for part in PARTS if part in options.parts}
    name = "-".join(["packing", *(part for part in PARTS if part in options.parts and len(results) < len(PARTS))])
    write_results(options.output, name, "What packing gives", facts, results, table(results))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
