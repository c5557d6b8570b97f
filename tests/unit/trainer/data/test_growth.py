"""`rampup_batch_size` lets the batch grow, exactly in rows, losses, log and resume."""

import itertools
import json
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from mfwrap.callbacks import (
    Callback,
    MFLossMonitor,
    TrainingStateMonitor,
    as_trainer_callback,
)
from mfwrap.trainer import MFTrainer, Rollback
from support.ranks.changing import NUM_ROWS, train_until
from support.resumed_training import RunSettings, end_of, resume, trained
from support.trainer_runs import (
    Counting,
    EndlessCounting,
    counted_labels,
    new_trainer,
    padded,
    tiny_llama,
    train,
    values,
)

GROWTH = [2, 2, 20]
"""To updates of 8 rows, in micro-batches of 2."""


def sizes_of(growth, global_batch_size, num_updates):
    """Return the sizes of the first updates by MindFormers' formula, one after the other."""
    start, increment, samples = growth
    levels = (global_batch_size - start) // increment
    sizes, consumed = [], 0
    for _ in range(num_updates):
        size = global_batch_size
        if consumed <= samples and samples and levels:
            size = min(start + increment * int(consumed / (samples / levels)), global_batch_size)
        sizes.append(size)
        consumed += size
    return sizes


def passes(sizes, num_rows):
    """Cut passes of so many rows into updates: the last one of a pass may lack rows."""
    left, cut = num_rows, []
    for size in sizes:
        cut.append(min(size, left))
        left = left - cut[-1] or num_rows
    return cut


