"""Change a part of a network for good, as code that is wrong does."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from support.faults.architecture import VOCABULARY, Architecture
from support.faults.faults import Fault, How, What, Where

__all__ = ["embedding_name", "plant_in_part", "planted_layers"]

_LARGE = 1e4
"""Router logit of an expert that all tokens go to."""

_EPSILONS = ("eps", "variance_epsilon")
"""Names of the epsilon in the classes of norms."""

_Undo = Callable[[], None]


def planted_layers(architecture: Architecture, fault: Fault) -> tuple[str, ...]:
    """Return the names of the layers whose parts a fault is in."""
    if fault.where is Where.ALL or fault.layer is None:
        return architecture.layers
    return (architecture.layers[fault.layer % len(architecture.layers)],)


def plant_in_part(network: nn.Module, architecture: Architecture, fault: Fault) -> list[_Undo]:
    """Plant a fault in a part of a network, and return what removes it again."""
    return list(_PLANT[fault.kind.what](network, architecture, fault))


def _plant_in_arguments(network: nn.Module, _: Architecture, fault: Fault) -> Iterator[_Undo]:
    """Give the network another mask or other positions than those that it makes itself."""

    def before(__: nn.Module, inputs: Any, keywords: dict[str, Any]) -> Any:
        length = keywords["input_ids"].shape[1]
        if fault.kind.what is What.POSITIONS:
            factor = 0 if fault.kind.how is How.CONSTANT else round(fault.size)
            new = {"position_ids": factor * torch.arange(length)[None]}
        else:
            like = next(network.parameters())
            mask = like.new_zeros((1, 1, length, length))
            if fault.kind.how is How.SHIFTED:
                # Each token sees the one behind it.
                mask = mask.masked_fill(torch.ones_like(mask).triu(2).bool(), -torch.inf)
            new = {
                "attention_mask": mask.expand(len(keywords["input_ids"]), -1, -1, -1),
                # Networks count their positions by the usual mask.
                "position_ids": torch.arange(length)[None],
            }
        return inputs, keywords | new

    yield network.register_forward_pre_hook(before, with_kwargs=True).remove


def _plant_in_numbers(
    network: nn.Module, architecture: Architecture, fault: Fault
) -> Iterator[_Undo]:
    """Change a number that modules of the layers hold."""
    names = _EPSILONS if fault.kind.what is What.NORM_EPSILON else ("scaling",)
    for layer in planted_layers(architecture, fault):
        for module in network.get_submodule(layer).modules():
            for name in names:
                number = getattr(module, name, None)
                if isinstance(number, dict) and fault.kind.what is What.ADAPTER_SCALE:
                    # Adapters have a number by the name of each.
                    new = {each: fault.size * scale for each, scale in number.items()}
                    yield _set(module, name, new)
                elif isinstance(number, float) and fault.kind.what is not What.ADAPTER_SCALE:
                    yield _set(module, name, fault.size * number)


def _plant_in_auxiliary_weight(
    network: nn.Module, _: Architecture, fault: Fault
) -> Iterator[_Undo]:
    weight: Any = network.router_aux_loss_coef
    yield _set(network, "router_aux_loss_coef", weight * fault.size)


def _set(owner: Any, name: str, value: Any) -> _Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _plant_in_residual(
    network: nn.Module, architecture: Architecture, fault: Fault
) -> Iterator[_Undo]:
    """Multiply the input of a layer that the layer adds to its output."""
    more = -1.0 if fault.kind.how is How.MISSING else fault.size - 1

    def after(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output + more * inputs[0]
        return (output[0] + more * inputs[0], *output[1:])

    for layer in planted_layers(architecture, fault):
        yield network.get_submodule(layer).register_forward_hook(after).remove


def _plant_in_tied_weight(
    network: nn.Module, architecture: Architecture, _: Fault
) -> Iterator[_Undo]:
    """Let the head use a copy of the weight of the embedding, which is not trained."""
    head = network.get_submodule(architecture.head or "")
    weight, bias = (
        None if each is None else each.detach().clone() for each in (head.weight, head.bias)
    )

    def after(_: nn.Module, inputs: Any, __: Tensor) -> Tensor:
        return linear(inputs[0], weight, bias)

    yield head.register_forward_hook(after).remove


def _plant_in_norm(network: nn.Module, architecture: Architecture, fault: Fault) -> Iterator[_Undo]:
    """Leave the norms of layers out."""

    def after(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # The weights keep gradients, which ranks wait for.
        return inputs[0] + 0 * output

    for layer in planted_layers(architecture, fault):
        for module in network.get_submodule(layer).modules():
            if any(hasattr(module, name) for name in _EPSILONS):
                yield module.register_forward_hook(after).remove


def _plant_in_layer(
    network: nn.Module, architecture: Architecture, fault: Fault
) -> Iterator[_Undo]:
    """Call layers a second time, on what they return."""

    def after(layer: nn.Module, inputs: Any, keywords: dict[str, Any], output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        return layer.forward(hidden, *inputs[1:], **keywords)

    for name in planted_layers(architecture, fault):
        yield network.get_submodule(name).register_forward_hook(after, with_kwargs=True).remove


def embedding_name(network: nn.Module) -> str:
    """Return the name of the module that turns tokens into vectors."""
    return next(
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= VOCABULARY
    )


def _plant_in_embedding(network: nn.Module, _: Architecture, fault: Fault) -> Iterator[_Undo]:
    embedding = network.get_submodule(embedding_name(network))
    yield embedding.register_forward_hook(lambda _, __, output: fault.size * output).remove


def _plant_in_routing(
    network: nn.Module, architecture: Architecture, fault: Fault
) -> Iterator[_Undo]:
    """Send all tokens to the same expert first, or lose what one expert returns."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        logits, scores, indices = output
        if fault.kind.how is How.ZERO:
            return logits, scores.masked_fill(indices == fault.pick % logits.shape[1], 0), indices
        constant = torch.zeros_like(logits)
        constant[:, fault.pick % logits.shape[1]] = _LARGE
        new = (logits + constant).float().softmax(-1).topk(indices.shape[-1], -1)
        return logits + constant, new.values.to(scores.dtype), new.indices

    for layer in planted_layers(architecture, fault):
        router = network.get_submodule(f"{layer}.{architecture.router}")
        yield router.register_forward_hook(after).remove


_PLANT: dict[What, Callable[[nn.Module, Architecture, Fault], Iterator[_Undo]]] = {
    What.ATTENTION_MASK: _plant_in_arguments,
    What.POSITIONS: _plant_in_arguments,
    What.ATTENTION_SCALE: _plant_in_numbers,
    What.NORM_EPSILON: _plant_in_numbers,
    What.RESIDUAL: _plant_in_residual,
    What.TIED_WEIGHT: _plant_in_tied_weight,
    What.ROUTING: _plant_in_routing,
    What.AUXILIARY_WEIGHT: _plant_in_auxiliary_weight,
    What.NORM: _plant_in_norm,
    What.LAYER: _plant_in_layer,
    What.EMBEDDING: _plant_in_embedding,
    What.ADAPTER_SCALE: _plant_in_numbers,
}
