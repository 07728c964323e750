"""What-ifs of plans, and the search for devices on which a model fits."""
