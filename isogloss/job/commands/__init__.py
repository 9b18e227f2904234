"""What this job starts beside itself, as a command."""
