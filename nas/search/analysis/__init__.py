"""Reading a study: its record, snapshots, reports, front, agreement, plots, archives."""
