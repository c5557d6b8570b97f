"""Programs that each rank runs to evaluate with a Trainer."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    default_data_collator,
)

from mfwrap.trainer import MFTrainer
from support.trainer_runs import new_trainer

__all__ = [
    "BATCH",
    "evaluate",
    "evaluate_kind",
    "evaluate_texts",
    "expected_evaluation",
    "language_model",
    "rows",
    "texts",
    "token_losses",
]

BATCH = 8


class Network(nn.Module):
    """A layer whose output has one number for each row, and the mean of their squares as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.layer(x)[:, 0]
        if labels is None:  # a function computes the loss
            return {"logits": outputs}
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def rows(number: int) -> list[dict[str, Tensor]]:
    """Return rows, the last of which have much larger losses."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(number, 4, generator=generator)
    drawn[-number // 8 :, 3] += 10
    return [{"x": row[:3], "labels": row[3]} for row in drawn]


def expected_evaluation(number: int) -> tuple[float, list[float]]:
    """Return the mean loss of all rows, and their outputs, without a Trainer."""
    data, network = rows(number), Network()
    x, labels = (torch.stack([row[name] for row in data]) for name in ("x", "labels"))
    with torch.no_grad():
        outputs = network.layer(x)[:, 0]
    return float((outputs - labels).square().mean()), outputs.tolist()


def evaluate(
    rank: int,
    number: int,
    with_metrics: bool,  # noqa: FBT001  (a pool of ranks passes positional arguments)
    split: bool,  # noqa: FBT001  (as above)
    stock: bool,  # noqa: FBT001  (as above)
) -> dict[str, Any]:
    """Evaluate rows on all ranks.

    Args:
        rank: Number of this rank.
        number: Number of rows.
        with_metrics: Whether outputs and labels are gathered for metrics.
        split: Whether the ranks share a batch, in the place of one batch for each rank.
        stock: Whether to use the stock Trainer.

    Returns:
        The loss, and the outputs and labels that the metrics got.
    """
    del rank
    got: dict[str, list[float]] = {}

    def keep(found: EvalPrediction) -> dict[str, float]:
        got.update(outputs=found.predictions.tolist(), labels=found.label_ids.tolist())
        return {}

    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(
            Trainer if stock else MFTrainer,
            Path(folder),
            model=Network(),
            extras={
                "compute_metrics": keep if with_metrics else None,
                "data_collator": default_data_collator,
            },
            per_device_eval_batch_size=BATCH // 2 if split else BATCH,
            accelerator_config={"split_batches": split},
        )
        found = trainer.evaluate(rows(number))
    return {"loss": found["eval_loss"], **got}


class OwnLoss(nn.Module):
    """A model of language whose own forward returns the mean loss over its targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


VOCABULARY, LENGTH = 16, 6


def texts(number: int) -> list[dict[str, Tensor]]:
    """Return rows with 0 to 6 labels that are targets; with 4 rows or more, the first 2 have none.

    So the first batch of one rank has no targets.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (number, LENGTH), generator=generator)
    lengths = (torch.arange(number) + 2) % (LENGTH + 1)
    if number > 3:
        lengths[:2] = 0
    places = torch.arange(LENGTH).expand(number, LENGTH)
    labels = torch.where(places < LENGTH - lengths[:, None], -100, ids)
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def language_model(kind: str) -> nn.Module:
    """Return a model that predicts the next token, or the label of each token."""
    if kind == "own loss":
        return OwnLoss()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def token_losses(kind: str, number: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of each row's targets, and their number, in float64."""
    data = texts(number)
    ids, labels = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels"))
    model = language_model(kind).double().eval()
    with torch.no_grad():
        logits = model(input_ids=ids, labels=labels)["logits"]
    if kind != "own loss":
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing
    )
    return losses.sum(dim=1), labels.ne(-100).sum(dim=1)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of a model of language as a user's own function computes it."""
    losses = nn.functional.cross_entropy(
        outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum"
    )
    targets = labels[:, 1:].ne(-100).sum()
    return losses / (targets if num_items_in_batch is None else num_items_in_batch)


def contrasted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss that compares the outputs of a rank with those of all ranks."""
    del labels, num_items_in_batch
    of_all = gather(outputs["logits"])
    return (outputs["logits"][:, None] - of_all).square().mean()


def evaluate_texts(
    rank: int,
    kind: str,
    numbers: tuple[int, ...],
    per_token: bool,  # noqa: FBT001  (a pool of ranks passes positional arguments)
    settings: dict[str, Any],
) -> list[float]:
    """Evaluate data sets of texts on all ranks, and return their losses.

    Args:
        rank: Number of this rank.
        kind: Kind of the model: ``model``, ``own loss`` or ``own function``.
        numbers: Number of rows of each data set.
        per_token: Whether the loss is the mean over the targets.
        settings: Training arguments.
    """
    del rank
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(
            MFTrainer,
            Path(folder),
            model=language_model(kind),
            extras={
                "data_collator": default_data_collator,
                "eval_per_token_loss": per_token,
                "compute_loss_func": summed if kind == "own function" else None,
                "compute_metrics": lambda found: {"rows": len(found.predictions)},
            },
            per_device_eval_batch_size=2,
            **settings,
        )
        found = trainer.evaluate({str(number): texts(number) for number in numbers})
    assert all(found[f"eval_{number}_rows"] == number for number in numbers)
    return [found[f"eval_{number}_loss"] for number in numbers]


class Routed(Network):
    """A network whose outputs also have two entries for each row, and a table without rows."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        return {**outputs, "router": x.repeat(2, 1), "table": torch.ones(5, 3)}


