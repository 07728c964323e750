"""From devices, or from another checkpoint, into files: the method `save`."""
