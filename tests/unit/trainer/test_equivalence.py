"""MFTrainer gives the stock Trainer's results for any of its arguments."""

import inspect
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from transformers import PreTrainedModel, Trainer, TrainingArguments

from mfwrap.trainer import MFTrainer
from support.small_networks import IGNORED
from support.trainer_runs import (
    Counting,
    EndlessCounting,
    Run,
    assert_same_log,
    assert_same_weights,
    new_trainer,
    tiny_llama,
    train,
    values,
)

# Newer releases of transformers deprecate the name `gradient_checkpointing`.
RENAMED = "activation_checkpointing" in inspect.signature(TrainingArguments).parameters
CHECKPOINTED = {"activation_checkpointing" if RENAMED else "gradient_checkpointing": True}
COSINE = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adamw_torch_fused"}


def runs(folder: Path, **settings: Any) -> tuple[Run, list[Run]]:
    """Return runs of the stock Trainer, of MFTrainer, and of MFTrainer with a loss scale."""
    stock = train(new_trainer(Trainer, folder / "stock", **settings))
    scales = (None, 2.0**16)
    return stock, [
        train(new_trainer(MFTrainer, folder / "ours", extras={"scale_sense": scale}, **settings))
        for scale in scales
    ]


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_float32(max_grad_norm, tmp_path):
    """Losses, norms and weights agree to 1e-6 and rates exactly, with and without a loss scale."""
    stock, both = runs(tmp_path, max_steps=12, max_grad_norm=max_grad_norm, **COSINE)

    assert min(values(stock, "grad_norm")) > 0.5
    assert len(set(values(stock, "learning_rate"))) > 10
    for ours in both:
        assert_same_log(stock, ours)
        assert_same_weights(stock, ours, difference=1e-6)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1e3])
def test_bf16_that_is_not_clipped(max_grad_norm, tmp_path):
    """In unclipped bf16, losses and weights are bit-identical; norms differ by rounding."""
    stock, both = runs(tmp_path, max_steps=12, bf16=True, max_grad_norm=max_grad_norm, **COSINE)

    for ours in both:
        assert_same_weights(stock, ours)
        assert_same_log(stock, ours)
        assert values(stock, "loss") == values(ours, "loss")


def test_bf16_that_is_clipped(tmp_path):
    """In bf16, weights differ by rounding, by at most 1e-3 after 12 clipped updates."""
    stock, both = runs(tmp_path, max_steps=12, bf16=True, max_grad_norm=0.5, **COSINE)

    assert min(values(stock, "grad_norm")) > 0.5
    for ours in both:
        assert_same_log(stock, ours, relative=1e-3)
        assert_same_weights(stock, ours, difference=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "float32 clipped", "bf16", "bf16 clipped"])
def test_two_hundred_updates(case, tmp_path):
    """After 200 updates, weights still agree within the tolerances for 12 updates."""
    settings = {
        "max_steps": 200,
        "data": Counting(512),
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5 if "clipped" in case else 0.0,
        "bf16": "bf16" in case,
        **COSINE,
    }
    stock, both = runs(tmp_path, **settings)

    assert values(stock, "loss")[-1] < values(stock, "loss")[0]
    allowed = {"bf16": 0.0, "bf16 clipped": 1e-3}.get(case, 1e-6)
    for ours in both:
        assert_same_log(stock, ours, relative=1e-2 if case == "bf16 clipped" else 1e-6)
        assert_same_weights(stock, ours, difference=allowed)


