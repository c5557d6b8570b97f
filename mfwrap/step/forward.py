"""Call the network on micro-batches, and read the loss from its output."""

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.arguments import described

_IGNORED_LABEL = -100


class NetworkCall(NamedTuple):
    """Arguments of one call of the network: one micro-batch."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def calls_of(micro_batches: Sequence[Any]) -> list[NetworkCall]:
    """Turn micro-batches, as a data loader yields them, into calls of the network.

    Args:
        micro_batches: At least one micro-batch. A mapping becomes keyword arguments, a tuple
            positional arguments, and anything else a single argument.

    Raises:
        TypeError: If `micro_batches` is not a sequence.
        ValueError: If `micro_batches` is empty.
    """
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        msg = f"`micro_batches` must be a sequence, got {type(micro_batches).__name__}"
        raise TypeError(msg)
    if not micro_batches:
        msg = "`micro_batches` must hold at least one micro-batch, got none"
        raise ValueError(msg)
    return [_call_of(micro_batch) for micro_batch in micro_batches]


def split_calls(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    num_micro_batches: int,
    not_split: Collection[str | int] = (),
) -> list[NetworkCall]:
    """Split the arguments of one call into micro-batches of equal size.

    Source: MindSpore, ``nn.GradAccumulationCell``.

    Args:
        arguments: Positional arguments.
        keywords: Keyword arguments.
        num_micro_batches: Number of micro-batches. Tensors with at least one dimension are split
            along the first dimension, also inside mappings, lists and tuples. Everything else goes
            to each micro-batch.
        not_split: As in `StepConfig`.

    Raises:
        ValueError: If the first dimensions of the tensors to split differ, or are not divisible by
            `num_micro_batches`.
    """
    if num_micro_batches == 1:
        return [NetworkCall(arguments, keywords)]
    split = _Split(num_micro_batches, frozenset(not_split))
    split_arguments = [
        split.whole(value) if index in split.not_split else split(f"inputs[{index}]", value)
        for index, value in enumerate(arguments)
    ]
    split_keywords = split.of_mapping(keywords, "{}")
    return [
        NetworkCall(
            tuple(parts[index] for parts in split_arguments),
            {name: parts[index] for name, parts in split_keywords.items()},
        )
        for index in range(num_micro_batches)
    ]


class Normalizer(NamedTuple):
    """Divisors that turn gradients of a sum of losses into gradients of the mean loss.

    Both divisors are zero for a batch without targets.
    """

    reduced: Tensor
    """Divisor of the gradients after their reduction over ranks, shape ``()``, float32."""

    local: Tensor
    """Divisor of this rank's own gradients, shape ``()``, float32."""

    is_partial: bool = False
    """Whether `reduced` must still be summed over the ranks that hold shards."""


class LossParts(NamedTuple):
    """Loss of one micro-batch: a mean, or a sum with the number of its targets."""

    numerator: Tensor
    """Tensor to differentiate, with its graph, shape ``()``, in the network's dtype."""

    denominator: Tensor | None
    """Number of targets, detached, shape ``()``, float32; ``None`` if `numerator` is a mean."""

    named: Mapping[str, Tensor] = MappingProxyType({})
    """Losses that are reported beside `numerator`, see `named_losses`."""


