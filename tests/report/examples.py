"""A result, a plan and a trace with round numbers, as the report tests draw them."""

from memfit.core.plan import Move, Plan
from memfit.core.result import Certificate, Result
from memfit.core.trace import Call, Cell, Handle, Storage, Trace

MIB = 1024**2
GIB = 1024**3

MOVES = (
    Move(
        "recompute",
        "bert.encoder.layer.0",
        ("a",),
        (),
        96 * MIB,
        0.0013,
        "Dropout masks come back from the random state.",
    ),
    Move(
        "recompute",
        "bert.encoder.layer.1",
        ("b",),
        (),
        64 * MIB,
        0.0009,
        "Dropout masks come back from the random state.",
    ),
    Move("recompute", "", ("c",), (), 1 * MIB, 0.0000013, "What layer_norm made comes back in backward."),
)

RESULT = Result(
    budget_bytes=3 * GIB,
    peak_bytes=3000 * MIB,
    peak_source="the live storages",
    peak_phase="backward",
    peak_step=2,
    planned_peak_bytes=3000 * MIB,
    eager_peak_bytes=4000 * MIB,
    predicted_peak_bytes=2985 * MIB,
    floor_bytes=GIB,
    step_seconds=1.5,
    eager_step_seconds=1.25,
    predicted_step_seconds=1.48,
    num_steps=300,
    num_measured_steps=300,
    num_planned_steps=299,
    installed=True,
    moves=MOVES,
    certificate=Certificate(44850, 44850, 450, 0, 12, True, True, 3),
    eager_bytes_by_kind={"activation": 2500 * MIB, "parameter": 1500 * MIB, "input": 0},
    bytes_by_kind={"activation": 1470 * MIB, "parameter": 1500 * MIB, "workspace": 30 * MIB},
    messages=("step 1: the guard let go of 12 saved tensors under pressure.",),
    program="train.py",
    versions={"memfit": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
)

PLAN = Plan(
    budget_bytes=3 * GIB,
    eager_peak_bytes=4000 * MIB,
    predicted_peak_bytes=2985 * MIB,
    floor_bytes=GIB,
    moves=MOVES,
    extra_seconds=0.25,
    lower_bound_seconds=0.2,
    eager_seconds=1.25,
    peak_phase="backward",
    solver="sweep",
    notes=("The peak is now in the optimizer step: less memory for activations would save nothing more.",),
)

# One linear call: 400 B of weights, 96 B saved, a workspace of 4 KiB while it runs.
TRACE = Trace(
    device="cpu",
    storages=(
        Storage(400, "parameter", "fc", "/home/me/project/nets/mlp.py:3", True),
        Storage(96, "activation", "fc", "/home/me/project/nets/mlp.py:9"),
        Storage(400, "gradient"),
    ),
    cells=(Cell(0), Cell(1, 0, "out0", -1, True)),
    handles=(Handle(1, 0),),
    calls=(Call("0|fc#0/0:linear", "linear", "fc", "/home/me/project/nets/mlp.py:9", 0.25, (0,), (1,)),),
    events=(
        ("alloc", 0),
        ("phase", 0),
        ("begin", 0),
        ("alloc", 1),
        ("save", 0),
        ("spike", 4096),
        ("end", 0),
        ("release", 1),
        ("phase", 2),
        ("unpack", 0),
        ("alloc", 2),
        ("drop", 0),
        ("phase", 3),
        ("release", 2),
    ),
    step_seconds=0.5,
    meta={"program": "train.py", "peak_source": "the live storages"},
)
