"""How a Program is covered with kernels: the operations' kernels, and the fusions of several into one."""
