"""What single flags ask of a student, each behind a door of its own."""
