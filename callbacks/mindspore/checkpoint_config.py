"""Settings of `ModelCheckpoint`: when it writes checkpoints, and which checkpoints it keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from mfwrap.arguments import check_bool, check_choice, check_int, described

_NOT_SUPPORTED = frozenset(
    {"integrated_save", "async_save", "enc_key", "enc_mode", "crc_check", "remove_redundancy"}
)
"""Settings that must have their default."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Settings of `ModelCheckpoint`.

    Source: MindSpore, ``train.CheckpointConfig``. There, two settings that exclude each other are
    not an error: the first takes precedence silently, even if it only has its default value.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range or not supported, or two settings exclude each other.
    """

    save_checkpoint_steps: int = 1
    """Steps from one checkpoint to the next; 0 to save by seconds instead."""

    save_checkpoint_seconds: int = 0
    """Seconds from one checkpoint to the next, checked after each step; 0 to save by steps."""

    keep_checkpoint_max: int = 5
    """Number of newest checkpoints to keep; 0 to keep by `keep_checkpoint_per_n_minutes` or, if
    that is 0 too, to keep all."""

    keep_checkpoint_per_n_minutes: int = 0
    """Keep one checkpoint for each period of this many minutes, and the newest; 0 turns this
    off."""

    integrated_save: bool = True
    """Must be True: every rank has whole weights."""

    async_save: bool = False
    """Must be False: a checkpoint is complete when the callback returns."""

    saved_network: nn.Module | None = None
    """Network to save; ``None`` for the network that is trained."""

    append_info: Sequence[str | Mapping[str, Any]] | None = None
    """Mappings of numbers, strings and tensors to add to the checkpoint. (MindSpore's entries
    ``"epoch_num"`` and ``"step_num"`` are accepted without effect: both numbers are always
    saved.)"""

    enc_key: bytes | None = None
    """Must be ``None``: encryption is not supported."""

    enc_mode: str = "AES-GCM"
    """Must be the default: encryption is not supported."""

    exception_save: bool = False
    """Save ``<prefix>-<epoch>_<step>_breakpoint`` when the training raises an error."""

    crc_check: bool = False
    """Must be False: ``torch.save`` always writes checksums, and ``torch.load`` compares them."""

    remove_redundancy: bool = False
    """Must be False: only the main process saves, so nothing is redundant."""

    format: Literal["ckpt", "safetensors"] = "ckpt"
    """``"ckpt"``: network, optimizer, training cell and counters, for ``torch.load(file,
    weights_only=True)``. ``"safetensors"``: the network's weights only."""

    def __post_init__(self) -> None:
        """Check the settings."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_int(field.name, value, minimum=0)
            if field.name in _NOT_SUPPORTED and value != field.default:
                msg = f"`{field.name}` must be {field.default!r}, got {value!r}; leave it out"
                raise ValueError(msg)
        if bool(self.save_checkpoint_steps) == bool(self.save_checkpoint_seconds):
            msg = (
                "exactly one of `save_checkpoint_steps` and `save_checkpoint_seconds` must be 0, "
                f"got {self.save_checkpoint_steps} and {self.save_checkpoint_seconds}"
            )
            raise ValueError(msg)
        if self.keep_checkpoint_max and self.keep_checkpoint_per_n_minutes:
            msg = (
                "`keep_checkpoint_max` or `keep_checkpoint_per_n_minutes` must be 0, got "
                f"{self.keep_checkpoint_max} and {self.keep_checkpoint_per_n_minutes}"
            )
            raise ValueError(msg)
        check_bool("exception_save", self.exception_save)
        check_choice("format", self.format, ("ckpt", "safetensors"))
        if self.saved_network is not None and not isinstance(self.saved_network, nn.Module):
            msg = f"`saved_network` must be a torch.nn.Module, got {described(self.saved_network)}"
            raise TypeError(msg)
        self._check_info()

    def _check_info(self) -> None:
        for entry in self.append_info or ():
            if not isinstance(entry, Mapping) and entry not in {"epoch_num", "step_num"}:
                msg = f'`append_info` must hold "epoch_num", "step_num" and mappings, got {entry!r}'
                raise TypeError(msg)
        if self.format == "safetensors" and self.info:
            msg = (
                "`append_info` must have no mapping with format='safetensors', which holds "
                "weights only; use format='ckpt'"
            )
            raise ValueError(msg)

    @property
    def info(self) -> dict[str, Any]:
        """Entries of all mappings in `append_info`."""
        mappings = [entry for entry in self.append_info or () if isinstance(entry, Mapping)]
        return {name: value for mapping in mappings for name, value in mapping.items()}
