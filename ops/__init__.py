"""The operator's command and the embedded servers behind `chorus up`."""
