"""Devices, here or not: their memory, their topologies, what compilers say, and how processes agree."""
