"""Run a random training with the cell, in one process or as one of several ranks."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import MFTrainOneStepCell
from support.random_training.cases import Case, new_network, new_optimizer, rate_factor
from support.random_training.checks import Observed, average_of, observed, scale_of

__all__ = ["train_cell", "train_cells_on_rank"]


def train_cell(case: Case, rank: int = 0) -> list[Observed]:
    """Train a case; with several ranks, call this function on each of them."""
    network = new_network(case)
    average = average_of(case, network)
    optimizer = new_optimizer(case, network)
    module: Any = network
    if case.num_ranks > 1:
        module = DistributedDataParallel(network, find_unused_parameters="unused" in case.blocks)
    cell = MFTrainOneStepCell(
        module,
        optimizer,
        use_clip_grad=case.max_norm is not None,
        max_grad_norm=case.max_norm or 1.0,
        scale_sense=scale_of(case),
        local_norm=True,
        lr_scheduler=LambdaLR(optimizer, rate_factor),
        ema=average,
        calculate_per_token_loss=case.per_token,
        use_skip_data_by_global_norm=case.threshold is not None,
        global_norm_spike_threshold=case.threshold or 1.0,
        local_norm_groups=case.groups,
    )
    updates = []
    for update in range(case.num_updates):
        cell.step([tuple(batch) for batch in case.micro_batches(update, rank)])
        updates.append(observed(cell.last_report, network, average))
    return updates


def train_cells_on_rank(rank: int, plain_cases: list[dict[str, Any]]) -> list[Any]:
    """Train cases as one of the ranks; return the updates of each case."""
    return [[tuple(update) for update in train_cell(Case.of(plain), rank)] for plain in plain_cases]
