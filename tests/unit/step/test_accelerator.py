"""The cell with objects that a real Accelerator has prepared, on CPU."""

import copy
import weakref

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, WithLossCell
from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_files import open_records, records_of_training
from support.attached_runs import new_accelerator
from support.small_llama import byte_batch, small_llama
from support.small_networks import Classifier, TokenClassifier, labelled_batches

NAN = float("nan")


def inverse(step: int) -> float:
    """Return the schedule's factor of the initial learning rate at a step."""
    return 1 / (1 + step)


def plain_training(**settings):
    """Return an unprepared network, optimizer and schedule, and their cell."""
    torch.manual_seed(0)
    network = Classifier()
    optimizer = AdamW(network.parameters(), lr=0.1, fused=True)
    schedule = LambdaLR(optimizer, inverse)
    return (
        network,
        optimizer,
        schedule,
        MFTrainOneStepCell(network, optimizer, lr_scheduler=schedule, **settings),
    )


def prepared_training(accelerator: Accelerator, *, fused: bool = True, **settings):
    """Return a network, optimizer and schedule that accelerate prepared, and their cell."""
    torch.manual_seed(0)
    network = Classifier()
    optimizer = AdamW(network.parameters(), lr=0.1, fused=fused)
    schedule = LambdaLR(optimizer, inverse)
    network, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    cell = MFTrainOneStepCell(
        network, optimizer, lr_scheduler=schedule, accelerator=accelerator, **settings
    )
    return network, optimizer, schedule, cell


@pytest.mark.parametrize("steps", [1, 2])
def test_prepared_objects_train_as_the_plain_ones(steps):
    """Prepared objects train like plain ones: same weights, rates and schedule position."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    settings = {"use_clip_grad": True, "gradient_accumulation_steps": steps}
    network, _, schedule, cell = prepared_training(accelerator, **settings)
    plain_network, _, plain_schedule, plain_cell = plain_training(**settings)

    for batch, factor in zip(labelled_batches(5), (1.0, NAN, 1.0, NAN, 1.0), strict=True):
        output, expected = cell(*batch, factor), plain_cell(*batch, factor)
        assert torch.equal(output.learning_rate, expected.learning_rate)
        assert output.overflow.item() == (factor != 1)
    cell.flush()
    plain_cell.flush()

    assert schedule.get_last_lr() == plain_schedule.get_last_lr() == [0.1 / 4]
    for ours, theirs in zip(network.parameters(), plain_network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_accelerates_optimizer_is_unwrapped(fused):
    """The cell uses the optimizer inside accelerate's wrapper."""
    _, wrapper, _, cell = prepared_training(Accelerator(cpu=True), fused=fused)

    cell(*labelled_batches(1)[0])

    assert cell.optimizer is wrapper.optimizer
    assert len(wrapper.state_dict()["state"]) == 4


def test_a_prepared_schedule_of_another_optimizer_is_refused():
    """A prepared schedule of another optimizer raises an error."""
    accelerator = Accelerator(cpu=True)
    network = Classifier()
    other = accelerator.prepare(LambdaLR(SGD(Classifier().parameters()), inverse))

    with pytest.raises(ValueError, match="`lr_scheduler` must belong to the cell's optimizer"):
        MFTrainOneStepCell(network, SGD(network.parameters()), lr_scheduler=other)


def test_a_flush_after_a_failed_step_moves_the_schedule():
    """A flush steps the schedule for an applied update even if the step after it raised."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, _, schedule, cell = prepared_training(accelerator, gradient_accumulation_steps=2)
    [batch] = labelled_batches(1)
    cell(*batch)

    with pytest.raises(TypeError):
        cell.step([("no", "batch"), batch])
    cell.flush()

    assert schedule.get_last_lr() == [0.1 / 2]


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (4, 1), (2, 4)])
def test_differing_accumulation_is_refused(theirs, ours):
    """Different ``gradient_accumulation_steps`` raise an error that names both numbers."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=theirs)

    message = f"`gradient_accumulation_steps` must be {theirs}, as in the accelerator, got {ours}"
    with pytest.raises(ValueError, match=message):
        prepared_training(accelerator, gradient_accumulation_steps=ours)


