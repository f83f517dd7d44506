"""Mends: formatting and comments stay, results stay bit for bit, a second run changes nothing."""

import random
import textwrap

import pytest
import torch

from diagnosis.lints.marked import HEADER
from memfit.diagnosis.lints import check_text
from memfit.diagnosis.lints.fix import diff, fix_text


def fixed(program):
    return fix_text(HEADER + textwrap.dedent(program)).text.removeprefix(HEADER)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            """
            def fit(net, loader, optimizer):
                total, log = 0.0, []
                for x, y in loader:
                    # forward
                    logits = net(x)  # (B, C)
                    loss = F.cross_entropy(logits, y)

                    # clear
                    optimizer.zero_grad()  # all of them
                    loss.backward()
                    optimizer.step()
                    total += loss / 8   # mean
                    log.append( (loss) )
                print(total, log)
            """,
            """
            def fit(net, loader, optimizer):
                total, log = 0.0, []
                for x, y in loader:

                    # clear
                    optimizer.zero_grad()  # all of them
                    # forward
                    logits = net(x)  # (B, C)
                    loss = F.cross_entropy(logits, y)
                    del logits
                    loss.backward()
                    optimizer.step()
                    total += loss.detach() / 8   # mean
                    log.append( (loss).detach() )
                print(total, log)
            """,
            id="training loop",
        ),
        pytest.param(
            """
            def validate(net, loader):
                net.eval()
                hits = 0

                # every batch
                for x, y in loader:  # (B, C)
                    # a comment inside
                    hits += (net(x).argmax(-1) == y).sum().item()
                    '''text
                that stays'''
                else:
                    hits += 0
                # after
                return hits
            """,
            """
            def validate(net, loader):
                net.eval()
                hits = 0

                # every batch
                with torch.no_grad():
                    for x, y in loader:  # (B, C)
                        # a comment inside
                        hits += (net(x).argmax(-1) == y).sum().item()
                        '''text
                that stays'''
                    else:
                        hits += 0
                # after
                return hits
            """,
            id="evaluation",
        ),
        pytest.param(
            """
            def load(net, path):
                a = torch.load(path)
                net.load_state_dict(a["net"])
                net.load_state_dict(torch.load(path, weights_only=True))
                b = torch.load(
                    path,
                    weights_only=True,  # safe
                )
                net.load_state_dict(b)
            """,
            """
            def load(net, path):
                a = torch.load(path, map_location="cpu")
                net.load_state_dict(a["net"])
                net.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
                b = torch.load(
                    path,
                    weights_only=True,
                    map_location="cpu",  # safe
                )
                net.load_state_dict(b)
            """,
            id="loading",
        ),
        pytest.param(
            """
            @torch.no_grad()
            def tokens(net, loader):
                kept = []
                for x in loader:
                    h = net(x)
                    kept.append(h[:, 0])
                return kept
            """,
            """
            @torch.no_grad()
            def tokens(net, loader):
                kept = []
                for x in loader:
                    h = net(x)
                    kept.append(h[:, 0].clone())
                return kept
            """,
            id="view",
        ),
    ],
)
def test_a_mend_changes_its_own_place_and_nothing_else(before, after):
    before, after = textwrap.dedent(before), textwrap.dedent(after)
    assert fixed(before) == after
    assert fixed(after) == after


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("for x in data: loss = F.cross_entropy(out, y); loss.backward()", id="several statements on a line"),
        pytest.param(
            """
            def fit(net, loader):
                total = 0
                for x in loader:
                    loss = net(x).mean()
                    loss.backward()
                    total += loss
                return total
            """,
            id="the sum is returned, somebody may go backward",
        ),
        pytest.param(
            """
            def scores(net, loader):
                net.eval()
                for x in loader:
                    yield net(x)
            """,
            id="a generator would leave no_grad on in its caller",
        ),
        pytest.param(
            """
            def validate(net, loader):
                net.eval()
                kept = None
                for x in loader:
                    kept = net(x)
                return kept
            """,
            id="a tensor with its graph leaves the evaluation",
        ),
        pytest.param(
            """
            def validate(loader):
                net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)
                net.eval()
                for x in loader:
                    print(net(x).sum().item())
            """,
            id="a fused path without gradients is equal to rounding only",
        ),
        pytest.param(
            """
            def fit(net, loader, opt):
                for x in loader:
                    loss = net(x).mean()
                    log_gradients(net)
                    opt.zero_grad()
                    loss.backward()
            """,
            id="somebody may read the old gradients",
        ),
        pytest.param(
            """
            def fit(net, loader, opt):
                for x in loader:
                    loss = net(x).mean()
                    if loss.isnan():
                        continue
                    opt.zero_grad()
                    loss.backward()
            """,
            id="a turn that is left between forward and zero_grad",
        ),
        pytest.param(
            """
            exec(open("config.py").read())
            net = nn.Linear(4, 4)
            for x, y in []:
                logits = net(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()
            """,
            id="code from elsewhere may read the name",
        ),
        pytest.param(
            """
            net = nn.Linear(4, 4)
            logits = net(torch.zeros(2, 4))
            loss = F.cross_entropy(logits, torch.zeros(2).long())
            loss.backward()
            """,
            id="a module that imports this one may read the name",
        ),
        pytest.param(
            """
            def load(net, path):
                state = torch.load(path)
                net.load_state_dict(state, assign=True)
            """,
            id="assign would leave the parameters on the CPU",
        ),
        pytest.param(
            """
            def fit(loader):
                net = nn.Linear(99, 99)
                for x in loader:
                    net.zero_grad(set_to_none=False)
                    net(x).mean().backward()
            """,
            id="zeros move with weight decay, None does not",
        ),
    ],
)
def test_where_results_could_change_there_is_no_mend(program):
    program = textwrap.dedent(program)
    assert fixed(program) == program


