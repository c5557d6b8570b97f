"""Judge attention logits and the load of experts by the steps before, on the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.callbacks.culprit.judges.growth import line_growth
from mfwrap.callbacks.culprit.judges.windows import NamedWindow, decoded, encoded
from mfwrap.tensors.shards import meeting_device, on_device

LOGITS, LOAD = "attention_logits", "expert_load"

_LENGTH = 64
"""Number of watched steps over which growth is looked for."""

_SPANS = (8, 16, 32, 64)
"""Numbers of last watched steps to which a line is fitted."""

_LEAST_FIT = 0.85
"""Smallest share of the variance that a growing line explains. The best line explains only 0.75 of
a single jump, so a jump is no growth."""

_SETTLED = 32
"""Number of watched steps before the load of experts may have grown: routers begin balanced, and
their experts specialize."""

_LIMIT = 8.0
"""Smallest score of a sudden rise, see `RobustWindow`."""

_PRIOR = 0.3
"""Deviation of the logarithms that is assumed before there are values."""

_CALM = 0.5
"""Largest share of the worst module's rise that the modules of other layers may have."""


_LIMITS = {LOGITS: (30.0, 6.0, 100.0, 3.0), LOAD: (1.7, 1.6, 1.7, 1.6)}
"""Smallest value that is a sudden anomaly, and smallest ratio of it to the expected one; smallest
value to which growth is an anomaly, and smallest ratio of the ends of the fitted line. Logits of
healthy small networks grow up to thirtyfold in 64 steps, and reach about 50. From 100 on, Kimi K2
(2025) clips them."""


class ForwardRise(NamedTuple):
    """Rise of the attention logits, or of the load of experts, of one module."""

    kind: str
    """``"attention_logits"`` or ``"expert_load"``."""

    module: str
    before: float
    """Largest logit, or concentration of the load, before the rise."""

    now: float
    num_steps: int
    """Number of watched steps of the growth; 1 for a sudden rise."""

    is_alone: bool
    """Whether the modules of this kind have risen much less elsewhere."""


class JudgedForward(NamedTuple):
    """Judgement of the watched forwards of a step, on the device. ``K`` is the number of series."""

    names: tuple[str, ...]
    """Kind and module of each series, with a slash between them."""

    summary: Tensor
    """Number of modules whose attention logits, and whose load of experts, are an anomaly. Shape
    ``(2,)``, float32."""

    values: Tensor
    """Logarithms of the last watched values, the newest last. Shape ``(K, 64)``, float32."""

    expected: Tensor
    """Expected logarithm, shape ``(K,)``, float32."""

    growth: Tensor
    """Growth of the fitted line in logarithms over each span, where it is an anomaly, otherwise 0.
    Shape ``(len(_SPANS), K)``, float32."""

    is_sudden: Tensor
    """Whether the value is a sudden anomaly, shape ``(K,)``, bool."""

    def rises(self) -> tuple[ForwardRise, ...]:
        """Return the anomalies, the module that has grown most first; synchronizes."""
        series = [name.split("/", 1) for name in self.names]
        values = [[one for one in row if math.isfinite(one)] for row in self.values.tolist()]
        expected, is_sudden = self.expected.tolist(), self.is_sudden.tolist()
        growths = self.growth.T.tolist()

        def change(row: int, length: int) -> float:
            start = values[row][-length:][0] if length > 1 else expected[row]
            return values[row][-1] - start if math.isfinite(start) else 0.0

        rises = []
        for row, (kind, module) in enumerate(series):
            spans = [span for span, one in zip(_SPANS, growths[row], strict=True) if one > 0]
            length = max(spans, default=1)
            if not values[row] or not (spans or is_sudden[row]):
                continue
            rise, now = change(row, length), values[row][-1]
            others = [
                change(other, length)
                for other, (other_kind, _) in enumerate(series)
                if other_kind == kind and other != row and values[other]
            ]
            is_alone = max(others, default=0.0) < _CALM * rise
            before = math.exp(now - rise)
            rises.append(ForwardRise(kind, module, before, math.exp(now), length, is_alone))
        return tuple(sorted(rises, key=lambda one: one.before / one.now))


