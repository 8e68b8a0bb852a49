"""This machine: memory, GPUs, processes and their ends, ports and folders."""
