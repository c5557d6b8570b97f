"""From stored averages, an average of another length is built that equals the one kept directly."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import Trainer

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.snapshots import (
    build_average,
    plain_average,
    power_average,
    save_snapshot,
    weighted_sums,
)
from support.averaged_shards import LENGTHS, train_shards
from support.averaged_training import SKIPPING
from support.resumed_training import PLAIN, StopAfter, end_of, new_trainer
from support.training_state import assert_same_state

OTHERS = (0.04, 0.07, 0.12, 0.15)


def trained(num_steps, after_update, update_every=1, **lengths):
    """Train a small regression; return averages of its weights by name, kept at each update."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    kept = {
        name: ExponentialMovingAverage(network, sigma_rel=each, update_every=update_every)
        for name, each in lengths.items()
    }
    for step in range(1, num_steps + 1):
        inputs = torch.randn(16, 8)
        loss = (network(inputs) - torch.sin(inputs.sum(1, keepdim=True))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if applied := step % 7 != 3:
            optimizer.step()
        for each in kept.values():
            each.update(torch.tensor(applied))
        after_update(step, kept, network)
    return kept


def relative_error(built, expected):
    """Return the L2 norm of the difference of two averages, divided by that of the expected one."""
    like = dict(expected.named_averages())
    got = dict(weighted_sums(built, like))
    difference = sum((got[name] - value).square().sum() for name, value in like.items())
    return float((difference / sum(value.square().sum() for value in like.values())).sqrt())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run folder with 20 snapshots of two averages, and averages kept directly."""
    folder = tmp_path_factory.mktemp("run")

    def store(step, kept, _network):
        if step % 20 == 0:
            save_snapshot(kept["both"], folder, step)

    lengths = {f"sigma_{each}": each for each in OTHERS}
    return folder, trained(400, store, both=LENGTHS, **lengths)


@pytest.mark.parametrize("sigma_rel", OTHERS)
def test_an_average_of_another_length(run, sigma_rel):
    """Lengths between and beside the two stored ones have an error below 1e-4."""
    folder, kept = run
    built = power_average(folder, sigma_rel)

    assert relative_error(built, kept[f"sigma_{sigma_rel}"]) < 1e-4
    assert built.response_error < 0.01
    assert len(built.parts) == 40


def test_an_earlier_average(run):
    """With `at`, the average ends at the last stored one before it; updates count, not steps."""
    folder, kept = run
    parts = power_average(folder, 0.05, at=200).parts

    assert int(kept["both"].state_dict()["counters"]["applied_updates"]) == 343
    assert parts[-1][0].folder.name == "checkpoint-220"  # after 188 applied updates
    assert parts[-1][0].updates == 188
    assert [share for _, share in parts[-2:]] == pytest.approx([1, 0], abs=1e-6)


def test_averages_of_every_fifth_update(tmp_path):
    """A snapshot between two updates of an average counts as one of the last update it holds."""

    def store(step, kept, _network):
        if step % 20 == 3:
            save_snapshot(kept["both"], tmp_path, step)

    kept = trained(383, store, update_every=5, both=LENGTHS, direct=0.07)
    built = power_average(tmp_path, 0.07)
    updates = [one.updates for one, _ in built.parts]

    assert max(updates) == 326  # of 328 that were applied, when update 380 was averaged
    assert min(updates) > 0  # the snapshot of step 3 holds no update
    assert relative_error(built, kept["direct"]) < 1e-4


def test_shorter_dtypes(tmp_path):
    """In float16, a snapshot takes half the bytes, and the error is that of the rounding."""

    def store(step, kept, _network):
        if step % 20 == 0:
            save_snapshot(kept["both"], tmp_path, step, torch.float16)

    kept = trained(200, store, both=LENGTHS, direct=0.07)
    [file] = (tmp_path / "average_snapshots/checkpoint-200").glob("*.safetensors")

    assert {one.dtype for name, one in load_file(file).items() if "/" in name} >= {torch.float16}
    assert relative_error(power_average(tmp_path, 0.07), kept["direct"]) < 1e-3


def test_a_checkpoint_beside_a_rounded_snapshot(tmp_path):
    """Of one update, the average in float32 is used, and not the one in bfloat16."""

    def store(step, kept, _network):
        if step == 20:
            save_snapshot(kept["both"], tmp_path, step)
            shutil.move(tmp_path / "average_snapshots/checkpoint-20", tmp_path)
            save_snapshot(kept["both"], tmp_path, step, torch.bfloat16)

    kept = trained(20, store, both=LENGTHS)

    assert relative_error(power_average(tmp_path, LENGTHS[0]), kept["both"]) < 1e-6


def test_damaged_snapshots_are_left_out(run, tmp_path):
    """A damaged snapshot is named in a warning, and the average is built without it."""
    folder, _ = run
    shutil.copytree(folder, tmp_path / "copy")
    [file] = (tmp_path / "copy/average_snapshots/checkpoint-400").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="checkpoint-400 is left out: .* is damaged"):
        built = power_average(tmp_path / "copy", 0.07)

    assert built.parts[-1][0].folder.name == "checkpoint-380"


def test_averages_from_before_a_restart(tmp_path):
    """If the average was restarted, the result is that of the updates since then."""

    def storing(begin):
        return lambda step, kept, _: (
            step % 10 == 0 and save_snapshot(kept["both"], tmp_path, begin + step)
        )

    trained(200, storing(0), both=LENGTHS)
    kept = trained(100, storing(200), both=LENGTHS, direct=0.07)
    before, since = [f"checkpoint-{10 * n}" for n in range(1, 21)], range(210, 301, 10)
    with pytest.warns(UserWarning, match="before a restart of the average are left out") as caught:
        built = power_average(tmp_path, 0.07)

    assert relative_error(built, kept["direct"]) < 1e-3
    assert {one.folder.name for one, _ in built.parts} == {f"checkpoint-{n}" for n in since}
    [message] = [str(one.message) for one in caught if "restart" in str(one.message)]
    assert [Path(each).name for each in message.partition("out: ")[2].split(", ")] == before


@pytest.mark.parametrize("every", [None, 2])
def test_a_second_training_in_the_folder_of_a_stock_trainer(tmp_path, every):
    """Averages in later checkpoints, which the Trainer keeps, are not those of the new training."""
    for steps, seed in ((12, 0), (6, 1)):
        callback = EMACallback(sigma_rel=LENGTHS, snapshot_every=every)
        trainer = new_trainer(
            tmp_path, PLAIN, kind=Trainer, seed=seed, callbacks=[callback], max_steps=steps
        )
        if seed:
            with pytest.warns(UserWarning, match="has averages of an earlier training in .*-12; "):
                trainer.train()
        else:
            trainer.train()
    built = power_average(tmp_path, LENGTHS[0])

    assert {one.folder.name for one, _ in built.parts} <= {f"checkpoint-{n}" for n in range(1, 7)}
    assert relative_error(built, callback.ema) < 1e-6
    assert (tmp_path / "checkpoint-12" / "mfwrap_ema.safetensors.1").exists()


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"sigma_rel": 0.01}, ValueError, "is out of the range of the 40 averages"),
        ({"sigma_rel": 0.5}, ValueError, r"`sigma_rel` must be in \(0, 0.2886\]"),
        ({"sigma_rel": 0.1, "at": 3}, ValueError, "no power-function averages of update 3 or"),
        ({"last": 2}, ValueError, "must have 2 intact checkpoints with weights in .*, got 0"),
        ({"last": 0}, ValueError, "`last` must be >= 1, got 0"),
        ({}, TypeError, "either `sigma_rel`, perhaps with `at`, or `last`"),
        ({"last": 2, "at": 3}, TypeError, "either `sigma_rel`, perhaps with `at`, or `last`"),
    ],
)
def test_what_cannot_be_built(run, settings, kind, message):
    """One sentence says why an average cannot be built."""
    with pytest.raises(kind, match=message):
        build_average(run[0], **settings)


def test_stored_averages_of_other_shapes(run, tmp_path):
    """Snapshots of another network among those of the run are refused."""
    folder, _ = run
    shutil.copytree(folder, tmp_path / "copy")
    other = ExponentialMovingAverage(nn.Sequential(nn.Linear(8, 4)), sigma_rel=LENGTHS)
    other.update()
    save_snapshot(other, tmp_path / "copy", 7)
    with pytest.raises(ValueError, match=r"checkpoint-7 must have the weights of .*checkpoint-400"):
        power_average(tmp_path / "copy", 0.07)


def test_weights_that_were_frozen_at_first(tmp_path):
    """The error says until when they were frozen; an average that ends before is built."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    network[0].requires_grad_(requires_grad=False)
    ema = ExponentialMovingAverage(network, sigma_rel=LENGTHS)
    for step in range(1, 5):
        network[0].requires_grad_(requires_grad=step > 2)
        ema.update()
        save_snapshot(ema, tmp_path, step)
    with pytest.raises(ValueError, match=r"'0.bias', which was frozen until update 2 .* at=2 or"):
        power_average(tmp_path, 0.07)

    assert power_average(tmp_path, 0.05, at=2).parts[-1][0].updates == 2


def test_the_plain_average(tmp_path):
    """It is the mean of the weights in the last checkpoints, as numpy and torch compute it."""
    networks = []
    for step in (9, 10, 11):
        torch.manual_seed(step)
        networks.append(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        save_file(networks[-1].state_dict(), folder / "model.safetensors")
        save_file({"0/1": torch.ones(3)}, folder / "mfwrap_outer_weights.safetensors")
    built = plain_average(tmp_path, 2)
    like = {
        name: value for name, value in networks[0].state_dict().items() if value.is_floating_point()
    }
    got = dict(weighted_sums(built, like))
    averaged = AveragedModel(networks[1], use_buffers=True)
    averaged.update_parameters(networks[1])
    averaged.update_parameters(networks[2])

    assert [one.folder.name for one, _ in built.parts] == ["checkpoint-10", "checkpoint-11"]
    assert "0/1" not in built.parts[0][0].tensors
    for name, value in got.items():
        both = [network.state_dict()[name].numpy().astype(np.float64) for network in networks[1:]]
        assert np.array_equal(value.numpy(), np.mean(both, axis=0))
        torch.testing.assert_close(value.float(), averaged.module.state_dict()[name])


def averaging(folder, kind=SKIPPING, *, every=2, more=(), **keywords):
    """Return a trainer with two averages and its callback, which stores snapshots."""
    callback = EMACallback(snapshot_every=every)
    settings = {"ema": lambda model: ExponentialMovingAverage(model, sigma_rel=LENGTHS)}
    trainer = new_trainer(
        folder, kind, callbacks=[callback, *more], trainer_settings=settings, **keywords
    )
    return trainer, callback


def snapshots(folder):
    """Return the stored tensors of all snapshots in a run folder."""
    return {
        file.parent.name: load_file(file)
        for file in (folder / "average_snapshots").glob("checkpoint-*/*.safetensors")
    }


def test_a_resumed_training(tmp_path):
    """Snapshots of later steps are set aside; the resumed training writes the same ones."""
    unbroken, _ = averaging(tmp_path / "unbroken")
    unbroken.train()
    stopped, _ = averaging(tmp_path / "run", more=[StopAfter(9)])
    stopped.train()
    resumed, callback = averaging(tmp_path / "run", seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))

    assert_same_state(end_of(unbroken), end_of(resumed))
    names = {f"checkpoint-{step}" for step in range(2, 13, 2)}
    expected, got = snapshots(tmp_path / "unbroken"), snapshots(tmp_path / "run")
    assert set(expected) == set(got) == names
    for name in names:
        assert_same_state(expected[name], got[name])
    aside = {path.name for path in (tmp_path / "run/average_snapshots").glob("_*")}
    assert aside == {"_abandoned-checkpoint-6", "_abandoned-checkpoint-8"}
    assert callback.load_average(tmp_path / "run", sigma_rel=0.10) < 1e-6
    for name, value in callback.ema.state_dict()["averages_1"].items():
        torch.testing.assert_close(dict(callback.ema.named_averages())[name], value)


def test_the_callback_evaluates_and_saves_what_is_built(tmp_path):
    """After `load_average`, the averages are the mean of the last weights: evaluated and saved."""
    trainer, callback = averaging(tmp_path / "run", PLAIN)
    trainer.train()
    assert callback.load_average(tmp_path / "run", last=3) == 0
    files = [tmp_path / f"run/checkpoint-{step}/model.safetensors" for step in (10, 11, 12)]
    stored = [load_file(file) for file in files]
    mean = {name: sum(one[name].double() for one in stored) / 3 for name in stored[0]}

    with callback.ema.swap():
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    by_hand = new_trainer(tmp_path / "by_hand", PLAIN)
    by_hand.model.load_state_dict({k: v.float() for k, v in mean.items()}, strict=False)

    for name, value in mean.items():
        torch.testing.assert_close(saved[name], value.float())
    assert evaluated == pytest.approx(by_hand.evaluate()["eval_loss"], rel=1e-5)


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    """A folder with the name of the snapshots that mfwrap has not written is left alone."""
    (tmp_path / "average_snapshots").mkdir()
    trainer, _ = averaging(tmp_path)
    with pytest.raises(FileExistsError, match="average_snapshots, which mfwrap has not written"):
        trainer.train()
    assert list((tmp_path / "average_snapshots").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"snapshot_every": 0}, "`snapshot_every` must be >= 1"),
        ({"snapshot_dtype": "int8"}, "`snapshot_dtype` must be one of None, 'float32'"),
        ({"sigma_rel": 0.4}, "`sigma_rel` must be in"),
    ],
)
def test_wrong_settings(settings, message):
    """Wrong settings are refused at construction."""
    with pytest.raises(ValueError, match=message):
        EMACallback(**settings)


def test_snapshots_need_power_function_averages(tmp_path):
    """Snapshots of an exponential average are refused: no other length follows from them."""
    trainer = new_trainer(tmp_path, PLAIN, callbacks=[EMACallback(0.9, snapshot_every=2)])
    with pytest.raises(ValueError, match="must be None for an average without `sigma_rel`, got 2"):
        trainer.train()
    with pytest.raises(RuntimeError, match="`load_average` must be called after the training"):
        EMACallback().load_average(tmp_path, last=2)


@pytest.mark.slow
def test_shards_of_two_ranks(two_ranks, tmp_path):
    """Two ranks store their shards and build averages from them; one process builds the same."""
    results = two_ranks.run(train_shards, tmp_path)
    expected = results[0][1]
    for errors, _ in results:
        assert errors["snapshots"] < 1e-4
        assert errors["checkpoints"] < 1e-4
        assert errors["plain"] < 1e-6
    for place in (tmp_path / "run", tmp_path / "sharded"):
        for name, value in weighted_sums(power_average(place, 0.07), expected):
            assert (value - expected[name]).norm() < 1e-4 * expected[name].norm()
