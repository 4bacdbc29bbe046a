"""What a developer runs: set-up, checks, benchmarks and the built-in model's training."""
