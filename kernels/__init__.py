"""This package has kernels by kind, the operations' references in torch, and the toolchain. It knows no requests."""
