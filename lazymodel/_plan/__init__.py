"""The method `plan`: predicts memory, bytes and programs of a load before any data is read."""
