import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fluxray.memory.live import FusedAttention, LiveBytes, flops_again, measure_block


class Attention(nn.Module):
    def __init__(self, width: int, head: int):
        super().__init__()
        self.head = head
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden):
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.inputs(hidden).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + self.output(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden):
        return self.down(nn.functional.gelu(self.up(hidden)))


def meta(module: nn.Module, *shape: int):
    return module.to(device="meta", dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16, device="meta")


def saved_bytes(module, hidden) -> int:
    storages = {}
    known = {id(t.untyped_storage()) for t in (*module.parameters(), hidden)}

    def pack(tensor):
        storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), FusedAttention():
        output = module(hidden)
    storages[id(output.untyped_storage())] = output.untyped_storage()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in known)


def test_what_is_kept_is_what_autograd_saves_and_the_output():
    for made in (Attention(64, 16), Mlp(64)):
        module, hidden = meta(made, 2, 32, 64)
        assert measure_block(module, (hidden,), {}).kept == saved_bytes(module, hidden.requires_grad_())


def test_an_mlp_counted_by_hand():
    width, tokens = 64, 128
    module, hidden = meta(Mlp(width), 1, tokens, width)
    found = measure_block(module, (hidden,), {})
    wide, narrow, weight = 2 * 4 * width * tokens, 2 * width * tokens, 2 * 4 * width * width
    assert found.kept == 2 * wide + narrow
    bias = 2 * width
    assert found.peak == found.kept + wide + weight + bias  # gradients of the wide activation, the second weight and its bias


def test_attention_holds_no_scores_and_lets_go_of_what_it_does_not_keep():
    width, length = 64, 512
    module, hidden = meta(Attention(width, 16), 1, length, width)
    narrow, sums = 2 * width * length, 4 * (width // 16) * length
    assert measure_block(module, (hidden,), {}).kept == 3 * narrow + narrow + sums + narrow
    assert measure_block(module, (hidden,), {}).peak < 2 * length * length * (width // 16)


def test_nothing_stays_behind():
    module, hidden = meta(Mlp(64), 1, 16, 64)
    measure_block(module, (hidden,), {})
    assert all(parameter.grad is None for parameter in module.parameters())
    assert hidden.requires_grad is False


def test_frozen_parameters_need_no_gradient():
    module, hidden = meta(Mlp(64), 1, 128, 64)
    trained = measure_block(module, (hidden,), {}).peak
    module.requires_grad_(False)
    assert measure_block(module, (hidden,), {}).peak < trained


def test_memory_that_is_freed_no_longer_counts():
    with LiveBytes([]) as live:
        one = torch.empty(100, dtype=torch.uint8, device="meta")
        two = one.view(10, 10)
        assert live.now == 100
        del one, two
        assert (live.now, live.peak) == (0, 100)


def test_a_last_matrix_product_is_not_needed_again():
    width, rows = 32, 8
    with torch.device("meta"):
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        hidden = torch.empty(rows, width)
    product = 2 * rows * width * 4 * width
    assert flops_again(nn.Sequential(up, nn.GELU(), down), (hidden,), {}) == product
    assert flops_again(nn.Sequential(up, nn.GELU(), down, nn.GELU()), (hidden,), {}) == 2 * product
