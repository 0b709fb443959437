"""What every test gets: fixed seeds, uninitialised memory that shows, and skips without a GPU."""

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

if not torch.cuda.is_available():
    # Before any kernel is defined: without a GPU, Triton's kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny models gain nothing from threads, and tests run side by side; notebooks' kernels inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, with the reason, where there is no CUDA GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random states, so that each also passes alone."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what is fixed here
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def uninitialised_memory_shows() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN, so that a part never written is noticed.

    torch's own switch (torch.utils.deterministic.fill_uninitialized_memory) works only together
    with deterministic algorithms, which would test other kernels than the ones people run.
    """
    # `with torch.device("meta")` remembers which functions take a device: let it be the real ones.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_filled(*args, **kwargs) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype == torch.uint8:  # bytes that will be read as floats
            tensor.fill_(0xFF)
        return tensor

    return allocate_filled
