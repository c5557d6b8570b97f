"""`Model` trains like a plain loop of torch, and its manager decides which updates are skipped."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback

import mfwrap
from mfwrap import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
    MFTrainOneStepCell,
    Model,
    TrainOneStepCell,
    WithLossCell,
)
from mfwrap.callbacks import Callback, EMACallback, LossMonitor, MFLossMonitor
from support.host_reads import HostReads
from support.model_runs import Notes, batches, classifier, losses_by_hand, sgd
from support.spoilt.gpt2 import Rows, padded, tiny_gpt2

LOSS = nn.CrossEntropyLoss()


class Factor(LossScaleManager):
    """A manager with the methods that MindSpore's base class asks for, and no update cell."""

    def get_loss_scale(self):
        return 8.0

    def update_loss_scale(self, overflow):
        raise NotImplementedError

    def get_update_cell(self):
        return None


def trained(epochs: int = 1, data=None, **settings):
    """Train a `Model`; return its network, its losses and the model."""
    network = classifier()
    notes = Notes()
    model = Model(network, LOSS, sgd(network), **settings)
    model.train(epochs, batches() if data is None else data, callbacks=notes)
    losses = [getattr(output, "loss", output) for output in notes.outputs]
    return network, losses, model


def reference(epochs: int = 1):
    """Return the network and the losses of a plain loop in torch."""
    network = classifier()
    return network, losses_by_hand(network, sgd(network), batches(), epochs)


def assert_same(ours, theirs, tolerance=1e-6):
    """Assert that the weights of two networks agree up to an absolute `tolerance`."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "manager",
    [
        None,
        FixedLossScaleManager(1024.0),
        FixedLossScaleManager(1024.0, drop_overflow_update=False),
        DynamicLossScaleManager(2**10),
        Factor(),
    ],
    ids=["none", "fixed", "fixed, drops none", "dynamic", "without an update cell"],
)
def test_a_training_is_torchs_own_loop(manager):
    """With any loss scale, losses and weights agree with those of a plain loop in torch."""
    network, losses, _ = trained(2, loss_scale_manager=manager)
    expected, expected_losses = reference(2)

    torch.testing.assert_close(losses, expected_losses)
    assert_same(network, expected)


def test_a_fixed_scale_leaves_the_optimizer_as_it_was():
    """After training with a fixed scale, the optimizer no longer divides gradients by the scale."""
    network = classifier()
    optimizer = sgd(network, momentum=0.0)
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    Model(network, LOSS, optimizer, loss_scale_manager=manager).train(1, batches())
    before = network[0].bias.detach().clone()
    network[0].bias.grad = torch.ones(16)
    optimizer.step()

    torch.testing.assert_close(network[0].bias, before - 0.1)


def with_a_nan() -> list:
    """Return batches; the inputs of the second batch are NaN."""
    data = batches()
    data[1] = (torch.full((8, 8), torch.nan), data[1][1])
    return data


@pytest.mark.parametrize(
    ("manager", "drops"),
    [
        (None, False),
        (FixedLossScaleManager(8.0, drop_overflow_update=False), False),
        (FixedLossScaleManager(8.0), True),
        (DynamicLossScaleManager(8.0), True),
    ],
)
def test_what_is_dropped_is_what_the_manager_says(manager, drops):
    """The manager decides whether a NaN is skipped; without a manager weights become NaN."""
    network, _, _ = trained(1, with_a_nan(), loss_scale_manager=manager)
    finite = all(torch.isfinite(weight).all() for weight in network.parameters())

    assert finite is drops
    if drops:
        expected = classifier()
        data = batches()
        losses_by_hand(expected, sgd(expected), [data[0], data[2]])
        assert_same(network, expected)


def test_a_manager_hears_of_every_step():
    """The manager counts every step, and ends with the same scale as the cell."""
    manager = DynamicLossScaleManager(2.0**10, 2, 2)
    _, _, model = trained(2, with_a_nan(), loss_scale_manager=manager)

    # Each of the two epochs has a finite, a NaN and a finite step. The window is two steps, so the
    # scale is halved at step 2, doubled at step 4 and halved at step 5.
    assert manager.get_loss_scale() == float(model.train_network.scale_sense) == 2.0**9
    assert manager.cur_iter == 7


def test_a_manager_ends_what_only_overflows():
    """More consecutive overflows than the manager allows raise an error."""
    manager = DynamicLossScaleManager(8.0)
    manager.bad_step_max = 2
    nan = [with_a_nan()[1]] * 5

    with pytest.raises(RuntimeError, match=r"^3 updates in a row overflowed, more than 2,"):
        trained(1, nan, loss_scale_manager=manager)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_half_precision_learns_the_same_roughly(level):
    """Half precision trains like float32, up to rounding; weights and losses are float32.

    O2 adds a dynamic loss scale.
    """
    network, losses, model = trained(2, amp_level=level)
    expected, expected_losses = reference(2)

    assert all(weight.dtype == torch.float32 for weight in network.parameters())
    assert all(loss.dtype == torch.float32 for loss in losses)
    assert hasattr(model.train_network, "scale_sense") is (level == "O2")
    if level != "O2":  # The dynamic scale of O2 skips the first updates.
        torch.testing.assert_close(losses, expected_losses, rtol=2e-2, atol=0)
        assert not torch.equal(losses[0], expected_losses[0])
        assert_same(network, expected, 1e-2)


def test_a_cell_is_used_as_it_is():
    """`Model` uses a cell with its network and optimizer, and callbacks get the cell's reports."""
    network = classifier()
    optimizer = sgd(network)
    cell = MFTrainOneStepCell(
        WithLossCell(network, LOSS),
        optimizer,
        use_clip_grad=True,
        max_grad_norm=torch.inf,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0),
    )
    notes = Notes("optimizer")
    seen = []

    class Reports(TrainerCallback):
        def on_step_end(self, *_, step_output, step_report, **__):
            seen.append(step_report.output is step_output)

    Model(cell).train(1, batches(), callbacks=[notes, Reports()])

    assert_same(network, reference()[0])
    assert seen == [True] * 3
    assert set(notes.told) == {(optimizer,)}
    assert notes.outputs[-1] is cell.last_report.output


