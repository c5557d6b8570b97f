"""``python -m device`` is `device.command`."""

from device.command import main

if __name__ == "__main__":
    main()
