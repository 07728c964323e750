"""What-ifs of plans, the search for devices on which a model fits, and functions that are compiled beforehand."""
