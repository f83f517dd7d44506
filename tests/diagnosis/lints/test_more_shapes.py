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
    "a third shape of sums, graphs and outputs": """
        class Gan:
            def train(self, loader):
                d_total = 0
                for real in loader:
                    d_loss = self.netD(real).mean()
                    d_loss.backward()
                    d_total = d_total + d_loss  # <- MF102
                    if len(real) == 1:
                        d_loss.backward(create_graph=True)  # <- MF106

        class Module(LightningModule):
            def test_step(self, batch, index):
                images, labels = batch
                return {"loss": 0.5, "images": images}  # <- MF107

            def test_epoch_end(self, outputs):
                print(len(outputs))

        def reinforce(policy, states):
            for state in states:
                objective = policy(state).sum()
                (-objective).backward(retain_graph=True)  # <- MF108

        class Watched(nn.Module):
            def __init__(self):
                super().__init__()
                self.hits = 0

                def hook(module, args):
                    self.hits += 1

                self.register_forward_pre_hook(hook)  # <- MF113

        class F1Meter:
            def __init__(self):
                self.preds = []

            def __call__(self, preds):
                self.preds.extend([preds])
                self.preds.append(preds.clone())  # <- MF117
        """,
    "a third shape of what is alive for nothing": """
        class Profiler:
            def forward_only(self, loader):
                for batch in loader:
                    with torch.autocast("cuda"):
                        logits = self.model(batch)  # <- MF202
                    self.seen += 1

        def embed(model, ids):
            result = model(input_ids=ids, output_attentions=True)  # <- MF213
            return result.last_hidden_state
        """,
    "a third shape of gradients": """
        def cycle(encoder, decoder, a, b):
            loss = (encoder(a) - b).abs().mean() + (decoder(b) - a).abs().mean()  # <- MF403
            loss.backward()

        def wgan(G, D, real, z):
            opt_D = torch.optim.RMSprop(D.parameters())
            fake = G(z)
            d_loss = -torch.mean(D(real)) + torch.mean(D(fake))  # <- MF404
            d_loss.backward()
            opt_D.step()

        class Agent:
            def __init__(self):
                self.value = nn.Linear(4, 1)
                self.value_optimizer = torch.optim.Adam(self.value.parameters(), foreach=True)  # <- MF406

            def update(self, states):
                values = self.value(states)
                value_loss, policy_loss = values.square().mean(), values.mean()
                value_loss.backward(retain_graph=True)
                self.value_optimizer.step()  # <- MF405
                policy_loss.backward()
        """,
    "a third shape of checkpoints": """
        from torch.utils.checkpoint import checkpoint, checkpoint_sequential
        from torch.nn.parallel import DistributedDataParallel

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(7)])

            def forward(self, x):
                x = checkpoint_sequential(self.blocks, 1, x, use_reentrant=False)  # <- MF501
                x = checkpoint_sequential(self.blocks, 4, x, use_reentrant=False)  # <- MF503
                x = checkpoint_sequential(self.blocks, segments=5, input=x, use_reentrant=False)  # <- MF503
                x = checkpoint_sequential(self.blocks, 7, x, use_reentrant=False, preserve_rng_state=False)  # <- MF513
                run = lambda y: F.dropout(self.blocks(y), 0.1)
                x = checkpoint(run, x, preserve_rng_state=False, use_reentrant=False)  # <- MF513
                return checkpoint(self.blocks, x)  # <- MF516

        def main():
            return DistributedDataParallel(Net(), find_unused_parameters=True)
        """,
    "a third shape of precision, calls and data": """
        import gc
        from torch.utils.data import DataLoader

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.inp, self.out = nn.Embedding(9, 3), nn.Linear(3, 9, bias=False)
                self.out.weight = self.inp.weight

        class Trainer:
            def __init__(self, data):
                with torch.device("meta"):
                    self.net = Tied()
                self.net.to_empty(device="cuda")  # <- MF903
                self.net = nn.DataParallel(self.net)  # <- MF913
                self.crit = nn.CrossEntropyLoss(ignore_index=0)

            def fit(self, data, opt):
                for epoch in range(10):
                    for i, (x, y) in enumerate(DataLoader(data, num_workers=2)):  # <- MF911
                        with torch.autocast("cuda", dtype=torch.bfloat16):
                            out = self.net(x)
                            loss = self.crit(out.to(dtype=torch.float32), y)  # <- MF603, MF201
                        loss /= 4
                        loss.backward()  # <- MF921
                        gc.collect()  # <- MF802
                        if i % 4 == 3:
                            opt.step()

        def evaluate(model, loader):
            model.eval()
            with torch.no_grad():
                for x in loader:
                    model(x)
                    gc.collect()  # <- MF802

        def forward_backward(model, batch, opt):
            norm = nn.Sequential(nn.Conv1d(4, 4, 1), nn.SyncBatchNorm(4))
            for micro in batch.tensor_split(4):
                gc.collect()  # <- MF802
                norm(micro).sum().backward()  # <- MF922
            opt.step()

        class Cached(torch.utils.data.Dataset):
            def __getitem__(self, i):
                sample = torch.zeros(4)
                return self.store.setdefault(i, sample)  # <- MF914
        """,
    "cures in another function of the file": """
        seen = []

        class Router(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.balance = nn.Linear(4, 4), 0.0

            def forward(self, x):
                g = self.gate(x)
                self.balance = self.balance + g.var()  # <- MF105
                return g

        def keep(module, args, out):
            seen.append(out)  # <- MF112

        def build():
            net = Router()
            net.register_forward_hook(keep)
            return net

        def careless(net, loader):
            for x in loader:
                net(x).mean().backward()

        def careful(net, loader):
            for x in loader:
                net.balance = 0.0
                seen.clear()
                net(x).mean().backward()

        def distill(student, teacher, loader):
            for x in loader:
                F.mse_loss(student(x), teacher(x)).backward()  # <- MF303

        def distill_frozen(student, teacher, loader):
            teacher.requires_grad_(False)
            for x in loader:
                F.mse_loss(student(x), teacher(x)).backward()

        class CurveMetric:
            def __init__(self):
                self.preds = []

            def update(self, preds):
                self.preds.append(preds)  # <- MF117

            def reset(self):
                self.preds = []

        def epochs(net, loader):
            metric = CurveMetric()
            for x in loader:
                with torch.no_grad():
                    metric.update(net(x))
        """,
    "a meter that is fed with losses": """
        class AverageMeter:
            def __init__(self):
                self.reset()

            def reset(self):
                self.sum, self.count, self.last = 0.0, 0, None

            def update(self, value, n=1):
                self.last = value
                self.sum += value * n  # <- MF105
                self.count += n

        def fit(net, loader):
            losses = AverageMeter()
            for x in loader:
                loss = net(x).mean()
                loss.backward()
                losses.update(loss, len(x))
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

        def heads(trunk, heads, loader):
            heads = nn.ModuleList(heads)
            for x in loader:
                shared = trunk(x)
                for head in heads:
                    head(shared).mean().backward(retain_graph=True)

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
    "a metric that is reset": """
        class CurveMetric:
            def __init__(self):
                self.preds = []

            def update(self, preds):
                self.preds.append(preds)

            def reset(self):
                self.preds = []

        def epochs(net, loader):
            metric = CurveMetric()
            for epoch in range(3):
                metric.reset()
                for x in loader:
                    metric.update(x)
        """,
    "a meter that is fed with numbers, and a list that is kept short": """
        class AverageMeter:
            def __init__(self):
                self.sum, self.count = 0.0, 0

            def update(self, value, n=1):
                self.sum += value * n
                self.count += n

        def fit(net, loader):
            losses, last = AverageMeter(), []
            for x in loader:
                loss = net(x).mean()
                loss.backward()
                losses.update(loss.item(), len(x))
                last.append(loss)
                last = last[-10:]
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
