"""Sources of jobs: a file per dataset, and a table of their names."""
