"""The digest that both ends of a weight sync compare, and the shapes that a checkpoint announces."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from verl_tts.rollout.weights import digest, read_shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "b.weight": (4,), "c": ()}
    return {name: torch.rand(shape, generator=generator).mul(100).to(dtype) for name, shape in shapes.items()}


@given(st.permutations(["a.weight", "b.weight", "c"]), st.sampled_from(DTYPES))
def test_the_order_of_names_plays_no_part(order, dtype):
    given_tensors = tensors(dtype)
    assert digest({name: given_tensors[name] for name in order}) == digest(given_tensors)


@settings(max_examples=200)
@given(st.sampled_from(["a.weight", "b.weight", "c"]), st.data())
def test_one_bit_changes_it(name, data):
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        changed = tensors(dtype)
        before = digest(changed)
        flat = changed[name].reshape(-1).clone()
        integers = flat.view(torch.int32 if bits == 32 else torch.int16)
        bit = data.draw(st.integers(0, bits - 1))
        integers[data.draw(st.integers(0, len(flat) - 1))] ^= (1 << bit) if bit < bits - 1 else -(1 << bit)
        changed[name] = flat.reshape(changed[name].shape)
        assert digest(changed) != before


def test_names_and_types_are_part_of_it():
    whole = tensors()
    swapped = whole | {"a.weight": whole["a.weight"] + 1}
    renamed = {f"{name}.other": tensor for name, tensor in whole.items()}
    exact = {"x": torch.zeros(3, dtype=torch.float32)}, {"x": torch.zeros(3, dtype=torch.int32)}
    assert len({digest(whole), digest(swapped), digest(renamed), digest({})}) == 4
    assert digest({"x": torch.ones(2)}) != digest({"x": torch.ones(2).view(torch.int32)})
    assert digest(exact[0]) == digest(exact[1]) == 0, "all bits are zero: a sum of nothing"


def test_the_layout_in_memory_plays_no_part_and_what_is_summed_stays_as_it_is():
    square = torch.rand(6, 4)
    transposed = square.t().contiguous().t()
    parameter = torch.nn.Parameter(square)
    assert not transposed.is_contiguous()
    assert digest({"a": square}) == digest({"a": transposed}) == digest({"a": parameter})
    assert torch.equal(square, transposed)


def test_it_is_a_number_that_json_and_ray_carry():
    big = {"a": torch.full((1000,), -1.0)}
    assert 0 <= digest(big) < 2**63


def test_shapes_are_read_from_every_file_of_a_checkpoint(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "model-00001.safetensors")
    save_file({"c": torch.zeros(4)}, tmp_path / "model-00002.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    assert read_shapes(tmp_path) == {"a": (2, 3), "b": (), "c": (4,)}


def test_shapes_of_the_tiny_checkpoint_are_those_of_its_tensors(tiny_checkpoint):
    from safetensors import safe_open

    with safe_open(tiny_checkpoint / "model.safetensors", framework="pt") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert read_shapes(tiny_checkpoint) == expected
