"""Call a network to get the sum of its token losses and the number of its targets."""

import inspect
from typing import Any, final

import torch
from torch import Tensor, nn

from mfwrap.step.calls import NetworkCall
from mfwrap.step.losses import LossParts, loss_of, pair_of
from mfwrap.step.parts.gradient_call import leaves_of

_IGNORED_LABEL = -100


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
        self._shifts_labels = shifts_labels(model)
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
            self._divides_by_it = any(leaf is one for leaf in leaves_of([numerator]))
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


def shifts_labels(network: nn.Module) -> bool:
    """Return whether a network predicts the next token: the first label is then not a target.

    Args:
        network: Network without wrappers, except that of PEFT.
    """
    model = _without_adapters(network)
    config = getattr(model, "config", None)
    loss_function = getattr(model, "loss_function", None)
    causal = getattr(loss_function, "__name__", None) == "ForCausalLMLoss"
    return causal and not getattr(config, "is_encoder_decoder", False)
