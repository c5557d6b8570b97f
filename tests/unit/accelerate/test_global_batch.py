"""An attached loop that resumes on another number of ranks trains on the same rows and rates."""

import json

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    MultiplicativeLR,
    OneCycleLR,
    SequentialLR,
)
from torch.utils.data import DataLoader

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.accelerate.global_batch import LoopBatch
from mfwrap.checkpoints.manifest import write_manifest
from support.attached_runs import new_accelerator
from support.fsdp.accelerated import Loop, load_attached, save_attached
from support.ranks.chains import assert_a_chain_is_exact
from support.ranks.changing import loop_until
from support.ranks.pool import RankPool

LENGTHS = ["batches", "processes", "mixed"]


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Return pools of 1, 2, 3 and 4 ranks."""
    pools = {number: RankPool(number, tmp_path_factory.mktemp("ranks")) for number in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_each_row_is_trained_on_once_per_epoch(pools, tmp_path, length):
    """A loop on 2, 1, 3 and 4 ranks has the rows, losses and rates of a loop on 2 ranks."""
    assert_a_chain_is_exact(pools.__getitem__, tmp_path, loop_until, length)


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_network_is_loaded_on_other_ranks(pools, tmp_path, state_dict_type):
    """Weights, averages and moments that accelerate has sharded on 2 ranks fit 4 ranks and 1."""
    saved = pools[2].run(save_attached, str(tmp_path), state_dict_type)[0]
    for num_ranks in (4, 1):
        loaded = pools[num_ranks].run(load_attached, str(tmp_path), state_dict_type)[0]

        assert loaded["steps"] == 4 // num_ranks
        assert loaded["state"].keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(loaded["state"][name], value), name


def test_a_sharded_checkpoint_without_sharding(two_ranks, tmp_path):
    """A checkpoint of the FSDP plugin is refused by name in a loop without it."""
    two_ranks.run(save_attached, str(tmp_path), "SHARDED_STATE_DICT")

    with pytest.raises(ValueError, match="written with accelerate's FSDP plugin, without it"):
        Loop(2).accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("length", LENGTHS)
def test_two_ranks_become_one(two_ranks, tmp_path, length):
    """One process continues with the rows and rates of two, and then with those of one."""
    whole = two_ranks.run(loop_until, str(tmp_path / "whole"), 9, length)
    two_ranks.run(loop_until, str(tmp_path / "run"), 3, length)
    alone = [loop_until(0, str(tmp_path / "run"), stop, length) for stop in (7, 9)]

    rows = {step: sorted(row) for each in alone for step, row in each["rows"].items()}
    first, second = (each["rows"] for each in whole)
    assert rows == {step: sorted(first[step] + second[step]) for step in range(4, 10)}
    rates = {step: rate for each in alone for step, rate in each["rates"].items()}
    assert rates == {step: whole[0]["rates"][step] for step in range(4, 10)}
    for name, weights in whole[0]["weights"].items():
        assert (alone[-1]["weights"][name] - weights).abs().max() < 1e-6


def test_a_number_of_ranks_that_does_not_fit(two_ranks, tmp_path):
    """All ranks raise the same error, which names the numbers of ranks that fit."""
    loop_until(0, str(tmp_path), 1, "batches", 5)

    with pytest.raises(RuntimeError) as caught:
        two_ranks.run(loop_until, str(tmp_path), 2, "batches", 5)

    message = (
        f"ValueError: cannot resume from {tmp_path}/step-1 on 2 ranks: an update trains on 5 "
        "micro-batches, which cannot be divided equally; start 1 or 5 ranks"
    )
    first, second = str(caught.value).split("rank 1: ")
    assert message in first
    assert message in second


def test_a_schedule_of_another_length_is_refused(two_ranks, tmp_path):
    """A schedule that fits neither way of counting its steps cannot continue on other ranks."""
    two_ranks.run(loop_until, str(tmp_path), 3, "other")

    with pytest.raises(ValueError, match=r"on 1 process\(es\): the loop's schedule has other lear"):
        loop_until(0, str(tmp_path), 4, "other")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # (torchdata's import)
def test_stateful_loaders_are_refused(two_ranks, tmp_path):
    """Torchdata's loaders save the position of one rank, so that rows would be repeated."""
    pytest.importorskip("torchdata")
    two_ranks.run(loop_until, str(tmp_path), 3, "batches")
    accelerator = new_accelerator(
        gradient_accumulation_steps=6,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    attached = attach(accelerator)
    accelerator.prepare(DataLoader([0, 1]))

    with pytest.raises(ValueError, match="use_stateful_dataloader`: a stateful data loader saves"):
        LoopBatch(attached, accelerator).check(tmp_path / "step-3")


def constant(optimizer):
    """Return a schedule that keeps the rate."""
    return LambdaLR(optimizer, lambda _: 1.0)


def loop(schedule=constant, config=None, **settings):
    """Return an attached accelerator with one weight and a schedule, and both prepared objects."""
    accelerator = new_accelerator(**settings)
    attach(accelerator, config)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return accelerator, *accelerator.prepare(model, optimizer, schedule(optimizer))


def update(accelerator, model, optimizer, schedule):
    """Do an update, and return the rate after it."""
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return schedule.get_last_lr()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: CosineAnnealingLR(optimizer, 24),
        lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=24),
    ],
    ids=["lambda", "cosine", "one cycle"],
)
def test_a_schedule_steps_as_often_as_before(tmp_path, schedule):
    """A schedule that had three steps per update has three steps after each later resume, too."""
    torch_schedule = schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    rates = [torch_schedule.get_last_lr()]
    for _ in range(23):
        torch_schedule.optimizer.step()
        torch_schedule.step()
        rates.append(torch_schedule.get_last_lr())
    parts = loop(schedule)
    parts[-1].steps_per_update = 3
    found = [update(*parts) for _ in range(2)]
    parts[0].save_state(str(tmp_path / "step_2"))
    for step in (2, 4):
        parts = loop(schedule)
        parts[0].load_state(str(tmp_path / f"step_{step}"))
        found += [update(*parts) for _ in range(2)]
        parts[0].save_state(str(tmp_path / f"step_{step + 2}"))

    assert found == rates[3::3][:6]