@final
class MeanLoss:
    """Call a network that returns the mean loss of its micro-batch.

    Args:
        network: Network that returns a tensor of one element, an output with a ``loss``, a mapping
            of named losses, or a tuple that begins with the loss.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __call__(self, call: NetworkCall) -> LossParts:
        """Run the forward pass.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If the micro-batch is empty, or the loss does not have exactly one element
                or does not depend on a trainable parameter.
        """
        _check_has_elements(call)
        output = self._network(*call.arguments, **call.keywords)
        return LossParts(loss_of(output), None, named_losses(output))


@final
class PerTokenLoss:
    """Call a network to get the sum of its token losses and the number of targets.

    A Hugging Face model is called with ``num_items_in_batch`` 1, which makes its loss a sum. Its
    targets are counted as ``Trainer._get_num_items_in_batch`` counts them. Any other network must
    return ``(numerator, denominator)``.

    Args:
        network: Network to call.
        inspected: The same network without wrappers. Its signature is inspected.

    Raises:
        ValueError: If a Hugging Face model adds a router's auxiliary loss.
    """

    def __init__(self, network: nn.Module, inspected: nn.Module) -> None:
        self._network = network
        model = _without_adapters(inspected)
        self._model_name = type(model).__name__
        self._counts_targets = _accepts_num_items_in_batch(model)
        if self._counts_targets and getattr(
            getattr(model, "config", None), "output_router_logits", False
        ):
            msg = (
                "`calculate_per_token_loss` must be False for a model that adds a router's loss, "
                "which would be divided by the number of tokens, too; got "
                f"{self._model_name} with config.output_router_logits=True"
            )
            raise ValueError(msg)
        self._divides_by_it: bool | None = None
        self._shifts_labels = _shifts_labels(model)
        self._parameter_names = list(inspect.signature(model.forward).parameters)

    def __call__(self, call: NetworkCall) -> LossParts:
        """Run the forward pass.

        Raises:
            TypeError: If a Hugging Face model returns no loss, or accepts ``num_items_in_batch``
                but returns a mean; or if any other network does not return a pair.
            ValueError: If the numerator or the denominator does not have exactly one element, the
                numerator does not depend on a trainable parameter, or a Hugging Face model gets no
                ``labels``.
        """
        if not self._counts_targets:
            return pair_of(self._network(*call.arguments, **call.keywords))
        labels = self._targets(call)
        # Set the dtype explicitly: the program may have changed torch's default.
        one = torch.ones((), dtype=torch.float32, device=labels.device)
        one.requires_grad_(self._divides_by_it is None)
        output = self._network(*call.arguments, **call.keywords, num_items_in_batch=one)
        numerator = loss_of(output)
        if self._divides_by_it is None:
            self._divides_by_it = _depends_on(numerator, one)
        if not self._divides_by_it:
            msg = (
                "with calculate_per_token_loss=True, `network` must divide its loss by "
                "`num_items_in_batch` or return (numerator, denominator), got "
                f"{self._model_name}, whose forward accepts `num_items_in_batch` but ignores it"
            )
            raise TypeError(msg)
        return LossParts(numerator, labels.ne(_IGNORED_LABEL).sum().float())

    def _targets(self, call: NetworkCall) -> Tensor:
        """Return the labels that the loss is computed from."""
        named = dict(zip(self._parameter_names, call.arguments, strict=False)) | call.keywords
        shifted: Tensor | None = named.get("shift_labels")
        if shifted is not None:
            return shifted
        labels: Tensor | None = named.get("labels")
        if labels is None:
            msg = (
                "the batch must have `labels` to count targets, got only the arguments "
                f"{sorted(named)}"
            )
            raise ValueError(msg)
        return labels[..., 1:] if self._shifts_labels else labels


def _call_of(micro_batch: Any) -> NetworkCall:
    if isinstance(micro_batch, Mapping):
        return NetworkCall((), dict(micro_batch))
    if isinstance(micro_batch, tuple):
        return NetworkCall(tuple(micro_batch), {})
    return NetworkCall((micro_batch,), {})


@final
class _Split:
    """Split the values of one call into parts, whose tensors must have equal first dimensions.

    Args:
        num_parts: Number of parts.
        not_split: Names and positions of values that go to each part whole.
    """

    def __init__(self, num_parts: int, not_split: frozenset[str | int]) -> None:
        self._num_parts = num_parts
        self.not_split = not_split
        self._first: tuple[str, int] | None = None

    def __call__(self, name: str, value: Any) -> Sequence[Any]:
        """Return the parts of a value: slices of its tensors, and all other values whole."""
        if isinstance(value, Tensor) and value.dim() > 0:
            self._check(name, value)
            return value.tensor_split(self._num_parts)
        parts = range(self._num_parts)
        if isinstance(value, Mapping):
            items = self.of_mapping(value, f"{name}[{{!r}}]")
            return [{key: split[i] for key, split in items.items()} for i in parts]
        if isinstance(value, (list, tuple)):
            elements = [self(f"{name}[{i}]", v) for i, v in enumerate(value)]
            rebuild = getattr(value, "_make", list if isinstance(value, list) else tuple)
            return [rebuild([split[i] for split in elements]) for i in parts]
        return self.whole(value)

    def of_mapping(self, values: Mapping[Any, Any], template: str) -> dict[Any, Sequence[Any]]:
        """Return the parts of each value; `template` makes the name of a value from its key."""
        return {
            key: self.whole(value)
            if isinstance(key, str) and key in self.not_split
            else self(template.format(key), value)
            for key, value in values.items()
        }

    def whole(self, value: Any) -> Sequence[Any]:
        """Return the value itself as each part."""
        return [value] * self._num_parts

    def _check(self, name: str, tensor: Tensor) -> None:
        size = tensor.shape[0]
        first, expected = self._first = self._first or (name, size)
        if size != expected:
            msg = (
                "the tensors of a batch must have equal first dimensions to be split for "
                f"gradient_accumulation_steps={self._num_parts}, got {expected} for `{first}` and "
                f"{size} for `{name}`; name what does not hold rows in `not_split`, or pass "
                "micro-batches to `step`"
            )
            raise ValueError(msg)
        if size % self._num_parts:
            msg = (
                f"the first dimension of `{name}` must be divisible by "
                f"gradient_accumulation_steps={self._num_parts}, got shape {tuple(tensor.shape)}"
            )
            raise ValueError(msg)


def _check_has_elements(call: NetworkCall) -> None:
    """Refuse an empty micro-batch: its mean loss is NaN, and its gradients are finite zeros."""
    tensors = [tensor for tensor in tensors_in(call) if tensor.dim() > 0]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        msg = (
            "a micro-batch must have at least one row, because the mean loss of no rows is NaN; "
            f"got only tensors without elements, of shape {' and '.join(map(str, shapes))}"
        )
        raise ValueError(msg)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, also those inside mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from tensors_in(element)
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)


def loss_of(output: Any, source: str = "network") -> Tensor:
    """Return the loss in the output of a network or a loss function, shape ``()``.

    Args:
        output: Tensor of one element, output with a ``loss``, or tuple that begins with the loss.
            The loss of a mapping without ``loss`` is the sum of its named losses: the entries whose
            names contain "loss". A named tuple with only such fields is treated like a mapping.
        source: Name of the argument that has returned `output`, for errors.

    Raises:
        TypeError: If `output` has no loss.
        ValueError: If the loss does not have exactly one element, or requires no gradient.
    """
    entries = _entries(output)
    if entries is not None:
        loss = entries.get("loss")
        if loss is None:
            loss = _sum_of_losses(entries, source)
    elif isinstance(output, (tuple, list)):
        loss = output[0] if output else None
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss = getattr(output, "loss", None)
    if loss is None:
        msg = (
            f"`{source}` must return a loss: a tensor of one element, an output with `loss`, a "
            "dict of losses whose names contain `loss`, or a tuple that begins with the loss; got "
            f"{type(output).__name__} without a loss (a Hugging Face model computes it if the "
            "batch has `labels`)"
        )
        raise TypeError(msg)
    return _differentiable("loss", loss, source)


def named_losses(output: Any) -> dict[str, Tensor]:
    """Return the losses that an output has beside its ``loss``, by name.

    These are the entries of a mapping whose names contain "loss" and whose values are
    floating-point tensors of one element: ``lm_loss``, ``load_balancing_loss`` and ``mtp_loss``,
    for example, or the ``aux_loss`` of a Hugging Face mixture of experts.

    Source: MindFormers, ``print_separate_loss``.

    Args:
        output: Output of a network. Only mappings, and the named tuples that `loss_of` treats like
            mappings, have named losses.

    Returns:
        Detached tensors of shape ``()``, float32.
    """
    return {
        name: value.detach().float().reshape(())
        for name, value in (_entries(output) or {}).items()
        if name != "loss" and _is_loss_name(name)
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    }


def _is_loss_name(name: object) -> bool:
    return isinstance(name, str) and "loss" in name.lower()


def _entries(output: Any) -> Mapping[str, Any] | None:
    """Return a mapping as it is, and a named tuple of losses as a mapping; ``None`` otherwise."""
    if isinstance(output, Mapping):
        return output
    names = getattr(output, "_fields", ())
    if isinstance(output, tuple) and names and all(map(_is_loss_name, names)):
        return dict(zip(names, output, strict=True))
    return None


def _sum_of_losses(entries: Mapping[str, Any], source: str) -> Tensor | None:
    """Return the sum of the named losses; ``None`` if no entry has the name of a loss."""
    losses = []
    for name, value in entries.items():
        if _is_loss_name(name) and value is not None:
            loss = _one_element(name, value, source)
            if not loss.is_floating_point():
                msg = (
                    f"the {name} that `{source}` returns must be a floating-point tensor, because "
                    f"entries whose names contain `loss` are added up, got {loss.dtype}; rename it"
                )
                raise TypeError(msg)
            losses.append(loss)
    return torch.stack([loss.float() for loss in losses]).sum() if losses else None


def pair_of(output: Any, source: str = "network") -> LossParts:
    """Return the numerator and the denominator in the output of a network or a loss function.

    Args:
        output: Pair of a tensor of one element, and a tensor of one element or a number. The first
            may be a mapping of named losses, which are added up; see `loss_of`.
        source: Name of the argument that has returned `output`, for errors.

    Raises:
        TypeError: If `output` is not such a pair.
        ValueError: If a tensor does not have exactly one element, or the numerator requires no
            gradient.
    """
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        size = f" of {len(output)}" if isinstance(output, (tuple, list)) else ""
        msg = (
            f"`{source}` must return (numerator, denominator) with calculate_per_token_loss=True, "
            f"got {type(output).__name__}{size}"
        )
        raise TypeError(msg)
    first, denominator = output
    entries = _entries(first)
    total = first if entries is None else _sum_of_losses(entries, source)
    numerator = _differentiable("numerator", total, source)
    if isinstance(denominator, (int, float)):
        denominator = torch.full((), denominator, dtype=torch.float32, device=numerator.device)
    number = _one_element("denominator", denominator, source).detach().float()
    return LossParts(numerator, number, named_losses(first))


def _one_element(name: str, value: Any, source: str) -> Tensor:
    if not isinstance(value, Tensor):
        msg = f"the {name} that `{source}` returns must be a tensor, got {described(value)}"
        raise TypeError(msg)
    if value.numel() != 1:
        msg = (
            f"the {name} that `{source}` returns must have exactly one element, got shape "
            f"{tuple(value.shape)}"
        )
        raise ValueError(msg)
    return value.reshape(())


def _differentiable(name: str, value: Any, source: str) -> Tensor:
    scalar = _one_element(name, value, source)
    if not scalar.requires_grad:
        msg = (
            f"the {name} that `{source}` returns must depend on a trainable parameter, got a "
            "tensor that does not require a gradient"
        )
        raise ValueError(msg)
    return scalar


def _without_adapters(network: nn.Module) -> nn.Module:
    """Return the model inside a PEFT model, or `network` itself.

    The forward of a PEFT model takes any argument. Only the signature of the model inside shows
    which arguments that model accepts.
    """
    get_base_model: Any = getattr(network, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else network


def _accepts_num_items_in_batch(model: nn.Module) -> bool:
    """Return whether the model's loss takes ``num_items_in_batch``, by the Trainer's rule."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in parameters:
        return True
    # `**kwargs` in the signature is not enough, because other networks have `**kwargs`, too. A
    # Hugging Face model that passes `**kwargs` to its loss also has a `loss_function`.
    takes_keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_keywords and "loss_function" in dir(type(model))


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model predicts the next token: the first label is then not a target."""
    config = getattr(model, "config", None)
    loss_function = getattr(model, "loss_function", None)
    causal = getattr(loss_function, "__name__", None) == "ForCausalLMLoss"
    return causal and not getattr(config, "is_encoder_decoder", False)


def _depends_on(loss: Tensor, leaf: Tensor) -> bool:
    """Return whether `loss` was computed from `leaf`, by a search of the autograd graph."""
    pending, seen = deque([loss.grad_fn]), set()
    while pending:
        node = pending.popleft()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return False
