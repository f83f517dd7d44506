"""`python -m memfit`: the same as the command `memfit`."""

from memfit.cli import main

if __name__ == "__main__":
    main()
