"""Parts that several callbacks use: values of a step, progress of a run, log, settings."""
