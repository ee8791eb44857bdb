"""What every system shares: cases, workers, results, and the tables of them."""
