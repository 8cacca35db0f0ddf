"""What several processes share: collectives, sharded weights, failures, and the output of ranks other than 0."""
