"""A training that resumes on another number of ranks trains on the same rows in each update."""

import json
import shutil
import warnings

import pytest
from torch.utils.data import BatchSampler, DataLoader, Sampler

from mfwrap import StepConfig
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.data.global_batch import TrainerBatch
from support.fsdp.accelerated import train_with_trainer
from support.ranks.chains import CHAIN, assert_a_chain_is_exact
from support.ranks.changing import (
    recipe_until,
    resume_only,
    train_until,
    trainer_of,
    warnings_of_resume,
)
from support.ranks.pool import RankPool
from support.trainer_runs import Counting, new_trainer, padded

SETTINGS = {
    "random": {},
    "worker": {"dataloader_num_workers": 1},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance"},
    "split batches": {
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "accelerator_config": {"split_batches": True},
    },
    "dispatched batches": {"accelerator_config": {"dispatch_batches": True}},
    "stream": {"data": "stream", "max_steps": 20},
    "sharded stream": {
        "data": "stream",
        "max_steps": 20,
        "accelerator_config": {"dispatch_batches": False},
    },
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Return a function that returns the pool of a number of ranks."""
    made = {}

    def pool(num_ranks):
        if num_ranks not in made:
            made[num_ranks] = RankPool(num_ranks, tmp_path_factory.mktemp(f"{num_ranks}_ranks"))
        return made[num_ranks]

    yield pool
    for each in made.values():
        each.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_each_row_is_trained_on_once_per_epoch(pools, tmp_path, name):
    """A run on 2, 1, 3 and 4 ranks has the rows, losses and weights of a run on 2 ranks."""
    chain = ((2, 7), (1, 10)) if name == "worker" else CHAIN

    results = assert_a_chain_is_exact(pools, tmp_path, train_until, SETTINGS[name], chain=chain)

    assert all(each["global_batches"] == [12] for each in results)


@pytest.mark.slow
def test_a_batch_size_that_changes_too(pools, tmp_path):
    """With another batch size per rank, too, each update trains on the same rows."""
    small, large = {}, {"per_device_train_batch_size": 3, "logging_steps": 3}
    pools(2).run(train_until, str(tmp_path / "whole"), 10, small)
    [*_, whole] = pools(2).run(train_until, str(tmp_path / "whole"), 20, small)
    pools(2).run(train_until, str(tmp_path / "run"), 10, small)
    [run] = pools(1).run(train_until, str(tmp_path / "run"), 20, large)

    rows = {step: sorted(each) for step, each in run["rows"].items()}
    assert run["global_batches"] == [12]
    assert sorted(row for each in rows.values() for row in each) == sorted([*range(60)] * 2)
    for name, weights in whole["weights"].items():
        assert (run["weights"][name] - weights).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_network(pools, tmp_path, state_dict_type):
    """A network that the Trainer has sharded on 2 ranks continues on 4 ranks."""
    whole = pools(2).run(train_with_trainer, str(tmp_path / "2"), None, 2, state_dict_type)[0]
    checkpoint = str(tmp_path / "2" / "checkpoint-3")
    again = pools(4).run(train_with_trainer, str(tmp_path / "4"), checkpoint, 4, state_dict_type)[0]

    for expected, found in zip(whole["log"], again["log"], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for name, value in whole["state"].items():
        assert (again["state"][name] - value).abs().max() < 1e-6, name


@pytest.mark.slow
def test_mfwrap_train(pools, tmp_path):
    """``mfwrap train --resume`` on other ranks has the same rows, and each record once."""
    assert_a_chain_is_exact(pools, tmp_path, recipe_until)

    for rank, begins in enumerate([0, 0, 11, 15]):
        suffix = f"_rank{rank}" if rank else ""
        records = read_json_lines(tmp_path / "run" / f"local_norms{suffix}.jsonl")
        steps = [record["step"] for record in records]
        assert steps == sorted(set(steps))
        assert steps[-1] == 20
        assert steps[0] == begins + 1 or steps[0] == begins + 2


@pytest.mark.parametrize(
    ("written", "resumed", "message"),
    [
        (
            {},
            {"per_device_train_batch_size": 5},
            r"on 1 rank with a batch size of 5: an update trains on 12 rows",
        ),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
            {},
            r"with 2 x 4 x 1 \(ranks .*, with 1 x 4 x 2: an epoch has 8 updates and had 7, because",
        ),
        (
            {
                "per_device_train_batch_size": 6,
                "gradient_accumulation_steps": 1,
                "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            },
            {},
            r"`local_norm` must be False if `sync_each_batch` .* with 2 micro-batches per update",
        ),
    ],
    ids=["global batch", "length of an epoch", "local norms"],
)
def test_a_resume_that_cannot_be_exact_is_refused(two_ranks, tmp_path, written, resumed, message):
    """A number of ranks with which the rows of an update would differ raises an error."""
    written = {"dataloader_drop_last": True, **written}
    two_ranks.run(train_until, str(tmp_path), 1, written)

    with pytest.raises(ValueError, match=message):
        train_until(0, str(tmp_path), 2, written | resumed)


def test_another_length_of_an_epoch_on_the_same_ranks(tmp_path):
    """Another batch size on the same ranks is refused, too, if it moves the position."""
    settings = {"dataloader_drop_last": True}
    whole = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    train_until(0, str(tmp_path), 1, settings | whole)

    with pytest.raises(ValueError, match=r"1 x 8 x 1 .*, with 1 x 4 x 2: an epoch has 8 updates"):
        train_until(0, str(tmp_path), 2, settings | halves)


@pytest.mark.parametrize(
    ("written", "resumed", "num_warnings"),
    [
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
            {"gradient_accumulation_steps": 3},
            1,
        ),
        ({"data": "stream", "max_steps": 20}, {"max_steps": 24}, 0),
    ],
    ids=["another global batch on purpose", "longer training on a stream"],
)
def test_another_number_of_updates_that_is_wanted(
    two_ranks, tmp_path, written, resumed, num_warnings
):
    """A resume on other ranks takes another global batch, and more steps of a stream."""
    written = {"dataloader_drop_last": True, **written}
    two_ranks.run(train_until, str(tmp_path), 1, written)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train_until(0, str(tmp_path), 2, written | resumed)["global_batches"] == [12]

    told = [str(each.message) for each in caught if "may be repeated" in str(each.message)]
    assert len(told) == num_warnings


def test_a_resumed_run_that_is_resumed_again(two_ranks, tmp_path):
    """The second resume is not taken for one with another accumulation in the settings."""
    two_ranks.run(train_until, str(tmp_path), 1)

    for stop in (2, 3):
        assert train_until(0, str(tmp_path), stop)["global_batches"] == [12]


def test_a_rank_that_cannot_read_its_position(two_ranks, tmp_path):
    """If one rank cannot read the file with the global batch, all ranks raise its error."""
    two_ranks.run(train_until, str(tmp_path), 1)
    damaged = tmp_path / "checkpoint-1" / "mfwrap_position_1.json"
    damaged.write_text("{")

    with pytest.raises(RuntimeError) as caught:
        two_ranks.run(resume_only, str(damaged.parent))

    first, second = str(caught.value).split("rank 1: ")
    for message in (first.removeprefix("rank 0: "), second):
        assert f"{damaged} is not valid JSON" in message


def test_a_checkpoint_of_a_stock_trainer(two_ranks, tmp_path):
    """A checkpoint without a global batch gives one warning that says what to set.

    The random states that a run on one rank left in the same folder are no third rank.
    """
    two_ranks.run(train_until, str(tmp_path), 1)
    checkpoint = tmp_path / "checkpoint-1"
    for path in checkpoint.glob("mfwrap_*"):
        path.unlink()
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state.pth")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train_until(0, str(tmp_path), 2)["global_batches"] == [6]

    told = [str(each.message) for each in caught if "global batch" in str(each.message)]
    assert len(told) == 1
    assert "was written by 2 rank(s), is resumed by 1 and does not record" in told[0]


WORKERS = {
    "data": "stream",
    "max_steps": 20,
    "dataloader_num_workers": 2,
    "accelerator_config": {"dispatch_batches": False},
}
READ_BY_WORKERS = "each of several data loader workers reads an iterable data set by itself, so the"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"accelerator_config": {"use_seedable_sampler": False}},
            "use_seedable_sampler` is false, so the rows .* with the same ranks as before: rows",
        ),
        pytest.param(WORKERS, READ_BY_WORKERS, marks=pytest.mark.slow),
    ],
    ids=["random", "workers of a stream"],
)
def test_an_order_that_depends_on_the_ranks_is_said(two_ranks, tmp_path, settings, message):
    """If the order of rows depends on the number of ranks, one warning says what may happen."""
    two_ranks.run(train_until, str(tmp_path), 1, settings)

    with pytest.warns(UserWarning, match=message) as caught:
        [*losses] = train_until(0, str(tmp_path), 2, settings)["losses"]

    assert len(caught) == 1
    assert losses == [1, 2]


@pytest.fixture(scope="module")
def one_row_each(tmp_path_factory):
    """Return a checkpoint of one process with six micro-batches of one row in each update."""
    folder = tmp_path_factory.mktemp("one_row_each")
    train_until(0, str(folder), 1)
    return folder / "checkpoint-1"


DISPATCHED = WORKERS | {"accelerator_config": {"dispatch_batches": True}}


@pytest.mark.parametrize(
    ("settings", "num_ranks", "batch_size", "former"),
    [
        (WORKERS, 2, 1, "ranks"),
        (WORKERS, 1, 3, "batch size"),
        (WORKERS, 2, 3, "ranks and batch size"),
        (DISPATCHED, 1, 3, "batch size"),
        (WORKERS, 1, 1, None),
        (DISPATCHED, 2, 1, None),
        (WORKERS | {"dataloader_num_workers": 1}, 2, 3, None),
        ({"dataloader_num_workers": 2}, 2, 3, None),
    ],
)
def test_workers_that_take_turns(one_row_each, tmp_path, settings, num_ranks, batch_size, former):
    """Another batch size or number of ranks changes the turns of a stream's workers."""
    content = json.loads((one_row_each / "mfwrap_position.json").read_text(encoding="utf-8"))
    batch = content["global_batch"]
    content["num_ranks"] = batch["num_ranks"] = batch["sizes"]["num_ranks"] = num_ranks
    (tmp_path / "mfwrap_position.json").write_text(json.dumps(content), encoding="utf-8")

    settings = settings | {"per_device_train_batch_size": batch_size}
    found = warnings_of_resume(0, str(tmp_path), settings)

    told = [message for message in found if "may be repeated" in message]
    assert len(told) == (former is not None)
    for message in told:
        assert message.startswith(f"{READ_BY_WORKERS} rows of updates after {tmp_path} differ")
        assert f" with the same {former} as before: " in message


def test_one_rank_says_it(two_ranks, one_row_each):
    """Rank 0 warns for all ranks."""
    found = two_ranks.run(warnings_of_resume, str(one_row_each), WORKERS)

    told = [[message for message in each if "may be repeated" in message] for each in found]
    assert [len(messages) for messages in told] == [1, 0]


def test_rows_stay_grouped_by_length(one_row_each, tmp_path):
    """The groups have the size of the checkpoint's, which had another batch size per rank."""
    content = json.loads((one_row_each / "mfwrap_position.json").read_text(encoding="utf-8"))
    content["global_batch"]["group_size"] = 18
    (tmp_path / "mfwrap_position.json").write_text(json.dumps(content), encoding="utf-8")
    trainer = trainer_of(str(tmp_path / "run"), {"train_sampling_strategy": "group_by_length"})
    batch = TrainerBatch(trainer, StepConfig())
    with batch.resuming(tmp_path):
        loader = trainer.get_train_dataloader()
        assert loader.batch_sampler.sampler.batch_size == 6
        batch.begin_epoch(loader, None)

    assert loader.batch_sampler.sampler.batch_size == 18
    assert batch.state_dict()["group_size"] == 18


class Rotated(Sampler):
    """Rows in an order that depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self):
        return iter([(row + 5 * self.epoch) % 24 for row in range(24)])

    def set_epoch(self, epoch) -> None:
        """Begin an epoch."""
        self.epoch = epoch


class Reversed(Sampler):
    """A batch sampler of the user's own, which yields the batches of another one reversed."""

    def __init__(self, batches) -> None:
        self.batch_sampler = batches
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self):
        return reversed(list(self.batch_sampler))


class InReverse(MFTrainer):
    """Train on the batches of `Reversed`, and note the rows."""

    def get_train_dataloader(self):
        """Return a prepared loader."""
        self.seen = []
        batches = Reversed(BatchSampler(Rotated(), 2, drop_last=False))
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=padded)
        return self.accelerator.prepare(loader)

    def training_step(self, model, inputs, *rest):
        """Note the rows."""
        self.seen += inputs["input_ids"].tolist()
        return super().training_step(model, inputs, *rest)


def test_a_sampler_learns_the_epoch_within_which_a_run_resumes(tmp_path):
    """A sampler within a batch sampler of the user's own goes on with the rows of the epoch."""
    seen = []
    for checkpoint in (None, tmp_path / "checkpoint-4"):
        settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 5}
        trainer = new_trainer(InReverse, tmp_path, data=Counting(24, length=6), **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        seen.append(trainer.seen)

    assert seen[1] == seen[0][8 * 4 :]
