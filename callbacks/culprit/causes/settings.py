"""Rule for settings of the program that have changed."""

from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence
from mfwrap.callbacks.culprit.judges.settings import listed


def changed(evidence: CauseEvidence) -> Cause | None:
    """Find settings that have changed for the first time in the last steps."""
    changes = evidence.blamed.settings
    if not changes:
        return None
    return Cause("setting", listed(changes), "look at what sets it, and whether it was meant")
