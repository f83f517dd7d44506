"""Static rules: what a program's source tells about its memory. `ast` to read, libcst to mend, no torch."""

from memfit.diagnosis.lints.check import Checked, Chosen, check_file, check_paths, check_text

__all__ = ["Checked", "Chosen", "check_file", "check_paths", "check_text"]
