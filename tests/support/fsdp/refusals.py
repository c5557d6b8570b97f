"""Program that each rank runs to provoke the errors of a step with sharded parameters."""

from collections.abc import Callable
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.fsdp.incidents import new_cell
from support.fsdp.networks import Case, micro_batches_of, new_model, sharded

__all__ = ["be_refused"]
from mfwrap.compatibility.fully_shard import groups_of


def be_refused(rank: int) -> dict[str, str]:
    """Use the step in ways that it does not support, and return the error message of each."""
    [batch] = micro_batches_of(Case(), 0, rank)
    world = distributed.get_world_size()

    def reduced_twice(*, discarded: bool) -> None:
        network = sharded(new_model(per_token=False), Case())
        cell = new_cell(network, "fused SGD", local_norm=True)
        for _ in range(2):
            network(*batch).backward()
        if discarded:
            # A step releases the present gradients before its own backward.
            cell(*batch)
        else:
            cell._MFTrainOneStepCell__update.measure()

    def around_the_seam() -> None:
        network = sharded(new_model(per_token=False), Case())
        cell = new_cell(network, "fused SGD", local_norm=True)
        for part in network.modules():
            if hasattr(part, "_get_fsdp_state"):
                for each in groups_of(part):
                    vars(each.group).pop("post_backward", None)
        cell(*batch)

    def placed_by_hand(**settings: Any) -> None:
        network = new_model(per_token=bool(settings.get("calculate_per_token_loss")))
        mesh = init_device_mesh("cpu", (world,))
        weight = network.get_parameter(
            "first.weight" if settings.get("calculate_per_token_loss") else "model.first.weight"
        )
        layer = network.first if hasattr(network, "first") else network.model.first
        layer.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        new_cell(network, "fused SGD", **settings)

    def divided_unevenly() -> None:
        network = sharded(new_model(per_token=True), Case(per_token=True))
        network.last.set_gradient_divide_factor(3.0)
        new_cell(network, "fused SGD", calculate_per_token_loss=True)

    return {
        "reduced twice": _message(lambda: reduced_twice(discarded=False)),
        "reduced twice, then discarded": _message(lambda: reduced_twice(discarded=True)),
        "around the seam": _message(around_the_seam),
        "local norm by hand": _message(lambda: placed_by_hand(local_norm=True)),
        "per token by hand": _message(lambda: placed_by_hand(calculate_per_token_loss=True)),
        "divided unevenly": _message(divided_unevenly),
    }


def _message(call: Callable[[], None]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
