"""A checkpoint that is damaged or of another network, or cannot be written, raises an error."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.checkpoint_folders import split_weights
from support.resumed_training import PLAIN, StopAfter, end_of, new_trainer, resume, trained
from support.spoilt.gpt2 import Rows, SpoiltGPT2, padded, tiny_gpt2
from support.training_state import assert_same_state

OURS = [
    "mfwrap_manifest.json",
    "mfwrap_position.json",
    "mfwrap_step.json",
    "mfwrap_step.safetensors",
]
STOCK = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("written")
    trained(folder, save_steps=2, callbacks=[StopAfter(6)])
    return folder


def refusal(folder, **keywords):
    """Return the error of resuming the newest checkpoint; fail if the weights have changed."""
    trainer = new_trainer(folder, seed=1, **keywords)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match="cannot resume from") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert_same_state(before, trainer.model.state_dict())
    return str(caught.value)


def two_checkpoints(source, folder):
    """Copy ``checkpoint-2`` and ``checkpoint-4``, and return the folder of ``checkpoint-4``."""
    for step in (2, 4):
        shutil.copytree(source / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder / "checkpoint-4"


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("name", [*OURS, *STOCK])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["empty", "half"])
def test_a_truncated_file(written, tmp_path, name, share):
    """A truncated file raises an error with its name and the newest intact checkpoint."""
    file = two_checkpoints(written, tmp_path) / name
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])

    said = refusal(tmp_path)

    assert f"cannot resume from {tmp_path / 'checkpoint-4'}: {name} " in said
    assert said.endswith(f"; newest intact checkpoint before it: {tmp_path / 'checkpoint-2'}")


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("name", [*OURS, *STOCK])
def test_a_missing_file(written, tmp_path, name):
    """A missing file raises an error with its name and the newest intact checkpoint."""
    (two_checkpoints(written, tmp_path) / name).unlink()

    said = refusal(tmp_path)

    assert f"cannot resume from {tmp_path / 'checkpoint-4'}: " in said
    assert name in said
    assert said.endswith(f"; newest intact checkpoint before it: {tmp_path / 'checkpoint-2'}")


@pytest.mark.parametrize("name", sorted({*STOCK} - {"training_args.bin"}))
def test_a_truncated_file_of_a_stock_checkpoint(tmp_path, name):
    """Files of a stock checkpoint, which has no manifest, are checked by their formats.

    ``training_args.bin`` is a pickle and is not read, so it is not checked.
    """
    trained(tmp_path, PLAIN, kind=Trainer, save_steps=2, callbacks=[StopAfter(4)])
    file = tmp_path / "checkpoint-4" / name
    file.write_bytes(file.read_bytes()[:-9])

    said = refusal(tmp_path, settings=PLAIN)

    assert f"cannot resume from {tmp_path / 'checkpoint-4'}: {name} " in said
    assert said.endswith(f"; newest intact checkpoint before it: {tmp_path / 'checkpoint-2'}")


BIT_FLIPS = ["mfwrap_step.safetensors", "model.safetensors", "optimizer.pt", "rng_state.pth"]


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("name", BIT_FLIPS)
def test_a_flipped_bit(written, tmp_path, name):
    """A flipped bit, with which a run would continue with other numbers, raises an error."""
    file = two_checkpoints(written, tmp_path) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)

    said = refusal(tmp_path)

    assert f"cannot resume from {tmp_path / 'checkpoint-4'}: {name} is damaged (checksum" in said
    assert (" of tensor " in said) == (file.suffix == ".safetensors")
    assert said.endswith(f"; newest intact checkpoint before it: {tmp_path / 'checkpoint-2'}")


@pytest.mark.slow
def test_weights_that_were_split(written, tmp_path):
    """A checkpoint whose weights were split into several files resumes exactly."""
    split_weights(two_checkpoints(written, tmp_path))

    resumed = resume(tmp_path / "checkpoint-4", tmp_path / "resumed")

    exact = resume(written / "checkpoint-4", tmp_path / "exact")
    assert_same_state(end_of(exact), end_of(resumed))


def test_a_damaged_best_checkpoint(tmp_path):
    """If the best checkpoint is damaged, its weights are not loaded at the end of the training."""

    class DamageBest(TrainerCallback):
        """Flip a bit in the first checkpoint, which stays the best one, before training ends."""

        def on_step_end(self, _args, state, _control, **_: object) -> None:
            """Damage the checkpoint after the last step."""
            if state.global_step == 4:
                file = Path(state.best_model_checkpoint) / "model.safetensors"
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)

    trainer = new_trainer(
        tmp_path,
        PLAIN,
        callbacks=[DamageBest()],
        max_steps=4,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        metric_for_best_model="loss",
        greater_is_better=True,
        load_best_model_at_end=True,
    )

    with pytest.raises(
        ValueError, match=r"cannot load the best model from .*checkpoint-2: model\."
    ) as said:
        trainer.train()
    assert str(said.value).endswith(f"newest intact checkpoint: {tmp_path / 'checkpoint-4'}")


def test_no_best_checkpoint(tmp_path):
    """A training that ends before its first evaluation has no best weights to load."""
    trainer = trained(
        tmp_path,
        PLAIN,
        max_steps=1,
        gradient_accumulation_steps=1,
        eval_strategy="steps",
        eval_delay=2,
        load_best_model_at_end=True,
    )

    assert trainer.state.global_step == 1
    assert trainer.state.best_model_checkpoint is None


def test_no_whole_one_before(written, tmp_path):
    """If no earlier checkpoint is intact, the error says so and offers no later checkpoint."""
    shutil.copytree(written / "checkpoint-6", tmp_path / "checkpoint-6")
    for step in (2, 4):
        shutil.copytree(written / "checkpoint-2", tmp_path / f"checkpoint-{step}")
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    trainer = new_trainer(tmp_path)

    with pytest.raises(
        ValueError, match=r"optimizer.pt is missing; there is no intact checkpoint before"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_no_such_folder(written, tmp_path):
    """Resuming from a missing folder raises an error that offers the newest intact checkpoint."""
    two_checkpoints(written, tmp_path)
    trainer = new_trainer(tmp_path)

    wrong = tmp_path / "checkpoint-5"
    problem = f"^Can't find a valid checkpoint at {wrong}: there is no such folder; .*checkpoint-4$"
    with pytest.raises(ValueError, match=problem):
        trainer.train(resume_from_checkpoint=str(wrong))


@pytest.mark.parametrize(
    ("kind", "save_strategy"), [(MFTrainer, "steps"), (MFTrainer, "no"), (Trainer, "no")]
)
def test_a_folder_that_cannot_be_written(kind, save_strategy, tmp_path):
    """A training that saves or has a monitor ends before its first step; MFTrainer checks first."""
    monitors = [TrainingStateMonitor(weight_state_format="jsonl")] if save_strategy == "no" else []
    folder = tmp_path / "run"
    trainer = new_trainer(
        folder, PLAIN, kind=kind, callbacks=monitors, save_strategy=save_strategy, max_steps=1
    )
    folder.rmdir()
    folder.touch()

    with pytest.raises(OSError, match=f"cannot write to the folder {folder}: File exists"):
        trainer.train()
    assert trainer.state.global_step == 0
    # All ranks check before any rank builds its optimizer. A monitor checks on its own rank only.
    assert (trainer.optimizer is None) == (kind is MFTrainer)


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_resume(tmp_path, exists):
    """``resume_from_checkpoint=True`` raises an error if ``output_dir`` has no checkpoint."""
    trainer = new_trainer(tmp_path if exists else tmp_path / "missing")

    with pytest.raises(ValueError, match=r"^No valid checkpoint found in output directory \("):
        trainer.train(resume_from_checkpoint=True)


def gpt2(**sizes):
    """Return the tests' GPT-2 with some settings changed."""
    config = tiny_gpt2().config
    config.update(sizes)
    return SpoiltGPT2(config)


