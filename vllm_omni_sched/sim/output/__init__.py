"""What a run leaves behind: numbers with where they are from, pictures, a trace."""
