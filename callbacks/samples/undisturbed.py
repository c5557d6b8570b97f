"""Call a network between two steps of its training, and leave no trace in the training."""

import contextlib
import sys
from collections.abc import Iterator

import torch
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn

from mfwrap.callbacks.culprit.replay.replay import Buffers
from mfwrap.checkpoints.random_states import HostStates
from mfwrap.compatibility.accelerate import computes_in_autocast
from mfwrap.tensors.training_forwards import replay
from mfwrap.tensors.wrappers import reshard


@contextlib.contextmanager
def undisturbed(network: nn.Module) -> Iterator[None]:
    """Call a network within the block as an evaluation does; then restore all that has changed.

    Inside, the network is in evaluation mode, without gradients, and in the autocast that
    accelerate has put around its forward pass. Afterwards the random number generators of Python,
    NumPy, the CPU and the accelerators, the network's buffers and the mode of each of its modules
    are bitwise as before. What watches the forward passes of the training ignores the calls. What
    ``torch.compile`` has compiled is neither used nor compiled again.

    Args:
        network: The network, without DistributedDataParallel.
    """
    modes = [(module, module.training) for module in network.modules()]
    host, buffers = HostStates.now(), Buffers(network)
    try:
        with _forked_devices(), torch.no_grad(), replay(), _precision(network), _uncompiled():
            network.eval()
            yield
    finally:
        # Some modules do more than to set the mode: they merge adapters in `eval`, for example.
        network.train(mode=modes[0][1])
        for module, mode in modes:
            module.training = mode
        reshard(network)
        buffers.restore()
        host.restore()


def _forked_devices() -> contextlib.AbstractContextManager[None]:
    """Keep the states of the generators of all accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return contextlib.nullcontext()
    devices = [*range(torch.accelerator.device_count())]
    return torch.random.fork_rng(devices, device_type=accelerator.type)


def _precision(network: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return the autocast of the network's forward pass.

    The method ``generate`` of an adapter calls the network inside, past the forward pass that
    accelerate has wrapped.
    """
    if not computes_in_autocast(network):
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = get_mixed_precision_context_manager(
        native_amp=True
    )
    return found


def _uncompiled() -> contextlib.AbstractContextManager[None]:
    # Many shapes of inputs would be compiled, and torch then gives up to compile the training.
    # Without the import there is nothing compiled, and the import is slow.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
