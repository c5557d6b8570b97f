"""Weights of 4 or 8 bits, which bitsandbytes computes with below an adapter (QLoRA)."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from mfwrap.names import hint


def quantization_config(settings: Mapping[str, Any], dtype: str) -> BitsAndBytesConfig:
    """Return transformers' configuration of quantized weights.

    Args:
        settings: Arguments of ``BitsAndBytesConfig``.
        dtype: Default of ``bnb_4bit_compute_dtype``.

    Raises:
        ValueError: If a key is unknown, or a value is wrong.
    """
    known = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
    for key in settings:
        if key not in known:
            msg = f"`quantization.{key}` is not a key of BitsAndBytesConfig{hint(key, known)}"
            raise ValueError(msg)
    if settings.get("load_in_4bit") is not True and settings.get("load_in_8bit") is not True:
        says = "must have `load_in_4bit: true` or `load_in_8bit: true`"
        msg = f"`quantization` {says}, got {dict(settings)!r:.80}"
        raise ValueError(msg)
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("fp4", "nf4"):
        msg = f"`quantization.bnb_4bit_quant_type` must be 'nf4' or 'fp4', got {kind!r:.80}"
        raise ValueError(msg)
    try:
        return BitsAndBytesConfig(**{"bnb_4bit_compute_dtype": dtype, **settings})
    except (AttributeError, TypeError, ValueError) as error:
        msg = f"`quantization` is refused by BitsAndBytesConfig: {error}"
        raise ValueError(msg) from error


def why_no_kernels(settings: Mapping[str, Any]) -> str | None:
    """Return why this machine cannot compute with quantized weights; ``None`` if it can.

    A few numbers are quantized on the device that a training would use.

    Args:
        settings: Arguments of ``BitsAndBytesConfig``.
    """
    try:
        import bitsandbytes  # noqa: PLC0415  (slow; part of an extra)
    except ImportError:
        return 'bitsandbytes is not installed; install it with pip install "mfwrap[qlora]"'
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    library, numbers = bitsandbytes.functional, torch.ones(64, 64, device=device)
    try:
        if settings.get("load_in_4bit"):
            library.dequantize_4bit(*library.quantize_4bit(numbers))
        else:
            library.int8_vectorwise_quant(numbers.half())
    except Exception as error:  # noqa: BLE001  (a missing library, a missing operator, ...)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"bitsandbytes {bitsandbytes.__version__} fails on {device.type}: {said}"
    return None
