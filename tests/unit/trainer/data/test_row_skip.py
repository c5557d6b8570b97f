"""`skip_rows` leaves rows out of their micro-batches, and nothing else changes."""

import copy
import functools

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate
from transformers import Trainer

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.data.parts import UpdateParts
from mfwrap.trainer.data.row_skip import RowSkip
from support.ranks.changing import train_until
from support.trainer_runs import Counting, EndlessCounting, new_trainer

NUM_ROWS, SEED, RATE = 22, 42, 1e-2
ROWS = [
    {
        "inputs": torch.arange(3.0).add(row).sin(),
        # Rows have 1 to 3 targets, so that the mean over targets is not the mean over rows.
        "labels": torch.where(torch.arange(3) <= row % 3, torch.arange(3).add(row).cos(), -100),
    }
    for row in range(NUM_ROWS)
]


class Noisy(nn.Module):
    """A small network whose loss depends on random numbers.

    Args:
        per_token: Whether the loss is divided by the number of targets of the update; else by the
            number of elements of the micro-batch.
        has_generator: Whether the random numbers come from a generator of the network.
    """

    def __init__(self, *, per_token: bool, has_generator: bool = True) -> None:
        super().__init__()
        self.accepts_loss_kwargs = per_token
        self.weight = nn.Parameter(torch.arange(9.0).sin().reshape(3, 3))
        self.generator = torch.Generator().manual_seed(2) if has_generator else None

    def forward(self, inputs, labels, num_items_in_batch=None):
        """Return the loss."""
        noise = torch.rand(inputs.shape, generator=self.generator)
        errors = ((inputs + noise) @ self.weight - labels) * (labels != -100)
        loss = errors.square()
        return {
            "loss": loss.mean() if num_items_in_batch is None else loss.sum() / num_items_in_batch
        }


class Augmented(Dataset):
    """The rows, each changed by random numbers of the process that makes it."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index):
        return ROWS[index] | {"inputs": ROWS[index]["inputs"] + torch.rand(3)}


def trained(folder, skip_rows, *, network=None, resume=None, data=ROWS, extras=None, **arguments):
    """Train a network, and return the trainer."""
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=Noisy(per_token=True, has_generator=False) if network is None else network,
        data=data,
        extras={"data_collator": None, "skip_rows": skip_rows} | (extras or {}),
        **{"learning_rate": RATE, "max_grad_norm": 0, "max_steps": 9} | arguments,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def weights_by_hand(skipped, *, per_token, batch_size, steps, max_steps):
    """Train without any Trainer on lists of rows, and return the weights."""
    network = Noisy(per_token=per_token)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / max_steps)
    num_made = epoch = 0
    while num_made < max_steps:
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(SEED + epoch))
        kept = [
            None if (epoch, position) in skipped else row
            for position, row in enumerate(order.tolist())
        ]
        micro_batches = [kept[n : n + batch_size] for n in range(0, NUM_ROWS, batch_size)]
        for first in range(0, len(micro_batches), steps):
            rows = [
                [ROWS[row] for row in batch if row is not None]
                for batch in micro_batches[first : first + steps]
            ]
            batches = [
                {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
                for batch in rows
                if batch
            ]
            if not batches or num_made == max_steps:
                continue
            num_items = sum((batch["labels"] != -100).sum() for batch in batches)
            for batch in batches:
                if per_token:
                    network(**batch, num_items_in_batch=num_items)["loss"].backward()
                else:
                    (network(**batch)["loss"] / len(batches)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            num_made += 1
        epoch += 1
    return network.weight.detach()


ROW_LISTS = st.frozensets(st.tuples(st.integers(0, 1), st.integers(0, NUM_ROWS - 1)), max_size=30)


@settings(max_examples=6)
@given(ROW_LISTS, st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(2, 14))
def test_as_by_hand(tmp_path_factory, skipped, per_token, batch_size, steps, max_steps):
    """Weights are bitwise those of a loop in plain torch over the rows that are left."""
    expected = weights_by_hand(
        skipped, per_token=per_token, batch_size=batch_size, steps=steps, max_steps=max_steps
    )
    trainer = trained(
        tmp_path_factory.mktemp("run"),
        skipped,
        network=Noisy(per_token=per_token),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=steps,
        max_steps=max_steps,
    )

    assert trainer.state.global_step == max_steps
    assert torch.equal(trainer.model.weight, expected)


# With updates of four rows: parts of two updates, all of updates 2 and 3, the last update of an
# epoch, of which there are six, and the first updates of the next one.
SKIPPED = [(0, 1), (0, 4), (0, 5), *((0, row) for row in range(8, 16)), (0, 20), (0, 21)]
SKIPPED += [*((1, row) for row in range(8)), (1, 9)]
RESUMABLE = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return a training on augmented rows that leaves rows out from its start."""
    folder = tmp_path_factory.mktemp("unbroken")
    return trained(folder, SKIPPED, data=Augmented(), **RESUMABLE)


