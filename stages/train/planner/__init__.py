"""Memory, time and search of parallel layouts: pure functions of sizes; nothing here needs torch."""
