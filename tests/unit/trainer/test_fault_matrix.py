"""After a fault at any step, neither of two ranks hangs, and each rank says what happened."""

import pytest

from support.ranks.fault_matrix import FAULTS, MOMENTS, NUM_UPDATES, train_with_fault

ENDING = ("exception", "checked NaN loss", "kill")
"""Faults that end the training of a rank."""


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("struck", [[1], [0, 1]], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_a_step(tmp_path, fault, moment, struck):
    """The training continues, stops on both ranks, or ends with an error that names the rank."""
    outcomes = train_with_fault(tmp_path, fault, moment, struck)

    assert None not in [outcome.status for outcome in outcomes], "a rank hung"
    for rank, outcome in enumerate(outcomes):
        if fault == "kill" and rank in struck:
            assert outcome.status == -9
        elif fault == "exception" and rank in struck:
            assert outcome.error == "ValueError: the batch is damaged"
        elif fault == "checked NaN loss" and rank in struck:
            step = MOMENTS[moment]
            assert (
                outcome.error == f"ValueError: the training stops: the loss of step {step} is nan"
            )
        elif fault in ENDING:
            assert outcome.error.startswith("RuntimeError: ")
            cause = "does not answer" if fault == "kill" else "has raised ValueError in update"
            assert f"rank 1 {cause}" in outcome.notes
        else:
            assert (outcome.status, outcome.error) == (75 if fault == "SIGTERM" else 0, "")
    if fault == "SIGTERM":
        stopped = outcomes[0].step
        assert stopped in (MOMENTS[moment], MOMENTS[moment] + 1)
        assert (tmp_path / "run" / f"checkpoint-{stopped}" / "trainer_state.json").is_file()
    elif fault not in ENDING:
        assert outcomes[0].step == NUM_UPDATES
    if fault not in ENDING:
        assert outcomes[0].step == outcomes[1].step
        assert outcomes[0].weights == outcomes[1].weights