@pytest.mark.parametrize(
    "schedule",
    [
        MultiplicativeLR,
        lambda optimizer, rate: SequentialLR(
            optimizer, [constant(optimizer), LambdaLR(optimizer, rate)], [4]
        ),
        lambda optimizer, rate: ChainedScheduler([constant(optimizer), LambdaLR(optimizer, rate)]),
    ],
    ids=["multiplicative", "sequential", "chained"],
)
def test_functions_of_other_schedules_are_compared(tmp_path, schedule):
    """Torch does not save functions, so on other ranks the loop's must be those of before."""
    saved = loop(lambda optimizer: schedule(optimizer, lambda step: 1 / (1 + step)))
    saved[-1].steps_per_update = 3
    update(*saved)
    saved[0].save_state(str(tmp_path))
    same = loop(lambda optimizer: schedule(optimizer, lambda step: 1 / (1 + step)))
    same[0].load_state(str(tmp_path))
    other = loop(lambda optimizer: schedule(optimizer, lambda step: 1 / (1 + 3 * step)))

    assert update(*same) == update(*saved)
    with pytest.raises(ValueError, match="have other values than in the checkpoint"):
        other[0].load_state(str(tmp_path))


def saved_on_two_ranks(folder, parts):
    """Save a checkpoint as if one of two ranks had written it."""
    parts[0].save_state(str(folder))
    record = folder / "mfwrap_loop.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    content["num_processes"] = content["global_batch"]["num_ranks"] = 2
    record.write_text(json.dumps(content), encoding="utf-8")
    write_manifest(folder)


