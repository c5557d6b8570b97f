"""A resumed epoch gives the same batches and random numbers as an uninterrupted epoch."""

import functools
import json
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

from mfwrap.checkpoints.global_batch import GlobalBatch
from mfwrap.checkpoints.held_generators import held_generators
from mfwrap.checkpoints.random_states import random_states, restore_random_states
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.data.followed_loader import followed_loader
from mfwrap.trainer.data.position import (
    DataPosition,
    _read_position,
    _samplers,
    read_rank_file,
)
from mfwrap.trainer.log import StepLog
from support.trainer_runs import Counting, new_trainer, padded


class Numbers(Dataset):
    """A data set whose rows are the index and a random number; each read draws a new number."""

    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def __getitem__(self, index):
        drawn = torch.rand(()) + np.random.rand()  # noqa: NPY002  (what augmentations use)
        return index, drawn


class Stream(IterableDataset):
    """An iterable data set of numbers, which has no indices."""

    def __iter__(self):
        yield from torch.arange(6.0)


def prepared(dataset, **arguments):
    """Return a data loader as a Trainer prepares it."""
    return Accelerator(cpu=True).prepare_data_loader(DataLoader(dataset, **arguments))


def random_loader(num_rows):
    """Return a loader that shuffles."""
    return prepared(Numbers(num_rows), batch_size=2, shuffle=True)


def weighted_loader(num_rows):
    """Return a loader whose sampler draws all indices at once."""
    sampler = WeightedRandomSampler([1.0] * num_rows, num_rows)
    return prepared(Numbers(num_rows), batch_size=2, sampler=sampler)


LOADERS = [random_loader, weighted_loader]


def watched(loader, position):
    """Return a view of a loader that a position watches, as in an epoch of a training."""
    position.watch(loader)
    return followed_loader(loader, lambda batches: position.watching(enumerate(batches)))


def seen(batches):
    """Return each batch's content with a random number, drawn after the batch as in training."""
    return [(batch[0].tolist(), batch[1].tolist(), torch.rand(()).item()) for batch in batches]


