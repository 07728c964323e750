"""Init programs: what is asked of a jaxpr, recipes, and compiling and running them."""
