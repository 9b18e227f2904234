"""The job: ranks that find one another, files, memory that they share, how a job ends."""
