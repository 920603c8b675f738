"""Small programs that MPI and slots start; each runs alone, without this package."""
