"""Short programs that use this package as a client, an operator or a batch job does; see README.md beside this file."""
