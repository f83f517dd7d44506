"""Traces without a model: a step written call by call, whose backward pass follows from what was saved.

Used where a test must know every byte (hand-written chains) and to exercise the planner on shapes of real networks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from memfit.core.trace import PHASES, Call, Cell, Handle, Storage, Trace

MIB = 1024**2


@dataclass
class _Node:
    """One call in the graph: its inputs and result (cells) and the handles autograd saved in it."""

    inputs: list[int]
    result: int
    handles: list[int]
    seconds: float


class Step:
    """Builds a Trace. Cells are given and returned by index.

    The program lets go of a result when `release` is called or, with `auto_release`, right after its last reader.
    """

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.cells: list[Cell] = []
        self.handles: list[Handle] = []
        self.calls: list[Call] = []
        self.events: list[tuple[str, int]] = []
        self.nodes: list[_Node] = []
        self.is_held: set[int] = set()
        self.step_seconds = 0.0
        self.phase("forward")

    def phase(self, name: str) -> None:
        self.events.append(("phase", PHASES.index(name)))

    def spike(self, num_bytes: int) -> None:
        self.events.append(("spike", num_bytes))

    def storage(self, nbytes: int, kind: str, module: str = "", persistent: bool = False) -> int:
        """A storage, allocated now and held by the program."""
        self.storages.append(Storage(nbytes, kind, module, "", persistent))
        self.events.append(("alloc", len(self.storages) - 1))
        self.is_held.add(len(self.storages) - 1)
        return len(self.storages) - 1

    def external(self, nbytes: int, kind: str = "parameter") -> int:
        """A cell from outside: a parameter (persistent) or an input."""
        self.cells.append(Cell(self.storage(nbytes, kind, persistent=kind != "input")))
        return len(self.cells) - 1

    def release(self, *cells: int) -> None:
        """The program lets go of the cells' storages."""
        for cell in cells:
            storage = self.cells[cell].storage
            if storage in self.is_held:
                self.is_held.remove(storage)
                self.events.append(("release", storage))

    def save(self, cell: int, call: int = -1) -> int:
        self.handles.append(Handle(cell, call))
        self.events.append(("save", len(self.handles) - 1))
        return len(self.handles) - 1

    def unpack(self, *handles: int) -> None:
        self.events.extend(("unpack", handle) for handle in handles)

    def drop(self, *handles: int) -> None:
        self.events.extend(("drop", handle) for handle in handles)

    def call(
        self,
        function: str,
        inputs: list[int],
        nbytes: int,
        saves: tuple[int, ...] = (),
        *,
        saves_result: bool = False,
        internal: tuple[int, ...] = (),
        seconds: float = 1.0,
        module: str = "",
        extra_bytes: int = 0,
        in_place: bool = False,
        evictable: bool = True,
    ) -> int:
        """Run a call that makes one result of `nbytes` (or overwrites inputs[0]); returns the result's cell.

        saves: cells among the inputs that autograd saves. internal: bytes of tensors only autograd sees (dropout
        masks).
        """
        index = len(self.calls)
        self.calls.append(None)  # type: ignore[arg-type]  # known at the end of the call
        self.events.append(("begin", index))
        outputs, saved = [], [self.save(cell, index) for cell in saves]
        for number, size in enumerate(internal, start=len(saves)):
            self.cells.append(Cell(self.storage(size, "activation", module), index, f"in{number}", -1, evictable))
            outputs.append(len(self.cells) - 1)
            saved.append(self.save(outputs[-1], index))
            self.release(outputs[-1])
        if extra_bytes:
            self.spike(extra_bytes)
        if in_place:
            previous = inputs[0]
            self.cells.append(Cell(self.cells[previous].storage, index, "mut0", previous, evictable))
        else:
            self.cells.append(Cell(self.storage(nbytes, "activation", module), index, "out0", -1, evictable))
        result = len(self.cells) - 1
        outputs.append(result)
        if saves_result:
            saved.append(self.save(result, index))
        self.events.append(("end", index))
        place = f"0|{module}#0/{index}:{function}"
        self.calls[index] = Call(
            place, function, module, "", seconds, tuple(dict.fromkeys(inputs)), tuple(outputs), extra_bytes
        )
        self.nodes.append(_Node(inputs, result, saved, seconds))
        self.step_seconds += seconds
        return result

    def backward(self, gradients: bool = True) -> None:
        """Every call's backward in reverse order: unpack, make its inputs' gradients, drop, let its own gradient go."""
        self.phase("backward")
        made: dict[int, int] = {}
        for node in reversed(self.nodes):
            self.unpack(*reversed(node.handles))
            for cell in dict.fromkeys(node.inputs) if gradients else ():
                storage = self.cells[cell].storage
                kind = self.storages[storage].kind
                if storage not in made and kind in ("activation", "parameter"):
                    made[storage] = self.storage(
                        self.storages[storage].nbytes, "gradient" if kind == "parameter" else "temporary"
                    )
            self.drop(*node.handles)
            self.step_seconds += 2 * node.seconds
            storage = self.cells[node.result].storage
            if storage in made and all(self.cells[cell].storage != storage for cell in node.inputs):
                self.events.append(("release", made.pop(storage)))
        self.phase("optimizer step")

    def trace(self) -> Trace:
        return Trace(
            "cpu",
            tuple(self.storages),
            tuple(self.cells),
            tuple(self.handles),
            tuple(self.calls),
            tuple(self.events),
            self.step_seconds,
            {"signature": "synthetic"},
        )


