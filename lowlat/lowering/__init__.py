"""Lowering turns Programs into launches by two tables: each operation's own kernels (`operations`), and fusions.

`fusion` cuts a program by the second table, `lower` binds what it finds to buffers. `gemm_fusions`, `row_fusions`,
`step_fusions` and `moe_fusions` hold the entries, `prefill_gemm` and `prefill_attention` the kernels of prefill that
take libraries, `memory` counts beforehand what all of it takes. Nothing here compiles, launches or captures.
"""
