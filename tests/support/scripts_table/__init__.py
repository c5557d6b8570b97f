"""Scripts of other libraries, run with and without mfwrap, for docs/scripts_table.md."""
