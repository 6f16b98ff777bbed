"""``python -m lowbit`` and the command ``lowbit``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; where it cannot be imported, ``lowbit doctor`` says why all the same."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from lowbit import cli
    except (ImportError, OSError) as error:
        if arguments[:1] == ["doctor"]:
            from lowbit import doctor

            return doctor.main(arguments[1:])
        print(f"lowbit: {' '.join(str(error).split())} (`lowbit doctor` says more)", file=sys.stderr)
        return 2
    return cli.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
