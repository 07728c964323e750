"""Running a function of a model that is never whole: the method `run`."""
