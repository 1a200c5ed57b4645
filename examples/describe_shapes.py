# SPDX-License-Identifier: Apache-2.0
"""Teach a tiny vision-language model to name the shapes in an image, on two CPU processes.

Run it with ``make demo-vl`` or ``python examples/describe_shapes.py``; ``--help`` lists the options.

1. The script draws images of two coloured shapes, each with a question and its answer. Some pairs of shapes are held
   out.
2. A tiny Qwen2-VL with random weights, including its vision tower, learns from these conversations. All its parts are
   trained, and DataLoader workers read the images.
3. Before and after training, the model is asked about the held-out pairs. ``samples.html`` shows the images and both
   answers.

All files (images, metrics, the model in Hugging Face format, the page) go to ``outputs/describe_shapes``.
"""

import argparse
import base64
import html
import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_mcore import (
    MCoreProgressBar,
    MCoreStrategy,
    MCoreVisionData,
    MCoreVisionGPT,
    Recipe,
    RunReport,
    SaveHFModel,
)
from run_report import read_curve

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "yellow": (240, 200, 0)}
SHAPES = ("circle", "square", "triangle")
KINDS = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
PAIRS = list(itertools.product(KINDS, KINDS))
KEPT_BACK = random.Random(0).sample(PAIRS, 16)
QUESTION = "<image> what is left and right ?"
WIDTH, HEIGHT, PATCH = 64, 32, 8  # pixels; each image token covers 2 x 2 patches
LENGTH = 32  # tokens per conversation, at most
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about three minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--images", type=int, default=6000, help="images to learn from (6000)")
    parser.add_argument("--max-steps", type=int, default=500, help="optimizer steps (500)")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step, for each data-parallel rank (32)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=1, help="processes of each rank that read images (1)")
    parser.add_argument("--output", type=Path, default=Path("outputs/describe_shapes"), help="folder for the files")
    return parser.parse_args(arguments)


def answer(left: str, right: str) -> str:
    """Return the correct answer for an image."""
    return f"a {left} and a {right}"