class Renamed(torch.nn.Module):
    """The tests' GPT-2 inside a module, so that its parameters have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids=None, attention_mask=None, labels=None, factor=None):
        """Call the network."""
        return self.inner(input_ids, attention_mask, labels, factor)


BIAS = "transformer.h.{}.attn.c_attn.bias"
FOREIGN = {
    "names": (Renamed, f"has {BIAS.format(0)}, which is not in the network"),
    "shapes": (
        lambda: gpt2(n_embd=8),
        f"has {BIAS.format(0)} with shape [48], but the network has it with shape [24]",
    ),
    "fewer": (lambda: gpt2(n_layer=1), f"has {BIAS.format(1)}, which is not in the network"),
    "more": (lambda: gpt2(n_layer=3), "has no transformer.h.2.ln_1.weight"),
    "untied": (lambda: gpt2(tie_word_embeddings=False), "has no lm_head.weight"),
}


@pytest.mark.parametrize("difference", FOREIGN)
def test_another_networks_checkpoint(written, tmp_path, difference):
    """Another network's checkpoint raises an error that names what differs."""
    make, reason = FOREIGN[difference]
    trainer = new_trainer(tmp_path, PLAIN, model=make())

    with pytest.raises(ValueError, match="cannot resume from") as caught:
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))

    assert f"checkpoint-4: model.safetensors {reason}; " in str(caught.value)


def test_no_checkpoint_of_another_network_is_offered(written, tmp_path):
    """The error does not offer another checkpoint of the wrong network."""
    trainer = new_trainer(tmp_path, PLAIN, model=gpt2(n_layer=1))

    with pytest.raises(ValueError, match=r"; there is no intact checkpoint before it$"):
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))


def test_another_networks_checkpoint_for_a_network_that_is_made(written, tmp_path):
    """Another network's checkpoint raises an error even if ``model_init`` makes the network."""
    args = new_trainer(tmp_path, PLAIN).args
    trainer = MFTrainer(
        None, args, model_init=lambda: gpt2(n_layer=1), train_dataset=Rows(), data_collator=padded
    )

    with pytest.raises(ValueError, match=r"checkpoint-4: model\.safetensors has transf"):
        trainer.train(resume_from_checkpoint=str(written / "checkpoint-4"))


