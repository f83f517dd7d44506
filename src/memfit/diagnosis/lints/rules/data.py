"""MF911-MF913, MF921, MF922: data loaders and datasets, DataParallel, and batches split so that the mean changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memfit.diagnosis.lints.facts import BATCH_NORMS, CROSS_ENTROPIES
from memfit.diagnosis.lints.program import Event, Function, LoopNode, Program, dotted
from memfit.diagnosis.lints.queries import events_of, inside, names_in, says
from memfit.diagnosis.lints.report import Report
from memfit.diagnosis.lints.values import Value

_MANY = 10_000  # Python objects, below which the copied pages do not matter


def find_loaders_in_loops(program: Program) -> Iterator[Report]:
    """`DataLoader(..., num_workers=4)` made anew in every epoch from what does not change."""
    for event in events_of(program, "call"):
        call = event.node
        if event.value.kind != "loader" or not event.context.loops or not isinstance(call, ast.Call) or event.function is None:
            continue
        workers = next((item.value for item in call.keywords if item.arg == "num_workers"), None)
        if workers is None or says(workers, 0) or (isinstance(workers, ast.Constant) and not workers.value):
            continue
        loop = event.context.loops[-1]
        changing = {other.name for other in event.function.events if other.kind in ("bind", "augment") and inside(other, loop)}
        changing -= {dotted(target) for target in getattr(event.stmt, "targets", [])}
        if names_in(call) & changing or not _has_inner_loop(loop, event):
            continue
        yield Report(
            "MF911",
            call,
            "This starts new worker processes in every turn of the loop, and the old ones end only when the loader is collected.",
            "Make the loader once, before the loop; it can be iterated over again in every epoch.",
        )


def _has_inner_loop(loop: LoopNode, event: Event) -> bool:
    return any(part is not loop and isinstance(part, (ast.For, ast.AsyncFor, ast.While)) for part in ast.walk(loop))


def find_python_lists(program: Program) -> Iterator[Report]:
    """A dataset that holds many Python objects and reads them in __getitem__: forked workers copy the pages by reading."""
    for cls in program.classes.values():
        getitem = cls.methods.get("__getitem__")
        init = cls.methods.get("__init__")
        if getitem is None or init is None:
            continue
        read = {event.name for event in getitem.events if event.kind == "read" and event.name.startswith("self.")}
        for event in init.events:
            if event.kind not in ("bind", "store") or event.name not in read:
                continue
            count = _num_objects(event, init)
            if count >= _MANY:
                yield Report(
                    "MF912",
                    event.stmt,
                    f"`{event.name}` holds {count:,} Python objects: a worker that reads one writes its reference count, and the page is "
                    "copied, so that the memory grows by the whole list for every worker.",
                    "Keep them in one NumPy array or tensor, in Arrow, or in shared memory.",
                )


def _num_objects(event: Event, init: Function) -> int:
    """How many objects the list gets, where the source says so; arrays and lists of numbers count as none."""
    value = event.value
    if event.kind == "bind" and isinstance(event.stmt, (ast.Assign, ast.AnnAssign)):
        made = event.stmt.value
        while isinstance(made, ast.Call) and dotted(made.func) in ("list", "tuple", "sorted", "dict") and made.args:
            made = made.args[0]
        mapped = isinstance(made, ast.Call) and dotted(made.func) == "map"
        handed = isinstance(made, ast.Name) and value.kind in ("list", "dict")
        if not mapped and not handed and not isinstance(made, (ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.SetComp)):
            return 0
        return value.number or (len(value.items) if value.items else 0)
    if event.kind == "store" and event.context.loops and isinstance(event.node, ast.Call):
        return _turns(event.context.loops[-1], init)
    return 0


def _turns(loop: LoopNode, init: Function) -> int:
    for other in init.events:
        if other.kind == "call" and isinstance(loop, ast.For) and other.node is loop.iter:
            return other.value.number or 0
    return 0


def find_data_parallel(program: Program) -> Iterator[Report]:
    """nn.DataParallel gathers outputs and loss on the first card, which also holds the optimizer's state."""
    for event in events_of(program, "call"):
        if event.name == "torch.nn.DataParallel":
            yield Report(
                "MF913",
                event.node,
                "DataParallel gathers all outputs on the first device, which holds the gradients and the optimizer state too: it is "
                "full while the others are half empty.",
                "Use DistributedDataParallel, or compute the loss inside forward.",
            )


def find_means_of_means(program: Program) -> Iterator[Report]:
    """Losses averaged per micro-batch and then over micro-batches, where the number of counted tokens differs."""
    for event in events_of(program, "backward"):
        call = event.node
        if not event.context.loops or not isinstance(call, ast.Call) or event.function is None:
            continue
        loop = event.context.loops[-1]
        if not _is_divided(event, loop) or not _uses_mean(event, loop):
            continue
        why = _why_unequal(event, loop)
        if why:
            yield Report(
                "MF921",
                call,
                f"Each micro-batch is averaged by itself and the averages are averaged: {why}, so tokens in short ones weigh more than "
                "they would in one batch.",
                'Sum with reduction="sum" and divide by the number of counted tokens of the whole batch.',
            )


