"""Tree builders: from ranked continuations to the nodes that are worth verifying."""
