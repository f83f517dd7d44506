"""What the growth watch finds, with line and bytes, and where it is silent. The programs are written as users write them."""

from __future__ import annotations

import pytest

from memfit import watch_growth
from memfit.core import growth as core
from memfit.core.errors import UnsupportedError

TRAIN = """
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    def train_step(x):
        out = model(x)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return out, loss
"""


def test_a_branch_that_backward_never_visits_is_kept_by_the_sum_with_its_bytes(watch):
    ran = watch("""
        model = nn.Linear(16, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        entropy = torch.zeros(())
        for _ in range(9):
            scores = model(torch.randn(128, 16))
            optimizer.zero_grad()
            scores.square().mean().backward()
            optimizer.step()
            entropy = entropy + scores.softmax(-1).square().mean()
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.GRAPH, ran.line("entropy = entropy +"))
    assert growth.num_bytes == 128 * 8 * 4  # square() saves the softmax's output, and softmax the same storage
    assert growth.nodes_per_step > 0
    assert growth.chain.startswith("`entropy` in __main__ -> a graph of ")


def test_a_sum_of_losses_sent_backward_holds_nodes_and_no_bytes(watch):
    ran = watch(
        TRAIN
        + """
    total = 0
    for _ in range(8):
        total += train_step(torch.randn(16, 32))[1]
    """
    )
    [growth] = ran.found
    assert (growth.line, growth.num_bytes) == (ran.line("total +="), 0)
    assert growth.nodes_per_step == 8  # mean, pow, 2 x (addmm, t), tanh, and the sum; the accumulators are the same each step


def test_a_list_that_another_function_fills_is_named_with_the_line_that_fills_it(watch):
    ran = watch(
        TRAIN
        + """
    class Log:
        def __init__(self):
            self.history = {}
        def put(self, name, value):
            self.history.setdefault(name, []).append(value)
    log, step = Log(), 0
    while step < 8:
        out, loss = train_step(torch.randn(16, 32))
        log.put("out", out)
        log.put("loss", loss.item())
        step += 1
    """
    )
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.CONTAINER, ran.line("setdefault"))
    assert growth.num_bytes == 16 * 8 * 4
    assert growth.chain.startswith("`log.history['out'][")
    assert growth.made_at == ((f"program.py:{ran.line('out = model(x)')}", "Linear", 512),)


def test_what_a_step_returns_is_to_be_mended_where_it_is_returned(watch):
    ran = watch(
        TRAIN
        + """
    def training_step():
        x = torch.randn(16, 32)
        out, loss = train_step(x)
        return {"loss": loss.item(), "inputs": x}
    kept = []
    for _ in range(8):
        kept.append(training_step())
    """
    )
    [growth] = ran.found
    assert (growth.line, growth.num_bytes) == (ran.line('return {"loss"'), 16 * 32 * 4)


def test_a_validation_inside_the_epochs_that_sums_losses_grows_until_it_ends(watch):
    ran = watch(
        TRAIN
        + """
    def validate():
        total = 0
        for _ in range(6):
            total = total + model(torch.randn(16, 32)).square().mean()
        return total.item()
    for epoch in range(3):
        for _ in range(4):
            train_step(torch.randn(16, 32))
        validate()
    """
    )
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.GRAPH, ran.line("total = total +"))
    assert growth.until_end
    # inputs of both linears (the second is tanh's output, too), and what square() saves
    assert growth.num_bytes == 16 * (32 + 64 + 8) * 4
    assert core.to_finding(growth).remedy.startswith("Nothing here calls backward()")


def test_a_state_carried_over_is_told_at_the_backward_that_retains_its_graph(watch):
    ran = watch("""
        cell = nn.RNNCell(8, 16)
        state = torch.zeros(4, 16)
        for _ in range(8):
            state = cell(torch.randn(4, 8), state)
            cell.zero_grad()
            state.sum().backward(retain_graph=True)
    """)
    [growth] = [each for each in ran.found if each.num_bytes]
    assert growth.line == ran.line("retain_graph")
    assert "drop retain_graph=True" in core.to_finding(growth).remedy
    assert growth.chain.startswith("`state` in __main__ -> a graph of ")


def test_logits_joined_to_those_of_before_grow_though_only_one_tensor_is_alive(watch):
    ran = watch("""
        @torch.no_grad()
        def evaluate(head, kept=None):
            for _ in range(12):  # looks at 3 and 6, between which and the end a reference of ours would show
                logits = head(torch.randn(16, 8))
                kept = logits if kept is None else torch.cat((kept, logits))
        evaluate(nn.Linear(8, 64))
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line, growth.num_bytes) == (core.NAME, ran.line("torch.cat"), 16 * 64 * 4)


