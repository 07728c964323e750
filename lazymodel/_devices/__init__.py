"""Devices, here or not: their memory, their topologies, reports of compilers, and agreement between processes."""
