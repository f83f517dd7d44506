"""MF201-MF212, MF301, MF302: tensors that are alive for nothing, attention's matrices, evaluation with gradients."""

import pytest

from diagnosis.lints.marked import assert_marked, find

FOUND = {
    "logits of a loop, with views and casts": """
        def fit(net, loader, opt):
            criterion = nn.CrossEntropyLoss()
            for x, y in loader:
                opt.zero_grad()
                scores = net(x)
                cost = criterion(scores.view(-1, scores.size(-1)), y)  # <- MF201
                cost.backward()
                opt.step()
        """,
    "a method of a trainer": """
        class Trainer:
            def step(self, batch):
                logits = self.model(batch["x"])
                hits = (logits.argmax(-1) == batch["y"]).sum().item()
                loss = F.cross_entropy(logits.float(), batch["y"])  # <- MF201
                self.scaler.scale(loss).backward()
                return loss.item(), hits
        """,
    "an output with a loss field": """
        def fit(model, loader, optimizer):
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                outputs = model(**batch)
                loss = outputs.loss  # <- MF201
                loss.backward()
                optimizer.step()
        """,
    "logits beside the loss": """
        def fit(model, loader, scaler, steps):
            for x, y in loader:
                for part in range(steps):
                    with torch.autocast("cuda"):
                        logits, loss = model(x, y)  # <- MF201
                        loss = loss / steps
                    scaler.scale(loss).backward()
        """,
    "a compiled model that one of several arms built": """
        import argparse
        from elsewhere import GPT

        exec(open("config.py").read())
        model = GPT()
        if argparse.resume:
            model = GPT(2)
        model = torch.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            logits, loss = model(torch.zeros(2), torch.zeros(2))  # <- MF201
            loss.backward()
            optimizer.step()
        """,
    "module level, with a function that has a local of the same name": """
        def estimate(net, x):
            logits = net(x)
            return logits.mean()

        net = nn.Linear(4, 1000)
        for x, y in [(torch.randn(2, 4), torch.zeros(2).long())]:
            logits = net(x)
            loss = F.cross_entropy(logits, y)  # <- MF201
            loss.backward()
        """,
    "forward only, twice the graph": """
        def measure(net, loader):
            for x in loader:
                out = net(x).square().mean()  # <- MF202
                print(out.item())
        """,
    "forward only in a while loop": """
        def burn_in(steps):
            net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            while steps:
                y = net(torch.randn(2, 4))  # <- MF202
                steps -= 1
        """,
    "attention weights into an underscore, an index, and an unread name": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(8, 2)

            def forward(self, x):
                a, _ = self.attn(x, x, x)  # <- MF211
                b = self.attn(a, a, a)[0]  # <- MF211
                c, weights = self.attn(b, b, b, attn_mask=None)  # <- MF211
                return c
        """,
    "attention step by step": """
        class Attention(nn.Module):
            def forward(self, q, k, v, mask):
                scores = torch.matmul(q, k.transpose(-2, -1)) / q.size(-1) ** 0.5
                scores = scores.masked_fill(mask, -1e9)
                p = F.softmax(scores, dim=-1)  # <- MF212
                p = self.dropout(p)
                return torch.matmul(p, v)
        """,
    "attention with einsum and with bmm": """
        def first(q, k, v):
            s = torch.einsum("bqd,bkd->bqk", q, k)
            a = torch.softmax(s * 0.5, -1)  # <- MF212
            out = torch.einsum("bqk,bkd->bqd", a, v)
            return out.transpose(0, 1)

        def second(q, k, v):
            return torch.bmm((torch.bmm(q, k.mT) * 0.1).softmax(dim=-1), v)  # <- MF212
        """,
    "validation with eval only": """
        class Trainer:
            def validate(self, loader):
                self.model.eval()
                total = 0.0
                for x, y in loader:
                    out = self.model(x)  # <- MF301
                    total += F.mse_loss(out, y).item()
                self.model.train()
                return total
        """,
    "train(False)": """
        def run(net, loader):
            net.train(False)
            return [net(x).argmax(-1).tolist() for x in loader] + [net(x).item() for x in loader]

        def check(net, loader):
            net.train(mode=False)
            for x in loader:
                print(net(x).item())  # <- MF301
        """,
    "evaluation by name, called with gradients on": """
        def evaluate(model, loader):
            right = 0
            for x, y in loader:
                right += (model(x).argmax(-1) == y).sum().item()  # <- MF301
            return right

        def main(model, loader):
            print(evaluate(model, loader))
        """,
    "outputs joined batch by batch": """
        class Evaluator:
            @torch.inference_mode()
            def run(self, model, loader):
                everything = torch.empty(0)
                for x in loader:
                    everything = torch.cat([everything, model(x)], dim=0)  # <- MF302
                return everything
        """,
    "outputs in a list that is reduced at the end": """
        def accuracy(net, loader, labels):
            logits = []
            with torch.no_grad():
                for x in loader:
                    logits.append(net(x))  # <- MF302
            return (torch.cat(logits).argmax(-1) == labels).float().mean()

        @torch.no_grad()
        def mean(net, loader):
            outs = []
            for x in loader:
                out = net(x)
                outs.append(out)  # <- MF302
            joined = torch.cat(outs)
            return torch.mean(joined), joined.std()
        """,
}
QUIET = {
    "logits that are read later, in a closure, by locals, or deleted": """
        def late(net, loader):
            for x, y in loader:
                logits = net(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()
                print(logits.argmax(-1))

        def closure(net, x, y):
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            show = lambda: logits.shape
            loss.backward()
            return show

        def watched(net, x, y):
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            return locals()

        def deleted(net, x, y):
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            del logits
            loss.backward()

        def returned(net, x, y):
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            return logits

        def kept(self, net, x, y):
            self.last = logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()

        def next_turn(net, loader):
            logits = None
            for x, y in loader:
                if logits is not None:
                    print(logits.shape)
                logits = net(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()

        def caught(net, x, y):
            logits = net(x)
            try:
                loss = F.cross_entropy(logits, y)
                loss.backward()
            except RuntimeError:
                print(logits.shape)
        """,
    "logits that the graph keeps anyway": """
        def softmaxed(net, x, y):
            probs = net(x).softmax(-1)
            loss = F.cross_entropy(probs, y)
            loss.backward()

        def also_used(net, x, y):
            logits = net(x)
            extra = logits.square().mean()
            loss = F.cross_entropy(logits, y) + extra
            loss.backward()

        def saved_by_its_loss(net, x, y):
            out = net(x)
            loss = F.mse_loss(out, y)
            loss.backward()

        def given(logits, y):
            loss = F.cross_entropy(logits, y)
            loss.backward()
        """,
    "graphs that are needed, or let go": """
        def chain(layers, x):
            for layer in nn.ModuleList(layers):
                x = layer(x)
            return x

        def deleted(net, loader):
            for x in loader:
                out = net(x).mean()
                print(out.item())
                del out

        def trained(net, loader):
            for x in loader:
                out = net(x).mean()
                out.backward()

        @torch.no_grad()
        def without(net, loader):
            for x in loader:
                out = net(x).mean()

        def summed(net, loader):
            total = 0
            for x in loader:
                part = net(x).mean()
                total = total + part
            return total
        """,
    "attention weights that are read or not asked for": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = nn.MultiheadAttention(8, 2)

            def forward(self, x):
                a, _ = self.attn(x, x, x, need_weights=False)
                b, w = self.attn(a, a, a)
                c = self.attn(b, b, b)
                return b, w, c
        """,
    "softmax that is no attention, and weights that are wanted": """
        def router(x, w):
            return (x @ w).softmax(-1) @ w.T

        def shown(q, k, v):
            w = (q @ k.transpose(-1, -2)).softmax(-1)
            return w @ v, w

        def other_path(self, q, k, v):
            if self.flash:
                return self.flash_attention(q, k, v)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

        def eager_attention_forward(q, k, v):
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v
        """,
    "evaluation without gradients, in every spelling": """
        @torch.no_grad()
        def a(model, loader):
            model.eval()
            for x in loader:
                model(x)

        def b(model, loader):
            model.eval()
            with torch.inference_mode():
                for x in loader:
                    model(x)

        def c(model, loader):
            model.eval()
            torch.set_grad_enabled(False)
            for x in loader:
                model(x)

        def d(model, loader, train):
            model.train() if train else model.eval()
            for x in loader:
                with torch.set_grad_enabled(train):
                    model(x)

        @smart_inference_mode()
        def f(model, loader):
            model.eval()
            for x in loader:
                model(x)

        def run(model, loader):
            model.eval()
            for x in loader:
                model(x)

        def e(model, loader):
            with torch.no_grad():
                run(model, loader)
        """,
    "eval mode with gradients wanted": """
        def attack(model, x, y):
            model.eval()
            for _ in range(10):
                x = x.detach().requires_grad_()
                F.cross_entropy(model(x), y).backward()

        def saliency(model, x):
            model.eval()
            for part in x:
                g = torch.autograd.grad(model(part).sum(), part)

        def back_to_training(model, loader):
            model.eval()
            model.train()
            for x in loader:
                model(x).mean().backward()
        """,
    "small results, moved results, generated sequences": """
        @torch.no_grad()
        def small(net, loader):
            a, b, c = [], [], None
            for x in loader:
                out = net(x)
                a.append(out.argmax(-1))
                b.append(out.cpu())
                c = out.argmax(-1) if c is None else torch.cat((c, out.argmax(-1)))
            return torch.cat(a), torch.cat(b).mean(), c

        @torch.no_grad()
        def generate(net, ids):
            for _ in range(10):
                ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)
            return ids

        @torch.no_grad()
        def embed(net, loader):
            out = []
            for x in loader:
                out.append(net(x))
            return torch.cat(out)
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_what_is_alive_for_nothing_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()
