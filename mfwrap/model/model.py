"""MindSpore's `Model`: a training loop over a training cell, with callbacks of both kinds."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.arguments import check_int, described
from mfwrap.mindspore.managers import LossScaleManager
from mfwrap.model.callback import Callback, CallbackParameters, RunContext
from mfwrap.model.callback_adapter import as_trainer_callback
from mfwrap.model.data import Batches, check_sink_size, pair_of
from mfwrap.model.evaluation import Evaluation, Evaluator, evaluating
from mfwrap.model.run import ModelCallback, ModelRun, Updates, checked_callbacks, refuse_older_hooks
from mfwrap.model.train_network import (
    AmpLevel,
    AutocastNetwork,
    TrainingCell,
    build_train_network,
    plain_accelerator,
)
from mfwrap.outputs import named_output
from mfwrap.step.update import Schedule

__all__ = [
    "Callback",
    "CallbackParameters",
    "Model",
    "RunContext",
    "as_trainer_callback",
    "named_output",
]


class Validation(NamedTuple):
    """An evaluation and the epochs that end with it."""

    evaluation: Evaluation
    frequency: int | Sequence[int]
    """Epochs from one to the next, or the numbers of epochs, from 1."""

    def is_due(self, epoch: int) -> bool:
        """Return whether an epoch, which has a number from 1, ends with it."""
        if isinstance(self.frequency, int):
            return epoch % self.frequency == 0
        return epoch in self.frequency


def train(
    run: ModelRun,
    updates: Updates,
    batches: Batches,
    validation: Validation | None,
    epochs: range,
    *,
    takes_pairs: bool,
) -> None:
    """Train until the epochs are done or a callback asks for the end.

    An epoch that is broken off ends all the same, with the evaluation that is due.

    Args:
        run: Is told of everything.
        updates: Does one update.
        batches: The data.
        validation: ``None`` for none.
        epochs: Numbers of the epochs, from 1.
        takes_pairs: A batch must have two columns.
    """
    with updates, run:
        run.begin()
        for epoch in epochs:
            run.begin_epoch(epoch)
            for batch in batches.epoch():
                call = pair_of("train_dataset", batch) if takes_pairs else batch
                run.begin_step()
                run.end_step(updates(call))
                if run.epoch_stops:
                    break
            updates.flush()
            evaluates = validation is not None and validation.is_due(epoch)
            run.end_epoch(evaluates=evaluates)
            if validation is not None and evaluates:
                run.evaluated(*validation.evaluation.run(run.mindspore_callbacks))
            if run.stops:
                break
        run.end()


def check_epochs(epoch: int, initial_epoch: int) -> None:
    """Check the number of epochs, and of those that are done.

    Raises:
        TypeError: If one is not an int.
        ValueError: If `epoch` is below 1, or `initial_epoch` not in ``[0, epoch)``.
    """
    check_int("epoch", epoch)
    if isinstance(initial_epoch, bool) or not isinstance(initial_epoch, int):
        msg = f"`initial_epoch` must be an int, got {described(initial_epoch)}"
        raise TypeError(msg)
    if not 0 <= initial_epoch < epoch:
        msg = f"`initial_epoch` must be in [0, {epoch}), got {initial_epoch}"
        raise ValueError(msg)


def checked_frequency(frequency: object) -> int | Sequence[int]:
    """Return how often an evaluation is due, if that can be.

    Raises:
        TypeError: If it is neither an int nor a list of them.
        ValueError: If one is below 1.
    """
    if isinstance(frequency, (list, tuple)):
        return [check_int("valid_frequency", number) for number in frequency]
    return check_int("valid_frequency", frequency)


@final
class Model:
    """Trains and evaluates a network.

    The network and every batch are moved to accelerate's device; started by ``accelerate launch``,
    ranks share the data and average their gradients. ``Accelerator(cpu=True)``, made before,
    keeps all of it on the CPU. Training puts the network into train mode, evaluation into eval
    mode and back.

    Source: MindSpore, ``train.Model``; `lr_scheduler` is ours, because torch's optimizers take no
    schedule for a rate.

    Args:
        network: Called with the first of two columns if `loss_fn` is given; otherwise with all
            columns, or with named ones, and returns the loss. Or a training cell with network and
            optimizer in it (`MFTrainOneStepCell`), which is used as it is; batches follow its
            network's device.
        loss_fn: Called with the network's output and the second column.
        optimizer: Of the network's parameters; ``None`` to evaluate and predict alone.
        metrics: A set of MindSpore's names, or a dict of them or of objects with ``update``,
            ``compute`` and ``reset``, such as torchmetrics'; see
            `mfwrap.model.metrics.named_metrics`.
        eval_network: Called with all columns for an evaluation; by default the network with
            `loss_fn`.
        eval_indexes: Which outputs of `eval_network` are loss, output and label; ``None`` gives
            each metric all of them, and the metric ``"loss"`` the loss that is in the output, as a
            Hugging Face model's is.
        amp_level: How precisions are mixed; see `mfwrap.model.train_network.precision_of`.
        loss_scale_manager: The loss scale; ``None`` for none, where an update that overflows is
            applied. A `FixedLossScaleManager` that drops none needs no optimizer with a
            ``loss_scale``: gradients are divided before the optimizer runs.
        lr_scheduler: Stepped once per applied update.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or two do not go together.

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
        """What an evaluation calls; ``None`` without a loss function."""
        return self._evaluator.network

    @property
    def predict_network(self) -> nn.Module:
        """What `predict` calls."""
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
            train_dataset: Yields batches: a tuple or list of columns, or a mapping of them. On
                several ranks a ``DataLoader`` is divided among them.
            callbacks: Of MindSpore's kind (`Callback`) and of transformers', in any order. The
                latter get ``step_output`` and ``step_report`` in ``on_step_end``; of their
                ``control``, ``should_training_stop`` and ``should_epoch_stop`` are heeded; a wish
                to save or to evaluate is told in a warning.
            dataset_sink_mode: Copy batches to the device without waiting for them. (Callbacks are
                called at each step all the same.)
            sink_size: With `dataset_sink_mode` the batches of an epoch, each going on where the
                last has ended; -1 for one pass over the dataset.
            initial_epoch: Epochs done before.

        Raises:
            RuntimeError: If the model has no optimizer.
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, or the dataset is empty or has not two
                columns where there is a loss function.
        """
        checked = checked_callbacks(callbacks)
        self._train(
            epoch,
            train_dataset,
            checked,
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
            valid_dataset: As in `eval`; ``None`` to evaluate nothing.
            valid_frequency: Epochs from one evaluation to the next, or the numbers of the epochs,
                from 1, that end with one.
            callbacks: As in `train`; metrics are there in ``on_train_epoch_end``, and in
                transformers' ``on_evaluate`` as ``eval_<name>``. ``eval_loss`` is always among
                them.
            dataset_sink_mode: As in `train`.
            valid_dataset_sink_mode: As in `eval`.
            sink_size: As in `train`.
            initial_epoch: As in `train`.

        Raises:
            RuntimeError: As in `train`.
            TypeError: As in `train`.
            ValueError: As in `train`, if the model has no metrics, or a callback has only the older
                names of methods.
        """
        checked = checked_callbacks(callbacks)
        refuse_older_hooks(checked)
        frequency = checked_frequency(valid_frequency)
        validation = None
        if valid_dataset is not None:
            evaluation = self._evaluator.evaluation(
                valid_dataset, sink_mode=valid_dataset_sink_mode, facts=self._facts()
            )
            validation = Validation(evaluation, frequency)
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
            callbacks: Those of MindSpore's kind get the ``on_eval_*`` calls.
            dataset_sink_mode: Copy batches to the device without waiting for them.

        Returns:
            Metrics by name, numbers and lists.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If the model has no metrics or nothing to evaluate, or the dataset is empty
                or has not two columns where there is a loss function.
        """
        checked = checked_callbacks(callbacks)
        evaluation = self._evaluator.evaluation(
            valid_dataset, sink_mode=dataset_sink_mode, facts=self._facts()
        )
        heard = [callback for callback in checked if isinstance(callback, Callback)]
        with contextlib.ExitStack() as entered:
            for callback in heard:
                entered.enter_context(callback)
            return evaluation.run(heard).metrics

    def predict(self, *predict_data: Any) -> Any:
        """Return what the network returns for inputs, in eval mode and without gradients.

        Args:
            predict_data: The network's arguments, moved to its device.
        """
        with evaluating(self._predict_network):
            return self._predict_network(*send_to_device(predict_data, self._trained.device))

    def _train(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        callbacks: list[ModelCallback],
        validation: Validation | None,
        *,
        sink_mode: bool,
        sink_size: int,
        initial_epoch: int,
    ) -> None:
        check_epochs(epoch, initial_epoch)
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
            facts=self._facts() | {"dataset_sink_mode": sink_mode},
        )
        self._trained.network.train()
        epochs = range(initial_epoch + 1, epoch + 1)
        train(run, updates, batches, validation, epochs, takes_pairs=self._loss_fn is not None)

    def _facts(self) -> dict[str, Any]:
        return {
            "loss_fn": self._trained.loss_fn,
            "loss_scale_manager": self._trained.manager,
            "lr_scheduler": getattr(self._trained.cell, "lr_scheduler", None),
        }
