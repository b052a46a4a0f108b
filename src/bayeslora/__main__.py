"""``python -m bayeslora`` is the command ``bayeslora``."""

from bayeslora.cli import main

if __name__ == "__main__":
    main()
