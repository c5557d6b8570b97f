"""Sentence encoders of sentence-transformers, from the section ``model`` of a recipe."""

import tempfile
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from mfwrap.recipes.data.places import resolve_package
from mfwrap.recipes.models.loading import ModelError, check_weights_fit
from mfwrap.recipes.models.settings import ModelSettings, make_text_model


def make_sentence_encoder(model: ModelSettings) -> Any:
    """Build or load a ``SentenceTransformer``.

    A checkpoint of another library, and a model of a configuration, get the mean of the token
    embeddings as the embedding of a text, as sentence-transformers does.

    Args:
        model: Section ``model``.

    Raises:
        ModelError: If the section names a model of the user's own, or a tokenizer beside a path.
    """
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  (slow; part of an extra)

    if model.path is None and model.config is None:
        msg = "`type` must be left out for a sentence encoder; set `path` or `config`"
        raise ModelError(msg)
    if model.path is not None and model.tokenizer is not None:
        msg = f"`tokenizer` must be left out, as the encoder has its own, got {model.tokenizer!r}"
        raise ModelError(msg)
    settings: dict[str, Any] = {"dtype": getattr(torch, model.dtype), "use_safetensors": True}
    settings["ignore_mismatched_sizes"] = True  # `_check_weights` names them
    if model.attn_implementation is not None:
        settings["attn_implementation"] = model.attn_implementation
    if model.path is not None:
        encoder = SentenceTransformer(
            resolve_package("path", model.path),
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            model_kwargs=settings,
        )
        _check_weights(model, encoder[0])
    else:
        with tempfile.TemporaryDirectory(prefix="mfwrap-") as folder:
            tokenizer = model.make_tokenizer()
            tokenizer.chat_template = None  # texts would become messages
            network: Any = make_text_model(model, AutoModel, tokenizer)
            network.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            encoder = SentenceTransformer(folder, model_kwargs=settings)
    model.convert_parts(encoder)
    # The card of the model is mfwrap's. That of sentence-transformers would look for it on the hub.
    encoder.model_card_data.local_files_only = True
    return encoder


def _check_weights(model: ModelSettings, transformer: Any) -> None:
    """Check that the weights of a folder fit the network that sentence-transformers has loaded.

    sentence-transformers does not return which weights were missing, so transformers reads their
    names and shapes again.

    Args:
        model: Section ``model``.
        transformer: First module of the encoder.

    Raises:
        ModelError: If weights are missing or have another shape.
    """
    network, folder = getattr(transformer, "auto_model", None), model.folder()
    if folder is None or not isinstance(network, PreTrainedModel):
        return
    kind: Any = type(network)
    _, info = kind.from_pretrained(
        folder,
        config=network.config,
        device_map="meta",
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_weights_fit(str(folder), network, info)