def assert_same(trainer, expected, after=0):
    """Assert that a training ended like another one, and logged the same after a step."""
    assert torch.equal(trainer.model.weight, expected.model.weight)
    names = ("step", "epoch", "loss", "learning_rate")
    logs, others = (
        [[entry.get(name) for name in names] for entry in each.state.log_history[after:]]
        for each in (trainer, expected)
    )
    assert logs == others


def test_what_is_counted(unbroken):
    """Updates without rows are not counted, and the epochs advance with the data."""
    epochs = [entry["epoch"] for entry in unbroken.state.log_history[:9]]

    # Eleven micro-batches an epoch; updates 2, 3 and 5 of the first one and 0 and 1 of the next one
    # have no rows.
    passed = [2, 4, 11, 11 + 6, 11 + 8, 11 + 10, 22, 22 + 2, 22 + 4]
    assert epochs == pytest.approx([number / 11 for number in passed])
    assert not {"get_batch_samples", "training_step", "_run_epoch"} & vars(unbroken).keys()


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("given", [SKIPPED, None], ids=["again", "left out"])
@pytest.mark.parametrize("step", range(1, 9))
def test_a_resume_continues(unbroken, tmp_path, step, given):
    """Resumed from any checkpoint, with the same rows or without any, a training ends the same."""
    checkpoint = f"{unbroken.args.output_dir}/checkpoint-{step}"

    assert_same(
        trained(tmp_path, given, data=Augmented(), resume=checkpoint, **RESUMABLE), unbroken
    )


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_rows_that_are_left_out_from_a_resume_on(tmp_path, step):
    """A resume that leaves later rows out ends like a run that leaves them out from its start."""
    later = [(row // NUM_ROWS, row % NUM_ROWS) for row in range(4 * step, 4 * step + 7)]
    trained(tmp_path / "with", None, **RESUMABLE)
    checkpoint = tmp_path / "with" / f"checkpoint-{step}"
    expected = trained(tmp_path / "from the start", later, **RESUMABLE)
    resumed = trained(tmp_path / "resumed", later, resume=checkpoint, **RESUMABLE)

    assert_same(resumed, expected, after=step)
    # Rows before the checkpoint have been trained on, so they make no difference.
    before = [*later, *((0, row) for row in range(4 * min(step, 5)))]
    again = trained(tmp_path / "before", before, resume=checkpoint, **RESUMABLE)
    assert torch.equal(again.model.weight, expected.model.weight)


def test_a_whole_epoch(tmp_path):
    """An epoch without rows is passed over; the training ends with the next one."""
    first = [(0, row) for row in range(NUM_ROWS)]
    trainer = trained(tmp_path, [*first, *((2, row) for _, row in first)], max_steps=7)

    assert trainer.state.global_step == 7
    assert trainer.state.epoch == pytest.approx(4 + 4 / 11)


def test_beside_skipped_steps(tmp_path):
    """Leaving out all rows of the first updates is the same as to begin after them."""
    rows = [(0, row) for row in range(16)]
    by_rows = trained(tmp_path / "rows", [*rows, (0, 17), (1, 0)])
    by_steps = trained(tmp_path / "steps", [(0, 17), (1, 0)], extras={"data_skip_steps": 2})

    assert torch.equal(by_rows.model.weight, by_steps.model.weight)
    assert by_rows.state.epoch == by_steps.state.epoch


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dispatches", [False, True])
def test_workers(tmp_path, workers, dispatches):
    """Workers, and a dispatcher on one rank, make the same batches."""
    expected = weights_by_hand(SKIPPED, per_token=True, batch_size=2, steps=2, max_steps=9)
    trainer = trained(
        tmp_path,
        SKIPPED,
        network=Noisy(per_token=True),
        gradient_accumulation_steps=2,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers == 2,
        accelerator_config={"dispatch_batches": dispatches},
    )

    assert torch.equal(trainer.model.weight, expected)


@pytest.mark.parametrize(
    ("skip_rows", "settings", "says"),
    [
        ([(0, 22)], {}, r"position 22 of epoch 0, .* positions 0 to 21"),
        ([(0, 1)], {"data": EndlessCounting()}, r"got an iterable data set; leave the rows out in"),
        (
            [(0, 1)],
            {"ignore_data_skip": True},
            r"`ignore_data_skip` must be False with `skip_rows`",
        ),
        ([(0, -1)], {}, r"`skip_rows` must be .* pairs of ints >= 0"),
    ],
)
def test_what_is_refused(tmp_path, skip_rows, settings, says):
    """Rows that no epoch has, and data whose rows have no positions, are refused."""
    with pytest.raises(ValueError, match=says):
        trained(tmp_path, skip_rows, **settings)


def test_the_tokens_of_rows_that_are_left_out_do_not_count(tmp_path):
    """The Trainer counts tokens, and floating-point operations, of the rows that are left."""
    settings = {"data": Counting(16, length=5), "max_steps": 2}
    settings |= {"gradient_accumulation_steps": 4, "include_num_input_tokens_seen": "all"}
    states = []
    for skip_rows in (None, [(0, 2), (0, 3), (0, 9)]):  # a micro-batch of two rows, and one row
        extras = {"skip_rows": skip_rows}
        trainer = new_trainer(MFTrainer, tmp_path, extras=extras, **settings)
        trainer.train()
        states.append(trainer.state)
    whole, left = states

    assert (whole.num_input_tokens_seen, left.num_input_tokens_seen) == (16 * 5, 13 * 5)
    assert left.total_flos / whole.total_flos == pytest.approx(13 / 16)


def without_super(name):
    """Return a trainer that has a method of its own which does not call that of `MFTrainer`."""

    def own(self, *args, **keywords):
        return getattr(Trainer, name)(self, *args, **keywords)

    return type("Own", (MFTrainer,), {name: own})


@pytest.mark.parametrize("name", ["training_step", "get_batch_samples"])
def test_rows_are_not_left_out_without_the_methods(name, tmp_path):
    """An error names the method before the first update that needs it."""
    trainer = new_trainer(
        without_super(name), tmp_path, extras={"skip_rows": [(0, 1)]}, learning_rate=0.1
    )
    before = copy.deepcopy(trainer.model.state_dict())

    with pytest.raises(RuntimeError, match=rf"`{name}`, got that of Own, .* `super\(\).{name}`"):
        trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


# Micro-batches of one row: with two ranks and accumulation 6, update 0 lacks a micro-batch on both
# ranks and one on one rank, update 1 has rows on rank 1 alone, and update 2 has none.
OF_TWO_RANKS = [(0, 0), (0, 1), (0, 5), *((0, row) for row in range(12, 24, 2))]
OF_TWO_RANKS += [*((0, row) for row in range(24, 36)), (0, 59), (1, 0)]


def test_two_ranks(two_ranks, tmp_path):
    """Two ranks, and one that resumes their run, end like a run on one rank."""
    settings = {"skip_rows": OF_TWO_RANKS, "save_steps": 2, "save_strategy": "steps"}
    alone = train_until(0, str(tmp_path / "one"), 6, settings | {"gradient_accumulation_steps": 12})
    folder = str(tmp_path / "two")
    results = two_ranks.run(train_until, folder, 2, settings)
    resumed = train_until(0, folder, 6, settings)

    for result in results:
        assert result["losses"] == pytest.approx(
            {step: alone["losses"][step] for step in (1, 2)}, rel=1e-5
        )
    resumed["losses"] |= results[0]["losses"]
    assert resumed["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    torch.testing.assert_close(resumed["weights"], alone["weights"])


@pytest.mark.parametrize(("across", "number"), [(True, 0), (False, 1)])
def test_the_targets_of_a_row_that_stands_in(tmp_path, across, number):
    """They do not count among those of all ranks; a rank that counts alone does not divide by 0."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=Noisy(per_token=True),
        data=ROWS,
        gradient_accumulation_steps=1,
        average_tokens_across_devices=across,
    )
    # Rank 0 of two has rows 0 and 2. Without row 2, row 0 stands in for it in the second update.
    sampler = BatchSamplerShard(BatchSampler(range(4), 1, drop_last=False), 2, 0)
    loader = DataLoader(ROWS, batch_sampler=sampler)
    rows = RowSkip(trainer, UpdateParts(trainer), [(0, 2)], always_follows=False)
    rows.note_loader(loader)
    rows.begin(None, updates_per_epoch=2)
    rows.begin_epoch(loader, epoch=0, first_update=0)
    batches = (default_collate([ROWS[row]]) for _, [row] in rows.batches(sampler))
    read = functools.partial(Trainer.get_batch_samples, trainer)
    numbers = [rows.read(read, batches, 1, trainer.args.device)[1] for _ in range(2)]

    assert numbers == [1, number]


def test_two_ranks_with_a_dispatcher(two_ranks, tmp_path):
    """A dispatcher would divide the rows that are left among the ranks, so it is refused."""
    settings = {"skip_rows": [(0, 1)], "accelerator_config": {"dispatch_batches": True}}

    with pytest.raises(RuntimeError, match="got `dispatch_batches` on several ranks; set"):
        two_ranks.run(train_until, str(tmp_path), 2, settings)