def draw(left: str, right: str, chance: random.Random) -> Image.Image:
    """Return an image of two shapes, each with a random size and position in its half."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pencil = ImageDraw.Draw(image)
    for start, kind in ((0, left), (WIDTH // 2, right)):
        colour, shape = kind.split()
        size = chance.randint(HEIGHT // 2, HEIGHT - 6)
        x, y = start + chance.randint(2, WIDTH // 2 - size - 2), chance.randint(2, HEIGHT - size - 2)
        box = (x, y, x + size, y + size)
        if shape == "circle":
            pencil.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pencil.rectangle(box, COLOURS[colour])
        else:
            pencil.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], COLOURS[colour])
    return image


def prepare(options: argparse.Namespace) -> None:
    """Draw the images, and write the conversations and a model with random weights."""
    shutil.rmtree(options.output, ignore_errors=True)
    chance, folder = random.Random(1), options.output / "images"
    folder.mkdir(parents=True)
    learnt = [pair for pair in PAIRS if pair not in KEPT_BACK]
    with (options.output / "train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(options.images):
            pair = chance.choice(learnt)
            draw(*pair, chance).save(folder / f"{number}.png")
            row = {"prompt": QUESTION, "response": answer(*pair), "images": [f"{number}.png"]}
            file.write(json.dumps(row) + "\n")
    for number, pair in enumerate(KEPT_BACK):
        draw(*pair, chance).save(folder / f"kept_back_{number}.png")
    _write_model(options.output / "start")


def _write_model(folder: Path) -> None:
    """Write a tiny Qwen2-VL with a word-level tokenizer and an image processor."""
    words = sorted({*QUESTION.split()[1:], *answer("", "").split(), *COLOURS, *SHAPES})
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.add_special_tokens(MARKS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    pixels = WIDTH * HEIGHT
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    Qwen2VLImageProcessorPil(patch_size=PATCH, size=size).save_pretrained(folder)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: fast.convert_tokens_to_ids(mark) for name, mark in zip(names, MARKS, strict=False)}
    text = {
        "vocab_size": len(fast),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
    }
    tower = {"depth": 2, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH, "hidden_size": 96}
    Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=tower, **ids)).save_pretrained(folder)


def build_data(options: argparse.Namespace) -> MCoreVisionData:
    """Make the data module."""
    return MCoreVisionData(
        train_files=str(options.output / "train.jsonl"),
        tokenizer=str(options.output / "start"),
        seq_length=LENGTH,
        media_dir=str(options.output / "images"),
        batch_size=options.batch_size,
        packing=False,
        pad_to_seq_length=True,
        num_workers=options.workers,
        cache_dir=str(options.output / "cache"),
    )


class Describes(pl.Callback):
    """Asks about the held-out pairs of shapes before and after training.

    Args:
        data: The data module, which has the tokenizer and the image processor.
        images: The image files of these pairs.

    Attributes:
        answers: The answers before and after, in the order of the files.
    """

    def __init__(self, data: MCoreVisionData, images: list[Path]) -> None:
        self.data, self.images = data, images
        self.answers: list[list[str]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Ask before the first step."""
        self._ask(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Ask after the last step."""
        self._ask(pl_module)

    def _ask(self, module: Any) -> None:
        tokenizer, said = self.data.tokenizer, []
        tokens = WIDTH * HEIGHT // (2 * PATCH) ** 2
        text = QUESTION.replace("<image>", MARKS[0] + tokens * MARKS[2] + MARKS[1])
        prompt = tokenizer(f"<|user|>{text}<|end|><|assistant|>")["input_ids"]
        for file in self.images:
            with Image.open(file) as image:
                seen = self.data.image_processor(images=[image], return_tensors="pt")
            new = module.generate(prompt, 7, temperature=0.0, images=seen)[len(prompt) :]
            said.append(tokenizer.decode(new).partition("<|end|>")[0].strip())
        self.answers.append(said)


def write_page(file: Path, images: list[Path], before: list[str], after: list[str]) -> int:
    """Write the page of samples, and return the number of correct answers."""
    rows, right = [], 0
    for path, pair, first, last in zip(images, KEPT_BACK, before, after, strict=True):
        data = base64.b64encode(path.read_bytes()).decode()
        is_right = last == answer(*pair)
        right += is_right
        colour = "#2a7d2a" if is_right else "#b02020"
        rows.append(
            f'<tr><td><img src="data:image/png;base64,{data}" width="{4 * WIDTH}" height="{4 * HEIGHT}"></td>'
            f"<td>{html.escape(first)}</td><td style='color:{colour}'>{html.escape(last)}</td></tr>"
        )
    style = "body{font-family:sans-serif} td{padding:6px 16px} img{image-rendering:pixelated;border:1px solid #ccc}"
    file.write_text(
        f"<!doctype html><meta charset='utf-8'><title>Shapes</title><style>{style}</style>"
        f"<h1>{right} of {len(images)} answers are right</h1>"
        "<p>The model has not seen these pairs of shapes together.</p>"
        f"<table><tr><th>image</th><th>before</th><th>after</th></tr>{''.join(rows)}</table>\n",
        encoding="utf-8",
    )
    return right


def build_trainer(options: argparse.Namespace, *callbacks: pl.Callback) -> pl.Trainer:
    """Make the trainer."""
    return pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MCoreStrategy(
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            sequence_parallel=options.tp > 1,
        ),
        max_steps=options.max_steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(options.output, name="metrics", version=""),
        callbacks=[MCoreProgressBar(), RunReport(), *callbacks],
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def main() -> None:
    """Draw the images, train, ask, and write the page."""
    options = parse_arguments()
    pl.seed_everything(1, verbose=False)
    if "LOCAL_RANK" not in os.environ:  # the first process, which starts the others
        prepare(options)
    data = build_data(options)
    images = [options.output / "images" / f"kept_back_{number}.png" for number in range(len(KEPT_BACK))]
    describes = Describes(data, images)
    recipe = Recipe(learning_rate=options.learning_rate, warmup_steps=min(20, options.max_steps // 2))
    module = MCoreVisionGPT.from_pretrained(str(options.output / "start"), LENGTH, recipe=recipe)
    trainer = build_trainer(options, describes, SaveHFModel(str(options.output / "model")))
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        page = options.output / "samples.html"
        right = write_page(page, images, *describes.answers)
        for pair, said in zip(KEPT_BACK, describes.answers[1], strict=True):
            print(f"  | {answer(*pair):42} {said}")
        (_, first), *_, (_, last) = read_curve(options.output / "metrics" / "metrics.csv", "train_loss")
        print(f"{right} of {len(images)} answers are right; the loss fell from {first:.2f} to {last:.2f}")
        print(f"page:  {page}\nmodel: {options.output / 'model'}")


if __name__ == "__main__":
    main()
