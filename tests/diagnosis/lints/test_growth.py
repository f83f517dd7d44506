"""MF101-MF104: sums, lists and states that keep earlier graphs, in several shapes, and their innocent look-alikes."""

import pytest

from diagnosis.lints.marked import assert_marked, find

FOUND = {
    "a metric on a branch of its own": """
        def fit(net, loader, opt):
            acc = 0
            for x, y in loader:
                out = net(x)
                loss = F.mse_loss(out, y)
                hit = 1 - (out - y).abs().mean()
                loss.backward()
                opt.step()
                acc = acc + hit  # <- MF101
            return acc
        """,
    "an exponential average": """
        def fit(net, loader):
            smooth = None
            for x in loader:
                penalty = net(x).norm()
                loss = net(x).mean()
                loss.backward()
                smooth = penalty if smooth is None else 0.9 * smooth + 0.1 * penalty  # <- MF101
        """,
    "an attribute of a trainer": """
        class Trainer:
            def __init__(self, net):
                self.net, self.total = net, 0.0

            def epoch(self, loader):
                self.total = 0.0
                for x, y in loader:
                    loss = F.cross_entropy(self.net(x), y)
                    loss.backward()
                    self.total += loss  # <- MF102
        """,
    "the step is a function of its own": """
        def train_step(net, opt, x, y):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss

        def fit(net, opt, loader):
            running = 0.0
            for i, (x, y) in enumerate(loader):
                running += train_step(net, opt, x, y)  # <- MF101
                if i % 100 == 99:
                    print(running / 100)
                    running = 0.0
        """,
    "module level, with a scaler": """
        net, opt, scaler = nn.Linear(4, 4), None, torch.amp.GradScaler()
        total = 0
        for x in torch.randn(10, 4, 4):
            with torch.autocast("cuda"):
                cost = net(x).square().mean()
            scaler.scale(cost).backward()
            scaler.step(opt)
            total += cost  # <- MF102
        """,
    "validation by eval alone": """
        def validate(net, loader):
            net.eval()
            s = 0.0
            for x, y in loader:
                s += F.cross_entropy(net(x), y)  # <- MF101, MF301
            print(s)
        """,
    "a list, a dictionary of lists, and += of a list": """
        def fit(net, loader):
            outs, log, both = [], {"loss": []}, []
            for x, y in loader:
                out = net(x)
                loss = F.mse_loss(out, y)
                loss.backward()
                outs.append(out)  # <- MF103
                log["loss"].append(loss)  # <- MF103
                both += [loss]  # <- MF103
        """,
    "a list of records and a dictionary by step": """
        def fit(net, loader):
            seen, by_step = [], {}
            for step, x in enumerate(loader):
                loss = net(x).mean()
                loss.backward()
                seen.append({"step": step, "loss": loss})  # <- MF103
                by_step[step] = loss  # <- MF103
        """,
    "a list on the trainer": """
        class Trainer:
            def __init__(self, model):
                self.model = model
                self.history = []

            def fit(self, batches):
                for batch in batches:
                    loss = self.model(batch).mean()
                    loss.backward()
                    self.history.append(loss)  # <- MF103
        """,
    "an LSTM state with two parts": """
        def fit(loader):
            lstm = nn.LSTM(8, 16)
            hidden = (torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
            for x in loader:
                out, hidden = lstm(x, hidden)
                out.mean().backward(retain_graph=True)  # <- MF104
        """,
    "a state of a cell written by hand": """
        cell = nn.RNNCell(4, 4)
        h = torch.zeros(2, 4)
        for x in torch.randn(5, 2, 4):
            h = torch.tanh(cell(x, h))
            err = h.square().mean()
            err.backward(retain_graph=True)  # <- MF104
        """,
    "a loss that is never started anew": """
        def fit(net, loader):
            total = 0
            for x in loader:
                total = total + net(x).mean()
                total.backward(retain_graph=True)  # <- MF104
        """,
}
QUIET = {
    "item, detach, float, no_grad": """
        def fit(net, loader):
            a = b = c = d = 0.0
            for x, y in loader:
                out = net(x)
                loss = F.mse_loss(out, y)
                loss.backward()
                a += loss.item()
                b += loss.detach()
                c = c + float(loss)
                with torch.no_grad():
                    d += (out - y).abs().mean()
        """,
    "parts of one loss": """
        def fit(net, loader, opt):
            for parts in loader:
                total = 0.0
                for part in parts:
                    total += net(part).mean()
                opt.zero_grad()
                total.backward()
                opt.step()
        """,
    "parts in a list that is stacked": """
        def fit(net, loader):
            for parts in loader:
                losses = []
                for part in parts:
                    losses.append(net(part).mean())
                torch.stack(losses).sum().backward()
        """,
    "a loss over several steps, then started anew": """
        def fit(net, loader, opt):
            waiting = 0
            for i, x in enumerate(loader):
                waiting = waiting + net(x).mean()
                if i % 4 == 3:
                    waiting.backward()
                    opt.step()
                    waiting = 0
        """,
    "policy gradient: log probabilities wait for the return": """
        def episode(policy, env, opt):
            logs, rewards = [], []
            state = env.reset()
            for _ in range(100):
                dist = torch.distributions.Categorical(logits=policy(state))
                action = dist.sample()
                logs.append(dist.log_prob(action))
                state, reward = env.step(action)
                rewards.append(reward)
            loss = -(torch.stack(logs) * torch.tensor(rewards)).sum()
            loss.backward()
            opt.step()
        """,
    "a sum in a function that returns it as the loss": """
        def loss_of(net, parts):
            total = 0
            for part in parts:
                total += net(part).mean()
            return total
        """,
    "a deque that forgets and a key that is overwritten": """
        from collections import deque

        def fit(net, loader):
            last, log = deque(maxlen=10), {}
            for x in loader:
                loss = net(x).mean()
                loss.backward()
                last.append(loss)
                log["loss"] = loss
        """,
    "a state that is cut": """
        def repackage(h):
            return tuple(part.detach() for part in h)

        def fit(loader):
            lstm = nn.LSTM(8, 16)
            hidden = None
            for x in loader:
                if hidden is not None:
                    hidden = repackage(hidden)
                out, hidden = lstm(x, hidden)
                out.mean().backward()
        """,
    "retain_graph for two losses of one step": """
        def fit(net, loader):
            for x in loader:
                out = net(x)
                a, b = out.mean(), out.std()
                a.backward(retain_graph=True)
                b.backward()
        """,
    "numbers that are called loss": """
        def report(rows):
            loss = 0.0
            for row in rows:
                loss += row["loss"]
                loss = loss + row.loss_value
            return loss
        """,
    "a list that is emptied in the loop": """
        def fit(net, loader):
            kept = []
            for x in loader:
                kept = []
                loss = net(x).mean()
                kept.append(loss)
                loss.backward()
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_what_keeps_earlier_graphs_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()
