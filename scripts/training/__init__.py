"""What trains and evaluates the shipped models, and their data."""
