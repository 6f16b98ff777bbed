"""``python -m lowbit`` is the command ``lowbit``."""

from lowbit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
