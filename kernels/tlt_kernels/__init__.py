"""Triton kernels, each in a folder beside its PyTorch reference; `dispatch` is how the project calls them."""