def _is_divided(event: Event, loop: LoopNode) -> bool:
    """`(loss / n).backward()`, or `loss = loss / n` before it in the loop, with one optimizer step for several backward passes."""
    assert event.function is not None
    assert isinstance(event.node, ast.Call)
    operand = event.node.func.value if isinstance(event.node.func, ast.Attribute) else event.node
    names = names_in(operand)
    divided = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div) for part in ast.walk(operand))
    for other in event.function.events:
        if other.kind in ("bind", "augment") and inside(other, loop) and other.name in names:
            if isinstance(other.stmt, ast.AugAssign):
                divided = divided or isinstance(other.stmt.op, ast.Div)
            elif isinstance(other.stmt, ast.Assign) and isinstance(other.stmt.value, ast.BinOp):
                divided = divided or isinstance(other.stmt.value.op, ast.Div)
    return divided and not _steps_every_turn(event, loop)


def _steps_every_turn(event: Event, loop: LoopNode) -> bool:
    """Whether each backward has its own optimizer step: then nothing is accumulated."""
    assert event.function is not None
    return any(
        other.kind == "step" and inside(other, loop) and set(other.context.arms) <= set(event.context.arms)
        for other in event.function.events
    )


def _losses(event: Event, loop: LoopNode) -> list[Event]:
    assert event.function is not None
    return [
        other
        for other in event.function.events
        if other.kind == "call"
        and inside(other, loop)
        and (other.name.endswith("cross_entropy") or other.base.op.rpartition(".")[2] in CROSS_ENTROPIES)
    ]


def _maker(loss: Event) -> ast.Call | None:
    made = loss.node if loss.name.endswith("cross_entropy") else loss.base.made_by
    return made if isinstance(made, ast.Call) else None


def _uses_mean(event: Event, loop: LoopNode) -> bool:
    losses = _losses(event, loop)
    return bool(losses) and not any(
        item.arg == "reduction" and not says(item.value, "mean") and getattr(item.value, "value", "") != "mean"
        for loss in losses
        if (made := _maker(loss)) is not None
        for item in made.keywords
    )


def _why_unequal(event: Event, loop: LoopNode) -> str:
    for loss in _losses(event, loop):
        made = _maker(loss)
        if made is not None and any(item.arg == "ignore_index" for item in made.keywords):
            return "ignore_index leaves out a different number of tokens in each"
    assert event.function is not None
    if isinstance(loop, ast.For):
        source = next(
            (other.value for other in event.function.events if other.kind == "read" and other.node is loop.iter), Value()
        )
        if isinstance(source.made_by, ast.ListComp):
            sizes = source.made_by.generators[0].iter
            written = sizes.elts if isinstance(sizes, (ast.Tuple, ast.List)) else []
            numbers = {size.value for size in written if isinstance(size, ast.Constant) and isinstance(size.value, int)}
            if len(numbers) > 1:
                return f"they have {ast.unparse(sizes)} rows"
    return ""


def find_split_batch_norms(program: Program) -> Iterator[Report]:
    """`for part in data.chunk(4): ... backward()` with a batch norm that sees one part at a time."""
    for event in events_of(program, "backward"):
        if not event.context.loops or event.function is None:
            continue
        loop = event.context.loops[-1]
        if not isinstance(loop, ast.For) or not _is_split(loop) or _steps_every_turn(event, loop):
            continue
        for other in event.function.events:
            if other.kind == "call" and inside(other, loop) and other.base.kind == "module" and other.base.parts & BATCH_NORMS:
                yield Report(
                    "MF922",
                    event.node,
                    "Batch norm takes its statistics from each part and updates its averages once for each: accumulating over parts "
                    "is not the large batch.",
                    "Lower memory by recomputing instead, or use GroupNorm, frozen or synchronised statistics.",
                )
                break


def _is_split(loop: ast.For) -> bool:
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in ("chunk", "split", "tensor_split")
        for part in ast.walk(loop.iter)
    )


def find_cycles_over_loaders(program: Program) -> Iterator[Report]:
    """`itertools.cycle(loader)` keeps a copy of every batch of the first round."""
    for event in events_of(program, "call"):
        call = event.node
        if event.name not in ("itertools.cycle", "cycle") or not isinstance(call, ast.Call) or not call.args:
            continue
        name = dotted(call.args[0]).lower()
        if event.args[0].kind == "loader" or "loader" in name:
            yield Report(
                "MF118",
                call,
                "itertools.cycle keeps every batch of the first round to play it again: the whole data set stays in memory, and no "
                "later round is shuffled.",
                "Write the loop out: `while True: for batch in loader: yield batch`.",
            )


def find_filling_datasets(program: Program) -> Iterator[Report]:
    """A dataset that keeps every sample it made: each worker process fills a cache of its own."""
    for cls in program.classes.values():
        getitem = cls.methods.get("__getitem__")
        if getitem is None or not any("Dataset" in base for base in cls.foreign_bases()):
            continue
        for event in getitem.events:
            if event.kind != "store" or not event.name.startswith("self.") or event.value.kind in ("number", "text"):
                continue
            if isinstance(event.node, ast.Call) and event.node.func.attr not in ("append", "setdefault"):  # type: ignore[attr-defined]
                continue
            removed = any(other.kind in ("empty", "delete") and other.name == event.name for other in getitem.events)
            if not removed:
                yield Report(
                    "MF914",
                    event.node,
                    f"`{event.name}` keeps every sample that __getitem__ made: each worker process fills a cache of its own, and loses "
                    "it at the end of the epoch.",
                    "Fill the cache before the workers start and share it (a tensor, a memory map), or bound it.",
                )


RULES = (
    find_cycles_over_loaders,
    find_filling_datasets,
    find_loaders_in_loops,
    find_python_lists,
    find_data_parallel,
    find_means_of_means,
    find_split_batch_norms,
)