@final
class ForwardJudge:
    """Score the largest attention logit and the load of experts of each module.

    Two things are an anomaly: a sudden rise, by the score of a `RobustWindow`, and growth: a line
    that explains 85 % of the variance of the logarithms over 8, 16, 32 or 64 watched steps. The
    largest logit of a module must also have risen sixfold at once, to at least 30, or threefold
    along the line, to at least 100. The load of experts is measured by its concentration, the
    number of experts divided by the exponential of the shares' entropy: 1 for a balanced load,
    ``E`` if one expert gets all tokens. A sudden concentration is an anomaly if it lasts for two
    watched steps, and a growing one after 32 watched steps.

    Growth of attention logits precedes a divergence by hundreds of steps, see Dehghani et al.,
    "Scaling Vision Transformers to 22 Billion Parameters", 2023, and Wortsman et al., "Small-scale
    proxies for large-scale Transformer training instabilities", 2023.

    A watched step costs about 200 operations on tensors of at most ``(K, 64)`` elements for
    ``K`` modules; other steps cost nothing. Nothing synchronizes with the device.
    """

    def __init__(self) -> None:
        self.last: JudgedForward | None = None
        """Judgement of the last watched step."""
        self._names: tuple[str, ...] = ()
        self._limits = torch.empty(0, 4)
        self._is_load = torch.empty(0, dtype=torch.bool)
        self._values = torch.empty(0, _LENGTH)
        self._was_high = torch.empty(0, dtype=torch.bool)
        # An uneven load must last for two steps, the first of which may follow an earlier one.
        self._window = NamedWindow(second=0.0)
        self._is_new = False

    @torch.no_grad()
    def add(self, logits: Mapping[str, Tensor], shares: Mapping[str, Tensor]) -> None:
        """Judge the forwards of a watched step, and then include them in what is usual.

        Args:
            logits: Largest attention logit of each head by module, each of shape ``(heads,)``.
            shares: Share of the tokens of each expert by module, each of shape ``(experts,)``.
        """
        numbers = {f"{LOGITS}/{name}": _of_logits(each) for name, each in logits.items()}
        numbers |= {f"{LOAD}/{name}": _of_shares(each) for name, each in shares.items()}
        if not numbers:
            return
        device = meeting_device(numbers.values())
        self._make_room(list(numbers), device)
        nothing = torch.full((), torch.nan, device=device)
        values = torch.stack(
            [on_device(numbers.get(name, nothing), device) for name in self._names]
        )
        window = self._window.use(self._names, [_PRIOR] * len(self._names), device)
        expected, scores = window.expected, window.scores(values)
        window.add(values)
        is_known = values.abs() < torch.inf
        moved = torch.cat((self._values[:, 1:], values[:, None]), dim=1)
        self._values = torch.where(is_known[:, None], moved, self._values)
        level, rise, grown_level, grown = self._limits.unbind(dim=1)
        is_load = self._is_load
        is_high = (scores > _LIMIT) & (values > level) & (values - expected > rise)
        is_sudden = is_high & (self._was_high | ~is_load)
        self._was_high = torch.where(is_known, is_high, self._was_high)
        lines = [line_growth(self._values[:, -span:], _LEAST_FIT) for span in _SPANS]
        growth = torch.stack(lines)
        is_settled = ~is_load | (self._values.isfinite().sum(dim=1) > _SETTLED)
        has_grown = (values > grown_level) & (growth > grown) & is_settled
        growth = torch.where(has_grown, growth, 0.0)
        is_bad = is_sudden | (growth > 0).any(dim=0)
        summary = torch.stack([(is_bad & ~is_load).sum(), (is_bad & is_load).sum()]).float()
        self.last = JudgedForward(self._names, summary, self._values, expected, growth, is_sudden)
        self._is_new = True

    def take(self) -> Tensor | None:
        """Return the summary of the forwards since the last call; ``None`` if none were watched."""
        is_new, self._is_new = self._is_new, False
        return self.last.summary if is_new and self.last is not None else None

    def _make_room(self, names: Sequence[str], device: torch.device) -> None:
        """Make room for series that are new; those that are missing now keep their values."""
        known = set(self._names)
        new = [name for name in names if name not in known]
        self._names = (*self._names, *new)
        if len(self._limits) == len(self._names):
            return
        # Copies to the device, only when there are new names.
        empty = torch.full((len(new), _LENGTH), torch.nan, device=device)
        self._values = torch.cat([self._values.to(device), empty])
        calm = torch.zeros(len(new), dtype=torch.bool, device=device)
        self._was_high = torch.cat([self._was_high.to(device), calm])
        kinds = [name.split("/", 1)[0] for name in self._names]
        self._limits = torch.tensor([_LIMITS[kind] for kind in kinds]).log().to(device)
        self._is_load = torch.tensor([kind == LOAD for kind in kinds]).to(device)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is usual, ready for JSON, or ``None`` before the first watched step.

        Synchronizes with the device.
        """
        if not self._names:
            return None
        return {
            "names": list(self._names),
            "values": encoded(self._values),
            "was_high": self._was_high.tolist(),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, before the first step."""
        self._names = tuple(state["names"])
        self._values = decoded(state["values"], len(self._names))
        self._was_high = torch.tensor(state["was_high"], dtype=torch.bool)
        self._window.load_state_dict(state["window"])


def _of_logits(logits: Tensor) -> Tensor:
    """Return the logarithm of the largest logit, at least 0, shape ``()``."""
    return logits.detach().float().amax().clamp(min=1.0).log()


def _of_shares(shares: Tensor) -> Tensor:
    """Return the logarithm of the concentration of the load, shape ``()``."""
    shares = shares.detach().float()
    return math.log(shares.numel()) + torch.xlogy(shares, shares).sum()
