"""MF105-MF117: attributes, step outputs, exceptions, hooks, caches, cycles, views and metrics that keep tensors."""

import pytest

from diagnosis.lints.marked import assert_marked, find

FOUND = {
    "running statistics of a norm": """
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("var", torch.zeros(4))

            def forward(self, x):
                self.mean = self.mean * 0.9 + x.mean(0) * 0.1  # <- MF105
                self.var += 0.1 * (x.var(0) - self.var)  # <- MF105
                return x - self.mean
        """,
    "usage counts of a codebook": """
        class Quantizer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.book = nn.Parameter(torch.randn(8, 4))
                self.used = torch.zeros(8)

            def forward(self, z):
                share = (z @ self.book.t()).softmax(-1).mean(0)
                if self.training:
                    self.used = 0.99 * self.used + 0.01 * share  # <- MF105
                return share
        """,
    "a memory of the module": """
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = nn.GRUCell(4, 4)
                self.memory = None

            def forward(self, x):
                self.memory = self.cell(x, self.memory)  # <- MF105
                return self.memory
        """,
    "a trainer's step": """
        class Trainer:
            def __init__(self, model, optimizer):
                self.model, self.optimizer = model, optimizer
                self.loss_ema = 0.0

            def step(self, x):
                loss = self.model(x).mean()
                loss.backward()
                self.optimizer.step()
                self.loss_ema = 0.9 * self.loss_ema + 0.1 * loss  # <- MF105
        """,
    "gradient penalty by backward": """
        def penalty(net, x):
            loss = net(x).sum()
            loss.backward(create_graph=True)  # <- MF106
            return sum(p.grad.norm() for p in net.parameters())
        """,
    "sharpness from the second order": """
        class Curvature:
            def measure(self, model, batch):
                torch.autograd.backward
                model(batch).mean().backward(retain_graph=True, create_graph=True)  # <- MF106
                return [p.grad for p in model.parameters()]
        """,
    "a LightningModule's outputs": """
        class Task(LightningModule):
            def training_step(self, batch, index):
                x, y = batch
                logits = self.net(x)
                loss = F.cross_entropy(logits, y)
                return {"loss": loss, "logits": logits, "inputs": x}  # <- MF107

            def on_train_epoch_end(self, outputs):
                print("done")
        """,
    "validation outputs that the hook does not read": """
        class Task:
            def validation_step(self, batch):
                prediction = self.model(batch)
                return {"loss": prediction.mean().item(), "prediction": prediction}  # <- MF107

            def validation_epoch_end(self, outputs):
                return sum(out["loss"] for out in outputs)
        """,
    "errors in a list, a global, and another object": """
        FAILED = []
        LAST = None

        def attempt(net, x):
            net(x).mean().backward()

        def run(net, batches, state):
            global LAST
            for x in batches:
                try:
                    attempt(net, x)
                except RuntimeError as problem:
                    FAILED.append(problem)  # <- MF111
                    LAST = problem  # <- MF111
                    state.error = problem  # <- MF111
        """,
    "a hook made by a factory": """
        acts = {"a": []}

        def keep(name):
            def hook(module, inputs, output):
                acts[name].append(output.detach())  # <- MF112
            return hook

        def watch(model):
            for name, layer in model.named_modules():
                layer.register_forward_hook(keep(name))
        """,
    "a hook that is a method": """
        class Probe:
            def __init__(self, model):
                self.seen = []
                model.layer.register_forward_hook(self.look)

            def look(self, module, args, out):
                self.seen.append(out)  # <- MF112
        """,
    "a lambda as hook, and a pre-hook": """
        stats = []
        inputs = []

        def before(module, args):
            inputs.append(args[0])  # <- MF112

        def install(net):
            net.register_forward_hook(lambda module, args, out: stats.append(out))  # <- MF112
            net.register_forward_pre_hook(before)
        """,
    "hooks that hold their module": """
        class A(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(4, 4)
                self.calls = 0
                self.body.register_forward_hook(self.count)  # <- MF113
                self.register_full_backward_hook(lambda m, gi, go: self.calls)  # <- MF113

            def count(self, module, args, out):
                self.calls += 1
        """,
    "caches on methods": """
        import functools
        from functools import cache as remember, lru_cache

        class Rotary(nn.Module):
            @functools.lru_cache(maxsize=None)  # <- MF114
            def table(self, n):
                return torch.arange(n)

            @lru_cache  # <- MF114
            def other(self, n):
                return torch.zeros(n)

            @remember  # <- MF114
            def third(self):
                return torch.zeros(1)

        class Sub(Rotary):
            @functools.cache  # <- MF114
            def fourth(self):
                return 4
        """,
    "objects that hold themselves": """
        class Node:
            def __init__(self, value):
                self.value = value
                self.path = (self,)  # <- MF115
                self.views = {"self": self}  # <- MF115

            def reset(self):
                self.chain = [self]  # <- MF115
        """,
    "parts of outputs in a list": """
        @torch.no_grad()
        def features(net, loader):
            kept, last = [], {}
            for i, x in enumerate(loader):
                hidden = net(x)
                kept.append(hidden[:, 0])  # <- MF116
                token = hidden[:, -1, :]
                kept.append(token)  # <- MF116
                last[i] = hidden[:, :4].detach()  # <- MF116
            return kept, last
        """,
    "a metric in an update method": """
        class RocCurve:
            def __init__(self):
                self.scores = []
                self.labels = list()

            def update(self, scores, labels):
                self.scores.append(scores.detach())  # <- MF117
                self.labels.append(labels)

            def compute(self):
                return torch.cat(self.scores)
        """,
    "a torchmetrics metric without reset": """
        from torchmetrics import Metric

        class Collect(Metric):
            def __init__(self):
                super().__init__()
                self.all = []

            def update(self, preds):
                self.all += [preds]
                self.all.append(preds)  # <- MF117

            def compute(self):
                return torch.cat(self.all)
        """,
}
QUIET = {
    "statistics under no_grad, from detached tensors, in place on data": """
        class Norm(nn.Module):
            def forward(self, x):
                with torch.no_grad():
                    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.var = 0.9 * self.var + 0.1 * x.detach().var(0)
                self.count += 1
                self.seen = self.seen + x.shape[0]
                return x
        """,
    "an auxiliary loss that starts anew in each forward": """
        class Router(nn.Module):
            def forward(self, x):
                self.aux = 0.0
                for layer in self.layers:
                    x = layer(x)
                    self.aux = self.aux + x.var()
                return x
        """,
    "an auxiliary loss that the program resets": """
        class Router(nn.Module):
            def forward(self, x):
                self.aux = self.aux + x.var()
                return x

        def fit(model, loader):
            for x in loader:
                model.router.aux = 0.0
                (model(x).mean() + model.router.aux).backward()
        """,
    "a stateful layer with a method that cuts": """
        class Recurrent(nn.Module):
            def forward(self, x):
                out, self.state = self.rnn(x, self.state)
                return out

            def cut(self):
                self.state = self.state.detach()
        """,
    "create_graph with grad, or gradients set to None": """
        def penalty(net, x, opt):
            loss = net(x).sum()
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            g.norm().backward()
            net(x).sum().backward(create_graph=True)
            opt.step()
            opt.zero_grad()
        """,
    "step outputs that are read, or numbers": """
        class Task:
            def training_step(self, batch):
                loss = self.model(batch).mean()
                return {"loss": loss, "log": loss.item()}

            def training_epoch_end(self, outputs):
                pass

            def validation_step(self, batch):
                return {"prediction": self.model(batch)}

            def validation_epoch_end(self, outputs):
                return torch.cat([out["prediction"] for out in outputs])
        """,
    "errors as text, raised again, without tensors": """
        import json

        class Reader:
            def read(self, path):
                try:
                    return json.loads(path)
                except ValueError as error:
                    self.error = error

            def run(self, net, x):
                try:
                    net(x).mean().backward()
                except RuntimeError as error:
                    self.message = str(error)
                    self.clean = error.with_traceback(None)
                    raise
        """,
    "hooks that overwrite, are guarded, or are emptied": """
        last, seen, guarded = {}, [], []

        def overwrite(module, args, out):
            last[module] = out

        def collect(module, args, out):
            seen.append(out)

        def careful(module, args, out):
            if torch.is_grad_enabled():
                guarded.append(out)

        def sizes(module, args, out):
            last["sizes"].append(out.shape)

        def install(net):
            for hook in (overwrite, collect, careful, sizes):
                net.register_forward_hook(hook)
            net.register_forward_hook(collect)

        def step(net, x):
            seen.clear()
            return net(x)
        """,
    "hooks that use their own module, or whose handle is kept": """
        class A(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_forward_hook(lambda module, args, out: module.training)
                self.handle = self.register_forward_hook(self.look)

            def look(self, module, args, out):
                print(out.shape)
        """,
    "caches elsewhere": """
        import functools

        @functools.lru_cache(maxsize=8)
        def table(n):
            return torch.arange(n)

        class Config:
            @functools.cache
            def size(self):
                return 4

        class Net(nn.Module):
            @staticmethod
            @functools.lru_cache
            def table(n):
                return torch.arange(n)
        """,
    "trees and plain references": """
        class Node:
            def __init__(self, parent):
                self.parent = parent
                self.children = []
                parent.children.append(self)
                self.me = self.name = "node"
        """,
    "parts that are copied, whole outputs, computed places": """
        @torch.no_grad()
        def features(net, loader):
            a, b, c, d = [], [], [], []
            for i, x in enumerate(loader):
                hidden = net(x)
                a.append(hidden[:, 0].clone())
                b.append(hidden[:, 0].mean())
                c.append(hidden[0])
                d.append(hidden[:, i : i + 4])
            return a, b, c, d
        """,
    "metrics that are reset or keep counts": """
        class Accuracy:
            def __init__(self):
                self.hits = []
                self.count = 0

            def update(self, preds, labels):
                self.hits.append((preds == labels).sum().item())
                self.count += 1

            def compute(self):
                return sum(self.hits)

        class Curve:
            def __init__(self):
                self.preds = []

            def update(self, preds):
                self.preds.append(preds)

            def reset(self):
                self.preds = []

            def compute(self):
                return torch.cat(self.preds)
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_what_keeps_tensors_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()