def test_a_differing_reduction_is_refused():
    """The accelerator and the cell must agree on whether each micro-batch is reduced."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    settings = {"gradient_accumulation_steps": 2}

    with pytest.raises(ValueError, match="`sync_each_batch` must be True, as in the accelerator"):
        prepared_training(accelerator, **settings)
    _, _, _, cell = prepared_training(accelerator, sync_each_batch=True, **settings)
    assert cell.config.sync_each_batch


class Watching(TokenClassifier):
    """A network that records ``sync_gradients`` and the activations' dtype at each call."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.synchronized: list[bool] = []
        self.activations: list[torch.dtype] = []
        self.layers[0].register_forward_hook(
            lambda _, __, activations: self.activations.append(activations.dtype)
        )

    def forward(self, *arguments):
        self.synchronized.append(self.accelerator.sync_gradients)
        return super().forward(*arguments)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_gradients_are_said_to_be_synchronized_on_the_last_micro_batch(num_micro_batches):
    """``accelerator.sync_gradients`` is True only on the last micro-batch of a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = Watching(accelerator)
    cell = MFTrainOneStepCell(
        network,
        AdamW(network.parameters()),
        accelerator=accelerator,
        gradient_accumulation_steps=2,
        calculate_per_token_loss=True,
    )

    cell.step(labelled_batches(num_micro_batches))

    assert network.synchronized == [False] * (num_micro_batches - 1) + [True]
    assert accelerator.sync_gradients


@pytest.mark.usefixtures("_one_rank")
def test_a_module_around_a_sharded_network(monkeypatch):
    """With FSDP2, ``accelerator.no_sync`` needs a sharded module, which the loss cell is not."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    monkeypatch.setattr(type(accelerator.state), "is_fsdp2", property(lambda _: True))
    network = torch.nn.Linear(2, 1)
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    optimizer = SGD(network.parameters(), lr=0.1)
    cell = MFTrainOneStepCell(
        WithLossCell(network, torch.nn.MSELoss()),
        optimizer,
        accelerator=accelerator,
        gradient_accumulation_steps=2,
    )

    output = cell(torch.ones(4, 2), torch.ones(4, 1))

    assert output.loss > 0
    assert not output.overflow


def test_the_accelerators_autocast_is_used():
    """The cell runs the forward in the accelerator's autocast, even for an unprepared network."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    network = Watching(accelerator)
    optimizer = AdamW(network.parameters(), fused=True)
    cell = MFTrainOneStepCell(
        network, optimizer, accelerator=accelerator, calculate_per_token_loss=True
    )

    output = cell(*labelled_batches(1)[0])

    assert network.activations == [torch.bfloat16]
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 1e-2)])
def test_a_prepared_language_model_has_its_targets_counted(precision, tolerance):
    """Per-token loss and norm of a prepared Hugging Face model are those of the whole batch."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    network, batch = small_llama(), byte_batch([40, 30, 11, 3])
    expected = network(**batch).loss
    expected.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in network.parameters()])
    network, optimizer = accelerator.prepare(network, AdamW(network.parameters(), fused=True))
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        accelerator=accelerator,
        gradient_accumulation_steps=2,
        calculate_per_token_loss=True,
    )

    output = cell(**batch)

    torch.testing.assert_close(output.loss, expected.detach(), rtol=tolerance, atol=0)
    torch.testing.assert_close(output.global_norm, norm, rtol=tolerance, atol=0)


def grad_scaler(**settings) -> torch.amp.GradScaler:
    """Return a scaler with a non-default value for each setting."""
    return torch.amp.GradScaler(
        "cpu",
        **{
            "init_scale": 2.0**12,
            "growth_factor": 4.0,
            "backoff_factor": 0.125,
            "growth_interval": 2,
        }
        | settings,
    )


def test_accelerates_grad_scaler_is_taken_out():
    """Accelerate's gradient scaler is removed, because it would scale a second time."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = grad_scaler()
    _, optimizer, _, _ = prepared_training(accelerator)

    assert accelerator.scaler is None
    assert optimizer.scaler is None


def test_the_grad_scalers_numbers_are_taken_over():
    """Without `scale_sense`, the cell scales as torch's scaler would."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler, reference = grad_scaler(), grad_scaler()
    _, _, _, cell = prepared_training(accelerator)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = SGD([weight])
    scales, expected = [], []

    initial = cell.scale_sense.item()
    for batch, factor in zip(
        labelled_batches(8), (1.0, 1.0, NAN, 1.0, NAN, 1.0, 1.0, 1.0), strict=True
    ):
        scales.append(cell(*batch, factor).loss_scale.item())
        reference.scale(weight * factor).backward()
        reference.step(optimizer)
        reference.update()
        expected.append(reference.get_scale())
        weight.grad = None

    assert initial == 2.0**12
    assert scales == expected
    assert len(set(scales)) > 3


