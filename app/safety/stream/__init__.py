"""The second stage of safety: answers, delta by delta, while they are generated."""
