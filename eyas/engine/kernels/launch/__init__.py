"""How kernels are launched, and compiled before they are needed."""
