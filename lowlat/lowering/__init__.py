"""Lowering turns Programs into kernel and library calls by two tables: implementations of operations, and fusions.

`operations` has the first table. `gemm_fusions`, `row_fusions`, `step_fusions`, `moe_fusions`, `recurrent_fusions` and
`prefill_fusions` have the entries of the second. `fusion` cuts a program into groups by it, and `lower` makes each
group's calls. `prefill_gemm` and `prefill_attention` also call libraries. `memory` computes the memory that lowered
programs need. This package does not compile, launch or capture.
"""
