"""The sharding pass: rules, roles, `auto`, and the verbs `shard` and `explain`."""
