"""Variables let go at run time against the same program plain, and with `del` written by hand: peak, equality, time.

    python benchmarks/release.py -o benchmarks/results/release.json

Two programs: one shaped like the advice this technique is known from (large intermediates of several stages in one function), and a
training step whose logits outlive the loss. Each runs in a process of its own; bytes are the
allocator's own trace (oracle.py) of the third step, equality is of every loss and parameter, time is CPU seconds of the steps
after that, one thread, against the plain program run in turn with it in the same process.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from memfit.techniques.release import KEEP, NAMES, RELEASE, load_code, releases
from oracle import measure_step, time_step

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
STAGES = """
encoder = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)

@torch.no_grad()
def features(x):
    answers_types_emb_all = x.repeat(1, 4096).tanh()
    answers = answers_types_emb_all.view(len(x), 16, -1).mean(2)
    {del_0}
    questions_emb_all = x.repeat(1, 4096).sigmoid()
    questions = questions_emb_all.view(len(x), 16, -1).mean(2)
    {del_1}
    passages_emb_all = x.repeat(1, 4096).exp()
    passages = passages_emb_all.view(len(x), 16, -1).mean(2)
    {del_2}
    return answers + questions + passages

def step():
    x = torch.randn(32, 16)
    loss = (encoder(x) * features(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), list(encoder.parameters())
"""
LOGITS = """
model = nn.Sequential(nn.Linear(32, 64), nn.GELU())
head = nn.Linear(64, 8192)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

def step():
    x, y = torch.randn(128, 32), torch.randint(8192, (128,))
    logits = head(model(x))
    loss = F.cross_entropy(logits, y)
    {del_0}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), [*model.parameters(), *head.parameters()]
"""
PROGRAMS = {
    "three stages in one function": (
        STAGES,
        ("del answers_types_emb_all", "del questions_emb_all", "del passages_emb_all"),
    ),
    "logits that outlive the loss": (LOGITS, ("del logits",)),
}
PLAIN, BY_HAND, RELEASED = "plain", "del by hand", "release"
NUM_STEPS, NUM_PAIRS = 3, 15


def load(name: str, how: str) -> Any:
    """The program's `step`, its model just made."""
    text, dels = PROGRAMS[name]
    lines = {f"del_{index}": line if how == BY_HAND else "pass" for index, line in enumerate(dels)}
    releases.mode = RELEASE if how == RELEASED else KEEP
    torch.manual_seed(0)
    names: dict[str, Any] = {**NAMES, "__name__": "program"}
    exec(load_code((HEAD + text.format(**lines)).encode(), "program.py", is_main=False), names)
    return names["step"]


def measure(name: str, how: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    step = load(name, how)
    digest = hashlib.sha256()
    for _ in range(NUM_STEPS):
        (loss, parameters), memory = measure_step(step)
        digest.update(repr(loss).encode())
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
    plain = load(name, PLAIN)
    ratios = []
    for index in range(NUM_PAIRS):
        runs = [(step, how), (plain, PLAIN)] if index % 2 else [(plain, PLAIN), (step, how)]
        seconds = []
        for run, mode in runs:
            releases.mode = RELEASE if mode == RELEASED else KEEP
            seconds.append(time_step(run)[0])
        ratios.append(seconds[0] / seconds[1] if index % 2 else seconds[1] / seconds[0])
    return {
        "program": name,
        "variant": how,
        "peak_bytes": memory.peak_bytes,
        "baseline_bytes": memory.baseline_bytes,
        "digest": digest.hexdigest()[:16],
        "cpu_time_ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("release.json"))
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for name in PROGRAMS:
        for how in (PLAIN, BY_HAND, RELEASED):
            done = subprocess.run([sys.executable, __file__, "--one", name, how], capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    lines = ["| program | variant | peak MiB | of plain | equal to plain | CPU time |", "|---|---|---:|---:|---|---:|"]
    for row in rows:
        plain = next(each for each in rows if each["program"] == row["program"])
        row["equal"] = row["digest"] == plain["digest"]
        share = row["peak_bytes"] / plain["peak_bytes"]
        lines.append(
            f"| {row['program']} | {row['variant']} | {row['peak_bytes'] / 2**20:.2f} | {share:.1%} "
            f"| {'yes' if row['equal'] else 'NO'} | {row['cpu_time_ratio']:.2f}x |"
        )
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {datetime.date.today()}"
    options.output.write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    options.output.with_suffix(".md").write_text("\n".join([*lines, "", where, ""]))
    print("\n".join(lines))
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