def test_a_scale_that_the_grad_scaler_has_reached_is_taken_over():
    """The cell starts from the gradient scaler's current scale."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = grad_scaler()
    state = accelerator.scaler.state_dict()
    accelerator.scaler.load_state_dict(state | {"scale": 2.0**7})

    _, _, _, cell = prepared_training(accelerator)

    assert cell.scale_sense.item() == 2.0**7


GIVEN = {
    "one": (1.0, 1.0),
    "an int": (1, 1.0),
    "a number": (32.0, 32.0),
    "a tensor": (torch.tensor(32.0), 32.0),
    "an update cell": (DynamicLossScaleUpdateCell(64.0, 2, 5), 64.0),
}


@pytest.mark.parametrize(("scale_sense", "expected"), GIVEN.values(), ids=GIVEN)
def test_a_scale_that_is_given_stands(scale_sense, expected):
    """A given `scale_sense` replaces the scaler's scale, even a `scale_sense` of 1, the default."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = grad_scaler()

    _, _, _, cell = prepared_training(accelerator, scale_sense=copy.deepcopy(scale_sense))

    assert accelerator.scaler is None
    assert cell.scale_sense.item() == expected
    outputs = [cell(*batch) for batch in labelled_batches(3)]
    assert [output.loss_scale.item() for output in outputs] == [expected] * 3


def test_a_disabled_grad_scaler_has_no_numbers_to_take_over():
    """With a disabled gradient scaler, the loss scale is the default of 1."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = grad_scaler(enabled=False)

    _, _, _, cell = prepared_training(accelerator)

    assert cell.scale_sense.item() == 1.0


def test_fp16_on_a_cpu_has_no_grad_scaler():
    """On a CPU, accelerate makes no gradient scaler: the loss scale is the default of 1."""
    accelerator = new_accelerator("fp16")
    accelerator.scaler = None

    _, _, _, cell = prepared_training(accelerator)

    assert cell.scale_sense.item() == 1.0


def test_a_refused_construction_leaves_the_grad_scaler():
    """A cell that raises at construction does not change the accelerator."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler = grad_scaler()

    with pytest.raises(ValueError, match="`optimizer` must hold parameters of the network"):
        MFTrainOneStepCell(Classifier(), SGD(Classifier().parameters()), accelerator=accelerator)

    assert accelerator.scaler is scaler


def test_a_saved_state_holds_the_schedule_of_the_last_update(tmp_path):
    """A saved state includes the schedule's step for the last update."""
    accelerator = Accelerator(cpu=True)
    _, _, schedule, cell = prepared_training(accelerator)
    accelerator.register_for_checkpointing(cell)
    for batch in labelled_batches(3):
        cell(*batch)
    accelerator.save_state(tmp_path)
    rate = schedule.get_last_lr()
    for batch in labelled_batches(2):
        cell(*batch)
    accelerator.load_state(tmp_path)

    assert schedule.get_last_lr() == rate == [0.1 * inverse(3)]
    assert schedule.state_dict()["last_epoch"] == 3
    assert cell.state_dict()["applied_updates"] == 3


def test_records_are_saved_and_resumed_with_the_cell(tmp_path):
    """``load_state`` cuts off what a monitor has recorded after ``save_state``."""
    accelerator = Accelerator(cpu=True)
    _, _, _, cell = prepared_training(accelerator)
    cell(*labelled_batches(1)[0])
    with records_of_training():
        lines = open_records(tmp_path / "metrics.jsonl", 0)
        lines.append({"step": 1})
        accelerator.save_state(tmp_path / "state")
        lines.append({"step": 2})
        accelerator.load_state(tmp_path / "state")
        # Without the list in the checkpoint, records of steps up to 2 would be kept.
        open_records(tmp_path / "metrics.jsonl", 2).append({"step": 3})

    records = read_json_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 3]


@pytest.mark.parametrize("ends", ["freed", "saved"])
def test_an_accelerator_does_not_keep_the_cell_alive(tmp_path, ends):
    """The accelerator's ``free_memory`` frees cell and network, even after a ``save_state``."""
    accelerator = Accelerator(cpu=True)
    network, optimizer, schedule, cell = prepared_training(accelerator, local_norm=True)
    cell(*labelled_batches(1)[0])
    kept = [weakref.ref(cell), weakref.ref(network)]
    del network, optimizer, schedule, cell
    if ends == "saved":
        # Saving must work after the cell is deleted. The network still exists, because accelerate's
        # lists hold it until `free_memory` empties the lists.
        accelerator.save_state(tmp_path)
    accelerator.free_memory()

    assert [reference() for reference in kept] == [None, None]
