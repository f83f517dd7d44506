"""How often a run is verified, as people write it: in the first N planned steps, always, or off."""

from __future__ import annotations

from memfit.core.errors import MemfitError


def check_verify(verify: str | int, name: str = "verify=") -> None:
    """Raises MemfitError unless `verify` is a positive number of steps, 'always' or 'off'. name: how the user gave it."""
    text = str(verify)
    is_number = text.isascii() and text.isdigit() and int(text) > 0
    if isinstance(verify, bool) or not (is_number or text in ("always", "off")):
        raise MemfitError(
            f"{name}{text} is no number of steps. Give how many planned steps to verify, like 3, or `always`, or `off`."
        )