class Recording(nn.Module):
    """A network that records the rows of each micro-batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.micro_batches: list[list[float]] = []

    def forward(self, inputs):
        """Return a loss that depends on the rows."""
        self.micro_batches.append(inputs.tolist())
        return {"loss": (self.weight * inputs).square().mean()}


class Events(TrainerCallback):
    """Count the events of each update."""

    def __init__(self) -> None:
        self.of_update: list[list[str]] = []

    def on_step_begin(self, *_args, **_known):
        self.of_update.append(["begin"])

    def on_substep_end(self, *_args, **_known):
        self.of_update[-1].append("micro-batch")

    def on_step_end(self, *_args, **_known):
        self.of_update[-1].append("end")


def recorded(folder, *, growth=GROWTH, num_rows=31, callbacks=(), resume=None, **arguments):
    """Train on numbered rows, and return the trainer."""
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=Recording(),
        data=[{"inputs": torch.tensor(float(row))} for row in range(num_rows)],
        callbacks=callbacks,
        extras={"data_collator": None, "rampup_batch_size": growth},
        **{"learning_rate": 0.0, "train_sampling_strategy": "sequential"} | arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("num_rows", [31, 32, 7, 100])
def test_updates_take_the_sizes_of_mindformers(tmp_path, num_rows):
    """Rows come in their order; the last update of a pass has those that are left."""
    trainer = recorded(tmp_path, num_rows=num_rows, max_steps=16)
    sizes = passes(sizes_of(GROWTH, 8, 16), num_rows)
    endless = itertools.cycle(range(num_rows))

    assert [row for batch in trainer.model.micro_batches for row in batch] == [
        next(endless) for _ in range(sum(sizes))
    ]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["global_batch_size"] for entry in logged] == sizes
    assert [entry["num_samples_seen"] for entry in logged] == [*itertools.accumulate(sizes)]
    # The Trainer counts epochs in micro-batches.
    slots, each = math.ceil(num_rows / 2), []
    for size in sizes:
        each.append((each[-1] if each else 0) + math.ceil(size / 2))
    assert [entry["epoch"] for entry in logged] == [
        pytest.approx(done // slots + done % slots / slots) for done in each
    ]


def test_the_loss_is_the_mean_over_the_micro_batches_of_its_update(tmp_path):
    """A network without targets: each micro-batch has the same weight, however many there are."""
    trainer = recorded(tmp_path, max_steps=10)
    sizes = passes(sizes_of(GROWTH, 8, 10), 31)
    batches = iter(trainer.model.micro_batches)
    losses = [
        [torch.tensor(batch).square().mean() for batch in itertools.islice(batches, -(-size // 2))]
        for size in sizes
    ]

    expected = [torch.stack(each).mean().item() for each in losses]
    assert values(train_log(trainer), "loss") == pytest.approx(expected, rel=1e-6)


def train_log(trainer):
    """Return the log of a trainer as `values` takes it."""
    return SimpleNamespace(log=trainer.state.log_history)


def test_callbacks_hear_of_micro_batches_with_rows_only(tmp_path):
    """An update has one event less between begin and end than it has micro-batches."""
    events = Events()
    recorded(tmp_path, max_steps=10, callbacks=[events])
    sizes = passes(sizes_of(GROWTH, 8, 10), 31)

    assert events.of_update == [
        ["begin", *["micro-batch"] * (-(-size // 2) - 1), "end"] for size in sizes
    ]


@pytest.mark.parametrize("epochs", [0.5, 1, 2, 2.5, 3])
def test_epochs_have_as_many_updates_as_they_need(tmp_path, epochs):
    """Without `max_steps`, the updates of the epochs are counted with their sizes."""
    trainer = recorded(tmp_path, max_steps=-1, num_train_epochs=epochs)
    firsts, left = [0], 31
    for number, size in enumerate(passes(sizes_of(GROWTH, 8, 40), 31), 1):
        left -= size
        if not left:
            firsts.append(number)
            left = 31
    whole = int(epochs)
    rows = math.ceil((epochs - whole) * 32)  # of 16 micro-batches
    later = itertools.accumulate(sizes_of(GROWTH, 8, 40)[firsts[whole] :], initial=0)
    number = next(number for number, taken in enumerate(later) if taken >= rows)

    assert trainer.state.global_step == trainer.state.max_steps == firsts[whole] + number
    assert trainer.state.num_train_epochs == math.ceil(epochs)
    if rows == 0:
        assert trainer.state.epoch == epochs
        assert len(trainer.model.micro_batches) == 16 * epochs


class Stream(IterableDataset):
    """Twelve rows without a length; in each pass others, if the Trainer names the pass."""

    number = 0

    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        for row in range(12):
            yield {"inputs": torch.tensor(float(100 * self.number + row))}


@pytest.mark.filterwarnings("ignore:.*the Trainer begins this pass again:UserWarning")
def test_a_stream_that_has_ended_begins_again(tmp_path):
    """A training that resumes at the end of a pass over a stream continues with the next pass."""

    def streamed(folder, resume=None):
        trainer = new_trainer(
            MFTrainer,
            folder,
            model=Recording(),
            data=Stream(),
            extras={"data_collator": None, "rampup_batch_size": {0: 2, 2: 8}},
            max_steps=4,
            learning_rate=0.0,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    rows = streamed(tmp_path / "whole").model.micro_batches
    assert rows[5:7] == [[10.0, 11.0], [100.0, 101.0]]
    for step, num_rows in ((1, 2), (2, 4), (3, 12)):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        resumed = streamed(tmp_path / f"from {step}", checkpoint)

        assert resumed.state.global_step == 4
        assert resumed.model.micro_batches == rows[num_rows // 2 :]


def test_a_table_of_sizes(tmp_path):
    """Sizes hold from an update on, counted from 0."""
    trainer = recorded(tmp_path, growth={0: 4, 3: 6, 5: 8}, num_rows=100, max_steps=7)

    assert values(train_log(trainer), "global_batch_size") == [4, 4, 4, 6, 6, 8, 8]
    assert [len(batch) for batch in trainer.model.micro_batches] == [2] * 20


def without_dropout() -> LlamaForCausalLM:
    """Return the small Llama without random numbers."""
    model = tiny_llama()
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return model


def batches_of_updates(num_rows, num_updates):
    """Return the micro-batches of each update, for rows in their order."""
    data, rows = Counting(num_rows), itertools.cycle(range(num_rows))
    for size in passes(sizes_of(GROWTH, 8, num_updates), num_rows):
        of_update = [data[next(rows)] for _ in range(size)]
        yield [padded(of_update[first : first + 2]) for first in range(0, size, 2)]


def test_weights_are_those_of_a_loop_by_hand(tmp_path):
    """A torch loop over the same micro-batches, which divides by all targets of its update."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=without_dropout(),
        data=Counting(31),
        extras={"rampup_batch_size": GROWTH},
        max_steps=14,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
    )
    run = train(trainer)
    model, losses = without_dropout().train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for batches in batches_of_updates(31, 14):
        number = sum(counted_labels(batch["labels"]).ne(-100).sum() for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=number).loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()

    assert values(run, "loss") == pytest.approx(losses, rel=1e-6)
    for name, expected in model.named_parameters():
        assert torch.equal(run.weights[name], expected), name


