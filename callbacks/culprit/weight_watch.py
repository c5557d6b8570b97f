"""Which weights are not what they were."""

import math
from typing import final

from torch import Tensor, nn

from mfwrap.callbacks.culprit.anomaly_log import WeightNorm
from mfwrap.tensors.wrappers import tensor_norms, trainable

__all__ = ["WeightWatch"]

_MOST_RISE = 4.0
"""A norm that has risen by more since it was last looked at is named."""


@final
class WeightWatch:
    """Remember the norms of a network's trainable weights, and find those that have risen.

    Args:
        network: Whose; its norms are taken at once. Sharded weights are not watched.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before: dict[str, tuple[Tensor, int]] = {}
        self.look()

    def look(self) -> None:
        """Take the norms of all weights, with one read of them; does not wait for the device."""
        weights = trainable(self._network)
        self._before = {}
        # The norm of a whole weight would take a message, and not all ranks may come here.
        if weights and not any(hasattr(w, "full_tensor") for w in weights.values()):
            norms = tensor_norms(list(weights.values())).unbind()
            sizes = [weight.numel() for weight in weights.values()]
            self._before = dict(zip(weights, zip(norms, sizes, strict=True), strict=True))

    def changed(self) -> list[WeightNorm]:
        """Return weights that are not finite or whose norm has risen, the worst first.

        Reads the weights and waits for the device. A weight that was smaller than the root mean
        square of all, such as one that began at zero, counts as if it had been of that size. If it
        is most of them, as after an update that was not finite, none is returned.
        """
        weights = trainable(self._network)
        known = {name: self._before[name] for name in weights if name in self._before}
        if not known:
            return []
        now = tensor_norms([weights[name] for name in known]).tolist()
        sizes = [size for _, size in known.values()]
        before = [norm.item() for norm, _ in known.values()]
        typical = math.sqrt(sum(norm**2 for norm in before) / sum(sizes))
        if not math.isfinite(typical):
            typical = 0.0
        risen = []
        for name, size, norm, norm_before in zip(known, sizes, now, before, strict=True):
            rise = norm / max(norm_before, typical * math.sqrt(size), 1e-30)
            if not rise <= _MOST_RISE:
                rank = rise if math.isfinite(rise) else math.inf
                risen.append((rank, WeightNorm(name=name, norm=norm, norm_before=norm_before)))
        if len(risen) > max(1, len(known) // 2):
            # What all weights have suffered is a consequence, no cause.
            return []
        return [weight for _, weight in sorted(risen, key=lambda pair: -pair[0])]
