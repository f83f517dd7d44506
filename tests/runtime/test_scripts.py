"""Training scripts of all kinds go through unharmed: what they print, bit digests included, is what plain Python prints."""

from __future__ import annotations

import pytest

SETUP = """
from helper import *
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
STEP = """
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
END = "print(loss.item(), digest(model, optimizer))\n"
PLAIN = SETUP + "for i in range(6):" + STEP + END


def assert_evicts_what_is_planned(result):
    """In every planned step, not in the first ones alone."""
    num_planned = sum(len(move.evict) for move in result.moves)
    assert num_planned
    assert result.certificate.num_evicted >= 0.9 * num_planned * result.num_planned_steps


def test_a_plain_loop(scripts):
    result = scripts.compare(PLAIN).result
    assert result.installed
    assert result.certificate.verdict == "equal"
    assert result.certificate.num_evicted > 0
    assert (result.num_steps, result.num_planned_steps) == (6, 5)
    assert result.num_measured_steps in (2, 3)


def test_a_generous_budget_changes_nothing(scripts):
    result = scripts.compare(PLAIN, share=2.0).result
    assert not result.installed
    assert result.certificate.verdict == "untouched"


def test_evaluation_under_no_grad_between_epochs(scripts):
    source = (
        SETUP
        + """
for epoch in range(3):
    for i in range(3):
        x, y = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print("accuracy", (model(batch(99)[0]).argmax(1) == batch(99)[1]).float().mean().item())
    model.train()
"""
        + END
    )
    assert_evicts_what_is_planned(scripts.compare(source).result)


def test_gradients_accumulate_over_micro_batches(scripts):
    source = (
        SETUP
        + """
for i in range(6):
    optimizer.zero_grad()
    for part in range(3):
        x, y = batch(3 * i + part, 256)
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
    optimizer.step()
"""
        + END
    )
    assert scripts.compare(source).result.installed


def test_gradients_are_clipped_and_the_learning_rate_follows_a_schedule(scripts):
    source = (
        SETUP
        + """
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
for i in range(6):
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    print(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    optimizer.step()
    schedule.step()
"""
        + END
    )
    assert scripts.compare(source).result.installed


def test_gradients_that_are_zeroed_in_place(scripts):
    source = PLAIN.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)")
    scripts.compare(source, share=0.8)


def test_a_grad_scaler_with_bfloat16_autocast(scripts):
    source = (
        SETUP
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
for i in range(6):
    x, y = batch(i)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale())
"""
        + END
    )
    assert scripts.compare(source).result.installed


def test_a_grad_scaler_that_skips_its_first_steps(scripts):
    source = (
        SETUP
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-60)
for i in range(8):
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(scaler.get_scale())
"""
        + END
    )
    scripts.compare(source)


def test_gradient_hooks_of_the_scripts(scripts):
    source = (
        SETUP
        + """
seen = []
model.blocks[2].linear.weight.register_hook(lambda grad: grad * 0.5)
model.blocks[1].register_full_backward_hook(lambda module, before, after: seen.append(after[0].sum().item()))
model.last.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
for i in range(6):"""
        + STEP
        + END
        + "print(seen)\n"
    )
    assert scripts.compare(source).result.installed


def test_variable_sequence_lengths(scripts):
    source = (
        SETUP
        + """
for i in range(10):
    x, y = batch(i, [300, 512, 280, 512, 450, 511, 128, 300, 512, 90][i])
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
        + END
    )
    assert scripts.compare(source).result.installed


def test_a_step_longer_than_all_that_were_measured(scripts):
    source = (
        SETUP
        + """
for i in range(6):
    x, y = batch(i, 700 if i == 4 else 300)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
        + END
    )
    scripts.compare(source, share=1.5)


def test_an_exception_the_script_catches_itself(scripts):
    source = (
        SETUP
        + """
for i in range(8):
    x, y = batch(i)
    optimizer.zero_grad()
    try:
        loss = F.cross_entropy(model(x if i % 3 else x[:, :5]), y)
    except RuntimeError as error:
        print("skipped", i, str(error).splitlines()[0])
        continue
    loss.backward()
    optimizer.step()
"""
        + END
    )
    assert scripts.compare(source).result.installed


NEVER_BACKWARD = (
    SETUP
    + """
for i in range(8):
    loss = F.cross_entropy(model(batch(i + 100)[0]), batch(i)[1])  # with a graph that no backward visits
    print(loss.item())
    del loss"""
    + STEP
    + END
)


def test_a_forward_pass_that_no_backward_follows(scripts):
    scripts.compare(NEVER_BACKWARD)


def test_a_forward_pass_that_no_backward_follows_now_and_then(scripts):
    result = scripts.compare(NEVER_BACKWARD.replace("range(8):", "range(8):\n  if i in (3, 5):")).result
    assert_evicts_what_is_planned(result)


def test_two_optimizers_step_in_turn_as_in_a_gan(scripts):
    source = """
from helper import *
torch.manual_seed(0)
maker, judge = Net(), Net()
judge.last = nn.Linear(32, 1)
maker.last = nn.Linear(32, 8)
optimizers = [torch.optim.Adam(judge.parameters()), torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9)]
for i in range(6):
    x, _ = batch(i)
    optimizers[0].zero_grad()
    made = maker(torch.randn(512, 8))
    loss = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
    loss.backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    loss = F.softplus(-judge(made)).mean()
    loss.backward()
    optimizers[1].step()
print(loss.item(), digest(maker, judge, *optimizers))
"""
    result = scripts.compare(source).result
    assert (result.installed, result.num_steps) == (True, 6)


