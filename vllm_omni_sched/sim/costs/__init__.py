"""What work costs on which machine, and who says so."""
