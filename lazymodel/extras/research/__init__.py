"""Research on models: initial values, widths and depths, larger models from smaller ones, differences."""
