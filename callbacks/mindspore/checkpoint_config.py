"""When MindSpore's checkpoints are written, and which are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from mfwrap.arguments import check_bool, check_int
from mfwrap.callbacks.mindspore.monitored_value import check_one_of

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Settings of `ModelCheckpoint`.

    Source: MindSpore, ``train.CheckpointConfig``, where of two settings that exclude each other the
    first wins in silence, be it by its default.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, has no meaning here, or two exclude each
            other.
    """

    save_checkpoint_steps: int = 1
    """Steps from one checkpoint to the next; 0 for seconds."""

    save_checkpoint_seconds: int = 0
    """Seconds from one checkpoint to the next, looked at after each step; 0 for steps."""

    keep_checkpoint_max: int = 5
    """Checkpoints that are kept, the newest ones; 0 for minutes, or to keep all."""

    keep_checkpoint_per_n_minutes: int = 0
    """Keep the first checkpoint of each such span, and the newest; 0 for none of it."""

    integrated_save: bool = True
    """Only True: every rank has whole weights."""

    async_save: bool = False
    """Only False: a checkpoint is in place when the step's callbacks are done."""

    saved_network: nn.Module | None = None
    """What is saved, if it is not the network that is trained."""

    append_info: Sequence[str | Mapping[str, Any]] | None = None
    """Mappings of numbers, strings and tensors that are saved, too. (MindSpore's ``"epoch_num"``
    and ``"step_num"`` are always there.)"""

    enc_key: bytes | None = None
    """Only ``None``: no encryption."""

    enc_mode: str = "AES-GCM"
    """Only the default."""

    exception_save: bool = False
    """Save when the training raises, as ``<prefix>-<epoch>_<step>_breakpoint``."""

    crc_check: bool = False
    """Only False: a file has check sums anyway, which are compared when it is loaded."""

    remove_redundancy: bool = False
    """Only False: one rank saves, once."""

    format: Literal["ckpt", "safetensors"] = "ckpt"
    """``"ckpt"``: network, optimizer, training cell and numbers, for ``torch.load(file,
    weights_only=True)``. ``"safetensors"``: the network's weights alone."""

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        for name in (
            "save_checkpoint_steps",
            "save_checkpoint_seconds",
            "keep_checkpoint_max",
            "keep_checkpoint_per_n_minutes",
        ):
            check_int(name, getattr(self, name), minimum=0)
        if bool(self.save_checkpoint_steps) == bool(self.save_checkpoint_seconds):
            msg = (
                "one of `save_checkpoint_steps` and `save_checkpoint_seconds` must be 0, the other "
                f"not, got {self.save_checkpoint_steps} and {self.save_checkpoint_seconds}"
            )
            raise ValueError(msg)
        if self.keep_checkpoint_max and self.keep_checkpoint_per_n_minutes:
            msg = (
                "one of `keep_checkpoint_max` and `keep_checkpoint_per_n_minutes` must be 0, got "
                f"{self.keep_checkpoint_max} and {self.keep_checkpoint_per_n_minutes}"
            )
            raise ValueError(msg)
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                msg = f"`{name}` must be {only!r}, got {getattr(self, name)!r}"
                raise ValueError(msg)
        check_bool("exception_save", self.exception_save)
        check_one_of("format", self.format, ("ckpt", "safetensors"))
        if self.saved_network is not None and not isinstance(self.saved_network, nn.Module):
            msg = f"`saved_network` must be a module, got {type(self.saved_network).__name__}"
            raise TypeError(msg)
        self._check_info()

    def _check_info(self) -> None:
        for entry in self.append_info or ():
            if not isinstance(entry, Mapping) and entry not in {"epoch_num", "step_num"}:
                msg = f'`append_info` must hold "epoch_num", "step_num" and mappings, got {entry!r}'
                raise TypeError(msg)
        if self.format == "safetensors" and self.info:
            msg = "`append_info` must hold no mapping with format='safetensors', weights alone"
            raise ValueError(msg)

    @property
    def info(self) -> dict[str, Any]:
        """What is saved beside."""
        mappings = [entry for entry in self.append_info or () if isinstance(entry, Mapping)]
        return {name: value for mapping in mappings for name, value in mapping.items()}


_ONLY: Mapping[str, object] = {
    "integrated_save": True,
    "async_save": False,
    "enc_key": None,
    "enc_mode": "AES-GCM",
    "crc_check": False,
    "remove_redundancy": False,
}
"""Settings that nothing stands for, with the one value that they may have."""
