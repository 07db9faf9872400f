"""A CUDA without a device, for tests on machines without a GPU; see its README.md."""

from testing.null_cuda.books import Device, NullCuda, loading
from testing.null_cuda.build import Libraries, NullCudaUnavailable, build

__all__ = ["Device", "Libraries", "NullCuda", "NullCudaUnavailable", "build", "loading"]
