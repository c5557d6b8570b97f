"""Convert the sections ``runner_wrapper`` and ``optimizer``."""

from collections.abc import Mapping
from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.source import SourceFile
from mfwrap.runner.mindformers.training import Layout
from mfwrap.runner.ranges import is_number
from mfwrap.runner.sections import OPTIMIZER_KEYS_WITHOUT_MEANING

_SCALE = {
    "type": "DynamicLossScaleUpdateCell",
    "loss_scale_value": 65536,
    "scale_factor": 2,
    "scale_window": 1000,
}
_PLAIN = frozenset({"TrainOneStepCell", "wrapper"})
_WITHOUT_CLIPPING = _PLAIN | {"TrainOneStepWithLossScaleCell", "loss_scale_wrapper"}
_PIPELINE = frozenset({"MFPipelineWithLossScaleCell", "pipeline_wrapper"})
_WRAPPER_WITHOUT_EFFECT = frozenset({"enable_check_overflow", "micro_batch_num"})
_OPTIMIZER_NAMES: Mapping[str, str] = {
    "adafactor": "Adafactor",
    "adamw": "AdamWeightDecay",
    "fp32_adamw": "FP32StateAdamWeightDecay",
    "fused_adamw": "FusedAdamWeightDecay",
}
"""Class of each optimizer that MindFormers registers under a second name."""


def take_wrapper(source: SourceFile, layout: Layout, *, is_language_model: bool) -> dict[str, Any]:
    """Return the section ``runner_wrapper``.

    Every setting that MindFormers has a default for is set, because mfwrap's defaults differ.

    Source: MindFormers, ``build_wrapper`` and ``WrapperConfig``.

    Args:
        source: File, whose section and top-level switches are taken.
        layout: How the batch of an update is divided.
        is_language_model: Whether the loss is a mean over tokens.

    Raises:
        RecipeError: If the section is not a mapping.
    """
    is_missing = ("runner_wrapper",) not in source
    source.ignore_keys(("runner_wrapper",), _WRAPPER_WITHOUT_EFFECT)
    wrapper = source.mapping("runner_wrapper")
    kind = wrapper.pop("type", None) or "MFTrainOneStepCell"
    sens = wrapper.pop("sens", None)
    clips = is_missing or (layout.is_automatic and layout.micro_batches > 1)
    if kind in _WITHOUT_CLIPPING or kind in _PIPELINE:
        source.notes.append(f"runner_wrapper.type: {kind} becomes MFTrainOneStepCell")
        clips = kind in _PIPELINE
    if kind in _WITHOUT_CLIPPING | _PIPELINE | {"mf_wrapper"}:
        kind = "MFTrainOneStepCell"
    if wrapper.get("scale_sense") is None:
        wrapper["scale_sense"] = _SCALE if is_missing else (1.0 if sens is None else sens)
    wrapper["scale_sense"] = _fixed(wrapper["scale_sense"])
    if wrapper.get("use_clip_grad") is None:
        wrapper["use_clip_grad"] = clips
    if source.flag("use_skip_data_by_global_norm"):
        wrapper["use_skip_data_by_global_norm"] = True
    per_token = source.flag("calculate_per_token_loss")
    if wrapper.get("calculate_per_token_loss") is None:
        has_parts = layout.is_automatic and layout.processes > 1 and is_language_model
        wrapper["calculate_per_token_loss"] = per_token or _is_joint(
            source, layout, has_parts=has_parts
        )
    return {"type": kind, **wrapper}


def _is_joint(source: SourceFile, layout: Layout, *, has_parts: bool) -> bool:
    """Return whether the loss must be divided by the number of targets of the whole update.

    In automatic parallel training, MindFormers divides the loss of a micro-batch by the number of
    its targets on all processes.
    """
    key = "runner_wrapper.calculate_per_token_loss"
    if has_parts and layout.micro_batches == 1:
        source.notes.append(f"{key}: true, as MindFormers counts the targets of all processes")
        return True
    if has_parts:
        says = "each process counts its own targets, MindFormers those of all processes together"
        source.notes.append(f"{key}: {says}; equal if all rows have equally many targets")
    return False


def _fixed(scale: Any) -> Any:
    """Return a fixed loss scale for a dynamic one whose factor is 1."""
    if isinstance(scale, dict) and scale.get("scale_factor") == 1:
        return {"type": "FixedLossScaleUpdateCell", "loss_scale_value": scale["loss_scale_value"]}
    return scale


def take_optimizer(source: SourceFile) -> dict[str, Any]:
    """Return the section ``optimizer``.

    Args:
        source: File, whose section is taken.

    Raises:
        RecipeError: If the section is missing or not a mapping, or a number is none.
    """
    section = ("optimizer",)
    sens = _unscaled_sens(source)
    source.ignore_keys(section, OPTIMIZER_KEYS_WITHOUT_MEANING)
    optimizer = source.mapping("optimizer")
    kind = optimizer.get("type")
    if kind is None:
        says = "required, because the optimizer determines the numbers; add the section to the file"
        raise source.document.error(section, says)
    if isinstance(kind, str):
        optimizer["type"] = _OPTIMIZER_NAMES.get(kind, kind)
    if optimizer.get("type") == "Muon":
        complete_muon(source, optimizer)
    is_undecayed = str(optimizer.get("type")).endswith("AdamWeightDecay")
    if optimizer.get("eps") is None and is_undecayed:
        optimizer["eps"] = 1e-6
    if sens != 1:
        eps = optimizer.get("eps", 1e-8)
        if not is_number(eps):
            raise source.document.error(
                ("optimizer", "eps"), f"expected a number, got {shown(eps)}"
            )
        optimizer["eps"] = eps / sens
        says = f"divided by sens {sens:g}, as MindSpore does not divide the gradients by it"
        source.notes.append(f"optimizer.eps: {says}")
    return optimizer


def complete_muon(source: SourceFile, optimizer: dict[str, Any]) -> None:
    """Set what MindFormers' Muon does if the file says nothing, or something else.

    Source: MindFormers, ``GPTModel.make_model_muon_fns``. Its Muon takes only networks with
    multi-head latent attention.
    """
    says = (
        "MindFormers' Muon divides the projections of latent attention by their parts, and takes "
        "each expert as a matrix; the recipe takes each projection whole, and trains experts with "
        "AdamW if they share a parameter"
    )
    source.lose("optimizer", ("optimizer", "type"), says)
    for key, value in {"weight_decay": 0.0, "qk_clip_threshold": 100}.items():
        if optimizer.get(key) is None:
            optimizer[key] = value
    if optimizer.pop("ns_steps", None) is not None:  # its Muon always takes 5 iterations
        source.without_effect.append("optimizer.ns_steps")


def _unscaled_sens(source: SourceFile) -> float:
    """Return the factor of the gradients that the optimizer gets, which is 1 for most wrappers."""
    wrapper = source.document.data.get("runner_wrapper")
    if not isinstance(wrapper, dict) or wrapper.get("type") not in _PLAIN:
        return 1.0
    sens: Any = wrapper.get("sens")
    return float(sens) if is_number(sens) and sens > 0 else 1.0
