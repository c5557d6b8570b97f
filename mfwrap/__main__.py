"""``python -m mfwrap``: the command line."""

from mfwrap.cli import main

if __name__ == "__main__":
    main()
