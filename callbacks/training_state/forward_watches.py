"""What the training state monitor sees in the forwards of a step."""

from collections.abc import Mapping
from typing import NamedTuple, final

from torch import Tensor, nn

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.training_state.attention_logits import AttentionLogits
from mfwrap.callbacks.training_state.expert_load import ExpertLoad
from mfwrap.callbacks.training_state.settings import TrainingStateSettings

__all__ = ["ForwardNumbers", "ForwardWatches", "forward_watches"]


class ForwardNumbers(NamedTuple):
    """Seen in the forwards of a step, by name of the module; on the device."""

    max_attention_logits: Mapping[str, Tensor]
    """Shape ``(heads,)``, float32."""

    expert_shares: Mapping[str, Tensor]
    """Shape ``(experts,)``, float32."""


@final
class ForwardWatches:
    """Watch the forwards of the steps that are shown, and no others.

    Args:
        attention: ``None`` where attention logits are not asked for.
        experts: ``None`` where their load is not asked for.
    """

    def __init__(self, attention: AttentionLogits | None, experts: ExpertLoad | None) -> None:
        self._attention = attention
        self._experts = experts
        self._has_said = False

    def begin(self) -> None:
        """Watch the forwards from now on."""
        for watch in (self._attention, self._experts):
            if watch is not None:
                watch.begin()

    def end(self) -> ForwardNumbers:
        """Return what was seen since `begin`."""
        logits = {} if self._attention is None else self._attention.end()
        shares = {} if self._experts is None else self._experts.end()
        if self._attention is not None and not logits and not self._has_said:
            self._has_said = True
            run_logger(__package__).warning(
                "TrainingStateMonitor cannot show attention logits: in the forward there is "
                "neither torch's scaled_dot_product_attention nor a softmax over four dimensions"
            )
        return ForwardNumbers(logits, shares)

    def close(self) -> None:
        """Watch no longer."""
        for watch in (self._attention, self._experts):
            if watch is not None:
                watch.close()


def forward_watches(
    settings: TrainingStateSettings, network: nn.Module | None, *, is_compiled: bool
) -> ForwardWatches | None:
    """Return what watches the forwards of a network; ``None`` if nothing of them is asked for.

    Args:
        settings: Of the monitor.
        network: The one itself, in no wrapper; ``None`` if it is not known.
        is_compiled: Whether it is compiled, in which case hooks would change that.
    """
    asks = settings.max_attention_logit_format, settings.expert_load_format
    if not any(asks):
        return None
    if network is None or is_compiled:
        why = "without `model`" if network is None else "of a network that is compiled"
        run_logger(__package__).warning(
            "TrainingStateMonitor cannot show attention logits and the load of experts %s", why
        )
        return None
    attention = AttentionLogits(network) if asks[0] else None
    experts = ExpertLoad(network) if asks[1] else None
    if experts is not None and not experts.experts:
        run_logger(__package__).warning(
            "TrainingStateMonitor cannot show the load of experts: the network has none that it "
            "knows (modules with `num_experts` and an argument `top_k_index`)"
        )
    return ForwardWatches(attention, experts)