def test_a_view_is_told_with_the_bytes_it_shows_and_those_it_keeps(watch):
    ran = watch("""
        model, first = nn.Linear(8, 8), []
        with torch.no_grad():
            for _ in range(8):
                first.append(model(torch.randn(4, 10, 8))[:, 0])
    """)
    [growth] = ran.found
    assert (growth.num_bytes, growth.used_bytes) == (4 * 10 * 8 * 4, 4 * 8 * 4)


def test_steps_that_refer_to_themselves_wait_for_the_collector(watch):
    ran = watch("""
        class Node:
            def __init__(self, value):
                self.value = value
                self.tree = Tree(self)
        class Tree:
            def __init__(self, root):
                self.nodes = [root]
        model = nn.Linear(8, 8)
        gc.disable()
        for _ in range(8):
            with torch.no_grad():
                Node(model(torch.randn(32, 8)))
        gc.enable()
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.CYCLE, ran.line("self.tree ="))
    assert growth.num_bytes == 32 * 8 * 4
    assert growth.chain == "Node.tree.nodes[0] -> the same Node"


def test_an_exception_put_into_a_list_holds_the_frames_of_the_call_that_failed(watch):
    ran = watch("""
        def step(size):
            hidden = torch.ones(size, 64)
            raise RuntimeError("out of memory")
        failures = []
        def guarded():
            try:
                step(32)
            except RuntimeError as error:
                failures.append(error)
        guarded()
        model = nn.Linear(4, 4)
        for _ in range(5):
            model(torch.randn(2, 4)).sum().backward()
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.TRACEBACK, ran.line("failures.append"))
    assert (growth.num_bytes, growth.per_step) == (32 * 64 * 4, False)


def test_an_exception_that_is_only_on_its_way_is_no_finding(watch):
    ran = watch("""
        def step(size):
            hidden = torch.ones(size, 64)
            if size > 16:
                raise RuntimeError("out of memory")
            return hidden
        try:
            step(32)
        except RuntimeError:
            gc.collect()
            step(16)
    """)
    assert ran.found == []


