"""PEFT's adapters train as without mfwrap, with MFTrainer, the cell and an attached loop."""

import functools

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import Trainer, get_linear_schedule_with_warmup

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import EMACallback
from mfwrap.trainer import MFTrainer
from support.trainer_runs import (
    Counting,
    assert_same_log,
    assert_same_weights,
    new_trainer,
    padded,
    tiny_llama,
    train,
)
from support.training_runs import train_plainly, train_with_cell

# PEFT reads a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

ADAPTERS = {
    "LoRA": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1),
    "DoRA": lambda: LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True),
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
GROUPS = {"LoRA": 8, "DoRA": 12, "prompt tuning": 1}
"""Number of trained tensors: two for each of four matrices, three with DoRA's magnitudes."""
SCALE = 2.0**16
LIMIT = 0.003
"""Maximum norm, below the norms of all updates."""
each_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def adapted(adapter: str) -> PeftModel:
    """Return the tiny Llama with an adapter; the same weights at every call."""
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(model, ADAPTERS[adapter]())


def trained_in_a_loop(adapter: str, *, is_attached: bool) -> tuple[list[float], list[Tensor]]:
    """Train with accelerate for 6 updates of 2 micro-batches.

    Returns:
        Losses of all micro-batches, then norms of all updates; and the weights.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    attached = None
    if is_attached:
        attached = attach(accelerator, StepConfig(local_norm=True), scale_sense=SCALE)
    model = adapted(adapter)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
    model, optimizer, schedule, batches = accelerator.prepare(
        model, optimizer, schedule, DataLoader(Counting(24), 2, collate_fn=padded)
    )
    torch.manual_seed(2)
    losses, norms = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), LIMIT).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if attached is not None:
        assert len(attached.local_norm_names) == GROUPS[adapter]
    return losses + norms, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.fast_sample(1)
@each_adapter
def test_trainer(adapter, tmp_path):
    """With MFTrainer, the log agrees to 1e-5 and all weights, the frozen ones included, to 1e-6."""
    settings = {"max_steps": 6, "max_grad_norm": LIMIT, "lr_scheduler_type": "cosine"}
    extras = {"scale_sense": SCALE, "step": StepConfig(local_norm=True)}
    stock = train(new_trainer(Trainer, tmp_path, model=adapted(adapter), **settings))
    model = adapted(adapter)
    ours = train(new_trainer(MFTrainer, tmp_path, model=model, extras=extras, **settings))

    assert_same_log(stock, ours, relative=1e-5)
    assert_same_weights(stock, ours, difference=1e-6)
    assert len(ours.trainer.attached.local_norm_names) == GROUPS[adapter]


@pytest.mark.slow
@each_adapter
def test_resume(adapter, tmp_path):
    """A run of MFTrainer that resumes with an adapter ends with the weights of the whole run."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = train(new_trainer(MFTrainer, tmp_path / "whole", model=adapted(adapter), **settings))
    trainer = new_trainer(MFTrainer, tmp_path / "resumed", model=adapted(adapter), **settings)
    resumed = train(trainer, resume=tmp_path / "whole" / "checkpoint-3")

    assert_same_weights(whole, resumed)


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_a_resume_leaves_the_averaged_adapter_in_its_folder(kind, tmp_path):
    """A resume with EMACallback trains one adapter, and saves one, as the whole run does."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    adapters, saved = [], []
    for resume in (None, tmp_path / "0" / "checkpoint-2"):
        trainer = new_trainer(
            kind,
            tmp_path / str(len(saved)),
            model=adapted("LoRA"),
            callbacks=[EMACallback(0.5)],
            resume_from_checkpoint=resume and str(resume),  # where a stock Trainer's callback looks
            **settings,
        )
        train(trainer, resume=resume)
        adapters.append([*trainer.model.peft_config])
        trainer.save_model(str(tmp_path / "model"))
        folders = (tmp_path / "model", tmp_path / str(len(saved)) / "checkpoint-4" / "ema")
        saved.append([sorted(one.name for one in each.iterdir()) for each in folders])

    assert adapters == [["default"], ["default"]]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_an_adapter_of_the_users_own_is_kept(kind, tmp_path):
    """Also one that is called as the folder of the averages."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def run(number, resume=None):
        model = adapted("LoRA")
        model.add_adapter("ema", ADAPTERS["LoRA"]())
        trainer = new_trainer(
            kind,
            tmp_path / str(number),
            model=model,
            callbacks=[EMACallback(0.5, export=False)],
            resume_from_checkpoint=resume and str(resume),
            **settings,
        )
        return train(trainer, resume=resume).trainer

    run(0)
    resumed = run(1, tmp_path / "0" / "checkpoint-2")
    assert [*resumed.model.peft_config] == ["default", "ema"]


def test_an_adapter_keeps_its_dtype(tmp_path):
    """A run resumes in bfloat16 with an adapter of bfloat16, which PEFT loads in float32."""

    def halved():
        model = adapted("LoRA")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        return model

    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(new_trainer(MFTrainer, tmp_path / "whole", model=halved(), **settings))
    trainer = new_trainer(MFTrainer, tmp_path / "resumed", model=halved(), **settings)
    resumed = train(trainer, resume=tmp_path / "whole" / "checkpoint-2")

    assert_same_weights(whole, resumed)
    dtypes = {one.dtype for one in trainer.model.parameters() if one.requires_grad}
    assert dtypes == {torch.bfloat16}


@pytest.mark.fast_sample(1)
@each_adapter
def test_cell(adapter):
    """With the cell, losses and norms agree with a plain loop to 1e-5, and weights to 1e-6."""
    batches = [padded([Counting(24)[row], Counting(24)[row + 1]]) for row in range(0, 24, 2)]
    make_optimizer = functools.partial(AdamW, lr=1e-2, fused=True)
    torch.manual_seed(2)
    stock = train_plainly(adapted(adapter), make_optimizer, batches, max_norm=LIMIT)
    torch.manual_seed(2)
    ours = train_with_cell(adapted(adapter), make_optimizer, batches, max_norm=LIMIT, scale=SCALE)

    for expected, actual in ((stock.losses, ours.losses), (stock.norms, ours.norms)):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.weights, stock.weights, rtol=0, atol=1e-6)


@pytest.mark.fast_sample(1)
@each_adapter
def test_attached_loop(adapter):
    """In an attached loop, losses and norms are accelerate's to 1e-5, and weights to 1e-6."""
    values, weights = trained_in_a_loop(adapter, is_attached=False)
    our_values, our_weights = trained_in_a_loop(adapter, is_attached=True)

    assert our_values == pytest.approx(values, rel=1e-5)
    torch.testing.assert_close(our_weights, weights, rtol=0, atol=1e-6)
