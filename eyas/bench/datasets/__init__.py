"""Where jobs come from: a file per dataset, and a table of their names."""
