"""MindSpore's `Model`: a training loop with MindSpore's and transformers' callbacks."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_int
from mfwrap.mindspore.callback import Callback, explaining_attributes
from mfwrap.mindspore.data import Batches, check_sink_size, pair_of
from mfwrap.mindspore.evaluation import Evaluator, evaluating
from mfwrap.mindspore.managers import LossScaleManager
from mfwrap.mindspore.run import (
    ModelCallback,
    ModelRun,
    Updates,
    checked_callbacks,
    refuse_older_hooks,
)
from mfwrap.mindspore.train_network import (
    AmpLevel,
    AutocastNetwork,
    TrainingCell,
    build_train_network,
    plain_accelerator,
)
from mfwrap.step.schedules import Schedule


@final
class Model:
    """Train and evaluate a network, with the interface of MindSpore's ``Model``.

    The network and every batch are moved to accelerate's device. Under ``accelerate launch``, the
    ranks share the data and average their gradients. Create ``Accelerator(cpu=True)`` before the
    model to stay on the CPU. Training puts the network into train mode. Evaluation puts it into
    eval mode, and restores the previous mode at its end.

    Source: MindSpore, ``train.Model``. `lr_scheduler` is an addition: MindSpore's optimizers take a
    schedule as their learning rate, torch's do not.

    Args:
        network: Network, or a training cell such as `MFTrainOneStepCell`. With `loss_fn`, the
            network is called with the first of the two columns of a batch. Without `loss_fn`, it is
            called with all columns (by keyword if the batch is a mapping) and returns the loss. A
            training cell is used with its own network and optimizer; batches are moved to the
            device of its parameters.
        loss_fn: Called with the network's output and the second column of the batch; returns the
            loss.
        optimizer: Optimizer of the network's parameters; ``None`` to evaluate and predict only.
        metrics: Metrics of an evaluation: a set of MindSpore's names, or a dict from your names to
            MindSpore's names or to metric objects, for example of torchmetrics; see
            `mfwrap.mindspore.metrics.named_metrics`.
        eval_network: Called with all columns of a batch in an evaluation; by default the network
            with `loss_fn`.
        eval_indexes: Positions of loss, output and label in the outputs of `eval_network`. With
            ``None``, each metric gets all outputs. If there is a single output, the metric
            ``"loss"`` takes the loss from this output: the output itself if it is a tensor,
            otherwise its attribute or key ``loss`` (as in a Hugging Face model).
        amp_level: Mixed precision; see `mfwrap.mindspore.train_network.precision_of`.
        loss_scale_manager: The loss scale. ``None`` uses the default of `amp_level`. If this
            default is no loss scale, every update is applied even if it overflows. A
            `FixedLossScaleManager` with ``drop_overflow_update=False`` also applies every update,
            and gradients are divided by the loss scale before the optimizer runs. (In MindSpore,
            optimizers with an argument ``loss_scale`` do this division.)
        lr_scheduler: Learning-rate schedule, stepped once per applied update.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or two arguments exclude each other.

    Example:
        >>> import torch
        >>> network = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> model = Model(network, nn.MSELoss(), optimizer, metrics={"loss"})
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 8
        >>> model.train(3, data)
        >>> model.eval(data)["loss"] < 1e-3
        True
    """

    def __init__(  # noqa: PLR0917  (MindSpore's signature)
        self,
        network: nn.Module | TrainingCell,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Optimizer | None = None,
        metrics: Mapping[str, Any] | Collection[str] | None = None,
        eval_network: nn.Module | None = None,
        eval_indexes: Sequence[int] | None = None,
        amp_level: AmpLevel = "O0",
        loss_scale_manager: LossScaleManager | None = None,
        *,
        lr_scheduler: Schedule | None = None,
    ) -> None:
        self._accelerator = plain_accelerator()
        self._loss_fn = loss_fn
        self._trained = trained = build_train_network(
            network,
            optimizer,
            loss_fn,
            amp_level=amp_level,
            loss_scale_manager=loss_scale_manager,
            lr_scheduler=lr_scheduler,
            accelerator=self._accelerator,
        )
        self._evaluator = Evaluator(
            trained,
            loss_fn=loss_fn,
            metrics=metrics,
            eval_network=eval_network,
            eval_indexes=eval_indexes,
            accelerator=self._accelerator,
        )
        self._predict_network = AutocastNetwork(trained.network, trained.precision.dtype)

    @property
    def train_network(self) -> TrainingCell | None:
        """The training cell; ``None`` without an optimizer."""
        return self._trained.cell

    @property
    def eval_network(self) -> nn.Module | None:
        """The network that an evaluation calls; ``None`` without `loss_fn` and `eval_network`."""
        return self._evaluator.network

    @property
    def predict_network(self) -> nn.Module:
        """The network that `predict` calls."""
        return self._predict_network

    def train(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        callbacks: ModelCallback | Sequence[ModelCallback] | None = None,
        dataset_sink_mode: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train the network.

        Args:
            epoch: Number of the last epoch.
            train_dataset: Yields batches: tuples or lists of columns, or mappings of named columns.
                On several ranks a ``DataLoader`` is divided among the ranks.
            callbacks: MindSpore's callbacks (`Callback`) and transformers' callbacks, in any order.
                transformers' callbacks get ``step_output`` and ``step_report`` in ``on_step_end``.
                They can set ``should_training_stop`` and ``should_epoch_stop`` in their
                ``control``; ``should_save`` and ``should_evaluate`` are ignored with a warning.
            dataset_sink_mode: Copy batches to the device without synchronizing. (Callbacks are
                still called at each step.)
            sink_size: Batches per epoch with `dataset_sink_mode`; each epoch continues where the
                previous one ended. -1 for one pass over the dataset per epoch.
            initial_epoch: Number of epochs that are already done.

        Raises:
            RuntimeError: If the model has no optimizer.
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, the dataset is empty, or a batch does not
                have two columns although there is a loss function.
        """
        self._train(
            epoch,
            train_dataset,
            checked_callbacks(callbacks),
            None,
            sink_mode=dataset_sink_mode,
            sink_size=sink_size,
            initial_epoch=initial_epoch,
        )

    def fit(  # noqa: PLR0917  (MindSpore's signature)
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        valid_dataset: Iterable[Any] | None = None,
        valid_frequency: int | Sequence[int] = 1,
        callbacks: ModelCallback | Sequence[ModelCallback] | None = None,
        dataset_sink_mode: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        valid_dataset_sink_mode: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train the network, and evaluate it at the end of epochs.

        Args:
            epoch: As in `train`.
            train_dataset: As in `train`.
            valid_dataset: As in `eval`; ``None`` for no evaluation.
            valid_frequency: Number of epochs between evaluations, or a list of the epochs (from 1)
                that end with an evaluation.
            callbacks: As in `train`. MindSpore's callbacks find the metrics in
                ``on_train_epoch_end``, as ``metrics`` of the run's facts. transformers' callbacks
                get them in ``on_evaluate``, named ``eval_<name>``. ``eval_loss`` is added if the
                position of the loss is known: without `eval_network`, or with `eval_indexes`.
            dataset_sink_mode: As in `train`.
            valid_dataset_sink_mode: As `dataset_sink_mode` in `eval`.
            sink_size: As in `train`.
            initial_epoch: As in `train`.

        Raises:
            RuntimeError: As in `train`.
            TypeError: As in `train`.
            ValueError: As in `train`; also if the model has no metrics, or a callback overrides
                methods with the older names.
        """
        checked = checked_callbacks(callbacks)
        refuse_older_hooks(checked)
        frequency = _checked_frequency(valid_frequency)
        validation = None
        if valid_dataset is not None:
            batches = self._evaluator.batches(valid_dataset, sink_mode=valid_dataset_sink_mode)
            validation = _Validation(batches, frequency)
        self._train(
            epoch,
            train_dataset,
            checked,
            validation,
            sink_mode=dataset_sink_mode,
            sink_size=sink_size,
            initial_epoch=initial_epoch,
        )

    def eval(
        self,
        valid_dataset: Iterable[Any],
        callbacks: ModelCallback | Sequence[ModelCallback] | None = None,
        dataset_sink_mode: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
    ) -> dict[str, Any]:
        """Evaluate the network.

        Args:
            valid_dataset: Yields batches, as in `train`.
            callbacks: MindSpore's callbacks, which get the ``on_eval_*`` calls. transformers'
                callbacks are ignored.
            dataset_sink_mode: Copy batches to the device without synchronizing.

        Returns:
            Metrics by name, as numbers and lists.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the model has no metrics or no network to evaluate, the dataset is empty,
                or a batch does not have two columns although there is a loss function.
        """
        checked = checked_callbacks(callbacks)
        batches = self._evaluator.batches(valid_dataset, sink_mode=dataset_sink_mode)
        mindspore_callbacks = [each for each in checked if isinstance(each, Callback)]
        with contextlib.ExitStack() as entered:
            for callback in mindspore_callbacks:
                entered.enter_context(callback)
            return self._evaluator.run(batches, mindspore_callbacks, self._facts()).metrics

    def predict(self, *predict_data: Any) -> Any:
        """Call the network in eval mode and without gradients, and return its output.

        Args:
            predict_data: Arguments of the network; moved to its device.
        """
        with evaluating(self._predict_network):
            return self._predict_network(*send_to_device(predict_data, self._trained.device))

    def _train(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        callbacks: list[ModelCallback],
        validation: "_Validation | None",
        *,
        sink_mode: bool,
        sink_size: int,
        initial_epoch: int,
    ) -> None:
        _check_epochs(epoch, initial_epoch)
        check_sink_size(sink_size, sink_mode=sink_mode)
        updates = Updates(self._trained)
        batches = Batches(
            "train_dataset",
            train_dataset,
            self._accelerator,
            self._trained.device,
            sink_mode=sink_mode,
            sink_size=sink_size,
        )
        run = ModelRun(
            callbacks,
            self._trained,
            batches,
            self._accelerator,
            epoch=epoch,
            initial_epoch=initial_epoch,
            facts=self._facts()
            | {
                "dataset_sink_mode": sink_mode,
                "sink_size": sink_size,
                "eval_network": self._evaluator.network,
            },
        )
        self._trained.network.train()
        with updates.running(), run.running():
            run.send("on_train_begin")
            for number in range(initial_epoch + 1, epoch + 1):
                self._train_epoch(number, run, updates, batches, validation)
                if run.stops:
                    break
            run.send("on_train_end")

    def _train_epoch(
        self,
        number: int,
        run: ModelRun,
        updates: Updates,
        batches: Batches,
        validation: "_Validation | None",
    ) -> None:
        """Train until the epoch ends or a callback stops it; then run the evaluation if due."""
        run.begin_epoch(number)
        for batch in batches.epoch():
            call = batch if self._loss_fn is None else pair_of("train_dataset", batch)
            run.begin_step()
            with explaining_attributes(run.parameters):
                outputs = updates(call)
            run.end_step(outputs)
            if run.epoch_stops:
                break
        updates.flush()
        evaluates = validation is not None and validation.is_due(number)
        run.end_epoch(evaluates=evaluates)
        if validation is not None and evaluates:
            callbacks = run.mindspore_callbacks
            run.evaluated(*self._evaluator.run(validation.batches, callbacks, self._facts()))

    def _facts(self) -> dict[str, Any]:
        return {
            "loss_fn": self._trained.loss_fn,
            "loss_scale_manager": self._trained.manager,
            "lr_scheduler": getattr(self._trained.cell, "lr_scheduler", None),
        }


class _Validation(NamedTuple):
    batches: Batches
    """Batches to evaluate."""

    frequency: int | Sequence[int]
    """Number of epochs between evaluations, or the epochs (from 1) that end with an evaluation."""

    def is_due(self, epoch: int) -> bool:
        """Return whether an epoch, counted from 1, ends with an evaluation."""
        if isinstance(self.frequency, int):
            return epoch % self.frequency == 0
        return epoch in self.frequency


def _check_epochs(epoch: int, initial_epoch: int) -> None:
    check_int("epoch", epoch)
    if not check_int("initial_epoch", initial_epoch, minimum=0) < epoch:
        msg = f"`initial_epoch` must be in [0, {epoch}), got {initial_epoch}"
        raise ValueError(msg)


def _checked_frequency(frequency: object) -> int | Sequence[int]:
    if isinstance(frequency, (list, tuple)):
        return [check_int("valid_frequency", number) for number in frequency]
    return check_int("valid_frequency", frequency)
