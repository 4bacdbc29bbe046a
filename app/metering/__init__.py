"""What tokens cost and whether the books balance: prices, the ledger's arithmetic, reconciliation."""