class OneGroup(MFTrainer):
    """A trainer whose optimizer has all weights in one parameter group."""

    def create_optimizer(self, model=None):
        """Create an optimizer with all parameters in one group."""
        if self.optimizer is None:
            parameters = (self.model if model is None else model).parameters()
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        return self.optimizer


CHANGED = {
    "no average": (
        {"trainer_settings": {"ema": None}},
        "resume from {}: it holds an average",
    ),
    "one group": (
        {"kind": OneGroup},
        r"{}/optimizer.pt: .* groups hold \[28\]$",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_other_settings(written, tmp_path, change):
    """Settings that do not fit the checkpoint raise an error before anything is loaded.

    Resuming with the settings of the checkpoint still works afterwards.
    """
    keywords, reason = CHANGED[change]
    checkpoint = written / "checkpoint-4"
    trainer = new_trainer(tmp_path, seed=1, **keywords)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    with pytest.raises(ValueError, match=reason.format(checkpoint)):
        trainer.train(resume_from_checkpoint=str(checkpoint))

    assert_same_state(before, trainer.model.state_dict())
    assert trainer.optimizer is None or not trainer.optimizer.state
    resume(checkpoint, tmp_path / "resumed")


def test_an_average_that_is_new(tmp_path):
    """An average that the checkpoint lacks starts from the loaded weights, with a warning."""
    alone = trained(tmp_path / "alone", PLAIN, save_steps=2)
    checkpoint = tmp_path / "alone" / "checkpoint-12"
    ema = {"ema": lambda model: ExponentialMovingAverage(model, 0.9)}

    with pytest.warns(UserWarning, match=f"no average in {checkpoint}: the average starts from"):
        again = resume(checkpoint, tmp_path / "again", PLAIN, trainer_settings=ema)

    averages = dict(again.ema.named_averages())
    weights = {name: value for name, value in alone.model.named_parameters() if name in averages}
    assert_same_state(weights, averages)


def test_nothing_of_ours_is_unpickled(written, tmp_path, monkeypatch):
    """The step's files are not unpickled; the Trainer's files are read with `weights_only`."""
    read, load = [], torch.load

    def noted_load(path, *args, weights_only, **keywords):
        assert weights_only
        read.append(Path(path).name)
        return load(path, *args, weights_only=weights_only, **keywords)

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(torch, "load", noted_load)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    resume(written / "checkpoint-4", tmp_path)

    assert set(read) == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    for name in OURS:
        file = written / "checkpoint-4" / name
        assert load_file(file) if file.suffix == ".safetensors" else json.loads(file.read_text())


VANISHING = {
    "everything": ("_load_optimizer_and_scheduler", [*STOCK, *OURS]),
    "optimizer": ("_load_optimizer_and_scheduler", ["optimizer.pt", "scheduler.pt"]),
    "step": ("_load_scaler", ["mfwrap_step.json", "mfwrap_step.safetensors"]),
    "random states": ("_load_rng_state", ["rng_state.pth"]),
    "weights": ("_load_from_checkpoint", ["model.safetensors"]),
}
"""Method before which another program deletes files of the checkpoint, and their names."""


@pytest.mark.filterwarnings("ignore:no state of the step", "ignore:no average in")
@pytest.mark.parametrize("name", VANISHING)
def test_files_that_vanish_between_check_and_load(written, tmp_path, name):
    """A resume never continues with a fresh optimizer, average or generator in their place."""
    method, deleted = VANISHING[name]
    shutil.copytree(written / "checkpoint-4", tmp_path / "checkpoint-4")

    def vanish(self, checkpoint, *args):
        for each in deleted:
            (tmp_path / "checkpoint-4" / each).unlink(missing_ok=True)
        return getattr(MFTrainer, method)(self, checkpoint, *args)

    kind = type("Racing", (MFTrainer,), {method: vanish})
    trainer = new_trainer(tmp_path / "resumed", kind=kind, seed=1)
    said = r"^cannot resume from .*checkpoint-4: .* was deleted by another program"
    with pytest.raises(ValueError, match=said):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert trainer.state.global_step == (0 if name == "weights" else 4)
    assert not list((tmp_path / "resumed").glob("checkpoint-*"))


def test_a_best_model_that_vanishes(tmp_path):
    """The training ends with an error if the best checkpoint is deleted before it is loaded."""

    class Racing(MFTrainer):
        """Another program deletes the weights before they are loaded."""

        def _load_best_model(self):
            (Path(self.state.best_model_checkpoint) / "model.safetensors").unlink()
            super()._load_best_model()

    settings = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    with pytest.raises(ValueError, match=r"cannot load the best model from .*model\.safetensors"):
        trained(tmp_path, PLAIN, kind=Racing, load_best_model_at_end=True, **settings)