class Counted(Network):
    """A network whose outputs also have six counts, which belong to no row."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {**super().forward(x, labels), "counts": torch.arange(6.0)}


class Weighted(Network):
    """A network whose loss has a weight for each of four classes."""

    def forward(self, x: Tensor, weights: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert len(weights) == 4
        found = super().forward(x, labels)
        return {**found, "loss": found["loss"] * weights.prod()}


class Nested(Network):
    """A network whose batch is in a dict in the batch."""

    def forward(self, batch: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
        return super().forward(batch["x"], labels)


class Pixels(Network):
    """A network with two pixels for each row, one after the other."""

    def forward(self, x: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(x + pixels.reshape(len(x), 2, 3).mean(1), labels)


class Positions(Network):
    """A network with three positions for each row, in the first dimension."""

    def forward(self, x: Tensor, positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert positions.shape == (3, len(x), 3)
        return super().forward(x + positions.sum(0), labels)


def _collated(kind: str, found: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = default_data_collator(found)
    x, labels = batch["x"], batch["labels"]
    if kind == "nested":
        return {"batch": {"x": x}, "labels": labels}
    if kind == "pixels":
        batch["pixels"] = labels.repeat_interleave(2)[:, None].expand(-1, 3)
    if kind == "positions":
        batch["positions"] = torch.arange(9.0 * len(x)).reshape(3, len(x), 3)
    if kind == "weights":
        batch["weights"] = torch.arange(1.0, 5.0)
    if kind == "pairs":
        return {name: torch.cat([value, value + 1]) for name, value in batch.items()}
    return batch


def _own_method(kind: str, base: type[Trainer]) -> type[Trainer]:
    """Return a subclass of a Trainer whose own method computes the loss of an evaluation."""

    class Scaled(base):
        def prediction_step(self, *args: Any, **keywords: Any) -> Any:
            loss, *others = super().prediction_step(*args, **keywords)
            return loss * 100, *others

    class Twice(base):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            found = super().prediction_step(model, inputs, *args, **keywords)
            moved = {**inputs, "x": inputs["x"] + 1}
            super().prediction_step(model, moved, *args, **keywords)
            return found

    class Gathering(base):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = None, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            of_all = self.accelerator.gather(outputs["logits"])
            loss = (outputs["logits"][:, None] - of_all).square().mean()
            return (loss, outputs) if return_outputs else loss

    class OverRanks(base):
        model_accepts_loss_kwargs = property(lambda _: True, lambda *_: None)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = None, num_items_in_batch: Any = 1
        ) -> Any:
            outputs = model(**inputs)
            loss = (outputs["logits"] - inputs["labels"]).square().sum() / num_items_in_batch
            loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    kinds = {"scaled": Scaled, "twice": Twice, "gathering": Gathering, "over ranks": OverRanks}
    return kinds.get(kind, base)


def evaluate_kind(
    rank: int,
    kind: str,
    number: int,
    with_metrics: bool,  # noqa: FBT001  (a pool of ranks passes positional arguments)
    stock: bool,  # noqa: FBT001  (as above)
) -> float:
    """Evaluate rows in batches of 4, with a kind of batches, outputs or methods; return the loss.

    With metrics, check that they get the outputs and labels of all rows.
    """
    del rank
    data: Any = rows(number)
    networks = {"outputs": Routed, "nested": Nested, "pixels": Pixels, "positions": Positions}
    networks |= {"counts": Counted, "weights": Weighted}
    if kind == "no targets":
        data[-1]["labels"] = torch.tensor(torch.nan)

    def check(found: EvalPrediction) -> dict[str, float]:
        has_more = kind in {"outputs", "counts"}
        outputs = found.predictions[0] if has_more else found.predictions
        assert len(outputs) == len(found.label_ids) == number
        return {}

    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(
            _own_method(kind, Trainer if stock else MFTrainer),
            Path(folder),
            model=networks.get(kind, Network)(),
            extras={
                "compute_metrics": check if with_metrics else None,
                "data_collator": lambda found: _collated(kind, found),
                "compute_loss_func": contrasted if kind == "gathering function" else None,
            },
            remove_unused_columns=False,
        )
        return float(trainer.evaluate(data)["eval_loss"])
