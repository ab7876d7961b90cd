"""Every case runs twice: with torch's own storage, and with ours. What comes of it must be the same."""
