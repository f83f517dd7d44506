"""MF6xx-MF9xx: precision, in-place calls, cache calls and retries, loading, data and means."""

import pytest

from diagnosis.lints.marked import assert_marked, find
from memfit.diagnosis.lints import check_text

FOUND = {
    "clips of scaled gradients": """
        from torch.nn.utils import clip_grad_norm_

        def fit(net, loader, opt, scaler):
            for x in loader:
                scaler.scale(net(x).mean()).backward()
                clip_grad_norm_(net.parameters(), 1.0)  # <- MF601
                scaler.unscale_(opt)
                scaler.step(opt)

        class Trainer:
            def step(self, loss):
                scaled = self.scaler.scale(loss)
                scaled.backward()
                nn.utils.clip_grad_value_(self.model.parameters(), 0.5)  # <- MF601
                self.scaler.step(self.opt)

        def sometimes(net, loss, opt, scaler, careful):
            scaler.scale(loss).backward()
            if careful:
                scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # <- MF601
        """,
    "weights in half": """
        def by_hand(grads):
            w = torch.zeros(4, dtype=torch.float16)  # <- MF602
            for g in grads:
                w -= 0.01 * g

        def sums(grads):
            w = torch.ones(4).half()  # <- MF602
            for g in grads:
                w.add_(g, alpha=-0.1)

        def model(net, loader):
            net = net.half()  # <- MF602
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x in loader:
                net(x).mean().backward()
                opt.step()

        def cast(loader):
            model = nn.Linear(4, 4)
            model.to(torch.float16)  # <- MF602
            opt = torch.optim.Adam(model.parameters())
            for x in loader:
                model(x).mean().backward()
                opt.step()
        """,
    "apex": """
        import apex
        from apex import amp
        from apex.amp import initialize

        def backwards(net, loader):
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x in loader:
                with amp.scale_loss(net(x).mean(), opt) as scaled:  # <- MF604
                    scaled.backward()
                opt.step()
            return amp.initialize(net, opt, opt_level="O1")  # <- MF605

        def without_masters(net, opt):
            return initialize(net, opt, opt_level="O3")  # <- MF605

        def by_variable(net, opt, level):
            with apex.amp.scale_loss(net.loss, opt) as scaled:  # <- MF604
                scaled.backward()
            net, opt = apex.amp.initialize(net, opt, opt_level=level)  # <- MF605
        """,
    "memfit's apex": """
        from memfit.integrations.apex import amp

        def train(x):
            net = nn.Linear(4, 4)
            opt = torch.optim.SGD(net.parameters(), 0.1)
            with amp.scale_loss(net(x).mean(), opt) as scaled:  # <- MF604
                scaled.backward()
            opt.step()
        """,
    "upcasts for the loss": """
        def step(net, x, y):
            with torch.autocast("cuda", torch.bfloat16):
                logits = net(x)
            loss = F.cross_entropy(logits.view(-1, 10).float(), y)  # <- MF603, MF201
            loss.backward()

        class Model(nn.Module):
            def forward(self, x, y):
                logits = self.head(x)
                logits = logits.to(torch.float32)
                return nn.CrossEntropyLoss()(logits, y)  # <- MF603
        """,
    "writes into what backward reads": """
        class Block(nn.Module):
            def forward(self, x):
                y = torch.sigmoid(self.a(x))
                y *= 2  # <- MF701
                z = self.b(y).tanh()
                z.add_(x)  # <- MF701
                w = F.softmax(self.c(z), -1)
                w[:, 0] = 0  # <- MF701
                v = self.d(w).exp()
                v.masked_fill_(x > 0, 0.0)  # <- MF701
                return w, v

        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.act = nn.ReLU(inplace=True)
                self.seq = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

            def forward(self, x):
                out = self.act(self.conv(x))
                out += x  # <- MF701
                more = self.seq(out)
                more -= 1  # <- MF701
                return more
        """,
    "skips that are changed": """
        class A(nn.Module):
            def __init__(self):
                super().__init__()
                self.relu = nn.ReLU(inplace=True)
                self.branch = nn.Sequential(
                    nn.ELU(inplace=True),  # <- MF702
                    nn.Linear(4, 4),
                )

            def forward(self, x):
                identity = x
                out = self.relu(x)  # <- MF702
                out = self.conv(out)
                return out + identity

            def other(self, x):
                return x + self.branch(x)

            def later(self, x):
                return self.branch(x) + x

            def functional(self, x):
                h = F.leaky_relu(x, 0.1, inplace=True)  # <- MF702
                h = self.fc(h)
                return torch.cat([h, x])
        """,
    "leaves that are written": """
        def attack(x):
            x = x.clone()
            noise = torch.zeros(4, requires_grad=True)
            noise += 0.1  # <- MF703
            noise.clamp_(0, 1)
            w = nn.Parameter(torch.zeros(4))
            w.mul_(2)  # <- MF703
            images = torch.rand(4).requires_grad_(True)
            return F.relu(images, inplace=True)  # <- MF703
        """,
    "activations that could be in place": """
        def block(n):
            return [nn.ConvTranspose2d(n, n, 4), nn.BatchNorm2d(n), nn.ELU()]  # <- MF704

        def other(n):
            return nn.Sequential(
                nn.Conv2d(3, n, 3),
                nn.LeakyReLU(0.2, inplace=False),  # <- MF704
                nn.InstanceNorm2d(n),
                nn.LeakyReLU(negative_slope=0.1),  # <- MF704
            )
        """,
    "cache calls in every step": """
        import gc
        from torch.cuda import empty_cache

        def fit(net, loader):
            for x in loader:
                net(x).mean().backward()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # <- MF801
                empty_cache()  # <- MF801
                gc.collect()  # <- MF802

        class Evaluator:
            @torch.no_grad()
            def run(self, loader):
                self.model.eval()
                for x in loader:
                    self.model(x)
                    torch.cuda.empty_cache()  # <- MF801
        """,
    "retries inside the handler": """
        def step(net, x):
            loss = F.mse_loss(net(x), torch.zeros(1))
            loss.backward()
            return loss.item()

        def careful(net, x):
            try:
                return step(net, x)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                return step(net, x[: len(x) // 2])  # <- MF803

        def find_batch(net, size):
            try:
                return step(net, torch.zeros(size, 4))
            except (RuntimeError, ValueError) as error:
                if "out of memory" in str(error):
                    return find_batch(net, size // 2)  # <- MF803
                raise

        def direct(model, x):
            try:
                y = model(x)
            except Exception as error:
                print("oom", error)
                y = torch.cat([model(part) for part in x.chunk(2)])  # <- MF803
            return y
        """,
    "checkpoints that live on": """
        def main(path, loader, device):
            net = nn.Linear(4, 4)
            ckpt = torch.load(path, map_location=device)  # <- MF901
            net.load_state_dict(ckpt["net"])
            start = ckpt["epoch"]
            for epoch in range(start, 10):
                for x in loader:
                    net(x).mean().backward()

        class Trainer:
            def resume(self, path):
                self.ckpt = torch.load(path, map_location=self.device)  # <- MF901
                self.net.load_state_dict(self.ckpt)

        def load(net, path, device):
            state = torch.load(path, device)  # <- MF901
            net.load_state_dict(state["net"])
            return net, state
        """,
    "loads to the device of the file": """
        from torch import load

        def a(net, path):
            net.load_state_dict(torch.load(path))  # <- MF902
            net.load_state_dict(torch.load(path, weights_only=True)["model"])  # <- MF902

        class T:
            def resume(self, path):
                blob = load(path)  # <- MF902
                self.net.load_state_dict(blob["net"])
                self.opt.load_state_dict(blob["opt"])
        """,
    "ties that are lost": """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.wte, self.lm_head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
                self.wte.weight = self.lm_head.weight

        class Big(Model):
            pass

        def a():
            with torch.device("meta"):
                net = Big()
            net.to_empty(device="cuda")  # <- MF903
            return net

        def b():
            net = Model().to("meta").to_empty(device="cpu")  # <- MF903
            net.load_state_dict({})
            return net
        """,
    "loaders in the loop of epochs": """
        from torch.utils.data import DataLoader

        def fit(net, data, epochs):
            for epoch in range(epochs):
                loader = DataLoader(data, 8, num_workers=4, persistent_workers=True)  # <- MF911
                for x in loader:
                    net(x).mean().backward()

        class Trainer:
            def fit(self):
                while self.epoch < 10:
                    for x in torch.utils.data.DataLoader(self.data, num_workers=self.workers):  # <- MF911
                        self.step(x)
        """,
    "lists of many objects": """
        class Files(torch.utils.data.Dataset):
            def __init__(self):
                self.rows = [{"name": str(i), "label": i} for i in range(50_000)]  # <- MF912
                self.index = {i: str(i) for i in range(20000)}  # <- MF912
                self.texts = []
                for i in range(2 * 10_000):
                    self.texts.append(f"text {i}")  # <- MF912

            def __getitem__(self, i):
                return self.rows[i], self.index[i], self.texts[i]
        """,
    "DataParallel": """
        from torch.nn import DataParallel

        a = nn.DataParallel(nn.Linear(4, 4))  # <- MF913
        b = torch.nn.parallel.DataParallel(a)
        c = DataParallel(b, device_ids=[0, 1])  # <- MF913
        """,
    "means of means": """
        def fit(net, loader, opt, n):
            criterion = nn.CrossEntropyLoss(ignore_index=-100)
            for i, (x, y) in enumerate(loader):
                loss = criterion(net(x), y) / n
                loss.backward()  # <- MF921
                if (i + 1) % n == 0:
                    opt.step()
                    opt.zero_grad()

        def parts(net):
            batches = [torch.randn(n, 4) for n in [3, 9, 27]]
            for x in batches:
                loss = F.cross_entropy(net(x), x)
                loss = loss / 3
                loss.backward()  # <- MF921
        """,
    "batch norm over parts": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.bn = nn.BatchNorm2d(3)

            def forward(self, x):
                return self.bn(x)

        def step(x, opt):
            net = Net()
            for part in torch.split(x, 4):
                (net(part).mean() / 4).backward()  # <- MF922
            opt.step()

        def other(data, labels):
            net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            for a, b in zip(data.chunk(2), labels.chunk(2)):
                loss = F.mse_loss(net(a), b) / 2
                loss.backward()  # <- MF922
        """,
}
QUIET = {
    "apex in order, and prepared elsewhere": """
        from memfit.integrations.apex import amp
        from trainer import prepare

        def in_order(net, loader):
            opt = torch.optim.SGD(net.parameters(), 0.1)
            net, opt = amp.initialize(net, opt)
            for x in loader:
                with amp.scale_loss(net(x).mean(), opt) as scaled:
                    scaled.backward()
                opt.step()

        def handed_in(net, opt, loss):
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
        """,
    "apex prepared in another file": """
        from memfit.integrations.apex import amp
        from trainer import prepare

        def train(net, x):
            opt = torch.optim.SGD(net.parameters(), 0.1)
            net, opt = prepare(net, opt)
            with amp.scale_loss(net(x).mean(), opt) as scaled:
                scaled.backward()
            opt.step()
        """,
    "clips after unscale, without a scaler, of another step": """
        def fit(net, loader, opt, scaler, clip):
            for x in loader:
                scaler.scale(net(x).mean()).backward()
                if clip:
                    scaler.unscale_(opt)
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                scaler.step(opt)

        def plain(net, loss):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        """,
    "half for inference, a master copy, bfloat16": """
        def infer(net, x):
            net = net.half().eval()
            with torch.no_grad():
                return net(x)

        def master(grads):
            w = torch.ones(4)
            for g in grads:
                w -= 0.1 * g.float()
                half = w.to(torch.float16)
            return half

        def brain(net, loader):
            net = net.bfloat16()
            opt = torch.optim.SGD(net.parameters(), 0.1)
            for x in loader:
                net(x).mean().backward()
        """,
    "float of float": """
        def step(net, x, y):
            loss = F.cross_entropy(net(x).float(), y)
            loss.backward()
        """,
    "writes that are safe": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.bn, self.relu = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

            def forward(self, x):
                identity = x
                out = self.relu(self.bn(self.conv(x)))
                out = self.bn(self.conv(out))
                out += identity
                out = self.relu(out)
                h = F.relu(self.fc(out))
                h = h + 1
                h += 2
                mask = torch.sigmoid(self.gate(x)).detach()
                mask += 1
                return h * mask

        @torch.no_grad()
        def predict(net, x):
            p = net(x).softmax(-1)
            p[0] = 0
            p *= 2
            return p

        def data(x):
            y = torch.relu(torch.randn(4))
            y += 1
            return y
        """,
    "in-place activations that nobody looks behind": """
        class A(nn.Module):
            def __init__(self):
                super().__init__()
                self.relu = nn.ReLU(inplace=True)
                self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

            def forward(self, x):
                x = self.relu(x)
                out = self.branch(x)
                n = x.size(0)
                return out + x, n

            def pre(self, x):
                out = self.relu(x)
                print(x.shape)
                return self.fc(out)

            def arms(self, x):
                if self.training:
                    return self.relu(x)
                else:
                    return x + 1

            def on_purpose(self, x):
                F.relu(x, inplace=True)
                return x
        """,
    "parameters that are updated as they should be": """
        def fit(x, y):
            w = torch.zeros(4, requires_grad=True)
            for _ in range(10):
                loss = (x @ w - y).square().mean()
                loss.backward()
                with torch.no_grad():
                    w -= 0.1 * w.grad
                    w.grad = None
                w.data.clamp_(-1, 1)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.zeros(4))
                nn.init.normal_(self.w)
        """,
    "activations that are in place, or would save nothing": """
        def block(n, slope):
            return [
                nn.Conv2d(n, n, 3), nn.LeakyReLU(0.2, True), nn.Conv2d(n, n, 3), nn.LeakyReLU(0.2, inplace=True),
                nn.BatchNorm2d(n), nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2), nn.Conv2d(n, n, 1), nn.GELU(),
                nn.Linear(n, n), nn.LeakyReLU(0.1), nn.BatchNorm1d(n), nn.LeakyReLU(slope),
            ]
        """,
    "cache calls now and then": """
        import gc

        def fit(net, loader, stages):
            for stage in stages:
                for i, x in enumerate(loader):
                    try:
                        net(x).mean().backward()
                    except RuntimeError:
                        torch.cuda.empty_cache()
                    if i % 1000 == 0:
                        torch.cuda.empty_cache()
                        gc.collect()
            torch.cuda.empty_cache()

        def clean(paths):
            for path in paths:
                gc.collect()
        """,
    "retries outside, and handlers of other things": """
        def step(net, x):
            net(x).mean().backward()

        def careful(net, x):
            while True:
                try:
                    step(net, x)
                    return
                except torch.cuda.OutOfMemoryError:
                    x = x[: len(x) // 2]

        def read(path):
            try:
                return open(path)
            except RuntimeError:
                return open(path + ".bak")

        def other(net, x):
            try:
                step(net, x)
            except KeyError:
                step(net, x)
        """,
    "checkpoints on the CPU, deleted, or gone with their function": """
        def main(path, loader, device):
            net = nn.Linear(4, 4)
            a = torch.load(path, map_location="cpu")
            net.load_state_dict(a)
            b = torch.load(path, map_location=device)
            net.load_state_dict(b)
            del b
            for x in loader:
                net(x).mean().backward()

        def load(net, path, device):
            state = torch.load(path, map_location=device)
            net.load_state_dict(state)
            return net

        def data(path):
            return torch.load(path)
        """,
    "ties that are tied again": """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Embedding(10, 4), nn.Linear(4, 10)
                self.b.weight = self.a.weight

        class Loose(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 4)

        def build():
            m, n, o = Model(), Model(), Loose()
            m.to_empty(device="cpu")
            m.b.weight = m.a.weight
            n.to_empty(device="cpu")
            n.tie_weights()
            o.to_empty(device="cpu")
        """,
    "loaders made once, for each fold, without workers": """
        from torch.utils.data import DataLoader, Subset

        def fit(net, data, folds):
            for train, test in folds:
                loader = DataLoader(Subset(data, train), num_workers=4)
                for x in loader:
                    net(x)
            for epoch in range(3):
                for x in DataLoader(data, shuffle=True):
                    net(x)
        """,
    "lists that are short, numbers in arrays, lists nobody reads": """
        import numpy as np

        class Files:
            def __init__(self, paths):
                self.paths = list(paths)
                self.short = [str(i) for i in range(100)]
                self.array = np.array([str(i) for i in range(50_000)])
                self.tensor = torch.tensor([i for i in range(50_000)])
                self.unread = [str(i) for i in range(50_000)]

            def __getitem__(self, i):
                return self.paths[i], self.short[i], self.array[i], self.tensor[i]
        """,
    "accumulation that is right": """
        def equal(net, loader, opt, n):
            for i, (x, y) in enumerate(loader):
                loss = F.cross_entropy(net(x), y) / n
                loss.backward()
                if (i + 1) % n == 0:
                    opt.step()

        def summed(net, loader, opt, total):
            criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
            for x, y in loader:
                (criterion(net(x), y) / total).backward()
            opt.step()

        def normal(net, loader, opt):
            criterion = nn.CrossEntropyLoss(ignore_index=-100)
            for x, y in loader:
                opt.zero_grad()
                loss = criterion(net(x), y) / 2
                loss.backward()
                opt.step()

        def batches(net, data, opt):
            net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            for part in data.split(8):
                opt.zero_grad()
                net(part).mean().backward()
                opt.step()
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_the_cause_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("amp.initialize(net, opt, opt_level='O0')", "O0 is plain float32: leave initialize and scale_loss out."),
        ("amp.initialize(net, opt)", "O1 is torch.autocast around forward pass and loss, scaler.scale(loss).backward()"),
        ("amp.initialize(net, opt, opt_level='O2')", "O2 (half weights, float32 masters in the optimizer) has no equal in PyTorch, and .half() is O3"),
        ("amp.initialize(net, opt, opt_level='O3')", "O3 is model.half() with inputs cast too; small updates are rounded away."),
        ("amp.initialize(net, opt, opt_level=level)", "O1 is torch.autocast"),
    ],
)  # fmt: skip
def test_what_is_to_be_written_instead_of_apex_depends_on_the_level(call, words):
    (finding,) = check_text(f"from apex import amp\ndef prepare(net, opt, level):\n    return {call}\n")
    assert finding.code == "MF605"
    assert finding.remedy.startswith(words)
    assert finding.remedy.endswith("`memfit run` answers the import, as does `from memfit.integrations.apex import amp`.")