@pytest.mark.parametrize("manager", [None, DynamicLossScaleManager(8.0)])
def test_the_schedule_is_stepped_once_an_update(manager):
    """The schedule is stepped once per update, also for the last update."""
    network = classifier()
    optimizer = sgd(network, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model = Model(network, LOSS, optimizer, loss_scale_manager=manager, lr_scheduler=schedule)
    model.train(1, batches(2))

    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_schedule_is_due_when_a_callback_raises():
    """If a callback raises, the schedule is still stepped for the applied update."""
    network = classifier()
    optimizer = sgd(network, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    class Raises(Callback):
        def on_train_step_end(self, run_context):
            raise KeyError(run_context.original_args().cur_step_num)

    model = Model(
        network, LOSS, optimizer, None, None, None, "O0", FixedLossScaleManager(),
        lr_scheduler=schedule,
    )  # fmt: skip
    with pytest.raises(KeyError, match="1"):
        model.train(1, batches(), callbacks=Raises())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_network_that_returns_its_loss_takes_named_columns():
    """Without a loss function, named columns become keywords of the network."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier()

        def forward(self, x, labels):
            return {"loss": LOSS(self.inner(x), labels)}

    network = Named()
    model = Model(network, optimizer=sgd(network))
    model.train(1, [{"labels": label, "x": data} for data, label in batches()])

    assert_same(network.inner, reference()[0])


def test_modes_are_train_then_eval_then_as_before():
    """`fit` trains in train mode, evaluates in eval mode, and then sets train mode again."""
    network = nn.Sequential(classifier(), nn.Dropout(0.5))
    network.eval()
    modes = []

    class Modes(Callback):
        def on_train_step_end(self, run_context):
            modes.append(("train", network[1].training))

        def on_eval_step_end(self, run_context):
            modes.append(("eval", network[1].training, torch.is_grad_enabled()))

    model = Model(network, LOSS, sgd(network), metrics={"loss"})
    model.fit(2, batches(1), batches(1), callbacks=Modes())

    assert modes == [("train", True), ("eval", False, False)] * 2
    assert network[1].training


def test_fit_reports_what_eval_returns():
    """The last evaluation in `fit` gives the same metrics as `eval` afterwards."""
    network = classifier()
    notes = Notes("metrics", "eval_results")
    model = Model(network, LOSS, sgd(network), metrics={"Accuracy": "accuracy"})
    model.fit(3, batches(), batches(2), [2, 3], callbacks=notes)
    ends = [told for call, told in zip(notes.calls, notes.told, strict=True)
            if call == "on_train_epoch_end"]  # fmt: skip

    assert ends[0] == (None, None)
    assert ends[1] != ends[2]
    assert ends[2][0] == model.eval(batches(2))
    assert ends[2][1].keys() == {"Accuracy", "eval_loss"}
    with torch.no_grad():
        expected = torch.stack([LOSS(network(data), label) for data, label in batches(2)]).mean()
    assert ends[2][1]["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_predict_is_the_network_in_eval_mode():
    """`predict` runs the network in eval mode without a graph, and restores train mode."""
    network = nn.Sequential(classifier(), nn.Dropout(0.5))
    data = batches(1)[0][0]
    output = Model(network).predict(data)

    torch.testing.assert_close(output, network[0](data).detach(), rtol=0, atol=0)
    assert not output.requires_grad
    assert network.training


def test_an_eval_network_is_called_as_it_is():
    """Metrics get the outputs that `eval_indexes` selects; by default they get all outputs."""

    class Backwards(nn.Module):
        def forward(self, data, label):
            return label, data, (data - label).square().mean()

    data = [(torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))]
    given = {"metrics": {"mae", "loss"}, "eval_network": Backwards()}

    assert Model(classifier(), eval_indexes=[2, 1, 0], **given).eval(data) == {
        "mae": 0.5,
        "loss": 0.5,
    }

    class All:
        def update(self, *outputs):
            self.number = len(outputs)

        def compute(self):
            return self.number

        def reset(self):
            self.number = 0

    model = Model(classifier(), metrics={"all": All()}, eval_network=Backwards())
    assert model.eval(data) == {"all": 3}


def test_a_hugging_face_model_evaluates_itself():
    """The metric ``loss`` uses the loss of a transformers model; missing labels raise an error."""
    network = tiny_gpt2(0.0, 0)
    rows = [padded([Rows()[i] for i in part]) for part in ((0, 1), (2, 3, 4))]
    model = Model(network, metrics={"loss"}, eval_network=network)
    network.eval()
    with torch.no_grad():
        expected = sum(float(network(**row).loss) for row in rows) / 2

    assert model.eval(rows)["loss"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(TypeError, match=r"`eval_network` must return a loss.* without a loss"):
        model.eval([{"input_ids": rows[0]["input_ids"]}])


def test_existing_monitors_work(caplog):
    """`MFLossMonitor` prints each step, and evaluations use the averages of `EMACallback`."""
    network = classifier()
    average = EMACallback(0.0, update_every=3)
    notes = Notes("eval_results")
    model = Model(
        network, LOSS, sgd(network), metrics={"loss"}, loss_scale_manager=FixedLossScaleManager()
    )
    with caplog.at_level("INFO", logger="mfwrap"):
        model.fit(1, batches(4), batches(2), callbacks=[MFLossMonitor(), average, notes])

    records = [line for line in caplog.messages if "step:[" in line]
    assert [line[:36] for line in records] == [
        f"{{ Epoch:[  1/  1], step:[    {step}/    4" for step in range(1, 5)
    ]
    # The average was updated only after the third of four updates, so it differs from the weights.
    raw = model.eval(batches(2))["loss"]
    with average.ema.swap():
        averaged = model.eval(batches(2))["loss"]
    assert notes.told[-1][0]["eval_loss"] == averaged != raw


def test_a_step_reads_nothing_on_the_host():
    """A step with a loss-scale manager and a monitor reads nothing on the host."""
    network = classifier()
    model = Model(network, LOSS, sgd(network), loss_scale_manager=DynamicLossScaleManager(2.0**10))
    reads: list = []
    counter = HostReads()

    class Counted(Callback):
        def on_train_step_begin(self, run_context):
            if run_context.original_args().cur_step_num == 3:
                counter.__enter__()

        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 6:
                counter.__exit__(None, None, None)
                reads.extend(counter.names)

    model.train(1, batches(8), callbacks=[LossMonitor(0), Counted()])
    assert reads == []


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: m.train(0, batches()), ValueError, "`epoch` must be >= 1"),
        (lambda m: m.train(2.0, batches()), TypeError, "`epoch` must be an int"),
        (lambda m: m.train(2, batches(), initial_epoch=2), ValueError, "`initial_epoch`"),
        (lambda m: m.train(1, []), ValueError, "`train_dataset` must yield batches, got none"),
        (lambda m: m.train(1, iter(batches())), TypeError, "`train_dataset` must have a length"),
        (lambda m: m.train(1, 3), TypeError, "`train_dataset` must yield batches"),
        (lambda m: m.train(1, batches(), [3]), TypeError, "`callbacks` must be instances"),
        (lambda m: m.train(1, batches(), [Callback]), TypeError, "`callbacks` must be instances"),
        (
            lambda m: m.train(1, batches(), dataset_sink_mode=True, sink_size=0),
            ValueError,
            "`sink_size` must be -1 or",
        ),
        (
            lambda m: m.train(1, batches(), dataset_sink_mode=False, sink_size=2),
            ValueError,
            "`sink_size` must be -1 wi",
        ),
        (lambda m: m.train(1, batches(), None, 1), TypeError, "`dataset_sink_mode` must be a bool"),
        (lambda m: m.train(1, [(1, 2, 3)]), ValueError, "`train_dataset` must have two columns"),
        (lambda m: m.fit(1, batches(), batches(), 0), ValueError, "`valid_frequency` must be >= 1"),
        (lambda m: m.eval([]), ValueError, "`valid_dataset` must yield batches, got none"),
    ],
)
def test_bad_calls_are_refused_by_name(call, error, match):
    """The error names the argument, and the weights are unchanged."""
    network = classifier()
    model = Model(network, LOSS, sgd(network), metrics={"loss"})

    with pytest.raises(error, match=match):
        call(model)
    assert_same(network, classifier(), 0)


def cell_of(network):
    """Return the one-step cell of a network with a loss."""
    return TrainOneStepCell(WithLossCell(network, LOSS), sgd(network))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda _: Model(3), TypeError, "`network` must be"),
        (lambda n: Model(n, 3), TypeError, "`loss_fn` must be callable"),
        (lambda n: Model(n, LOSS, 3), TypeError, "`optimizer` must be"),
        (lambda n: Model(n, LOSS, sgd(n), amp_level="O4"), ValueError, "`amp_level` must be one"),
        (lambda n: Model(n, LOSS, sgd(n), "loss"), TypeError, "`metrics` must be a set of"),
        (lambda n: Model(n, LOSS, sgd(n), {"bleu"}), ValueError, "`metrics` must have names among"),
        (lambda n: Model(n, LOSS, sgd(n), {"x": 3}), TypeError, "a metric must have update"),
        (lambda n: Model(n, LOSS, eval_indexes=[0, 1, 2]), ValueError, "`eval_indexes` needs"),
        (lambda n: Model(n, LOSS, None, None, 3), TypeError, "`eval_network` must be"),
        (lambda n: Model(n, LOSS, None, None, n, [0]), ValueError, "`eval_indexes` must be three"),
        (lambda n: Model(n, loss_scale_manager=FixedLossScaleManager()), ValueError, "`optimizer`"),
        (lambda n: Model(n, LOSS, sgd(n), loss_scale_manager=8), TypeError, "LossScaleManager or"),
        (lambda n: Model(cell_of(n), LOSS), ValueError, "`loss_fn` must be left out"),
        (lambda n: Model(cell_of(n), amp_level="O1"), ValueError, "`amp_level` must be left out"),
        (lambda n: Model(n, LOSS).train(1, batches()), RuntimeError, "`optimizer` must be given"),
        (lambda n: Model(n, LOSS).eval(batches()), ValueError, "`metrics` must be given"),
        (lambda n: Model(n, metrics={"loss"}).eval(batches()), ValueError, "`loss_fn` or `eval_ne"),
    ],
)
def test_bad_models_are_refused_by_name(make, error, match):
    """The error names the argument, and is raised at construction if possible."""
    with pytest.raises(error, match=match):
        make(classifier())


def test_an_accelerator_with_a_precision_is_refused():
    """An Accelerator with mixed precision raises: only `amp_level` may set the precision."""
    Accelerator(cpu=True, mixed_precision="bf16")

    with pytest.raises(ValueError, match="`Model` needs an Accelerator without mixed precision"):
        Model(classifier())


def test_model_is_a_name_of_the_package():
    """`mfwrap.Model` is imported on first use, and an unknown name raises AttributeError."""
    assert mfwrap.Model is Model
    with pytest.raises(AttributeError, match="Modell"):
        _ = mfwrap.Modell
