"""Reaches nodes by ssh: sets a bare host up, starts and ends a run on a set of hosts, measures them. No torch."""
