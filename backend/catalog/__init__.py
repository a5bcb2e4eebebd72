"""What a file is, and whether it will fit. No torch; families are handed in, never imported."""
