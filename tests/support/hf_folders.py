# SPDX-License-Identifier: Apache-2.0
"""A Llama of any size, written as Hugging Face has it without ever being in memory, and what a job on it takes.

The weights are noise. transformers is not asked: it would build the model first.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

_CHUNK = 16 << 20  # bytes of noise, written again and again
_PEAKS_OF = """
import gc; gc.disable()
import os, sys, threading, warnings
warnings.filterwarnings("ignore")
import transformers
from transformers import AutoConfig
import lightning_mcore.interop.importing, lightning_mcore.interop.export
gc.freeze()

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

for job in {jobs!r}:
    sys.stdout.flush()
    if os.fork():
        assert os.wait()[1] == 0, job
        continue
    gc.enable()
    before, peak, done = status("RssAnon"), 0, threading.Event()

    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        exec(job)
    finally:
        done.set()
        watcher.join()
    print("kilobytes", max(0, peak - before))
    break
"""


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama.

    Args:
        hidden_size: Of a token; the MLP has three times as much.
        layers: Number of layers.
        vocab_size: Tokens.
        heads: Of queries.
        groups: Of keys and values.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    heads: int = 8
    groups: int = 4

    def config(self) -> dict[str, object]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        }

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        """Yield name and shape of every tensor."""
        hidden, narrow = self.hidden_size, self.hidden_size // self.heads * self.groups
        yield "model.embed_tokens.weight", [self.vocab_size, hidden]
        for layer in range(self.layers):
            for name, shape in {
                "input_layernorm.weight": [hidden],
                "self_attn.q_proj.weight": [hidden, hidden],
                "self_attn.k_proj.weight": [narrow, hidden],
                "self_attn.v_proj.weight": [narrow, hidden],
                "self_attn.o_proj.weight": [hidden, hidden],
                "post_attention_layernorm.weight": [hidden],
                "mlp.gate_proj.weight": [3 * hidden, hidden],
                "mlp.up_proj.weight": [3 * hidden, hidden],
                "mlp.down_proj.weight": [hidden, 3 * hidden],
            }.items():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", [hidden]
        yield "lm_head.weight", [self.vocab_size, hidden]


def write_llama(folder: Path, sizes: LlamaSizes, shard_bytes: int) -> int:
    """Write a Llama in bf16 and return the bytes of its weights.

    Args:
        folder: Where; made if it is not there.
        sizes: Of the model.
        shard_bytes: Of a file at most, unless one tensor is larger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.config(), indent=2))
    shards: list[dict[str, list[int]]] = [{}]
    filled = 0
    for name, shape in sizes.shapes():
        size = 2 * prod(shape)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    index: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_file(folder / file, shapes)
        index |= dict.fromkeys(shapes, file)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def _write_file(path: Path, shapes: dict[str, list[int]]) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = bytearray(os.urandom(_CHUNK))
    noise[1::2] = noise[1::2].translate(bytes(byte & 0xBF for byte in range(256)))  # exponents without infinities
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, _CHUNK):
            file.write(memoryview(noise)[: min(_CHUNK, end - begin)])
        file.flush()
        os.fsync(file.fileno())
    return end


def peak_memory(*jobs: str) -> list[int]:
    """Return the bytes of its own memory that each job takes at most in a process of its own, beyond those of imports.

    Pages of mapped files do not count: the system takes them back when it needs them. The processes are forks of one
    that has imported everything.

    Args:
        jobs: Python statements; ``lightning_mcore.hf`` is imported.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS_OF.format(jobs=jobs)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [1024 * int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("kilobytes ")]
