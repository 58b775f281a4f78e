"""``gpuckpt run``: a command as a supervised child, with an HTTP gate in front that suspends it when idle and resumes it on demand."""
