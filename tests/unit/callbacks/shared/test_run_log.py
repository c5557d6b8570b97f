"""Messages of callbacks go to standard output, or to the logging that the program configures."""

import logging
import os
import re
import subprocess
import sys

import pytest

from mfwrap.callbacks.shared.run_log import WarnOnce, run_logger

NAME = "mfwrap.callbacks.some_monitor"
SAY = f"from mfwrap.callbacks.shared.run_log import run_logger\nrun_logger({NAME!r}).info('said')\n"


@pytest.fixture(autouse=True)
def _levels():
    """Unset the levels of mfwrap's loggers before a test, and restore them afterwards."""
    loggers = [logging.getLogger(name) for name in ("mfwrap", "mfwrap.callbacks")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def run_program(program: str) -> tuple[str, str]:
    """Run a program in a new interpreter; return its standard output and error."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout, result.stderr


@pytest.mark.slow
def test_standard_output_where_nothing_is_configured():
    """Without configured logging, each message is printed once, in MindFormers' format."""
    out, err = run_program(SAY + SAY)
    line = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} - {re.escape(NAME)} - INFO - said\n"

    assert re.fullmatch(line * 2, out)
    assert err == ""


@pytest.mark.slow
def test_import_configures_nothing():
    """Importing the callbacks adds no handler and sets no level."""
    out, err = run_program(
        "import logging, mfwrap.callbacks\n"
        "for name in ('mfwrap', 'mfwrap.callbacks'):\n"
        "    logger = logging.getLogger(name)\n"
        "    print(logger.handlers, logger.level, logger.propagate)\n"
    )

    assert (out, err) == ("[] 0 True\n" * 2, "")


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_logging_of_the_program(early):
    """If a program configures logging, messages from then on go only to that logging."""
    configure = (
        "import logging, sys\nlogging.basicConfig(stream=sys.stderr, format='%(message)s')\n"
    )
    out, err = run_program(configure + SAY if early else SAY + configure + SAY)

    assert out.count("said") == (0 if early else 1)
    assert err == "said\n"


def test_a_level_that_was_set_stays(caplog):
    """`run_logger` keeps a level that the user has set."""
    logging.getLogger("mfwrap").setLevel(logging.WARNING)
    run_logger(NAME).info("hidden")
    run_logger(NAME).warning("seen")

    assert [record.getMessage() for record in caplog.records] == ["seen"]


def test_records_reach_the_root(caplog):
    """Messages reach the root logger, and no handler is added if the root logger has one."""
    run_logger(NAME).info("seen")

    assert [(record.name, record.getMessage()) for record in caplog.records] == [(NAME, "seen")]
    assert logging.getLogger("mfwrap").handlers == []


def test_a_warning_is_logged_once(caplog):
    """`WarnOnce` logs a text the first time only, and another text again."""
    warn = WarnOnce(NAME)
    for text in ("100 % lost", "100 % lost", "other"):
        warn(text)

    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        (NAME, "WARNING", "100 % lost"),
        (NAME, "WARNING", "other"),
    ]
