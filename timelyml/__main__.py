"""`python -m timelyml`: the command line, where no script is installed."""

from __future__ import annotations

from timelyml.cli import main

if __name__ == "__main__":
    main()
