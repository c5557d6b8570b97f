"""Refuse optimizers that change the weights during backward.

LOMO and the layer-wise GaLore and APOLLO save memory: a hook updates each weight as soon as its
gradient is complete, and releases the gradient. So there is never a moment at which all gradients
exist and no weight has changed. The step needs this moment: the overflow flag and the global norm
depend on all gradients, and decide whether and by how much every weight changes.
"""

from torch.optim import Optimizer

from mfwrap.compatibility.torch import optimizers_in_backward
from mfwrap.optimizers.chained import ChainedOptimizer
from mfwrap.tensors.wrappers import is_instance_of

_CLASSES = (
    ("lomo_optim", "Lomo"),
    ("lomo_optim", "AdaLomo"),
    ("transformers.trainer_pt_utils", "LayerWiseDummyOptimizer"),
)
"""Modules and names of optimizers whose weights change during backward."""


def refuse_update_in_backward(optimizer: Optimizer) -> None:
    """Raise an error if an optimizer changes its weights during backward.

    Raises:
        TypeError: If `optimizer` is LOMO, AdaLomo or transformers' stand-in for layer-wise
            optimizers, or if torch's ``_apply_optimizer_in_backward`` was called for one of its
            parameters.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.optimizers:
            refuse_update_in_backward(part)
        return
    name = type(optimizer).__name__
    if not any(is_instance_of(optimizer, *names) for names in _CLASSES):
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        # torch sets this attribute on the parameters that it updates during backward.
        inner = next(filter(None, map(optimizers_in_backward, held)), None)
        if inner is None:
            return
        name = f"{name} with parameters of an in-backward {type(inner[0]).__name__}"
    msg = (
        f"`optimizer` must change its weights after backward, got {name}, which changes them "
        "during backward, before the step can know of an overflow"
    )
    raise TypeError(msg)
