"""Settings of checkpoints are checked at construction."""

import pytest

from mfwrap.callbacks import CheckpointConfig


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"save_checkpoint_steps": -1}, ValueError, "`save_checkpoint_steps` must be >= 0"),
        ({"save_checkpoint_steps": 1.0}, TypeError, "`save_checkpoint_steps` must be an int"),
        ({"save_checkpoint_steps": 0}, ValueError, "must be 0, got 0 and 0"),
        ({"save_checkpoint_seconds": 9}, ValueError, "must be 0, got 1 and 9"),
        ({"keep_checkpoint_per_n_minutes": 9}, ValueError, "must be 0, got 5 and 9"),
        ({"integrated_save": False}, ValueError, "`integrated_save` must be True, got False"),
        ({"async_save": True}, ValueError, "`async_save` must be False, got True"),
        ({"enc_key": b"key"}, ValueError, "`enc_key` must be None"),
        ({"enc_mode": "SM4-CBC"}, ValueError, "`enc_mode` must be 'AES-GCM'"),
        ({"crc_check": True}, ValueError, "`crc_check` must be False"),
        ({"remove_redundancy": True}, ValueError, "`remove_redundancy` must be False"),
        ({"exception_save": 1}, TypeError, "`exception_save` must be a bool"),
        ({"format": "pickle"}, ValueError, "`format` must be one of"),
        ({"saved_network": 3}, TypeError, "`saved_network` must be a torch.nn.Module, got 3"),
        ({"append_info": ["epoch"]}, TypeError, "`append_info` must hold"),
        (
            {"append_info": [{"a": 1}], "format": "safetensors"},
            ValueError,
            "`append_info` must have no mapping",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(settings, error, match):
    """Wrong, unsupported and contradictory settings raise an error that names the setting."""
    with pytest.raises(error, match=match):
        CheckpointConfig(**settings)


def test_info_is_all_mappings_together():
    """`info` merges all mappings in `append_info` and leaves out MindSpore's names."""
    assert CheckpointConfig(append_info=["epoch_num", {"a": 1}, {"b": 2}]).info == {"a": 1, "b": 2}