def test_a_loop_without_accumulate_keeps_its_steps(tmp_path):
    """Each micro-batch is an update, so that other accumulation steps would scale the gradients."""
    parts = loop()
    update(*parts)
    saved_on_two_ranks(tmp_path, parts)
    accelerator, model, *others = loop()
    with pytest.warns(
        UserWarning, match=r"written with 2 rank\(s\), this run has 1, and without `a"
    ):
        accelerator.load_state(str(tmp_path))
    before = model.weight.detach().clone()
    update(accelerator, model, *others)

    assert accelerator.gradient_accumulation_steps == 1
    assert torch.equal(before - model.weight, torch.ones(1, 1))


@pytest.mark.parametrize("by_hand", [True, False])
def test_other_steps_begin_a_new_update(tmp_path, by_hand):
    """The first update after a resume has all its micro-batches, also with steps set by hand."""
    accelerator, model, *_ = parts = loop(gradient_accumulation_steps=2)
    for _ in range(2 * 3):
        with accelerator.accumulate(model):
            update(*parts)
    saved_on_two_ranks(tmp_path, parts)
    accelerator, model, *_ = parts = loop(gradient_accumulation_steps=4 if by_hand else 2)
    accelerator.load_state(str(tmp_path))
    ends = []
    for _ in range(8):
        with accelerator.accumulate(model):
            update(*parts)
            ends.append(accelerator.sync_gradients)

    assert ends == [False, False, False, True] * 2


def test_steps_that_a_loop_sets_later_are_saved_as_its_own(tmp_path):
    """A resume must not take the loop's own change for one that kept the global batch."""
    parts = loop(gradient_accumulation_steps=2)
    parts[0].gradient_accumulation_steps = 4
    parts[0].save_state(str(tmp_path))

    content = json.loads((tmp_path / "mfwrap_loop.json").read_text(encoding="utf-8"))
    assert content["global_batch"]["accumulation_steps"] == 4
    assert content["global_batch"]["configured_steps"] == 4


def test_local_norms_of_reduced_micro_batches(tmp_path):
    """More micro-batches per update than `attach` allows are not allowed on fewer ranks either."""
    plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=True)
    config = StepConfig(local_norm=True)
    accelerator, model, *_ = parts = loop(config=config, gradient_accumulation_plugin=plugin)
    with accelerator.accumulate(model):
        update(*parts)
    saved_on_two_ranks(tmp_path, parts)

    with pytest.raises(ValueError, match="`local_norm` must be False if `sync_each_batch`"):
        loop(config=config, gradient_accumulation_plugin=plugin)[0].load_state(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[" * 10**5, "[]", '{"format_version": 1}'])
def test_a_damaged_record(tmp_path, content):
    """A record that cannot be read raises an error that names the file."""
    accelerator = new_accelerator()
    batch = LoopBatch(attach(accelerator), accelerator)
    (tmp_path / "mfwrap_loop.json").write_text(content, encoding="utf-8")

    with pytest.raises(ValueError, match=r"mfwrap_loop\.json is (damaged|not valid JSON)"):
        batch.check(tmp_path)


def without(key):
    """Return a function that removes a key from a record."""

    def change(content):
        holder = content["schedules"][0] if key in content["schedules"][0] else content
        del holder[key]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("is_sharded"), "is damaged"),
        (without("factors"), "is damaged"),
        (lambda content: content["schedules"][0].update(steps_per_update=0), "an int > 0, got 0"),
        (lambda content: content.update(global_batch=3), "is damaged"),
        (
            lambda content: (content.clear(), content.update(format_version=9)),
            "expected format_version 1, got 9",
        ),
    ],
)
def test_a_record_with_other_fields(tmp_path, change, message):
    """Every field of a record is checked; a later version need not have the same ones."""
    accelerator, *_ = loop()
    batch = LoopBatch(accelerator.attachment, accelerator)
    batch.save(tmp_path)
    record = tmp_path / "mfwrap_loop.json"
    content = json.loads(record.read_text(encoding="utf-8"))
    change(content)
    record.write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(ValueError, match=rf"mfwrap_loop\.json.*{message}"):
        batch.check(tmp_path)