def test_a_module_that_only_a_cache_knows_is_found_and_one_that_is_used_is_not(watch):
    ran = watch("""
        from functools import cache
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(16, 16, bias=False)
            @cache
            def mask(self, length):
                return torch.ones(length)
        def use():
            net = Net()
            net.mask(4)
            gc.collect()
            return net
        net = use()
        gc.collect()
        FIRST = None
        del net
        gc.collect()
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.CACHE, ran.line("@cache"))
    assert growth.num_bytes == 16 * 16 * 4


def test_a_gradient_with_a_graph_keeps_its_parameter_for_ever(watch):
    ran = watch("""
        import warnings
        warnings.simplefilter("ignore")
        def penalty():
            x = torch.randn(8, 16, requires_grad=True)
            x.square().sum().backward(create_graph=True)
        for _ in range(3):
            penalty()
        gc.collect()
    """)
    [growth] = ran.found
    assert (growth.kind, growth.line) == (core.GRAPH_CYCLE, ran.line("create_graph"))
    assert growth.num_bytes == 2 * 8 * 16 * 4 + 4  # the parameter, its gradient, and the loss's gradient, which mul saves


@pytest.mark.parametrize(
    "source",
    [
        """
    rows = [{"inputs": torch.randint(0, 100, (16,)), "label": torch.tensor(number % 2)} for number in range(12)]
        """,
        """
    queue, averages, shadow = __import__("collections").deque(maxlen=3), torch.zeros(8), None
    for step in range(16):
        out, loss = train_step(torch.randn(8 + 2 * step, 32))
        queue.append(out.detach())
        averages = 0.9 * averages + 0.1 * out.detach().mean(0)
        shadow = {name: value.clone() for name, value in model.state_dict().items()}
        """,
        """
    curve = []
    for _ in range(12):
        curve.append(train_step(torch.randn(8, 32))[1].item())
        """,
        """
    for _ in range(4):
        total = 0
        for _ in range(8):
            total = total + model(torch.randn(8, 32)).square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        """,
        """
    data = [torch.randn(8, 32) for _ in range(10)]
    layers = nn.ModuleList()
    for _ in range(10):
        layers.append(nn.Linear(8, 8))
    for epoch in range(2):
        for x in data:
            train_step(x)
        """,
        """
    for _ in range(6):
        states = []
        x = torch.randn(8, 32)
        for _ in range(6):
            x = torch.tanh(x) + 0.1
            states.append(model(x))
        optimizer.zero_grad()
        torch.stack(states).mean().backward()
        optimizer.step()
        """,
        """
    for _ in range(5):
        loss = model(torch.randn(8, 32)).square().mean()
        """,
        """
    layers = [nn.Linear(32, 32) for _ in range(8)]
    x = torch.randn(8, 32)
    for layer in layers:
        x = torch.tanh(layer(x))
        """,
    ],
    ids=[
        "data of a program that never trains",
        "queue, average, copy",
        "curve of numbers",
        "accumulation",
        "data and layers made in loops",
        "unrolled",
        "last graph",
        "one forward pass",
    ],
)
def test_silent_on_what_only_looks_like_growth(watch, source):
    ran = watch(TRAIN + source)
    assert ran.exit_code == 0, ran.error
    assert [(each.line, each.chain) for each in ran.found] == []


def test_the_longest_batch_that_comes_late_is_told_by_the_peaks_of_the_steps_and_no_growth(watch):
    ran = watch("""
        model = nn.Linear(64, 64, bias=False)
        for length in (64, 32, 64, 64, 512, 64):
            model(torch.randn(length, 64)).sum().backward()
            model.zero_grad()
    """)
    assert ran.found == []
    peaks = ran.report.peaks
    # the weights, the batch and the output, which has gone when the weights' gradient comes; the loss and its gradient are 4 bytes
    assert (peaks.first_step, peaks.first_bytes) == (1, (64 + 2 * 64) * 64 * 4 + 8)
    assert peaks.largest_bytes == pytest.approx((64 + 2 * 512) * 64 * 4, abs=8)
    assert (peaks.largest_step, peaks.num_steps, peaks.is_uneven) == (5, 6, True)


def test_optimizer_state_that_arrives_in_the_first_step_makes_no_step_uneven(watch):
    ran = watch(TRAIN + "    for _ in range(5):\n        train_step(torch.randn(8, 32))\n")
    assert (ran.report.peaks.first_step, ran.report.peaks.num_steps, ran.report.peaks.is_uneven) == (2, 5, False)


def test_a_script_that_dies_in_its_fifth_step_gets_the_findings_up_to_there(watch):
    ran = watch(
        TRAIN
        + """
    kept = []
    for step in range(9):
        kept.append(train_step(torch.randn(16, 32))[0])
        if step == 4:
            raise ValueError("no more data")
    """
    )
    assert ran.exit_code == 1
    assert str(ran.error) == "no more data"
    assert [each.line for each in ran.found] == [ran.line("kept.append")]


def test_a_script_that_never_trains_has_nothing_to_tell(watch):
    ran = watch("print(sum(range(10)))")
    assert (ran.report.num_steps, ran.report.growths, ran.exit_code) == (0, (), 0)
    assert watch("rows = [torch.zeros(1000 * each) for each in range(9)]").report.peaks is None  # no step, so none is uneven


def test_max_steps_stops_the_script_and_runs_its_finally(watch, capsys):
    ran = watch(TRAIN + """
    data = []
    for _ in range(20):  # no step: nothing is trained here
        data.append(torch.randn(16, 32))
    kept = []
    try:
        for step in range(100):
            kept.append(train_step(data[step % 20])[0])
    except Exception:
        print("swallowed")
    finally:
        print("steps", len(kept))
    """, max_steps=6)  # fmt: skip
    assert capsys.readouterr().out == "steps 6\n"
    assert (ran.exit_code, [each.line for each in ran.found]) == (0, [ran.line("kept.append")])


def test_the_watch_holds_nothing_and_changes_no_local_name(watch, capsys):
    ran = watch(
        TRAIN
        + """
    import weakref
    def loop():
        kept, alive = [], []
        for step in range(16):
            out, loss = train_step(torch.randn(16, 32))
            kept.append(out)
            alive.append(weakref.ref(out))
            if step == 14:  # the looks at 3, 6 and 12 are over, and the iterations after them, in which lines are traced
                kept.clear()
                del out, loss
                print("alive", sum(each() is not None for each in alive))
        print(sorted(locals()))
    loop()
    """
    )
    assert ran.exit_code == 0, ran.error
    assert capsys.readouterr().out == "alive 0\n['alive', 'kept', 'loss', 'out', 'step']\n"


def test_a_loop_is_watched_by_iterating_through_it():
    import torch

    kept = []
    watched = watch_growth(range(8), budget="1 MiB")
    for _ in watched:
        kept.append(torch.randn(64) * 2)
        with pytest.raises(ValueError, match="still on"):
            _ = watched.report
    [growth] = watched.report.growths
    assert (growth.num_bytes, growth.text) == (256, "kept.append(torch.randn(64) * 2)")
    assert watched.report.steps_left == (1024**2 - watched.report.live_bytes) // 256
    assert "grows by 256 B a step" in str(watched)


def test_a_second_watch_is_refused_and_the_first_goes_on():
    with watch_growth() as first, pytest.raises(UnsupportedError, match="at work in this process already"), watch_growth():
        pass
    assert first.report.growths == ()
