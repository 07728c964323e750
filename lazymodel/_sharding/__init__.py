"""The sharding pass: rules, roles, `auto`, and the methods `shard` and `explain`."""
