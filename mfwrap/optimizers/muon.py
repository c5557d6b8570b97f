"""The parameters that Muon is meant for."""

from torch import nn


def hidden_matrices(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon is meant for: matrices that are not embeddings.

    Embeddings are the weights of ``torch.nn.Embedding``, and of the layer that computes the logits
    of a transformers model (its ``get_output_embeddings``).

    Args:
        network: Network, with or without wrappers.

    Returns:
        Trainable parameters with two dimensions, by name, in the order of ``named_parameters``.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
        >>> list(hidden_matrices(network))
        ['1.weight']
    """
    embeddings: list[nn.Module] = []
    for module in network.modules():
        output_layer = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(module, nn.Embedding):
            embeddings.append(module)
        elif isinstance(output_layer, nn.Module):
            embeddings.append(output_layer)
    left_out = {id(parameter) for module in embeddings for parameter in module.parameters()}
    return {
        name: parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in left_out
    }
