"""The command line: one verb a file, each a few lines around the function of the same name in `memfit.api`.

Nothing here imports torch; `memfit.api` is imported by the verb that needs it.
"""

from memfit.cli.app import main

__all__ = ["main"]
