"""The maximal update parametrization from two abstract builds: `mup`; and whether it holds: `coordinate_check`."""
