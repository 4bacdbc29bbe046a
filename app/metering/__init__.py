"""Metering: limits, budgets, prices, usage, and the check that the ledger balances."""