def test_the_loss_per_target_is_exact(tmp_path):
    """The loss of an update is the mean over all its targets, computed by hand in float64."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=without_dropout(),
        data=Counting(31),
        extras={"rampup_batch_size": GROWTH},
        max_steps=14,
        learning_rate=0.0,
        train_sampling_strategy="sequential",
        include_num_input_tokens_seen="all",
    )
    run = train(trainer)
    model, losses, tokens = without_dropout().double(), [], [0]
    for batches in batches_of_updates(31, 14):
        of_update = []
        for batch in batches:
            with torch.no_grad():
                logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
            targets = batch["labels"][:, 1:]
            of_update += cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100
            )[targets.flatten() != -100].tolist()
        counted = sum(counted_labels(batch["labels"]).ne(-100).sum().item() for batch in batches)
        losses.append(math.fsum(of_update) / counted)
        tokens.append(tokens[-1] + sum(batch["input_ids"].numel() for batch in batches))

    assert values(run, "loss") == pytest.approx(losses, rel=2e-6)
    assert [entry["num_input_tokens_seen"] for entry in run.log if "loss" in entry] == tokens[1:]


RAMP = {"rampup_batch_size": [2, 2, 30]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return a run folder with a checkpoint of each step, and the state at its end."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, end_of(trained(folder, trainer_settings=RAMP, max_steps=18, save_total_limit=99))


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("step", range(1, 18))
def test_a_training_that_resumes_is_the_unbroken_one(unbroken, tmp_path, step):
    """Weights, optimizer, average, random states, log: all bit-identical, after any step.

    Some updates are skipped for a NaN, the model has dropout, and the order is random.
    """
    folder, expected = unbroken
    resumed = resume(folder / f"checkpoint-{step}", tmp_path, trainer_settings=RAMP, max_steps=18)

    actual = end_of(resumed)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not same(actual[name], expected[name])] == []


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [3, 14])
def test_a_training_with_workers_resumes_exactly(tmp_path, step):
    """The loader draws the seed of its workers before the random states are restored."""
    settings = RunSettings(workers=1, save_steps=step)
    whole = trained(tmp_path / "whole", settings, trainer_settings=RAMP, max_steps=16)
    checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
    again = resume(checkpoint, tmp_path / "again", settings, trainer_settings=RAMP, max_steps=16)

    expected, actual = end_of(whole), end_of(again)
    assert [name for name in expected if not same(actual[name], expected[name])] == []


def same(actual, expected):
    """Return whether two values are equal, bit by bit if they are tensors."""
    return torch.equal(actual, expected) if torch.is_tensor(expected) else actual == expected


ON_TWO_RANKS = {"rampup_batch_size": [4, 2, 90]}
"""To updates of 12 rows, in micro-batches of 1 on each of two ranks."""


def rows_of(results):
    """Return the rows of each update on all ranks."""
    return {
        step: sorted(row for each in results for row in each["rows"][step])
        for step in results[0]["rows"]
    }


LOADERS = {
    "shards": {},
    "workers": {"dataloader_num_workers": 1},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "split batches": {
        "per_device_train_batch_size": 2,
        "accelerator_config": {"split_batches": True},
    },
    "dispatched batches": {"accelerator_config": {"dispatch_batches": True}},
    "stream": {"data": "stream", "max_steps": 18},
    "sharded stream": {
        "data": "stream",
        "max_steps": 18,
        "accelerator_config": {"dispatch_batches": False},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_two_ranks(two_ranks, tmp_path, loader):
    """Each update has the rows of its size; after stops, the weights are those without."""
    settings = ON_TWO_RANKS | LOADERS[loader]
    whole = two_ranks.run(train_until, str(tmp_path / "whole"), 18, settings)
    rows, sizes = rows_of(whole), sizes_of([4, 2, 90], 12, 18)
    if "data" not in settings:  # the stream has no end
        sizes = passes(sizes, NUM_ROWS)
        # The last update of the first pass lacks rows.
        assert (sum(sizes[:12]), sizes[11]) == (NUM_ROWS, 4)
    assert [len(rows[step]) for step in sorted(rows)] == sizes
    for first in (0, NUM_ROWS):
        seen = list(itertools.chain(*rows.values()))[first : first + NUM_ROWS]
        assert sorted(seen) == list(range(NUM_ROWS)) or "data" in settings
    found = {}
    for stop in (2, 5, 11, 12, 15, 18):
        results = two_ranks.run(train_until, str(tmp_path / "stopped"), stop, settings)
        found |= rows_of(results)

    assert found == rows
    for one, other in zip(whole, results, strict=True):
        for name, weights in one["weights"].items():
            assert torch.equal(other["weights"][name], weights), name


@pytest.mark.slow
def test_another_number_of_ranks(two_ranks, tmp_path):
    """On one rank an update has twice as many micro-batches, and the same rows."""
    rows = rows_of(two_ranks.run(train_until, str(tmp_path / "whole"), 18, ON_TWO_RANKS))
    first = rows_of(two_ranks.run(train_until, str(tmp_path / "run"), 4, ON_TWO_RANKS))
    alone = rows_of([train_until(0, str(tmp_path / "run"), 13, ON_TWO_RANKS)])
    last = rows_of(two_ranks.run(train_until, str(tmp_path / "run"), 18, ON_TWO_RANKS))

    assert first | alone | last == rows
    assert sorted(alone) == list(range(5, 14))


def test_data_without_a_length(tmp_path):
    """Sizes are the same, and a resume skips the micro-batches of the updates before it."""
    settings = {
        "model": without_dropout(),
        "data": EndlessCounting(),
        "extras": {"rampup_batch_size": GROWTH},
        "save_strategy": "steps",
        "save_steps": 1,
        "max_grad_norm": 0.0,
        "max_steps": 10,
    }
    whole = train(new_trainer(MFTrainer, tmp_path / "whole", **settings))
    again = settings | {"model": without_dropout()}
    resumed = train(
        new_trainer(MFTrainer, tmp_path / "again", **again), tmp_path / "whole" / "checkpoint-6"
    )

    assert values(whole, "global_batch_size") == sizes_of(GROWTH, 8, 10)
    assert values(whole, "num_samples_seen") == [*itertools.accumulate(sizes_of(GROWTH, 8, 10))]
    assert values(whole, "epoch")[:-1] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(torch.equal(resumed.weights[name], each) for name, each in whole.weights.items())


def test_a_resume_with_another_growth_warns(tmp_path):
    """The rows before it are not known. The same growth and `ignore_data_skip` are quiet."""
    saves = {"save_strategy": "steps", "save_steps": 5}
    recorded(tmp_path / "first", max_steps=5, **saves)
    checkpoint = str(tmp_path / "first" / "checkpoint-5")

    with pytest.warns(UserWarning, match=r"first 5 updates take 40 rows .* and took 12 before the"):
        recorded(tmp_path / "without", growth=None, resume=checkpoint, max_steps=6)
    with pytest.warns(UserWarning, match=r"first 5 updates take 22 rows .* and took 12 before the"):
        recorded(tmp_path / "other", growth={0: 4, 4: 6, 6: 8}, resume=checkpoint, max_steps=6)
    ignored = {"ignore_data_skip": True, "resume": checkpoint}
    trainer = recorded(tmp_path / "ignored", growth={0: 4, 4: 6, 6: 8}, max_steps=6, **ignored)
    assert trainer.model.micro_batches == [[0, 1], [2, 3], [4, 5]]
    recorded(tmp_path / "same", resume=checkpoint, max_steps=6)


@pytest.mark.filterwarnings("ignore:no state of the step")
def test_a_resume_from_a_stock_trainer_warns(tmp_path):
    """Its checkpoint does not say how many rows an update had."""
    stock = new_trainer(Trainer, tmp_path / "stock", save_strategy="steps", save_steps=2)
    train(stock)
    grown = new_trainer(MFTrainer, tmp_path / "grown", extras={"rampup_batch_size": GROWTH})

    with pytest.warns(UserWarning, match=r"take 4 rows .* and took an unknown number before the"):
        train(grown, tmp_path / "stock" / "checkpoint-2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("data_skip_steps", 1), ("skip_rows", [(0, 1)]), ("rollback", Rollback())],
)
def test_what_counts_updates_of_one_size_is_refused(tmp_path, name, value):
    """At construction; also what a checkpoint has left out."""
    with pytest.raises(ValueError, match=f"cannot be combined with `{name}`, which counts updates"):
        new_trainer(MFTrainer, tmp_path, extras={"rampup_batch_size": GROWTH, name: value})


def test_a_checkpoint_that_has_left_rows_out_is_refused(tmp_path):
    """Its position in the data counts updates of one size."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        extras={"skip_rows": [(0, 1)]},
        save_strategy="steps",
        save_steps=2,
    )
    train(trainer)
    grown = new_trainer(MFTrainer, tmp_path / "grown", extras={"rampup_batch_size": GROWTH})

    with pytest.raises(ValueError, match="a checkpoint of a training that has left data out"):
        train(grown, tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    ("growth", "arguments", "says"),
    [
        ([3, 1, 20], {}, "each size .* a multiple of 2, the rows of a micro-batch .*, got 3"),
        ([2, 4, 20], {}, "from 2 in steps of 4 to the global batch, 8 rows, got 6 rows"),
        ([2, 2, 20], {"per_device_train_batch_size": 4}, "a multiple of 4, .*, got 2"),
        ({0: 2, 4: 6}, {}, "must end with the global batch, 8 rows, got 6"),
        ([2, 2, 20], {"auto_find_batch_size": True}, "got `auto_find_batch_size`; set it to False"),
    ],
)
def test_sizes_that_do_not_fit_the_training_arguments(tmp_path, growth, arguments, says):
    """Before the first update."""
    with pytest.raises(ValueError, match=f"`rampup_batch_size` .*{says}|{says}"):
        recorded(tmp_path, growth=growth, **arguments)


