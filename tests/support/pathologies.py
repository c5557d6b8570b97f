"""Five trainings that go wrong as real ones do, each with its records and its page.

Run ``python -m support.pathologies FOLDER [NAME ...]`` in the folder of the tests. Each training
takes one to two minutes on a CPU with two cores.
"""

import logging
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from mfwrap import StepConfig
from mfwrap.callbacks import MetricsRecorder, TrainingStateMonitor
from mfwrap.report import write_run_page
from mfwrap.runner import load_recipe, run_recipe
from mfwrap.trainer import MFTrainer

__all__ = ["BAD_ROWS", "NAN_IMAGE", "PATHOLOGIES", "run_pathology"]

_LENGTH = 96
_BATCH_SIZE = 8

BAD_ROWS = range(60 * _BATCH_SIZE, 72 * _BATCH_SIZE)
"""Rows of the text whose targets are random: those of steps 61 to 72."""

NAN_IMAGE = 1237
"""Index of the image that could not be decoded."""


def _rate_without_warmup(folder: Path) -> None:
    _run_recipe(folder, ["training.learning_rate=0.3", "training.warmup_steps=0"])


def _float16_epsilon(folder: Path) -> None:
    # torch's fused AdamW computes in float32 on a CPU, and so hides what float16 rounds.
    _run_recipe(
        folder, ["model.dtype=float16", "training.optim=adamw_torch", "training.max_steps=40"]
    )


def _run_recipe(folder: Path, settings: Sequence[str]) -> None:
    recipe = Path(str(resources.files("mfwrap.recipes").joinpath("causal_lm.yaml")))
    sizes = ("hidden_size=96", "intermediate_size=256", "max_position_embeddings=128")
    common = [
        f"training.output_dir={folder}",
        "training.max_steps=100",
        "training.use_cpu=true",
        "training.disable_tqdm=true",
        "training.eval_strategy=no",
        "training.save_strategy=no",
        "data.sequence_length=128",
        *(f"model.config.{size}" for size in sizes),
    ]
    run_recipe(load_recipe(recipe, [*common, *settings]))


def _corrupted_targets(folder: Path) -> None:
    _train(folder, _new_llama(), _Text(120 * _BATCH_SIZE, BAD_ROWS), 120)


def _growing_queries(folder: Path) -> None:
    network = _new_llama()
    queries = [weight for name, weight in network.named_parameters() if "1.self_attn.q" in name]
    others = [weight for name, weight in network.named_parameters() if "1.self_attn.q" not in name]
    # A sign error in the weight decay of one group.
    groups = [{"params": others}, {"params": queries, "weight_decay": -100.0}]
    _train(folder, network, _Text(120 * _BATCH_SIZE), 120, groups)


def _nan_image(folder: Path) -> None:
    _train(folder, _ConvolutionalNetwork(), _Images(200 * 16, NAN_IMAGE), 200, batch_size=16)


PATHOLOGIES: Mapping[str, Callable[[Path], None]] = {
    "a": _rate_without_warmup,
    "b": _corrupted_targets,
    "c": _float16_epsilon,
    "d": _growing_queries,
    "e": _nan_image,
}
"""Trainings by the name of their run folder, which says nothing about what goes wrong."""


def run_pathology(name: str, folder: Path) -> Path:
    """Train one of `PATHOLOGIES`, and return its page.

    Args:
        name: Key of `PATHOLOGIES`.
        folder: Folder that gets the run folder.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    PATHOLOGIES[name](folder / name)
    page = folder / name / "run.html"
    write_run_page([folder / name], page)
    return page


class _Text(Dataset):
    """Rows of Python's documentation, one token per byte.

    Args:
        num_rows: Number of rows.
        bad: Rows whose targets are random bytes.
    """

    def __init__(self, num_rows: int, bad: Sequence[int] = ()) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        # Lines of dashes and tables would make a few rows far easier than all others.
        text = re.sub(r"([^\w])\1{2,}", r"\1\1", text).encode()
        self._tokens = torch.tensor(list(text))
        self._num_rows, self._bad = num_rows, bad
        self._starts = random.Random(0).sample(range(len(text) - _LENGTH), num_rows)  # noqa: S311  (not cryptography)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[self._starts[index] :][:_LENGTH]
        labels = row.clone()
        if index in self._bad:
            labels = torch.randint(256, (_LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": labels, "indices": torch.tensor(index)}


class _Images(Dataset):
    """Noisy images of four classes.

    Args:
        num_rows: Number of images.
        bad: Index of an image that is NaN.
    """

    def __init__(self, num_rows: int, bad: int) -> None:
        self._num_rows, self._bad = num_rows, bad

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(4, (), generator=generator)
        image = 0.8 * torch.randn(3, 16, 16, generator=generator)
        image[:, :, 4 * int(label) : 4 * int(label) + 4] += 0.5
        if index == self._bad:
            image[:] = torch.nan
        return {"pixel_values": image, "labels": label, "indices": torch.tensor(index)}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        return images + torch.relu(self.norm(self.conv(images)))


class _ConvolutionalNetwork(nn.Module):
    """Three residual blocks of a convolution and a BatchNorm, and a classifier."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.layers = nn.ModuleList(_Block(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, indices: Tensor | None = None
    ) -> ImageClassifierOutput:
        """Return the logits, and with `labels` the loss; `indices` are for the monitor."""
        del indices
        hidden = self.stem(pixel_values)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden.amax((2, 3)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def _new_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=_LENGTH,
            initializer_range=0.1,
            attn_implementation="sdpa",
        )
    )


class _InOrder(MFTrainer):
    """Trainer that takes the rows in their order, as for a corpus that is shuffled beforehand."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def _train(
    folder: Path,
    network: nn.Module,
    data: Dataset,
    num_steps: int,
    groups: Any = None,
    *,
    batch_size: int = _BATCH_SIZE,
) -> None:
    optimizer = AdamW(groups or network.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    has_attention = isinstance(network, LlamaForCausalLM)
    callbacks: list[TrainerCallback] = [
        MetricsRecorder(folder),
        TrainingStateMonitor(
            replay=True,
            local_norm_format="jsonl",
            weight_state_format="jsonl",
            max_attention_logit_format="jsonl" if has_attention else None,
            step_interval=5,
        ),
    ]
    trainer = _InOrder(
        network,
        TrainingArguments(
            str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=batch_size // 2,
            gradient_accumulation_steps=2,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=data,
        optimizers=(optimizer, schedule),
        callbacks=callbacks,
        step=StepConfig(local_norm=True, local_norm_groups="layer"),
    )
    trainer.train()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for key in sys.argv[2:] or PATHOLOGIES:
        logging.getLogger(__name__).info("%s", run_pathology(key, Path(sys.argv[1])))
