"""Records of Keras while a model is built: variables without values, weight files that are not read."""
