"""Init programs: inspecting jaxprs, recipes, and compiling and running them."""
