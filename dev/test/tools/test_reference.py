"""The PyTorch oracles compute the numbers that are committed, and those numbers tell right from wrong."""
import sys
from pathlib import Path

import numpy as np
import pytest

import reference
import reference_diloco

try:
    import torch
    torch.set_num_threads(1)  # the models are small: more threads only wait for each other
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed: the committed numbers are "
                                                       "used without computing them again")


def test_philox_gives_random123s_known_answers():
    words = [reference.random_bits(0, 0, [0])[:, 0]]
    # counter and key all ones: index fills words 0 and 1, draw and use words 2 and 3
    words.append(reference.random_bits(2**64 - 1, 2**32 - 1, [2**64 - 1], 2**32 - 1)[:, 0])
    assert [f"{word:08x}" for word in np.concatenate(words)] == [
        "6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8", "408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@pytest.mark.parametrize("format, sent, expected", [
    ("fp4", [1, -0.75, 0.7499, 2**-6, 2**-7, -2**-7, 0.99 * 2**-7, 3 * 2**-7, 2.99 * 2**-7, -0.5],
     [1, -1, 0.5, 2**-6, 2**-6, -2**-6, 0, 2**-5, 2**-6, -0.5]),
    ("fp4_e2m1", [6, -0.25, 0.2501, 0.75, 1.25, -1.75, 2.5, -3.5, 3.4999, 5, 5.001, -0.75],
     [6, 0, 0.5, 1, 1, -2, 2, -4, 3, 4, 6, -1])])
def test_four_bits_are_the_nearest_code(format, sent, expected):
    """Ties go away from zero in E3M0, to the even code in E2M1."""
    block = np.zeros(128)
    block[:len(sent)] = sent
    read = reference_diloco.through_four_bits(block, format)
    assert list(read[:len(sent)]) == expected
    assert not read[len(sent):].any()


def test_the_scale_of_a_block_is_rounded_up_so_that_nothing_clips():
    for largest in [1.0, 1.0 + 2**-8, 1.0 + 2**-20, 3.1e-7, 0.3, 1e-30]:
        scale = reference_diloco.bf16_rounded_up(largest)
        assert largest <= scale <= largest * (1 + 2**-7)
        assert np.float32(scale).view(np.uint32) & 0xFFFF == 0


def test_balanced_fragments_hold_about_as_much():
    blocks = [(0, 128), (128, 256), (256, 384), (384, 1024), (1024, 1400)]
    assert reference_diloco.balanced(blocks, 3) == [
        [(0, 128), (128, 256), (256, 384)], [(384, 1024)], [(1024, 1400)]]


@pytest.mark.parametrize("name", reference_diloco.SETTINGS)
def test_fragments_are_the_model_once(name):
    options = reference_diloco.SETTINGS[name]
    shape = reference_diloco.model_shape(options)
    fragments = reference_diloco.make_fragments(shape, options["--fragment-layers"],
                                                options["--fragment-pattern"])
    blocks = sorted(block for fragment in fragments for block in fragment)
    size = sum(int(np.prod(dimensions)) for _, dimensions in reference.tensors(shape))
    assert [begin for begin, _ in blocks] == [0] + [end for _, end in blocks[:-1]] and blocks[-1][1] == size


def test_the_token_shard_is_the_one_committed():
    shard = reference_diloco.token_shard(reference_diloco.make_tokens())
    assert reference_diloco.TOKENS.read_bytes() == shard


@needs_torch
def test_the_model_reference_is_what_pytorch_computes():
    for name, shape in reference.SHAPES.items():
        assert reference.check(reference.FILES / name, shape)


@needs_torch
def test_a_changed_reference_is_noticed(tmp_path):
    _, arrays = reference.read(reference.FILES / "reference.bin")
    arrays["gradient.lnfw"] = arrays["gradient.lnfw"] * np.float32(1.00001)
    reference.write(tmp_path / "reference.bin", reference.REFERENCE_SHAPE, arrays)
    assert not reference.check(tmp_path / "reference.bin", reference.REFERENCE_SHAPE)


def test_a_nan_does_not_pass_for_the_model_reference(tmp_path, monkeypatch):
    shape = reference.REFERENCE_SHAPE
    _, arrays = reference.read(reference.FILES / "reference.bin")
    monkeypatch.setattr(reference, "compute", lambda shape: arrays)
    assert reference.check(reference.FILES / "reference.bin", shape)
    changed = {**arrays, "gradient.lnfw": arrays["gradient.lnfw"] * np.nan}
    reference.write(tmp_path / "reference.bin", shape, changed)
    assert not reference.check(tmp_path / "reference.bin", shape)


@pytest.mark.parametrize("kind", [None, *reference_diloco.TOLERANCE])
def test_a_nan_does_not_pass_for_the_workers_reference(kind, monkeypatch):
    def results(options, *_):
        found, = (reference_diloco.stored(name)[0] for name, wanted in reference_diloco.SETTINGS.items()
                  if wanted.items() <= options.items())
        if kind == "tensor_norms":
            found[kind]["wte"] = np.nan
        elif kind == "sample":
            found[kind][1] = np.nan
        elif kind:
            found[kind][1][2] = np.nan
        return found

    monkeypatch.setattr(reference_diloco, "results", results)
    monkeypatch.setattr(sys, "argv", ["reference_diloco.py", "--check"])
    with pytest.raises(SystemExit) as exit:
        reference_diloco.main()
    assert exit.value.code == (1 if kind else 0)


@needs_torch
def test_adamw_is_torch_optim_adamw():
    generator = torch.Generator().manual_seed(1)
    start, gradients = (torch.randn(n, 50, dtype=torch.float64, generator=generator) for n in (1, 5))
    mask = torch.ones(50, dtype=torch.float64)
    ours, flat = reference.AdamW(start[0], mask, **reference.ADAMW), start[0].clone()
    theirs = start[0].clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        flat = ours.update(flat, gradient)
        theirs.grad = gradient
        optimizer.step()
    assert torch.allclose(flat, theirs.detach(), rtol=0, atol=1e-14)


@needs_torch
def test_the_outer_step_is_torch_optim_sgd_with_nesterov():
    options = {**reference_diloco.COMMON, **reference_diloco.SETTINGS["classic"]}
    start = torch.linspace(-1, 1, 40, dtype=torch.float64)
    worker = reference_diloco.Worker(start, options, None)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=options["--outer-lr"], momentum=options["--outer-momentum"],
                                nesterov=True)
    for step in range(4):
        delta = torch.sin(start * (step + 1))
        worker.apply(slice(0, 40), delta)
        theirs.grad = delta
        optimizer.step()
    assert torch.allclose(worker.parameters, theirs.detach(), rtol=0, atol=1e-14)


@needs_torch
def test_the_workers_reference_is_what_pytorch_computes():
    assert reference_diloco.check(reference_diloco.make_tokens())


@needs_torch
def test_wrong_programs_are_outside_the_tolerance():
    assert reference_diloco.all_mistakes_show(reference_diloco.make_tokens())


@needs_torch
@pytest.mark.parametrize("option, wrong", [
    ("--outer-lr", 0.601), ("--outer-momentum", 0.799), ("--fragment-pattern", "strided"),
    ("--inner-steps", 6)])
def test_a_small_mistake_is_outside_the_tolerance(option, wrong):
    right = reference_diloco.SETTINGS["streaming_fp4"]
    expected, tolerance = reference_diloco.stored("streaming_fp4")
    found = reference_diloco.results({**right, option: wrong}, reference_diloco.make_tokens())
    difference = reference_diloco.errors(right, found, expected)
    assert any(difference[kind] > tolerance[kind] for kind in difference), difference