class PlainNetwork(nn.Module):
    """A network that returns a mean loss and does not take ``num_items_in_batch``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).cumsum(1).tanh())
        logits = logits * attention_mask[..., None]
        if labels is None:
            return {"logits": logits}
        return {"loss": _next_token_loss(logits, labels), "logits": logits}


def _next_token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def plain_network() -> PlainNetwork:
    """Return a `PlainNetwork`, with the same weights at every call."""
    torch.manual_seed(0)
    return PlainNetwork()


def half_llama() -> PreTrainedModel:
    """Return a Llama with bfloat16 weights."""
    return tiny_llama().bfloat16()


def lora_llama() -> nn.Module:
    """Return a Llama with LoRA adapters."""
    peft = pytest.importorskip("peft")
    llama = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama, config)


def own_optimizer(model: nn.Module) -> dict[str, Any]:
    """Return an optimizer and a schedule made by the user."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return {"optimizers": (optimizer, StepLR(optimizer, 2))}


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Return the summed loss divided by `num_items_in_batch`."""
    return _next_token_loss(outputs["logits"], labels, "sum") / num_items_in_batch


@dataclass(frozen=True)
class Case:
    """A training to run with the stock Trainer and with MFTrainer."""

    arguments: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = tiny_llama
    data: Any = None
    extras: Callable[[nn.Module], dict[str, Any]] = lambda _: {}
    resume_at: int | None = None

    @property
    def half(self) -> bool:
        """Return whether bfloat16 is used."""
        return self.arguments.get("bf16", False) or self.model is half_llama

    @property
    def clipped(self) -> bool:
        """Return whether gradients may be clipped."""
        return self.arguments.get("max_grad_norm", 1.0) > 0


UNEVEN = {"max_steps": -1, "num_train_epochs": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2}
CASES = {
    "linear": Case({"lr_scheduler_type": "linear", "warmup_steps": 2}),
    "linear, bf16": Case({"bf16": True, "max_grad_norm": 0.0}),
    "cosine, fp16": Case({"fp16": True, "lr_scheduler_type": "cosine"}),
    "cosine, bf16, accumulation 1": Case(
        {"bf16": True, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 1}
    ),
    "constant with warm-up, bf16": Case(
        {"bf16": True, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}
    ),
    "inverse_sqrt, fp16": Case({"fp16": True, "lr_scheduler_type": "inverse_sqrt"}),
    "foreach AdamW": Case({"optim": "adamw_torch", "weight_decay": 0.1}),
    "foreach AdamW, bf16, accumulation 1": Case(
        {"optim": "adamw_torch", "bf16": True, "gradient_accumulation_steps": 1}
    ),
    "Adafactor": Case({"optim": "adafactor", "max_grad_norm": 0.1}),
    "Adafactor, bf16": Case({"optim": "adafactor", "bf16": True, "max_grad_norm": 0.0}),
    "SGD": Case({"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5}),
    "SGD, fp16, accumulation 1": Case(
        {"optim": "sgd", "fp16": True, "gradient_accumulation_steps": 1, "learning_rate": 0.1}
    ),
    "own optimizer and schedule": Case(extras=own_optimizer),
    "resumed": Case({**SAVED, "lr_scheduler_type": "cosine"}, resume_at=2),
    "resumed, bf16": Case({**SAVED, "bf16": True, "max_grad_norm": 0.0}, resume_at=2),
    "resumed, fp16, Adafactor": Case({**SAVED, "fp16": True, "optim": "adafactor"}, resume_at=2),
    "gradient checkpointing, bf16": Case({**CHECKPOINTED, "bf16": True, "max_grad_norm": 0.0}),
    "LoRA": Case(model=lora_llama),
    "LoRA, bf16": Case({"bf16": True, "max_grad_norm": 0.0}, model=lora_llama),
    "compiled, eager": Case(
        {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2},
        model=plain_network,
    ),
    "bfloat16 weights": Case({"max_grad_norm": 0.0}, model=half_llama),
    "no clipping, accumulation 1": Case({"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}),
    "plain network": Case(model=plain_network),
    "plain network, bf16": Case({"bf16": True, "max_grad_norm": 0.0}, model=plain_network),
    "own loss": Case(model=plain_network, extras=lambda _: {"compute_loss_func": own_loss}),
    "data without a length": Case(data=EndlessCounting()),
    "uneven last window": Case(UNEVEN, data=Counting(20)),
    "uneven last window, plain network": Case(UNEVEN, model=plain_network, data=Counting(19)),
}


def run_of(kind: type[Trainer], folder: Path, case: Case) -> Run:
    """Return the run of a case; for a resumed case, only the part after the resume."""

    def fresh() -> Trainer:
        model = case.model()
        extras = case.extras(model)
        return new_trainer(
            kind, folder, model=model, data=case.data, extras=extras, **case.arguments
        )

    run = train(fresh())
    if case.resume_at is None:
        return run
    return train(fresh(), resume=folder / f"checkpoint-{case.resume_at}")


# peft uses `is_gradient_checkpointing`, which transformers has deprecated.
@pytest.mark.fast_sample(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_arguments(case, tmp_path):
    """Log and weights agree with the stock Trainer's.

    In bf16 without clipping, the weights are bit-identical.
    """
    stock = run_of(Trainer, tmp_path / "stock", case)
    ours = run_of(MFTrainer, tmp_path / "ours", case)

    difference = 1e-6 if not case.half else 1e-3 if case.clipped else 0.0
    assert_same_weights(stock, ours, difference=difference)
    if case.model is half_llama:
        # The stock Trainer computes norms in the gradients' dtype, bfloat16, so norms agree only to
        # bfloat16's precision.
        assert values(ours, "loss") == values(stock, "loss")
        assert values(ours, "grad_norm") == pytest.approx(values(stock, "grad_norm"), rel=2**-8)
        return
    if case.resume_at is not None:
        # MFTrainer's mean loss covers all steps. The stock Trainer leaves out the steps before the
        # checkpoint, so replace its mean by the mean of all logged losses.
        stock.log[-1]["train_loss"] = statistics.fmean(values(stock, "loss"))
    assert_same_log(stock, ours, relative=1e-3 if case.half and case.clipped else 1e-6)