class OwnBatches(MFTrainer):
    """A trainer that makes its own micro-batches, as TRL's GRPO does."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


def test_a_trainer_that_makes_its_own_micro_batches_is_refused(tmp_path):
    """It counts `gradient_accumulation_steps` micro-batches itself."""
    trainer = new_trainer(OwnBatches, tmp_path, extras={"rampup_batch_size": GROWTH})

    with pytest.raises(ValueError, match="got OwnBatches, which makes its own micro-batches"):
        trainer.train()


def test_a_wrong_argument_is_refused_at_construction(tmp_path):
    """The rest depends on the number of ranks, and is checked when the training begins."""
    with pytest.raises(TypeError, match=r"must be \[start, increment, samples\] or a table"):
        new_trainer(MFTrainer, tmp_path, extras={"rampup_batch_size": 16})


def test_monitors_count_with_the_sizes(tmp_path, caplog):
    """Throughput of each update by its own rows; the run is one epoch; also for MindSpore's."""
    seconds = itertools.count()
    caplog.set_level(logging.INFO, logger="mfwrap.callbacks")

    class Facts(Callback):
        def on_train_step_end(self, run_context):
            facts.append(run_context.original_args().batch_num)

    facts = []
    monitor = MFLossMonitor(clock=lambda: float(next(seconds)))
    recorded(tmp_path, max_steps=10, callbacks=[monitor, as_trainer_callback(Facts())])
    sizes = passes(sizes_of(GROWTH, 8, 10), 31)

    rates = [float(rate) for rate in re.findall(r"([\d.]+) samples/s/p", caplog.text)]
    assert rates == sizes
    steps = re.findall(r"Epoch:\[ *(\d+)/ *(\d+)\], step:\[ *(\d+)/ *(\d+)\]", caplog.text)
    assert steps == [("1", "1", str(step), "10") for step in range(1, 11)]
    assert facts == [10] * 10


def test_a_card_and_the_facts_of_a_run_have_the_growth(tmp_path):
    """Runs that differ in it are told apart."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        callbacks=[TrainingStateMonitor()],
        extras={"rampup_batch_size": GROWTH},
        max_steps=1,
    )
    trainer.train()
    trainer.create_model_card()

    assert "- rampup_batch_size: [2, 2, 20]" in (tmp_path / "README.md").read_text()
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["configuration"]["rampup_batch_size"] == GROWTH


def test_the_throughput_of_a_part_of_a_training(tmp_path):
    """It has the rows of this call alone; the updates before a resume have fewer than a share."""
    saves = {"save_strategy": "steps", "save_steps": 4}
    recorded(tmp_path, max_steps=4, **saves)
    trainer = recorded(tmp_path, max_steps=8, resume=str(tmp_path / "checkpoint-4"), **saves)

    logged = trainer.state.log_history[-1]
    seen = logged["train_samples_per_second"] * logged["train_runtime"]
    assert seen == pytest.approx(sum(passes(sizes_of(GROWTH, 8, 8), 31)[4:]), rel=0.02)