@pytest.mark.parametrize("new_loader", LOADERS)
@settings(max_examples=30)
@given(data=st.data())
def test_an_epoch_goes_on_where_it_was_left(new_loader, data):
    """A resumed epoch has the rows and random numbers of the uninterrupted epoch."""
    num_rows = data.draw(st.integers(3, 12))
    num_done = data.draw(st.integers(1, (num_rows + 1) // 2 - 1))
    torch.manual_seed(num_rows)
    begin = random_states()
    position = DataPosition()
    batches = iter(watched(new_loader(num_rows), position))
    seen(next(batches) for _ in range(num_done))
    saved, at_checkpoint = json.dumps(position.state_dict()), random_states()
    expected = seen(batches)

    torch.manual_seed(99)
    position = DataPosition()
    resumed = watched(new_loader(num_rows), position)
    restore_random_states(begin)
    position.resume(json.loads(saved), functools.partial(restore_random_states, at_checkpoint))

    assert seen(skip_first_batches(resumed, num_done)) == expected
    assert position.is_resumed


def test_watching_changes_nothing():
    """A watched loader gives the same order and random numbers as one that is not watched."""
    begin = random_states()
    expected = seen(random_loader(7))
    restore_random_states(begin)
    assert seen(watched(random_loader(7), DataPosition())) == expected


def test_a_loader_stays_as_it_is():
    """A loader and its sampler keep their attributes and classes while they are watched."""
    loader, position = random_loader(4), DataPosition()
    owners = [loader, loader.base_dataloader, loader.batch_sampler]
    before = [(type(owner), dict(vars(owner))) for owner in owners]
    batches = iter(watched(loader, position))
    next(batches)

    # accelerate's loader notes in its attributes how far it is read.
    assert [(type(owner), vars(owner)) for owner in owners[1:]] == before[1:]
    assert type(loader) is before[0][0]
    assert position.state_dict() is not None
    position.release()
    assert position.state_dict() is None


@pytest.mark.parametrize(
    "new_loader",
    [
        lambda: prepared(Numbers(4), batch_size=2, num_workers=1, multiprocessing_context="fork"),
        lambda: prepared(Stream(), batch_size=2),
        lambda: DataLoader(Numbers(4), batch_sampler=[[0, 1], [2, 3]]),
        lambda: [torch.ones(2), torch.zeros(2)],
    ],
    ids=["workers", "stream", "a list as sampler", "no loader"],
)
def test_what_cannot_be_watched_is_left_alone(new_loader):
    """A loader whose position cannot be saved works as before, and its state is None."""
    position = DataPosition()

    num_batches = sum(1 for _ in watched(new_loader(), position))

    assert num_batches > 1
    assert position.state_dict() is None


def test_without_a_saved_batch_nothing_is_restored():
    """Resuming from a stock Trainer's checkpoint restores no random states."""
    position = DataPosition()
    loader = watched(random_loader(4), position)
    position.resume(None, functools.partial(pytest.fail, "restored"))

    list(loader)

    assert not position.is_resumed


def position_file(rank):
    """Return the content of the file of one of two ranks."""
    torch.manual_seed(rank)
    states = random_states()
    log = StepLog(torch.device("cpu")).state_dict()
    return {
        "num_ranks": 2,
        "global_batch": {
            "sizes": dict.fromkeys(GlobalBatch._fields, 1),
            "num_ranks": 2,
            "updates_per_epoch": 5,
            "group_size": None,
        },
        "data_skip": {"steps": 3, "offset": 3, "rows": [[0, 5]]},
        "epoch_random_states": states,
        "random_states": states,
        "loss_since_last_log": 1.0 + 2 * rank,
        "loss_until_last_log": 0.5,
        "last_logged": 0,
        "step_log": log | {"left_share": 0.5 * rank, "overflows": 3},
        "data": {"batch": 1, "random_states": states},
    }


def test_the_position_on_another_number_of_ranks(tmp_path):
    """Sums are means over the ranks; random states are those of rank 0 and of the nearest rank."""
    assert _read_position(tmp_path, 0, 1) is None
    contents = [position_file(rank) for rank in range(2)]
    for rank, content in enumerate(contents):
        path = tmp_path / f"mfwrap_position_{rank}.json"
        path.write_text(json.dumps(content), encoding="utf-8")

    def expected(rank):
        return contents[0] | {
            "data": None,
            "random_states": contents[rank]["random_states"],
            "loss_since_last_log": 2.0,
            "step_log": contents[0]["step_log"] | {"left_share": 0.25},
        }

    assert _read_position(tmp_path, 0, 1) == expected(0)
    assert [_read_position(tmp_path, rank, 4) for rank in (1, 2, 3)] == [
        expected(1),
        expected(0),
        expected(1),
    ]
    assert _read_position(tmp_path, 1, 2) == contents[1]


def changed(key, value):
    """Return a function that sets a value in a position file, at a path such as ``data/batch``."""

    def change(content):
        *outer, last = key.split("/")
        for each in outer:
            content = content[each]
        content[last] = value

    return change


DAMAGE = {
    "no object": lambda content: [content],
    "ranks": changed("num_ranks", "2"),
    "no states": lambda content: content.pop("epoch_random_states"),
    "states": changed("random_states", 3),
    "state of Python": changed("random_states/python", [3, [1, 2], None]),
    "state of NumPy": changed("epoch_random_states/numpy", ["MT19937", "AAAA", 1, 0, 0.0]),
    "position of NumPy": lambda content: content["random_states"]["numpy"].__setitem__(2, 10**9),
    "state of torch": changed("random_states/cpu", "AAAA"),
    "state of a GPU": changed("random_states/cuda", ["x"]),
    "sum": changed("loss_since_last_log", "1.0"),
    "counts": changed("step_log", []),
    "count": lambda content: content["step_log"].pop("begin"),
    "batch": changed("data/batch", None),
    "negative batch": changed("data/batch", -4),
    "state of the batch": changed("data/random_states", {}),
    "global batch": changed("global_batch/sizes/batch_size", 0),
    "updates": changed("global_batch/updates_per_epoch", 1.5),
    "offset of the data": changed("data_skip/offset", "3"),
    "skipped steps": changed("data_skip/steps", 1.5),
    "generators of samplers": changed(
        "sampler_generators", {"sampler.rng": {"python": [3, [1], None]}}
    ),
    "generators of data": changed("maker_generators", {"dataset.rng": {"other": 1}}),
    "skipped rows": changed("data_skip/rows", [[0, -1]]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file(tmp_path, damage):
    """A position of which any part is damaged is refused by the name of its file."""
    content = position_file(0)
    found = damage(content)
    path = tmp_path / "mfwrap_position_0.json"
    path.write_text(json.dumps(found if isinstance(found, list) else content), encoding="utf-8")

    with pytest.raises(ValueError, match=f"^{path} is damaged .*; resume from another checkpoint"):
        read_rank_file(tmp_path, 0, 2)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_file(tmp_path, share):
    """A position that is cut off is refused by the name of its file."""
    content = json.dumps(position_file(0))
    path = tmp_path / "mfwrap_position_0.json"
    path.write_text(content[: int(share * len(content))], encoding="utf-8")

    with pytest.raises(ValueError, match=f"^{path} is not valid JSON$"):
        read_rank_file(tmp_path, 0, 2)


class Lazy(Sampler):
    """A sampler of the user's own, which draws each index when it is asked for."""

    def __init__(self, num_rows, rng):
        self.num_rows, self.rng = num_rows, rng

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        for _ in range(self.num_rows):
            yield int(self.rng.random() * self.num_rows)


SAMPLERS = {
    "torch": lambda: WeightedRandomSampler(
        [1.0] * 24, 24, generator=torch.Generator().manual_seed(3)
    ),
    "Python": lambda: Lazy(24, random.Random(3)),  # noqa: S311  (not for cryptography)
    "NumPy": lambda: Lazy(24, np.random.default_rng(3)),
    "old NumPy": lambda: Lazy(24, np.random.RandomState(3)),
}
"""Samplers with generators of their own."""


class Noting(MFTrainer):
    """Note the rows that are trained on."""

    make_sampler = None

    def _get_train_sampler(self, *args):
        self.seen = []
        make = type(self).make_sampler
        return super()._get_train_sampler(*args) if make is None else make()

    def training_step(self, model, inputs, *rest):
        self.seen += inputs["input_ids"].tolist()
        return super().training_step(model, inputs, *rest)


NOTHING: dict = {}
NAMES = ("epoch_sampler_generators", "sampler_generators", "maker_generators")
"""Entries of a position with the states of generators that objects hold."""


def assert_rows_go_on(
    kind, steps, folder, make_data=lambda: Counting(24), *, arguments=NOTHING, **extras
):
    """Compare the rows and the last position of resumed trainings with those of a whole one.

    Args:
        kind: Class of the trainer.
        steps: Steps of the checkpoints from which the training is resumed.
        folder: Folder for checkpoints.
        make_data: Function that returns a new data set.
        arguments: Further training arguments.
        extras: Functions that return further keywords of the trainer.
    """
    file = folder / "checkpoint-8" / "mfwrap_position.json"

    def trained(save_steps, checkpoint=None):
        settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": save_steps}
        made = {name: make() for name, make in extras.items()}
        trainer = new_trainer(kind, folder, **settings, **arguments, data=make_data(), extras=made)
        trainer.train(resume_from_checkpoint=checkpoint)
        position = json.loads(file.read_text())
        return trainer.seen, {name: position[name] for name in (*NAMES, "data")}

    whole, position = trained(1)
    for step in steps:
        seen, at_end = trained(8, folder / f"checkpoint-{step}")
        assert seen == whole[8 * step :], step
        assert at_end == position, step
    return position


@pytest.mark.parametrize("steps", [[3, 4], pytest.param([1, 6], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_with_a_generator_of_its_own_goes_on(make, steps, tmp_path):
    """A training that is resumed within or between epochs sees the rows of one that was not."""
    assert_rows_go_on(type("Own", (Noting,), {"make_sampler": make}), steps, tmp_path)


def test_accelerates_sampler_is_not_saved(tmp_path):
    """It seeds its generator anew in each pass, and has none before its first one."""
    position = assert_rows_go_on(Noting, [1, 4], tmp_path)

    assert all(position[name] == {} for name in NAMES)


class Augmented(Counting):
    """A data set that changes its rows with a generator of its own."""

    def __init__(self, num_rows):
        super().__init__(num_rows, length=6)
        self.transforms = [functools.partial(shifted, np.random.default_rng(1))]

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {name: self.transforms[0](values) for name, values in row.items()}


def shifted(rng, values):
    """Rotate a row by a random number of places."""
    return values.roll(int(rng.integers(6)))


def masking():
    """Return a collator of transformers that masks words with a generator of its own."""
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    words = models.WordLevel({"[PAD]": 0, "[MASK]": 1} | {str(n): n for n in range(2, 16)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=5)


@pytest.mark.parametrize("owner", ["data set", "collator"])
def test_a_generator_that_makes_the_data_goes_on(owner, tmp_path):
    """Augmentation and masking with generators of their own continue as if never stopped."""
    steps = [1, 3, 4, 6]
    if owner == "data set":
        assert_rows_go_on(Noting, steps, tmp_path, lambda: Augmented(24))
    else:
        make_data = functools.partial(Counting, 24, length=6)
        assert_rows_go_on(Noting, steps, tmp_path, make_data, data_collator=masking)


class Shifting:
    """A collator that rotates the rows of a batch by a random number of places."""

    def __init__(self):
        self.rng = random.Random(4)  # noqa: S311  (not for cryptography)

    def __call__(self, rows):
        places = self.rng.randrange(5)
        return {name: values.roll(places, 1) for name, values in padded(rows).items()}


def test_a_collator_that_evaluations_use_goes_on(tmp_path):
    """Evaluations draw from the collator's generator between the batches of the training."""
    arguments = {"eval_strategy": "steps", "eval_steps": 2}
    assert_rows_go_on(Noting, [1, 2, 4, 5], tmp_path, arguments=arguments, data_collator=Shifting)


class AugmentedStream(IterableDataset):
    """An iterable data set that changes its rows with a generator of its own."""

    def __init__(self):
        self.rows = Augmented(24)

    def __len__(self):
        return 24

    def __iter__(self):
        return (self.rows[index] for index in range(24))


class NotingStream(Noting):
    """Have no sampler."""

    def get_train_dataloader(self):
        self.seen = []
        return super().get_train_dataloader()


def test_an_iterable_data_set_goes_on_between_epochs(tmp_path):
    """Its generator continues, although accelerate's dispatcher reads it."""
    assert_rows_go_on(NotingStream, [3], tmp_path, AugmentedStream)


class Late:
    """A collator that makes its generator for its first batch."""

    def __init__(self):
        self.rng, self.drawn = None, []

    def __call__(self, rows):
        if self.rng is None:
            self.rng = random.Random(4)  # noqa: S311  (not for cryptography)
        self.drawn.append(self.rng.random())
        return padded(rows)


@pytest.mark.parametrize("step", [1, 3])
def test_a_generator_that_is_made_for_the_first_batch(step, tmp_path):
    """After the first batch of the resume, it continues from its saved state."""
    drawn = []
    for checkpoint in (None, tmp_path / f"checkpoint-{step}"):
        late = Late()
        settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1}
        trainer = new_trainer(
            Noting, tmp_path, data=Counting(24), extras={"data_collator": late}, **settings
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        drawn.append(late.drawn)

    # Within an epoch, the first batch was made ahead of the checkpoint, and has drawn a number.
    begin = 4 * step + (step == 1)
    assert len(drawn[1]) == len(drawn[0]) - 4 * step
    assert drawn[1][1:] == drawn[0][begin:][: len(drawn[1]) - 1]


class Plain(Noting):
    """Have a loader of torch, which accelerate does not know."""

    def get_train_dataloader(self):
        self.seen = []
        return DataLoader(self.train_dataset, 2, sampler=SAMPLERS["NumPy"]())


def test_a_loader_that_makes_nothing_ahead(tmp_path):
    """The generators of the data go on where no batch was made ahead of the checkpoint."""
    assert_rows_go_on(Plain, [1, 3, 5], tmp_path, lambda: Augmented(24))


def test_a_generator_has_one_name_on_any_number_of_ranks():
    """Accelerate's wrapper for several ranks does not change the path of a generator."""
    sampler = RandomSampler(range(8), generator=torch.Generator())
    batches = BatchSampler(sampler, 2, drop_last=False)
    alone = DataLoader(Counting(8), batch_sampler=batches)
    shard = DataLoader(Counting(8), batch_sampler=BatchSamplerShard(batches, 2, 1))

    names = [list(held_generators(_samplers(each))) for each in (alone, shard)]
    assert names[0] == names[1] == ["batch_sampler.sampler.generator"]


class Shuffled(Sampler):
    """A batch sampler of the user's own, which shuffles the batches of another one."""

    def __init__(self, batches):
        self.batch_sampler, self.rng = batches, np.random.default_rng(1)
        self.batch_size, self.drop_last = 2, False

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        yield from self.rng.permutation(list(self.batch_sampler)).tolist()


class InShuffledBatches(Noting):
    """Have a loader with a batch sampler of the user's own."""

    def get_train_dataloader(self):
        self.seen = []
        batches = Shuffled(BatchSampler(range(24), 2, drop_last=False))
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=padded)
        return self.accelerator.prepare(loader)


def test_a_batch_sampler_that_holds_another_one_goes_on(tmp_path):
    """The generator beside the inner batch sampler is saved and restored."""
    assert_rows_go_on(InShuffledBatches, [1, 3, 4], tmp_path)


def test_a_batch_sampler_that_holds_itself():
    """It is looked at once."""
    batches = Shuffled([[0, 1], [2, 3]])
    batches.batch_sampler = batches
    found = held_generators(_samplers(DataLoader(Counting(4), batch_sampler=batches)))

    assert list(found) == ["batch_sampler.rng"]


class Throwing(MFTrainer):
    """Draw a random number in each micro-batch, as dropout does, and note it."""

    def training_step(self, *args):
        self.drawn = [*getattr(self, "drawn", []), torch.rand(()).item()]
        return super().training_step(*args)


def test_workers_that_persist_draw_their_seed_once(tmp_path):
    """Workers that a resumed training starts in a later epoch do not change its random numbers."""

    def drawn(save_steps, checkpoint=None):
        trainer = new_trainer(
            Throwing,
            tmp_path,
            max_steps=8,
            save_strategy="steps",
            save_steps=save_steps,
            data=Counting(24),
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        # The garbage collector would end the workers in an order that makes torch wait for them.
        trainer.callback_handler.train_dataloader.base_dataloader._iterator = None
        return trainer.drawn

    whole = drawn(1)
    for step in (2, 3, 4):
        assert drawn(8, tmp_path / f"checkpoint-{step}") == whole[4 * step :], step


SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}


def test_a_trainer_that_resumes_twice(tmp_path):
    """A resume within an epoch leaves nothing behind for a later resume between epochs."""
    whole, again = (new_trainer(Throwing, tmp_path, data=Counting(24), **SAVING) for _ in range(2))
    whole.train()
    for step in (1, 3):
        again.drawn = []
        again.train(resume_from_checkpoint=tmp_path / f"checkpoint-{step}")
        assert again.drawn == whole.drawn[4 * step :], step


class AtTheBeginning(TrainerCallback):
    """Call a function when a training begins."""

    def __init__(self, function):
        self.function = function

    def on_train_begin(self, *_, **__):
        """Call the function."""
        self.function()


@pytest.mark.parametrize("make", [None, lambda: WeightedRandomSampler([1.0] * 24, 24)])
def test_the_order_of_an_epoch_is_the_checkpoints(make, tmp_path):
    """Neither another seed nor what a callback draws at the beginning changes it."""
    kind = type("Own", (Noting,), {"make_sampler": make})
    seen = []
    for checkpoint in (None, tmp_path / "checkpoint-1"):
        draw = AtTheBeginning(lambda: torch.rand(()))
        trainer = new_trainer(
            kind, tmp_path, data=Counting(24), callbacks=[draw], **SAVING | {"max_steps": 2}
        )
        if checkpoint is not None:
            torch.manual_seed(5)
        trainer.train(resume_from_checkpoint=checkpoint)
        seen.append(trainer.seen)

    assert seen[1] == seen[0][8:]


def test_a_resumed_training_that_saves_before_its_first_batch(tmp_path):
    """A callback may save when a training begins that goes on in another folder."""
    settings = SAVING | {"max_steps": 2}
    whole = new_trainer(Noting, tmp_path, data=Counting(24), **settings)
    whole.train()
    other = tmp_path / "other"
    save = AtTheBeginning(lambda: again._save_checkpoint(again.model, None))
    again = new_trainer(Noting, other, data=Counting(24), callbacks=[save], **settings)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-1")

    assert (other / "checkpoint-1" / "mfwrap_position.json").is_file()
    assert again.seen == whole.seen[8:]


def test_a_training_loop_of_the_users_own(tmp_path):
    """A subclass may have a training loop that is not that of `MFTrainer`."""
    own = {"_inner_training_loop": Trainer._inner_training_loop}
    seen = []
    for kind in (Noting, type("Own", (Noting,), own)):
        trainer = new_trainer(kind, tmp_path, data=Counting(24), max_steps=1)
        trainer.train()
        seen.append(trainer.seen)

    assert seen[0] == seen[1] != []
