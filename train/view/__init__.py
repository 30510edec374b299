"""`bench view`: a job's tokens to look at, in a browser on this machine, in one file, or in the terminal."""
