"""Settings that have changed."""

from mfwrap.callbacks.culprit.judges.settings import SettingChange
from support.cause_evidence import cause


def test_a_setting_that_has_changed():
    """It explains what a comparison of steps would explain otherwise."""
    changes = tuple(SettingChange(f"`{name}` of drop", 0.1, 0.9, 12) for name in ("p", "q"))
    found = cause(rank={"settings": changes})
    assert found.name == "setting"
    assert "`p` of drop changed from 0.1 to 0.9 in step 12, and 1 more" in found.explanation
