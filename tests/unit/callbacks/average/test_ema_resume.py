"""Resumed runs continue their averages, and averages ignore skipped updates."""

import os
import shutil
import signal
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.trainer import MFTrainer
from support.averaged_training import EPOCHS, SKIPPING, STEPS, Follower, weights_of
from support.half_precision import StockHalf
from support.resumed_training import PLAIN, StopAfter, end_of, new_trainer, resume, trained
from support.spoilt.gpt2 import SpoiltGPT2
from support.training_state import assert_same_state

KINDS = {
    "its average": (MFTrainer, SKIPPING, {"ema": lambda m: ExponentialMovingAverage(m, 0.5)}),
    "own average": (MFTrainer, SKIPPING, {}),
    "stock": (Trainer, PLAIN, {}),
}


def run(folder, kind, *, before=(), callbacks=(), **keywords):
    """Return an untrained trainer and its callback."""
    trainer_kind, settings, trainer_settings = KINDS[kind]
    callback = EMACallback(None if trainer_settings else 0.5)
    trainer = new_trainer(
        folder,
        settings,
        kind=trainer_kind,
        callbacks=[*before, callback, *callbacks],
        trainer_settings=trainer_settings,
        **(STEPS | keywords),
    )
    return trainer, callback


def end(trainer, callback):
    """Return copies of a run's final state and of its averages."""
    averages = {name: value.clone() for name, value in callback.ema.named_averages()}
    # A stock Trainer draws the random numbers of a resumed epoch in another order, so these entries
    # differ.
    of_stock = ("generator", "log", "callbacks", "losses")
    left_out = () if isinstance(trainer, MFTrainer) else of_stock
    rest = {k: v for k, v in end_of(trainer).items() if not any(word in k for word in left_out)}
    return rest | averages


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [4, 6, 10])
def test_resumed(tmp_path, kind, step):
    """A resumed run ends with the average and the best metric of an uninterrupted run."""
    unbroken, average = run(tmp_path / "unbroken", kind)
    unbroken.train()
    stopped, _ = run(tmp_path / "stopped", kind, callbacks=[StopAfter(step)])
    stopped.train()

    resumed, callback = run(tmp_path / "stopped", kind, seed=1)
    resumed.train(resume_from_checkpoint=True)

    assert resumed.state.best_metric == unbroken.state.best_metric
    assert_same_state(end(unbroken, average), end(resumed, callback))


class ToldToEnd(TrainerCallback):
    """Send this process a SIGTERM during a step."""

    def __init__(self, step) -> None:
        self._step = step

    def on_pre_optimizer_step(self, _args, state, _control, **_) -> None:
        """Send the signal."""
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("kind", ["its average", "own average"])
@pytest.mark.parametrize(
    ("step", "arguments"),
    [(4, STEPS), (3, STEPS), (6, EPOCHS), (4, EPOCHS)],
    ids=["due", "not due", "end of an epoch", "within an epoch"],
)
def test_told_to_end(tmp_path, kind, step, arguments):
    """A run stopped by SIGTERM saves raw weights, even if an evaluation was due."""
    follower = Follower()
    told, _ = run(tmp_path, kind, before=[ToldToEnd(step), follower], **arguments)

    with pytest.raises(SystemExit):
        told.train()

    folder = tmp_path / f"checkpoint-{step}"
    assert_same_state(follower.raw[step], load_file(folder / "model.safetensors"))
    assert_same_state(
        follower.averages[step], weights_of(SpoiltGPT2.from_pretrained(folder / "ema"))
    )


def test_an_average_is_not_lost_in_silence(tmp_path):
    """Resuming a checkpoint without an average gives a warning and starts a new average."""
    stopped, _ = run(tmp_path, "stock", callbacks=[StopAfter(2)], load_best_model_at_end=False)
    stopped.train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "mfwrap_ema.safetensors").unlink()
    resumed, callback = run(tmp_path, "stock", seed=1, callbacks=[StopAfter(3)])

    with pytest.warns(UserWarning, match="could not be resumed: .*checkpoint-2 has no average"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert int(callback.ema.state_dict()["counters"]["num_calls"]) == 1


def test_a_truncated_average(tmp_path):
    """Resuming raises an error that names the file of averages if that file is truncated."""
    stopped, _ = run(tmp_path, "stock", callbacks=[StopAfter(2)], load_best_model_at_end=False)
    stopped.train()
    path = tmp_path / "checkpoint-2" / "mfwrap_ema.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    resumed, _ = run(tmp_path, "stock", seed=1)

    with pytest.raises(ValueError, match=r"checkpoint-2.*mfwrap_ema\.safetensors"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_saved_again(tmp_path, kind):
    """An export replaces an older export and removes what an interrupted export left."""
    stopped, _ = run(tmp_path, kind, callbacks=[StopAfter(4)])
    stopped.train()
    folder = tmp_path / "checkpoint-2"
    stale = load_file(folder / "ema" / "model.safetensors")
    for name in ("ema", "_ema.partial/ema"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "stale.txt").write_text("stale")

    class GiveNameBack(TrainerCallback):
        """Give the earlier checkpoint its name back, which an `MFTrainer` has taken."""

        def on_step_end(self, args, state, control, **_):
            aside = tmp_path / "_abandoned-checkpoint-2"
            if state.global_step == 1 and aside.exists():
                aside.rename(folder)

    again, _ = run(tmp_path, kind, callbacks=[StopAfter(4), GiveNameBack()])
    again.train()

    assert_same_state(stale, load_file(folder / "ema" / "model.safetensors"))
    assert not list(folder.rglob("stale.txt"))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_checkpoint_without_an_average(tmp_path):
    """A callback added at a resume starts its average at the loaded weights."""
    trained(tmp_path / "stock", PLAIN, kind=Trainer, callbacks=[StopAfter(6)])
    shutil.copytree(tmp_path / "stock" / "checkpoint-6", tmp_path / "added" / "checkpoint-6")
    weights = load_file(tmp_path / "added" / "checkpoint-6" / "model.safetensors")
    callback = EMACallback(0.99999)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the average could not be resumed", UserWarning)
        resume(
            tmp_path / "added" / "checkpoint-6",
            tmp_path / "added",
            PLAIN,
            kind=Trainer,
            callbacks=[callback],
        )

    for name, average in callback.ema.named_averages():
        torch.testing.assert_close(average, weights[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_updates_that_the_stock_trainer_skips(tmp_path, optim):
    """In fp16, the average ignores the updates that the gradient scaler skips."""
    follower, callback = Follower(), EMACallback(0.5)
    settings = replace(SKIPPING, optim=optim)
    trainer = trained(tmp_path, settings, kind=StockHalf, fp16=True, callbacks=[follower, callback])

    unmoved = [
        step
        for step in range(2, 13)
        if all(
            torch.equal(value, follower.raw[step - 1][name])
            for name, value in follower.raw[step].items()
        )
    ]
    assert 0 < len(unmoved) < 11
    assert trainer.accelerator.scaler.get_scale() < 2.0**12
    assert_same_state(follower.averages[12], dict(callback.ema.named_averages()))
