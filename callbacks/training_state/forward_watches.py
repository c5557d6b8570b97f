"""Watch the forward passes of a step for the training state monitor."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, final

from torch import Tensor, nn

from mfwrap.callbacks.culprit.judges.forward import ForwardJudge
from mfwrap.callbacks.shared.run_log import WarnOnce, run_logger
from mfwrap.callbacks.training_state.expert_load import shares_of
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.tensors.attention_logits import AttentionLogits
from mfwrap.tensors.experts import BiasPlace, ExpertCounts, expert_biases
from mfwrap.tensors.shards import is_distributed


class ForwardNumbers(NamedTuple):
    """Numbers from the forward passes of a step, on the device, keyed by module name."""

    max_attention_logits: Mapping[str, Tensor]
    """Shape ``(heads,)``, float32."""

    expert_shares: Mapping[str, Tensor]
    """Shape ``(experts,)``, float32."""

    bias_spreads: Mapping[str, Tensor] = MappingProxyType({})
    """Largest minus smallest bias of the experts' choice, shape ``()``."""


@final
class ForwardWatches:
    """Watch the forward passes of the steps that are reported.

    Args:
        settings: Settings of the monitor.
        network: Network without wrappers.
        judge: Judges the numbers; ``None`` if nothing is judged.
    """

    def __init__(
        self, settings: TrainingStateSettings, network: nn.Module, judge: ForwardJudge | None
    ) -> None:
        self._judge = judge
        self._attention = AttentionLogits(network) if settings.max_attention_logit_format else None
        self._experts = ExpertCounts(network) if settings.expert_load_format else None
        self._biases = {} if self._experts is None else _biases(network)
        self._warn_once = WarnOnce(__package__)
        if self._experts is not None and not self._experts.experts:
            self._warn_once(
                "TrainingStateMonitor cannot show the load of experts: no module of the network "
                "has `num_experts` and a forward with an argument `top_k_index`"
            )

    def begin(self) -> None:
        """Start watching."""
        for watch in (self._attention, self._experts):
            if watch is not None:
                watch.begin()

    def end(self) -> ForwardNumbers:
        """Stop watching, and return the numbers since `begin`."""
        logits = {} if self._attention is None else self._attention.end()
        shares = {} if self._experts is None else shares_of(self._experts.end())
        if self._attention is not None and not logits:
            self._warn_once(
                "TrainingStateMonitor cannot show attention logits: the forward calls neither "
                "torch's scaled_dot_product_attention nor a softmax of a four-dimensional tensor"
            )
        if self._judge is not None:
            self._judge.add(logits, shares)
        return ForwardNumbers(logits, shares, self._bias_spreads())

    def _bias_spreads(self) -> dict[str, Tensor]:
        biases = {name: place.tensor().detach() for name, place in self._biases.items()}
        # The extremes of a sharded bias would take a collective.
        return {
            name: bias.max() - bias.min()
            for name, bias in biases.items()
            if not is_distributed(bias)
        }

    def close(self) -> None:
        """Stop watching."""
        for watch in (self._attention, self._experts):
            if watch is not None:
                watch.close()


def _biases(network: nn.Module) -> dict[str, BiasPlace]:
    try:
        return expert_biases(network)
    except ValueError:  # biases that belong to no experts of the usual kind
        return {}


def forward_watches(
    settings: TrainingStateSettings,
    network: nn.Module | None,
    *,
    is_compiled: bool,
    judge: ForwardJudge | None = None,
) -> ForwardWatches | None:
    """Return the watches that the settings request; ``None`` if nothing is watched.

    Logs a warning if a requested watch is not possible.

    Args:
        settings: Settings of the monitor.
        network: Network without wrappers; ``None`` if unknown.
        is_compiled: Whether the network is compiled. A compiled network is not watched, because
            hooks would change the compiled code.
        judge: Judges what is watched; ``None`` if nothing is judged.
    """
    if not (settings.max_attention_logit_format or settings.expert_load_format):
        return None
    if network is None or is_compiled:
        why = "the loop passes no `model`" if network is None else "the network is compiled"
        run_logger(__package__).warning(
            "TrainingStateMonitor cannot show attention logits and the load of experts: %s", why
        )
        return None
    return ForwardWatches(settings, network, judge)