def chain(sizes: list[int], seconds: list[float] | None = None) -> Trace:
    """A chain of calls, each saving its result; the program lets go of a result once the next is made."""
    step = Step()
    previous = step.external(1, "input")
    for number, size in enumerate(sizes):
        last = previous
        price = seconds[number] if seconds else 1.0
        previous = step.call("exp", [last], size, saves_result=True, seconds=price, module=f"layer.{number}")
        if number:
            step.release(last)
    step.backward(gradients=False)
    step.release(previous)
    return step.trace()


def transformer(num_layers: int = 6, scale: int = MIB) -> Trace:
    """A BERT encoder of 2019 like W1 of benchmarks/workloads.py: erf-GELU from parts, softmax attention, dropout.

    Hidden states 2 `scale` bytes, scores 16, feed-forward 8; seconds are like one core's.
    """
    step = Step()
    weights = [step.external(26 * scale // 6) for _ in range(num_layers)]
    hidden = step.external(2 * scale, "input")
    hidden = step.call("layer_norm", [hidden], 2 * scale, seconds=0.002, module="embeddings")
    for number in range(num_layers):
        hidden = _layer(step, f"encoder.layer.{number}", hidden, weights[number], scale)
    logits = step.call("linear", [hidden], scale // 8, (hidden,), seconds=0.001, module="head")
    step.release(hidden)
    step.phase("loss")
    loss = step.call("cross_entropy", [logits], 4, (), internal=(scale // 8,), seconds=0.001)
    step.release(logits)
    step.backward()
    step.release(loss)
    return step.trace()


def _layer(step: Step, path: str, hidden: int, weight: int, scale: int) -> int:
    def linear(name: str, source: int, size: int, seconds: float) -> int:
        return step.call("linear", [source, weight], size, (source,), seconds=seconds, module=f"{path}.{name}")

    def dropout(name: str, source: int, size: int, seconds: float) -> int:
        return step.call("dropout", [source], size, (), internal=(size,), seconds=seconds, module=f"{path}.{name}")

    small, wide, square = 2 * scale, 8 * scale, 16 * scale
    attention, mlp = f"{path}.attention", f"{path}.mlp"
    q, k, v = (linear(f"attention.{each}", hidden, small, 0.004) for each in ("query", "key", "value"))
    scores = step.call("matmul", [q, k], square, (q, k), seconds=0.012, module=attention)
    step.release(q, k)
    scaled = step.call("div", [scores], square, seconds=0.006, module=attention)
    step.release(scores)
    masked = step.call("add", [scaled], square, seconds=0.006, module=attention)
    step.release(scaled)
    weights = step.call("softmax", [masked], square, saves_result=True, seconds=0.012, module=attention)
    step.release(masked)
    kept = dropout("attention.dropout", weights, square, 0.02)
    step.release(weights)
    context = step.call("matmul", [kept, v], small, (kept, v), seconds=0.012, module=attention)
    step.release(kept, v)
    dense = linear("attention.dense", context, small, 0.004)
    step.release(context)
    dropped = dropout("attention.out_dropout", dense, small, 0.003)
    step.release(dense)
    total = step.call("add", [dropped, hidden], small, seconds=0.001, module=attention)
    step.release(dropped, hidden)
    middle = step.call("layer_norm", [total], small, (total,), seconds=0.002, module=f"{path}.attention.norm")
    step.release(total)
    up = linear("mlp.up", middle, wide, 0.016)
    half = step.call("mul", [up], wide, seconds=0.003, module=mlp)
    ratio = step.call("div", [up], wide, seconds=0.003, module=mlp)
    step.release(up)
    error = step.call("erf", [ratio], wide, (ratio,), seconds=0.008, module=mlp)
    step.release(ratio)
    one = step.call("add", [error], wide, seconds=0.003, module=mlp)
    step.release(error)
    gelu = step.call("mul", [half, one], wide, (half, one), seconds=0.003, module=mlp)
    step.release(half, one)
    down = linear("mlp.down", gelu, small, 0.016)
    step.release(gelu)
    dropped = dropout("mlp.dropout", down, small, 0.003)
    step.release(down)
    total = step.call("add", [dropped, middle], small, seconds=0.001, module=mlp)
    step.release(dropped, middle)
    result = step.call("layer_norm", [total], small, (total,), seconds=0.002, module=f"{path}.mlp.norm")
    step.release(total)
    return result


def random_step(seed: int, num_calls: int) -> Trace:
    """A small layered step: each call reads one or two recent results and saves some of what it sees."""
    chance = random.Random(seed)
    step = Step()
    results = [step.external(chance.randint(1, 3), "input")]
    readers_left: dict[int, int] = {}
    for number in range(num_calls):
        sources = sorted({results[-1], chance.choice(results[-3:])})
        saves = tuple(each for each in sources if chance.random() < 0.6)
        internal = (chance.randint(1, 8),) if chance.random() < 0.25 else ()
        in_place = number > 1 and not saves and len(sources) == 1 and chance.random() < 0.3
        in_place = in_place and not any(handle.cell == sources[0] for handle in step.handles)
        in_place = in_place and step.cells[sources[0]].call >= 0
        result = step.call(
            "f",
            sources,
            chance.randint(1, 8),
            saves,
            saves_result=chance.random() < 0.3 or number == num_calls - 1,
            internal=internal,
            seconds=float(chance.randint(1, 5)),
            extra_bytes=chance.choice((0, 0, 0, 2)),
            in_place=in_place,
        )
        if in_place:
            results.remove(sources[0])
        readers_left[result] = 0
        results.append(result)
        for old in results[1:-3]:
            step.release(old)
    step.backward()
    step.release(*results)
    return step.trace()
