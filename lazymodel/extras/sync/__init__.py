"""Live models move: to other shardings, and from a trainer to a sampler."""