def test_several_models_one_after_the_other_the_second_twice_as_large(scripts):
    source = """
from helper import *
torch.manual_seed(0)
def train(width, kind):
    model = Net(width)
    optimizer = kind(model.parameters(), lr=1e-3)
    for i in range(5):
        x, y = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(loss.item(), digest(model, optimizer))
for width, kind in ((16, torch.optim.RMSprop), (32, torch.optim.Adam), (8, torch.optim.AdamW)):
    train(width, kind)
"""
    path = scripts.write(source)
    plain, _ = scripts.run_plain(path)
    budget = scripts.budget(1.45, path)  # the first fits as it is, the second needs a plan
    out, ran = scripts.run(path, budget=budget)
    assert ran.error is None
    assert out == plain
    result = ran.result
    assert (result.num_steps, result.installed) == (15, True)
    assert result.eager_peak_bytes > budget >= result.peak_bytes
    assert result.moves
    assert [message for message in result.messages if "a new optimizer was made" in message]


def test_two_models_made_together_and_trained_one_after_the_other(scripts):
    source = (
        """
from helper import *
torch.manual_seed(0)
models = [Net(16), Net(32)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for model, optimizer in zip(models, optimizers):
    for i in range(6):"""
        + STEP.replace("    ", "        ")
        + "    print(loss.item(), digest(model, optimizer))\n"
    )
    path = scripts.write(source)
    plain, _ = scripts.run_plain(path)
    out, ran = scripts.run(path, budget=scripts.budget(1.5, path))
    assert ran.error is None
    assert out == plain
    assert ran.result.num_steps >= 10


def test_an_optimizer_that_joins_later(scripts):
    source = (
        SETUP
        + """
for parameter in model.first.parameters():
    parameter.requires_grad_(False)
for i in range(8):
    if i == 4:
        for parameter in model.first.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters())
"""
        + STEP
        + END
    )
    assert scripts.compare(source).result.installed


def test_an_optimizer_with_a_closure(scripts):
    source = (
        SETUP.replace("Adam(model.parameters(), lr=1e-3)", "LBFGS(model.parameters(), max_iter=3)")
        + """
for i in range(4):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(i)[0]), batch(i)[1])
        loss.backward()
        return loss
    loss = optimizer.step(closure)
print(loss.item(), digest(model))
"""
    )
    scripts.compare(source, share=1.2)  # its history grows with every step, which no trace of the first ones shows


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_script_that_checkpoints_by_itself(scripts, reentrant):
    source = (
        SETUP
        + f"""
from torch.utils.checkpoint import checkpoint
def forward(x):
    x = model.first(x)
    for index, block in enumerate(model.blocks):
        x = x + (checkpoint(block, x, use_reentrant={reentrant}) if index % 2 else block(x))
    return model.last(x)
for i in range(6):
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(forward(x), y)
    loss.backward()
    optimizer.step()
"""
        + END
    )
    scripts.compare(source, share=0.85)


def test_saved_tensor_hooks_of_the_script(scripts):
    source = (
        SETUP
        + """
packed = []
def pack(tensor):
    packed.append(tensor.numel())
    return tensor.detach().clone()
for i in range(6):
    x, y = batch(i)
    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z = model.blocks[0](model.first(x))
    for block in model.blocks[1:]:
        z = z + block(z)
    loss = F.cross_entropy(model.last(z), y)
    loss.backward()
    optimizer.step()
print(len(packed), sum(packed))
"""
        + END
    )
    scripts.compare(source, share=0.85)


def test_double_backward(scripts):
    source = (
        SETUP
        + """
for i in range(6):
    x, y = batch(i)
    x.requires_grad_()
    optimizer.zero_grad()
    out = model(x)
    [slope] = torch.autograd.grad(out.square().mean(), x, create_graph=True)
    loss = F.cross_entropy(out, y) + slope.square().sum()
    loss.backward()
    optimizer.step()
"""
        + END
    )
    scripts.compare(source, share=1.05)  # what two graphs share is not evicted: below its own peak it is refused


def test_two_backward_passes_over_one_graph(scripts):
    source = (
        SETUP
        + """
for i in range(6):
    x, y = batch(i)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    optimizer.step()
"""
        + END
    )
    scripts.compare(source, share=1.0)  # what came back stays for the second pass


def test_batch_norm_in_place_relu_and_frozen_layers(scripts):
    source = (
        """
from helper import *
torch.manual_seed(0)
model = nn.Sequential(*(layer for i in range(4) for layer in (
    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))), nn.Flatten(), nn.Linear(8 * 64, 4))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
for i in range(6):
    x, y = torch.randn(64, 8, 8, 8), torch.randint(0, 4, (64,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
        + END
    )
    result = scripts.compare(source, share=0.85).result
    assert result.certificate.sources_equal


def test_workers_of_a_data_loader_find_the_scripts_classes_and_nothing_of_memfit(scripts):
    source = (
        SETUP
        + """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2048
    def __getitem__(self, index):
        depth = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        return torch.full((8,), float(index)) / 2048, torch.tensor(index % 4), depth
loader = torch.utils.data.DataLoader(Rows(), 512, shuffle=True, num_workers=1, multiprocessing_context="fork")
for epoch in range(2):
    for x, y, depth in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(depth.sum().item())
"""
        + END
    )
    scripts.compare(source)


def test_a_default_device_and_a_context_around_the_model(scripts):
    source = (
        """
from helper import *
torch.manual_seed(0)
torch.set_default_device("cpu")
with torch.device("cpu"):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(6):"""
        + STEP
        + END
        + "print(torch._C._len_torch_function_stack() > 3)\ntorch.set_default_device(None)\n"
    )
    assert scripts.compare(source).result.installed
