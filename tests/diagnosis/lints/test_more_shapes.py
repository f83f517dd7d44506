"""MF105 of averages, MF108, MF118, MF213, MF303, MF515 and MF701 in further shapes, MF914."""

import pytest

from diagnosis.lints.marked import assert_marked, find

FOUND = {
    "an average of parameters": """
        class Ema:
            def __init__(self, model):
                self.model = model
                self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

            def update(self):
                for name, p in self.model.named_parameters():
                    self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * p  # <- MF105
        """,
    "graphs that are retained for nobody": """
        def fit(net, loader, opt):
            for x in loader:
                opt.zero_grad()
                loss = net(x).mean()
                loss.backward(retain_graph=True)  # <- MF108
                opt.step()

        class Trainer:
            def run(self):
                for x, y in self.loader:
                    a = F.mse_loss(self.model(x), y)
                    a.backward(retain_graph=True)  # <- MF108
                    b = F.mse_loss(self.model(x), y)
                    b.backward()
        """,
    "a loader that is cycled": """
        import itertools
        from itertools import cycle
        from torch.utils.data import DataLoader

        def batches(train_loader, data):
            yield from itertools.cycle(train_loader)  # <- MF118
            for x in cycle(DataLoader(data)):  # <- MF118
                yield x

        class Trainer:
            def start(self):
                self.stream = iter(cycle(self.loader))  # <- MF118
        """,
    "extras nobody reads": """
        def step(model, batch):
            outputs = model(**batch, output_hidden_states=True)  # <- MF213
            outputs.loss.backward()

        class Trainer:
            def step(self, x):
                out = self.model(x, output_attentions=True, output_hidden_states=True)  # <- MF213
                return out.logits, out.attentions
        """,
    "teachers with gradients": """
        def distill(student, teacher, loader):
            opt = torch.optim.SGD(student.parameters(), 0.1)
            for x in loader:
                loss = F.mse_loss(student(x), teacher(x))  # <- MF303
                loss.backward()
                opt.step()

        class Distiller:
            def fit(self, loader):
                self.teacher.eval()
                for x in loader:
                    targets = self.teacher(x)  # <- MF303
                    F.mse_loss(self.student(x), targets).backward()

        def by_eval(net, reference, loader):
            reference.eval()
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x in loader:
                F.mse_loss(net(x), reference(x)).backward()  # <- MF303
                opt.step()
        """,
    "forwards that add to themselves": """
        from torch.utils.checkpoint import checkpoint

        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.seen = nn.Linear(4, 4), 0

            def forward(self, x):
                self.seen += x.shape[0]
                return self.fc(x)

        def run(x):
            return checkpoint(Counted(), x, use_reentrant=False)  # <- MF515
        """,
    "inputs that are written": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.short, self.relu = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)
                self.norm = nn.LayerNorm(4)

            def forward(self, x):
                h = self.conv(x)
                side = self.short(h)
                h = self.relu(h)  # <- MF701
                return h + side

            def other(self, x):
                h = self.conv(x)
                y = self.norm(h)
                h += 1  # <- MF701
                h[0] = 0
                return y
        """,
    "errors in a tuple, as exc_info, and carried to the next try": """
        import sys

        class Runner:
            def step(self, x):
                return self.model(x).mean().backward()

            def run(self, x):
                try:
                    self.step(x)
                except RuntimeError as error:
                    self.failure = (len(x), error)  # <- MF111
                    self.info = sys.exc_info()  # <- MF111

            def retry(self, x):
                last = None
                while len(x):
                    try:
                        return self.step(x)
                    except RuntimeError as error:
                        last = error  # <- MF111
                        x = x[: len(x) // 2]

            def smaller(self, x):
                try:
                    return self.step(x)
                except torch.OutOfMemoryError:
                    return self.step(x[:1])  # <- MF803

            def recursive(self, x):
                try:
                    return self.step(x)
                except torch.OutOfMemoryError:
                    return self.recursive(x[:1])  # <- MF803
        """,
    "half from the start": """
        def fit(loader):
            net = nn.Linear(4, 4, dtype=torch.float16)  # <- MF602
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x in loader:
                net(x).mean().backward()
                opt.step()
        """,
    "itself, and lists that are handed over": """
        class Me:
            def __init__(self):
                self.me = self  # <- MF115

        class Texts:
            def __init__(self, texts):
                self.texts = texts  # <- MF912
                self.names = list(map(str, range(20_000)))  # <- MF912
                self.same = ["x"] * 50_000

            def __getitem__(self, i):
                return self.texts[i], self.names[i], self.same[i]

        data = Texts([str(i) for i in range(30_000)])
        """,
    "a dataset that keeps what it made": """
        class Images(torch.utils.data.Dataset):
            def __init__(self, paths):
                self.paths, self.cache = paths, {}

            def __getitem__(self, i):
                if i not in self.cache:
                    self.cache[i] = torch.load(self.paths[i])  # <- MF914
                return self.cache[i]

        class Seen(torch.utils.data.Dataset):
            def __getitem__(self, i):
                x = torch.zeros(4)
                self.seen.append(x)  # <- MF914
                return x
        """,
}
QUIET = {
    "averages of detached parameters": """
        class Ema:
            @torch.no_grad()
            def update(self, model):
                for name, p in model.named_parameters():
                    self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * p

            def other(self, model):
                for name, p in model.named_parameters():
                    self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * p.data
                    self.seen[name] = p
        """,
    "norms and counts of parameters": """
        def fit(net, loader):
            for x in loader:
                loss = net(x).mean()
                for p in net.parameters():
                    loss = loss + 0.1 * p.square().sum()
                loss.backward()
                total, count = 0, 0
                for p in net.parameters():
                    total += p.grad.norm() ** 2
                    count += p.numel()
                for p in net.parameters():
                    p.data.add_(p.grad, alpha=-0.1)
        """,
    "graphs that are retained for somebody": """
        def two(net, loader):
            for x in loader:
                out = net(x)
                out.mean().backward(retain_graph=True)
                out.std().backward()

        def many(net, x):
            out = net(x)
            for part in out:
                part.sum().backward(retain_graph=True)

        def penalty(net, loader):
            for x in loader:
                loss = net(x).mean()
                loss.backward(retain_graph=True)
                g = torch.autograd.grad(loss, x)

        def given(net, loader):
            for x in loader:
                loss = net(x).mean()
                loss.backward(retain_graph=True)
                yield loss
        """,
    "errors that are raised after the last try": """
        def step(net, x):
            net(x).mean().backward()

        def retry(net, x):
            for _ in range(3):
                try:
                    return step(net, x)
                except RuntimeError as error:
                    last = str(error)
                    failed = error
                    break
        """,
    "cycles over short things": """
        from itertools import cycle

        colours = cycle(["r", "g"])
        """,
    "extras that are read or handed on": """
        def a(model, batch):
            out = model(**batch, output_hidden_states=True)
            return out.hidden_states[-1], out.loss

        def b(model, batch):
            out = model(**batch, output_attentions=True)
            return out
        """,
    "teachers without gradients": """
        def a(student, teacher, loader):
            teacher.requires_grad_(False)
            for x in loader:
                F.mse_loss(student(x), teacher(x)).backward()

        def b(student, teacher, loader):
            for x in loader:
                with torch.no_grad():
                    t = teacher(x)
                F.mse_loss(student(x), t).backward()

        def c(student, coach, loader):
            for p in coach.parameters():
                p.requires_grad = False
            coach.eval()
            opt = torch.optim.SGD(student.parameters(), 0.1)
            for x in loader:
                F.mse_loss(student(x), coach(x)).backward()

        def through(gen, judge, loader):
            judge.eval()
            opt = torch.optim.SGD(gen.parameters(), 0.1)
            for z in loader:
                judge(gen(z)).mean().backward()
                opt.step()
        """,
    "inputs that are written when nothing was saved": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
                self.pool = nn.AvgPool2d(2)

            def forward(self, x):
                out = self.relu(self.bn(self.conv(x)))
                side = self.pool(out)
                out = self.bn(self.conv(out))
                out += x
                return self.relu(out), side

            def arms(self, x):
                h = self.conv(x)
                if self.training:
                    return self.bn(h)
                else:
                    h += 1
                    return h

            @torch.no_grad()
            def predict(self, x):
                h = self.conv(x)
                y = self.bn(h)
                h += 1
                return y
        """,
    "datasets whose cache is bounded, or filled before": """
        class Images(torch.utils.data.Dataset):
            def __init__(self, paths):
                self.cache = {}
                for i, path in enumerate(paths):
                    self.cache[i] = torch.load(path)

            def __getitem__(self, i):
                return self.cache[i]

        class Bounded(torch.utils.data.Dataset):
            def __getitem__(self, i):
                self.cache[i] = torch.zeros(4)
                if len(self.cache) > 10:
                    self.cache.pop(0)
                return self.cache[i]
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_the_cause_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()
