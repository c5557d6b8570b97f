"""Check and watch the ranks that update the models of a loop together."""

import contextlib
import functools
from collections.abc import Sequence
from typing import final

from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from mfwrap.accelerate.setup import named_parameters_of
from mfwrap.compatibility.accelerate import data_loaders_of, models_of, optimizers_of
from mfwrap.config import StepConfig
from mfwrap.preflight import Facts, num_batches, step_facts
from mfwrap.step.fsdp import ShardedParts
from mfwrap.step.rank_guard import LoneGuard, RankGuard, rank_guard
from mfwrap.tensors.wrappers import unwrapped_optimizer


@final
class LoopRanks:
    """Check the ranks before the first update of a loop, and watch them in every update.

    Args:
        accelerator: Accelerator of the loop.
        parts: List of the prepared models' DistributedDataParallel modules. The caller appends to
            this list when it prepares another model.
        config: Settings of the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parts: Sequence[DistributedDataParallel],
        config: StepConfig,
    ) -> None:
        self._accelerator = accelerator
        self._parts = parts
        self._config = config
        self.are_checked = False
        """Whether the ranks have been compared already, as `MFTrainer` does."""

    def updating(self, *, ends: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for an update or a part of it; see `RankGuard.updating`."""
        return contextlib.nullcontext() if self._guard is None else self._guard.updating(ends=ends)

    @functools.cached_property
    def _guard(self) -> RankGuard | LoneGuard | None:
        # The first update reads this property, when all models are prepared.
        models = models_of(self._accelerator)
        sharded = ShardedParts(*models)
        # A loop may draw as many batches as it likes, so their numbers may differ.
        trained = {
            f"optimizer_{index}.{name}": parameter
            for index, optimizer in enumerate(optimizers_of(self._accelerator))
            for name, parameter in named_parameters_of(optimizer.optimizer, models)[0].items()
        }
        guard = rank_guard(trained, self._parts, sharded, self._facts, warned=["data"])
        if guard is not None:
            guard.is_checked = self.are_checked
        return guard

    def _facts(self) -> Facts:
        accelerator = self._accelerator
        optimizers = [unwrapped_optimizer(each) for each in optimizers_of(accelerator)]
        lengths = {
            f"number of batches of data loader {index}": str(num_batches(each))
            for index, each in enumerate(data_loaders_of(accelerator))
        }
        return step_facts(models_of(accelerator), optimizers, self._config) | {"data": lengths}
