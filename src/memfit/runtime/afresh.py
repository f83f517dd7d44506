"""Call a function of memfit's in a new process, JSON both ways: for programs that must begin from nothing a second time.

The process has this one's working directory and environment, no input, and its output is thrown away. Costs the import of torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_PACKAGES = str(Path(__file__).parents[2])  # the same memfit, wherever this one was imported from
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from memfit.runtime.afresh import answer; del sys.path[0]; answer(*sys.argv[2:])"


def call_afresh(function: str, task: Any) -> tuple[Any, str]:
    """(what `function(task)` gives, ''), or (None, why there is no answer) if the process died. function: 'memfit.api:watch_copy'."""
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        asked, answered = Path(folder, "task.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(task), encoding="utf-8")
        command = [sys.executable, "-c", _CODE, _PACKAGES, function, str(asked), str(answered)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if answered.exists():
            return json.loads(answered.read_text(encoding="utf-8")), ""
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return None, f"the process gave no answer (exit code {done.returncode}): {last}"


def answer(function: str, asked: str, answered: str) -> None:
    """In the new process."""
    module, _, name = function.partition(":")
    __import__(module)
    given = getattr(sys.modules[module], name)(json.loads(Path(asked).read_text(encoding="utf-8")))
    Path(answered).write_text(json.dumps(given), encoding="utf-8")