def test_windows_line_ends_and_tabs_stay():
    program = HEADER + "def f(net, x, y):\n\tlogits = net(x)\n\tloss = F.cross_entropy(logits, y)\n\tloss.backward()\n"
    program = program.replace("\n", "\r\n")
    changed = fix_text(program).text
    assert changed == program.replace("\tloss.backward", "\tdel logits\r\n\tloss.backward")


def test_places_are_right_behind_letters_that_take_several_bytes():
    program = HEADER + textwrap.dedent(
        """
        def fit(net, loader):
            größe = 0
            for x in loader:
                verlust = net(x).mean(); verlust.backward()
                größe += verlust; print("größe", größe)
        """
    )
    assert fix_text(program).text == program.replace("größe += verlust;", "größe += verlust.detach();")


def test_form_feeds_and_other_separators_do_not_move_the_lines():
    program = (
        HEADER
        + 'NOTE = "a\u2028b"\n\x0c\ndef f(net, loader):\n    total = 0\n    for x in loader:\n        loss = net(x).mean()\n'
    )
    program += "        loss.backward()\n#\n#\n        total += loss\n"
    assert fix_text(program).text == program.replace("+= loss", "+= loss.detach()")


def test_the_diff_is_one_that_patch_takes():
    text = HEADER + "def f(net, x, y):\n    a = net(x)\n    l = F.cross_entropy(a, y)\n    l.backward()"
    assert diff(text, fix_text(text).text, "train.py").splitlines() == [
        "--- a/train.py",
        "+++ b/train.py",
        "@@ -4,4 +4,5 @@",
        " def f(net, x, y):",
        "     a = net(x)",
        "     l = F.cross_entropy(a, y)",
        "+    del a",
        "     l.backward()",
        "\\ No newline at end of file",
    ]


FORWARDS = ["out = net(x)", "h = net[0](x)\nout = net[2](net[1](h))", "out = torch.tanh(net(x))"]
LOSSES = [
    "loss = F.cross_entropy(out, y)",
    "loss = F.cross_entropy(out.view(-1, 3), y)",
    "loss = F.mse_loss(out, F.one_hot(y, 3).float())",
]
BETWEEN = [
    "",
    "hits = (out.argmax(-1) == y).sum().item()\nlog.append(hits)",
    "note = out.detach().mean()",
    "if step == 1:\n    log.append(loss.item())",
]
ZEROS = ["optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=True)", "net.zero_grad()"]
AFTER = [
    "total += loss",
    "total = total + loss / 4",
    "total += loss * 2 - 1",
    "curve.append(loss)",
    "curve.append((step, loss))",
    "curve += [loss]",
    "best = out if best is None else best",
    "total += out.square().mean()",
    "smooth = 0.9 * smooth + 0.1 * loss",
]
CHECKS = [
    "for x, y in data:\n    val += F.cross_entropy(net(x), y).item()",
    "for x, y in data:\n    val = val + (net(x) - 1).abs().mean()",
    "with torch.no_grad():\n    for x, y in data:\n        heads.append(net(x)[:, 0])",
]


def random_program(seed):
    """A training function out of random pieces in random order, and a validation after it, that returns all it computed."""
    choose = random.Random(seed)
    early = choose.random() < 0.3
    steps = [
        choose.choice(FORWARDS),
        choose.choice(LOSSES),
        choose.choice(BETWEEN),
        "" if early else choose.choice(ZEROS),
        "loss.backward()",
    ]
    steps += ["optimizer.step()", *choose.sample(AFTER, choose.randint(1, 3))]
    if early:
        steps.insert(0, choose.choice(ZEROS))
    body = textwrap.indent("\n".join(step for step in steps if step), " " * 8)
    check = textwrap.indent("net.eval()\n" + choose.choice(CHECKS), " " * 4)
    return (
        HEADER
        + f"""
def run():
    torch.manual_seed({seed})
    net = nn.Sequential(nn.Linear(5, 150), nn.ReLU(), nn.Linear(150, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(3)]
    total, smooth, val, best = 0.0, 0.0, 0.0, None
    log, curve, heads = [], [], []
    for step, (x, y) in enumerate(data):
{body}
{check}
    show(total, smooth, val, best, log, curve, heads, [p.data for p in net.parameters()], [p.grad for p in net.parameters()])
"""
    )


def run(program):
    """Every number the program computed, as bits."""
    shown = []

    def flat(value):
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from flat(item)
        elif isinstance(value, torch.Tensor):
            yield from (str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).numpy().tobytes())
        else:
            yield value

    names = {"show": lambda *values: shown.extend(flat(list(values)))}
    exec(compile(program, "program.py", "exec"), names)
    names["run"]()
    return shown


def test_many_programs_compute_the_same_bits_after_mending_and_a_second_run_changes_nothing():
    num_changed = 0
    for seed in range(30):
        program = random_program(seed)
        once = fix_text(program)
        assert fix_text(once.text) == type(once)(once.text), program
        assert run(once.text) == run(program), program
        assert len(check_text(once.text)) <= len(check_text(program)) - (once.num_mends > 0), program
        num_changed += once.num_mends > 0
    assert num_changed == 29  # of 30: the pieces are chosen so that nearly every program has something to mend
