"""Chorus on a virtual clock: the modules that decide in production, in a world that loses, doubles, delays and kills.

    one seed ──> weather, faults, load ──> actors (router, replica, relay, conversation, client)
                                              │ each wraps the pure code of its service, and does what its shell does
                                              v
                 checkers: what must hold, seen from outside          a violation prints the line that shows it again

Imports the pure modules of all services, and nothing else of them.
"""
