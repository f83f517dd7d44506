"""MF401-MF406, MF501-MF516: zero_grad, graphs in each other's way, and checkpoints that save nothing or train wrongly."""

import pytest

from diagnosis.lints.marked import assert_marked, find

FOUND = {
    "zero_grad after the forward, three spellings": """
        def fit(net, loader, optimizer):
            for x, y in loader:
                loss = F.mse_loss(net(x), y)
                optimizer.zero_grad(set_to_none=True)  # <- MF401
                loss.backward()
                optimizer.step()

        class Trainer:
            def epoch(self):
                for batch in self.loader:
                    with torch.autocast("cuda"):
                        out = self.model(batch)
                        cost = out.mean()
                    self.opt.zero_grad()  # <- MF401
                    cost.backward()
                    self.opt.step()

        big = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
        for x in torch.randn(8, 4, 512):
            err = big(x).square().mean()
            big.zero_grad()  # <- MF401
            err.backward()
        """,
    "zeros that are kept": """
        def fit(net, loader, optimizer):
            for x in loader:
                optimizer.zero_grad(set_to_none=False)  # <- MF402
                net(x).mean().backward()
                optimizer.step()

        def by_hand(net, loader):
            for x in loader:
                for p in net.parameters():
                    if p.grad is not None:
                        p.grad.zero_()  # <- MF402
                net(x).mean().backward()
                net.zero_grad(False)  # <- MF402
        """,
    "losses of separate forwards": """
        def step(net, a, b, opt):
            loss = F.mse_loss(net(a), b) + F.mse_loss(net(b), a)  # <- MF403
            loss.backward()

        class Multi:
            def part(self, x):
                return self.model(x).square().mean()

            def step(self, xs):
                total = self.part(xs[0]) + 0.5 * self.part(xs[1]) - self.part(xs[2])  # <- MF403
                total.backward()
        """,
    "fakes that hang on the generator": """
        def gan(netG, netD, loader, noise):
            opt_g = torch.optim.Adam(netG.parameters())
            opt_d = torch.optim.Adam(netD.parameters())
            bce = nn.BCEWithLogitsLoss()
            for real in loader:
                opt_d.zero_grad()
                good = bce(netD(real), torch.ones(8))
                fake = netG(noise)
                bad = bce(netD(fake), torch.zeros(8))  # <- MF404
                (good + bad).backward()
                opt_d.step()
                opt_g.zero_grad()
                bce(netD(netG(noise)), torch.ones(8)).backward()
                opt_g.step()

        class Gan:
            def critic_step(self, real, z):
                fake = self.generator(z)
                score = self.critic(fake)  # <- MF404
                loss = score.mean() - self.critic(real).mean()
                loss.backward()
                self.opt_critic.step()
        """,
    "a step before the second backward": """
        def both(actor, critic, x):
            opt_c = torch.optim.Adam(critic.parameters())
            opt_a = torch.optim.Adam(actor.parameters())
            value = critic(actor(x))
            critic_loss = value.square().mean()
            actor_loss = -value.mean()
            critic_loss.backward(retain_graph=True)
            opt_c.step()  # <- MF405
            actor_loss.backward()
            opt_a.step()

        def two_losses(net, opt, loader):
            for x in loader:
                out = net(x)
                first, second = out.mean(), out.std()
                first.backward(retain_graph=True)
                opt.step()  # <- MF405
                second.backward()
                opt.step()
        """,
    "foreach asked for": """
        from torch.optim import SGD

        class Setup:
            def optimizers(self, net):
                return SGD(net.parameters(), lr=0.1, foreach=True), torch.optim.Adam(net.parameters(), foreach=True)  # <- MF406
        """,
    "segments": """
        from torch.utils.checkpoint import checkpoint_sequential
        import torch.utils.checkpoint as cp

        def run(x):
            layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)]
            x = checkpoint_sequential(nn.Sequential(*layers), segments=1, input=x, use_reentrant=False)  # <- MF501
            x = cp.checkpoint_sequential(layers, 1, x)  # <- MF501
            x = torch.utils.checkpoint.checkpoint_sequential(layers, 6, x, use_reentrant=False)  # <- MF503
            return cp.checkpoint_sequential(layers, 5, x, use_reentrant=False)
        """,
    "single linears": """
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
                self.fc1 = nn.Linear(64, 64)
                self.fc2 = nn.Linear(64, 64)

            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False)  # <- MF502
                return x

            def other(self, x):
                x = checkpoint(self.fc1, x, use_reentrant=False)  # <- MF502
                return checkpoint(self.fc2, x, use_reentrant=False)  # <- MF502
        """,
    "reentrant with data going in": """
        from torch.utils.checkpoint import checkpoint

        def fit(net, loader):
            for images, labels in loader:
                images = images.cuda()
                hidden = checkpoint(net, images, use_reentrant=True)  # <- MF511
                F.cross_entropy(hidden, labels).backward()

        def default(stem):
            return checkpoint(stem, torch.rand(2, 4))  # <- MF511

        def function(block):
            def run(x):
                return block(x)
            return checkpoint(run, torch.zeros(2, 4), None, use_reentrant=True)  # <- MF511
        """,
    "batch norm and dropout inside": """
        from torch.utils import checkpoint as ckpt

        class ConvBlock(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

            def forward(self, x):
                return F.dropout(self.body(x), training=self.training)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = ConvBlock()

            def forward(self, x):
                x = ckpt.checkpoint(self.block, x, use_reentrant=False)  # <- MF512
                x = ckpt.checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)  # <- MF512, MF513
                return ckpt.checkpoint(lambda y: self.block(y), x, use_reentrant=False)  # <- MF512
        """,
    "keywords": """
        from torch.utils.checkpoint import checkpoint

        def layers(blocks, x, mask):
            for block in blocks:
                x = checkpoint(block, x, attention_mask=mask)  # <- MF514
            x = checkpoint(blocks[0], x, use_reentrant=True, scale=2.0)  # <- MF514
            return torch.utils.checkpoint.checkpoint(blocks[0], x, mask=mask, use_reentrant=True)  # <- MF514
        """,
    "forwards that change what they decide by": """
        from torch.utils.checkpoint import checkpoint

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return self.fc(x) if self.calls % 2 else x

        class Lazy(nn.Module):
            def forward(self, x):
                if self.table is None:
                    self.table = x.exp()
                return x * self.table

        def run(x):
            a, b = Counting(), Lazy()
            x = checkpoint(a, x, use_reentrant=False)  # <- MF515
            x = checkpoint(nn.Sequential(a, b), x, use_reentrant=False)  # <- MF515
            return checkpoint(lambda y: b(y), x, use_reentrant=False)  # <- MF515
        """,
    "reentrant under DDP": """
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def forward(self, x):
                x = self.stem(x)
                x = checkpoint(self.mid, x)  # <- MF516
                return checkpoint(self.block, x, use_reentrant=True)  # <- MF516

        def wrap(net):
            return DDP(net, device_ids=[0], find_unused_parameters=True)
        """,
}
QUIET = {
    "zero_grad where it belongs": """
        def before(net, loader, opt):
            for x in loader:
                opt.zero_grad()
                net(x).mean().backward()
                opt.step()

        def after(net, loader, opt):
            for x in loader:
                loss = net(x).mean()
                loss.backward()
                opt.step()
                opt.zero_grad(set_to_none=True)

        def accumulated(net, loader, opt):
            for i, x in enumerate(loader):
                loss = net(x).mean()
                if i % 4 == 0:
                    opt.zero_grad()
                loss.backward()
                opt.step()

        def two_players(a, b, opt_a, opt_b, loader):
            for x in loader:
                first, second = a(x).mean(), b(x).mean()
                opt_a.zero_grad()
                first.backward()
                opt_b.zero_grad()
                second.backward()
        """,
    "a model so small that its gradients do not matter": """
        def fit(loader):
            tiny = nn.Linear(8, 2)
            opt = torch.optim.SGD(tiny.parameters(), 0.1)
            for x in loader:
                loss = tiny(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
    "gradients that are read as tensors": """
        def fit(net, loader, opt, quiet):
            for x in loader:
                opt.zero_grad(set_to_none=False)
                print([p.grad.norm() for p in net.parameters()])
                net(x).mean().backward()
                opt.zero_grad(set_to_none=quiet)
        """,
    "losses that share a forward, or are one": """
        def shared(enc, a, b, x):
            h = enc(x)
            loss = a(h).mean() + b(h).mean()
            loss.backward()

        def penalised(net, x):
            loss = net(x).mean() + 0.1 * sum(p.norm() for p in net.parameters())
            loss.backward()

        def each(net, a, b):
            net(a).mean().backward()
            net(b).mean().backward()
        """,
    "a critic's step with detached fakes, and the generator's own": """
        def gan(netG, netD, loader, noise):
            opt_g = torch.optim.Adam(netG.parameters())
            opt_d = torch.optim.Adam(netD.parameters())
            for real in loader:
                fake = netG(noise)
                opt_d.zero_grad()
                real_score = netD(real)
                fake_score = netD(fake.detach())
                (fake_score.mean() - real_score.mean()).backward()
                opt_d.step()
                opt_g.zero_grad()
                score = netD(fake)
                (-score.mean()).backward()
                opt_g.step()

        def autoencoder(encoder, decoder, loader):
            opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
            for x in loader:
                code = encoder(x)
                loss = F.mse_loss(decoder(code), x) + decoder(torch.zeros(4)).mean()
                loss.backward()
                opt.step()
        """,
    "steps after both backward passes": """
        def both(net, opt, x):
            out = net(x)
            a, b = out.mean(), out.std()
            a.backward(retain_graph=True)
            b.backward()
            opt.step()

        def one_after_the_other(net, opt, loader):
            for x in loader:
                net(x).mean().backward()
                opt.step()
                net(x).std().backward()
                opt.step()
        """,
    "checkpoints as they should be": """
        from torch.utils.checkpoint import checkpoint, checkpoint_sequential

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.fc, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.1)

            def forward(self, x, mask=None):
                if self.training:
                    x = self.drop(x)
                return self.fc(self.norm(x))

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(4, 4)
                self.blocks = nn.ModuleList(Block() for _ in range(4))
                self.head = nn.Linear(4, 4)

            def forward(self, ids, mask):
                x = self.embed(ids)
                for block in self.blocks:
                    x = checkpoint(block, x, mask, use_reentrant=True)
                    x = checkpoint(block, x, mask=mask, use_reentrant=False, preserve_rng_state=True)
                return checkpoint(self.head, x, use_reentrant=False)

        def segments(n, x):
            layers = nn.Sequential(*[Block() for _ in range(8)])
            return checkpoint_sequential(layers, 4, x, use_reentrant=False) + checkpoint_sequential(layers, n, x)

        @torch.no_grad()
        def predict(stem, x):
            return checkpoint(stem, torch.rand(2, 4), use_reentrant=True)

        def with_gradient(stem):
            images = torch.rand(2, 4).requires_grad_()
            return checkpoint(stem, images, use_reentrant=True)
        """,
    "other things called checkpoint": """
        def save(trainer, checkpoint, model):
            checkpoint(model, torch.rand(2), mask=None)
            trainer.checkpoint(model, path="x")
        """,
}


@pytest.mark.parametrize("shape", FOUND)
def test_the_cause_is_found_on_its_line(shape):
    assert_marked(FOUND[shape])


@pytest.mark.parametrize("shape", QUIET)
def test_what_only_looks_like_it_is_left_alone(shape):
    assert find(QUIET[shape]) == set()
